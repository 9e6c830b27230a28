"""The contract of `_core`: what csrc offers and what the cdef classes hold."""

from cpython.object cimport PyObject
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
    bint km_has_mask(km_kind kind)
    void km_fill_held(const km_group *g, int64_t tokens, int64_t stride, uint64_t *w,
                      int64_t nbits)
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
    bint km_find_set(const km_search *s, km_set_state *set, int64_t max_length, bint drop)
    int64_t km_eagle_margin(const km_search *s, const km_group *g)
    bint km_tail_boundary(const km_search *s, km_set_state *set, const km_presence *presence,
                          int64_t hit, int64_t *boundary)


cdef extern from "hex.h" nogil:
    void km_hex(const unsigned char *data, int64_t n, char *out)
    bint km_unhex(const unsigned char *text, int64_t n, unsigned char *out)


cdef extern from "layout.h" nogil:
    ctypedef struct km_region:
        uint64_t base
        uint64_t size
        uint64_t stride

    bint km_region_last(const km_region *r, uint64_t num_blocks, uint64_t *last)
    uint64_t km_region_address(const km_region *r, uint64_t block)
    bint km_regions_find_overlap(const km_region *r, int64_t n, uint64_t num_blocks,
                                 int64_t *first, int64_t *second)


cdef extern from "serial.h" nogil:
    ctypedef enum km_encoding:
        KM_PICKLE
        KM_CBOR
        KM_PAGES

    enum:
        KM_MAX_PARENT

    ctypedef struct km_tokens:
        const char *base
        int64_t stride
        int width

    uint64_t km_serial_bound(int64_t n_tokens, uint64_t parent, uint64_t extra)
    bint km_may_split(int64_t n, size_t parent_size, size_t extra_size)
    int64_t km_take(const km_tokens *t, int64_t first, int64_t n, int64_t *out)
    size_t km_serialise(km_encoding encoding, uint8_t *out, const uint8_t *parent,
                        size_t parent_size, const int64_t *tokens, int64_t n,
                        const uint8_t *extra, size_t extra_size)


cdef extern from "digest.h" nogil:
    ctypedef enum km_digest_kind:
        KM_NO_DIGEST
        KM_SHA256
        KM_SHA256_EVP
        KM_XXH3_128

    enum:
        KM_MAX_DIGEST

    const int64_t KM_DIGEST_FAILED

    ctypedef struct km_digest:
        km_digest_kind kind
        int size
        void *(*ctx_new)() noexcept
        void (*ctx_free)(void *) noexcept

    ctypedef struct km_extra:
        const uint8_t *data
        size_t size

    ctypedef struct km_chain:
        const km_digest *digest
        km_encoding encoding
        int64_t block_size
        const km_extra *extras
        int64_t *scratch
        uint8_t *buffer

    km_digest_kind km_load_sha256(const char *path, bint no_low_level, km_digest *d)
    km_digest_kind km_load_xxh3(const char *path, km_digest *d)
    bint km_digest_once(const km_digest *d, void *ctx, const uint8_t *data, size_t n, uint8_t *out)
    int64_t km_hash_chain(const km_chain *c, const km_tokens *tokens, int64_t first, int64_t n,
                          const uint8_t *parent, size_t parent_size, uint8_t *out)


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 maxchar)
    void *PyUnicode_1BYTE_DATA(object text)
    PyObject **PySequence_Fast_ITEMS(object o)
    void PyObject_GC_UnTrack(object op)
    # Declared with PyObject* so that a fresh int goes into its list without two count updates.
    PyObject *new_int "PyLong_FromUnsignedLongLong" (unsigned long long value)
    void set_item "PyList_SET_ITEM" (object list, Py_ssize_t i, PyObject *item)


cdef extern from *:
    """
    /* Copy exact ints that are not negative, borrowed from items[0..n): no reference is taken,
       which alone would double the time. Returns how many were copied before one that does not
       fit. */
    static Py_ssize_t take_ints(PyObject *const *items, Py_ssize_t n, int64_t *out) {
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *o = items[i];
            long long v;
            int overflow;

            if (!PyLong_CheckExact(o))
                return i;
    #if PY_VERSION_HEX >= 0x030C0000
            if (PyUnstable_Long_IsCompact((PyLongObject *)o))
                v = PyUnstable_Long_CompactValue((PyLongObject *)o);
    #else
            if (Py_SIZE(o) == 1)
                v = ((PyLongObject *)o)->ob_digit[0];
    #endif
            else {
                v = PyLong_AsLongLongAndOverflow(o, &overflow);
                if (overflow)
                    return i;
            }
            if (v < 0)
                return i;
            out[i] = v;
        }
        return n;
    }

    /* Have the processor fetch what a walk over every `step`-th item reads soon: the item eight
       steps on, with the bytes behind its head, and the place in the list sixteen steps on. An
       engine's digests lie anywhere in memory, and waiting for each costs more than its key. */
    static inline void fetch_ahead(PyObject *const *items, Py_ssize_t n, Py_ssize_t i,
                                   Py_ssize_t step) {
        if (i + 16 * step < n)
            __builtin_prefetch(&items[i + 16 * step]);
        if (i + 8 * step < n) {
            const char *o = (const char *)items[i + 8 * step];
            __builtin_prefetch(o);
            __builtin_prefetch(o + 64);
        }
    }
    """
    Py_ssize_t take_ints(PyObject *const *items, Py_ssize_t n, int64_t *out)
    void fetch_ahead(PyObject *const *items, Py_ssize_t n, Py_ssize_t i, Py_ssize_t step) noexcept


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
    # Text: `items` holds str objects, and `decoded` the digest that was last used.
    cdef Py_buffer view
    cdef bint has_view
    cdef const unsigned char *data
    cdef list items
    cdef unsigned char *decoded
    cdef Py_ssize_t size
    cdef readonly Py_ssize_t n
    cdef readonly object origin  # DigestOrigin, or None when it is not known
    cdef const unsigned char *at(self, Py_ssize_t i, Py_ssize_t *size) except NULL
    cdef const unsigned char *start_of(self, Py_ssize_t i, Py_ssize_t most,
                                       Py_ssize_t *size) except NULL
    cdef const unsigned char *decode(self, object text, Py_ssize_t i, Py_ssize_t most,
                                     Py_ssize_t *size) except NULL
    cdef bytes digest(self, Py_ssize_t i)
    cdef BlockHashes with_origin(self, object origin)


