"""KVTransfer: registration, shards and ranks, events, lifetimes, the memo and the counters."""

import gc
import random
import weakref

import numpy as np
import pytest
from fake_store import EXIST, GET, PUT, REGISTER, UNREGISTER, FakeStore
from hypothesis import given
from hypothesis import strategies as st
from rig import Engine, assert_loaded, contract_of, digests, key, pair, scheme_of

from kvmask import (
    Coordinator,
    FullAttention,
    KVLayout,
    KVTransfer,
    PresenceMemo,
    RankGrid,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    drive,
)
from kvmask._core import build_keys
from kvmask.errors import ArgumentError, PlanStateError, StoreError
from kvmask.layout import head_shards
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import CALL_FAILED, MALFORMED_ANSWER
from kvmask.regions import merge_ranges

FULL = Coordinator([FullAttention(16)], 16)
FULL_CONTRACT = contract_of([FullAttention(16)], 16)


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
    with KVTransfer(store, contract_of(groups, 16).bind(layouts)) as kv:
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
    with pytest.raises(StoreError, match="must register 256 bytes at 0x") as caught:
        KVTransfer(store, contract_of(groups, 16).bind(layouts))
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
    with pytest.raises(ArgumentError, match=r"must be on one device, got \['cuda:0', 'cuda:1'\]"):
        contract_of(groups, 16).bind(layouts)


# The end of a transfer


@pytest.mark.parametrize("how", [-600, RuntimeError("gone")], ids=repr)
def test_what_the_store_does_not_unregister_is_reported_and_tried_again(how):
    """R8: the others are unregistered all the same."""
    arrays = [np.zeros((4, 64), np.uint8) for _ in range(3)]
    groups = [FullAttention(16, spec=i) for i in range(3)]
    layouts = [KVLayout.from_tensors([a], num_blocks=4) for a in arrays]
    store = FakeStore()
    kv = KVTransfer(store, contract_of(groups, 16).bind(layouts))
    store.fail(UNREGISTER, how, index=1)
    with pytest.raises(StoreError, match=r"must unregister every storage, got .* for 1 of them"):
        kv.close()
    assert len(store.registered) == 1
    kv.close()
    assert store.registered == {}
    kv.close()
    assert len(store.calls(UNREGISTER)) == 4


def test_a_with_block_that_raises_is_not_hidden_by_its_end():
    store = FakeStore()
    store.fail(UNREGISTER, -600)
    layout = KVLayout.from_tensors([np.zeros((6, 16), np.uint8)], num_blocks=6)
    kv = KVTransfer(store, FULL_CONTRACT.bind([layout]))
    with pytest.raises(StoreError, match="must unregister every storage") as caught, kv:
        raise KeyError("mine")
    assert "mine" in str(caught.value.__context__)


def test_calls_after_the_end_are_refused():
    source, target = full_pair()
    source.save(digests(4), 64)
    hit = source.lookup(digests(4), 65)
    source.kv.close()
    calls = len(source.store.log)
    for call in (
        lambda: source.lookup(digests(4), 65),
        lambda: source.load(digests(4), hit),
        lambda: source.save(digests(4), 64),
    ):
        with pytest.raises(PlanStateError, match="the transfer is closed"):
            call()
    assert len(source.store.log) == calls
    target.kv.close()


def test_a_contract_without_memory_can_look_up_alone():
    source, _ = full_pair()
    source.save(digests(4), 64)
    store = source.store.client()
    kv = KVTransfer(store, source.contract)
    request = source.contract.request(hashes=digests(4), num_tokens=65)
    hit = kv.lookup(request)
    assert hit.length == 64
    assert not store.calls(REGISTER)
    calls = len(store.log)
    for call in (
        lambda: kv.save(request, source.tables, 64),
        lambda: kv.load(request, hit, source.tables),
    ):
        with pytest.raises(PlanStateError, match=r"`contract.bind\(layouts\)` first"):
            call()
    assert len(store.log) == calls
    kv.close()


