/* Tests of kvmask/csrc/serial.h: bytes that CPython and RFC 8949 give, then random blocks against a
 * writer that puts down one byte after the other and cuts frames afterwards. */
#include "check.h"

#include "serial.h"

static const uint8_t PARENT[32] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                                   17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32};

/* A block in memory of just the promised size. */
static uint8_t *serialise(km_encoding encoding, size_t parent_size, const int64_t *tokens,
                          int64_t n, const uint8_t *extra, size_t extra_size, size_t *size) {
    uint64_t bound = km_serial_bound(n, parent_size, extra_size);
    uint8_t *out = malloc(bound);
    *size = km_serialise(encoding, out, PARENT, parent_size, tokens, n, extra, extra_size);
    CHECK(*size <= bound, "%d bytes of %d", (int)*size, (int)bound);
    return out;
}

static void golden(km_encoding encoding, size_t parent_size, const int64_t *tokens, int64_t n,
                   const char *extra, size_t extra_size, const char *want, size_t want_size) {
    size_t size;
    uint8_t *got =
        serialise(encoding, parent_size, tokens, n, (const uint8_t *)extra, extra_size, &size);
    CHECK(size == want_size && memcmp(got, want, size) == 0, "encoding %d, %d tokens, %d bytes",
          encoding, (int)n, (int)size);
    free(got);
}

#define GOLDEN(encoding, parent_size, tokens, extra, extra_size, want)                             \
    golden(encoding, parent_size, tokens, (int64_t)(sizeof(tokens) / 8), extra, extra_size, want,  \
           sizeof(want) - 1)

static void test_golden(void) {
    static const int64_t one[] = {0}, two[] = {255, 256}, three[] = {65535, 65536, 0x7fffffff};
    static const int64_t four[] = {0x80000000, 0xffffffff, INT64_C(1) << 32, INT64_MAX};
    static const int64_t heads[] = {
        0, 23, 24, 255, 256, 65535, 65536, 0xffffffff, INT64_C(1) << 32};
#define HEAD(size) "\x80\x05\x95" size "\x00\x00\x00\x00\x00\x00\x00\x43\x08"
#define EIGHT "\x01\x02\x03\x04\x05\x06\x07\x08"
    /* pickle.dumps((bytes(range(1, 9)), tokens, None), protocol=5) */
    GOLDEN(KM_PICKLE, 8, one, NULL, 0, HEAD("\x13") EIGHT "\x94\x4b\x00\x85\x94\x4e\x87\x94\x2e");
    GOLDEN(KM_PICKLE, 8, two, NULL, 0,
           HEAD("\x16") EIGHT "\x94\x4b\xff\x4d\x00\x01\x86\x94\x4e\x87\x94\x2e");
    GOLDEN(KM_PICKLE, 8, three, NULL, 0,
           HEAD("\x1e") EIGHT "\x94\x4d\xff\xff\x4a\x00\x00\x01\x00\x4a\xff\xff\xff\x7f\x87"
                              "\x94\x4e\x87\x94\x2e");
    GOLDEN(KM_PICKLE, 8, four, NULL, 0,
           HEAD("\x31") EIGHT "\x94\x28\x8a\x05\x00\x00\x00\x80\x00\x8a\x05\xff\xff\xff\xff\x00"
                              "\x8a\x05\x00\x00\x00\x00\x01\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"
                              "\x74\x94\x4e\x87\x94\x2e");
    /* The heads of RFC 8949, appendix A. */
    GOLDEN(KM_CBOR, 8, heads, NULL, 0,
           "\x83\x48" EIGHT "\x89\x00\x17\x18\x18\x18\xff\x19\x01\x00\x19\xff\xff\x1a\x00\x01\x00"
           "\x00\x1a\xff\xff\xff\xff\x1b\x00\x00\x00\x01\x00\x00\x00\x00\xf6");
    GOLDEN(KM_CBOR, 8, one, "\x81\x61\x61", 3, "\x83\x48" EIGHT "\x81\x00\x81\x61\x61");
    /* Pages of SGLang: four bytes, and eight where one token needs them. */
    GOLDEN(KM_PAGES, 0, two, NULL, 0, "\xff\x00\x00\x00\x00\x01\x00\x00");
    GOLDEN(KM_PAGES, 2, four, NULL, 0,
           "\x01\x02\xff\x00\x00\x00\x80\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00\x00\x00"
           "\x00\x00\x00\x00\x01\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\x7f");
}

/* FNV-1a: enough to know the bytes of a long pickle again. */
static uint64_t fnv(const uint8_t *p, size_t n) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Pickles of more than one frame, by the bytes and checksums of
 * pickle.dumps((bytes(range(1, 33)), tuple(tokens), None), protocol=5). */
