"""Lookup plans: equal to the reference, frugal, and firm against whatever a store answers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import fuzz_lookup
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from rig import ask, scheme_of

from kvmask import (
    Bitset,
    BlockHashes,
    ChunkedLocal,
    Coordinator,
    CostModel,
    FullAttention,
    HitHints,
    LookupPlan,
    Mamba,
    PlanTools,
    SlidingWindow,
    VllmKeys,
)
from kvmask.errors import ArgumentError, StoreError
from kvmask.plans import MALFORMED_ANSWER, Held, Scheme

DSV4 = [
    FullAttention(256),
    SlidingWindow(64, window=128),
    SlidingWindow(64, window=512),
    SlidingWindow(4, window=16),
    SlidingWindow(8, window=64),
]


def digests(n):
    return BlockHashes(b"".join(i.to_bytes(32, "little") for i in range(1, n + 1)), 32)


def plain(groups, hash_block, num_tokens, strategy="staged", held=0, hint=0, **options):
    scheme = scheme_of(Coordinator(groups, hash_block), **options)
    hints = fuzz_lookup.OneHint(hint) if hint else None
    hashes = digests(num_tokens // hash_block)
    return LookupPlan(
        scheme, hashes, num_tokens, held=held, strategy=strategy, tools=PlanTools(hints=hints)
    )


def drive(plan, present):
    """Calls made; `present` is a set of keys or a function of one."""
    return len(ask(plan, present))


def asked_and_fed(plan, answers):
    """The keys of the next call, which is answered."""
    (keys,) = plan.next_call().args
    plan.feed(answers)
    return keys


def group_of(key):
    return int(key.split("group:")[1].split("@")[0])


def block_of(key, scale):
    """Block index within a key's group."""
    digest = bytes.fromhex(key.rsplit("@", 1)[1])
    return int.from_bytes(digest, "little") // scale - 1


@pytest.mark.parametrize("seed", range(8))
def test_random_lookups(seed):
    cases, _ = fuzz_lookup.run(60, seed, count=400)
    assert cases == 400


