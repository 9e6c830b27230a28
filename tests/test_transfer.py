"""KVTransfer: registration, shards and ranks, events, lifetimes, the memo and the counters."""

import gc
import random
import weakref

import numpy as np
import pytest
from fake_store import EXIST, GET, PUT, REGISTER, UNREGISTER, FakeStore
from hypothesis import given
from hypothesis import strategies as st
from rig import Engine, assert_loaded, digests, pair

from kvmask import (
    Coordinator,
    FullAttention,
    KVLayout,
    KVTransfer,
    PresenceMemo,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
)
from kvmask.errors import ArgumentError, StoreError
from kvmask.layout import head_shards
from kvmask.transfer import merge_ranges

FULL = Coordinator([FullAttention(16)], 16)


def full_pair(tokens=64, **options):
    return pair([FullAttention(16)], 16, tokens, **options)


def ranges(layouts):
    return sorted(s for layout in layouts for s in layout.storages)


# Registration


def test_every_storage_is_registered_once_and_unregistered():
    memory = np.zeros((3, 8, 32), np.uint8)
    layers = [memory[0], memory[1], memory[2]]
    groups = [FullAttention(16), FullAttention(16, spec="b"), FullAttention(16, spec="c")]
    layouts = [KVLayout.from_tensors([layer], num_blocks=8) for layer in layers]
    store = FakeStore()
    names = [VllmKeys("m", group_id=g) for g in range(3)]
    with KVTransfer(store, Coordinator(groups, 16), names, layouts) as kv:
        assert sum(store.registered.values()) == memory.nbytes
        assert len(store.calls(REGISTER)) == len(store.registered)
        assert kv.store is store
    assert store.registered == {}
    kv.close()
    assert len(store.calls(UNREGISTER)) == len(store.calls(REGISTER))


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("how", [-600, -900, 1, RuntimeError("gone")], ids=repr)
def test_a_refused_registration_undoes_the_others(failing, how):
    arrays = [np.zeros((4, 64), np.uint8) for _ in range(3)]
    groups = [FullAttention(16, spec=i) for i in range(3)]
    layouts = [KVLayout.from_tensors([a], num_blocks=4) for a in arrays]
    store = FakeStore()
    store.fail(REGISTER, how, index=failing)
    names = [VllmKeys("m", group_id=g) for g in range(3)]
    with pytest.raises(StoreError, match="must register 256 bytes at 0x") as caught:
        KVTransfer(store, Coordinator(groups, 16), names, layouts)
    assert store.registered == {}
    assert caught.value.code == (how if isinstance(how, int) else None)
    assert len(store.calls(UNREGISTER)) == failing


def test_ranges_to_register():
    assert merge_ranges([]) == []
    assert merge_ranges([(8, 8), (0, 8)]) == [(0, 8), (8, 8)]
    assert merge_ranges([(0, 100), (10, 5), (90, 20), (110, 1)]) == [(0, 110), (110, 1)]
    assert merge_ranges([(1 << 63, 1 << 62), (5, 0)]) == [(1 << 63, 1 << 62)]


def test_devices_are_not_mixed():
    layouts = [
        KVLayout.from_regions([(4096 * (d + 1), 64, 64)], 4, [(4096 * (d + 1), 256)], f"cuda:{d}")
        for d in range(2)
    ]
    groups = [FullAttention(16, spec=i) for i in range(2)]
    names = [VllmKeys("m", group_id=g) for g in range(2)]
    store = FakeStore()
    with pytest.raises(ArgumentError, match=r"must be on one device, got \['cuda:0', 'cuda:1'\]"):
        KVTransfer(store, Coordinator(groups, 16), names, layouts)
    assert not store.log


