/* Bytes that an engine hashes for one block: the serialised tuple (parent, tokens, extra).
 *
 * Pickle, protocol 5, as CPython's C pickler writes it:
 *     80 05                     PROTO 5
 *     95 <8 bytes, LE>          FRAME, number of bytes in the frame
 *     43 <len> <parent>  94     SHORT_BINBYTES, MEMOIZE
 *     tokens             94     up to three: the tokens, then 85/86/87 (TUPLE1 to TUPLE3);
 *                               more: 28 (MARK), the tokens, 74 (TUPLE); then MEMOIZE
 *     extra                     4e (None), or the opcodes the caller has for it
 *     87 94 2e                  TUPLE3, MEMOIZE, STOP
 * A token is 4b + 1 byte, 4d + 2 bytes, 4a + 4 bytes (below 2^31), or 8a <n> + n bytes, all little
 * endian; n leaves room for a sign bit. Before each object the pickler looks at the open frame and
 * closes it once it holds 65,536 bytes or more; the next byte opens another.
 *
 * Canonical CBOR (RFC 8949, 4.2.1), as cbor2 writes it:
 *     83                        array of three
 *     <head 40> <parent>        byte string
 *     <head 80> tokens          array of shortest unsigned integers
 *     extra                     f6 (null), or the caller's bytes
 *
 * Pages, as SGLang's HiCache hashes them; there are no extra keys:
 *     <parent>                  absent for the first page
 *     tokens                    4 bytes each, little endian; when one of the page needs more:
 *                               ff, then 8 bytes each
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_SERIAL_H
#define KVMASK_SERIAL_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KM_FRAME_TARGET 65536 /* bytes in a pickle's frame from which it is closed */
#define KM_FRAME_HEADER 9     /* bytes of FRAME and the length after it */
/* Bytes of one block that are neither parent, tokens nor extra, and the slack that the eight-byte
 * stores of a token need. */
#define KM_SERIAL_FIXED 96
/* A parent's length stands in one byte of a pickle. */
#define KM_MAX_PARENT 255

typedef enum { KM_PICKLE = 0, KM_CBOR = 1, KM_PAGES = 2 } km_encoding;

/* Token ids as they lie in the caller's memory: signed integers. */
typedef struct {
    const char *base;
    int64_t stride; /* bytes from one to the next; negative for a reversed view */
    int width;      /* bytes of one, 4 or 8 */
} km_tokens;

/* Equivalent to: p[:8] = v.to_bytes(8, "little"). */
static inline void km_store_le(uint8_t *p, uint64_t v) {
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    memcpy(p, &v, 8);
}

/* Equivalent to: out[:n] = tokens[first : first + n]
 *
 * Returns the OR of all of them. It is negative exactly when one of them is, so that a caller tests
 * once per block. */
static inline int64_t km_take(const km_tokens *t, int64_t first, int64_t n, int64_t *out) {
    assert((t->width == 4 || t->width == 8) && first >= 0 && n >= 0);
    const char *p = t->base + first * t->stride;
    int64_t all = 0;
    if (t->width == 8) {
        for (int64_t i = 0; i < n; i++, p += t->stride) {
            memcpy(&out[i], p, 8);
            all |= out[i];
        }
    } else {
        for (int64_t i = 0; i < n; i++, p += t->stride) {
            int32_t v;
            memcpy(&v, p, 4);
            out[i] = v;
            all |= out[i];
        }
    }
    return all;
}

/* An upper bound of the bytes that one block serialises to, by its number of tokens and the bytes
 * of its parent and of its extra keys. */
static inline uint64_t km_serial_bound(int64_t n_tokens, uint64_t parent, uint64_t extra) {
    assert(n_tokens >= 1);
    uint64_t body = KM_SERIAL_FIXED + 10 * (uint64_t)n_tokens + parent + extra;
    return body + (body / KM_FRAME_TARGET + 1) * KM_FRAME_HEADER;
}

/* One token as pickle opcodes. Writes up to 10 bytes, returns the end of those that count. */
static inline uint8_t *km_pickle_token(uint8_t *p, uint64_t v) {
    static const uint8_t opcode[3] = {0x4b, 0x4d, 0x4a};
    static const uint8_t size[3] = {2, 3, 5};
    if (__builtin_expect(v <= 0x7fffffff, 1)) {
        /* Without branches: sizes of neighbouring tokens are not predictable. */
        int k = (v > 0xff) + (v > 0xffff);
        km_store_le(p, v << 8 | opcode[k]);
        return p + size[k];
    }
    int bits = 64 - __builtin_clzll(v);
    p[0] = 0x8a;
    p[1] = (uint8_t)(bits / 8 + 1);
    km_store_le(p + 2, v);
    return p + 2 + p[1];
}

