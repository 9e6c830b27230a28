/* Tests of kvmask/csrc/hex.h: every byte, every letter, every length around the vector's width. */
#include "check.h"

#include "hex.h"

static void test_bytes(void) {
    for (int byte = 0; byte < 256; byte++) {
        char got[2], want[3];
        snprintf(want, sizeof want, "%02x", (unsigned)byte);
        km_hex_byte((unsigned char)byte, got);
        CHECK(memcmp(got, want, 2) == 0, "byte %d is %.2s", byte, got);
    }
    for (int letter = 0; letter < 256; letter++) {
        const char *digits = "0123456789abcdef";
        const char *found = letter ? strchr(digits, letter) : NULL;
        unsigned want = found ? (unsigned)(found - digits) : 16;
        CHECK(km_hex_value((unsigned char)letter) == want, "letter %d", letter);
    }
}

/* Texts and bytes lie in memory of their own, so that a sanitizer sees one byte too many. */
static void test_lengths(void) {
    for (int64_t n = 0; n <= 100; n++) {
        unsigned char *bytes = malloc((size_t)n + 1);
        char *text = malloc(2 * (size_t)n + 1);
        for (int64_t i = 0; i < n; i++) {
            bytes[i] = (unsigned char)check_random();
            snprintf(text + 2 * i, 3, "%02x", (unsigned)bytes[i]);
        }
        char *got = malloc(2 * (size_t)n);
        unsigned char *exact = malloc((size_t)n), *back = malloc((size_t)n);
        memcpy(exact, bytes, (size_t)n);
        km_hex(exact, n, got);
        CHECK(memcmp(got, text, 2 * (size_t)n) == 0, "%d bytes", (int)n);
        CHECK(km_unhex((const unsigned char *)got, n, back), "%d bytes", (int)n);
        CHECK(memcmp(back, bytes, (size_t)n) == 0, "%d bytes", (int)n);
        free(back);
        free(exact);
        free(got);
        free(text);
        free(bytes);
    }
}

/* One letter at every place of a text: only lower-case digits are taken. */
static void test_refusals(void) {
    enum { BYTES = 20 };
    unsigned char text[2 * BYTES], out[BYTES];
    int refused = 0;
    for (int place = 0; place < 2 * BYTES; place++)
        for (int letter = 0; letter < 256; letter++) {
            memset(text, 'f', sizeof text);
            text[place] = (unsigned char)letter;
            bool digit = (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f');
            CHECK(km_unhex(text, BYTES, out) == digit, "letter %d at %d", letter, place);
            if (digit) {
                unsigned value = (unsigned)(letter <= '9' ? letter - '0' : letter - 'a' + 10);
                unsigned want = place % 2 ? 0xf0 | value : value << 4 | 0xf;
                CHECK(out[place / 2] == want, "letter %d at %d is %d", letter, place,
                      out[place / 2]);
            }
            refused += !digit;
        }
    CHECK(refused == 2 * BYTES * (256 - 16), "%d were refused", refused);
    CHECK(km_unhex(NULL, 0, out), "nothing is hexadecimal text");
    /* Two wrong letters do not make up for each other. */
    memset(text, '0', sizeof text);
    text[3] = 'G', text[4] = '`';
    CHECK(!km_unhex(text, BYTES, out), "two wrong letters");
}

/* Texts of any letters, mostly of digits. */
static void test_random(void) {
    int taken = 0;
    ROUNDS (20000) {
        int64_t n = check_between(0, 40);
        unsigned char *text = malloc(2 * (size_t)n + (n == 0)), *out = malloc((size_t)n + (n == 0));
        bool digits = true;
        int percent = check_chance(50) ? 100 : 95;
        for (int64_t i = 0; i < 2 * n; i++) {
            unsigned char letter = (unsigned char)check_between(0, 255);
            if (check_chance(percent))
                letter = (unsigned char)"0123456789abcdef"[letter % 16];
            text[i] = letter;
            digits &= letter && strchr("0123456789abcdef", letter) != NULL;
        }
        bool ok = km_unhex(text, n, out);
        CHECK(ok == digits, "%d letters", (int)(2 * n));
        if (ok) {
            char *back = malloc(2 * (size_t)n + (n == 0));
            km_hex(out, n, back);
            CHECK(memcmp(back, text, 2 * (size_t)n) == 0, "%d letters", (int)(2 * n));
            free(back);
        }
        taken += ok;
        free(out);
        free(text);
    }
    CHECK(CHECK_FUZZING || (taken > 10000 && taken < 19000), "%d were taken", taken);
}

int main(void) {
    test_random();
    test_bytes();
    test_lengths();
    test_refusals();
    return 0;
}
