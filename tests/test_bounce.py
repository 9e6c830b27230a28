"""Bounce memory: the store never has the engine's blocks, so late bytes cannot reach them."""

import asyncio
import ctypes
import gc
import random
import threading
import weakref

import numpy as np
import pytest
from fake_store import GET, PUT, REGISTER, UNREGISTER, FakeStore
from rig import Engine, assert_loaded, contract_of, digests, key, pair

from kvmask import (
    AbsenceMemo,
    BounceMemory,
    Breaker,
    ChunkedLocal,
    FullAttention,
    KVLayout,
    KVTransfer,
    LoadPlan,
    Mamba,
    SavePlan,
    SlidingWindow,
    StrictKeys,
    drive,
)
from kvmask._core import gather, memory_at, scatter
from kvmask.errors import ArgumentError, PlanStateError, StoreError
from kvmask.guard import copies as copies_module
from kvmask.guard import memory as memory_module
from kvmask.guard.copies import HostCopies, TorchCopies, copies_for
from kvmask.guard.memory import Chunk, Chunks
from kvmask.plans import NO_BOUNCE, OVERSIZE

HASHES = digests(4)
SMALL = BounceMemory(chunk_bytes=4096, chunks=2, max_retired=1)
GROUPS = [FullAttention(64), SlidingWindow(16, window=32), ChunkedLocal(16, 32), Mamba(64)]


def full_pair(**options):
    options.setdefault("bounce", SMALL)
    options.setdefault("breaker", None)
    return pair([FullAttention(16)], 16, 64, **options)


class Late:
    """A store's client whose failed transfers go on when `go_on` is called."""

    def __init__(self, engine, call):
        self.engine, self.call = engine, call
        engine.store.fail(call, -800, times=1)

    def go_on(self, byte=0xEE):
        """Write what arrives too late, wherever the failed get was to put it."""
        done = 0
        for rows in zip(self.seen.addresses, self.seen.sizes, strict=True):
            for address, size in zip(*rows, strict=True):
                ctypes.memset(address, byte, size)
                done += size
        return done

    @property
    def seen(self):
        return next(call for call in self.engine.store.calls(self.call) if -800 in call.results)


# Round trips


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("chunk", [4096, 4160, 1 << 20])
@pytest.mark.parametrize("pieces", [1, 7, None])
def test_round_trips(kind, chunk, pieces):
    if kind == "torch":
        pytest.importorskip("torch")
    hashes = digests(16)
    memory = BounceMemory(chunk_bytes=chunk, chunks=1)
    source, target = pair(GROUPS, 16, 256, kind, layers=3, bounce=memory, max_pieces=pieces)
    assert source.save(hashes, 256).ok
    hit = target.lookup(hashes, 257)
    assert hit.length == 256
    result = target.load(hashes, hit)
    assert (result.ok, assert_loaded(source, target, hit)) == (True, result.loaded)
    for call in target.store.calls(GET):
        assert sum(map(sum, call.sizes)) <= chunk


def test_engines_with_and_without_share_blocks():
    """The bytes of an object are the same, so the fingerprint is, too."""
    source, _ = full_pair()
    source.save(HASHES, 64)
    plain = Engine(source.store.client(), source.contract, 64)
    hit = plain.lookup(HASHES, 65)
    assert plain.load(HASHES, hit).ok
    assert assert_loaded(source, plain, hit) == 4


def test_the_store_knows_the_bounce_memory_alone():
    source, _ = full_pair()
    assert sorted(source.store.registered.values()) == [4096, 4096]
    chunks = [(a, a + n) for a, n in source.store.registered.items()]
    source.save(HASHES, 64)
    (call,) = source.store.calls(PUT)
    for row in call.addresses:
        assert len(row) == 1
        assert any(start <= row[0] < stop for start, stop in chunks)
    source.kv.close()
    assert source.store.registered == {}


# Late bytes


