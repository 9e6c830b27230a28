/* Lower-case hexadecimal, the rendering of every digest in a key.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_HEX_H
#define KVMASK_HEX_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

/* SSE2 is part of every x86-64 processor and Neon of every 64-bit Arm: no run-time dispatch. */
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Equivalent to: out[:2] = "%02x" % byte. */
static inline void km_hex_byte(unsigned char byte, char *out) {
    static const char *const digits = "0123456789abcdef";
    out[0] = digits[byte >> 4];
    out[1] = digits[byte & 15];
}

#if defined(__SSE2__)
/* Equivalent to: ["0123456789abcdef"[n] for n in nibbles], sixteen at a time. */
static inline __m128i km_hex_digits(__m128i nibbles) {
    /* '0' + n, and 'a' - '0' - 10 = 39 more where n > 9 */
    __m128i letters = _mm_and_si128(_mm_cmpgt_epi8(nibbles, _mm_set1_epi8(9)), _mm_set1_epi8(39));
    return _mm_add_epi8(_mm_add_epi8(nibbles, _mm_set1_epi8('0')), letters);
}
#endif

/* Equivalent to: out[:2 * n] = in[:n].hex(). `in` and `out` must not overlap. */
static inline void km_hex(const unsigned char *in, int64_t n, char *out) {
    assert(n >= 0);
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128i low = _mm_set1_epi8(15);
    for (; i + 16 <= n; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(in + i));
        __m128i high_half = km_hex_digits(_mm_and_si128(_mm_srli_epi16(bytes, 4), low));
        __m128i low_half = km_hex_digits(_mm_and_si128(bytes, low));
        _mm_storeu_si128((__m128i *)(out + 2 * i), _mm_unpacklo_epi8(high_half, low_half));
        _mm_storeu_si128((__m128i *)(out + 2 * i + 16), _mm_unpackhi_epi8(high_half, low_half));
    }
#elif defined(__aarch64__) && defined(__ARM_NEON)
    const uint8x16_t table = vld1q_u8((const uint8_t *)"0123456789abcdef");
    for (; i + 16 <= n; i += 16) {
        uint8x16_t bytes = vld1q_u8(in + i);
        uint8x16x2_t text;
        text.val[0] = vqtbl1q_u8(table, vshrq_n_u8(bytes, 4));
        text.val[1] = vqtbl1q_u8(table, vandq_u8(bytes, vdupq_n_u8(15)));
        vst2q_u8((uint8_t *)(out + 2 * i), text);
    }
#endif
    for (; i < n; i++)
        km_hex_byte(in[i], out + 2 * i);
}

/* Value of a lower-case hexadecimal digit, 16 for anything else. Without a branch, because the
 * digits of a digest are random. */
static inline unsigned km_hex_value(unsigned char letter) {
    unsigned digit = letter - (unsigned)'0', high = letter - (unsigned)'a';
    return digit < 10 ? digit : high < 6 ? high + 10 : 16;
}

/* Equivalent to: out[:n] = bytes.fromhex(in[:2 * n]). False when one of them is no lower-case
 * digit; `out` then holds anything. `in` and `out` must not overlap. */
static inline bool km_unhex(const unsigned char *in, int64_t n, unsigned char *out) {
    assert(n >= 0);
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++) {
        unsigned high = km_hex_value(in[2 * i]), low = km_hex_value(in[2 * i + 1]);
        bad |= high | low;
        out[i] = (unsigned char)(high << 4 | low);
    }
    return bad < 16;
}

#endif
