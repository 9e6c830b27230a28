/* Regions: where the blocks of a KV cache lie in memory.
 *
 * A region is one piece of every block: block i has it at base + i * stride, size bytes long. All
 * values are bytes in uint64; km_region_last is the overflow check, and every other function
 * requires that it passed. Pieces of one region never overlap: size <= stride, except that the
 * stride of a single block means nothing.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_LAYOUT_H
#define KVMASK_LAYOUT_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    uint64_t base;   /* address of block 0 */
    uint64_t size;   /* bytes of one piece */
    uint64_t stride; /* from one block to the next */
} km_region;

/* Equivalent to: last = base + (num_blocks - 1) * stride + size - 1; return last < 2**64
 *
 * The address of the last byte, not of the one after it, so that memory up to the very end of the
 * address space can be described. `last` is undefined when it does not fit. */
static inline bool km_region_last(const km_region *r, uint64_t num_blocks, uint64_t *last) {
    assert(num_blocks >= 1 && r->size >= 1);
    uint64_t start;
    return !__builtin_mul_overflow(num_blocks - 1, r->stride, &start) &&
           !__builtin_add_overflow(start, r->base, &start) &&
           !__builtin_add_overflow(start, r->size - 1, last);
}

/* Contract of the functions below. */
static inline bool km_region_valid(const km_region *r, uint64_t num_blocks) {
    uint64_t last;
    return num_blocks >= 1 && r->size >= 1 && (num_blocks == 1 || r->size <= r->stride) &&
           km_region_last(r, num_blocks, &last);
}

/* Equivalent to: base + block * stride. Cannot wrap for a valid region and block < num_blocks. */
static inline uint64_t km_region_address(const km_region *r, uint64_t block) {
    return r->base + block * r->stride;
}

/* Equivalent to: x = next(x for x in count() if low <= step * x % modulus <= high)
 *
 * False when there is none. Euclid's descent, so at most about 90 levels deep. */
static inline bool km_first_in_range(uint64_t step, uint64_t modulus, uint64_t low, uint64_t high,
                                     uint64_t *x) {
    assert(step < modulus && low <= high && high < modulus);
    if (low == 0) {
        *x = 0;
        return true;
    }
    if (step == 0)
        return false;
    uint64_t quotient = low / step + (low % step != 0);
    unsigned __int128 reached = (unsigned __int128)quotient * step;
    if (reached <= high) {
        *x = quotient;
        return true;
    }
    /* No multiple of step lies in [low, high]: ask how often the modulus must be taken off. */
    uint64_t turns;
    if (!km_first_in_range(modulus % step, step, step - high % step, step - low % step, &turns))
        return false;
    *x = (uint64_t)(((unsigned __int128)modulus * turns + low + step - 1) / step);
    return true;
}

/* Equivalent to: any(piece i of a and piece j of b share a byte, for i and j in range(num_blocks)).
 * Time does not depend on num_blocks. */
static inline bool km_regions_meet(const km_region *a, const km_region *b, uint64_t num_blocks) {
    assert(km_region_valid(a, num_blocks) && km_region_valid(b, num_blocks));
    if (a->base > b->base) {
        const km_region *swap = a;
        a = b;
        b = swap;
    }
    uint64_t gap = b->base - a->base;
    if (gap < a->size)
        return true;
    if (num_blocks == 1)
        return false;
    /* Pieces i of a that end at or after b's first byte and start at or before its last one. Inside
     * that window it is enough to look at b as if it went on for ever on both sides. */
    uint64_t b_last = 0;
    (void)km_region_last(b, num_blocks, &b_last);
    uint64_t past = gap - (a->size - 1);
    uint64_t first = past / a->stride + (past % a->stride != 0);
    uint64_t stop = (b_last - a->base) / a->stride;
    if (stop > num_blocks - 1)
        stop = num_blocks - 1;
    if (first > stop)
        return false;
    /* Piece i meets some piece of b when (offset of its last byte from b) % b.stride <= width. */
    if (a->size - 1 >= b->stride - (b->size - 1))
        return true;
    uint64_t width = a->size - 1 + (b->size - 1);
    uint64_t phase = (first * a->stride - past) % b->stride;
    if (phase <= width)
        return true;
    uint64_t x;
    return km_first_in_range(a->stride % b->stride, b->stride, b->stride - phase,
                             b->stride - phase + width, &x) &&
           x <= stop - first;
}

/* Equivalent to: first, second = next(pair for pair in combinations(range(n), 2)
 *                                     if the regions of the pair meet)
 *
 * False when there is none. `r` is sorted by base. Only pairs whose extents meet are looked at;
 * regions that are interleaved block by block cost n * n. */
static inline bool km_regions_find_overlap(const km_region *r, int64_t n, uint64_t num_blocks,
                                           int64_t *first, int64_t *second) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t last = 0;
        (void)km_region_last(&r[i], num_blocks, &last);
        for (int64_t j = i + 1; j < n && r[j].base <= last; j++) {
            assert(r[j].base >= r[i].base);
            if (km_regions_meet(&r[i], &r[j], num_blocks)) {
                *first = i;
                *second = j;
                return true;
            }
        }
    }
    return false;
}

#endif
