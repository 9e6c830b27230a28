"""Loads: where the bytes go, what is reported, and that nothing wrong is ever taken for right."""

import random
from dataclasses import replace

import numpy as np
import pytest
import strategies
from fake_store import EXIST, GET, PUT, FakeStore
from hypothesis import given
from hypothesis import strategies as st
from rig import (
    Engine,
    answer_with,
    assert_blocks,
    assert_loaded,
    contract_of,
    digests,
    flat_layout,
    key,
    keys_of,
    mooncake_tools,
    pair,
    scheme_of,
    whole_chunks,
)

from kvmask import (
    Bitset,
    ChunkedLocal,
    Coordinator,
    FullAttention,
    Hit,
    KVLayout,
    KVTransfer,
    LoadPlan,
    Mamba,
    SlidingWindow,
)
from kvmask.errors import AlignmentError, ArgumentError, BlockIdError
from kvmask.plans import CALL_FAILED, EXISTS, MALFORMED_ANSWER, NOT_TRIED, Held

DSV4 = [
    FullAttention(256),
    SlidingWindow(64, window=128),
    SlidingWindow(64, window=512),
    SlidingWindow(4, window=16),
    SlidingWindow(8, window=64),
]


def plan_of(num_blocks=4, block_bytes=64, held=None, rank=0, **options):
    """A plan over one full-attention group of 16-token blocks; block i has id i + 1."""
    coord = Coordinator([FullAttention(16)], 16)
    scheme = scheme_of(coord, [flat_layout(size=block_bytes)], rank=rank)
    hit = coord.find_hit([[True] * num_blocks], num_blocks * 16)
    table = [list(range(1, num_blocks + 1))]
    hashes = digests(num_blocks)
    return LoadPlan(scheme, hashes, hit, table, held=held, tools=mooncake_tools(**options))


def numbers(keys):
    return [int(k.rsplit("@", 1)[1], 16) - 1 for k in keys]


# Round trips