@pytest.mark.parametrize("bounce", [None, SMALL], ids=["without", "with"])
def test_late_bytes_of_a_load(bounce):
    """F15: a load fails, its blocks are loaded for another request, then its bytes arrive."""
    source, target = full_pair(bounce=bounce)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    late = Late(target, GET)
    failed = target.load(HASHES, hit)
    assert failed.loaded == 0
    assert failed.quarantined == ({} if bounce else {"0": sorted(target.tables[0])})
    others = digests(4, salt=1)
    other = Engine(source.store.client(), source.contract, 64, seed=7)
    assert other.save(others, 64).ok
    again = target.load(others, target.lookup(others, 65))
    assert again.ok
    right = [other.block(0, i) for i in range(4)]
    assert [target.block(0, i) for i in range(4)] == right
    assert late.go_on() > 0
    assert ([target.block(0, i) for i in range(4)] == right) == (bounce is not None)


@pytest.mark.parametrize("bounce", [None, SMALL], ids=["without", "with"])
def test_what_a_late_put_sends(bounce):
    """F15: a save fails, the engine uses its memory again, and only then the bytes are sent."""
    source, _ = full_pair(bounce=bounce)
    late = Late(source, PUT)
    before = [source.block(0, i) for i in range(4)]
    assert source.save(HASHES, 64).stored == 0
    for tensor in source.tensors[0]:
        tensor[:] = 0
    rows = zip(late.seen.addresses, late.seen.sizes, strict=True)
    sent = [b"".join(map(ctypes.string_at, *row)) for row in rows]
    assert (sent == before) == (bounce is not None)


# Retired memory


def test_memory_of_a_call_that_may_go_on_is_not_used_again():
    source, target = full_pair()
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    late = Late(target, GET)
    assert target.load(HASHES, hit).loaded == 0
    lost = {row[0] & ~0xFFF for row in late.seen.addresses}
    assert target.kv.stats.retired_bytes == 4096
    for _ in range(3):
        assert target.load(HASHES, hit).ok
    used = [row[0] & ~0xFFF for call in target.store.calls(GET)[1:] for row in call.addresses]
    assert lost.isdisjoint(used)
    target.kv.close()
    assert set(target.store.registered) == lost  # the client may still use it


@pytest.mark.parametrize("code", [-704, -707, -600, 17])
def test_memory_of_a_call_that_is_over_is_used_again(code):
    source, target = full_pair()
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, code)
    assert len(target.load(HASHES, hit).failures) == 4
    assert target.kv.stats.retired_bytes == 0
    target.kv.close()
    assert target.store.registered == {}


@pytest.mark.parametrize("how", [RuntimeError("gone"), KeyboardInterrupt(), [1]])
def test_memory_of_a_call_that_raised_is_retired(how):
    source, _ = full_pair()
    source.store.fail(PUT, how, whole=True)
    if isinstance(how, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            source.save(HASHES, 64)
    else:
        assert source.save(HASHES, 64).quarantined == {}
    assert source.kv.stats.retired_bytes == 4096


def test_retired_memory_has_a_bound(caplog):
    memo = AbsenceMemo(60.0)
    source, target = full_pair(failed_loads=memo)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    keys = [key(source, 0, digest) for digest in HASHES]
    target.store.fail(GET, -800)
    for n in range(1, 4):  # two chunks, and one in place of a retired one
        assert {f.code for f in target.load(HASHES, hit).failures} == {-800}
        assert target.kv.stats.retired_bytes == n * 4096
    before = target.store.counts[GET]
    caplog.clear()
    memo.forget(keys)
    result = target.load(HASHES, hit)
    assert {f.code for f in result.failures} == {NO_BOUNCE}
    assert (result.quarantined, target.store.counts[GET]) == ({}, before)
    assert target.kv.stats.retired_bytes == 3 * 4096
    assert "there is no bounce memory left, 12288 bytes are retired: nothing moves" in caplog.text
    assert target.lookup(HASHES, 65) == hit  # lookups need none
    assert memo.known(keys) == [False] * 4  # no key is to blame
    with pytest.raises(PlanStateError, match="after `close`"):
        target.kv.release_retired()
    target.kv.close()
    assert target.kv.release_retired() == 3 * 4096


def test_a_closed_transfer_keeps_what_is_retired():
    """The transfer goes, its client stays: the memory must, too."""
    source, _ = full_pair()
    late = Late(source, PUT)
    source.save(HASHES, 64)
    source.kv.close()
    gone = weakref.ref(source.kv)
    source.kv = None
    gc.collect()
    assert gone() is None
    for row, sizes in zip(late.seen.addresses, late.seen.sizes, strict=True):
        assert len(ctypes.string_at(row[0], sizes[0])) == sizes[0]


def test_a_new_chunk_that_is_refused(caplog):
    source, _ = full_pair(breaker=Breaker())
    source.store.fail(PUT, -800, times=2)
    for _ in range(2):
        source.save(HASHES, 64)
    source.store.fail(REGISTER, -600, times=1)
    refused = source.save(HASHES, 64)
    assert {f.code for f in refused.failures} == {NO_BOUNCE}
    assert refused.quarantined == {}
    assert "8192 bytes are retired: the store must register 4096 bytes" in caplog.text
    assert not source.kv.tools.breaker.open  # the store answers
    assert source.save(HASHES, 64).ok  # the next one tries again


# Sizes


def test_a_block_that_fits_no_chunk_fails_alone():
    groups = [FullAttention(16), FullAttention(2048)]
    source, _ = pair(groups, 16, 2048, layers=1, bounce=SMALL)
    result = source.save(digests(128), 2048)
    assert [(f.group, f.code) for f in result.failures] == [(1, OVERSIZE)]
    assert result.stored == 128


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_bytes": 4095}, "`chunk_bytes` must be"),
        ({"chunks": 0}, "`chunks` must be"),
        ({"max_retired": -1}, "`max_retired` must be"),
    ],
)
def test_limits(options, words):
    with pytest.raises(ArgumentError, match=words):
        BounceMemory(**options)
    with pytest.raises(TypeError):
        BounceMemory(**dict.fromkeys(options, 1.5))


