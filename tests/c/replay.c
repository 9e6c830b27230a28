/* Runs a target of tests/fuzz without libFuzzer: over the inputs that are kept in a folder, and
 * over inputs made from these. They are the same in every run, so what is found is found again.
 *
 *     replay FOLDER NUMBER [FIRST]     NUMBER made inputs, beginning with number FIRST
 */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 512 /* bytes of an input, as `make fuzz` has it */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
    uint8_t bytes[MOST];
    size_t size;
} input;

/* What runs, for the message of a crash. */
static char running[300];

static uint64_t state;

static uint64_t below(uint64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

/* Sanitizers abort as asserts and checks do, and then the input is named. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "abort_on_error=1";
}

const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void) {
    return "abort_on_error=1:print_stacktrace=1";
}

static void tell(int number) {
    (void)number;
    static const char text[] = "replay: this was ";
    (void)!write(2, text, sizeof text - 1);
    (void)!write(2, running, strlen(running));
    (void)!write(2, "\n", 1);
}

static void run(const input *in) {
    /* A copy of its own size: what reads past it is found. */
    uint8_t *data = malloc(in->size ? in->size : 1);
    if (!data)
        fail("malloc");
    memcpy(data, in->bytes, in->size);
    LLVMFuzzerTestOneInput(data, in->size);
    free(data);
}

static void load(const char *folder, const char *name, input *in) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file)
        fail(path);
    in->size = fread(in->bytes, 1, MOST, file);
    if (ferror(file))
        fail(path);
    fclose(file);
}

/* Another input out of one or two: bytes changed, a part left out, the rest of another. */
static void make(const input *kept, int n, input *out) {
    *out = kept[below((uint64_t)n)];
    if (below(4) == 0) {
        const input *other = &kept[below((uint64_t)n)];
        size_t from = below(other->size + 1), at = below(out->size + 1);
        size_t size = other->size - from < MOST - at ? other->size - from : MOST - at;
        memcpy(out->bytes + at, other->bytes + from, size);
        out->size = at + size;
    }
    if (below(4) == 0)
        out->size = below(out->size + 1);
    if (below(4) == 0 && out->size < MOST)
        out->bytes[out->size++] = (uint8_t)below(256);
    for (uint64_t changes = out->size ? below(8) : 0; changes > 0; changes--) {
        uint8_t *byte = &out->bytes[below(out->size)];
        *byte = below(2) ? (uint8_t)below(256) : (uint8_t)(*byte ^ (1u << below(8)));
    }
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: replay FOLDER NUMBER [FIRST]\n");
        return 2;
    }
    signal(SIGABRT, tell); /* then the process ends all the same */
    struct dirent **names;
    int found = scandir(argv[1], &names, NULL, alphasort), n = 0;
    if (found < 0)
        fail(argv[1]);
    input *kept = calloc((size_t)found + 1, sizeof *kept);
    if (!kept)
        fail("calloc");
    for (int i = 0; i < found; free(names[i++])) {
        if (names[i]->d_name[0] == '.')
            continue;
        load(argv[1], names[i]->d_name, &kept[n]);
        snprintf(running, sizeof running, "%.250s", names[i]->d_name);
        run(&kept[n++]);
    }
    free(names);
    if (!n) {
        fprintf(stderr, "replay: %s holds no inputs\n", argv[1]);
        return 2;
    }
    uint64_t made = strtoull(argv[2], NULL, 10);
    uint64_t first = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;
    for (uint64_t i = first; i < first + made; i++) {
        input in;
        state = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        snprintf(running, sizeof running, "made input %" PRIu64, i);
        make(kept, n, &in);
        run(&in);
    }
    printf("%d inputs that are kept, %" PRIu64 " made\n", n, made);
    free(kept);
    return 0;
}
