# Regions and addresses over csrc/layout.h, and block ids of any container.


cdef list _id_list(object block_ids):
    """Block ids as a list, whatever integer sequence or array they come in."""
    if type(block_ids) is list:
        return block_ids
    if isinstance(block_ids, (tuple, range)):
        return list(block_ids)
    if hasattr(block_ids, "tolist"):  # array.array, memoryview, NumPy, torch
        ids = block_ids.tolist()
        if type(ids) is list:
            return ids
    elif is_sequence(block_ids):
        return list(block_ids)
    raise BlockIdError(
        f"`block_ids` must be a sequence or one-dimensional array of integers, "
        f"got {type(block_ids).__name__}"
    )


cdef object _id_int(object item, Py_ssize_t i):
    """An entry that is no plain int, as one; bool, float and nested entries are refused."""
    value = item.tolist() if hasattr(item, "tolist") else item
    if not isinstance(value, bool):
        try:
            return _operator.index(value)
        except TypeError:
            pass
    raise BlockIdError(
        f"`block_ids` must hold integers, got {type(value).__name__} at index {i}"
    )


cdef class Regions:
    """A table of regions of equally many blocks, in the order of an object's bytes.

    Args:
        regions: (base, size, stride) triples in bytes; see csrc/layout.h.
        num_blocks: Blocks of every region.

    Raises:
        TypeError: A value is no integer.
        LayoutError: A value does not fit 64 bits without a sign, a size is zero, pieces of one
            region overlap, or an address of the table does not fit in 64 bits.
    """

    def __cinit__(self, list given not None, object num_blocks):
        cdef tuple regions = tuple(given)  # a row's own code could shorten the list
        cdef Py_ssize_t i, n = len(regions)
        cdef km_region *r
        cdef uint64_t last
        cdef object most = (1 << 64) - 1
        self.blocks = check_integer(num_blocks, "num_blocks", 1, (1 << 63) - 1, error=LayoutError)
        self.size_row = []
        self.table = <km_region *>calloc(n if n else 1, sizeof(km_region))
        if self.table == NULL:
            raise MemoryError
        self.num_regions = n
        for i in range(n):
            r = &self.table[i]
            name = f"regions[{i}]"
            if not isinstance(regions[i], (tuple, list)) or len(regions[i]) != 3:
                raise LayoutError(f"`{name}` must be 3 integers, got {shown(regions[i])}")
            base, size, stride = regions[i]
            r.base = check_integer(base, name, 0, most, error=LayoutError)
            r.size = check_integer(size, name, 0, most, error=LayoutError)
            r.stride = check_integer(stride, name, 0, most, error=LayoutError)
            if r.size == 0:
                raise LayoutError(f"`regions` must have sizes of at least 1, got 0 at index {i}")
            if self.blocks > 1 and r.stride < r.size:
                raise LayoutError(
                    f"`regions` must have strides of at least their size, "
                    f"got {r.stride} and {r.size} at index {i}"
                )
            if not km_region_last(r, <uint64_t>self.blocks, &last):
                raise LayoutError(
                    "`regions` must end within 64 bit addresses, "
                    f"got base {r.base}, size {r.size}, stride {r.stride} and "
                    f"{self.blocks} blocks at index {i}"
                )
            self.size_row.append(r.size)

    def __dealloc__(self):
        free(self.table)

    def find_overlap(self):
        """Indices of the first two regions that share a byte, or None; needs order by base."""
        cdef int64_t first = 0, second = 0
        cdef bint found
        cdef Py_ssize_t i
        for i in range(1, self.num_regions):
            if self.table[i].base < self.table[i - 1].base:
                raise ArgumentError(f"`regions` must be sorted by base, region {i} is not")
        with nogil:
            found = km_regions_find_overlap(self.table, self.num_regions, <uint64_t>self.blocks,
                                            &first, &second)
        return (first, second) if found else None

    def addresses(self, object block_ids, object null_block=None):
        """See KVLayout.addresses."""
        cdef list ids = _id_list(block_ids), rows = [], row
        cdef Py_ssize_t i = 0, j, n = self.num_regions
        cdef const km_region *table = self.table
        cdef PyObject *address
        cdef long long block, null = -1
        cdef int overflow
        cdef Py_ssize_t wanted = len(ids)
        if null_block is not None:
            null = as_int64(null_block, "null_block", 0, (1 << 63) - 1)
        for item in ids:
            number = item if PyLong_CheckExact(item) else _id_int(item, i)
            block = PyLong_AsLongLongAndOverflow(number, &overflow)
            if overflow or block < 0 or block >= self.blocks:
                raise BlockIdError(
                    f"`block_ids` must be at least 0 and below `num_blocks`, "
                    f"got {shown_integer(number)} at index {i} and {self.blocks}"
                )
            if block == null:
                raise BlockIdError(
                    f"`block_ids` must not name the null block, got {number} at index {i}"
                )
            # Filled before anything else can allocate, so that nobody sees the empty slots.
            row = PyList_New(n)
            for j in range(n):
                address = new_int(km_region_address(&table[j], <uint64_t>block))
                if address == NULL:
                    raise MemoryError
                set_item(row, j, address)
            # A row of ints is in no cycle. Out of the collector's lists it is not walked each time
            # some hundred further rows have been made, nor in later collections.
            PyObject_GC_UnTrack(row)
            rows.append(row)
            i += 1
        if i != wanted:
            raise BlockIdError(f"`block_ids` must not change while it is read, got {i} of {wanted}")
        return rows, [self.size_row] * len(rows)