@pytest.mark.parametrize("wrong", [None, 5, FULL, scheme_of(FULL)], ids=lambda v: type(v).__name__)
def test_what_is_no_contract_and_what_is_no_request(wrong):
    with pytest.raises(TypeError, match="`contract` must be a Contract or a bound contract, got"):
        KVTransfer(FakeStore(), wrong)
    source, _ = full_pair()
    hit = source.lookup(digests(4), 65)
    for call in (
        lambda: source.kv.lookup(wrong),
        lambda: source.kv.load(wrong, hit, source.tables),
        lambda: source.kv.save(wrong, source.tables, 64),
    ):
        with pytest.raises(TypeError, match="`request` must be a CacheRequest of the contract"):
            call()


def test_a_request_of_another_contract_is_refused():
    source, _ = full_pair()
    other = contract_of([FullAttention(16)], 16, model="other").request(hashes=digests(4))
    with pytest.raises((TypeError, ArgumentError), match="`request` must be one of this contract"):
        source.kv.lookup(other)
    # Policies may differ: they shape neither keys nor bytes.
    twin = contract_of([FullAttention(16)], 16, retention_interval=0)
    assert source.kv.lookup(twin.request(hashes=digests(4))).length == 0


# Shards and ranks


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_shards_of_heads_travel_between_tp_sizes(kind):
    """One rank with eight heads writes four shards; two ranks with four heads read two each."""
    torch = pytest.importorskip("torch") if kind == "torch" else None
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, (6, 8, 16, 4), dtype=np.uint8)  # blocks, heads, tokens, bytes

    def transfer(store, tensor, tp, rank):
        if torch is not None:
            tensor = torch.from_numpy(tensor)
        shards = head_shards([tensor], 6, num_kv_heads=8, local_tp=tp, store_tp=4, tp_rank=rank)
        contract = contract_of(
            {"kv": FullAttention(16)},
            16,
            StrictKeys("m"),
            ranks=RankGrid(tp_size=tp, kv_heads=8, store_tp_size=4),
            payload={"kv": shards},
        )
        return KVTransfer(store, contract.bind({"kv": shards}, tp_rank=rank))

    store = FakeStore()
    writer = transfer(store, memory, 1, 0)
    table = [3, 1, 4, 2]
    request = writer.contract.contract.request(hashes=digests(4))
    saved = writer.save(request, {"kv": table}, 64)
    assert (saved.stored, saved.ok, len(store.pool)) == (16, True, 16)
    for rank in range(2):
        mine = np.zeros((6, 4, 16, 4), np.uint8)
        reader = transfer(store.client(), mine, 2, rank)
        request = reader.contract.contract.request(hashes=digests(4), num_tokens=65)
        hit = reader.lookup(request)
        assert (hit.length, hit.asked) == (64, 16)
        result = reader.load(request, hit, [[1, 2, 3, 4]])
        assert (result.loaded, result.ok) == (8, True)
        assert np.array_equal(mine[1:5], memory[table][:, rank * 4 : rank * 4 + 4])
        # One shard of one block lost: that block is named, by every rank that reads it.
        lost = next(k for k in sorted(store.pool) if f"@tp{rank * 2 + 1}@" in k)
        kept = store.pool.pop(lost)
        result = reader.load(request, hit, [[1, 2, 3, 4]])
        (failure,) = result.failures
        assert (failure.key, failure.code) == (lost, -704)
        assert result.invalid == {"kv": [failure.block + 1]}
        assert result.usable_tokens == 16 * failure.block
        assert reader.lookup(request).length == 16 * failure.block
        store.pool[lost] = kept


