"""The contract of `_core`: what csrc offers and what the cdef classes hold."""

from libc.stdint cimport int64_t, uint8_t, uint64_t


cdef extern from "bits.h" nogil:
    int64_t km_words(int64_t nbits)
    bint km_get(const uint64_t *w, int64_t i)
    void km_set(uint64_t *w, int64_t i)
    void km_clear(uint64_t *w, int64_t i)
    void km_fill(uint64_t *w, int64_t start, int64_t stop, bint value)
    int64_t km_count(const uint64_t *w, int64_t nbits)
    int64_t km_next(const uint64_t *w, int64_t start, int64_t stop, bint value)
    int64_t km_prev(const uint64_t *w, int64_t start, int64_t stop, bint value)
    uint64_t km_low_mask(int64_t n)
    bint km_clean(const uint64_t *w, int64_t nbits)


cdef extern from "rules.h" nogil:
    ctypedef enum km_kind:
        KM_FULL
        KM_WINDOW
        KM_CHUNKED
        KM_STATE

    ctypedef struct km_group:
        km_kind kind
        bint eagle
        bint cacheable
        int64_t block_size
        int64_t span

    ctypedef struct km_reach:
        int64_t alignment
        int64_t retention
        int64_t boundaries[2]
        int n_boundaries

    int64_t KM_DENSE
    int64_t km_ceil_div(int64_t a, int64_t b)
    int64_t km_align_down(int64_t value, int64_t unit)
    int km_replay_boundaries(int64_t num_prompt_tokens, int64_t alignment, bint eagle, int64_t *out)
    int64_t km_window_need(const km_group *g, bint eagle)
    bint km_reach_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                       uint64_t *w)


cdef extern from "search.h" nogil:
    ctypedef struct km_presence:
        const uint64_t *maybe
        const uint64_t *known
        int64_t nbits
        int64_t stride

    ctypedef struct km_need:
        int64_t first
        int64_t stop
        int64_t stride

    ctypedef struct km_set_state:
        km_group group
        km_presence presence
        int64_t first
        int64_t len
        int64_t hit
        bint has_need
        km_need need

    ctypedef struct km_search:
        km_set_state *sets
        int n_sets
        int64_t hash_block
        int64_t alignment
        bint partial
        bint collect

    int64_t km_find_hit(km_search *s, int64_t max_length, bint eagle)
    bint km_tail_boundary(const km_search *s, km_set_state *set, const km_presence *presence,
                          int64_t hit, int64_t *boundary)


cdef class Bitset:
    cdef uint64_t *words  # km_words(n) words, at least one; bits at and past n are zero
    cdef int64_t n
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t exports
    cdef void copy_range(self, Bitset out, int64_t start) noexcept
    cdef Bitset combined(self, other, bint both)


cdef class BlockHashes:
    # Flat: `view` holds a contiguous buffer of `n` digests of `size` bytes at `data`.
    # List: `items` holds the bytes objects and `size` is 0.
    cdef Py_buffer view
    cdef bint has_view
    cdef const unsigned char *data
    cdef list items
    cdef Py_ssize_t size
    cdef readonly Py_ssize_t n
    cdef readonly object origin  # DigestOrigin, or None when it is not known
    cdef const unsigned char *at(self, Py_ssize_t i, Py_ssize_t *size) except NULL
    cdef BlockHashes with_origin(self, object origin)


cdef class KeyBuilder:
    cdef readonly str prefix
    cdef readonly str suffix
    cdef readonly bint strip
    cdef bytes head
    cdef bytes tail
    cdef bint ascii
    cdef object build(self, const unsigned char *digest, Py_ssize_t size)


cdef class CoordinatorCore:
    cdef km_group *groups
    cdef int *set_of  # per group; -1 when it is not cacheable
    cdef int *leaders  # per set: its first group
    cdef int *members  # per set: how many groups
    cdef int n_groups
    cdef int n_sets
    cdef readonly int64_t hash_block
    cdef readonly int64_t alignment
    cdef int64_t retention
    cdef readonly bint partial
    cdef readonly bint any_eagle
    cdef bint any_chunked
    cdef int64_t unit(self) noexcept
    cdef int64_t stride(self, int group) noexcept
    cdef void prepare(self, km_search *s, km_set_state *sets, bint collect) noexcept
    cdef tuple group_masks(self, km_set_state *sets)
    cdef list joint_presence(self, tuple present)


cdef class LookupCore:
    cdef CoordinatorCore coord
    cdef BlockHashes hashes
    cdef list builders  # per group a tuple of KeyBuilder
    cdef int64_t num_tokens
    cdef int64_t local_tokens
    cdef int64_t token_len
    cdef int64_t limit
    cdef bint staged
    cdef int64_t batch
    cdef int64_t growth
    cdef int64_t width
    cdef int64_t hint
    cdef int64_t slack
    cdef list maybe  # per group; None when it is not cacheable
    cdef list known
    cdef list set_maybe  # per set
    cdef list set_known
    cdef list pending_groups  # (group, bits asked)
    cdef int64_t expected
    cdef int64_t hit  # -1 while undecided
    cdef bint no_masks
    cdef bint tail_need
    cdef bint uneven  # groups of one set may hold different blocks
    cdef tuple masks
    cdef list tails
    cdef readonly int64_t asked
    cdef readonly int64_t probes
    cdef readonly int64_t present
    cdef readonly int64_t unknown  # keys whose answer says neither present nor absent
    cdef readonly int64_t malformed  # those of them whose answer does not fit the call
    cdef readonly int64_t exact_keys  # keys that `exact` asks
    cdef void finish_empty(self) noexcept
    cdef start_presence(self, held)
    cdef void prepare(self, km_search *search, km_set_state *sets, bint collect) noexcept
    cdef mark_held(self, km_group *group, int64_t stride, item, Bitset maybe, Bitset known)
    cdef bint hopeless(self, km_search *search, km_set_state *sets)
    cdef int first_need(self, km_set_state *sets) noexcept
    cdef bint decide(self, km_search *search, km_set_state *sets, int *set_index,
                     km_need *need) except -1
    cdef int64_t ask(self, int set_index, int64_t first, int64_t stop, int64_t stride,
                     int64_t most, list asked) except -1
    cdef list choose(self, km_search *search, km_set_state *sets, int set_index, km_need need)
    cdef ask_left(self, km_search *search, km_set_state *set_state, int set_index, km_need need,
                  list asked)
    cdef ask_boundaries(self, km_search *search, km_set_state *sets, int64_t length, int64_t count,
                        list asked)
    cdef add_keys(self, int group, Bitset bits, list keys)
    cdef count_unknown(self, list given)
    cdef join_sets(self)


cdef class HitHints:
    cdef uint64_t *slots
    cdef int64_t mask
    cdef uint64_t tag(self, BlockHashes hashes, int64_t index) except? 0
    cdef int64_t longest(self, BlockHashes hashes, int64_t per_unit, int64_t units) except -1
