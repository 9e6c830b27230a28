/* Tests of kvmask/csrc/search.h: each search against a loop over single blocks, the joint search
 * against its own definition, and searches that know little against the one that knows all. */
#include "check.h"

#include "search.h"

#define MAX_BITS 320
#define MAX_SETS 4

static bool has(const km_presence *p, int64_t bit) {
    return bit >= 0 && bit < p->nbits && km_get(p->maybe, bit);
}

static bool has_block(const km_presence *p, int64_t block) {
    return has(p, (block + 1) * p->stride - 1);
}

typedef struct {
    int64_t first, len, hit;
} answer;

static answer full_rule(const km_search *s, const km_set_state *set, int64_t max_length,
                        bool drop) {
    const km_presence *p = &set->presence;
    int64_t b = set->group.block_size, run = 0;
    while (run < max_length / b && has_block(p, run))
        run++;
    int64_t a = s->partial ? s->hash_block : s->alignment, hit = run * b;
    if (s->partial && b > s->hash_block)
        for (int64_t end = run * b + a; end < (run + 1) * b && end <= max_length; end += a)
            if (has(p, end / a - 1))
                hit = end;
    if (drop && hit > 0)
        hit -= a < b ? a : b;
    hit = hit / a * a;
    return (answer){0, (hit + b - 1) / b, hit};
}

static answer window_rule(const km_search *s, const km_set_state *set, int64_t max_length,
                          bool drop) {
    int64_t b = set->group.block_size, a = s->partial ? s->hash_block : s->alignment;
    int64_t shift = drop ? 1 : 0, need = (set->group.span - 1 + b - 1) / b + shift;
    if (need < 1)
        need = 1;
    int64_t run = 0, len = -1, first = 0;
    for (int64_t i = max_length / b - 1; i >= 0 && len < 0; i--) {
        if (!has_block(&set->presence, i)) {
            run = 0;
        } else if (run > 0 || (i + 1 - shift) * b % a == 0) {
            if (++run == need) {
                len = i + run;
                first = i;
            }
        }
    }
    if (len < 0) /* the run that touches block 0, however short */
        for (len = run; len * b % a; len--)
            ;
    if (drop && len > 0)
        for (len--; len * b % a; len--)
            ;
    return (answer){first < len ? first : len, len, len * b};
}

static answer state_rule(const km_search *s, const km_set_state *set, int64_t max_length) {
    int64_t b = set->group.block_size, a = s->partial ? s->hash_block : s->alignment;
    if (s->partial && b > s->hash_block) {
        for (int64_t end = max_length / a * a; end > 0; end -= a)
            if (has(&set->presence, end / a - 1))
                return (answer){(end - 1) / b, (end - 1) / b + 1, end};
        return (answer){0, 0, 0};
    }
    for (int64_t i = max_length / b - 1; i >= 0; i--)
        if ((i + 1) * b % a == 0 && has_block(&set->presence, i))
            return (answer){i, i + 1, (i + 1) * b};
    return (answer){0, 0, 0};
}

static answer chunked_rule(const km_set_state *set, int64_t max_length) {
    int64_t b = set->group.block_size;
    int64_t first = max_length / set->group.span * set->group.span / b, end = first;
    while (end < max_length / b && has_block(&set->presence, end))
        end++;
    return (answer){first, end, end * b};
}

static answer rule(const km_search *s, const km_set_state *set, int64_t max_length, bool drop) {
    switch (set->group.kind) {
    case KM_FULL:
        return full_rule(s, set, max_length, drop);
    case KM_WINDOW:
        return window_rule(s, set, max_length, drop);
    case KM_STATE:
        return state_rule(s, set, max_length);
    case KM_CHUNKED:
        break;
    }
    return chunked_rule(set, max_length);
}