static void test_frames(void) {
    static const struct {
        int64_t n, scale, add, modulus;
        size_t size;
        uint64_t sum;
    } cases[] = {
        {30000, 7919, 0, 200000, 130360, UINT64_C(0xed57e645c2f7a481)},
        {13100, 1, 1099511627776, 1099511627776, 104862, UINT64_C(0x33c7d98477cc7f1a)},
        {21845, 1, 256, 1000, 65597, UINT64_C(0xf67947f0347cffb9)},
        {21835, 1, 256, 1000, 65567, UINT64_C(0xee3c689f221b1d08)},
        {32760, 1, 0, 250, 65582, UINT64_C(0x2056b32e0e9bd19f)},
        {65530, 1, 0, 250, 131131, UINT64_C(0x6cc7ef636e623afa)},
        {32748, 1, 0, 250, 65549, UINT64_C(0xe21de79542e891a4)},
        {32749, 1, 0, 250, 65560, UINT64_C(0x3951946d02bdd122)},
        {32750, 1, 0, 250, 65562, UINT64_C(0x3b6f5a192bd59a48)},
        {65500, 1, 0, 250, 131062, UINT64_C(0x4af97aa9dd0669fa)},
        {65517, 1, 0, 250, 131105, UINT64_C(0xeb0f6404673a77ac)},
        {65516, 1, 0, 250, 131094, UINT64_C(0xf48e975f494323de)},
        {65518, 1, 0, 250, 131107, UINT64_C(0xe1f9ff28e162f7a6)},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int64_t *tokens = malloc((size_t)cases[c].n * 8);
        for (int64_t i = 0; i < cases[c].n; i++)
            tokens[i] = i * cases[c].scale % cases[c].modulus + cases[c].add;
        size_t size;
        uint8_t *got = serialise(KM_PICKLE, 32, tokens, cases[c].n, NULL, 0, &size);
        CHECK(size == cases[c].size && fnv(got, size) == cases[c].sum, "case %d: %d bytes", (int)c,
              (int)size);
        free(got);
        free(tokens);
    }
}

/* The twin: objects one after the other, each with the place where it begins. */
typedef struct {
    uint8_t *bytes;
    size_t size;
    size_t *starts;
    size_t objects;
} writer;

static void put(writer *w, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        w->bytes[w->size++] = (uint8_t)(value >> (8 * i) & 0xff);
}

static void put_big(writer *w, uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; i--)
        w->bytes[w->size++] = (uint8_t)(value >> (8 * i) & 0xff);
}

static void put_all(writer *w, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        w->bytes[w->size++] = p[i];
}

static void begin(writer *w) {
    w->starts[w->objects++] = w->size;
}

static void twin_pickle(writer *w, size_t parent_size, const int64_t *tokens, int64_t n,
                        const uint8_t *extra, size_t extra_size) {
    writer body = {malloc(64 + 10 * (size_t)n + parent_size + extra_size), 0,
                   malloc((size_t)(n + 4) * sizeof(size_t)), 0};
    begin(&body);
    put(&body, 0x43, 1);
    put(&body, parent_size, 1);
    put_all(&body, PARENT, parent_size);
    put(&body, 0x94, 1);
    begin(&body);
    if (n > 3)
        put(&body, 0x28, 1);
    for (int64_t i = 0; i < n; i++) {
        uint64_t v = (uint64_t)tokens[i];
        begin(&body);
        if (v < 256)
            put(&body, 0x4b, 1), put(&body, v, 1);
        else if (v < 65536)
            put(&body, 0x4d, 1), put(&body, v, 2);
        else if (v < UINT64_C(1) << 31)
            put(&body, 0x4a, 1), put(&body, v, 4);
        else {
            int bytes = 1; /* so many that the top bit is free for a sign */
            while (bytes < 8 && v >> (8 * bytes - 1))
                bytes++;
            put(&body, 0x8a, 1), put(&body, (uint64_t)bytes, 1), put(&body, v, bytes);
        }
    }
    put(&body, n > 3 ? 0x74 : 0x84 + (uint64_t)n, 1);
    put(&body, 0x94, 1);
    begin(&body);
    if (extra)
        put_all(&body, extra, extra_size);
    else
        put(&body, 0x4e, 1);
    put(&body, 0x87, 1);
    put(&body, 0x94, 1);
    put(&body, 0x2e, 1);
    /* Before each object a frame of 65,536 bytes or more ends. */
    put(w, 0x0580, 2);
    size_t from = 0;
    for (size_t k = 1; k <= body.objects; k++) {
        size_t to = k < body.objects ? body.starts[k] : body.size;
        if (k < body.objects && to - from < 65536)
            continue;
        if (to - from >= 4)
            put(w, 0x95, 1), put(w, to - from, 8);
        put_all(w, body.bytes + from, to - from);
        from = to;
    }
    free(body.starts);
    free(body.bytes);
}

static void cbor_number(writer *w, uint64_t major, uint64_t v) {
    if (v < 24)
        put(w, major | v, 1);
    else if (v < 256)
        put(w, major | 24, 1), put_big(w, v, 1);
    else if (v < 65536)
        put(w, major | 25, 1), put_big(w, v, 2);
    else if (v >> 32 == 0)
        put(w, major | 26, 1), put_big(w, v, 4);
    else
        put(w, major | 27, 1), put_big(w, v, 8);
}

