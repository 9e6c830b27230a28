"""The scheduler's lookups with vLLM's real classes, a real master and real ZMQ."""

import contextlib
import gc
import importlib
import itertools
import math
import os
import pickle
import random
import signal
import subprocess
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("vllm")

import vllm_world as world
from vllm_cases import random_case
from vllm_oracle import digest

from kvmask import FullAttention, SlidingWindow, mooncake
from kvmask.vllm import hashing, places, scheduling, seams
from kvmask.vllm.lookup import lookups_of
from kvmask.vllm.outages import breaker_of
from kvmask.vllm.releases import StockWorker

pytestmark = [pytest.mark.vllm, pytest.mark.store]

GROUPS = (FullAttention(64), SlidingWindow(16, window=32))
UNIT = 16


@pytest.fixture(autouse=True)
def connection_folder(tmp_path, monkeypatch):
    """Sockets of the lookup servers lie in the test's folder."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


@pytest.fixture
def shared(master, session_store, tmp_path, monkeypatch):
    """Workers that use the run's one store client: each of their own would take a second."""
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(world.store_settings(master.address, tmp_path)))
    kept = SimpleNamespace(store=session_store)

    class Kept:
        """The run's store client, which no worker closes."""

        def __getattr__(self, name):
            return getattr(kept.store, name)

        def close(self):
            pass

    with world.stores_of(Kept):
        yield session_store
    session_store.remove_all(True)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A master of the test's own, which it may stop, and pairs that are closed."""
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    made = []
    with mooncake.local_master() as master:
        path = world.store_settings(master.address, tmp_path, "32MB")
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))

        def pair(extra=None, name="KVMaskStoreConnector", **options):
            config = world.vllm_config(GROUPS, UNIT, extra, name)
            made.append(world.Pair(config, world.cache_config(GROUPS), **options))
            return made[-1]

        yield SimpleNamespace(master=master, pair=pair)
        with contextlib.suppress(ProcessLookupError):
            os.kill(master.pid, signal.SIGCONT)
        for one in made:
            one.close()


