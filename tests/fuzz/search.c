/* The random tests of kvmask/csrc/search.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_search.c"

FUZZ(test_single, test_joint, test_needs)
