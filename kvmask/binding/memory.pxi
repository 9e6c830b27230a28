# Memory by address: copies between the pieces of blocks and one buffer per block, and views of it.
# An address says nothing of what lies there. Callers keep what they name alive.

cdef struct km_copy:
    char *piece
    char *buffer
    size_t size


cdef void _copy_all(km_copy *copies, Py_ssize_t n, bint out) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if out:
            memcpy(copies[i].piece, copies[i].buffer, copies[i].size)
        else:
            memcpy(copies[i].buffer, copies[i].piece, copies[i].size)


cdef uint64_t _plain(object value) except? 7:
    """A plain int. Another's own code could change the lists while they are read."""
    if not PyLong_CheckExact(value):
        raise TypeError(f"addresses and sizes must be int, got {type(value).__name__}")
    return value


cdef _copy_rows(list addresses, list sizes, list buffers, bint out):
    cdef Py_ssize_t i, j, n = 0, count = len(addresses)
    cdef list row, lengths
    cdef km_copy *copies
    cdef uint64_t buffer
    if len(sizes) != count or len(buffers) != count:
        raise ArgumentError(
            "`addresses`, `sizes` and `buffers` must have one entry per block, "
            f"got {count}, {len(sizes)} and {len(buffers)}"
        )
    for i in range(count):
        row, lengths = addresses[i], sizes[i]
        if row is None or lengths is None or len(row) != len(lengths):
            raise ArgumentError("`addresses` and `sizes` must have rows of equal lengths")
        n += len(row)
    copies = <km_copy *>malloc((n if n else 1) * sizeof(km_copy))
    if copies == NULL:
        raise MemoryError
    try:
        n = 0
        for i in range(count):
            row, lengths = addresses[i], sizes[i]
            buffer = _plain(buffers[i])
            for j in range(len(row)):
                copies[n].piece = <char *><size_t>_plain(row[j])
                copies[n].size = _plain(lengths[j])
                copies[n].buffer = <char *><size_t>buffer
                buffer += copies[n].size
                n += 1
        with nogil:
            _copy_all(copies, n, out)
    finally:
        free(copies)


def gather(list addresses not None, list sizes not None, list buffers not None):
    """Copy the pieces of each block, one after another, to one buffer.

    Args:
        addresses: Per block a list of the addresses of its pieces.
        sizes: Per block a list of their sizes in bytes.
        buffers: Per block the address to copy to.

    Raises:
        ArgumentError: There is not one entry per block, or not one size per piece.
        TypeError: A number is no plain int.
        OverflowError: A number does not fit 64 bits without a sign.
    """
    _copy_rows(addresses, sizes, buffers, False)


def scatter(list addresses not None, list sizes not None, list buffers not None):
    """The reverse of `gather`: from one buffer per block to its pieces."""
    _copy_rows(addresses, sizes, buffers, True)


def memory_at(uint64_t address, Py_ssize_t size):
    """Bytes at an address, as a memoryview to read. It does not keep them alive."""
    if size < 0:
        raise ArgumentError(f"`size` must be at least 0, got {size}")
    return PyMemoryView_FromMemory(<char *><size_t>address, size, PyBUF_READ)