def until(condition, seconds=60):
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop, "it did not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def another_master(port):
    """A master on a port where one was before. It knows no objects."""
    command = [
        str(mooncake.find_master()),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        "--metrics_port=0",
        "--enable_http_metadata_server=false",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def stop(process):
    """Stop a process, and wait until it has stopped."""
    os.kill(process, signal.SIGSTOP)

    def stopped():
        states = [p.read_text().rpartition(")")[2].split()[0] for p in tasks]
        return set(states) == {"T"}

    tasks = [p / "stat" for p in Path(f"/proc/{process}/task").iterdir()]
    until(stopped)


def fill(worker, tokens, digests):
    """Put what a hit of this many tokens rests on, and what earlier ones do."""
    for g, group in enumerate(GROUPS):
        per_block = group.block_size // UNIT
        for i in range(tokens // group.block_size):
            for key in world.keys_of(worker, g, digests[(i + 1) * per_block - 1]):
                assert worker.store.put(key, b"x") == 0


def digests_of(tokens, seed=0):
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(tokens // UNIT)]


def usable(case):
    """Whether vLLM's own resolution gives the case's coordinator."""
    sizes = [g.block_size for g in case.groups]
    if not all(g.prefix_cacheable for g in case.groups):
        return False
    if case.effective_alignment != math.lcm(*sizes):
        return False
    return len(sizes) > 1 or (sizes[0] == case.hash_block_size and not case.partial)


def test_hits_are_the_same_wherever_the_store_is_asked(shared):
    """Random groups, lengths and contents: stock, the worker, in process, a client of its own."""
    seeds = (seed for seed in itertools.count() if usable(random_case(9, seed)))
    hits = 0
    for seed in itertools.islice(seeds, 60):
        case = random_case(9, seed)
        tp = case.ranks[0]
        caches = world.cache_config(
            case.groups,
            partial=case.hash_block_size if case.partial else None,
            retention=case.retention,
        )

        def pair(extra, name="KVMaskStoreConnector", case=case, caches=caches, tp=tp, **more):
            config = world.vllm_config(case.groups, case.hash_block_size, extra, name, tp)
            return world.Pair(config, caches, tp=tp, **more)

        pairs = {
            "stock": pair({}, "MooncakeStoreConnector"),
            "worker": pair({"lookup_in": "worker"}),
            "in process": pair({}),
            "own client": pair(
                {"lookup": random.Random(seed).choice(("staged", "exact"))}, apart=True
            ),
        }
        worker = pairs["stock"].worker
        for g, units in enumerate(case.present):
            for i, there in enumerate(units):
                name = digest((i + 1) * case.per_block(g) - 1)
                keys = world.keys_of(worker, g, name)
                for key in keys if there else keys[: i % max(1, len(keys))]:
                    assert shared.put(key, b"x") == 0
        hashes = [digest(i) for i in range(case.num_tokens // case.hash_block_size)]
        found = {}
        for name, one in pairs.items():
            ask = world.request(case.num_tokens, hashes)
            found[name] = (
                one.hit(ask),
                [
                    (spec.kvpool_cached_tokens, spec.tail_key_boundaries)
                    for spec in one.scheduler.load_specs.values()
                ],
            )
        assert all(f == found["stock"] for f in found.values()), (case, found)
        kinds = {name: type(one.asking.place) for name, one in pairs.items() if name != "stock"}
        assert kinds == {
            "worker": places.OverTheWire,
            "in process": places.InProcess,
            "own client": places.OwnClient,
        }
        hits += found["stock"][0] > 0
        for one in pairs.values():
            one.close()
        shared.remove_all(True)
    assert hits > 15


MODES = {
    "worker": ({"lookup_in": "worker"}, {}),
    "in process": ({}, {}),
    "own client": ({}, {"apart": True}),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_master_holds_nobody_and_what_comes_late_teaches(own, mode):
    extra, options = MODES[mode]
    pair = own.pair({"lookup_deadline_ms": 2_000, **extra}, **options)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    ask = world.request(800, digests)
    assert pair.hit(ask) == 768
    lookups = pair.asking.place.lookups if mode == "own client" else lookups_of(pair.worker)
    lookups.forget()
    stop(own.master.pid)
    try:
        for _ in range(3):
            assert pair.hit(world.request(800, digests)) == 0
        assert pair.asking.late == 3
        asked = pair.asking._thread.running
        assert asked is not None  # one call is on its way, the others were not made
        assert pair.asking._thread._jobs.empty()
        # A request that ends meanwhile leaves nothing behind.
        pair.asking.discard(ask.request_id)
        assert not pair.asking._jobs
    finally:
        os.kill(own.master.pid, signal.SIGCONT)
    until(lambda: asked.finished)
    hints = lookups.tools.hints
    assert hints.predict(digests, UNIT, 64, 799) == 768  # the late answer taught this
    until(lambda: pair.hit(world.request(800, digests)) == 768)
    assert pair.asking.late == 3


def test_a_client_that_is_not_used_after_all_is_closed(own, monkeypatch):
    made = []

    class Client:
        closed = False

        def close(self):
            self.closed = True

    def connect(handshake):
        made.append(Client())
        return made[-1]

    def fail(place):
        raise MemoryError

    monkeypatch.setattr(places, "connect", connect)
    monkeypatch.setattr(places.OwnClient, "scheme", fail)
    pair = own.pair({}, apart=True)
    assert pair.hit(world.request(800, digests_of(768))) == 0
    assert type(pair.asking.place) is places.OverTheWire
    assert [client.closed for client in made] == [True]


@pytest.mark.parametrize("mode", MODES)
def test_a_dead_master_is_remembered_and_found_again(own, mode):
    extra, options = MODES[mode]
    pair = own.pair({"lookup_deadline_ms": 20_000, **extra}, **options)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    assert pair.hit(world.request(800, digests)) == 768
    port = own.master.address.rpartition(":")[2]
    os.kill(own.master.pid, signal.SIGKILL)
    own.master.process.wait(30)
    assert pair.hit(world.request(800, digests)) == 0
    store = pair.asking.place.lookups.store if mode == "own client" else pair.worker.store
    breaker = breaker_of(store)
    assert breaker.open
    assert breaker.outages == 1
    # Nobody asks a store that is known to be silent.
    with mock.patch.object(type(store), "batch_is_exist", return_value=[]) as asked:
        for _ in range(20):
            assert pair.hit(world.request(800, digests)) == 0
    assert not asked.called
    assert breaker.outages == 1
    breaker._until = 0.0  # the time is over: the next lookup tries again
    with another_master(port):

        def found_again():
            # The client may need a call or two until it has a connection again.
            if breaker.open:
                breaker._until = 0.0
            pair.hit(world.request(800, digests))
            return not breaker.open

        until(found_again, 90)


@pytest.mark.parametrize("mode", MODES)
def test_async_lookups(own, mode):
    extra, options = MODES[mode]
    pair = own.pair({"lookup_async": True, "lookup_deadline_ms": 2_000, **extra}, **options)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    asks = [world.request(800, digests[:n]) for n in (48, 24, 8)]
    found = {}

    def turn():
        for ask in asks:
            if ask.request_id not in found:
                hit = pair.hit(ask)
                if hit is not None:
                    found[ask.request_id] = hit
        return len(found) == 3

    until(turn)
    assert list(found.values()) == [768, 384, 128]
    stop(own.master.pid)
    try:
        ask, gone = world.request(800, digests), world.request(800, digests)
        assert pair.hit(ask) is None
        assert pair.hit(gone) is None
        pair.asking.discard(gone.request_id)  # aborted while the lookup before it runs
        until(lambda: pair.hit(ask) == 0)  # past the deadline: a miss, not "ask again"
        assert pair.hit(world.request(800, digests)) == 0
    finally:
        os.kill(own.master.pid, signal.SIGCONT)
    until(lambda: pair.asking._thread.running is None)
    again = world.request(800, digests)
    until(lambda: pair.hit(again) == 768)


def test_without_a_handshake_the_worker_answers(own):
    pair = own.pair(apart=True, handshake=False)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    assert pair.hit(world.request(800, digests)) == 768
    assert type(pair.asking.place) is places.OverTheWire
    # It comes late: then the scheduler asks itself.
    told = places.handshake_of(pair.worker)
    pair.scheduler_side.set_xfer_handshake_metadata({0: told})
    assert type(pair.asking.place) is places.OwnClient
    assert pair.hit(world.request(800, digests)) == 768


def test_a_client_that_cannot_be_had_leaves_lookups_to_the_worker(own, caplog):
    pair = own.pair(apart=True, handshake=False)
    told = places.handshake_of(pair.worker)
    wrong = {**told.store, "master_server_address": "127.0.0.1:1"}
    pair.scheduler_side.set_xfer_handshake_metadata(
        {0: places.Handshake(told.prefixes, told.block_sizes, wrong)}
    )
    assert type(pair.asking.place) is places.OverTheWire


def test_the_worker_tells_nothing_as_a_part_of_another_connector(shared):
    config = world.vllm_config(GROUPS, UNIT)
    pair = world.Pair(config, world.cache_config(GROUPS), apart=True)
    assert places.handshake_of(pair.worker) is not None
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    with mock.patch.object(state, "_KV_CONNECTOR_AGENT", SimpleNamespace()):
        assert pair.worker_side.get_handshake_metadata() is None
    with mock.patch.object(state, "_KV_CONNECTOR_AGENT", pair.worker_side):
        told = pair.worker_side.get_handshake_metadata()
    assert scheduling.handshake_of(pair.scheduler_side) is None
    assert pickle.loads(pickle.dumps(told)) == told
    pair.close()


@pytest.mark.parametrize("mode", MODES)
def test_reset_clears_what_is_remembered(own, mode):
    extra, options = MODES[mode]
    pair = own.pair(extra, **options)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    assert pair.hit(world.request(800, digests)) == 768
    lookups = pair.asking.place.lookups if mode == "own client" else lookups_of(pair.worker)
    assert lookups.tools.hints.predict(digests, UNIT, 64, 799) == 768
    assert pair.scheduler_side.reset_cache() is True
    lookups = pair.asking.place.lookups if mode == "own client" else lookups_of(pair.worker)
    assert lookups.tools.hints.predict(digests, UNIT, 64, 799) == 0
    assert pair.hit(world.request(800, digests)) == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_was_found_before_a_reset_is_not_told_after_it(own, mode):
    extra, options = MODES[mode]
    pair = own.pair({"lookup_async": True, "lookup_deadline_ms": 60_000, **extra}, **options)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    found, waits = world.request(800, digests), world.request(800, digests)
    assert pair.hit(found) is None
    until(lambda: pair.asking._jobs[found.request_id].finished)
    assert pair.hit(waits) is None
    assert pair.scheduler_side.reset_cache() is True
    for ask in (found, waits):
        hits = []
        until(lambda ask=ask, hits=hits: hits.append(pair.hit(ask)) or hits[-1] is not None)
        assert hits[-1] == 0


def test_what_the_gpu_holds_is_not_asked(own):
    for extra, options in MODES.values():
        pair = own.pair({"local_aware": True, **extra}, **options)
        digests = digests_of(768)
        fill(pair.worker, 768, digests)
        worker = pair.worker
        for key in world.keys_of(worker, 0, digests[3]):  # the first full-attention block
            assert worker.store.remove(key, True) == 0
        assert pair.hit(world.request(800, digests)) == 0
        assert pair.hit(world.request(800, digests), 130) == 768 - 130
        pair.close()


def test_operations_of_the_own_client_are_counted(own):
    pair = own.pair(apart=True)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    assert pair.scheduler_side.get_kv_connector_stats() is None
    pair.hit(world.request(800, digests))
    stats = pair.scheduler_side.get_kv_connector_stats()
    records = stats.data["lookup_exists"]
    assert {record["status"] for record in records} == {"ok"}
    assert all(record["num_keys"] > 0 for record in records)
    assert pair.scheduler_side.get_kv_connector_stats() is None
    assert pair.worker_side.get_kv_connector_stats() is None


def test_lookups_end_with_their_plan_and_hit(own):
    pair = own.pair()
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    seen = []
    lookups_of(pair.worker).ended.append(lambda plan, hit: seen.append((plan.asked, hit.length)))
    assert pair.hit(world.request(800, digests)) == 768
    until(lambda: seen)
    assert seen[0][1] == 768
    assert pair.worker.lookup(800, digests).hit_length == 768
    assert len(seen) == 2


def test_no_digests_are_kept(own):
    for extra, options in MODES.values():
        pair = own.pair(extra, **options)
        digests = type("Digests", (list,), {})(digests_of(768))
        gone = weakref.ref(digests)
        pair.hit(world.request(800, digests))
        del digests
        gc.collect()
        until(lambda gone=gone: gone() is None)
        assert not pair.asking._jobs


def test_the_one_line_turns_on_the_hasher_for_its_engine(shared, monkeypatch):
    core = importlib.import_module("vllm.v1.engine.core")
    stock = importlib.import_module("vllm.v1.core.kv_cache_utils").get_request_block_hasher
    caches = world.cache_config(GROUPS)
    # An engine that makes no hasher leaves nothing to one that is to have vLLM's.
    idle = world.Pair(world.vllm_config(GROUPS, UNIT), caches)
    assert core.get_request_block_hasher is not stock
    off = world.Pair(world.vllm_config(GROUPS, UNIT, {"hasher": False}), caches)
    assert core.get_request_block_hasher is stock
    pair = world.Pair(world.vllm_config(GROUPS, UNIT), caches)
    # This is what the engine does next.
    made = core.get_request_block_hasher(16, importlib.import_module("vllm.utils.hashing").sha256)
    assert made.__module__ == hashing.__name__
    assert core.get_request_block_hasher is stock  # the next engine of the process has its own
    assert "engine.block_hasher" not in seams.placed()
    for made_pair in (idle, off, pair):
        made_pair.close()


def test_a_client_of_somebody_elses_is_left_alone(shared):
    config = world.vllm_config(GROUPS, UNIT)
    with mock.patch(world.STORE + "scheduler.LookupKeyClient", return_value=SimpleNamespace()):
        pair = world.Pair(config, world.cache_config(GROUPS))
    assert type(pair.scheduler.client) is SimpleNamespace
    assert pair.scheduler_side._kvmask_lookups is None
    assert isinstance(pair.worker, StockWorker)
    pair.worker_side.shutdown()
