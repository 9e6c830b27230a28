/* Tests of kvmask/csrc/bits.h against loops over single bits. */
#include "check.h"

#include "bits.h"

#define MAX_BITS 320
#define MAX_WORDS (MAX_BITS / 64)

/* The twin: one byte per bit, and the words it must equal. Words are exactly as many as the bits
 * need, from the heap, so that the sanitizer sees a touch past them. */
typedef struct {
    int64_t nbits;
    bool bit[MAX_BITS];
    uint64_t *words;
} twin;

static twin twin_random(int64_t nbits, int percent) {
    twin t = {.nbits = nbits};
    t.words = calloc((size_t)km_words(nbits) + (nbits == 0), sizeof(uint64_t));
    for (int64_t i = 0; i < nbits; i++)
        if (check_chance(percent)) {
            t.bit[i] = true;
            km_set(t.words, i);
        }
    return t;
}

static void twin_check(const twin *t, const char *what) {
    for (int64_t i = 0; i < t->nbits; i++)
        CHECK(km_get(t->words, i) == t->bit[i], "%s bit %lld of %lld", what, (long long)i,
              (long long)t->nbits);
    CHECK(km_clean(t->words, t->nbits), "%s left bits past %lld", what, (long long)t->nbits);
}

static void test_words(void) {
    static const int64_t bits[] = {0, 1, 63, 64, 65, 128, 129};
    static const int64_t words[] = {0, 1, 1, 1, 2, 2, 3};
    for (int i = 0; i < 7; i++)
        assert(km_words(bits[i]) == words[i]);
    assert(km_words(INT64_MAX) == (INT64_C(1) << 57));
    assert(km_low_mask(0) == 0 && km_low_mask(1) == 1 && km_low_mask(64) == UINT64_MAX);
    uint64_t dirty[2] = {UINT64_MAX, 2};
    assert(km_clean(dirty, 64) && km_clean(dirty, 66) && !km_clean(dirty, 65));
    assert(!km_clean(dirty, 63));
}

static void test_fill(void) {
    ROUNDS (20000) {
        int64_t n = check_length();
        twin t = twin_random(n, (int)check_between(0, 100));
        int64_t start = check_between(0, n), stop = check_between(0, n);
        bool value = check_chance(50);
        km_fill(t.words, start, stop, value);
        for (int64_t i = start; i < stop; i++)
            t.bit[i] = value;
        twin_check(&t, "km_fill");
        if (n > 0) {
            int64_t i = check_between(0, n - 1);
            km_clear(t.words, i);
            t.bit[i] = false;
            twin_check(&t, "km_clear");
        }
        free(t.words);
    }
}

static void test_count_and_find(void) {
    ROUNDS (20000) {
        int64_t n = check_length();
        static const int percents[] = {0, 1, 50, 99, 100};
        twin t = twin_random(n, percents[check_between(0, 4)]);
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++)
            count += t.bit[i];
        CHECK(km_count(t.words, n) == count, "n %lld", (long long)n);
        int64_t start = check_between(0, n), stop = check_between(0, n);
        for (int v = 0; v < 2; v++) {
            int64_t next = start, prev = stop - 1;
            while (next < stop && t.bit[next] != (bool)v)
                next++;
            while (prev >= start && t.bit[prev] != (bool)v)
                prev--;
            if (start >= stop)
                next = stop, prev = start - 1;
            CHECK(km_next(t.words, start, stop, v) == next, "[%lld, %lld) of %lld",
                  (long long)start, (long long)stop, (long long)n);
            CHECK(km_prev(t.words, start, stop, v) == prev, "[%lld, %lld) of %lld",
                  (long long)start, (long long)stop, (long long)n);
            if (v == 0)
                assert(km_all(t.words, start, stop) == (next >= stop));
        }
        free(t.words);
    }
}

static void test_periodic(void) {
    ROUNDS (20000) {
        int64_t n = check_length();
        twin t = twin_random(n, 0);
        int64_t period = check_chance(70) ? check_between(1, 20) : check_between(1, 400);
        int64_t low = check_between(0, period - 1);
        int64_t origin =
            check_chance(20) ? check_between(0, INT64_C(1) << 40) : check_between(0, 500);
        km_fill_periodic(t.words, n, origin, period, low);
        for (int64_t i = 0; i < n; i++)
            t.bit[i] = (i + origin) % period >= low;
        twin_check(&t, "km_fill_periodic");
        free(t.words);
    }
}

int main(void) {
    test_words();
    test_fill();
    test_count_and_find();
    test_periodic();
    return 0;
}
