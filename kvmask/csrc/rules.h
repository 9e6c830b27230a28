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

/* All sizes in tokens. */
typedef struct {
    km_kind kind;
    bool eagle;     /* its last matched block is dropped and recomputed for the drafter */
    bool cacheable; /* false: keeps its index, takes no part in masks, keys and hits */
    int64_t block_size;
    int64_t span; /* window (KM_WINDOW, extra retained tokens included) or chunk (KM_CHUNKED) */
} km_group;

#define KM_DENSE (-1) /* retention interval None: a tail at every aligned boundary */
#define KM_MAX_BOUNDARIES 2

typedef struct {
    int64_t alignment;                     /* least common multiple of the block sizes */
    int64_t retention;                     /* KM_DENSE, 0 or tokens */
    int64_t boundaries[KM_MAX_BOUNDARIES]; /* replay boundaries, tokens */
    int n_boundaries;
} km_reach;

static inline int64_t km_ceil_div(int64_t a, int64_t b) {
    assert(a >= 0 && b > 0);
    return a / b + (a % b != 0);
}

static inline int64_t km_align_down(int64_t value, int64_t unit) {
    return value - value % unit;
}

/* Contiguous blocks a window hit needs, the EAGLE look-ahead block included. */
static inline int64_t km_window_need(const km_group *g, bool eagle) {
    assert(g->kind == KM_WINDOW && g->span >= 1);
    return km_ceil_div(g->span - 1, g->block_size) + (eagle ? 1 : 0);
}

/* Where a later request with the same prompt can resume: returns how many positions it wrote. */
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

/* Sets bits [start, stop) of the whole sequence in a mask that begins at block `origin`. */
static inline void km_fill_shifted(uint64_t *w, int64_t nbits, int64_t origin, int64_t start,
                                   int64_t stop) {
    start = start > origin ? start - origin : 0;
    stop = stop - origin < nbits ? stop - origin : nbits;
    km_fill(w, start, stop, true);
}

/* Window mask of blocks [start, end). Returns false, with `w` untouched, when every block counts.
 * `w` holds end - start zero bits. */
static inline bool km_window_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                                  uint64_t *w) {
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

/* State mask of blocks [start, end): one state per retention segment and at each boundary. */
static inline bool km_state_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end,
                                 uint64_t *w) {
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

/* Reachable mask of blocks [start, end) of any group; false means all true. */
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

#endif
