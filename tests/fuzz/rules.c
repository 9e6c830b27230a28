/* The random tests of kvmask/csrc/rules.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_rules.c"

FUZZ(test_masks)