/* One token as CBOR. Writes up to 9 bytes, returns the end of those that count. */
static inline uint8_t *km_cbor_token(uint8_t *p, uint64_t v) {
    static const uint8_t opcode[4] = {0x00, 0x18, 0x19, 0x1a};
    static const uint8_t size[4] = {0, 1, 2, 4};
    if (__builtin_expect(v <= 0xffffffff, 1)) {
        int k = (v > 23) + (v > 0xff) + (v > 0xffff);
        /* The number's own bytes in big-endian order, from the lowest address on. */
        uint64_t body = __builtin_bswap64(v) >> (56 - 8 * size[k]) >> 8;
        uint64_t head = opcode[k] | (k ? 0 : v);
        km_store_le(p, body << 8 | head);
        return p + 1 + size[k];
    }
    p[0] = 0x1b;
    km_store_le(p + 1, __builtin_bswap64(v));
    return p + 9;
}

/* Head of a CBOR item: major type in the top three bits, length in its shortest form. Returns its
 * end. */
static inline uint8_t *km_cbor_head(uint8_t *p, uint8_t major, uint64_t length) {
    assert((major & 0x1f) == 0);
    uint8_t *end = km_cbor_token(p, length);
    *p |= major;
    return end;
}

/* A pickle in several frames, while it is written. */
typedef struct {
    uint8_t *p;     /* where the next byte goes */
    uint8_t *frame; /* header of the open frame, NULL when none is open */
} km_framed;

/* Writes the header of the open frame, if there is one. */
static inline void km_frame_close(km_framed *w) {
    if (!w->frame)
        return;
    ptrdiff_t size = w->p - w->frame - KM_FRAME_HEADER;
    if (size >= 4) {
        w->frame[0] = 0x95;
        km_store_le(w->frame + 1, (uint64_t)size);
    } else {
        /* A frame shorter than this goes without its header. */
        memmove(w->frame, w->frame + KM_FRAME_HEADER, (size_t)size);
        w->p -= KM_FRAME_HEADER;
    }
    w->frame = NULL;
}

/* Leaves room for a header, unless a frame is open. */
static inline void km_frame_open(km_framed *w) {
    if (!w->frame) {
        w->frame = w->p;
        w->p += KM_FRAME_HEADER;
    }
}

/* What the pickler does before each object, followed by the first write of that object. */
static inline void km_frame_object(km_framed *w) {
    if (w->frame && w->p - w->frame - KM_FRAME_HEADER >= KM_FRAME_TARGET)
        km_frame_close(w);
    km_frame_open(w);
}

/* Equivalent to: out[:] = pickle.dumps((parent, tokens, None), protocol=5)
 *
 * Returns its bytes. */
static inline size_t km_pickle_framed(uint8_t *out, const uint8_t *parent, size_t parent_size,
                                      const int64_t *tokens, int64_t n) {
    assert(n >= 1 && parent_size >= 1 && parent_size <= KM_MAX_PARENT);
    km_framed w = {out + 2, NULL};
    out[0] = 0x80;
    out[1] = 0x05;
    km_frame_object(&w);
    w.p[0] = 0x43;
    w.p[1] = (uint8_t)parent_size;
    memcpy(w.p + 2, parent, parent_size);
    w.p += 2 + parent_size;
    *w.p++ = 0x94;
    km_frame_object(&w);
    if (n > 3)
        *w.p++ = 0x28;
    for (int64_t i = 0; i < n; i++) {
        km_frame_object(&w);
        w.p = km_pickle_token(w.p, (uint64_t)tokens[i]);
    }
    *w.p++ = n > 3 ? 0x74 : (uint8_t)(0x84 + n);
    *w.p++ = 0x94;
    km_frame_object(&w);
    memcpy(w.p, "\x4e\x87\x94\x2e", 4);
    w.p += 4;
    km_frame_close(&w);
    return (size_t)(w.p - out);
}

/* The same with extra keys, for a pickle that fits one frame. `extra` holds their opcodes, NULL is
 * None. */