cdef class KeyBuilder:
    cdef readonly str prefix
    cdef readonly str suffix
    cdef readonly bint as_number
    cdef bytes head
    cdef bytes tail
    cdef const char *head_text  # of `head`, which never changes
    cdef const char *tail_text
    cdef Py_ssize_t head_size
    cdef Py_ssize_t tail_size
    cdef bint ascii
    cdef tuple parts(self)
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
    cdef tuple dense_masks(self, int64_t length)
    cdef tuple masks_of(self, km_reach *reach, int64_t length, int64_t skip, bint states)
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
    cdef bint cannot_gain(self, km_search *search, km_set_state *sets)
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
    cdef count_unknown(self, list given)
    cdef join_sets(self)


cdef class LookupSums:
    cdef int64_t lookups
    cdef int64_t asked_keys
    cdef int64_t present_keys
    cdef int64_t exact_keys
    cdef int64_t probes
    cdef int64_t hit_tokens
    cdef int64_t unknown_keys
    cdef int64_t failed_lookups
    cdef double lookup_store_seconds
    cdef double lookup_other_seconds


cdef class HitHints:
    cdef uint64_t *slots
    cdef int64_t mask
    cdef int64_t longest(self, BlockHashes hashes, int64_t per_unit, int64_t units) except -1


cdef class HitEnds:
    cdef uint64_t *slots
    cdef int64_t mask
    cdef int64_t slot(self, BlockHashes hashes, int64_t index, uint64_t *tag) except -1


cdef class Regions:
    cdef km_region *table
    cdef readonly Py_ssize_t num_regions
    cdef int64_t blocks  # of every region
    cdef list size_row  # the regions' sizes, shared by all rows of sizes


cdef class PlanGroup:
    cdef readonly object group
    cdef list num_bytes  # of a block, per shard
    cdef object all_bytes  # of a block, over all shards
    cdef tuple layouts
    cdef Py_ssize_t index
    cdef int64_t size  # tokens per block
    cdef int64_t unit  # tokens per digest
    cdef int64_t writers
    cdef int64_t turn
    cdef bint full
    cdef bint state
    cdef tuple own


cdef class PlanPart:
    cdef PlanGroup of
    cdef readonly Bitset planned
    cdef readonly int64_t start
    cdef readonly int64_t first_key
    cdef list ids  # of the blocks, the tail's last
    cdef int64_t boundary  # of the tail, in tokens; 0 without one
    cdef int64_t last  # the tail's block
    cdef list indices  # of the blocks, once asked for


cdef class BlockRows:
    cdef readonly object block_bytes
    cdef object regions
    cdef list kept  # per block its row, or None
    cdef Py_ssize_t room  # rows that may still be kept
    cdef Py_ssize_t width
    cdef list size_row
    cdef keep(self, list ids, list made)


cdef class TokenIds:
    # `view` points into `buffer`, into memory that `owner` keeps alive, or at `copied`.
    cdef km_tokens view
    cdef int64_t n
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef int64_t *copied
    cdef object owner
    cdef int copy(self, object ids, Py_ssize_t start) except -1
    cdef int from_buffer(self, object ids) except -1
    cdef int from_interface(self, object interface) except -1
    cdef int from_tensor(self, object ids) except -1
    cdef int set_memory(self, object address, object stride, int width, object n) except -1
    cdef int check_range(self, int64_t start, int64_t stop) except -1


cdef class Digest:
    cdef km_digest d
    cdef readonly str kind


cdef class Chain:
    cdef TokenIds ids
    cdef Digest digest  # None when it is a Python call
    cdef km_chain c
    cdef int64_t n  # blocks
    cdef tuple extras  # keeps alive what `c.extras` points into
    cdef int refuse(self, int64_t block) except -1
    cdef bytes serialise(self, int64_t block, bytes parent)
    cdef bytes run(self, bytes parent)
    cdef bytes run_calls(self, object digest, bytes parent)
