/* What the C tests share: asserts that stay on, and random numbers that repeat. */
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

static inline uint64_t check_random(void) {
    check_state ^= check_state << 13;
    check_state ^= check_state >> 7;
    check_state ^= check_state << 17;
    return check_state;
}

/* A number in [low, high]. */
static inline int64_t check_between(int64_t low, int64_t high) {
    return low + (int64_t)(check_random() % (uint64_t)(high - low + 1));
}

/* True about `percent` times in a hundred. */
static inline bool check_chance(int percent) {
    return check_between(1, 100) <= percent;
}

/* A length that hugs the edge of a word more often than not. */
static inline int64_t check_length(void) {
    static const int64_t edges[] = {0, 1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193};
    return check_chance(60) ? edges[check_between(0, 13)] : check_between(0, 300);
}

#endif
