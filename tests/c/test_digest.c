/* Tests of kvmask/csrc/digest.h: chains through functions that are known by heart, which can
 * refuse, and SHA-256 of the libcrypto of this machine where there is one. */
#include "check.h"

#include "digest.h"

/* A digest of this file's own: 32 bytes that depend on every byte before them. Each of its calls
 * can be made to refuse. */
static struct {
    int64_t calls, refuse_at;
    int made, freed;
    uint64_t state;
    bool no_ctx;
} fake;

static int fake_step(void) {
    return fake.calls++ != fake.refuse_at;
}

static void fake_mix(const void *data, size_t n) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++)
        fake.state = (fake.state ^ p[i]) * UINT64_C(0x100000001b3);
}

static void fake_write(unsigned char *out) {
    for (int i = 0; i < 32; i++)
        out[i] = (unsigned char)(fake.state >> (i % 8 * 8)) ^ (unsigned char)i;
}

static int fake_init(void *ctx) {
    memset(ctx, 0xa5, 112); /* what a SHA256_CTX takes */
    fake.state = 1;
    return fake_step();
}

static int fake_update(void *ctx, const void *data, size_t n) {
    (void)ctx;
    fake_mix(data, n);
    return fake_step();
}

static int fake_final(unsigned char *out, void *ctx) {
    (void)ctx;
    fake_write(out);
    return fake_step();
}

static void *fake_ctx_new(void) {
    if (fake.no_ctx)
        return NULL;
    fake.made++;
    return malloc(1);
}

static void fake_ctx_free(void *ctx) {
    fake.freed++;
    free(ctx);
}

static int fake_evp_init(void *ctx, const void *md, void *engine) {
    CHECK(ctx && md == &fake && !engine, "arguments of EVP_DigestInit_ex");
    fake.state = 1;
    return fake_step();
}

static int fake_evp_final(void *ctx, unsigned char *out, unsigned int *size) {
    CHECK(ctx && !size, "arguments of EVP_DigestFinal_ex");
    fake_write(out);
    return fake_step();
}

static km_xxh128 fake_xxh(const void *data, size_t n) {
    fake.state = 1;
    fake_mix(data, n);
    return (km_xxh128){fake.state, ~fake.state};
}

static km_digest fake_digest(km_digest_kind kind) {
    km_digest d = {.kind = kind, .size = kind == KM_XXH3_128 ? 16 : 32};
    if (kind == KM_SHA256) {
        d.sha_init = fake_init, d.sha_update = fake_update, d.sha_final = fake_final;
    } else if (kind == KM_SHA256_EVP) {
        d.md = &fake, d.ctx_new = fake_ctx_new, d.ctx_free = fake_ctx_free;
        d.evp_init = fake_evp_init, d.evp_update = fake_update, d.evp_final = fake_evp_final;
    } else {
        d.xxh = fake_xxh;
    }
    memset(&fake, 0, sizeof fake);
    fake.refuse_at = -1;
    return d;
}

enum { BLOCKS = 9, BLOCK = 5 };

static int64_t chain(const km_digest *d, const int64_t *tokens, int64_t first, int64_t n,
                     const km_extra *extras, const uint8_t *parent, uint8_t *out) {
    int64_t scratch[BLOCK];
    uint8_t *buffer = malloc(km_serial_bound(BLOCK, 32, 8));
    km_tokens t = {(const char *)tokens, 8, 8};
    km_chain c = {d, KM_PICKLE, BLOCK, extras, scratch, buffer};
    int64_t done = km_hash_chain(&c, &t, first, n, parent, 32, out);
    free(buffer);
    return done;
}