ROUND_TRIPS = {
    "full": ([FullAttention(16)], 16, {}),
    "window": ([FullAttention(64), SlidingWindow(16, window=32)], 16, {}),
    "eagle": ([FullAttention(64, eagle=True), SlidingWindow(16, window=33, eagle=True)], 16, {}),
    "chunked": ([FullAttention(16), ChunkedLocal(16, chunk_size=64)], 16, {}),
    "chunked alone": ([ChunkedLocal(16, chunk_size=64)], 16, {}),
    "states": ([FullAttention(16), Mamba(64)], 16, {}),
    "partial": ([FullAttention(64), Mamba(64)], 16, {"partial_hits": True}),
    "scratch": ([FullAttention(16), FullAttention(5, prefix_cacheable=False)], 16, {}),
    "sparse": ([FullAttention(64), SlidingWindow(16, window=32)], 16, {"retention_interval": 128}),
    "dsv4": (DSV4, 4, {}),
    "windows only": ([SlidingWindow(16, window=40), SlidingWindow(32, window=20)], 16, {}),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip(name, kind):
    if kind == "torch":
        pytest.importorskip("torch")
    groups, hash_block, options = ROUND_TRIPS[name]
    for num_tokens in (1000, 1024, 1025):
        source, target = pair(groups, hash_block, num_tokens, kind, layers=3, **options)
        hashes = digests(num_tokens // hash_block)
        saved = source.save(hashes, num_tokens)
        assert saved.ok
        assert saved.stored > 0
        for strategy in ("staged", "exact"):
            hit = target.lookup(hashes, num_tokens, strategy=strategy)
            assert hit.length > num_tokens - 2 * source.coord.alignment - 1 or "sparse" in name
        result = target.load(hashes, hit)
        assert result.ok, str(result)
        assert result.usable_tokens == hit.length
        # A hit at the edge of an attention chunk needs nothing of that group.
        assert assert_loaded(source, target, hit) == result.loaded


@pytest.mark.parametrize("name", ["window", "dsv4", "partial", "states"])
def test_round_trip_in_pieces(name):
    """Saved as a prompt grows, loaded past what the engine holds itself."""
    groups, hash_block, options = ROUND_TRIPS[name]
    source, target = pair(groups, hash_block, 1024, **options)
    hashes = digests(1024 // hash_block)
    request = source.request(hashes)
    for end in (100, 300, 512, 900, 1024):
        assert source.kv.save(request, source.tables, end).ok
    hit = target.lookup(hashes, 1025, held=256)
    assert hit.length == 1024
    result = target.load(hashes, hit)
    assert result.ok
    assert assert_loaded(source, target, hit, 256) == result.loaded


def test_what_is_held_is_said_once():
    """R5: full(64), window(16, 97), 64 tokens held, hit 128: blocks 2 and 3 of the window are held,
    4 to 7 are not; a window that is not held is loaded whole."""
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=97)}
    for held, blocks in (
        (64, [4, 5, 6, 7]),
        ({"full": 64}, [2, 3, 4, 5, 6, 7]),
        ([64, 0], [2, 3, 4, 5, 6, 7]),
        ([64, Bitset.from_indices(8, [0, 1, 2, 5])], [3, 4, 6, 7]),
        (0, [2, 3, 4, 5, 6, 7]),
    ):
        source, target = pair(groups, 16, 128)
        source.save(digests(8), 128)
        hit = target.lookup(digests(9), 144, held=held)
        assert hit.length == 128
        result = target.load(digests(8), hit)
        full = [0, 1] if held == 0 else [1]
        wanted = [(0, i) for i in full] + [(1, i) for i in blocks]
        assert result.loaded == assert_blocks(source, target, wanted)


def test_a_load_may_hold_more_than_the_lookup_and_never_less():
    groups = [FullAttention(64), SlidingWindow(16, window=97)]
    source, target = pair(groups, 16, 128)
    source.save(digests(8), 128)
    hit = target.lookup(digests(9), 144, held=64)
    for less in (0, 63, [64, 0], {"0": 64}, [64, Bitset.zeros(8)], [0, 64]):
        with pytest.raises(ArgumentError, match=r"`held` must cover what the hit rests on, got "):
            target.load(digests(8), hit, held=less)
    assert not target.store.calls(GET)
    result = target.load(digests(8), hit, held=[128, Bitset.from_indices(8, [2, 3, 7])])
    assert result.loaded == assert_blocks(source, target, [(1, 4), (1, 5), (1, 6)])


@given(st.data())
def test_whatever_was_stored_loads_or_is_no_hit(data):
    """Any groups, a store with holes: every block of the hit has the right bytes."""
    config = data.draw(strategies.configs())
    num_tokens = min(data.draw(token_counts(config)), 300 * config.hash_block_size)
    rng = data.draw(st.randoms(use_true_random=False))
    contract = contract_of(
        [whole_chunks(group) for group in config.groups],
        config.hash_block_size,
        alignment=config.alignment,
        retention_interval=config.retention_interval,
        partial_hits=config.partial_hits,
    )
    store = FakeStore()
    source = Engine(store, contract, num_tokens, seed=2, layers=1)
    target = Engine(store.client(), contract, num_tokens, layers=1)
    hashes = digests(num_tokens // config.hash_block_size)
    saved = source.save(hashes, num_tokens)
    assert saved.ok
    store.evict([k for k in sorted(store.pool) if rng.random() < 0.1])
    hit = target.lookup(hashes, num_tokens)
    result = target.load(hashes, hit)
    assert result.ok
    assert assert_loaded(source, target, hit) == result.loaded


def token_counts(config):
    return strategies.token_counts(config)


def test_a_boundary_that_no_object_carries_is_read_under_the_next_one():
    """B04: full {32, 64}, state {32, 48}: hit 48; the last full block is keyed by 64."""
    source, target = pair([FullAttention(32), Mamba(32)], 16, 64, partial_hits=True)
    hashes = digests(4)
    assert source.save(hashes, 64).ok
    pool = source.store.pool
    assert key(source, 0, hashes[2]) not in pool  # full attention at 48: no such object
    for boundary in (16, 48, 64):
        pool.pop(key(source, 1, hashes[boundary // 16 - 1]), None)
    pool[key(source, 1, hashes[2])] = source.block(1, 1)
    for num_tokens in (64, 65):
        hit = target.lookup(hashes, num_tokens)
        assert (hit.length, hit.tail_tokens) == (48, (64, 48))
        result = target.load(hashes, hit)
        assert result.ok
        got = [k for call in target.store.calls(GET) for k in call.keys]
        assert sorted(numbers(got[-3:])) == [1, 2, 3]
        assert key(target, 0, hashes[2]) not in got
    pool.pop(key(source, 0, hashes[3]))
    assert target.lookup(hashes, 64).length == 32


def test_a_partial_tail_is_stored_and_read_under_its_own_end():
    """B42, second half: 80 tokens over blocks of 64: (0, 64) and (64, 80)."""
    source, target = pair([FullAttention(64)], 16, 80, partial_hits=True)
    hashes = digests(5)
    result = source.save(hashes, 80)
    assert (result.stored, result.mark) == (2, 80)
    assert set(source.store.pool) == {key(source, 0, hashes[3]), key(source, 0, hashes[4])}
    hit = target.lookup(hashes, 81)
    assert (hit.length, hit.tail_tokens) == (80, (80,))
    assert target.load(hashes, hit).loaded == 2
    assert target.block(0, 1) == source.block(0, 1)


def test_a_save_that_ended_inside_a_block_is_completed():
    source, target = pair([FullAttention(64)], 16, 128, partial_hits=True)
    hashes = digests(8)
    first = source.save(hashes, 80)
    assert source.save(hashes, 128, first.mark).mark == 128
    hit = target.lookup(hashes, 129)
    assert hit.length == 128
    assert target.load(hashes, hit).ok
    assert_loaded(source, target, hit)


# Failures


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("code", [-707, -704, -800, 0, 63, 65, 1 << 40])
def test_a_failed_batch_hides_nothing_after_it(rank, failing, code):
    """B46: order by rank, two keys per get; everything is loaded or reported."""
    plan = plan_of(4, rank=rank, staging=2 * 12288 * 10 // 9 + 1)
    batches = []
    while (call := plan.next_call()) is not None:
        assert (call.name, call.num_bytes) == (GET, 128)
        batches.append(numbers(call.args[0]))
        told = plan.feed([code if n == failing else 64 for n in batches[-1]])
        assert [f.block for f in told] == [failing] * (failing in batches[-1])
    order = [(i + rank) % 4 for i in range(4)]
    assert batches == [order[:2], order[2:]]
    result = plan.result
    assert (result.loaded, result.num_bytes) == (3, 192)
    assert [(f.group, f.block, f.block_id, f.code) for f in result.failures] == [
        (0, failing, failing + 1, code)
    ]
    assert result.invalid == {"group0": [failing + 1]}
    assert result.usable_tokens == 16 * failing
    assert plan.keys[failing] == result.failures[0].key


@pytest.mark.parametrize(
    ("rank", "order"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3, 0]), (5, [1, 2, 3, 0])]
)
def test_a_failure_is_named_through_the_rotation(rank, order):
    """B47."""
    plan = plan_of(4, rank=rank)
    keys, addresses, _ = plan.next_call().args
    assert numbers(keys) == order
    assert [row[0] for row in addresses] == [(1 << 20) + 64 * (n + 1) for n in order]
    plan.feed([-704 if n == 2 else 64 for n in order])
    assert plan.next_call() is None
    assert [f.block for f in plan.result.failures] == [2]


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_nothing_to_load(rank):
    plan = plan_of(0, rank=rank)
    assert plan.next_call() is None
    result = plan.result
    assert (result.loaded, result.failures, result.invalid, result.ok) == (0, (), {}, True)
    held = plan_of(4, rank=rank, held=64)
    assert held.next_call() is None
    assert held.result.usable_tokens == 64


@given(st.data())
def test_every_planned_key_is_loaded_or_failed(data):
    rng = data.draw(st.randoms(use_true_random=False))
    n = data.draw(st.integers(0, 30))
    plan = plan_of(
        n,
        rank=data.draw(st.integers(0, 40)),
        held=16 * data.draw(st.integers(0, n)),
        staging=data.draw(st.sampled_from((None, 12288, 1 << 17))),
        max_pieces=data.draw(st.sampled_from((None, 1, 3, 512))),
    )
    good, seen, told, retried, calls, last = set(), [], [], 0, 0, None
    while (call := plan.next_call()) is not None:
        keys = call.args[0]
        kind = rng.random()
        if call.name == EXISTS:
            # The renewal of a lease: only after a get of these keys, and once.
            retried += 1
            assert last == keys
            if kind < 0.15:
                plan.fail(OSError("gone"))
            else:
                assert plan.feed(None if kind < 0.5 else [1] * len(keys)) == ()
            continue
        calls += 1
        if last != keys:
            seen += keys
        last = keys
        if kind < 0.15:
            plan.fail(OSError("gone"))
            continue
        if kind < 0.3:
            told += plan.feed([-707] * len(keys))
            continue
        results = [64 if rng.random() < 0.7 else rng.choice((0, -704, 63, -1)) for _ in keys]
        good.update(k for k, r in zip(keys, results, strict=True) if r == 64)
        told += plan.feed(results)
    result = plan.result
    assert retried <= calls
    failed = [f.key for f in result.failures]
    assert sorted(failed) == sorted(set(plan.keys) - good)
    # What was told as it came is a part of the whole; what calls raised makes up the rest.
    assert {f.key for f in result.failures if f.cause is None} <= {f.key for f in told}
    assert result.loaded + len(result.failures) == len(plan.keys)
    assert result.loaded == len(good)
    assert result.num_bytes == 64 * len(good)
    assert len(seen) <= len(plan.keys)
    blocks = [f.block for f in result.failures]
    assert result.usable_tokens == 16 * min(blocks, default=n)


def test_codes_of_a_get():
    """B51: only the planned number of bytes is good."""
    source, target = pair([FullAttention(16)], 16, 96, layers=1)
    hashes = digests(6)
    source.save(hashes, 96)
    hit = target.lookup(hashes, 97)
    keys = [key(source, 0, h) for h in hashes]
    odd = dict(zip(keys[1:], (0, 47, 49, -704, -707), strict=True))
    for k, code in odd.items():
        target.store.fail(GET, code, keys=[k])
    result = target.load(hashes, hit)
    assert result.loaded == 1
    assert {f.key: f.code for f in result.failures} == odd
    assert result.invalid == {"0": sorted(target.tables[0][1:6])}
    assert len(target.store.calls(GET)) == 1  # not all lost their lease: no second try


def test_a_lost_lease_is_renewed_once():
    source, target = pair([FullAttention(16)], 16, 64)
    hashes = digests(4)
    source.save(hashes, 64)
    hit = target.lookup(hashes, 65)
    asked = len(target.store.calls(EXIST))
    target.store.fail(GET, -707, times=1)
    result = target.load(hashes, hit)
    assert result.ok
    assert_loaded(source, target, hit)
    assert [c.name for c in target.store.log[-3:]] == [GET, EXIST, GET]
    assert len(target.store.calls(EXIST)) == asked + 1
    target.store.fail(GET, -707)
    result = target.load(hashes, hit)
    assert (result.loaded, {f.code for f in result.failures}) == (0, {-707})
    assert len(target.store.calls(GET)) == 4


def test_the_neutral_policy_renews_nothing_and_cuts_nothing():
    coord = Coordinator([FullAttention(16)], 16)
    plan = LoadPlan(
        scheme_of(coord, [flat_layout(size=1 << 20)]),
        digests(64),
        coord.find_hit([[True] * 64], 1024),
        [list(range(1, 65))],
    )
    assert len(plan.next_call().args[0]) == 64
    plan.feed([-707] * 64)
    assert plan.next_call() is None
    assert {f.code for f in plan.result.failures} == {-707}


@pytest.mark.parametrize("call", [EXIST, GET])
def test_after_a_call_that_raises_none_is_made(call):
    source, target = pair([FullAttention(16)], 16, 64, max_pieces=2)
    hashes = digests(4)
    source.save(hashes, 64)
    hit = target.lookup(hashes, 65)
    first = target.store.counts[GET]
    gone = RuntimeError("gone")
    if call == EXIST:
        target.store.fail(GET, -707, index=first)
        target.store.fail(EXIST, gone, index=target.store.counts[EXIST])
    else:
        target.store.fail(GET, gone, index=first)
    result = target.load(hashes, hit)
    assert result.loaded == 0
    assert [(f.code, f.cause) for f in result.failures] == [
        (CALL_FAILED, gone),
        *[(NOT_TRIED, gone)] * 3,
    ]
    assert target.store.counts[GET] == first + 1


@pytest.mark.parametrize(
    "answer", [None, 7, [], [64], [64] * 3, [64, None], [64, 64.0], ["64", 64]], ids=repr
)
def test_answers_that_do_not_fit_fail_their_keys(answer):
    plan = plan_of(4, max_pieces=2)
    plan.next_call()
    told = plan.feed(answer)
    bad = [i for i in range(2) if not (isinstance(answer, list) and len(answer) == 2)
           or type(answer[i]) is not int]  # fmt: skip
    assert [(f.block, f.code) for f in told] == [(i, MALFORMED_ANSWER) for i in bad]
    plan.next_call()
    assert plan.feed(np.array([64, 64], np.int64)) == ()
    assert plan.next_call() is None
    assert (plan.result.loaded, plan.result.failures) == (4 - len(bad), told)


def test_an_object_of_another_size_is_never_taken():
    """A store that holds other bytes under a key: the block is reported."""
    source, target = pair([FullAttention(16)], 16, 64)
    hashes = digests(4)
    source.save(hashes, 64)
    size = len(source.block(0, 0))
    source.store.pool[key(source, 0, hashes[1])] = b"x" * (size - 1)
    source.store.pool[key(source, 0, hashes[2])] = b"x" * (size + 1)
    result = target.load(hashes, target.lookup(hashes, 65))
    assert [(f.block, f.code < 0) for f in result.failures] == [(1, True), (2, True)]


def test_what_is_left_of_a_hit_that_failed_in_part():
    """A hole in the window leaves the longest prefix whose window is whole."""
    groups = {"full": FullAttention(16), "swa": SlidingWindow(16, window=33)}
    source, target = pair(groups, 16, 128)
    hashes = digests(8)
    source.save(hashes, 128)
    hit = target.lookup(hashes, 129)
    assert [m.indices() for m in hit.masks] == [list(range(8)), [6, 7]]
    target.store.fail(GET, -800, keys=[key(target, 1, hashes[7])])
    result = target.load(hashes, hit)
    # Of the window nothing else was loaded: only a prefix within it would do, and there is none.
    assert (result.loaded, result.usable_tokens) == (9, 0)
    assert result.invalid == {"swa": [target.tables[1][7]]}
    # What the engine holds itself still counts.
    hit = target.lookup(hashes, 129, held=64)
    result = target.load(hashes, hit)
    assert result.usable_tokens == 64


def test_a_state_is_that_of_one_boundary():
    """A state at 64 is of no use at 48, though both lie in one block."""
    groups = {"full": FullAttention(16), "state": Mamba(64)}
    source, target = pair(groups, 16, 64, partial_hits=True)
    hashes = digests(4)
    source.save(hashes, 64)
    hit = target.lookup(hashes, 65)
    assert (hit.length, hit.masks[1].indices()) == (64, [0])
    target.store.fail(GET, -800, keys=[key(target, 0, hashes[3])])
    result = target.load(hashes, hit)
    assert (result.loaded, result.usable_tokens) == (4, 0)
    # One that is held as a block is that of the block's end, one that was loaded that of its tail.
    source.save(hashes, 48)
    source.store.pool.pop(key(source, 1, hashes[3]))
    target.store.fail(GET, -800, keys=[key(target, 0, hashes[1])])
    hit = target.lookup(hashes, 64)
    assert (hit.length, hit.tail_tokens) == (48, (48, 48))
    assert target.load(hashes, hit).usable_tokens == 0


def test_what_is_left_of_a_hit_past_a_chunk_that_begins_inside_a_block():
    """Chunks of 27 tokens: at 32 only block 3 counts; at 24 the three before it do."""
    coord = Coordinator([ChunkedLocal(8, chunk_size=27)], 8)
    hit = coord.find_hit([[True] * 4], 32)
    assert (hit.length, hit.masks[0].indices()) == (32, [3])
    plan = LoadPlan(scheme_of(coord, [flat_layout()]), digests(4), hit, [[1, 2, 3, 4]])
    answer_with(plan, lambda call: [-800] * len(call.args[0]))
    assert (plan.result.loaded, plan.result.usable_tokens) == (0, 0)
    assert plan.result.invalid == {"group0": [4]}


@given(st.integers(0, 1 << 30))
def test_a_store_that_evicts_between_any_two_calls(seed):
    """Whatever the hit says, a load gives the right bytes or reports the block."""
    rng = random.Random(seed)
    groups = [FullAttention(64), SlidingWindow(16, window=32), SlidingWindow(32, window=65)]
    source, target = pair(groups, 16, 640, layers=1, max_pieces=rng.choice((2, 512)))
    hashes = digests(40)
    source.save(hashes, rng.choice((320, 640)))
    everything = dict(source.store.pool)

    def churn(store, call, keys):
        for k in sorted(everything):
            if rng.random() < 0.05:
                store.pool.pop(k, None)
            elif rng.random() < 0.05:
                store.pool.setdefault(k, everything[k])

    target.store.hooks.append(churn)
    hit = target.lookup(hashes, 641)
    result = target.load(hashes, hit)
    failed = {(f.group, f.block) for f in result.failures}
    wanted = {(g, i) for g, m in enumerate(hit.masks) for i in m.indices()}
    assert failed <= wanted
    assert result.loaded + len(result.failures) == len(wanted)
    for g, i in wanted - failed:
        assert target.block(g, i) == source.block(g, i)
    for g, i in failed:
        assert not any(target.block(g, i))
        assert target.tables[g][i] in result.invalid[str(g)]
    assert result.usable_tokens <= hit.length
    assert (result.usable_tokens == hit.length) == result.ok


# Bad tables and hits


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2, 0, 4], "got 0 for block 2 of group '0'"),
        ([1, 2, 3], "got 3 entries for block 3 of group '0'"),
        ([], "got 0 entries for block 0 of group '0'"),
        ([1, 2, 3, 6], "must be at least 0 and below `num_blocks`, got 6 at index 3 and 6"),
        ([1, 2, -1, 3], "must be at least 0 and below `num_blocks`, got -1"),
        ([1, 2, 1 << 80, 3], "must be at least 0 and below `num_blocks`"),
        ([1, 2, None, 3], "`block_ids` must hold integers, got NoneType at index 2"),
        ([1, 2, 3.0, 4], "`block_ids` must hold integers, got float at index 2"),
        ([1, 2, 1, 4], "`tables` must name every block once"),
    ],
)
def test_tables_that_cannot_be_filled(table, message):
    source, target = pair([FullAttention(16)], 16, 64)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    with pytest.raises(BlockIdError) as caught:
        target.load(digests(4), hit, tables=[table])
    assert message in str(caught.value)
    assert not target.store.calls(GET)