def test_shards_and_a_failure_on_save():
    """Three shards of a block on one rank, two keys per put."""
    memory = np.zeros((6, 3, 8), np.uint8)  # blocks, heads, bytes
    memory[:] = np.arange(7, 10, dtype=np.uint8)[:, None]
    shards = head_shards([memory], 6, num_kv_heads=3, local_tp=1, store_tp=3, tp_rank=0)
    contract = contract_of(
        [FullAttention(16)],
        16,
        StrictKeys("m"),
        ranks=RankGrid(kv_heads=3, store_tp_size=3),
        payload=[shards],
    )
    store = FakeStore()
    engine = contract.bind([shards])
    kv = KVTransfer(store, engine, policy=MooncakePolicy(max_pieces=2))
    own = engine.scheme.groups[0].own
    lost, present, last = (
        build_keys(own[s : s + 1], [digests(4)[i]])[0] for s, i in ((1, 2), (2, 0), (2, 3))
    )
    store.pool[present] = b"8" * 8
    store.fail(PUT, -800, keys=[lost])
    result = kv.save(contract.request(hashes=digests(4)), [[1, 2, 3, 4]], 64)
    assert (result.stored, result.present, result.mark) == (10, 1, 32)
    assert [(f.key, f.block, f.block_id) for f in result.failures] == [(lost, 2, 3)]
    assert store.pool[last] == bytes([9]) * 8
    assert all(len(call.keys) <= 2 for call in store.calls(PUT))


@pytest.mark.parametrize("stages", [1, 2])
def test_every_rank_of_a_block_is_asked(stages):
    """B25: TP 8 over DCP 8 (and PP 2): one rank's object missing makes the block absent."""
    grid = RankGrid(tp_size=8, dcp_size=8, pp_size=stages, kv_heads=1)
    contract = contract_of([FullAttention(16)], 16, ranks=grid)
    store = FakeStore()
    engines = [
        Engine(store.client(), contract, 64, seed=t, bind={"tp_rank": t, "pp_rank": p})
        for p in range(stages)
        for t in range(8)
    ]
    own = [key(engine, 0, digests(4)[1]) for engine in engines]
    assert len(set(own)) == 8 * stages
    for engine in engines:
        saved = engine.save(digests(4), 64)
        assert (saved.ok, saved.stored, saved.writers) == (True, 4, 1)
    reader = KVTransfer(store.client(), contract)

    def look(strategy="staged"):
        request = contract.request(hashes=digests(4), num_tokens=65)
        return reader.lookup(request, strategy=strategy)

    hit = look()
    assert (hit.length, hit.asked) == (64, 4 * 8 * stages)
    for name in own:
        gone = {name: store.pool.pop(name)}
        assert look().length == 16
        assert look("exact").length == 16
        store.pool.update(gone)


def test_engines_that_do_not_agree_share_no_key():
    store = FakeStore()

    def engine(client, memory):
        layout = KVLayout.from_tensors([memory], num_blocks=6)
        contract = contract_of([FullAttention(16)], 16, StrictKeys("m"), payload=[layout])
        return KVTransfer(client, contract.bind([layout]))

    first = engine(store, np.ones((6, 16), np.uint8))
    second = engine(store.client(), np.ones((6, 8), np.uint16))

    def request(kv):
        return kv.contract.contract.request(hashes=digests(4), num_tokens=65)

    first.save(request(first), [[1, 2, 3, 4]], 64)
    assert first.lookup(request(first)).length == 64
    assert second.lookup(request(second)).length == 0


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
    source.save(digests(4), 64, event=event)
    assert event.before == [[]]
    assert len(source.store.calls(PUT)) > 1
    nothing_to_put = Event(source.store)
    source.save(digests(4), 64, event=nothing_to_put)
    source.save(digests(4), 64, 64, event=nothing_to_put)
    assert nothing_to_put.before == []
    hit = target.lookup(digests(4), 65)
    load = Event(target.store)
    target.load(digests(4), hit, event=load)
    assert load.before == [[]]
    target.load(digests(4), hit, held=64, event=load)
    assert len(load.before) == 1