static void twin(writer *w, km_encoding encoding, size_t parent_size, const int64_t *tokens,
                 int64_t n, const uint8_t *extra, size_t extra_size) {
    if (encoding == KM_PICKLE) {
        twin_pickle(w, parent_size, tokens, n, extra, extra_size);
    } else if (encoding == KM_CBOR) {
        put(w, 0x83, 1);
        cbor_number(w, 0x40, parent_size);
        put_all(w, PARENT, parent_size);
        cbor_number(w, 0x80, (uint64_t)n);
        for (int64_t i = 0; i < n; i++)
            cbor_number(w, 0, (uint64_t)tokens[i]);
        if (extra)
            put_all(w, extra, extra_size);
        else
            put(w, 0xf6, 1);
    } else {
        put_all(w, PARENT, parent_size);
        bool wide = false;
        for (int64_t i = 0; i < n; i++)
            wide |= (uint64_t)tokens[i] >= UINT64_C(1) << 32;
        if (wide)
            put(w, 0xff, 1);
        for (int64_t i = 0; i < n; i++)
            put(w, (uint64_t)tokens[i], wide ? 8 : 4);
    }
}

/* A token beside one of the edges between widths, or any. */
static int64_t random_token(int most_bits) {
    int bits = (int)check_between(0, most_bits);
    uint64_t edge = UINT64_C(1) << bits;
    if (check_chance(40))
        return (int64_t)(edge - (uint64_t)check_between(0, 1));
    return (int64_t)(check_random() & (edge - 1));
}

static void test_random(void) {
    int framed = 0, wide = 0;
    ROUNDS (6000) {
        km_encoding encoding = (km_encoding)check_between(0, 2);
        int64_t n = check_chance(90) ? check_between(1, 40) : check_between(1, 300);
        if (check_chance(2))
            n = check_between(6000, 34000);
        size_t parent_size = (size_t)check_between(encoding == KM_PAGES ? 0 : 1, 32);
        int most_bits = check_chance(50) ? 17 : check_chance(50) ? 33 : 62;
        int64_t *tokens = malloc((size_t)n * 8);
        for (int64_t i = 0; i < n; i++)
            tokens[i] = random_token(most_bits);
        uint8_t extra[40];
        size_t extra_size = (size_t)check_between(1, 40);
        for (size_t i = 0; i < extra_size; i++)
            extra[i] = (uint8_t)check_random();
        bool split = km_may_split(n, parent_size, extra_size);
        bool has_extra = encoding != KM_PAGES && check_chance(30);
        if (has_extra && encoding == KM_PICKLE && split)
            has_extra = false;
        if (!has_extra)
            extra_size = 0;
        writer w = {malloc(256 + 12 * (size_t)n), 0, NULL, 0};
        twin(&w, encoding, parent_size, tokens, n, has_extra ? extra : NULL, extra_size);
        size_t size;
        uint8_t *got = serialise(encoding, parent_size, tokens, n, has_extra ? extra : NULL,
                                 extra_size, &size);
        CHECK(size == w.size && memcmp(got, w.bytes, size) == 0,
              "round %d, encoding %d, %d tokens: %d bytes, not %d", round, encoding, (int)n,
              (int)size, (int)w.size);
        framed += encoding == KM_PICKLE && size > 65536;
        wide += most_bits > 31;
        free(got);
        free(w.bytes);
        free(tokens);
    }
    CHECK(CHECK_FUZZING || (framed > 10 && wide > 100), "%d of many frames, %d wide", framed, wide);
}

static void test_take(void) {
    ROUNDS (3000) {
        int width = check_chance(50) ? 4 : 8;
        int64_t count = check_between(1, 50), gap = check_between(0, 3), n;
        bool reversed = check_chance(50);
        char *memory = malloc((size_t)(count * (width + gap)));
        int64_t stride = (width + gap) * (reversed ? -1 : 1), out[50], want[50];
        const char *base = reversed ? memory + (count - 1) * (width + gap) : memory;
        for (int64_t i = 0; i < count; i++) {
            int64_t v = random_token(width == 4 ? 30 : 62);
            if (check_chance(2))
                v = -1 - v;
            int32_t narrow = (int32_t)v;
            memcpy(memory + (base - memory) + i * stride, width == 4 ? (void *)&narrow : (void *)&v,
                   (size_t)width);
            want[i] = v;
        }
        int64_t first = check_between(0, count - 1);
        n = check_between(0, count - first);
        km_tokens t = {base, stride, width};
        int64_t all = km_take(&t, first, n, out);
        bool negative = false;
        for (int64_t i = 0; i < n; i++) {
            CHECK(out[i] == want[first + i], "token %d", (int)i);
            negative |= out[i] < 0;
        }
        CHECK((all < 0) == negative, "%d tokens", (int)n);
        free(memory);
    }
}

int main(void) {
    test_golden();
    test_frames();
    test_random();
    test_take();
    return 0;
}
