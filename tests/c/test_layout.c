/* Tests of kvmask/csrc/layout.h: fixed edges, then every small case against counting by hand, and
 * random regions anywhere in 64 bits. */
#include "check.h"

#include "layout.h"

static void test_last(void) {
    uint64_t last;
    km_region r = {UINT64_MAX, 1, 1};
    assert(km_region_last(&r, 1, &last) && last == UINT64_MAX);
    assert(!km_region_last(&r, 2, &last));
    r = (km_region){UINT64_MAX, 2, 2};
    assert(!km_region_last(&r, 1, &last));
    r = (km_region){(UINT64_C(1) << 63) - 4096, 4096, 4096};
    assert(km_region_last(&r, 2, &last) && last == (UINT64_C(1) << 63) + 4095);
    assert(km_region_address(&r, 1) == UINT64_C(1) << 63);
    r = (km_region){0, 1, UINT64_C(1) << 32};
    assert(km_region_last(&r, UINT64_C(1) << 32, &last));
    assert(!km_region_last(&r, (UINT64_C(1) << 32) + 1, &last));
    r = (km_region){0x7f0000000000, 1039680, 1039680};
    assert(km_region_address(&r, 2066) == UINT64_C(139640124706432));
}

static void test_first_in_range(void) {
    for (uint64_t m = 1; m <= 24; m++)
        for (uint64_t step = 0; step < m; step++)
            for (uint64_t low = 0; low < m; low++)
                for (uint64_t high = low; high < m; high++) {
                    uint64_t want = 0, got = 0;
                    while (want <= m && !(step * want % m >= low && step * want % m <= high))
                        want++;
                    bool found = km_first_in_range(step, m, low, high, &got);
                    assert(found == (want <= m));
                    assert(!found || got == want);
                }
    uint64_t x; /* x * 3 % 2^64-1-ish values near the top of the range */
    assert(km_first_in_range(UINT64_MAX - 1, UINT64_MAX, 5, 5, &x) && x == UINT64_MAX - 5);
    assert(!km_first_in_range(2, UINT64_MAX - 1, 5, 5, &x));
}

static bool meet_by_hand(const km_region *a, const km_region *b, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = 0; j < n; j++) {
            uint64_t p = a->base + i * a->stride, q = b->base + j * b->stride;
            if (p < q + b->size && q < p + a->size)
                return true;
        }
    return false;
}

static void test_meet(void) {
    long cases = 0, met = 0;
    for (uint64_t n = 1; n <= 4; n++)
        for (uint64_t as = 1; as <= 6; as++)
            for (uint64_t bs = 1; bs <= 6; bs++)
                for (uint64_t a_size = 1; a_size <= as; a_size++)
                    for (uint64_t b_size = 1; b_size <= bs; b_size++)
                        for (uint64_t base = 0; base <= 30; base++) {
                            km_region a = {12, a_size, as}, b = {base, b_size, bs};
                            bool want = meet_by_hand(&a, &b, n);
                            assert(km_regions_meet(&a, &b, n) == want);
                            assert(km_regions_meet(&b, &a, n) == want);
                            cases++;
                            met += want;
                        }
    assert(met > 0 && met < cases);
    /* Sizes and blocks far too many to walk. */
    uint64_t n = UINT64_C(1) << 40;
    km_region a = {0, 1, 6}, b = {3, 1, 10};
    assert(km_regions_meet(&a, &b, n) == false); /* even against odd addresses */
    a.stride = 7;
    assert(km_regions_meet(&a, &b, n));
    a = (km_region){0, UINT64_C(1) << 63, 0};
    b = (km_region){(UINT64_C(1) << 63) - 1, UINT64_C(1) << 62, 0};
    assert(km_regions_meet(&a, &b, 1));
    b.base++;
    assert(!km_regions_meet(&a, &b, 1));
}

static void test_find_overlap(void) {
    km_region r[] = {{0, 16, 64}, {16, 16, 64}, {32, 33, 64}, {256, 1, 64}};
    int64_t i = -1, j = -1;
    assert(km_regions_find_overlap(r, 4, 4, &i, &j) && i == 0 && j == 2);
    r[2].size = 32;
    assert(!km_regions_find_overlap(r, 4, 4, &i, &j));
    assert(km_regions_find_overlap(r, 4, 5, &i, &j) && i == 0 && j == 3);
    assert(!km_regions_find_overlap(r, 0, 4, &i, &j));
    km_region last_byte[] = {{0, 16, 64}, {79, 1, 64}};
    assert(km_regions_find_overlap(last_byte, 2, 2, &i, &j) && i == 0 && j == 1);
    assert(!km_regions_find_overlap(last_byte, 2, 1, &i, &j));
}