def test_tables_of_any_integer_array():
    source, target = pair([FullAttention(16)], 16, 64)
    for make in (tuple, np.array, lambda t: np.array(t, np.int32)):
        assert source.save(digests(4), 64, tables=[make(source.tables[0])]).ok
        hit = target.lookup(digests(4), 65)
        assert target.load(digests(4), hit, tables=[make(target.tables[0])]).ok
        assert target.load(digests(4), hit, tables={"0": make(target.tables[0])}).ok
    assert_loaded(source, target, hit)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "got [] and ['full', 'scratch', 'swa']"),
        ({"full": [1]}, "got ['full'] and ['full', 'scratch', 'swa']"),
        ({"full": [1], "swa": [1], "odd": []}, "got ['full', 'swa', 'odd'] and"),
        ([[1]], "got 1 and 3"),
        ([[1], [1], [1], [1]], "got 4 and 3"),
    ],
    ids=repr,
)
def test_tables_are_named_or_in_order(tables, message):
    groups = {
        "full": FullAttention(16),
        "scratch": FullAttention(5, prefix_cacheable=False),
        "swa": SlidingWindow(16, window=32),
    }
    source, target = pair(groups, 16, 64)
    with pytest.raises(ArgumentError) as caught:
        source.save(digests(4), 64, tables=tables)
    assert "`tables` must hold one block table per group, " in str(caught.value)
    assert message in str(caught.value)
    named = {"swa": source.tables[2], "full": source.tables[0]}  # scratch is left out
    assert source.save(digests(4), 64, tables=named).stored == 8
    hit = target.lookup(digests(4), 65)
    assert target.load(digests(4), hit).ok
    assert_loaded(source, target, hit)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 63}, AlignmentError, "`hit.length` must be a multiple of the alignment"),
        ({"length": -64}, ArgumentError, "`hit.length`"),
        ({"length": 1 << 40}, ArgumentError, "`hashes` must cover the hit"),
        ({"masks": ()}, ArgumentError, "`hit.masks` must have one entry per group, got 0 and 1"),
        ({"tail_tokens": ()}, ArgumentError, "`hit.tail_tokens` must have one entry per group"),
        ({"tail_tokens": (48,)}, ArgumentError, "`hit.tail_tokens`"),
        ({"tail_tokens": (65,)}, ArgumentError, "`hashes` must cover the hit"),
        ({"tail_tokens": (1 << 40,)}, ArgumentError, "`hashes` must cover the hit"),
        ({"tail_tokens": (-16,)}, ArgumentError, "`hit.tail_tokens`"),
        ({"tail_tokens": ("64",)}, TypeError, "`hit.tail_tokens`"),
        ({"length": 64.0}, TypeError, "`hit.length`"),
        ({"masks": (5,)}, TypeError, "`hit.masks`"),
        ({"masks": (None,)}, TypeError, "`hit.masks`"),
        ({"masks": 5}, TypeError, "`hit.masks`"),
        ({"held": 5}, TypeError, "`hit.held`"),
    ],
    ids=repr,
)
def test_hits_that_no_lookup_returns(change, error, message):
    coord = Coordinator([FullAttention(16)], 16)
    good = coord.find_hit([[True] * 4], 64)
    args, tables = (scheme_of(coord, [flat_layout(8)]), digests(4)), [[1, 2, 3, 4]]
    assert len(LoadPlan(*args, good, tables).keys) == 4
    # No tail: the last block has the digest of the hit's end.
    no_tail = replace(good, tail_tokens=(0,))
    assert LoadPlan(*args, no_tail, tables).keys == LoadPlan(*args, good, tables).keys
    with pytest.raises(error) as caught:
        LoadPlan(*args, replace(good, **change), tables)
    assert message in str(caught.value)


