/* The hit search: the longest prefix that every KV cache group can reuse.
 *
 * Presence has three values. `maybe` has a bit for every block that is present or not yet asked,
 * `known` one for every block whose answer is in. The search runs on `maybe`; whenever a result
 * rests on blocks that are not known, those blocks are a *need*. A search that finishes without a
 * need would give the same result for every answer still open, since all that it rejected, it
 * rejected for a known absence. With everything known it is vLLM's search.
 *
 * Sources: find_longest_cache_hit of vLLM 0.32's KV cache managers and of its Mooncake store
 * coordinator, whose order of groups and convergence are kept, quirks included.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_SEARCH_H
#define KVMASK_SEARCH_H

#include "rules.h"

/* Presence of one set of groups. Block i is bit (i + 1) * stride - 1. The stride is 1, or the
 * number of hash blocks in a block when hits may end inside it. Bits at and past nbits are known to
 * be absent. NULL words stand for all ones. */
typedef struct {
    const uint64_t *maybe; /* present, or not yet asked */
    const uint64_t *known; /* the answer is in */
    int64_t nbits;
    int64_t stride;
} km_presence;

/* Bits range(first, stop, stride) of a presence, whose answers decide. */
typedef struct {
    int64_t first, stop, stride;
} km_need;

/* Groups with equal specs are searched as one set. */
typedef struct {
    km_group group;
    km_presence presence;
    int64_t first, len; /* result: blocks [first, len) are reused */
    int64_t hit;        /* result: tokens */
    bool searched;      /* in this search, at least once */
    bool has_need;      /* `need` holds what the result rests on and is not known */
    km_need need;
} km_set_state;

/* One search over all sets. */
typedef struct {
    km_set_state *sets; /* full attention first, then in order of the first group */
    int n_sets;
    int64_t hash_block, alignment;
    bool partial; /* hits may end at any hash block */
    bool collect; /* go on past a need, as if it were present, and keep every set's last one */
} km_search;

/* What hits are multiples of. */
static inline int64_t km_hit_alignment(const km_search *s) {
    return s->partial ? s->hash_block : s->alignment;
}

/* Whether hits of this group may end inside a block. */
static inline bool km_ends_inside(const km_search *s, const km_group *g) {
    return s->partial && g->block_size > s->hash_block &&
           (g->kind == KM_FULL || g->kind == KM_STATE);
}

/* The bit of a block. */
static inline int64_t km_block_bit(const km_presence *p, int64_t block) {
    return (block + 1) * p->stride - 1;
}

/* Blocks that lie below nbits. */
static inline int64_t km_present_blocks(const km_presence *p) {
    return p->nbits / p->stride;
}

/* Equivalent to: bit < nbits and maybe[bit]. */
static inline bool km_maybe(const km_presence *p, int64_t bit) {
    assert(bit >= 0);
    return bit < p->nbits && (p->maybe == NULL || km_get(p->maybe, bit));
}

/* Equivalent to: max((i for i in range(start, stop) if block i is absent), default=start - 1)
 *
 * Blocks below stop have a bit. */
static inline int64_t km_prev_absent(const km_presence *p, int64_t start, int64_t stop) {
    assert(start >= 0 && (stop <= start || stop <= km_present_blocks(p)));
    if (p->maybe == NULL)
        return start - 1;
    if (p->stride == 1)
        return km_prev(p->maybe, start, stop, false);
    int64_t i = stop - 1;
    while (i >= start && km_get(p->maybe, km_block_bit(p, i)))
        i--;
    return i;
}

/* Equivalent to: max((i for i in range(stop) if block i may be present), default=-1)
 *
 * Blocks below stop have a bit. */
static inline int64_t km_prev_maybe(const km_presence *p, int64_t stop) {
    assert(stop <= km_present_blocks(p));
    if (p->maybe == NULL)
        return stop - 1;
    if (p->stride == 1)
        return km_prev(p->maybe, 0, stop, true);
    int64_t i = stop - 1;
    while (i >= 0 && !km_get(p->maybe, km_block_bit(p, i)))
        i--;
    return i;
}