def test_wrong_options():
    source, _ = full_pair(bounce=None)
    for wrong in (1, "yes", 1 << 20):
        with pytest.raises(TypeError, match="`bounce` must be BounceMemory"):
            KVTransfer(source.store.client(), source.bound, bounce=wrong)
    with pytest.raises(ArgumentError, match="`bounce` needs a contract that is bound"):
        KVTransfer(source.store.client(), source.contract, bounce=True)
    assert KVTransfer(source.store.client(), source.bound, bounce=False).tools.guard is None
    assert KVTransfer(source.store.client(), source.contract, bounce=False).tools.guard is None
    too_big = BounceMemory(chunk_bytes=1 << 40, chunks=1 << 16)
    store = source.store.client()
    store.fail(REGISTER, -600, index=1)
    with pytest.raises(StoreError, match=r"must register|of memory"):
        KVTransfer(store, source.bound, bounce=too_big)
    assert store.registered == {}


def test_a_refusal_of_the_second_chunk_undoes_the_first():
    source, _ = full_pair(bounce=None)
    store = source.store.client()
    store.fail(REGISTER, -600, index=1)
    with pytest.raises(StoreError, match="must register 4096 bytes"):
        KVTransfer(store, source.bound, bounce=SMALL)
    assert store.registered == {}


def test_the_default():
    source, _ = full_pair(bounce=True)
    assert sorted(source.store.registered.values()) == [32 << 20] * 4
    assert source.save(HASHES, 64).ok


# Plans by hand, breaker, threads


def test_plans_by_hand():
    source, target = full_pair()
    save = SavePlan(source.bound, HASHES, source.tables, 64, tools=source.kv.tools)
    assert drive(save, source.store).ok
    hit = target.lookup(HASHES, 65)
    load = LoadPlan(target.bound, HASHES, hit, target.tables, tools=target.kv.tools)
    assert drive(load, target.store).ok
    assert assert_loaded(source, target, hit) == 4
    target.kv.close()
    load = LoadPlan(target.bound, HASHES, hit, target.tables, tools=target.kv.tools)
    result = drive(load, target.store)
    assert all(isinstance(f.cause, PlanStateError) for f in result.failures)


def test_asyncio_drives_them_too():
    source, target = full_pair()

    async def run(plan, store):
        while (call := plan.next_call()) is not None:
            plan.feed(await asyncio.to_thread(call.run, store))
        return plan.result

    tools = source.kv.tools
    assert asyncio.run(
        run(SavePlan(source.bound, HASHES, source.tables, 64, tools=tools), source.store)
    ).ok
    hit = target.lookup(HASHES, 65)
    load = LoadPlan(target.bound, HASHES, hit, target.tables, tools=target.kv.tools)
    assert asyncio.run(run(load, target.store)).ok
    assert assert_loaded(source, target, hit) == 4