static void test_chain(void) {
    static const uint8_t parent[32] = {7}, extra[8] = {0x8c, 1, 'x', 0x94, 0x85, 0x94, 0, 0};
    int64_t tokens[BLOCKS * BLOCK];
    for (int i = 0; i < BLOCKS * BLOCK; i++)
        tokens[i] = (int64_t)(check_random() >> check_between(1, 60));
    km_extra extras[BLOCKS] = {{NULL, 0}};
    for (int i = 0; i < BLOCKS; i += 2)
        extras[i] = (km_extra){extra, 6};
    for (int kind = KM_SHA256; kind <= KM_XXH3_128; kind++)
        for (int with = 0; with < 2; with++) {
            km_digest d = fake_digest((km_digest_kind)kind);
            uint8_t *out = malloc((size_t)(BLOCKS * d.size)), block[256], one[32];
            CHECK(chain(&d, tokens, 0, BLOCKS, with ? extras : NULL, parent, out) == BLOCKS,
                  "kind %d", kind);
            /* Block after block, each with the digest before it as its parent. */
            const uint8_t *from = parent;
            size_t from_size = 32;
            for (int i = 0; i < BLOCKS; i++) {
                km_extra e = with ? extras[i] : (km_extra){NULL, 0};
                size_t size = km_serialise(KM_PICKLE, block, from, from_size, tokens + i * BLOCK,
                                           BLOCK, e.data, e.size);
                void *ctx = kind == KM_SHA256_EVP ? fake_ctx_new() : NULL;
                CHECK(km_digest_once(&d, ctx, block, size, one), "kind %d", kind);
                if (ctx)
                    fake_ctx_free(ctx);
                CHECK(memcmp(one, out + i * d.size, (size_t)d.size) == 0, "kind %d, block %d", kind,
                      i);
                from = out + i * d.size;
                from_size = (size_t)d.size;
            }
            /* A chain that goes on where another one ended. */
            uint8_t *rest = malloc((size_t)((BLOCKS - 4) * d.size));
            if (d.size == 32) {
                CHECK(chain(&d, tokens, 4, BLOCKS - 4, with ? extras : NULL, out + 3 * d.size,
                            rest) == BLOCKS - 4,
                      "kind %d", kind);
                bool same = memcmp(rest, out + 4 * d.size, (size_t)((BLOCKS - 4) * d.size)) == 0;
                /* Extra keys count from the first block of a call; they are even here too. */
                CHECK(same, "kind %d goes on", kind);
            }
            CHECK(fake.made == fake.freed, "%d contexts, %d freed", fake.made, fake.freed);
            free(rest);
            free(out);
        }
}

static void test_refusals(void) {
    static const uint8_t parent[32] = {7};
    int64_t tokens[BLOCKS * BLOCK];
    uint8_t out[BLOCKS * 32];
    for (int i = 0; i < BLOCKS * BLOCK; i++)
        tokens[i] = i;
    for (int kind = KM_SHA256; kind <= KM_SHA256_EVP; kind++)
        for (int64_t at = 0; at < 3 * BLOCKS; at++) { /* three calls per digest */
            km_digest d = fake_digest((km_digest_kind)kind);
            fake.refuse_at = at;
            CHECK(chain(&d, tokens, 0, BLOCKS, NULL, parent, out) == KM_DIGEST_FAILED,
                  "call %d of kind %d", (int)at, kind);
            CHECK(fake.calls == at + 1, "%d calls", (int)fake.calls);
            CHECK(fake.made == fake.freed, "%d contexts, %d freed", fake.made, fake.freed);
        }
    km_digest d = fake_digest(KM_SHA256_EVP);
    fake.no_ctx = true;
    CHECK(chain(&d, tokens, 0, BLOCKS, NULL, parent, out) == KM_DIGEST_FAILED, "no context");
    CHECK(fake.freed == 0 && fake.calls == 0, "no context");
    d = (km_digest){.kind = KM_NO_DIGEST};
    CHECK(!km_digest_once(&d, NULL, parent, 32, out), "no digest");
    /* A negative token ends a chain before its block. */
    for (int place = 0; place < BLOCKS * BLOCK; place++) {
        d = fake_digest(KM_SHA256);
        tokens[place] = -1;
        CHECK(chain(&d, tokens, 0, BLOCKS, NULL, parent, out) == place / BLOCK, "token %d", place);
        tokens[place] = place;
    }
    CHECK(chain(&d, tokens, 0, 0, NULL, parent, out) == 0, "no block");
}