/* Equivalent to: next((i for i in range(start, stop) if block i is absent), max(start, stop))
 *
 * The end of the run of blocks that begins at start. */
static inline int64_t km_run_end(const km_presence *p, int64_t start, int64_t stop) {
    assert(start >= 0);
    if (stop > km_present_blocks(p))
        stop = km_present_blocks(p);
    if (start >= stop || p->maybe == NULL)
        return stop > start ? stop : start;
    if (p->stride == 1)
        return km_next(p->maybe, start, stop, false);
    int64_t i = start;
    while (i < stop && km_get(p->maybe, km_block_bit(p, i)))
        i++;
    return i;
}

/* Says that the result rests on bits range(first, stop, stride), which all may be present. When one
 * of them is not known, they become the need of the set, from that one on. Returns whether the
 * search goes on. */
static inline bool km_rests_on(const km_search *s, km_set_state *set, int64_t first, int64_t stop,
                               int64_t stride) {
    assert(first >= 0 && stride >= 1);
    const uint64_t *known = set->presence.known;
    if (known == NULL || first >= stop)
        return true;
    int64_t bit = first;
    if (stride == 1)
        bit = km_next(known, first, stop, false);
    else
        while (bit < stop && km_get(known, bit))
            bit += stride;
    if (bit >= stop)
        return true;
    set->has_need = true;
    set->need = (km_need){bit, stop, stride};
    return s->collect;
}

/* The same for blocks [first, stop). */
static inline bool km_rests_on_blocks(const km_search *s, km_set_state *set, int64_t first,
                                      int64_t stop) {
    const km_presence *p = &set->presence;
    if (first >= stop)
        return true;
    return km_rests_on(s, set, km_block_bit(p, first), km_block_bit(p, stop - 1) + 1, p->stride);
}

/* Full attention: the run of blocks from the start, then the highest hash boundary inside the block
 * after it. `drop` takes the last matched unit off, for the drafter of EAGLE. */
static inline bool km_find_full(const km_search *s, km_set_state *set, int64_t max_length,
                                bool drop) {
    assert(set->group.kind == KM_FULL && max_length >= 0);
    const km_group *g = &set->group;
    const km_presence *p = &set->presence;
    int64_t b = g->block_size, a = km_hit_alignment(s);
    int64_t run = km_run_end(p, 0, max_length / b);
    if (!km_rests_on_blocks(s, set, 0, run))
        return false;
    int64_t hit = run * b;
    if (km_ends_inside(s, g)) {
        km_need block_need = set->need;
        bool had_need = set->has_need;
        int64_t low = run * p->stride;
        int64_t high = low + p->stride - 1; /* the block's own end is no boundary inside it */
        if (high > max_length / a)
            high = max_length / a;
        if (high > p->nbits)
            high = p->nbits;
        int64_t bit = p->maybe == NULL ? high - 1 : km_prev(p->maybe, low, high, true);
        if (bit >= low && high > low) {
            if (!km_rests_on(s, set, bit, bit + 1, 1))
                return false;
            if (had_need) /* earlier blocks decide first */
                set->need = block_need;
            hit = (bit + 1) * a;
        }
    }
    if (drop && hit > 0)
        hit -= a < b ? a : b;
    hit = km_align_down(hit, a);
    set->first = 0;
    set->len = km_ceil_div(hit, b);
    set->hit = hit;
    return true;
}

/* Sliding window: from the right, the first run of `need` blocks whose end is aligned after the
 * EAGLE drop. A run that touches block 0 counts even when it is shorter. */
