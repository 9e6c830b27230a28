/* Tests of kvmask/csrc/rules.h against the rules block by block, as docs/semantics.md words them.
 */
#include "check.h"

#include "rules.h"

static int64_t pick(const int64_t *from, int64_t count) {
    return from[check_between(0, count - 1)];
}

/* Block i of the whole sequence: is it worth storing? `all` says that no block is left out. */
static bool window_rule(const km_group *g, const km_reach *r, int64_t i, bool *all) {
    int64_t b = g->block_size, a = r->alignment, shift = g->eagle ? 1 : 0;
    int64_t need = (g->span - 1 + b - 1) / b + shift;
    *all = a % b != 0;
    if (*all)
        return true;
    if (r->retention != 0) {
        int64_t segment = (r->retention == KM_DENSE ? a : r->retention) / b;
        *all = need >= segment;
        if (*all)
            return true;
        if (i >= shift && (i - shift) % segment >= segment - need)
            return true;
    }
    if (r->retention != KM_DENSE)
        for (int k = 0; k < r->n_boundaries; k++) {
            int64_t stop = r->boundaries[k] / a * a / b + shift;
            if (i >= stop - need && i < stop)
                return true;
        }
    return false;
}

static bool state_rule(const km_group *g, const km_reach *r, int64_t i, bool *all) {
    int64_t b = g->block_size;
    *all = r->retention == KM_DENSE || (r->retention != 0 && r->retention / b <= 1);
    if (*all)
        return true;
    if (r->retention != 0 && (i + 1) % (r->retention / b) == 0)
        return true;
    for (int k = 0; k < r->n_boundaries; k++)
        if (i == r->boundaries[k] / r->alignment * r->alignment / b - 1)
            return true;
    return false;
}

static void check_mask(const km_group *g, const km_reach *r, int64_t start, int64_t end) {
    int64_t nbits = end - start;
    uint64_t *w = calloc((size_t)km_words(nbits) + (nbits == 0), sizeof(uint64_t));
    bool some = km_reach_mask(g, r, start, end, w);
    for (int64_t i = start; i < end; i++) {
        bool all = true;
        bool want = g->kind == KM_WINDOW  ? window_rule(g, r, i, &all)
                    : g->kind == KM_STATE ? state_rule(g, r, i, &all)
                                          : true;
        CHECK(km_has_mask(g->kind) || all, "kind %d has a mask", g->kind);
        CHECK(some == !all, "kind %d block %lld", g->kind, (long long)i);
        if (some)
            CHECK(km_get(w, i - start) == want,
                  "kind %d eagle %d b %lld span %lld a %lld retention %lld block %lld of [%lld, "
                  "%lld)",
                  g->kind, g->eagle, (long long)g->block_size, (long long)g->span,
                  (long long)r->alignment, (long long)r->retention, (long long)i, (long long)start,
                  (long long)end);
        else
            CHECK(!km_get(w, i - start), "the words of a mask of all must stay untouched");
    }
    CHECK(km_clean(w, nbits), "bits past %lld", (long long)nbits);
    free(w);
}

static void test_masks(void) {
    static const int64_t blocks[] = {1, 4, 16, 64}, alignments[] = {1, 4, 8, 24, 64, 256, 1024};
    ROUNDS (60000) {
        int64_t b = pick(blocks, 4), a = pick(alignments, 7);
        km_group g = {.kind = (km_kind)check_between(0, KM_KINDS - 1),
                      .eagle = check_chance(40),
                      .cacheable = true,
                      .block_size = b,
                      .span =
                          check_chance(50) ? check_between(1, 4 * b + 2) : check_between(1, 600)};
        km_reach r = {.alignment = a, .retention = KM_DENSE};
        if (check_chance(50))
            r.retention = check_chance(30) ? 0 : a * check_between(1, 6);
        if (check_chance(70))
            r.n_boundaries =
                km_replay_boundaries(check_between(1, 300 * b), a, g.eagle, r.boundaries);
        int64_t end = check_length();
        int64_t start = check_chance(40) ? 0 : check_between(0, end);
        check_mask(&g, &r, start, end);
    }
}

/* A mask that begins later is the tail of the whole one. */
static void test_far_masks(void) {
    km_group g = {.kind = KM_WINDOW, .eagle = true, .cacheable = true, .block_size = 4, .span = 16};
    km_reach r = {.alignment = 256, .retention = 512};
    int64_t far = INT64_C(1) << 40;
    r.n_boundaries = km_replay_boundaries(far * 4, 256, true, r.boundaries);
    check_mask(&g, &r, far - 130, far + 130);
    check_mask(&g, &r, far - 64, far - 64);
}

static void test_boundaries(void) {
    int64_t out[KM_MAX_BOUNDARIES];
    assert(km_replay_boundaries(1, 16, false, out) == 1 && out[0] == 0);
    assert(km_replay_boundaries(64, 16, false, out) == 1 && out[0] == 63);
    /* A resend of 64 tokens resumes at 48 - 16, an extension at 64 - 16. */
    assert(km_replay_boundaries(64, 16, true, out) == 2 && out[0] == 32 && out[1] == 48);
    assert(km_replay_boundaries(65, 16, true, out) == 1 && out[0] == 48);
    assert(km_replay_boundaries(16, 16, true, out) == 1 && out[0] == 0);
    assert(km_replay_boundaries(1, 16, true, out) == 1 && out[0] == 0);
}

static void test_arithmetic(void) {
    assert(km_ceil_div(0, 7) == 0 && km_ceil_div(7, 7) == 1 && km_ceil_div(8, 7) == 2);
    assert(km_ceil_div(INT64_MAX, 1) == INT64_MAX && km_ceil_div(INT64_MAX, INT64_MAX) == 1);
    assert(km_align_down(17, 16) == 16 && km_align_down(0, 16) == 0);
}

int main(void) {
    test_arithmetic();
    test_boundaries();
    test_masks();
    test_far_masks();
    return 0;
}