@given(st.data())
def test_lookups_at_word_edges(data):
    """The same checks over the shared strategies, whose sizes hug words, windows and alignments."""
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    num_hashes = num_tokens // config.hash_block_size
    present = []
    for g in config.groups:
        n = num_tokens // config.entry(g)
        ranks = data.draw(st.sampled_from((1, 1, 2)))
        present.append(tuple(tuple(data.draw(strategies.bools(n))) for _ in range(ranks)))
    case = fuzz_lookup.Case(
        groups=config.groups,
        hash_block=config.hash_block_size,
        alignment=config.alignment,
        partial=config.partial_hits,
        num_tokens=num_tokens,
        num_hashes=num_hashes,
        present=tuple(present),
        local_tokens=data.draw(st.sampled_from((0, 0, config.common, num_tokens // 2))),
        held=data.draw(st.sampled_from(fuzz_lookup.HELD)),
        blocks=tuple(
            tuple(data.draw(strategies.bools(num_tokens // max(g.block_size, 1))))
            for g in config.groups
        ),
        hint=data.draw(st.sampled_from((0, config.common, num_tokens, 1 << 32))),
        costs=CostModel(call=data.draw(st.sampled_from((1.0, 64.0))), missing=1.0),
    )
    fuzz_lookup.check(case)


@pytest.mark.parametrize("num_tokens", [256, 257, 8192, 131_072, 1 << 20])
def test_a_cold_store_takes_one_call_with_full_attention(num_tokens):
    plan = plain(DSV4, 4, num_tokens)
    assert drive(plan, set()) <= 2
    assert plan.result.length == 0
    assert plan.asked <= CostModel().first_batch


@pytest.mark.parametrize("num_tokens", [8192, 131_072, 1 << 20])
def test_a_warm_store_takes_a_growing_run_and_one_set_of_tails(num_tokens):
    plan = plain(DSV4, 4, num_tokens)
    calls = drive(plan, lambda key: True)
    assert plan.result.length == (num_tokens - 1) // 256 * 256
    blocks, first = num_tokens // 256, CostModel().first_batch
    grown, runs = first, 1
    while grown < blocks:
        first *= 4
        grown += first
        runs += 1
    assert calls == runs + 1
    # Windows of 128 and 512 over blocks of 64, of 16 over 4, of 64 over 8: 2 + 8 + 4 + 8 tails.
    assert plan.asked == (num_tokens - 1) // 256 + 2 + 8 + 4 + 8


@pytest.mark.parametrize("hint_past", [-1, 0, 1, 50])
def test_a_hint_near_the_hit_makes_it_one_or_two_calls(hint_past):
    end = 200
    plan = plain(DSV4, 4, 131_072, hint=max(0, end + hint_past) * 256)
    sizes = [g.block_size // 4 for g in DSV4]
    ends = [end * 256 // g.block_size for g in DSV4]

    def there(key):
        g = group_of(key)
        return block_of(key, sizes[g]) < ends[g]

    assert drive(plan, there) <= (1 if hint_past == 0 else 2)
    assert plan.result.length == end * 256


def test_hints_learn_and_forget():
    hints = HitHints(1)
    assert hints.capacity == 1
    first, other = digests(1024), BlockHashes(bytes(1024 * 32), 32)
    big = HitHints()
    assert big.predict(first, 4, 16, 4096) == 0
    big.learn(first, 4, 16, 2600)
    assert big.predict(first, 4, 16, 4096) == 2560  # short alignments in steps of 256
    assert big.predict(first, 4, 16, 1000) == 768
    assert big.predict(first, 4, 384, 4096) == 0  # other steps end at other prefixes
    assert big.predict(other, 4, 16, 4096) == 0
    assert big.predict(first, 4, 16, 100_000) == 2560  # past the digests
    big.learn(first, 4, 16, 1 << 32)
    assert big.predict(first, 4, 16, 1 << 32) == 4096
    for bad in (-1, 1.5, None, True):
        with pytest.raises((ArgumentError, TypeError), match="`num_tokens`"):
            big.predict(first, 4, 16, bad)
    for bad in (0, -1, (1 << 24) + 1, 1 << 80):
        with pytest.raises(ArgumentError, match="`capacity` must be from 1 to"):
            HitHints(bad)


@given(st.lists(st.integers(0, 40), max_size=60), st.sampled_from((1, 2, 64)))
def test_a_full_table_of_hints_never_points_past_the_digests(learned, capacity):
    hints = HitHints(capacity)
    for tokens in learned:
        hints.learn(digests(40), 1, 1, tokens)
        assert 0 <= hints.predict(digests(40), 1, 1, 40) <= 40


# What counts as an answer (B52)


@pytest.mark.parametrize("answer", [0, -1, -704, -900, 2, False, 1 << 70, -(1 << 70)])
@pytest.mark.parametrize("wrap", [int, np.int64], ids=["int", "int64"])
@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_only_one_is_present(answer, wrap, strategy):
    if wrap is np.int64 and abs(answer) > 1 << 62:
        answer = 3
    plan = plain([FullAttention(16)], 16, 65, strategy)
    given = [1, wrap(answer) if answer is not False else answer, 1, 1]
    assert len(asked_and_fed(plan, given)) == 4
    assert plan.next_call() is None
    hit = plan.result
    assert (hit.length, hit.present) == (16, 3)
    # A negative answer is unknown: the store said neither yes nor no.
    assert hit.unknown == (answer < 0)
    assert hit.answered == (answer >= 0)
    assert hit.cause is None


@pytest.mark.parametrize("one", [1, True, np.int32(1), np.uint8(1)], ids=repr)
def test_a_one_of_any_integer_type_is_present(one):
    plan = plain([FullAttention(16)], 16, 65)
    plan.feed([one] * len(plan.next_call().args[0]))
    assert plan.next_call() is None
    assert plan.result.length == 64


def broken():
    yield 1
    raise KeyError("mine")


@pytest.mark.parametrize(
    "answers",
    [[], [1], [1] * 3, [1] * 5, (), np.ones(3, np.int32), None, 7, "1111", broken()],
    ids=["none", "one", "short", "long", "tuple", "array", "None", "int", "text", "raises"],
)
@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_nothing_of_a_list_of_another_length_is_believed(answers, strategy):
    plan = plain([FullAttention(16)], 16, 65, strategy)
    assert len(asked_and_fed(plan, answers)) == 4
    assert plan.next_call() is None
    hit = plan.result
    assert (hit.length, hit.asked, hit.present, hit.unknown) == (0, 4, 0, 4)
    assert not hit.answered
    assert isinstance(hit.cause, StoreError)
    assert hit.cause.code == MALFORMED_ANSWER
    assert "got no usable answer to 4 of 4 keys" in str(hit.cause)


def test_any_sequence_of_integers_is_an_answer():
    plan = plain([FullAttention(16)], 16, 65)
    asked_and_fed(plan, np.array([1, 1, 0, 1]))
    assert plan.next_call() is None
    assert (plan.result.length, plan.result.answered) == (32, True)


@pytest.mark.parametrize("odd", [None, 1.0, "1", b"1", [1], np.float64(1), 1 + 0j], ids=repr)
def test_an_answer_that_is_no_integer_leaves_its_key_unknown(odd):
    plan = plain([FullAttention(16)], 16, 65)
    asked_and_fed(plan, [1, 1, odd, 1])
    assert plan.asked == 4
    assert plan.next_call() is None
    hit = plan.result
    assert (hit.length, hit.present, hit.unknown) == (32, 3, 1)
    assert "got no usable answer to 1 of 4 keys" in str(hit.cause)


def test_a_call_that_raises_ends_the_lookup():
    """Even when an earlier call found something: a hit of 0 says what went wrong."""
    costs = CostModel(call=1.0, missing=1.0)
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    plan = LookupPlan(scheme, digests(64), 1024, tools=PlanTools(costs=costs, log=None))
    plan.feed([1] * len(plan.next_call().args[0]))
    keys = plan.next_call().args[0]
    plan.fail(error := OSError("no route"))
    assert plan.next_call() is None
    hit = plan.result
    assert (hit.length, hit.tail_tokens) == (0, (0,))
    assert [list(m) for m in hit.masks] == [[]]
    assert hit.cause is error
    assert not hit.answered
    assert (hit.asked, hit.unknown, hit.probes) == (1 + len(keys), len(keys), 2)
    assert plan.result is hit


def test_a_plan_that_is_decided_at_once_asks_nothing():
    for num_tokens, hashes in ((0, 0), (15, 1), (64, 0)):
        scheme = scheme_of(Coordinator([FullAttention(16)], 16), covers=False)
        plan = LookupPlan(scheme, digests(hashes), num_tokens)
        assert plan.next_call() is None
        hit = plan.result
        assert (hit.length, hit.asked, hit.probes, hit.answered) == (0, 0, 0, True)
        assert [list(m) for m in hit.masks] == [[]]


# Several ranks, what is held, groups that take no part


@pytest.mark.parametrize("dropped", range(16))
@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_every_rank_must_hold_a_block(dropped, strategy):
    """TP 8 over DCP 8 and PP 2: sixteen namespaces per block (B25)."""
    names = [[VllmKeys("m", tp_rank=r, dcp_rank=r, pp_rank=p) for p in (0, 1) for r in range(8)]]
    scheme = scheme_of(Coordinator([FullAttention(256)], 16), schemas=names)
    lost = names[0][dropped].prefix + "@"

    def look(num_tokens):
        return LookupPlan(scheme, digests(64), num_tokens, strategy=strategy)

    plan = look(1024)
    drive(plan, lambda key: not (key.startswith(lost) and block_of(key, 16) == 1))
    assert plan.result.length == 256
    missing = look(1024)
    drive(missing, lambda key: not key.startswith(lost))
    assert missing.result.length == 0
    full = look(1025)
    drive(full, lambda key: True)
    assert full.result.length == 1024
    assert full.asked == 4 * 16


def test_held_blocks_are_not_asked_and_a_hit_within_them_is_none():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    for held, hit in ((0, 256), (64, 256), (100, 256), (255, 256), (256, 0), (320, 0)):
        plan = plain(groups, 16, 321, held=held)
        calls = ask(
            plan, lambda k: block_of(k, 4 if group_of(k) == 0 else 1) < (4, 16)[group_of(k)]
        )
        asked = [key for keys in calls for key in keys]
        assert plan.result.length == hit
        assert all(block_of(k, 4) >= held // 64 for k in asked if group_of(k) == 0)
        if held >= 320:
            assert asked == []
        assert plan.result.held == (Held((held, held), held) if held else None)


def test_the_window_of_a_held_prefix_is_not_asked():
    """With a number for the full group alone, the windows that end there are asked for."""
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    for held, windows in (([128, 0], 2), ({"group0": 128}, 2), (128, 0), ([128, 128], 0)):
        plan = plain(groups, 16, 129 + 64, "exact", held=held)
        (keys,) = plan.next_call().args
        named = [k for k in keys if group_of(k) == 1 and block_of(k, 1) in (6, 7)]
        assert len(named) == windows
        assert not [k for k in keys if group_of(k) == 0 and block_of(k, 4) < 2]


def test_what_a_held_prefix_is_per_kind():
    """Positions from 100 on attend tokens 68 to 99 of the window and 96 to 99 of the chunk."""
    groups = [
        FullAttention(4),
        SlidingWindow(4, window=33),
        ChunkedLocal(4, chunk_size=32),
        Mamba(4),
    ]
    plan = plain(groups, 4, 401, "exact", held=100)
    (keys,) = plan.next_call().args
    unasked = [
        sorted(set(range(25)) - {block_of(k, 1) for k in keys if group_of(k) == g})
        for g in range(4)
    ]
    assert unasked == [list(range(25)), list(range(17, 25)), [24], []]


def test_held_block_by_block():
    """Bits past the request, and of blocks that no boundary needs, do no harm."""
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    there = Bitset.from_indices(100, [0, 2, 3, 99])
    for held in ([there, 0], {"group0": there}, [there, Bitset()], [there, [False] * 3]):
        plan = plain(groups, 16, 257, held=held)
        asked = [k for keys in ask(plan, lambda key: True) for k in keys]
        assert plan.result.length == 256
        assert [block_of(k, 4) for k in asked if group_of(k) == 0] == [1]
        plan = plain(groups, 16, 257, held=held)
        ask(plan, lambda key: group_of(key) == 1)
        assert plan.result.length == 64


def test_one_of_two_equal_groups_holds_its_blocks():
    """Groups of one spec are searched together; what one holds is not asked for it."""
    groups = [FullAttention(16), FullAttention(16), FullAttention(16)]
    for strategy in ("staged", "exact"):
        plan = plain(groups, 16, 65, strategy, held=[Bitset.ones(4), 0, Bitset.ones(2)])
        asked = [k for keys in ask(plan, lambda key: group_of(key) > 0) for k in keys]
        assert plan.result.length == 64
        assert sorted((group_of(k), block_of(k, 1)) for k in asked) == [
            (1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3),
        ]  # fmt: skip


def test_a_hit_within_what_blocks_give_is_none():
    """The engine's own hit follows from its blocks: 64 tokens of both groups."""
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    held = [Bitset.ones(4), Bitset.from_indices(16, [2, 3])]
    plan = plain(groups, 16, 257, held=held)
    ask(plan, lambda key: False)
    assert plan.result.length == 0  # 64, which the engine has
    assert plan.result.held.tokens == 64
    plan = plain(groups, 16, 257, held=held)
    ask(plan, lambda key: block_of(key, 1) in (6, 7))
    assert plan.result.length == 128


@pytest.mark.parametrize(
    ("held", "error", "message"),
    [
        (-1, ArgumentError, "`held` must be from 0 to 4294967296, got -1"),
        ([16], ArgumentError, "`held` must hold one entry per group, got 1 and 2"),
        (Held((16,), 16), ArgumentError, "`held` must hold one entry per group, got 1 and 2"),
        ([16, -1], ArgumentError, "`held` must be from 0 to 4294967296, got -1"),
        ({"swa": 16}, ArgumentError, "`held` must name groups of the contract, got 'swa'"),
        ({0: 16}, ArgumentError, "`held` must name groups of the contract, got 0"),
        (1.5, TypeError, "`held` must"),
        ("16", TypeError, "`held` must"),
        ([16, None], TypeError, "`held` must"),
        (True, TypeError, "`held` must"),
        ([16, "1"], TypeError, "`held` must"),
        (1 << 40, ArgumentError, "1099511627776"),
        ([0, 1 << 40], ArgumentError, "1099511627776"),
    ],
    ids=repr,
)
def test_statements_of_what_is_held_that_say_nothing(held, error, message):
    with pytest.raises(error) as caught:
        plain([FullAttention(16), SlidingWindow(16, window=32)], 16, 65, held=held)
    assert message in str(caught.value)


def test_exact_when_the_engine_holds_all_that_could_be_asked():
    # Digests end before the tokens do, and the engine holds every block that has one.
    scheme = scheme_of(Coordinator([FullAttention(10)], 5), covers=False)
    plan = LookupPlan(scheme, digests(3), 25, held=10, strategy="exact")
    assert plan.next_call() is None
    assert plan.result.length == 0


@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_too_few_digests_are_refused(strategy):
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    with pytest.raises(ArgumentError) as caught:
        LookupPlan(scheme, digests(3), 64, strategy=strategy)
    assert str(caught.value) == (
        "`hashes` must have one digest for every full hash block, "
        "got 3 digests of 16 tokens for 64 tokens"
    )
    LookupPlan(scheme, digests(3), 63, strategy=strategy)


def test_groups_that_are_not_cacheable_keep_their_place():
    groups = [FullAttention(7, prefix_cacheable=False), FullAttention(16), Mamba(16)]
    plan = plain(groups, 16, 65, schemas=[VllmKeys("x"), VllmKeys("m"), VllmKeys("n")])
    drive(plan, lambda key: True)
    assert plan.result.length == 64
    assert [len(m) for m in plan.result.masks] == [0, 4, 4]
    assert plan.result.tail_tokens == (0, 64, 64)


# A store that changes between two calls


@pytest.mark.parametrize("seed", range(300))
def test_a_store_that_changes_gives_the_hit_of_what_it_said(seed):
    """Keys that were never asked make no difference, present or absent."""
    case = fuzz_lookup.random_case(17, seed)
    rng = random.Random(seed)

    scheme = scheme_of(Coordinator(*case.args), schemas=fuzz_lookup.schemas(case), covers=False)

    def plan(strategy):
        return LookupPlan(
            scheme,
            fuzz_lookup.digests(case.num_hashes),
            case.num_tokens,
            strategy=strategy,
            tools=PlanTools(costs=CostModel(call=1.0, missing=1.0)),
        )

    held = ever = fuzz_lookup.contents(case)
    said = {}
    changing = plan("staged")
    while (call := changing.next_call()) is not None:
        keys = call.args[0]
        answers = [int(key in held) for key in keys]
        said.update(zip(keys, answers, strict=True))
        changing.feed(answers)
        held = {key for key in ever if rng.random() < 0.8}
    for silent in (0, 1):
        frozen = plan("exact")
        drive(frozen, lambda key, silent=silent: said.get(key, silent) == 1)
        assert changing.result == frozen.result


# Boundaries of the staged search


@pytest.mark.parametrize("blocks", [128, 1024])
def test_few_calls_when_states_are_gone_and_one_window_has_a_hole(blocks):
    coord = Coordinator([Mamba(1), SlidingWindow(6, window=19)], 1, partial_hits=True)
    plan = LookupPlan(scheme_of(coord, covers=False), digests(blocks), blocks + 1)
    assert drive(plan, lambda key: group_of(key) == 1 and block_of(key, 6) < blocks // 20) <= 24


def test_local_tokens_with_a_drafter_whose_windows_differ():
    """Staged gives up where exact and the reference find 72 tokens."""
    case = fuzz_lookup.random_case(3, 13244)
    assert (case.local_tokens, case.hint) == (51, 48)
    for held in ("full", "prefix"):
        fuzz_lookup.check(replace(case, held=held))


def test_a_scheme_with_an_own_coordinator_and_no_search_cannot_look_up():
    scheme = Scheme(SimpleNamespace(hash_block_size=16, alignment=16), ())
    with pytest.raises(TypeError, match=r"must search in the core, .* got SimpleNamespace"):
        LookupPlan(scheme, [], 0)