# Shards and ranks


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_shards_of_heads_travel_between_tp_sizes(kind):
    """One rank with eight heads writes four shards; two ranks with four heads read two each."""
    if kind == "torch":
        pytest.importorskip("torch")
    import torch

    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, (6, 8, 16, 4), dtype=np.uint8)  # blocks, heads, tokens, bytes

    def transfer(store, tensor, tp, rank):
        if kind == "torch":
            tensor = torch.from_numpy(tensor)
        shards = head_shards([tensor], 6, num_kv_heads=8, local_tp=tp, store_tp=4, tp_rank=rank)
        names = [VllmKeys("m", tp_rank=s) for s in shards]
        everyone = [VllmKeys("m", tp_rank=s) for s in range(4)]
        return KVTransfer(store, FULL, [names], [list(shards.values())], [everyone])

    store = FakeStore()
    writer = transfer(store, memory, 1, 0)
    table = [3, 1, 4, 2]
    saved = writer.save(digests(4), [table], 64)
    assert (saved.stored, saved.ok, len(store.pool)) == (16, True, 16)
    for rank in range(2):
        mine = np.zeros((6, 4, 16, 4), np.uint8)
        reader = transfer(store.client(), mine, 2, rank)
        hit = reader.lookup(digests(4), 65)
        assert (hit.length, hit.asked) == (64, 16)
        result = reader.load(digests(4), [[1, 2, 3, 4]], hit)
        assert (result.loaded, result.ok) == (8, True)
        assert np.array_equal(mine[1:5], memory[table][:, rank * 4 : rank * 4 + 4])
        # One shard of one block lost: that block is named, by every rank that reads it.
        lost = next(k for k in sorted(store.pool) if f"tp_rank:{rank * 2 + 1}" in k)
        kept = store.pool.pop(lost)
        result = reader.load(digests(4), [[1, 2, 3, 4]], hit)
        assert [(f.key, f.code) for f in result.failed] == [(lost, -704)]
        assert result.invalid_block_ids(0) == [result.failed[0].block + 1]
        assert reader.lookup(digests(4), 65).length == 16 * result.failed[0].block
        store.pool[lost] = kept


def test_shards_and_a_failure_on_save():
    shards = [
        KVLayout.from_tensors([np.full((6, 8), 7 + s, np.uint8)], num_blocks=6) for s in range(3)
    ]
    names = [VllmKeys("m", tp_rank=s) for s in range(3)]
    store = FakeStore()
    kv = KVTransfer(store, FULL, [names], [shards], max_pieces=2)
    lost = names[1].key(digests(4)[2])
    present = names[2].key(digests(4)[0])
    store.pool[present] = b"8" * 8
    store.fail(PUT, -800, keys=[lost])
    result = kv.save(digests(4), [[1, 2, 3, 4]], 64)
    assert (result.stored, result.present, result.saved_tokens) == (10, 1, 32)
    assert [(f.key, f.block, f.block_id) for f in result.failed] == [(lost, 2, 3)]
    assert store.pool[names[2].key(digests(4)[3])] == bytes([9]) * 8


@pytest.mark.parametrize("stages", [1, 2])
def test_every_rank_of_a_block_is_asked(stages):
    """B25: TP 8 over DCP 8 (and PP 2): one rank's object missing makes the block absent."""
    everyone = [
        VllmKeys("m", tp_rank=r, dcp_rank=r, pp_rank=p) for p in range(stages) for r in range(8)
    ]
    assert len({n.prefix for n in everyone}) == 8 * stages
    store = FakeStore()
    for rank in everyone:
        engine = Engine(store.client(), FULL, 64, seed=rank.tp_rank)
        kv = KVTransfer(store.client(), FULL, [rank], engine.kv._layouts)
        assert kv.save(digests(4), engine.tables, 64).ok
    reader = Engine(store.client(), FULL, 64, lookup_schemas=[everyone])
    hit = reader.kv.lookup(digests(4), 65)
    assert (hit.length, hit.asked) == (64, 4 * 8 * stages)
    for rank in everyone:
        gone = {rank.key(digests(4)[1]): store.pool.pop(rank.key(digests(4)[1]))}
        assert reader.kv.lookup(digests(4), 65).length == 16
        assert reader.kv.lookup(digests(4), 65, strategy="exact").length == 16
        store.pool.update(gone)


def test_engines_that_do_not_agree_share_no_key():
    store = FakeStore()
    layout = KVLayout.from_tensors([np.ones((6, 16), np.uint8)], num_blocks=6)
    first = KVTransfer(store, FULL, [StrictKeys("m", facts={"tag": layout.tag})], [layout])
    other = KVLayout.from_tensors([np.ones((6, 8), np.uint16)], num_blocks=6)
    second = KVTransfer(store.client(), FULL, [StrictKeys("m", facts={"tag": other.tag})], [other])
    first.save(digests(4), [[1, 2, 3, 4]], 64)
    assert first.lookup(digests(4), 65).length == 64
    assert second.lookup(digests(4), 65).length == 0


# Events


class Event:
    def __init__(self, store):
        self.store = store
        self.before = []

    def synchronize(self):
        self.before.append([call.name for call in self.store.log if call.name in (PUT, GET)])