static inline size_t km_pickle_block(uint8_t *out, const uint8_t *parent, size_t parent_size,
                                     const int64_t *tokens, int64_t n, const uint8_t *extra,
                                     size_t extra_size) {
    assert(n >= 1 && parent_size >= 1 && parent_size <= KM_MAX_PARENT);
    uint8_t *p = out + 11;
    memcpy(out, "\x80\x05\x95", 3);
    p[0] = 0x43;
    p[1] = (uint8_t)parent_size;
    memcpy(p + 2, parent, parent_size);
    p += 2 + parent_size;
    *p++ = 0x94;
    if (n > 3)
        *p++ = 0x28;
    for (int64_t i = 0; i < n; i++)
        p = km_pickle_token(p, (uint64_t)tokens[i]);
    *p++ = n > 3 ? 0x74 : (uint8_t)(0x84 + n);
    *p++ = 0x94;
    if (extra) {
        memcpy(p, extra, extra_size);
        p += extra_size;
    } else
        *p++ = 0x4e;
    memcpy(p, "\x87\x94\x2e", 3);
    p += 3;
    km_store_le(out + 3, (uint64_t)(p - out - 11));
    return (size_t)(p - out);
}

/* Equivalent to: out[:] = cbor2.dumps((parent, tokens, extra), canonical=True)
 *
 * `extra` holds the encoding of the extra keys, NULL is None. Returns its bytes. */
static inline size_t km_cbor_block(uint8_t *out, const uint8_t *parent, size_t parent_size,
                                   const int64_t *tokens, int64_t n, const uint8_t *extra,
                                   size_t extra_size) {
    assert(n >= 1);
    uint8_t *p = out;
    *p++ = 0x83;
    p = km_cbor_head(p, 0x40, parent_size);
    memcpy(p, parent, parent_size);
    p = km_cbor_head(p + parent_size, 0x80, (uint64_t)n);
    for (int64_t i = 0; i < n; i++)
        p = km_cbor_token(p, (uint64_t)tokens[i]);
    if (extra) {
        memcpy(p, extra, extra_size);
        p += extra_size;
    } else
        *p++ = 0xf6;
    return (size_t)(p - out);
}

/* Equivalent to: out[:] = parent + b"".join(t.to_bytes(4, "little") for t in tokens)
 *
 * With a token of 33 bits or more: parent + b"\xff", and 8 bytes for each. Returns its bytes. */
static inline size_t km_page_block(uint8_t *out, const uint8_t *parent, size_t parent_size,
                                   const int64_t *tokens, int64_t n) {
    assert(n >= 1);
    uint8_t *p = out + parent_size;
    uint64_t all = 0;
    memcpy(out, parent, parent_size);
    for (int64_t i = 0; i < n; i++)
        all |= (uint64_t)tokens[i];
    if (all >> 32) {
        *p++ = 0xff;
        for (int64_t i = 0; i < n; i++, p += 8)
            km_store_le(p, (uint64_t)tokens[i]);
    } else {
        /* Each store writes four bytes too many, which the next one or nobody reads. */
        for (int64_t i = 0; i < n; i++, p += 4)
            km_store_le(p, (uint64_t)tokens[i]);
    }
    return (size_t)(p - out);
}

/* Whether a block may need a second pickle frame. Then `extra` must be None: where frames end
 * inside it depends on objects that are not known here. */
static inline bool km_may_split(int64_t n, size_t parent_size, size_t extra_size) {
    return KM_SERIAL_FIXED + 10 * (uint64_t)n + parent_size + extra_size >= KM_FRAME_TARGET;
}

/* Serialises one block to `out`, which holds km_serial_bound() bytes. Tokens are not negative. Only
 * pages may be without a parent. Returns the bytes. */
static inline size_t km_serialise(km_encoding encoding, uint8_t *out, const uint8_t *parent,
                                  size_t parent_size, const int64_t *tokens, int64_t n,
                                  const uint8_t *extra, size_t extra_size) {
    assert(n >= 1 && parent_size <= KM_MAX_PARENT && (parent_size >= 1 || encoding == KM_PAGES));
    assert(!extra || encoding == KM_CBOR || !km_may_split(n, parent_size, extra_size));
    switch (encoding) {
    case KM_PAGES:
        return km_page_block(out, parent, parent_size, tokens, n);
    case KM_CBOR:
        return km_cbor_block(out, parent, parent_size, tokens, n, extra, extra_size);
    case KM_PICKLE:
        break;
    }
    if (!km_may_split(n, parent_size, extra_size))
        return km_pickle_block(out, parent, parent_size, tokens, n, extra, extra_size);
    return km_pickle_framed(out, parent, parent_size, tokens, n);
}

#endif
