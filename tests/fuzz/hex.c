/* The random tests of kvmask/csrc/hex.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_hex.c"

FUZZ(test_random)
