/* Which blocks of a KV cache group are worth storing or looking up.
 *
 * One struct describes a group, one function per attention kind fills its mask. Sources of the
 * rules: the reachable_block_mask methods of vLLM 0.32's KV cache managers.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_RULES_H
#define KVMASK_RULES_H

#include "bits.h"

typedef enum { KM_FULL = 0, KM_WINDOW = 1, KM_CHUNKED = 2, KM_STATE = 3 } km_kind;
#define KM_KINDS 4

/* The layers that share one block table and one attention kind. */
typedef struct {
    km_kind kind;
    bool eagle;     /* its last matched block is dropped and recomputed for the drafter */
    bool cacheable; /* false: keeps its index, takes no part in masks, keys and hits */
    int64_t block_size;
    /* Tokens of the window, extra retained ones included (KM_WINDOW), or of an attention chunk
     * (KM_CHUNKED). Other kinds have none. */
    int64_t span;
} km_group;

#define KM_DENSE (-1) /* retention interval None: a tail at every aligned boundary */
#define KM_MAX_BOUNDARIES 2

/* Where a later request can resume, and so what blocks it can reach. */
typedef struct {
    int64_t alignment;                     /* least common multiple of the block sizes */
    int64_t retention;                     /* KM_DENSE, 0 or tokens */
    int64_t boundaries[KM_MAX_BOUNDARIES]; /* replay boundaries, tokens */
    int n_boundaries;
} km_reach;

/* Equivalent to: ceil(a / b). */
static inline int64_t km_ceil_div(int64_t a, int64_t b) {
    assert(a >= 0 && b > 0);
    return a / b + (a % b != 0);
}

/* Equivalent to: value // unit * unit, but towards zero for a negative value. */
static inline int64_t km_align_down(int64_t value, int64_t unit) {
    assert(unit > 0);
    return value - value % unit;
}

/* Equivalent to: ceil((span - 1) / block_size) + eagle
 *
 * Blocks in a row that a window hit needs, the EAGLE look-ahead block included. */
static inline int64_t km_window_need(const km_group *g, bool eagle) {
    assert(g->kind == KM_WINDOW && g->span >= 1);
    return km_ceil_div(g->span - 1, g->block_size) + (eagle ? 1 : 0);
}

/* Where a later request can resume, in tokens. Returns how many positions it wrote.
 *
 * The same prompt resumes at its last token at most, which is computed for its logits. Under EAGLE
 * a hit drops a block: then one aligned segment less for the same prompt, and for a longer one. */
static inline int km_replay_boundaries(int64_t num_prompt_tokens, int64_t alignment, bool eagle,
                                       int64_t out[KM_MAX_BOUNDARIES]) {
    assert(num_prompt_tokens >= 1);
    if (!eagle) {
        out[0] = num_prompt_tokens - 1;
        return 1;
    }
    int64_t resend = km_align_down(num_prompt_tokens - 1, alignment) - alignment;
    int64_t extension = km_align_down(num_prompt_tokens, alignment) - alignment;
    out[0] = resend > 0 ? resend : 0;
    out[1] = extension > 0 ? extension : 0;
    return out[0] == out[1] ? 1 : 2;
}

/* Equivalent to: for i in range(nbits): mask[i] |= start <= origin + i < stop */
static inline void km_fill_shifted(uint64_t *w, int64_t nbits, int64_t origin, int64_t start,
                                   int64_t stop) {
    assert(nbits >= 0 && origin >= 0);
    start = start > origin ? start - origin : 0;
    stop = stop - origin < nbits ? stop - origin : nbits;
    km_fill(w, start, stop, true);
}

/* Window mask of blocks [start, end), which a hit can need: the last `need` of every retention
 * segment, and the last `need` before each boundary. Returns false, with `w` untouched, when every
 * block counts. `w` holds end - start bits, all zero. */