static int by_base(const void *a, const void *b) {
    const km_region *p = a, *q = b;
    return p->base < q->base ? -1 : p->base > q->base;
}

/* Few blocks, so that their bytes can be compared block by block, at any address. */
static void test_random(void) {
    int met = 0;
    ROUNDS (20000) {
        enum { MOST = 6 };
        km_region r[MOST];
        uint64_t n = (uint64_t)check_between(1, 8);
        int64_t regions = check_between(1, MOST);
        /* Near the top an address space ends, and nowhere else does it matter where they are. */
        uint64_t origin = check_chance(50) ? UINT64_MAX - (uint64_t)check_between(0, 4000) : 0;
        for (int64_t i = 0; i < regions; i++) {
            r[i].stride = (uint64_t)check_between(1, 200);
            r[i].size = (uint64_t)check_between(1, n == 1 ? 300 : (int64_t)r[i].stride);
            r[i].base = origin + (uint64_t)check_between(0, 3000);
            uint64_t last = 0;
            unsigned __int128 exact = (unsigned __int128)r[i].stride * (n - 1) + r[i].base;
            exact += r[i].size - 1;
            bool fits = km_region_last(&r[i], n, &last);
            CHECK(fits == (exact <= UINT64_MAX), "region %d", (int)i);
            CHECK(!fits || last == (uint64_t)exact, "region %d", (int)i);
            if (!fits) { /* contract of what follows */
                r[i].base = origin ? origin - UINT64_C(5000) : 0;
                fits = km_region_valid(&r[i], n);
                CHECK(fits, "region %d", (int)i);
            }
        }
        qsort(r, (size_t)regions, sizeof *r, by_base);
        int64_t first = -1, second = -1;
        for (int64_t i = 0; i < regions && first < 0; i++)
            for (int64_t j = i + 1; j < regions && first < 0; j++) {
                bool want = false; /* differences of addresses do not wrap */
                for (uint64_t p = 0; p < n; p++)
                    for (uint64_t q = 0; q < n; q++) {
                        uint64_t a = km_region_address(&r[i], p), b = km_region_address(&r[j], q);
                        want |= a <= b ? b - a < r[i].size : a - b < r[j].size;
                    }
                CHECK(km_regions_meet(&r[i], &r[j], n) == want, "regions %d and %d", (int)i,
                      (int)j);
                CHECK(km_regions_meet(&r[j], &r[i], n) == want, "regions %d and %d", (int)j,
                      (int)i);
                if (want)
                    first = i, second = j;
            }
        int64_t i = -1, j = -1;
        bool found = km_regions_find_overlap(r, regions, n, &i, &j);
        CHECK(found == (first >= 0), "%d regions", (int)regions);
        CHECK(!found || (i == first && j == second), "(%d, %d), not (%d, %d)", (int)i, (int)j,
              (int)first, (int)second);
        met += found;
    }
    CHECK(CHECK_FUZZING || (met > 1000 && met < 19000), "%d met", met);
}

/* Numbers of any size: a result is in range and none before it, as far as one can walk. */
static void test_random_range(void) {
    ROUNDS (20000) {
        uint64_t modulus = check_random() >> check_between(0, 63);
        modulus = modulus ? modulus : 1;
        uint64_t step = check_random() % modulus, low = check_random() % modulus;
        uint64_t high = low + check_random() % (modulus - low), x = 0;
        bool found = km_first_in_range(step, modulus, low, high, &x);
        uint64_t walk = found && x < 2000 ? x : 2000;
        if (!found && modulus < 2000)
            walk = modulus;
        unsigned __int128 at = 0;
        for (uint64_t i = 0; i < walk; i++, at += step) {
            uint64_t here = (uint64_t)(at % modulus);
            CHECK(here < low || here > high, "%d comes before", (int)i);
        }
        uint64_t there = (uint64_t)((unsigned __int128)step * x % modulus);
        CHECK(!found || (there >= low && there <= high), "found outside");
    }
}

int main(void) {
    test_random();
    test_random_range();
    test_last();
    test_first_in_range();
    test_meet();
    test_find_overlap();
    return 0;
}
