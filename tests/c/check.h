/* What the C tests share: asserts that stay on, and random numbers that repeat.
 *
 * With CHECK_FUZZ (tests/fuzz) the numbers come from the fuzzer: each random test is a target. */
#ifndef KVMASK_TEST_CHECK_H
#define KVMASK_TEST_CHECK_H

#undef NDEBUG
#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                             \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t check_state = UINT64_C(0x9e3779b97f4a7c15);

static inline uint64_t check_next(void) {
    check_state ^= check_state << 13;
    check_state ^= check_state >> 7;
    check_state ^= check_state << 17;
    return check_state;
}

#ifndef CHECK_FUZZ
#define CHECK_FUZZING false

static inline uint64_t check_below(uint64_t n) {
    return check_next() % n;
}

static inline uint64_t check_random(void) {
    return check_next();
}

#else
#define CHECK_FUZZING true
#define main check_main

static const uint8_t *check_input;
static size_t check_left;

/* As few bytes of the input as tell so many values apart. Where it has ended come zeros. */
static inline uint64_t check_below(uint64_t n) {
    uint64_t value = 0;
    for (uint64_t most = n - 1; most && check_left; most >>= 8, check_left--)
        value = value << 8 | *check_input++;
    return value % n;
}

static inline uint64_t check_random(void) {
    uint64_t value = check_below(UINT64_C(1) << 32);
    return value << 32 | check_below(UINT64_C(1) << 32);
}

/* Tests take turns by the first byte of the input. */
#define FUZZ(...)                                                                                  \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);                                  \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {                                 \
        static void (*const tests[])(void) = {__VA_ARGS__};                                        \
        check_input = data;                                                                        \
        check_left = size;                                                                         \
        tests[check_below(sizeof(tests) / sizeof(*tests))]();                                      \
        return 0;                                                                                  \
    }
#endif

/* Rounds of a random test; a fuzzer goes one at a time. */
#define ROUNDS(n) for (int round = 0; round < (CHECK_FUZZING ? 1 : (n)); round++)

/* A number in [low, high]. */
static inline int64_t check_between(int64_t low, int64_t high) {
    return low + (int64_t)check_below((uint64_t)(high - low) + 1);
}

/* True about `percent` times in a hundred, and not where a fuzzer's input has ended. */
static inline bool check_chance(int percent) {
    return check_between(1, 100) > 100 - percent;
}

/* A length that hugs the edge of a word more often than not. */
static inline int64_t check_length(void) {
    static const int64_t edges[] = {0, 1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193};
    return check_chance(60) ? edges[check_between(0, 13)] : check_between(0, 300);
}

#endif
