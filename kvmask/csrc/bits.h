/* Bitsets: uint64 words, bit i is bit (i % 64) of word i / 64.
 *
 * Contract of every function here: bits at and past `nbits` are zero before and after the call,
 * indices are in range (asserted, not checked: callers check user input), no function allocates.
 *
 * What all headers of this folder share:
 * - `km_` stands for kvmask: C has one namespace. Names without it are local.
 * - No function touches a Python object, so that all may run without the GIL.
 * - A range is [start, stop). A size is in tokens unless its comment says bytes, bits or blocks.
 * - Above a function stands its Python equivalent or its result, in its body first its contract as
 *   asserts. `mask` in an equivalent is the bitset as a list of bool.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_BITS_H
#define KVMASK_BITS_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KM_WORD_BITS 64

/* Equivalent to: ceil(nbits / 64). */
static inline int64_t km_words(int64_t nbits) {
    assert(nbits >= 0);
    return nbits / KM_WORD_BITS + (nbits % KM_WORD_BITS != 0);
}

/* Equivalent to: 2**n - 1, a word with bits [0, n) set. */
static inline uint64_t km_low_mask(int64_t n) {
    assert(n >= 0 && n <= 64);
    return n == 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1;
}

/* Equivalent to: mask[i]. */
static inline bool km_get(const uint64_t *w, int64_t i) {
    assert(i >= 0);
    return (w[i >> 6] >> (i & 63)) & 1;
}

/* Equivalent to: mask[i] = True. */
static inline void km_set(uint64_t *w, int64_t i) {
    assert(i >= 0);
    w[i >> 6] |= UINT64_C(1) << (i & 63);
}

/* Equivalent to: mask[i] = False. */
static inline void km_clear(uint64_t *w, int64_t i) {
    assert(i >= 0);
    w[i >> 6] &= ~(UINT64_C(1) << (i & 63));
}

/* Equivalent to: mask[start:stop] = value. An empty or reversed range does nothing. */
static inline void km_fill(uint64_t *w, int64_t start, int64_t stop, bool value) {
    if (start >= stop)
        return;
    assert(start >= 0);
    int64_t a = start >> 6, b = (stop - 1) >> 6;
    uint64_t head = ~UINT64_C(0) << (start & 63);
    uint64_t tail = km_low_mask(((stop - 1) & 63) + 1);
    if (a == b) {
        if (value)
            w[a] |= head & tail;
        else
            w[a] &= ~(head & tail);
        return;
    }
    if (value) {
        w[a] |= head;
        memset(w + a + 1, 0xff, (size_t)(b - a - 1) * sizeof(uint64_t));
        w[b] |= tail;
    } else {
        w[a] &= ~head;
        memset(w + a + 1, 0, (size_t)(b - a - 1) * sizeof(uint64_t));
        w[b] &= ~tail;
    }
}

/* Equivalent to: bin(word).count("1"). By pairs, then fours, then bytes: without a machine
   instruction for it, which not every CPU has, the compiler's own is a call and a table. */
static inline int64_t km_count_word(uint64_t word) {
    word -= (word >> 1) & UINT64_C(0x5555555555555555);
    word = (word & UINT64_C(0x3333333333333333)) + ((word >> 2) & UINT64_C(0x3333333333333333));
    word = (word + (word >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int64_t)(word * UINT64_C(0x0101010101010101) >> 56);
}

/* Equivalent to: sum(mask). */
static inline int64_t km_count(const uint64_t *w, int64_t nbits) {
    int64_t total = 0;
    for (int64_t i = 0, n = km_words(nbits); i < n; i++)
        total += km_count_word(w[i]);
    return total;
}

/* Smallest i in [start, stop) with mask[i] == value, or stop. Bits come in runs, so that most
   searches end where they start. */
static inline int64_t km_next(const uint64_t *w, int64_t start, int64_t stop, bool value) {
    if (start >= stop)
        return stop;
    assert(start >= 0);
    if ((w[start >> 6] >> (start & 63) & 1) == value)
        return start;
    uint64_t flip = value ? 0 : ~UINT64_C(0);
    int64_t i = start >> 6, last = (stop - 1) >> 6;
    uint64_t word = (w[i] ^ flip) & (~UINT64_C(0) << (start & 63));
    while (word == 0) {
        if (++i > last)
            return stop;
        word = w[i] ^ flip;
    }
    int64_t found = (i << 6) + __builtin_ctzll(word);
    return found < stop ? found : stop;
}

/* Largest i in [start, stop) with mask[i] == value, or start - 1. */
static inline int64_t km_prev(const uint64_t *w, int64_t start, int64_t stop, bool value) {
    if (start >= stop)
        return start - 1;
    assert(start >= 0);
    uint64_t flip = value ? 0 : ~UINT64_C(0);
    int64_t first = start >> 6, i = (stop - 1) >> 6;
    uint64_t word = (w[i] ^ flip) & km_low_mask(((stop - 1) & 63) + 1);
    while (word == 0) {
        if (--i < first)
            return start - 1;
        word = w[i] ^ flip;
    }
    int64_t found = (i << 6) + 63 - __builtin_clzll(word);
    return found >= start ? found : start - 1;
}

/* Equivalent to: all(mask[start:stop]). */
static inline bool km_all(const uint64_t *w, int64_t start, int64_t stop) {
    return km_next(w, start, stop, false) >= stop;
}

/* Equivalent to: math.gcd(a, b). */
static inline int64_t km_gcd(int64_t a, int64_t b) {
    assert(a >= 0 && b >= 0);
    while (b) {
        int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

/* Equivalent to: mask = [(i + origin) % period >= low for i in range(nbits)]
 *
 * All bits of `w` must be zero. The pattern repeats every period / gcd(period, 64) words, so
 * only that many are made bit by bit and the rest are copied. */
static inline void km_fill_periodic(uint64_t *w, int64_t nbits, int64_t origin, int64_t period,
                                    int64_t low) {
    assert(period > 0 && low >= 0 && low < period && origin >= 0);
    int64_t nwords = km_words(nbits);
    int64_t cycle = period / km_gcd(period, KM_WORD_BITS);
    int64_t made = cycle < nwords ? cycle : nwords;
    int64_t made_bits = made * KM_WORD_BITS < nbits ? made * KM_WORD_BITS : nbits;
    int64_t phase = origin % period;
    for (int64_t base = -phase; base < made_bits; base += period) {
        int64_t start = base + low, stop = base + period;
        km_fill(w, start < 0 ? 0 : start, stop < made_bits ? stop : made_bits, true);
    }
    while (made < nwords) {
        int64_t n = made < nwords - made ? made : nwords - made;
        memcpy(w + made, w, (size_t)n * sizeof(uint64_t));
        made += n;
    }
    if (nwords && nbits % KM_WORD_BITS)
        w[nwords - 1] &= km_low_mask(nbits % KM_WORD_BITS);
}

/* True when no bit at or past nbits is set in the last word: the contract above. */
static inline bool km_clean(const uint64_t *w, int64_t nbits) {
    return nbits % KM_WORD_BITS == 0 || (w[nbits >> 6] & ~km_low_mask(nbits % KM_WORD_BITS)) == 0;
}

#endif
