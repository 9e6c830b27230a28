# What only the vLLM adapter asks of the core: digests in a set, address rows that are kept, and
# whether vLLM's objects are what they were.


def present_bits(hashes, exists, group, scale, n):
    """Which blocks of a group a set of (group, digest) holds.

    Equivalent to: [(group, hashes[(i + 1) * scale - 1]) in exists for i in range(n)]

    Args:
        hashes: BlockHashes or sequence of bytes.
        exists: Set of (group id, digest as bytes); None holds everything.
        group: Group id.
        scale: Hash blocks per block.
        n: Blocks; those without a digest are absent.

    Returns:
        Bitset of n bits.
    """
    cdef BlockHashes digests = as_hashes(hashes)
    cdef int64_t per_block = as_int64(scale, "scale", 1, c_max_bits)
    cdef int64_t blocks = as_int64(n, "n", 0, c_max_bits)
    cdef Bitset bits = new_bitset(blocks)
    cdef Py_ssize_t size
    cdef const unsigned char *data
    cdef int64_t i
    if blocks > digests.n // per_block:
        blocks = digests.n // per_block
    if exists is None:
        km_fill(bits.words, 0, blocks, True)
        return bits
    if not isinstance(exists, (set, frozenset)):
        raise TypeError(f"`exists` must be a set or None, got {type(exists).__name__}")
    for i in range(blocks):
        data = digests.at((i + 1) * per_block - 1, &size)
        if PySet_Contains(exists, (group, PyBytes_FromStringAndSize(<const char *>data, size))):
            km_set(bits.words, i)
    return bits


cdef class BlockRows:
    """Address rows of a region table, kept per block: the pool's blocks come again and again.

    Args:
        regions: Regions.
        most: Addresses to keep, about 40 bytes each; rows past that are made every time.

    Attributes:
        block_bytes: Bytes of one block, over all regions.
    """

    def __cinit__(self, regions, Py_ssize_t most):
        self.regions = regions
        self.width = max(1, regions.num_regions)
        self.room = most // self.width
        self.kept = []
        self.size_row = regions.addresses([0])[1][0]
        self.block_bytes = sum(self.size_row)

    def addresses(self, list ids not None):
        """(Rows of addresses, rows of sizes), one per block id; nobody may change them.

        Raises:
            BlockIdError: An id is negative, or lies past the addresses of the table.
        """
        cdef Py_ssize_t n = PyList_GET_SIZE(ids), i, m = 0
        cdef list rows = [None] * n
        cdef list positions = [], unknown = [], made
        cdef PyObject *row
        cdef long long block
        cdef int overflow = 0
        for i in range(n):
            block = PyLong_AsLongLongAndOverflow(<object>PyList_GET_ITEM(ids, i), &overflow)
            if 0 <= block < PyList_GET_SIZE(self.kept):
                row = PyList_GET_ITEM(self.kept, block)
                if row is not <PyObject *>None:
                    rows[i] = <object>row
                    continue
            positions.append(i)
            unknown.append(<object>PyList_GET_ITEM(ids, i))
        if unknown:
            made = self.regions.addresses(unknown)[0]
            self.keep(unknown, made)
            for i in positions:
                rows[i] = made[m]
                m += 1
        return rows, [self.size_row] * n

    cdef keep(self, list ids, list made):
        cdef long long block
        cdef Py_ssize_t i, held
        for i in range(min(self.room, PyList_GET_SIZE(made))):
            block = ids[i]
            held = PyList_GET_SIZE(self.kept)
            # An id far past the others would make the list itself large.
            if block >= held + (1 << 20):
                continue
            if block >= held:
                self.kept.extend([None] * (max(block + 1, 2 * held) - held))
            if self.kept[block] is None:
                self.kept[block] = made[i]
                self.room -= 1


@cython.boundscheck(True)
def same_attributes(list seen not None):
    """Whether attributes have the values that were seen.

    Args:
        seen: Tuples of object, name of the attribute and value. A value that is the same object is
            not compared: of a list that may change in place, give a copy.
    """
    cdef tuple item
    for item in seen:
        try:
            if not PyObject_RichCompareBool(getattr(item[0], item[1]), item[2], Py_EQ):
                return False
        except (AttributeError, ValueError):  # arrays are compared one by one
            return False
    return True