@pytest.mark.parametrize("event", [5, "now", object()], ids=["int", "str", "object"])
def test_an_event_that_cannot_be_waited_for_puts_nothing(event):
    source, _ = full_pair()
    with pytest.raises(TypeError, match=r"`event` must be a CUDA event or stream"):
        source.save(digests(4), 64, event=event)
    hit = source.coord.find_hit([[True] * 4], 64)
    with pytest.raises(TypeError, match=r"`event` must be a CUDA event or stream"):
        source.load(digests(4), hit, event=event)
    assert not source.store.pool
    assert not source.store.calls(EXIST)


def test_an_event_that_fails_moves_nothing():
    source, target = full_pair(max_pieces=2)
    lost = RuntimeError("device lost")

    class Broken:
        def synchronize(self):
            raise lost

    result = source.save(digests(4), 64, event=Broken())
    assert not source.store.pool
    assert [(f.code, f.cause) for f in result.failures] == [(CALL_FAILED, lost)] * 4
    assert (result.stored, result.mark) == (0, 0)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    result = target.load(digests(4), hit, event=Broken())
    assert [(f.code, f.cause) for f in result.failures] == [(CALL_FAILED, lost)] * 4
    assert (result.loaded, result.usable_tokens) == (0, 0)
    assert not target.store.calls(GET)


# Calls that raise or answer badly


def test_a_store_that_raises_on_a_question_says_so():
    """R12: the cause is in the hit, and in every failure of the save; it is logged once."""
    source, _ = full_pair(breaker=None)
    gone = RuntimeError("no route")
    source.store.fail(EXIST, gone)
    hit = source.lookup(digests(4), 65)
    assert (hit.length, hit.asked, hit.unknown, hit.answered) == (0, 4, 4, False)
    assert hit.cause is gone
    result = source.save(digests(4), 64)
    assert [(f.code, f.cause) for f in result.failures] == [(CALL_FAILED, gone)] * 4
    assert (result.mark, result.ok) == (0, False)
    assert "no route" in str(result)
    assert not source.store.pool
    assert not source.store.calls(PUT)


def test_a_failure_is_logged_once_with_its_cause(caplog):
    source, target = full_pair(max_pieces=2, breaker=None)
    gone = RuntimeError("no route")
    source.store.fail(PUT, gone)
    source.save(digests(4), 64)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvmask", "WARNING")
    assert "4 with codes [-10002, -900] (RuntimeError('no route'))" in record.getMessage()
    caplog.clear()
    source.store.fail(EXIST, gone)
    source.lookup(digests(4), 65)
    (record,) = caplog.records
    assert "no route" in record.getMessage()
    caplog.clear()
    target.lookup(digests(4), 65)
    assert not caplog.records


@pytest.mark.parametrize(
    "wrong",
    [TypeError("bad call"), AttributeError("no such method"), NotImplementedError("x")],
    ids=repr,
)
@pytest.mark.parametrize("call", [EXIST, PUT, GET])
def test_what_says_that_the_call_is_wrong_is_raised_with_what_was_done(call, wrong):
    """R6: the caller's program is wrong, not the store."""
    source, target = full_pair(max_pieces=2, layers=1)
    if call == GET:
        source.save(digests(4), 64)
        hit = target.lookup(digests(4), 65)
        target.store.fail(GET, wrong, index=1)
        with pytest.raises(type(wrong)) as caught:
            target.load(digests(4), hit)
        partial = caught.value.partial_result
        assert (partial.loaded, partial.usable_tokens) == (2, 32)
    elif call == PUT:
        source.store.fail(PUT, wrong, index=1)
        with pytest.raises(type(wrong)) as caught:
            source.save(digests(4), 64)
        partial = caught.value.partial_result
        assert (partial.stored, partial.mark) == (2, 32)
    else:
        source.store.fail(EXIST, wrong)
        with pytest.raises(type(wrong)) as caught:
            source.lookup(digests(4), 65)
        assert (caught.value.partial_result.length, caught.value.partial_result.asked) == (0, 4)
        with pytest.raises(type(wrong)) as caught:
            source.save(digests(4), 64)
        partial = caught.value.partial_result
        assert partial.stored == 0
    assert caught.value is wrong
    if call != EXIST:
        assert {f.cause for f in partial.failures} == {wrong}
        assert len(partial.failures) == 2