/* A random search. Its words are on the heap and exactly as long as the bits need. */
static km_search make(km_set_state *sets, int n, bool partial) {
    km_search s = {.sets = sets, .n_sets = n, .partial = partial};
    static const int64_t ratios[] = {1, 2, 4, 8};
    s.hash_block = check_chance(50) ? 1 : 4;
    int64_t biggest = 1;
    for (int i = 0; i < n; i++) {
        int64_t ratio = ratios[check_between(0, 3)];
        if (ratio > biggest)
            biggest = ratio;
        sets[i] = (km_set_state){.group = {.kind = (km_kind)check_between(0, KM_KINDS - 1),
                                           .cacheable = true,
                                           .block_size = s.hash_block * ratio}};
        sets[i].group.eagle = check_chance(30);
    }
    s.alignment = s.hash_block * biggest * (check_chance(30) ? check_between(1, 3) : 1);
    for (int i = 0; i < n; i++) {
        km_group *g = &sets[i].group;
        if (g->kind == KM_FULL && i > 0)
            g->kind = KM_WINDOW; /* full attention comes first, and equal specs are one set */
        if (g->kind == KM_CHUNKED && (g->block_size != s.alignment || partial))
            g->kind = KM_WINDOW;
        g->span = g->kind == KM_CHUNKED ? g->block_size * check_between(1, 5)
                                        : check_between(1, 5 * g->block_size);
        km_presence *p = &sets[i].presence;
        p->stride = partial ? g->block_size / s.hash_block : 1;
        p->nbits = check_length();
        uint64_t *w = calloc((size_t)km_words(p->nbits) + (p->nbits == 0), sizeof(uint64_t));
        static const int percents[] = {0, 50, 80, 95, 100};
        int percent = percents[check_between(0, 4)];
        for (int64_t bit = 0; bit < p->nbits; bit++)
            if (check_chance(percent))
                km_set(w, bit);
        p->maybe = w;
    }
    return s;
}

static void release(km_search *s) {
    for (int i = 0; i < s->n_sets; i++)
        free((void *)s->sets[i].presence.maybe);
}

static void test_single(void) {
    ROUNDS (60000) {
        km_set_state set;
        bool partial = check_chance(40);
        km_search s = make(&set, 1, partial);
        int64_t max_length = check_between(0, 340) * s.hash_block + check_between(0, 3);
        bool drop = check_chance(40);
        /* The engine asks windows for aligned lengths, plus the block that EAGLE drops. */
        answer want = rule(&s, &set, max_length, drop);
        assert(km_find_set(&s, &set, max_length, drop));
        CHECK(set.hit == want.hit && set.len == want.len &&
                  (set.len == 0 || set.first == want.first),
              "kind %d partial %d drop %d b %lld a %lld span %lld max %lld: "
              "[%lld, %lld) %lld, want [%lld, %lld) %lld",
              set.group.kind, partial, drop, (long long)set.group.block_size,
              (long long)s.alignment, (long long)set.group.span, (long long)max_length,
              (long long)set.first, (long long)set.len, (long long)set.hit, (long long)want.first,
              (long long)want.len, (long long)want.hit);
        release(&s);
    }
}

/* Without EAGLE the joint hit is the largest length that no set shortens, searched downwards. Full
 * attention is searched once: what is reused up to a length is reused up to every shorter one,
 * where with partial hits its last key may be a later boundary of the same block. */
static void test_joint(void) {
    ROUNDS (30000) {
        km_set_state sets[MAX_SETS];
        km_search s = make(sets, (int)check_between(2, MAX_SETS), check_chance(30));
        int64_t hit = check_between(0, 40) * s.alignment, before, full = INT64_MAX;
        int64_t got = km_find_hit(&s, hit, false);
        if (sets[0].group.kind == KM_FULL)
            full = full_rule(&s, &sets[0], hit, false).hit;
        do {
            before = hit;
            hit = full < hit ? full : hit;
            for (int i = 0; i < s.n_sets; i++)
                if (sets[i].group.kind != KM_FULL)
                    hit = rule(&s, &sets[i], hit, false).hit;
        } while (hit < before);
        CHECK(got == hit, "hit %lld, want %lld", (long long)got, (long long)hit);
        for (int i = 0; i < s.n_sets; i++)
            for (int64_t b = sets[i].first; b < sets[i].len && !s.partial; b++)
                CHECK(has_block(&sets[i].presence, b), "set %d claims absent block", i);
        release(&s);
    }
}