static inline bool km_find_window(const km_search *s, km_set_state *set, int64_t max_length,
                                  bool drop) {
    assert(set->group.kind == KM_WINDOW && max_length >= 0);
    const km_group *g = &set->group;
    const km_presence *p = &set->presence;
    int64_t b = g->block_size, a = km_hit_alignment(s), shift = drop ? 1 : 0;
    int64_t need = km_window_need(g, drop);
    if (need < 1)
        need = 1;
    /* Ends e with (e + 1 - shift) * b a multiple of a: every `period` blocks. */
    int64_t period = a / km_gcd(a, b);
    int64_t stop = max_length / b;
    if (stop > km_present_blocks(p))
        stop = km_present_blocks(p);
    int64_t e = stop - 1, low = 0;
    for (;;) {
        e = km_prev_maybe(p, e + 1);
        if (e < 0)
            break;
        int64_t over = (e + 1 - shift) % period;
        if (over < 0)
            over += period;
        e -= over;
        if (e < 0)
            break;
        if (over && !km_maybe(p, km_block_bit(p, e)))
            continue;
        low = e - need + 1 > 0 ? e - need + 1 : 0;
        int64_t gap = km_prev_absent(p, low, e);
        if (gap < low)
            break;
        e = gap - 1;
    }
    set->first = set->len = set->hit = 0;
    if (e < 0)
        return true;
    if (!km_rests_on_blocks(s, set, low, e + 1))
        return false;
    int64_t len = e + 1;
    if (e - low + 1 < need) /* it touches block 0 */
        len -= len % period;
    if (drop && len > 0) {
        len -= 1;
        len -= len % period;
    }
    set->first = low < len ? low : len;
    set->len = len;
    set->hit = len * b;
    return true;
}

/* State layers: from the right, the first aligned block whose state is present. EAGLE drops none.
 */
static inline bool km_find_state(const km_search *s, km_set_state *set, int64_t max_length) {
    assert(set->group.kind == KM_STATE && max_length >= 0);
    const km_group *g = &set->group;
    const km_presence *p = &set->presence;
    int64_t b = g->block_size, a = km_hit_alignment(s);
    set->first = set->len = set->hit = 0;
    if (km_ends_inside(s, g)) {
        int64_t stop = max_length / a < p->nbits ? max_length / a : p->nbits;
        int64_t bit = p->maybe == NULL ? stop - 1 : km_prev(p->maybe, 0, stop, true);
        if (bit < 0)
            return true;
        if (!km_rests_on(s, set, bit, bit + 1, 1))
            return false;
        set->first = bit / p->stride;
        set->len = set->first + 1;
        set->hit = (bit + 1) * a;
        return true;
    }
    int64_t period = a / km_gcd(a, b), stop = max_length / b;
    if (stop > km_present_blocks(p))
        stop = km_present_blocks(p);
    for (int64_t i = stop - stop % period - 1; i >= 0;) {
        if (km_maybe(p, km_block_bit(p, i))) {
            if (!km_rests_on_blocks(s, set, i, i + 1))
                return false;
            set->first = i;
            set->len = i + 1;
            set->hit = set->len * b;
            return true;
        }
        i = km_prev_maybe(p, i) + 1;
        i -= i % period + 1;
    }
    return true;
}

/* Chunked local attention: blocks before the current attention chunk count as present. vLLM asks
 * for block size == alignment; other alignments cut the hit down and search again there. */
static inline bool km_find_chunked(const km_search *s, km_set_state *set, int64_t max_length) {
    assert(set->group.kind == KM_CHUNKED && set->group.span >= 1 && max_length >= 0);
    const km_group *g = &set->group;
    int64_t b = g->block_size, a = km_hit_alignment(s);
    for (;;) {
        int64_t start = km_align_down(max_length, g->span) / b;
        int64_t end = km_run_end(&set->presence, start, max_length / b);
        int64_t hit = km_align_down(end * b, a);
        if (a == b || hit >= start * b) {
            end = km_ceil_div(hit, b);
            set->first = start;
            set->len = end;
            set->hit = hit;
            return km_rests_on_blocks(s, set, start, end);
        }
        max_length = hit;
    }
}

/* The longest hit of one set alone, of at most max_length tokens. Returns whether the search goes
 * on; the set then holds its result. */
static inline bool km_find_set(const km_search *s, km_set_state *set, int64_t max_length,
                               bool drop) {
    set->has_need = false;
    switch (set->group.kind) {
    case KM_FULL:
        return km_find_full(s, set, max_length, drop);
    case KM_WINDOW:
        return km_find_window(s, set, max_length, drop);
    case KM_STATE:
        return km_find_state(s, set, max_length);
    case KM_CHUNKED:
        break;
    }
    return km_find_chunked(s, set, max_length);
}