def test_a_store_without_the_method():
    source, _ = full_pair()

    class Lacking:
        register_buffer = staticmethod(lambda address, size: 0)
        unregister_buffer = staticmethod(lambda address: 0)
        batch_is_exist = staticmethod(lambda keys: [0] * len(keys))

    with KVTransfer(Lacking(), source.bound) as kv:
        request = source.request(digests(4))
        with pytest.raises(AttributeError, match="batch_put_from_multi_buffers") as caught:
            kv.save(request, source.tables, 64)
        assert len(caught.value.partial_result.failures) == 4
        assert request.mark == 0
        assert kv.stats.saves == 1
        assert kv.stats.save_failed_keys == 4


@pytest.mark.parametrize(
    "answer", [None, 5, "1111", [1, 1], [1] * 9, [1, 1, None, 1], [1.0] * 4], ids=repr
)
@pytest.mark.parametrize("memo", [False, True])
def test_an_answer_that_is_none(answer, memo):
    """To a lookup it says nothing, and a save then puts what nobody said is there."""
    source, _ = full_pair(memo=PresenceMemo() if memo else None)
    source.store.fail(EXIST, answer, whole=True)
    known = 3 if answer == [1, 1, None, 1] else 0
    hit = source.lookup(digests(4), 65)
    assert (hit.length, hit.present, hit.unknown) == (32 if known else 0, known, 4 - known)
    assert hit.cause.code == MALFORMED_ANSWER
    result = source.save(digests(4), 64)
    assert (result.stored, result.present, result.ok) == (4 - known, known, True)
    assert source.kv.stats.lookups == source.kv.stats.saves == 1


@pytest.mark.parametrize("answer", [None, 7, [48], [48] * 9, [48, 48, None, 48]], ids=repr)
def test_a_transfer_whose_answer_is_none(answer):
    """No key counts as moved on the word of an answer that does not fit; none is lost either."""
    source, target = full_pair(layers=1)
    bad = [2] if answer == [48, 48, None, 48] else [0, 1, 2, 3]
    source.store.fail(PUT, lambda right: [0, 0, None, 0] if len(bad) == 1 else answer, whole=True,
                      times=1)  # fmt: skip
    result = source.save(digests(4), 64)
    assert [(f.block, f.code) for f in result.failures] == [(i, MALFORMED_ANSWER) for i in bad]
    assert (result.stored, result.mark) == (4 - len(bad), 16 * bad[0])
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    target.store.fail(GET, answer, whole=True)
    result = target.load(digests(4), hit)
    assert [(f.block, f.code) for f in result.failures] == [(i, MALFORMED_ANSWER) for i in bad]
    assert (result.loaded, result.usable_tokens) == (4 - len(bad), 16 * bad[0])


def test_a_dead_master():
    source, target = full_pair(breaker=None)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    target.store.master_dead = True
    dead = target.lookup(digests(4), 65)
    assert (dead.length, dead.unknown, dead.answered, dead.cause.code) == (0, 4, False, -900)
    result = target.load(digests(4), hit)
    assert {f.code for f in result.failures} == {-900}
    assert len(result.failures) == 4
    saved = target.save(digests(4, salt=1), 64)
    assert (saved.stored, len(saved.failures), saved.mark) == (0, 4, 0)