def test_a_hit_must_be_one():
    scheme = scheme_of(Coordinator([FullAttention(16)], 16), [flat_layout(8)])
    with pytest.raises(TypeError, match=r"`hit` must be a Hit, .*, got int"):
        LoadPlan(scheme, [], 64, [[]])
    assert Hit(0, (), ()).length == 0


def test_a_hit_of_another_statement_is_loaded_by_it():
    """The hit remembers what was held; a hit that a caller makes says it himself."""
    coord = Coordinator([FullAttention(16)], 16)
    scheme = scheme_of(coord, [flat_layout(8)])
    hit = replace(coord.find_hit([[True] * 4], 64), held=Held((32,), 32))
    assert numbers(LoadPlan(scheme, digests(4), hit, [[1, 2, 3, 4]]).keys) == [2, 3]
    assert numbers(LoadPlan(scheme, digests(4), hit, [[0, 0, 3, 4]], held=48).keys) == [3]
    with pytest.raises(ArgumentError, match="got block 0 of group 'group0' held at the lookup"):
        LoadPlan(scheme, digests(4), hit, [[1, 2, 3, 4]], held=0)


def test_put_is_what_get_reads():
    """Pieces may be cut otherwise on the other side: the object's bytes are the same."""
    contract = contract_of([FullAttention(16)], 16)
    store = FakeStore()
    one = np.arange(6 * 64, dtype=np.uint8).reshape(6, 64)
    halves = [np.zeros((6, 32), np.uint8), np.zeros((6, 32), np.uint8)]

    def transfer(client, tensors):
        layouts = [KVLayout.from_tensors(tensors, num_blocks=6)]
        return KVTransfer(client, contract.bind(layouts))

    put, get = transfer(store, [one]), transfer(store.client(), halves)
    request = contract.request(hashes=digests(4))
    assert put.save(request, [[1, 2, 3, 4]], 64).ok
    assert len(store.calls(PUT)[0].sizes[0]) == 1
    hit = get.lookup(contract.request(hashes=digests(4), num_tokens=65))
    assert get.load(request, hit, [[5, 4, 3, 2]]).ok
    assert np.array_equal(np.hstack(halves)[[5, 4, 3, 2]], one[1:5])


def test_a_plan_without_tools_moves_everything_in_one_call():
    coord = Coordinator([FullAttention(16)], 16)
    hit = coord.find_hit([[True] * 4], 64)
    plan = LoadPlan(scheme_of(coord, [flat_layout(8)]), digests(4), hit, [[1, 2, 3, 4]])
    calls = answer_with(plan, lambda call: [64] * len(call.args[0]))
    assert keys_of(calls, GET) == plan.keys
    assert len(calls) == 1
