/* Tests of kvmask/csrc/layout.h: fixed edges, then every small case against counting by hand. */
#undef NDEBUG
#include "layout.h"

#include <stdio.h>

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

int main(void) {
    test_last();
    test_first_in_range();
    test_meet();
    test_find_overlap();
    puts("layout: ok");
    return 0;
}