/* The canonical form of XXH3: the high word first, each big endian. */
static void test_canonical(void) {
    km_digest d = fake_digest(KM_XXH3_128);
    uint8_t out[16];
    CHECK(km_digest_once(&d, NULL, (const uint8_t *)"a", 1, out), "xxh3");
    for (int i = 0; i < 8; i++) {
        CHECK(out[8 + i] == (uint8_t)(fake.state >> (8 * (7 - i))), "low word, byte %d", i);
        CHECK(out[i] == (uint8_t)(~fake.state >> (8 * (7 - i))), "high word, byte %d", i);
    }
}

static void from_hex(const char *text, uint8_t *out, int n) {
    for (int i = 0; i < n; i++) {
        unsigned byte;
        CHECK(sscanf(text + 2 * i, "%2x", &byte) == 1, "byte %d", i);
        out[i] = (uint8_t)byte;
    }
}

/* hashlib.sha256(b"abc"), and hashlib.sha256(pickle.dumps((parent, block, None), protocol=5)) of
 * three blocks after bytes(32). */
static void test_sha256(const km_digest *d) {
    static const char *const abc =
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    static const char *const blocks[3] = {
        "9fcd3c24b5bd2cdfec51edd6a0e75c5db25deccdbae5bf5543cfe6c86fb04fa4",
        "043b36d372cf48790d8a5a8208a320ca708539450b46db036243438f7c3215f0",
        "541d8790272fa0d1b117216a3d406c62ef607ac2931f4e901ff27e580fd96c68",
    };
    static const int64_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 1000, 100000, INT64_C(1) << 33, 9};
    static const uint8_t parent[32] = {0};
    uint8_t want[32], out[96], buffer[512];
    int64_t scratch[4];
    void *ctx = d->kind == KM_SHA256_EVP ? d->ctx_new() : NULL;
    CHECK(km_digest_once(d, ctx, (const uint8_t *)"abc", 3, out), "abc");
    if (ctx)
        d->ctx_free(ctx);
    from_hex(abc, want, 32);
    CHECK(memcmp(out, want, 32) == 0, "abc, kind %d", d->kind);
    km_tokens t = {(const char *)tokens, 8, 8};
    km_chain c = {d, KM_PICKLE, 4, NULL, scratch, buffer};
    CHECK(km_hash_chain(&c, &t, 0, 3, parent, 32, out) == 3, "kind %d", d->kind);
    for (int i = 0; i < 3; i++) {
        from_hex(blocks[i], want, 32);
        CHECK(memcmp(out + 32 * i, want, 32) == 0, "block %d, kind %d", i, d->kind);
    }
}

static void test_libraries(void) {
    km_digest d;
    CHECK(km_load_sha256("/nowhere/libcrypto.so", false, &d) == KM_NO_DIGEST, "a path to nothing");
    CHECK(km_load_xxh3("/nowhere/xxhash.so", &d) == KM_NO_DIGEST, "a path to nothing");
    CHECK(km_load_sha256("libm.so.6", false, &d) == KM_NO_DIGEST && !d.sha_final && !d.evp_final,
          "a library without it");
    CHECK(km_load_xxh3("libm.so.6", &d) == KM_NO_DIGEST, "a library without it");
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};
    int found = 0;
    for (int i = 0; i < 3; i++)
        for (int no_low_level = 0; no_low_level < 2; no_low_level++) {
            km_digest_kind kind = km_load_sha256(names[i], no_low_level, &d);
            if (kind == KM_NO_DIGEST)
                continue;
            CHECK(d.kind == kind && d.size == 32, "%s", names[i]);
            CHECK(!no_low_level || kind == KM_SHA256_EVP, "%s without its low level", names[i]);
            test_sha256(&d);
            if (d.md) { /* kvmask keeps it as long as the process lives */
                void (*md_free)(void *) = NULL;
                CHECK(KM_FIND(dlopen(names[i], RTLD_NOW), md_free, "EVP_MD_free"), "%s", names[i]);
                md_free(d.md);
            }
            found++;
        }
    if (!found)
        puts("no libcrypto on this machine: SHA-256 itself was not tested");
}

int main(void) {
    test_chain();
    test_refusals();
    test_canonical();
    test_libraries();
    return 0;
}
