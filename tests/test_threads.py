"""Several threads at once, and nothing left behind after many rounds."""

import contextlib
import gc
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_store import EXIST, GET, PUT, UNREGISTER, FakeStore
from rig import (
    Engine,
    answer_with,
    ask,
    assert_loaded,
    contract_of,
    digests,
    flat_layout,
    pair,
    scheme_of,
)

from kvmask import (
    Bitset,
    BlockHashes,
    Coordinator,
    FullAttention,
    HitHints,
    LoadPlan,
    LookupPlan,
    Mamba,
    PlanTools,
    PresenceMemo,
    SavePlan,
    SlidingWindow,
    _core,
)
from kvmask._core import GIL_MIN_BITS
from kvmask.errors import PlanStateError

THREADS = 4
GROUPS = [FullAttention(4), SlidingWindow(2, window=15), Mamba(4)]


def at_once(work, rounds=8):
    """Run work(i) in several threads that start together; the results in order."""
    gate = threading.Barrier(THREADS)

    def run(i):
        gate.wait(30)
        return [work(i) for _ in range(rounds)]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("bits", [GIL_MIN_BITS // 2, 4 * GIL_MIN_BITS])
def test_masks_and_hits_from_several_threads(bits):
    """On both sides of the size from which the GIL is given away."""
    coord = Coordinator(GROUPS, 2, alignment=64)
    tokens = bits * 2
    holes = [bits // (i + 2) for i in range(THREADS)]
    rng = np.random.default_rng(1)
    present = []
    for hole in holes:
        full = Bitset.from_indices(bits // 2, [i for i in range(bits // 2) if i != hole // 2])
        present.append([full, Bitset.from_bools(rng.random(bits) < 0.9), Bitset.ones(bits // 2)])

    def work(i):
        hit = coord.find_hit(present[i], tokens)
        masks = coord.store_mask(tokens, 4 * i, tokens - i, states=True)
        return hit, masks[1], masks[1].count()

    alone = [work(i) for i in range(THREADS)]
    assert len({hit.length for hit, _, _ in alone}) == THREADS
    for i, results in enumerate(at_once(work)):
        assert all(result == alone[i] for result in results)


def test_one_transfer_used_from_several_threads():
    memo = PresenceMemo(capacity=50)
    source, target = pair([FullAttention(16), SlidingWindow(16, window=40)], 16, 640, layers=1,
                          memo=memo)  # fmt: skip
    hashes = BlockHashes(b"".join(digests(40)), 16)

    def work(i):
        saved = source.save(hashes, 640)
        hit = target.lookup(hashes, 641, strategy=("staged", "exact")[i % 2])
        return saved.ok, hit.length, target.load(hashes, hit).ok

    for results in at_once(work, rounds=20):
        assert set(results) == {(True, 640, True)}
    hit = target.lookup(hashes, 641)
    assert_loaded(source, target, hit)
    assert target.kv.stats.lookups == THREADS * 20 + 1
    assert target.kv.stats.hit_tokens == 640 * (THREADS * 20 + 1)
    assert source.kv.stats.stored_keys + source.kv.stats.save_present_keys == THREADS * 20 * 80


@pytest.mark.parametrize("call", [EXIST, PUT, GET])
def test_the_end_of_a_transfer_waits_for_a_call_of_another_thread(call):
    """Memory stays registered while a call of any thread may touch it."""
    source, target = pair([FullAttention(16)], 16, 64)
    if call == GET:
        source.save(digests(4), 64)
    engine = target if call == GET else source
    hit = target.lookup(digests(4), 65)
    inside, go, order = threading.Event(), threading.Event(), []

    def hook(store, name, keys):
        if name == call:
            inside.set()
            assert go.wait(30)
        order.append(name)

    engine.store.hooks.append(hook)

    def work():
        if call == GET:
            return engine.load(digests(4), hit)
        return engine.save(digests(4), 64)

    with ThreadPoolExecutor(2) as pool:
        working = pool.submit(work)
        assert inside.wait(30)
        closing = pool.submit(engine.kv.close)
        for _ in range(30_000):  # until it is closed to others
            if engine.kv._closed:
                break
            time.sleep(0.001)
        with pytest.raises(PlanStateError, match="the transfer is closed"):
            engine.lookup(digests(4), 65)
        assert not closing.done()
        assert engine.store.registered
        go.set()
        assert working.result(30).ok
        closing.result(30)
    assert engine.store.registered == {}
    assert order.index(UNREGISTER) > order.index(call)
    assert order[-1] == UNREGISTER


def test_several_threads_that_end_a_transfer_at_once():
    source, _ = pair([FullAttention(16)], 16, 64)

    def work(i):
        with contextlib.suppress(PlanStateError):
            source.save(digests(4, salt=i), 64)
        return source.kv.close()

    at_once(work)
    assert source.store.registered == {}
    assert len(source.store.calls(UNREGISTER)) == 2


def test_hints_shared_by_threads_never_change_a_result():
    hints = HitHints(64)
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    tools = PlanTools(hints=hints)

    def work(i):
        hashes = BlockHashes(b"".join(digests(100, salt=i)), 16)
        hints.learn(hashes, 16, 16, 16 * (i + 1))
        plan = LookupPlan(scheme, hashes, 1601, tools=tools)
        ask(plan, lambda k: int(k[-32:], 16) - (i << 20) <= 50)
        return plan.result.length

    for results in at_once(work, rounds=50):
        assert set(results) == {800}


def test_another_thread_goes_on_while_masks_are_made():
    """B64: the share of a counting thread is compared with its share beside plain Python code.

    Masks and searches over a million blocks and more run without the GIL, so a counter beside them
    gets at least half of what it gets on its own, for equal times.
    """
    coord = Coordinator([FullAttention(1), SlidingWindow(1, window=3)], 1, alignment=64)
    tokens = 1 << 24
    present = [Bitset.ones(tokens), Bitset.ones(tokens)]
    counts = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1

    def rate(work, seconds=0.4):
        start, began = counts[0], time.perf_counter()
        while time.perf_counter() - began < seconds:
            work()
        return (counts[0] - start) / (time.perf_counter() - began)

    def heavy():
        coord.store_mask(tokens)
        coord.find_hit(present, tokens)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        ratios = []
        for _ in range(6):  # a busy machine may take the counter's core for a while
            free = rate(lambda: time.sleep(0.02))
            ratios.append(rate(heavy) / free)
            if ratios[-1] > 0.4:
                break
        assert max(ratios) > 0.25, ratios
    finally:
        stop.set()
        thread.join(30)


def plans(n=384):
    coord = Coordinator(GROUPS, 2, alignment=64)
    scheme = scheme_of(coord, [flat_layout(1 << 12, 8)] * 3)
    hashes = BlockHashes(bytes(range(256)) * 4, 4)
    tables = [list(range(1, 1 + n)) for _ in range(3)]
    for _ in range(3):
        save = SavePlan(scheme, hashes, tables, n)
        answer_with(save, lambda call: [0] * len(call.args[0]))
        look = LookupPlan(scheme, hashes, n)
        answer_with(look, lambda call: [i % 7 != 0 for i in range(len(call.args[0]))])
        hit = coord.find_hit([[True] * n] * 3, n)
        load = LoadPlan(scheme, hashes, hit, tables, tools=PlanTools(log=None))
        load.next_call()
        load.fail(OSError("gone"))
        assert load.next_call() is None
        assert load.result.failures
        with contextlib.suppress(RuntimeError):
            look.feed([1])
        bad = SavePlan(scheme, hashes, [[1 << 70]] * 3, n)
        bad.next_call()
        with contextlib.suppress(ValueError, RuntimeError):
            bad.feed([0])
        coord.store_mask(n, 4, n)
        Bitset.ones(n)[::3].indices()


def test_plans_leave_no_python_objects_behind():
    plans()
    gc.collect()
    tracemalloc.start()
    try:
        plans()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            plans()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000, grown


LEAK = """
import gc, resource, sys
sys.path[:0] = {path!r}
from test_threads import plans, transfers
from kvmask import Bitset, BlockHashes, Coordinator, HitHints, SlidingWindow
coord = Coordinator([SlidingWindow(1, window=3)], 1, alignment=64)
def round():
    plans()
    transfers()
    for _ in range(30):
        coord.store_mask(1 << 20)
        coord.find_hit([Bitset.ones(1 << 20)], 1 << 20)
        HitHints(1 << 12)
        memoryview(Bitset.ones(1 << 20))
        BlockHashes(bytearray(1 << 16), 16)
for _ in range(5):
    round()
gc.collect()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(15):
    round()
gc.collect()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def transfers():
    store = FakeStore()
    engine = Engine(store, contract_of([FullAttention(16)], 16), 640, seed=1)
    with engine.kv:
        engine.save(digests(40), 640)
        engine.load(digests(40), engine.lookup(digests(40), 641))


def test_memory_does_not_grow():
    """A mask of 128 KiB lost in each of 450 rounds would show as 56 MiB."""
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in KiB on Linux only")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    # The tested package first: benches put the sources' folder before it.
    path = [str(Path(_core.__file__).parent.parent), *(p for p in sys.path if p)]
    out = subprocess.run(
        [sys.executable, "-c", LEAK.format(path=path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) < 24 << 10, f"grew by {out.stdout} KiB"
