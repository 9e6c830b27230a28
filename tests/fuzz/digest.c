/* The random tests of kvmask/csrc/digest.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_digest.c"

FUZZ(test_chain)
