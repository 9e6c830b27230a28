"""Loads: where the bytes go, what is reported, and that nothing wrong is ever taken for right."""

import random
from dataclasses import replace

import numpy as np
import pytest
import strategies
from fake_store import EXIST, GET, PUT, FakeStore
from hypothesis import given
from hypothesis import strategies as st
from rig import Engine, assert_loaded, digests, key, pair

from kvmask import (
    ChunkedLocal,
    Coordinator,
    FullAttention,
    Hit,
    KVLayout,
    LoadPlan,
    Mamba,
    SlidingWindow,
    VllmKeys,
)
from kvmask.errors import AlignmentError, ArgumentError, BlockIdError, PlanStateError, StoreError

DSV4 = [
    FullAttention(256),
    SlidingWindow(64, window=128),
    SlidingWindow(64, window=512),
    SlidingWindow(4, window=16),
    SlidingWindow(8, window=64),
]


def plan_of(num_blocks=4, block_bytes=64, **options):
    """A plan over one full-attention group of 16-token blocks; block i has id i + 1."""
    coord = Coordinator([FullAttention(16)], 16)
    size = block_bytes
    layout = KVLayout.from_regions([(1 << 20, size, size)], 1 << 14, [(1 << 20, size << 14)])
    hit = coord.find_hit([[True] * num_blocks], num_blocks * 16)
    table = [list(range(1, num_blocks + 1))]
    hashes = digests(num_blocks)
    return LoadPlan(coord, [VllmKeys("m")], [layout], hashes, table, hit, **options)


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
        saved = source.kv.save(hashes, source.tables, num_tokens, states=True)
        assert saved.ok
        assert saved.stored > 0
        for strategy in ("staged", "exact"):
            hit = target.kv.lookup(hashes, num_tokens, strategy=strategy)
            assert hit.length > num_tokens - 2 * source.coord.alignment - 1 or "sparse" in name
        result = target.kv.load(hashes, target.tables, hit)
        assert result.ok, str(result)
        # A hit at the edge of an attention chunk needs nothing of that group.
        assert assert_loaded(source, target, hit) == result.loaded


