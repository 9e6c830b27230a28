# Store keys: prefix + hex digest + suffix, written straight into new str objects.

cdef const char *HEX_DIGITS = "0123456789abcdef"


cdef class KeyBuilder:
    """Keys of one namespace: ``prefix`` + lower-case hex of a digest + ``suffix``.

    Args:
        prefix: Text before the digest, its separator included.
        suffix: Text after it.
        as_number: Whether the digest is written as a number, without leading zeros.
    """

    def __cinit__(self, str prefix not None, str suffix not None="", *, bint as_number=False):
        self.prefix = prefix
        self.suffix = suffix
        self.as_number = as_number
        self.ascii = prefix.isascii() and suffix.isascii()
        self.head = prefix.encode("ascii") if self.ascii else b""
        self.tail = suffix.encode("ascii") if self.ascii else b""
        self.head_text = PyBytes_AS_STRING(self.head)
        self.tail_text = PyBytes_AS_STRING(self.tail)
        self.head_size = PyBytes_GET_SIZE(self.head)
        self.tail_size = PyBytes_GET_SIZE(self.tail)

    cdef tuple parts(self):
        return self.prefix, self.suffix, self.as_number

    def __reduce__(self):
        make = _partial(KeyBuilder, as_number=True) if self.as_number else KeyBuilder
        return make, (self.prefix, self.suffix)

    def __eq__(self, other):
        if not isinstance(other, KeyBuilder):
            return NotImplemented
        return self.parts() == (<KeyBuilder>other).parts()

    def __hash__(self):
        return hash(self.parts())

    cdef object build(self, const unsigned char *digest, Py_ssize_t size):
        cdef Py_ssize_t head = self.head_size, tail = self.tail_size
        cdef object key
        cdef char *out
        cdef bint half = False
        if self.as_number:
            while size > 1 and digest[0] == 0:
                digest += 1
                size -= 1
            half = digest[0] < 16
        if not self.ascii:
            return self.prefix + digest[:size].hex()[half:] + self.suffix
        # The string is written before anyone else sees it.
        key = PyUnicode_New(head + 2 * size - half + tail, 127)
        out = <char *>PyUnicode_1BYTE_DATA(key)
        memcpy(out, self.head_text, head)
        if half:
            out[head] = HEX_DIGITS[digest[0]]
            digest += 1
            size -= 1
            head += 1
        km_hex(digest, size, out + head)
        if tail:
            memcpy(out + head + 2 * size, self.tail_text, tail)
        return key


cdef tuple as_builders(object builders):
    cdef tuple out = tuple(builders)
    for item in out:
        if not isinstance(item, KeyBuilder):
            raise TypeError(f"`builders` must hold KeyBuilder objects, got {type(item).__name__}")
    return out


# Python gives memory back to the system one arena (1 MiB, some 6,500 keys) at a time, once all of
# it is free, and the next batch of keys pays for fresh pages: 55 instead of 15 ns per key from some
# 30,000 keys on. One key of every 4,096 stays alive until 16 younger ones do, which keeps up to 16
# arenas for the next batch to use again.
cdef enum:
    PIN_STRIDE = 4096
    PINNED = 16
cdef list pinned_keys = [None] * PINNED
cdef int64_t keys_built = 0


cdef pin_keys(list keys):
    global keys_built
    cdef int64_t n = PyList_GET_SIZE(keys)
    cdef int64_t i = PIN_STRIDE - 1 - keys_built % PIN_STRIDE
    while i < n:
        pinned_keys[(keys_built + i) // PIN_STRIDE % PINNED] = keys[i]
        i += PIN_STRIDE
    keys_built += n


cdef int64_t put_keys(list keys, int64_t position, tuple names, BlockHashes digests, Bitset bits,
                      int64_t blocks, int64_t first, int64_t per_block) except -1:
    """Writes keys into the empty places of a list from ``position`` on; returns where they end.

    See build_keys. ``bits`` is not longer than ``blocks``, and these have their digests.
    """
    cdef int64_t i = 0, position_of
    cdef Py_ssize_t size = digests.size, j, n_names = len(names)
    cdef bint flat = digests.items is None
    cdef const unsigned char *data
    # Most groups have one namespace: 26 of 380 instructions per key are the way through the tuple.
    cdef KeyBuilder alone = <KeyBuilder>names[0] if n_names == 1 else None
    while i < blocks:
        if bits is not None:
            i = km_next(bits.words, i, blocks, True)
            if i >= blocks:
                break
        if flat:
            data = digests.data + ((first + i + 1) * per_block - 1) * size
        else:
            position_of = (first + i + 1) * per_block - 1
            fetch_ahead(PySequence_Fast_ITEMS(digests.items), PyList_GET_SIZE(digests.items),
                        position_of, per_block)
            data = digests.at(position_of, &size)
        i += 1
        if alone is not None:
            key = alone.build(data, size)
            Py_INCREF(key)
            PyList_SET_ITEM(keys, position, key)
            position += 1
            continue
        for j in range(n_names):
            key = (<KeyBuilder>names[j]).build(data, size)
            Py_INCREF(key)
            PyList_SET_ITEM(keys, position, key)
            position += 1
    return position


def build_keys(builders, hashes, mask=None, start=0, scale=1):
    """Keys of the blocks from ``start`` on, in block order, each block's namespaces together.

    Block ``i`` is named by digest ``(i + 1) * scale - 1``; digests that do not fill a block are
    left out.

    Args:
        builders: One KeyBuilder per namespace.
        hashes: BlockHashes, or a sequence of bytes.
        mask: Bitset or sequence of bool over the blocks from ``start`` on; None means all.
        start: First block.
        scale: Hash blocks per block.

    Returns:
        list of str.

    Raises:
        ArgumentError: The mask reaches past the digests, or a number is out of range.
    """
    cdef tuple names = as_builders(builders)
    cdef BlockHashes digests = as_hashes(hashes)
    cdef int64_t first = as_int64(start, "start", 0, c_max_bits)
    cdef int64_t per_block = as_int64(scale, "scale", 1, c_max_bits)
    cdef int64_t blocks = digests.n // per_block - first
    cdef int64_t count
    cdef Bitset bits = None
    cdef list keys
    if blocks < 0:
        blocks = 0
    if mask is not None:
        bits = Bitset.from_bools(mask)
        if bits.n > blocks:
            raise ArgumentError(
                "`mask` must not be longer than the blocks from `start` on, "
                f"got {bits.n} and {blocks}"
            )
        blocks = bits.n
        count = km_count(bits.words, bits.n)
    else:
        count = blocks
    keys = PyList_New(count * len(names))
    put_keys(keys, 0, names, digests, bits, blocks, first, per_block)
    pin_keys(keys)
    return keys