@pytest.mark.parametrize("pieces", [None, 1, 3, 512])
def test_calls_have_at_most_so_many_pieces(pieces):
    source, target = full_pair(layers=3, max_pieces=pieces)
    assert source.save(digests(4), 64).stored == 4
    hit = target.lookup(digests(4), 65)
    assert target.load(digests(4), hit).ok
    assert_loaded(source, target, hit)
    for call in source.store.calls(PUT) + target.store.calls(GET):
        assert len(call.keys) == 1 or sum(map(len, call.sizes)) <= (pieces or 1 << 30)
    assert len(source.store.calls(PUT)) == (4 if pieces in (1, 3) else 1)


def test_the_config_of_a_put_is_passed_on():
    config = object()
    source, _ = full_pair(replicate_config=config)
    source.save(digests(4), 64)
    assert [call.config for call in source.store.calls(PUT)] == [config]


class Config:
    group_ids = None


@pytest.mark.parametrize("pieces", [None, 2])
def test_group_ids_of_every_put(pieces):
    """All ranks and groups of a chunk have one id, which the store evicts together."""
    groups = {"full": FullAttention(32), "swa": SlidingWindow(16, window=1024)}
    source, _ = pair(groups, 16, 64, replicate_config=Config, group_ids=True, max_pieces=pieces)
    source.save(digests(4), 64)
    calls = source.store.calls(PUT)
    assert len({id(call.config) for call in calls}) == len(calls)
    for call in calls:
        assert call.config.group_ids == [
            "vllm-mooncake-store:m@" + k.rpartition("@")[2] for k in call.keys
        ]
    assert sum(len(call.keys) for call in calls) == 6


def test_group_ids_need_a_configuration_for_every_put():
    with pytest.raises(ArgumentError, match="`replicate_config` must be a function when"):
        MooncakePolicy(group_ids=True)
    with pytest.raises(ArgumentError, match="`replicate_config` must be a function when"):
        MooncakePolicy(group_ids=True, replicate_config=Config())


# Lifetimes (B59)


def test_a_plan_keeps_its_tensors():
    class Array(np.ndarray):
        pass

    array = np.ones((6, 16), np.uint8).view(Array)
    seen = weakref.ref(array)
    layout = KVLayout.from_tensors([array], num_blocks=6)
    engine = FULL_CONTRACT.bind([layout])
    plan = SavePlan(engine, digests(4), [[1, 2, 3, 4]], 64)
    twin = SavePlan(engine, digests(4), [[1, 2, 3, 4]], 64)
    del array, layout, engine
    gc.collect()
    assert seen() is not None
    store = FakeStore(require_registration=False)
    store.fail(EXIST, 0)

    def run(job):
        assert drive(job, store).stored == 4

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
    kv = KVTransfer(FakeStore(), FULL_CONTRACT.bind([KVLayout.from_tensors([array], 6)]))
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
    plan = SavePlan(scheme_of(FULL, [layout]), digests(1), [[block]], 16)
    plan.next_call()
    plan.feed([0])
    assert plan.next_call().args[1] == [[address]]


def test_addresses_at_the_sign_bit_through_a_plan():
    base = (1 << 63) - 4096
    layout = KVLayout.from_regions([(base, 4096, 4096)], 3, [(base, 3 * 4096)])
    plan = SavePlan(scheme_of(FULL, [layout]), digests(2), [[1, 2]], 32)
    plan.next_call()
    plan.feed([0, 0])
    assert plan.next_call().args[1] == [[1 << 63], [(1 << 63) + 4096]]


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
    saved = source.save(hashes, 320)
    assert saved.stored + saved.present + len(saved.failures) == planned
    assert saved.stored <= len(source.store.pool)
    hit = target.lookup(hashes, 321)
    result = target.load(hashes, hit)
    wanted = {(g, i) for g, m in enumerate(hit.masks) for i in m.indices()}
    failed = {(f.group, f.block) for f in result.failures}
    assert result.loaded + len(result.failures) == len(wanted)
    for g, i in wanted - failed:
        assert target.block(g, i) == source.block(g, i)
