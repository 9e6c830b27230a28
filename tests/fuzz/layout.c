/* The random tests of kvmask/csrc/layout.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_layout.c"

FUZZ(test_random, test_random_range)