static inline bool km_window_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                                  uint64_t *w) {
    assert(g->kind == KM_WINDOW && start >= 0 && end >= start);
    int64_t b = g->block_size, nbits = end - start;
    if (r->alignment % b != 0)
        return false;
    int64_t need = km_window_need(g, g->eagle), shift = g->eagle ? 1 : 0;
    if (r->retention != 0) {
        int64_t per_segment = (r->retention == KM_DENSE ? r->alignment : r->retention) / b;
        if (need >= per_segment)
            return false;
        if (need > 0) {
            /* Block i counts when i >= shift and (i - shift) % per_segment >= per_segment - need;
             * adding whole segments keeps the origin from going negative. */
            km_fill_periodic(w, nbits, start + per_segment - shift, per_segment,
                             per_segment - need);
            if (start < shift && nbits > 0)
                km_clear(w, 0);
        }
    }
    if (r->retention != KM_DENSE)
        for (int i = 0; i < r->n_boundaries; i++) {
            int64_t stop = km_align_down(r->boundaries[i], r->alignment) / b + shift;
            km_fill_shifted(w, nbits, start, stop - need, stop);
        }
    return true;
}

/* State mask of blocks [start, end): the last of every retention segment, and the last before each
 * boundary. Returns false, with `w` untouched, when every block counts. */
static inline bool km_state_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                                 uint64_t *w) {
    assert(g->kind == KM_STATE && start >= 0 && end >= start);
    if (r->retention == KM_DENSE)
        return false;
    int64_t b = g->block_size, nbits = end - start;
    if (r->retention != 0) {
        int64_t per_segment = r->retention / b;
        if (per_segment <= 1)
            return false;
        km_fill_periodic(w, nbits, start, per_segment, per_segment - 1);
    }
    for (int i = 0; i < r->n_boundaries; i++) {
        int64_t stop = km_align_down(r->boundaries[i], r->alignment) / b;
        km_fill_shifted(w, nbits, start, stop - 1, stop);
    }
    return true;
}

/* Whether a mask of this kind can leave blocks out. */
static inline bool km_has_mask(km_kind kind) {
    switch (kind) {
    case KM_WINDOW:
    case KM_STATE:
        return true;
    case KM_FULL:
    case KM_CHUNKED:
        break;
    }
    return false;
}

/* Mask of the blocks [start, end) of any group that a later request can reach. False, with `w`
 * untouched, means that it can reach all. */
static inline bool km_reach_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                                 uint64_t *w) {
    assert(start >= 0 && end >= start);
    switch (g->kind) {
    case KM_WINDOW:
        return km_window_mask(g, r, start, end, w);
    case KM_STATE:
        return km_state_mask(g, r, start, end, w);
    case KM_FULL:
    case KM_CHUNKED:
        break;
    }
    return false;
}

/* Equivalent to: for i in range(first, stop): w[(i + 1) * stride - 1] = 1, below nbits. */
static inline void km_fill_blocks(uint64_t *w, int64_t nbits, int64_t stride, int64_t first,
                                  int64_t stop) {
    assert(nbits >= 0 && stride >= 1 && first >= 0);
    if (stop > nbits / stride)
        stop = nbits / stride;
    if (stride == 1 && first < stop) {
        km_fill(w, first, stop, true);
        return;
    }
    for (int64_t i = first; i < stop; i++)
        km_set(w, (i + 1) * stride - 1);
}

/* Sets the bits of the blocks that a prefix hit of the engine's own, of this many tokens, holds.
 * What lies wholly before them may have been freed. */
static inline void km_fill_held(const km_group *g, int64_t tokens, int64_t stride, uint64_t *w,
                                int64_t nbits) {
    assert(tokens >= 0);
    int64_t b = g->block_size, stop = tokens / b, first = stop;
    switch (g->kind) {
    case KM_FULL:
        first = 0;
        break;
    case KM_WINDOW:
        first = tokens >= g->span ? (tokens - g->span + 1) / b : 0;
        break;
    case KM_CHUNKED:
        first = km_align_down(tokens, g->span) / b;
        break;
    case KM_STATE: /* a longer hit needs another state */
        break;
    }
    km_fill_blocks(w, nbits, stride, first, stop);
}

#endif
