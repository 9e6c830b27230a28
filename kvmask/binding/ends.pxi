# HitEnds: where hits and requests ended, for renewals. Unlike HitHints, which knows every prefix
# that was reusable, it knows only the lengths at which something ended or branched off.

cdef class HitEnds:
    """A fixed-size table of the prefixes at which hits and requests ended.

    One 8-byte slot per prefix, direct-mapped: newer ends overwrite older ones. A lost or a wrong
    entry costs a renewal and never changes a result.

    Args:
        capacity: Slots, rounded up to a power of two, at most 2**24.
    """

    def __cinit__(self, capacity=1 << 18):
        cdef int64_t wanted = as_int64(capacity, "capacity", 1, 1 << 24)
        cdef int64_t n = 1
        while n < wanted:
            n *= 2
        self.mask = n - 1
        self.slots = <uint64_t *>calloc(n, sizeof(uint64_t))
        if self.slots == NULL:
            raise MemoryError(f"no memory for {n} ends")

    def __dealloc__(self):
        free(self.slots)

    @property
    def capacity(self):
        """Number of slots."""
        return self.mask + 1

    cdef int64_t slot(self, BlockHashes hashes, int64_t index, uint64_t *tag) except -1:
        # The two lowest bits of a slot count visits; the others tell digests apart.
        tag[0] = digest_tag(hashes, index) | 3
        return (tag[0] >> 2) & self.mask

    def visit(self, hashes, index, count=True):
        """Note that something ended at the prefix that a digest names.

        Args:
            hashes: BlockHashes or sequence of bytes.
            index: Index of the digest.
            count: A hit ended here, which counts as a visit. False only makes the end known.

        Returns:
            How many visits were counted before, at most 2.
        """
        cdef BlockHashes digests = as_hashes(hashes)
        cdef int64_t i = as_int64(index, "index", 0, digests.n - 1), slot
        cdef uint64_t tag = 0, visits = 0
        slot = self.slot(digests, i, &tag)
        if self.slots[slot] | 3 == tag:
            visits = (self.slots[slot] & 3) - 1
        # 1 stands for none, so that a slot in use is never 0.
        self.slots[slot] = (tag ^ 3) | (1 + min(visits + bool(count), <uint64_t>2))
        return visits

    def within(self, hashes, step, first, stop):
        """Which of the prefixes of ``step`` digests, twice as many and so on are known ends.

        Args:
            hashes: BlockHashes or sequence of bytes.
            step: Digests between one prefix and the next.
            first: The first prefix to look at, counted in steps from 1.
            stop: Where to end, this one left out.

        Returns:
            Ascending list of numbers of steps.
        """
        cdef BlockHashes digests = as_hashes(hashes)
        cdef int64_t each = as_int64(step, "step", 1, c_max_bits)
        cdef int64_t i = as_int64(first, "first", 1, c_max_bits)
        cdef int64_t end = min(as_int64(stop, "stop", 0, c_max_bits), digests.n // each + 1)
        cdef int64_t slot
        cdef uint64_t tag = 0
        cdef list found = []
        while i < end:
            slot = self.slot(digests, i * each - 1, &tag)
            if self.slots[slot] | 3 == tag:
                found.append(i)
            i += 1
        return found

    def clear(self):
        """Forget everything."""
        memset(self.slots, 0, (self.mask + 1) * sizeof(uint64_t))
