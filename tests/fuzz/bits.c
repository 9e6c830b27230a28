/* The random tests of kvmask/csrc/bits.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_bits.c"

FUZZ(test_fill, test_count_and_find, test_periodic)