@pytest.mark.parametrize("name", ["window", "dsv4", "partial", "states"])
def test_round_trip_in_pieces(name):
    """Saved as a prompt grows, loaded past what the engine holds itself."""
    groups, hash_block, options = ROUND_TRIPS[name]
    source, target = pair(groups, hash_block, 1024, **options)
    hashes = digests(1024 // hash_block)
    start = 0
    for end in (100, 300, 512, 900, 1024):
        result = source.kv.save(hashes, source.tables, end, start, states=True)
        assert result.ok
        start = result.saved_tokens
    hit = target.kv.lookup(hashes, 1025, local_tokens=256)
    assert hit.length == 1024
    result = target.kv.load(hashes, target.tables, hit, start_token=256)
    assert result.ok
    assert assert_loaded(source, target, hit, 256) == result.loaded


@given(st.data())
def test_whatever_was_stored_loads_or_is_no_hit(data):
    """Any groups, a store with holes: every block of the hit has the right bytes."""
    config = data.draw(strategies.configs())
    num_tokens = min(data.draw(token_counts(config)), 300 * config.hash_block_size)
    rng = data.draw(st.randoms(use_true_random=False))
    coord = Coordinator(*config.args)
    store = FakeStore()
    source = Engine(store, coord, num_tokens, seed=2, layers=1)
    target = Engine(store.client(), coord, num_tokens, layers=1)
    hashes = digests(num_tokens // config.hash_block_size)
    saved = source.kv.save(hashes, source.tables, num_tokens, states=True)
    assert saved.ok
    store.evict([k for k in sorted(store.pool) if rng.random() < 0.1])
    hit = target.kv.lookup(hashes, num_tokens)
    result = target.kv.load(hashes, target.tables, hit)
    assert result.ok
    assert assert_loaded(source, target, hit) == result.loaded


def token_counts(config):
    return strategies.token_counts(config)


def test_a_boundary_that_no_object_carries_is_read_under_the_next_one():
    """B04: full {32, 64}, state {32, 48}: hit 48; the last full block is keyed by 64."""
    source, target = pair([FullAttention(32), Mamba(32)], 16, 64, partial_hits=True)
    hashes = digests(4)
    assert source.kv.save(hashes, source.tables, 64, states=True).ok
    pool = source.store.pool
    assert key(source, 0, hashes[2]) not in pool  # full attention at 48: no such object
    for boundary in (16, 48, 64):
        pool.pop(key(source, 1, hashes[boundary // 16 - 1]), None)
    pool[key(source, 1, hashes[2])] = source.block(1, 1)
    for num_tokens in (64, 65):
        hit = target.kv.lookup(hashes, num_tokens)
        assert (hit.length, hit.tail_tokens) == (48, (64, 48))
        result = target.kv.load(hashes, target.tables, hit)
        assert result.ok
        got = [k for call in target.store.calls(GET) for k in call.keys]
        assert sorted(numbers(got[-3:])) == [1, 2, 3]
        assert key(target, 0, hashes[2]) not in got
    pool.pop(key(source, 0, hashes[3]))
    assert target.kv.lookup(hashes, 64).length == 32


def test_a_partial_tail_is_stored_and_read_under_its_own_end():
    """B42, second half: 80 tokens over blocks of 64: (0, 64) and (64, 80)."""
    source, target = pair([FullAttention(64)], 16, 80, partial_hits=True)
    hashes = digests(5)
    result = source.kv.save(hashes, source.tables, 80)
    assert (result.stored, result.saved_tokens) == (2, 80)
    assert set(source.store.pool) == {key(source, 0, hashes[3]), key(source, 0, hashes[4])}
    hit = target.kv.lookup(hashes, 81)
    assert (hit.length, hit.tail_tokens) == (80, (80,))
    assert target.kv.load(hashes, target.tables, hit).loaded == 2
    assert target.block(0, 1) == source.block(0, 1)


def test_a_save_that_ended_inside_a_block_is_completed():
    source, target = pair([FullAttention(64)], 16, 128, partial_hits=True)
    hashes = digests(8)
    first = source.kv.save(hashes, source.tables, 80)
    assert source.kv.save(hashes, source.tables, 128, first.saved_tokens).saved_tokens == 128
    hit = target.kv.lookup(hashes, 129)
    assert hit.length == 128
    assert target.kv.load(hashes, target.tables, hit).ok
    assert_loaded(source, target, hit)


# Failures


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("code", [-707, -704, -800, 0, 63, 65, 1 << 40])
def test_a_failed_batch_hides_nothing_after_it(rank, failing, code):
    """B46: order by rank, two keys per get; everything is loaded or reported."""
    plan = plan_of(4, rotation=rank, staging=2 * 12288 * 10 // 9 + 1)
    batches = []
    while (batch := plan.next_batch()) is not None:
        batches.append(numbers(batch.keys))
        plan.feed([code if n == failing else 64 for n in batches[-1]])
    order = [(i + rank) % 4 for i in range(4)]
    assert batches == [order[:2], order[2:]]
    result = plan.result
    assert (result.loaded, result.num_bytes) == (3, 192)
    assert [(f.group, f.block, f.block_id, f.code) for f in result.failed] == [
        (0, failing, failing + 1, code)
    ]
    assert result.invalid_block_ids(0) == [failing + 1]
    assert plan.keys[failing] == result.failed[0].key


@pytest.mark.parametrize(
    ("rank", "order"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3, 0]), (5, [1, 2, 3, 0])]
)
def test_a_failure_is_named_through_the_rotation(rank, order):
    """B47."""
    plan = plan_of(4, rotation=rank)
    batch = plan.next_batch()
    assert numbers(batch.keys) == order
    assert [row[0] for row in batch.addresses] == [(1 << 20) + 64 * (n + 1) for n in order]
    plan.feed([-704 if n == 2 else 64 for n in order])
    assert [f.block for f in plan.result.failed] == [2]


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_nothing_to_load(rank):
    plan = plan_of(0, rotation=rank)
    assert plan.next_batch() is None
    assert (plan.result.loaded, plan.result.failed, plan.result.ok) == (0, (), True)
    held = plan_of(4, rotation=rank, start_token=64)
    assert held.next_batch() is None


@given(st.data())
def test_every_planned_key_is_loaded_or_failed(data):
    rng = data.draw(st.randoms(use_true_random=False))
    n = data.draw(st.integers(0, 30))
    plan = plan_of(
        n,
        rotation=data.draw(st.integers(0, 40)),
        start_token=16 * data.draw(st.integers(0, n)),
        staging=data.draw(st.sampled_from((None, 12288, 1 << 17))),
        max_pieces=data.draw(st.sampled_from((None, 1, 3, 512))),
    )
    good, seen, retried, calls = set(), [], 0, 0
    while (batch := plan.next_batch()) is not None:
        retried += bool(plan.renew)
        if plan.renew:
            assert plan.renew == batch.keys
        else:
            seen += batch.keys
            calls += 1
        kind = rng.random()
        if kind < 0.15:
            plan.fail(-900)
            continue
        if kind < 0.3:
            plan.feed([-707] * len(batch.keys))
            continue
        results = [64 if rng.random() < 0.7 else rng.choice((0, -704, 63, -1)) for _ in batch.keys]
        good.update(k for k, r in zip(batch.keys, results, strict=True) if r == 64)
        plan.feed(results)
    result = plan.result
    assert retried <= calls
    assert sorted(seen) + sorted(f.key for f in result.failed) == sorted(seen) + sorted(
        set(plan.keys) - good
    )
    assert result.loaded + len(result.failed) == len(plan.keys)
    assert result.loaded == len(good)
    assert result.num_bytes == 64 * len(good)
    assert len(seen) <= len(plan.keys)


def test_codes_of_a_get():
    """B51: only the planned number of bytes is good."""
    source, target = pair([FullAttention(16)], 16, 96, layers=1)
    hashes = digests(6)
    source.kv.save(hashes, source.tables, 96)
    hit = target.kv.lookup(hashes, 97)
    keys = [key(source, 0, h) for h in hashes]
    odd = dict(zip(keys[1:], (0, 47, 49, -704, -707), strict=True))
    for k, code in odd.items():
        target.store.fail(GET, code, keys=[k])
    result = target.kv.load(hashes, target.tables, hit)
    assert result.loaded == 1
    assert {f.key: f.code for f in result.failed} == odd
    assert result.invalid_block_ids(0) == sorted(target.tables[0][1:6])
    assert len(target.store.calls(GET)) == 1  # not all lost their lease: no second try


def test_a_lost_lease_is_renewed_once():
    source, target = pair([FullAttention(16)], 16, 64)
    hashes = digests(4)
    source.kv.save(hashes, source.tables, 64)
    hit = target.kv.lookup(hashes, 65)
    asked = len(target.store.calls(EXIST))
    target.store.fail(GET, -707, times=1)
    result = target.kv.load(hashes, target.tables, hit)
    assert result.ok
    assert_loaded(source, target, hit)
    assert [c.name for c in target.store.log[-3:]] == [GET, EXIST, GET]
    assert len(target.store.calls(EXIST)) == asked + 1
    target.store.fail(GET, -707)
    result = target.kv.load(hashes, target.tables, hit)
    assert (result.loaded, {f.code for f in result.failed}) == (0, {-707})
    assert len(target.store.calls(GET)) == 4


@pytest.mark.parametrize("call", [EXIST, GET])
def test_a_call_that_raises_fails_its_keys_alone(call):
    source, target = pair([FullAttention(16)], 16, 64, max_pieces=2)
    hashes = digests(4)
    source.kv.save(hashes, source.tables, 64)
    hit = target.kv.lookup(hashes, 65)
    first = target.store.counts[GET]
    if call == EXIST:
        target.store.fail(GET, -707, index=first)
        target.store.fail(EXIST, RuntimeError("gone"), index=target.store.counts[EXIST])
    else:
        target.store.fail(GET, RuntimeError("gone"), index=first)
    result = target.kv.load(hashes, target.tables, hit)
    assert result.loaded == 3
    assert [f.code for f in result.failed] == [-900]


def test_an_object_of_another_size_is_never_taken():
    """A store that holds other bytes under a key: the block is reported."""
    source, target = pair([FullAttention(16)], 16, 64)
    hashes = digests(4)
    source.kv.save(hashes, source.tables, 64)
    size = len(source.block(0, 0))
    source.store.pool[key(source, 0, hashes[1])] = b"x" * (size - 1)
    source.store.pool[key(source, 0, hashes[2])] = b"x" * (size + 1)
    result = target.kv.load(hashes, target.tables, target.kv.lookup(hashes, 65))
    assert [(f.block, f.code < 0) for f in result.failed] == [(1, True), (2, True)]


@given(st.integers(0, 1 << 30))
def test_a_store_that_evicts_between_any_two_calls(seed):
    """Whatever the hit says, a load gives the right bytes or reports the block."""
    rng = random.Random(seed)
    groups = [FullAttention(64), SlidingWindow(16, window=32), SlidingWindow(32, window=65)]
    source, target = pair(groups, 16, 640, layers=1, max_pieces=rng.choice((2, 512)))
    hashes = digests(40)
    source.kv.save(hashes, source.tables, rng.choice((320, 640)))
    everything = dict(source.store.pool)

    def churn(store, call, keys):
        for k in sorted(everything):
            if rng.random() < 0.05:
                store.pool.pop(k, None)
            elif rng.random() < 0.05:
                store.pool.setdefault(k, everything[k])

    target.store.hooks.append(churn)
    hit = target.kv.lookup(hashes, 641)
    result = target.kv.load(hashes, target.tables, hit)
    failed = {(f.group, f.block) for f in result.failed}
    wanted = {(g, i) for g, m in enumerate(hit.masks) for i in m.indices()}
    assert failed <= wanted
    assert result.loaded + len(result.failed) == len(wanted)
    for g, i in wanted - failed:
        assert target.block(g, i) == source.block(g, i)
    for g, i in failed:
        assert not any(target.block(g, i))
        assert target.tables[g][i] in result.invalid_block_ids(g)


# Bad tables and hits, calls out of order


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2, 0, 4], "got 0 for block 2 of group 0"),
        ([1, 2, 3], "got 3 entries for block 3 of group 0"),
        ([], "got 0 entries for block 0 of group 0"),
        ([1, 2, 3, 6], "must be at least 0 and below `num_blocks`, got 6 at index 3 and 6"),
        ([1, 2, -1, 3], "must be at least 0 and below `num_blocks`, got -1"),
        ([1, 2, 1 << 80, 3], "must be at least 0 and below `num_blocks`"),
        ([1, 2, None, 3], "`block_ids` must hold integers, got NoneType at index 2"),
        ([1, 2, 3.0, 4], "`block_ids` must hold integers, got float at index 2"),
    ],
)
def test_tables_that_cannot_be_filled(table, message):
    source, target = pair([FullAttention(16)], 16, 64)
    source.kv.save(digests(4), source.tables, 64)
    hit = target.kv.lookup(digests(4), 65)
    with pytest.raises(BlockIdError) as caught:
        target.kv.load(digests(4), [table], hit)
    assert message in str(caught.value)
    assert not target.store.calls(GET)


