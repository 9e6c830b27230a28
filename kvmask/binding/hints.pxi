# HitHints: where hits of earlier requests ended. A hint only chooses what to ask in the first call;
# the answer always comes from the store.

# A shorter step than this would fill the table sixteen times faster for blocks of 16 tokens, and
# the blocks asked past a hint make up for what a longer one misses.
STEP_TOKENS = 256
cdef int64_t c_step_tokens = STEP_TOKENS


cdef inline int64_t hint_step(int64_t alignment) noexcept:
    return alignment * km_ceil_div(c_step_tokens, alignment)


cdef int64_t steps(BlockHashes digests, hash_block, alignment, num_tokens, int64_t *per_unit,
                   int64_t *unit) except -1:
    """Steps of a prefix that have a digest; also hash blocks and tokens per step."""
    unit[0] = hint_step(as_int64(alignment, "alignment", 1, c_max_tokens))
    per_unit[0] = unit[0] // as_int64(hash_block, "hash_block", 1, unit[0])
    return min(
        as_int64(num_tokens, "num_tokens", 0, c_max_tokens) // unit[0], digests.n // per_unit[0]
    )


cdef uint64_t digest_tag(BlockHashes hashes, int64_t index) except? 0:
    """Eight bytes of a digest, mixed: a caller's digests need not be uniform."""
    cdef Py_ssize_t size = hashes.size
    cdef const unsigned char *data
    cdef uint64_t value = 0
    if hashes.items is None:
        data = hashes.data + index * size
    else:
        data = hashes.start_of(index, sizeof(uint64_t), &size)
    memcpy(&value, data, min(size, <Py_ssize_t>sizeof(value)))
    value *= 0x9E3779B97F4A7C15ULL
    value ^= value >> 32
    return value or 1


cdef class HitHints:
    """A fixed-size table of prefix digests that were reusable a moment ago.

    One 8-byte slot per prefix, direct-mapped: newer prefixes overwrite older ones. Prefixes are
    kept at steps of at least ``STEP_TOKENS`` tokens. Entries may be
    stale or lost at any time, which costs a call and never changes a result.

    Args:
        capacity: Slots, rounded up to a power of two, at most 2**24.
    """

    def __cinit__(self, capacity=1 << 20):
        cdef int64_t wanted = as_int64(capacity, "capacity", 1, 1 << 24)
        cdef int64_t n = 1
        while n < wanted:
            n *= 2
        self.mask = n - 1
        self.slots = <uint64_t *>calloc(n, sizeof(uint64_t))
        if self.slots == NULL:
            raise MemoryError(f"no memory for {n} hints")

    def __dealloc__(self):
        free(self.slots)

    @property
    def capacity(self):
        """Number of slots."""
        return self.mask + 1

    cdef int64_t longest(self, BlockHashes hashes, int64_t per_unit, int64_t units) except -1:
        """Units of the longest known prefix, taking it that shorter ones are known as well."""
        cdef int64_t low = 0, high = 1, middle
        cdef uint64_t value
        while high <= units:
            value = digest_tag(hashes, high * per_unit - 1)
            if self.slots[value & self.mask] != value:
                break
            low = high
            high *= 2
        if high > units + 1:
            high = units + 1
        while high - low > 1:
            middle = (low + high) // 2
            value = digest_tag(hashes, middle * per_unit - 1)
            if self.slots[value & self.mask] == value:
                low = middle
            else:
                high = middle
        return low

    def predict(self, hashes, hash_block, alignment, num_tokens):
        """Tokens of the longest prefix, at most ``num_tokens``, that was reusable before.

        Args:
            hashes: One digest per hash block of the request.
            hash_block: Tokens per digest.
            alignment: What hits are multiples of, in tokens.
            num_tokens: The most tokens that are of interest.
        """
        cdef BlockHashes digests = as_hashes(hashes)
        cdef int64_t per_unit, unit
        cdef int64_t units = steps(digests, hash_block, alignment, num_tokens, &per_unit, &unit)
        return self.longest(digests, per_unit, units) * unit

    def learn(self, hashes, hash_block, alignment, num_tokens):
        """Remember that the first ``num_tokens`` tokens are reusable.

        Args:
            hashes: One digest per hash block of the request.
            hash_block: Tokens per digest.
            alignment: What hits are multiples of, in tokens.
            num_tokens: Tokens of the prefix.
        """
        cdef BlockHashes digests = as_hashes(hashes)
        cdef int64_t per_unit, unit, i
        cdef int64_t units = steps(digests, hash_block, alignment, num_tokens, &per_unit, &unit)
        cdef uint64_t value
        for i in range(self.longest(digests, per_unit, units) + 1, units + 1):
            value = digest_tag(digests, i * per_unit - 1)
            self.slots[value & self.mask] = value
