/* SHA-256 from libcrypto and XXH3-128 from the xxhash package, called without the interpreter, and
 * the chain of block digests built on them.
 *
 * The functions are looked up in libraries that the process has loaded already (the one behind
 * `hashlib`, the extension of `xxhash`): no second copy, no build dependency. Their prototypes are
 * those of the public headers: openssl/sha.h, openssl/evp.h, xxhash.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVMASK_DIGEST_H
#define KVMASK_DIGEST_H

#include <dlfcn.h>

#include "serial.h"

#define KM_MAX_DIGEST 32 /* bytes */

typedef enum {
    KM_NO_DIGEST = 0,
    KM_SHA256 = 1,     /* SHA256_Init, SHA256_Update, SHA256_Final */
    KM_SHA256_EVP = 2, /* the same through EVP: 25 ns more per digest, and what FIPS asks for */
    KM_XXH3_128 = 3
} km_digest_kind;

/* XXH128_hash_t: two words, low then high, returned by value. */
typedef struct {
    uint64_t low;
    uint64_t high;
} km_xxh128;

/* A digest function and what it is called through. Only what its kind needs is set. */
typedef struct {
    km_digest_kind kind;
    int size; /* bytes of a digest */
    void *md; /* EVP_MD *, or NULL */
    int (*sha_init)(void *);
    int (*sha_update)(void *, const void *, size_t);
    int (*sha_final)(unsigned char *, void *);
    void *(*ctx_new)(void);
    void (*ctx_free)(void *);
    int (*evp_init)(void *, const void *, void *);
    int (*evp_update)(void *, const void *, size_t);
    int (*evp_final)(void *, unsigned char *, unsigned int *);
    km_xxh128 (*xxh)(const void *, size_t);
} km_digest;

/* Room for a SHA256_CTX (112 bytes in every release of OpenSSL since 0.9.8), with a margin. */
typedef struct {
    _Alignas(16) unsigned char bytes[512];
} km_sha_ctx;

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises this one. */
#define KM_FIND(handle, slot, name) (*(void **)(&(slot)) = dlsym((handle), (name)))

/* Fills `d` from a library: `path` as dlopen takes it, NULL for the program itself. The library
 * stays open. Returns the kind found. `no_low_level` is for tests of the EVP path. */
static inline km_digest_kind km_load_sha256(const char *path, bool no_low_level, km_digest *d) {
    memset(d, 0, sizeof *d);
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!h)
        return KM_NO_DIGEST;
    d->size = 32;
    int (*is_fips)(void *) = NULL;
    KM_FIND(h, is_fips, "EVP_default_properties_is_fips_enabled");
    bool fips = is_fips && is_fips(NULL) == 1;
    if (!fips && !no_low_level && KM_FIND(h, d->sha_init, "SHA256_Init") &&
        KM_FIND(h, d->sha_update, "SHA256_Update") && KM_FIND(h, d->sha_final, "SHA256_Final"))
        return d->kind = KM_SHA256;
    void *(*fetch)(void *, const char *, const char *) = NULL;
    if (KM_FIND(h, fetch, "EVP_MD_fetch") && KM_FIND(h, d->ctx_new, "EVP_MD_CTX_new") &&
        KM_FIND(h, d->ctx_free, "EVP_MD_CTX_free") &&
        KM_FIND(h, d->evp_init, "EVP_DigestInit_ex") &&
        KM_FIND(h, d->evp_update, "EVP_DigestUpdate") &&
        KM_FIND(h, d->evp_final, "EVP_DigestFinal_ex") && (d->md = fetch(NULL, "SHA256", NULL)))
        return d->kind = KM_SHA256_EVP;
    return KM_NO_DIGEST;
}

/* The same for XXH3. */
static inline km_digest_kind km_load_xxh3(const char *path, km_digest *d) {
    memset(d, 0, sizeof *d);
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!h || !KM_FIND(h, d->xxh, "XXH3_128bits"))
        return KM_NO_DIGEST;
    d->size = 16;
    return d->kind = KM_XXH3_128;
}

/* Equivalent to: out[: d.size] = digest(data[:n])
 *
 * `ctx` is an EVP_MD_CTX for KM_SHA256_EVP, else unused. False when the library refuses. */
static inline bool km_digest_once(const km_digest *d, void *ctx, const uint8_t *data, size_t n,
                                  uint8_t *out) {
    switch (d->kind) {
    case KM_SHA256: {
        km_sha_ctx sha;
        return d->sha_init(&sha) == 1 && d->sha_update(&sha, data, n) == 1 &&
               d->sha_final(out, &sha) == 1;
    }
    case KM_SHA256_EVP:
        return d->evp_init(ctx, d->md, NULL) == 1 && d->evp_update(ctx, data, n) == 1 &&
               d->evp_final(ctx, out, NULL) == 1;
    case KM_XXH3_128: {
        km_xxh128 h = d->xxh(data, n);
        /* The canonical form is big endian, the high word first. */
        km_store_le(out, __builtin_bswap64(h.high));
        km_store_le(out + 8, __builtin_bswap64(h.low));
        return true;
    }
    case KM_NO_DIGEST:
        break;
    }
    return false;
}

/* The serialised extra keys of one block; `data` is NULL for None. */
typedef struct {
    const uint8_t *data;
    size_t size;
} km_extra;

/* How a run of blocks is hashed. */
typedef struct {
    const km_digest *digest;
    km_encoding encoding;
    int64_t block_size;
    const km_extra *extras; /* one per block, or NULL */
    int64_t *scratch;       /* block_size words */
    uint8_t *buffer;        /* km_serial_bound() of the largest block */
} km_chain;

#define KM_DIGEST_FAILED (-1)

/* Equivalent to: for block in blocks of tokens: parent = digest((parent, block, extra))
 *                                               out.append(parent)
 *
 * The blocks are [first, first + n). Returns n, or the number of blocks done before one with a
 * negative token, or KM_DIGEST_FAILED. */
static inline int64_t km_hash_chain(const km_chain *c, const km_tokens *tokens, int64_t first,
                                    int64_t n, const uint8_t *parent, size_t parent_size,
                                    uint8_t *out) {
    assert(c->block_size >= 1 && first >= 0 && n >= 0);
    const km_digest *d = c->digest;
    void *ctx = d->kind == KM_SHA256_EVP ? d->ctx_new() : NULL;
    if (d->kind == KM_SHA256_EVP && !ctx)
        return KM_DIGEST_FAILED;
    int64_t i = 0;
    for (; i < n; i++) {
        const km_extra *e = c->extras ? &c->extras[i] : NULL;
        if (km_take(tokens, (first + i) * c->block_size, c->block_size, c->scratch) < 0)
            break;
        size_t size = km_serialise(c->encoding, c->buffer, parent, parent_size, c->scratch,
                                   c->block_size, e ? e->data : NULL, e ? e->size : 0);
        if (!km_digest_once(d, ctx, c->buffer, size, out)) {
            i = KM_DIGEST_FAILED;
            break;
        }
        parent = out;
        parent_size = (size_t)d->size;
        out += d->size;
    }
    if (ctx)
        d->ctx_free(ctx);
    return i;
}

#endif