def outcome(result):
    failures = sorted((f.group, f.block, f.key, f.code) for f in result.failures)
    names = ("stored", "present", "loaded", "mark", "usable_tokens", "num_bytes")
    return [getattr(result, name, None) for name in names], failures


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_what_fails_is_the_same_with_and_without(seed, sealed):
    """The same keys fail with the same codes, whatever stands between plans and the store."""
    if sealed:
        pytest.importorskip("xxhash")
    rng = random.Random(seed)
    hashes = digests(16, salt=seed)
    lost = {PUT: {}, GET: {}}
    outcomes = []
    options = {"keys": StrictKeys("m"), "facts": {"dtype": "u1"}, "sealed": sealed}
    contract = contract_of(GROUPS[:2], 16, **options)
    pieces = rng.choice([1, 5, None])
    codes = [-704, -800, -1, -200, 3]
    for bounce in (None, BounceMemory(4096, 2, 64) if seed % 2 else True):
        store = FakeStore()
        source = Engine(store, contract, 256, seed=3, max_pieces=pieces, bounce=bounce)
        target = Engine(store.client(), contract, 256, max_pieces=pieces, bounce=bounce)
        for call, client in ((PUT, source.store), (GET, target.store)):
            for g, group in enumerate(contract.groups):
                for i in range(256 // group.block_size):
                    name = key(source, g, hashes[(i + 1) * group.block_size // 16 - 1])
                    code = lost[call].setdefault(name, rng.choice([None] * 5 + codes))
                    if code is not None and (call == GET or code < 0):
                        client.fail(call, code, keys=[name], times=None)
        saved = source.save(hashes, 256)
        source.store._failures.clear()
        again = source.save(hashes, 256)
        hit = target.lookup(hashes, 257)
        loaded = target.load(hashes, hit)
        if bounce is None:
            assert all(f.unsettled == (f.code in (-800, -1)) for f in loaded.failures)
        else:
            assert not any(f.unsettled for f in (*saved.failures, *loaded.failures))
        outcomes.append([outcome(result) for result in (saved, again, loaded)])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][1]


def test_an_outage_costs_one_call_all_the_same():
    source, target = full_pair(breaker=Breaker(), max_pieces=1)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.master_dead = True
    assert len(target.load(HASHES, hit).failures) == 4
    assert target.store.counts[GET] == 1
    assert target.kv.stats.retired_bytes == 0


def test_threads_share_the_chunks():
    """More threads than chunks: each waits for its turn, and nobody sees another's bytes."""
    store = FakeStore()
    contract = contract_of([FullAttention(16)], 16)
    memory = BounceMemory(chunk_bytes=4096, chunks=2)
    engine = Engine(store, contract, 64, seed=1, max_pieces=2, bounce=memory)
    blocks = [engine.block(0, i) for i in range(4)]
    errors = []

    def work(n):
        try:
            for r in range(12):
                hashes = digests(4, salt=100 * n + r)
                assert engine.save(hashes, 64).ok
                stored = [store.pool[key(engine, 0, digest)] for digest in hashes]
                assert stored == blocks
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(store.pool) == 6 * 12 * 4
    engine.kv.close()
    assert store.registered == {}


def test_a_thread_that_waits_for_a_chunk_is_told_of_the_end():
    opened = []
    chunks = Chunks(BounceMemory(4096, 1, 0), opened.append, None)
    chunks.fill()
    taken = chunks.take()
    answers = []

    def wait():
        try:
            chunks.take()
        except PlanStateError as error:
            answers.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert chunks.close() == []
    thread.join(10)
    assert answers == ["the transfer is closed"]
    chunks.give_back(taken)  # a plan by hand that went on
    assert chunks.release() == 4096


# Copies


def test_gather_and_scatter_by_address():
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, np.uint8)
    a, b = source.ctypes.data, target.ctypes.data
    gather([[a, a + 10], [a + 20]], [[3, 2], [4]], [b, b + 32])
    assert target[:5].tolist() == [0, 1, 2, 10, 11]
    assert target[32:36].tolist() == [20, 21, 22, 23]
    assert not target[36:].any()
    back = np.zeros(64, np.uint8)
    c = back.ctypes.data
    scatter([[c, c + 10], [c + 20]], [[3, 2], [4]], [b, b + 32])
    assert back[[0, 1, 2, 10, 11, 20, 21, 22, 23]].tolist() == [0, 1, 2, 10, 11, 20, 21, 22, 23]
    assert bytes(memory_at(a + 5, 3)) == bytes([5, 6, 7])
    assert memory_at(a, 3).readonly
    for wrong in (
        ([[a]], [[1]], []),
        ([[a]], [], [b]),
        ([[a, a]], [[1]], [b]),
        ([None], [None], [b]),
    ):
        with pytest.raises(ArgumentError):
            gather(*wrong)
    for wrong in (([[True]], [[1]], [b]), ([["a"]], [[1]], [b]), ([[a]], [[1.0]], [b])):
        with pytest.raises(TypeError):
            scatter(*wrong)
    with pytest.raises(OverflowError):
        gather([[1 << 64]], [[1]], [b])
    with pytest.raises(ArgumentError):
        memory_at(a, -1)


def test_torch_copies_blocks_of_any_tensor():
    """On the CPU by the same code as on a device: storages, pieces, offsets."""
    torch = pytest.importorskip("torch")
    storage = torch.arange(4 * 2 * 48, dtype=torch.int16).reshape(2, 4, 48)
    keys, values = storage[0], storage[1]  # two views of one storage
    other = torch.randint(0, 255, (4, 3, 5), dtype=torch.uint8)
    strided = torch.arange(4 * 100, dtype=torch.float32).reshape(4, 100)[:, 10:40]
    layout = KVLayout.from_tensors([keys, values, other, strided], num_blocks=4)
    by_torch, by_address = TorchCopies([layout], "cpu"), HostCopies()
    ids = [2, 0]
    addresses, sizes = layout.addresses(ids)
    one, two = Chunk(4096), Chunk(4096)
    places = [0, 1024]
    by_torch.open(one)
    by_torch.gather(addresses, sizes, one, places)
    by_address.gather(addresses, sizes, two, places)
    assert bytes(one.view) == bytes(two.view)
    assert any(one.view[1024 : 1024 + layout.block_bytes])
    addresses, sizes = layout.addresses([1, 3])
    by_torch.scatter(addresses, sizes, one, places)
    for tensor in (keys, values, other, strided):
        assert torch.equal(tensor[1], tensor[2])
        assert torch.equal(tensor[3], tensor[0])


def test_a_transfer_over_torch_copies(monkeypatch):
    """A transfer whose blocks are copied as those of a device are."""
    pytest.importorskip("torch")
    from kvmask.guard import store as store_module

    made = []

    def as_on_a_device(layouts):
        made.append(TorchCopies(layouts, "cpu"))
        return made[-1]

    monkeypatch.setattr(store_module, "copies_for", as_on_a_device)
    hashes = digests(16)
    source, target = pair(GROUPS, 16, 256, "torch", layers=2, bounce=SMALL)
    assert source.save(hashes, 256).ok
    hit = target.lookup(hashes, 257)
    assert target.load(hashes, hit).ok
    assert assert_loaded(source, target, hit)
    assert len(made) == 2


class Locking(HostCopies):
    """Locks memory as copies for a device do, and fails when it is told to."""

    def __init__(self):
        self.locked = set()
        self.refuses = 0

    def open(self, chunk):
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("CUDA error: out of memory")
        self.locked.add(chunk.address)
        chunk.unlock = lambda: self.locked.remove(chunk.address)


@pytest.fixture
def locking(monkeypatch):
    from kvmask.guard import store as store_module

    made = Locking()
    monkeypatch.setattr(store_module, "copies_for", lambda layouts: made)
    return made


def test_memory_that_a_device_refuses_is_not_left_registered(locking):
    source, _ = full_pair()
    store, bound = source.store.client(), source.kv.contract
    before = set(locking.locked)
    locking.refuses = 1
    with pytest.raises(StoreError, match="4096 bytes of bounce memory must be locked for"):
        KVTransfer(store, bound, bounce=SMALL)
    assert store.counts[REGISTER] == 0

    def refuse_the_second_lock(store, name, keys):
        if name == REGISTER:
            locking.refuses = 1

    store.hooks.append(refuse_the_second_lock)
    with pytest.raises(StoreError, match="must be locked"):
        KVTransfer(store, bound, bounce=SMALL)
    assert store.counts[REGISTER] == 1
    assert store.registered == {}
    assert locking.locked == before


def test_memory_that_a_store_goes_on_knowing_is_not_freed(locking):
    source, _ = full_pair()
    store = source.store.client()
    before, kept = set(locking.locked), len(memory_module._kept)

    def refuse_the_second_lock(store, name, keys):
        locking.refuses = name == REGISTER

    store.hooks.append(refuse_the_second_lock)
    store.fail(UNREGISTER, -900)
    with pytest.raises(StoreError, match="must be locked"):
        KVTransfer(store, source.kv.contract, bounce=SMALL)
    (chunk,) = memory_module._kept[kept:]
    assert store.registered == {chunk.address: 4096}
    assert locking.locked - before == {chunk.address}


def test_memory_that_a_store_refuses_is_not_left_locked(locking):
    source, _ = full_pair()
    store, before = source.store.client(), set(locking.locked)
    store.fail(REGISTER, -600, times=1)
    with pytest.raises(StoreError, match="the store must register 4096 bytes"):
        KVTransfer(store, source.kv.contract, bounce=SMALL)
    assert locking.locked == before


def test_memory_that_a_device_refuses_later_is_no_outage(locking):
    """A retired chunk is to be replaced, and the device gives no more."""
    source, target = full_pair(breaker=True)
    assert source.save(HASHES, 64).ok
    hit = target.lookup(HASHES, 65)
    for _ in range(SMALL.chunks):
        target.store.fail(GET, -800, times=1)
        assert not target.load(HASHES, hit).ok
    registered = dict(target.store.registered)
    locking.refuses = 1
    result = target.load(HASHES, hit)
    assert {f.code for f in result.failures} == {NO_BOUNCE}
    assert target.store.registered == registered
    assert not target.kv.tools.breaker.open
    assert target.load(HASHES, hit).ok


def test_a_device_that_refuses_to_unlock_does_not_keep_the_rest(locking):
    _, target = full_pair()

    def refuse():
        raise RuntimeError("CUDA error: invalid argument")

    chunks = target.kv._guard.chunks
    taken = [chunks.take() for _ in range(SMALL.chunks)]
    taken[1].unlock = refuse
    for chunk in taken:
        chunks.retire(chunk)
    target.kv.close()
    with pytest.raises(RuntimeError, match="invalid argument"):
        target.kv.release_retired()
    assert target.kv.release_retired() == 4096
    assert taken[0].address not in locking.locked


def test_which_copies():
    layout = KVLayout.from_tensors([np.zeros((4, 8), np.uint8)], num_blocks=4)
    assert isinstance(copies_for([layout]), HostCopies)
    assert isinstance(copies_for([]), HostCopies)
    unknown = KVLayout.from_regions([(4096, 64, 64)], 4, [(4096, 256)])
    with pytest.raises(ArgumentError, match=r"say which \(`device` of `from_regions`\)"):
        copies_for([unknown])
    pytest.importorskip("torch")
    npu = KVLayout.from_regions([(4096, 64, 64)], 4, [(4096, 256)], device="npu:0")
    with pytest.raises(ArgumentError, match="made from torch tensors"):
        copies_for([npu])


def test_copies_without_torch(monkeypatch):
    import sys

    from kvmask.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "torch", None)
    layout = KVLayout.from_regions([(4096, 64, 64)], 4, [(4096, 256)], device="cuda:0")
    with pytest.raises(MissingDependencyError, match="bounce memory for cuda:0 needs torch"):
        copies_module.copies_for([layout])


class Event:
    def __init__(self, store):
        self.store, self.seen = store, None

    def synchronize(self):
        self.seen = (self.store.counts[PUT], self.store.counts[GET])


def test_the_event_comes_before_the_first_copy(monkeypatch):
    source, _ = full_pair()
    order = []
    real = HostCopies.gather
    monkeypatch.setattr(HostCopies, "gather", lambda *a: (order.append("copy"), real(*a))[1])
    event = Event(source.store)
    monkeypatch.setattr(Event, "synchronize", lambda self: order.append("event"))
    assert source.save(HASHES, 64, event=event).ok
    assert order == ["event", "copy"]
