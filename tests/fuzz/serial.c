/* The random tests of kvmask/csrc/serial.h, whose choices a fuzzer makes. */
#define CHECK_FUZZ
#include "../c/test_serial.c"

FUZZ(test_random, test_take)