def test_tables_of_any_integer_array():
    source, target = pair([FullAttention(16)], 16, 64)
    for make in (tuple, np.array, lambda t: np.array(t, np.int32)):
        assert source.kv.save(digests(4), [make(source.tables[0])], 64).ok
        hit = target.kv.lookup(digests(4), 65)
        assert target.kv.load(digests(4), [make(target.tables[0])], hit).ok
    assert_loaded(source, target, hit)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 63}, AlignmentError, "`hit.length` must be a multiple of the alignment"),
        ({"length": -64}, ArgumentError, "`hit.length`"),
        ({"length": 1 << 40}, ArgumentError, "`hashes` must cover the tokens"),
        ({"masks": ()}, ArgumentError, "`hit` must have one mask per group"),
        ({"tail_tokens": ()}, ArgumentError, "`hit` must have one tail per group"),
        ({"tail_tokens": (0,)}, ArgumentError, "`hit.tail_tokens`"),
        ({"tail_tokens": (48,)}, ArgumentError, "`hit.tail_tokens`"),
        ({"tail_tokens": (65,)}, ArgumentError, "`hashes` must cover the tokens"),
        ({"tail_tokens": (1 << 40,)}, ArgumentError, "`hashes` must cover the tokens"),
    ],
)
def test_hits_that_no_lookup_returns(change, error, message):
    coord = Coordinator([FullAttention(16)], 16)
    good = coord.find_hit([[True] * 4], 64)
    layout = KVLayout.from_regions([(4096, 64, 64)], 8, [(4096, 512)])
    args = coord, [VllmKeys("m")], [layout], digests(4), [[1, 2, 3, 4]]
    assert len(LoadPlan(*args, good).keys) == 4
    with pytest.raises(error) as caught:
        LoadPlan(*args, replace(good, **change))
    assert message in str(caught.value)