def test_an_event_is_waited_for_once_before_the_first_transfer():
    source, target = full_pair(max_pieces=2)
    event = Event(source.store)
    source.kv.save(digests(4), source.tables, 64, event=event)
    assert event.before == [[]]
    assert len(source.store.calls(PUT)) > 1
    nothing_to_put = Event(source.store)
    source.kv.save(digests(4), source.tables, 64, event=nothing_to_put)
    source.kv.save(digests(4), source.tables, 64, 64, event=nothing_to_put)
    assert nothing_to_put.before == []
    hit = target.kv.lookup(digests(4), 65)
    load = Event(target.store)
    target.kv.load(digests(4), target.tables, hit, event=load)
    assert load.before == [[]]
    target.kv.load(digests(4), target.tables, hit, 64, event=load)
    assert len(load.before) == 1


@pytest.mark.parametrize("event", [5, "now", object()], ids=["int", "str", "object"])
def test_an_event_that_cannot_be_waited_for_puts_nothing(event):
    source, _ = full_pair()
    with pytest.raises(TypeError, match=r"`event` must be a CUDA event or stream"):
        source.kv.save(digests(4), source.tables, 64, event=event)
    assert not source.store.pool


def test_an_event_that_fails_puts_nothing():
    source, _ = full_pair()

    class Broken:
        def synchronize(self):
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        source.kv.save(digests(4), source.tables, 64, event=Broken())
    assert not source.store.pool


# Calls that raise or answer badly


def test_a_store_that_raises_on_a_question_is_an_error_with_its_cause():
    source, _ = full_pair()
    source.store.fail(EXIST, RuntimeError("no route"))
    for ask in (
        lambda: source.kv.lookup(digests(4), 65),
        lambda: source.kv.save(digests(4), source.tables, 64),
    ):
        with pytest.raises(StoreError, match="failed to answer 4 keys: no route") as caught:
            ask()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert not source.store.pool


@pytest.mark.parametrize(
    "answer", [None, 5, "1111", [1, 1], [1] * 9, [1, 1, None, 1], [1.0] * 4], ids=repr
)
@pytest.mark.parametrize("memo", [False, True])
def test_an_answer_that_is_none(answer, memo):
    source, _ = full_pair(memo=PresenceMemo() if memo else None)
    source.store.fail(EXIST, answer, whole=True)
    with pytest.raises(StoreError, match="the store"):
        source.kv.lookup(digests(4), 65)
    with pytest.raises(StoreError, match="the store"):
        source.kv.save(digests(4), source.tables, 64)
    assert source.kv.stats.lookups == source.kv.stats.saves == 0


@pytest.mark.parametrize("answer", [None, 7, [48], [48] * 9, [48, 48, None, 48]], ids=repr)
def test_a_transfer_whose_answer_is_none(answer):
    """It is an error, not a success: the caller may take no block for loaded or saved."""
    source, target = full_pair(layers=1)
    source.store.fail(PUT, answer, whole=True, times=1)
    with pytest.raises(StoreError, match="the store must answer"):
        source.kv.save(digests(4), source.tables, 64)
    source.kv.save(digests(4), source.tables, 64)
    hit = target.kv.lookup(digests(4), 65)
    target.store.fail(GET, answer, whole=True)
    with pytest.raises(StoreError, match="the store must answer"):
        target.kv.load(digests(4), target.tables, hit)


def test_a_dead_master():
    source, target = full_pair()
    source.kv.save(digests(4), source.tables, 64)
    hit = target.kv.lookup(digests(4), 65)
    target.store.master_dead = True
    assert target.kv.lookup(digests(4), 65).length == 0
    result = target.kv.load(digests(4), target.tables, hit)
    assert {f.code for f in result.failed} == {-900}
    assert len(result.failed) == 4
    saved = target.kv.save(digests(4, salt=1), target.tables, 64)
    assert (saved.stored, len(saved.failed), saved.saved_tokens) == (0, 4, 0)


@pytest.mark.parametrize("pieces", [None, 1, 3, 512])
def test_calls_have_at_most_so_many_pieces(pieces):
    source, target = full_pair(layers=3, max_pieces=pieces)
    assert source.kv.save(digests(4), source.tables, 64).stored == 4
    hit = target.kv.lookup(digests(4), 65)
    assert target.kv.load(digests(4), target.tables, hit).ok
    assert_loaded(source, target, hit)
    for call in source.store.calls(PUT) + target.store.calls(GET):
        assert len(call.keys) == 1 or sum(map(len, call.sizes)) <= (pieces or 1 << 30)
    assert len(source.store.calls(PUT)) == (4 if pieces in (1, 3) else 1)


def test_the_config_of_a_put_is_passed_on():
    config = object()
    source, _ = full_pair(replicate_config=config)
    source.kv.save(digests(4), source.tables, 64)
    assert [call.config for call in source.store.calls(PUT)] == [config]