/* A search that is told only what it asks for, bit by bit, ends at the answer of the one that
 * knows everything, and never asks for what it knows. */
static void test_needs(void) {
    int64_t asked = 0, total = 0;
    ROUNDS (15000) {
        km_set_state sets[MAX_SETS];
        km_search s = make(sets, (int)check_between(1, MAX_SETS), check_chance(30));
        int64_t max_length = check_between(0, 40) * s.alignment;
        bool eagle = check_chance(50);
        int64_t want = km_find_hit(&s, max_length, eagle);
        km_set_state known_all[MAX_SETS];
        memcpy(known_all, sets, sizeof(sets));
        uint64_t maybe[MAX_SETS][MAX_BITS / 64], known[MAX_SETS][MAX_BITS / 64];
        memset(maybe, 0, sizeof(maybe));
        memset(known, 0, sizeof(known));
        for (int i = 0; i < s.n_sets; i++) {
            km_presence *p = &sets[i].presence;
            km_fill(maybe[i], 0, p->nbits, true);
            p->maybe = maybe[i];
            p->known = known[i];
            total += p->nbits;
        }
        int64_t got;
        while ((got = km_find_hit(&s, max_length, eagle)) < 0) {
            int64_t told = 0;
            for (int i = 0; i < s.n_sets; i++) {
                km_set_state *set = &sets[i];
                if (!set->has_need)
                    continue;
                assert(set->need.stride >= 1 && set->need.stop <= set->presence.nbits);
                CHECK(!km_get(known[i], set->need.first), "needs what it knows");
                for (int64_t bit = set->need.first; bit < set->need.stop; bit += set->need.stride) {
                    if (km_get(known[i], bit))
                        continue;
                    km_set(known[i], bit);
                    if (!has(&known_all[i].presence, bit))
                        km_clear(maybe[i], bit);
                    told++;
                }
            }
            CHECK(told > 0, "stopped without a need");
            asked += told;
        }
        CHECK(got == want, "hit %lld, want %lld", (long long)got, (long long)want);
        for (int i = 0; i < s.n_sets; i++)
            CHECK(sets[i].first == known_all[i].first && sets[i].len == known_all[i].len,
                  "set %d: blocks [%lld, %lld), want [%lld, %lld)", i, (long long)sets[i].first,
                  (long long)sets[i].len, (long long)known_all[i].first,
                  (long long)known_all[i].len);
        memcpy(sets, known_all, sizeof(sets));
        release(&s);
    }
    CHECK(CHECK_FUZZING || (asked > 0 && asked < total / 2), "asked %lld of %lld", (long long)asked,
          (long long)total);
}

/* Partial hits: the last block's key may be a later boundary of the same block. */
static void test_tail(void) {
    uint64_t words[1] = {0x8a}; /* boundaries 2, 4 and 8 of eight */
    km_set_state set = {.group = {.kind = KM_FULL, .cacheable = true, .block_size = 32},
                        .presence = {words, NULL, 8, 2}};
    km_search s = {.sets = &set, .n_sets = 1, .hash_block = 16, .alignment = 32, .partial = true};
    static const int64_t hits[] = {0, 16, 32, 48, 64, 80, 112, 128};
    static const int64_t want[] = {0, 32, 32, 64, 64, 80, 128, 128};
    for (int i = 0; i < 8; i++) {
        int64_t boundary = -1;
        assert(km_tail_boundary(&s, &set, &set.presence, hits[i], &boundary));
        CHECK(boundary == want[i], "hit %lld: %lld", (long long)hits[i], (long long)boundary);
    }
}

int main(void) {
    test_single();
    test_joint();
    test_needs();
    test_tail();
    return 0;
}