def test_a_hit_must_be_one():
    with pytest.raises(TypeError, match="`hit` must be a Hit, got int"):
        LoadPlan(
            Coordinator([FullAttention(16)], 16),
            [VllmKeys("m")],
            [KVLayout.from_regions([(4096, 64, 64)], 8, [(4096, 512)])],
            [],
            [[]],
            64,
        )
    assert Hit(0, (), ()).length == 0


def test_out_of_order():
    plan = plan_of(4, max_pieces=2)
    with pytest.raises(PlanStateError, match="`feed` must follow `next_batch`"):
        plan.feed([64])
    with pytest.raises(PlanStateError, match="`result` needs every batch to be fed"):
        plan.result  # noqa: B018
    plan.next_batch()
    with pytest.raises(PlanStateError, match="`feed` must be given the answers"):
        plan.next_batch()
    for bad in ([], [64], [64] * 3):
        with pytest.raises(StoreError, match=f"got {len(bad)} answers to 2 keys"):
            plan.feed(bad)
    for odd in (None, "64", 64.0):
        with pytest.raises(StoreError, match="must answer with integers"):
            plan.feed([64, odd])
    plan.feed(np.array([64, 64], np.int64))
    plan.next_batch()
    plan.fail(-800)
    assert (plan.result.loaded, len(plan.result.failed)) == (2, 2)


def test_put_is_what_get_reads():
    """Pieces may be cut otherwise on the other side: the object's bytes are the same."""
    coord = Coordinator([FullAttention(16)], 16)
    store = FakeStore()
    one = np.arange(6 * 64, dtype=np.uint8).reshape(6, 64)
    halves = [np.zeros((6, 32), np.uint8), np.zeros((6, 32), np.uint8)]
    writer = Engine(store, coord, 64, layers=1)
    writer.kv.close()
    from kvmask import KVTransfer

    put = KVTransfer(store, coord, [VllmKeys("m")], [KVLayout.from_tensors([one], num_blocks=6)])
    get = KVTransfer(
        store.client(), coord, [VllmKeys("m")], [KVLayout.from_tensors(halves, num_blocks=6)]
    )
    assert put.save(digests(4), [[1, 2, 3, 4]], 64).ok
    assert len(store.calls(PUT)[0].sizes[0]) == 1
    hit = get.lookup(digests(4), 65)
    assert get.load(digests(4), [[5, 4, 3, 2]], hit).ok
    assert np.array_equal(np.hstack(halves)[[5, 4, 3, 2]], one[1:5])