# Lifetimes (B59)


def test_a_plan_keeps_its_tensors():
    class Array(np.ndarray):
        pass

    array = np.ones((6, 16), np.uint8).view(Array)
    seen = weakref.ref(array)
    layout = KVLayout.from_tensors([array], num_blocks=6)
    plan = SavePlan(FULL, [VllmKeys("m")], [layout], digests(4), [[1, 2, 3, 4]], 64)
    twin = SavePlan(FULL, [VllmKeys("m")], [layout], digests(4), [[1, 2, 3, 4]], 64)
    del array, layout
    gc.collect()
    assert seen() is not None
    store = FakeStore(require_registration=False)

    def run(job):
        job.feed_exists([0] * 4)
        job.feed(store.batch_put_from_multi_buffers(*job.next_batch()))
        assert job.result.stored == 4

    run(plan)
    del plan  # one job done leaves the other's memory alone
    gc.collect()
    assert seen() is not None
    run(twin)
    assert set(store.pool.values()) == {bytes([1]) * 16}
    del twin
    gc.collect()
    assert seen() is None


def test_a_transfer_keeps_its_tensors_until_it_goes():
    class Array(np.ndarray):
        pass

    array = np.ones((6, 16), np.uint8).view(Array)
    seen = weakref.ref(array)
    kv = KVTransfer(FakeStore(), FULL, [VllmKeys("m")], [KVLayout.from_tensors([array], 6)])
    del array
    gc.collect()
    assert seen() is not None
    kv.close()
    del kv
    gc.collect()
    assert seen() is None


# 64-bit ids (B55)


@pytest.mark.parametrize(
    ("stride", "block", "address"),
    [
        (1_039_680, 2066, 139_640_124_706_432),
        (1_039_680, 2065, 0x7F0000000000 + 2_146_939_200),
        (1_002_240, 2143, 0x7F0000000000 + 2_147_800_320),
        (1_435_968, 4564, 0x7F0000000000 + 6_553_757_952),
    ],
)
def test_addresses_beyond_32_bits_through_a_plan(stride, block, address):
    base = 0x7F0000000000
    layout = KVLayout.from_regions([(base, 512, stride)], 8192, [(base, stride * 8192)])
    plan = SavePlan(FULL, [VllmKeys("m")], [layout], digests(1), [[block]], 16)
    plan.feed_exists([0])
    assert plan.next_batch().addresses == [[address]]


def test_addresses_at_the_sign_bit_through_a_plan():
    base = (1 << 63) - 4096
    layout = KVLayout.from_regions([(base, 4096, 4096)], 3, [(base, 3 * 4096)])
    plan = SavePlan(FULL, [VllmKeys("m")], [layout], digests(2), [[1, 2]], 32)
    plan.feed_exists([0, 0])
    assert plan.next_batch().addresses == [[1 << 63], [(1 << 63) + 4096]]


# Everything at once


def some_keys(salt, share):
    return lambda key: random.Random(f"{key}{salt}").random() < share


@given(st.integers(0, 1 << 30))
def test_random_failures_never_lose_a_key(seed):
    """planned == stored + present + failed, and loaded + failed == planned."""
    rng = random.Random(seed)
    groups = [FullAttention(32), SlidingWindow(16, window=40)]
    source, target = pair(groups, 16, 320, layers=1, max_pieces=rng.choice((3, None)))
    hashes = digests(20)
    planned = 10 + 20 - sum(m.count(False) for m in source.coord.store_mask(320) if m)
    for store, call, codes in (
        (source.store, EXIST, (0, -1, -900)),
        (source.store, PUT, (-200, -705, -800, RuntimeError("x"))),
        (target.store, GET, (-704, -707, 0, 5, RuntimeError("x"))),
    ):
        for _ in range(rng.randint(0, 3)):
            store.fail(
                call,
                rng.choice(codes),
                times=rng.choice((1, None)),
                index=rng.choice((None, 0)),
                keys=some_keys(rng.random(), rng.random() * 0.6),
            )
    try:
        saved = source.kv.save(hashes, source.tables, 320)
    except StoreError:
        return
    assert saved.stored + saved.present + len(saved.failed) == planned
    assert saved.stored <= len(source.store.pool)
    hit = target.kv.lookup(hashes, 321)
    result = target.kv.load(hashes, target.tables, hit)
    wanted = {(g, i) for g, m in enumerate(hit.masks) for i in m.indices()}
    failed = {(f.group, f.block) for f in result.failed}
    assert result.loaded + len(result.failed) == len(wanted)
    for g, i in wanted - failed:
        assert target.block(g, i) == source.block(g, i)