/* Tokens that an EAGLE group matches past a hit, which it then drops. */
static inline int64_t km_eagle_margin(const km_search *s, const km_group *g) {
    return km_ends_inside(s, g) ? s->hash_block : g->block_size;
}

/* One pass over the sets: each is searched below what the ones before it found. `verified` has a
 * bit for every set whose EAGLE drop holds at the present length. Returns whether the search goes
 * on. */
static inline bool km_search_pass(km_search *s, bool eagle, uint64_t *verified, int64_t *length) {
    int64_t current = *length;
    for (int i = 0; i < s->n_sets; i++) {
        km_set_state *set = &s->sets[i];
        if (set->group.kind == KM_FULL && set->searched) {
            if (set->hit < current)
                current = set->hit;
            continue;
        }
        bool drop = eagle && set->group.eagle && !(*verified >> i & 1);
        int64_t max_length = current;
        if (drop && set->group.kind != KM_STATE)
            max_length += km_eagle_margin(s, &set->group);
        if (!km_find_set(s, set, max_length, drop))
            return false;
        set->searched = true;
        if (drop)
            *verified |= UINT64_C(1) << i;
        else if (set->hit < current)
            *verified = 0;
        current = set->hit;
    }
    *length = current;
    return true;
}

/* Longest joint hit of at most max_length tokens, or -1 when a need stops the search. The sets then
 * hold their blocks; with `collect` the length is the longest still possible and the sets hold what
 * it rests on. Needs at least one and at most 64 sets. */
static inline int64_t km_find_hit(km_search *s, int64_t max_length, bool eagle) {
    assert(s->n_sets >= 1 && s->n_sets <= 64 && max_length >= 0);
    for (int i = 0; i < s->n_sets; i++)
        s->sets[i].searched = s->sets[i].has_need = false;
    if (s->n_sets == 1) {
        km_set_state *only = s->sets;
        if (!km_find_set(s, only, max_length, eagle && only->group.eagle))
            return -1;
        return only->hit;
    }
    bool simple = s->n_sets == 2 && s->sets[0].group.kind == KM_FULL;
    uint64_t verified = 0;
    int64_t hit = max_length;
    for (;;) {
        int64_t current = hit;
        if (!km_search_pass(s, eagle, &verified, &current))
            return -1;
        if (current >= hit)
            break;
        hit = current;
        if (simple)
            break;
    }
    for (int i = 0; i < s->n_sets; i++)
        if (s->sets[i].group.kind == KM_FULL) {
            int64_t len = km_ceil_div(hit, s->sets[i].group.block_size);
            if (len < s->sets[i].len) /* vLLM only deletes: it never lengthens the list */
                s->sets[i].len = len;
            s->sets[i].hit = hit;
        }
    return hit;
}

/* The token boundary whose digest keys the last reused block: the hit itself, or, when hits may end
 * inside a block and nothing is stored there, the next present boundary of the same block.
 * `presence` is that of one group of the set. Returns whether the answer is known; if not, the set
 * holds the need. */
static inline bool km_tail_boundary(const km_search *s, km_set_state *set,
                                    const km_presence *presence, int64_t hit, int64_t *boundary) {
    assert(hit >= 0);
    *boundary = hit;
    set->has_need = false;
    if (!s->partial || hit == 0)
        return true;
    int64_t h = s->hash_block, bit = hit / h - 1;
    int64_t stop = km_ceil_div(hit, set->group.block_size) * (set->group.block_size / h);
    if (stop > presence->nbits)
        stop = presence->nbits;
    if (bit >= stop)
        return true;
    int64_t found = presence->maybe == NULL ? bit : km_next(presence->maybe, bit, stop, true);
    if (found >= stop)
        return true;
    km_presence own = set->presence;
    set->presence = *presence;
    bool known = km_rests_on(s, set, found, found + 1, 1);
    set->presence = own;
    if (known)
        *boundary = (found + 1) * h;
    return known;
}

#endif
