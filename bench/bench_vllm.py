"""The stock worker against kvmask's, in one run: lookups, saves and loads.

    python -m pytest bench/bench_vllm.py --benchmark-enable -q
    python bench/bench_vllm.py [--tokens 131072] [--shape dsv4] [--rounds 9]

As a script, it prints the median CPU time (`time.process_time`) of both sides and their ratio. Both
sides run in turn. The store answers immediately with prepared lists, so only the connector is
measured. Before the timing, both sides are compared. For `exact`, their calls of the store must be
equal; for `staged`, their results.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":  # a script must also run if the package is not installed
    sys.path.insert(0, str(Path(__file__).parent.parent))

pytest.importorskip("vllm")

SHAPES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    # The hash block, then (block size, window) of every group. A window of 0 means full attention.
    "dsv4": (4, [(256, 0), (64, 128), (64, 512), (4, 16), (8, 64)]),
    "gemma": (16, [(16, 0), (16, 1024), (16, 1024), (16, 1024)]),
    "full16": (16, [(16, 0)]),
}
TOKENS = (512, 8_192, 131_072)
SIDES = ("stock", "exact", "staged")


class ReadyStore:
    """Answers every call with a list made beforehand."""

    def __init__(self, present: int) -> None:
        self.present = present
        self.ready: dict[tuple[str, int], list[int]] = {}
        self.calls: list[tuple[Any, ...]] | None = None
        self.keys = 0

    def _answer(self, name: str, n: int, value: int) -> list[int]:
        answer = self.ready.get((name, n))
        if answer is None:
            answer = self.ready[name, n] = [value] * n
        return answer

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.keys += len(keys)
        if self.calls is not None:
            self.calls.append((list(keys),))
        return self._answer("exist", len(keys), self.present)

    def batch_put_from_multi_buffers(self, keys: Any, addrs: Any, sizes: Any, _: Any) -> list[int]:
        if self.calls is not None:
            self.calls.append((list(keys), addrs, sizes))
        return self._answer("put", len(keys), 0)

    def batch_get_into_multi_buffers(self, keys: Any, addrs: Any, sizes: Any) -> list[int]:
        if self.calls is not None:
            self.calls.append((list(keys), addrs, sizes))
        answer = self.ready.get(("get", len(keys)))  # one store serves one shape
        if answer is None:
            answer = self.ready["get", len(keys)] = [sum(row) for row in sizes]
        return answer


@dataclass
class Bench:
    """One operation of one side. It can be called repeatedly."""

    run: Callable[[], Any]
    store: ReadyStore


def _modules() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
        coordinator,
        data,
        worker,
    )
    from vllm.v1 import kv_cache_interface as specs

    return coordinator, data, worker, specs


def make_coordinator(shape: str, side: str) -> Any:
    import torch

    import kvmask.vllm

    coordinator, _, _, specs = _modules()
    unit, groups = SHAPES[shape]
    made = []
    for i, (block, window) in enumerate(groups):
        kind: dict[str, Any] = {
            "block_size": block,
            "num_kv_heads": 1,
            "head_size": 64,
            "dtype": torch.float16,
        }
        spec = (
            specs.SlidingWindowSpec(sliding_window=window, **kind)
            if window
            else specs.FullAttentionSpec(**kind)
        )
        made.append(specs.KVCacheGroupSpec([f"l{i}"], spec))
    cls = coordinator.MooncakeStoreCoordinator
    if side != "stock":
        cls = kvmask.vllm.MooncakeStoreCoordinator
    return cls(made, scheduler_block_size=max(b for b, _ in groups), hash_block_size=unit)


def make_databases(shape: str, regions: int) -> list[Any]:
    _, data, _, _ = _modules()
    unit, groups = SHAPES[shape]
    out = []
    for i, (block, _) in enumerate(groups):
        db = data.ChunkedTokenDatabase(
            data.KeyMetadata("DeepSeek-V4", 0, 0, 0, 0, i), block, hash_block_size=unit
        )
        db.set_kv_caches_base_addr([0x7F00_0000_0000 + (r << 32) for r in range(regions)])
        db.set_block_len([64 * block] * regions)
        out.append(db)
    return out


def digests(shape: str, tokens: int) -> list[bytes]:
    return [i.to_bytes(4, "big") * 8 for i in range(tokens // SHAPES[shape][0])]


def lookup_worker(shape: str, side: str, store: Any) -> Any:
    from kvmask.vllm import binding, connector

    _, data, worker_module, _ = _modules()
    worker = object.__new__(worker_module.MooncakeStoreWorker)
    worker._capacity_only = False
    worker.coord = make_coordinator(shape, side)
    worker.hash_block_size = SHAPES[shape][0]
    worker._kv_cache_groups = worker.coord.kv_cache_groups
    worker._record_kv_connector_operation = lambda *a, **k: None
    worker.token_dbs = make_databases(shape, 1)
    worker._lookup_key_prefixes = tuple(
        (data.PoolKey.build_prefix(db.metadata),) for db in worker.token_dbs
    )
    worker.store = store
    if side != "stock":
        worker.__class__ = connector.classes()["MooncakeStoreWorker"]
        binding.state(worker)["strategy"] = side
    return worker


def lookup(shape: str, tokens: int, side: str, store: Any = None) -> Bench:
    data = _modules()[1]
    worker = lookup_worker(shape, side, store or ReadyStore(1))
    blob = memoryview(b"".join(digests(shape, tokens)))
    # As the lookup server does it: a new view for every request.
    return Bench(lambda: worker.lookup(tokens, data.BlobBlockHashes(blob, 32)), worker.store)


def _tables(shape: str, tokens: int) -> tuple[list[int], ...]:
    return tuple(list(range(1, tokens // block + 1)) for block, _ in SHAPES[shape][1])


def _thread(cls: str, shape: str, side: str, regions: int, store: Any, **options: Any) -> Any:
    from kvmask.vllm import connector, layouts

    worker_module = _modules()[2]
    dbs = make_databases(shape, regions)
    thread = getattr(worker_module, cls)(
        store=store,
        coord=make_coordinator(shape, side),
        token_databases=dbs,
        block_size=max(b for b, _ in SHAPES[shape][1]),
        tp_rank=0,
        ready_event=threading.Event(),
        **options,
    )
    if side != "stock":
        thread.__class__ = connector.classes()[cls]
        for db in dbs:
            layouts.adopt_addresses(db)
    return thread


def save(shape: str, tokens: int, side: str, regions: int) -> Bench:
    data = _modules()[1]
    store = ReadyStore(0)
    thread = _thread(
        "KVCacheStoreSendingThread",
        shape,
        side,
        regions,
        store,
        kv_role="kv_both",
        group_put_steps=[1] * len(SHAPES[shape][1]),
        replicate_config=None,
    )
    hashes, tables = digests(shape, tokens), _tables(shape, tokens)

    def run() -> None:
        forget(thread.token_databases)
        meta = data.ReqMeta(
            "r", tokens, tables, hashes, can_save=True, store_job_id=1, prefill_end_tokens=tokens
        )
        thread.add_request(meta)
        thread._handle_request(thread.request_queue.get())
        thread.delete_finished_stored_request("r")

    return Bench(run, store)


def load(shape: str, tokens: int, side: str, regions: int) -> Bench:
    data = _modules()[1]
    store = ReadyStore(0)
    thread = _thread("KVCacheStoreRecvingThread", shape, side, regions, store)
    hashes, tables = digests(shape, tokens), _tables(shape, tokens)
    boundaries = tuple(data.TailKeyBoundary(g, tokens) for g in range(len(tables)))

    def run() -> None:
        forget(thread.token_databases)
        spec = data.LoadSpec(0, tokens, True, tokens, boundaries)
        thread.request_queue.put(None)
        thread.request_queue.get()
        thread._handle_request(data.ReqMeta("r", tokens, tables, hashes, load_spec=spec))

    return Bench(run, store)


# If set, cached addresses are dropped before every run, as for blocks that were never used before.
COLD = {"cold": False}


def forget(dbs: list[Any]) -> None:
    from kvmask.vllm import binding

    if COLD["cold"]:
        for db in dbs:
            binding.state(db.store_layout).pop("tables", None)


OPERATIONS: dict[str, Callable[[str, int, str], Bench]] = {
    "lookup": lookup,
    "save1": lambda s, t, side: save(s, t, side, 1),
    "save61": lambda s, t, side: save(s, t, side, 61),
    "load1": lambda s, t, side: load(s, t, side, 1),
    "load61": lambda s, t, side: load(s, t, side, 61),
}


def check(made: dict[str, Bench], operation: str) -> None:
    """Check that both sides do the same. This runs before the timing."""
    from kvmask.vllm.acting import ACTING

    seen = {}
    for side, bench in made.items():
        bench.store.calls = calls = []
        result = bench.run()
        bench.store.calls = None
        seen[side] = calls, result
    for side, (calls, result) in seen.items():
        assert result == seen["stock"][1], (operation, side)
        if side != "staged" or operation != "lookup":
            assert calls == seen["stock"][0], (operation, side)
    assert ACTING.on, "kvmask failed, and vLLM's own functions ran on its side"


def medians(made: dict[str, Bench], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of every side. In each round all sides are timed."""
    times: dict[str, list[float]] = {side: [] for side in made}
    loops = {}
    for side, bench in made.items():
        start = time.process_time()
        bench.run()
        loops[side] = max(1, int(0.02 / max(time.process_time() - start, 1e-6)))
    for _ in range(rounds):
        for side, bench in made.items():
            gc.collect()
            start = time.process_time()
            for _ in range(loops[side]):
                bench.run()
            times[side].append((time.process_time() - start) / loops[side])
    return {side: statistics.median(values) for side, values in times.items()}


@contextlib.contextmanager
def live_store() -> Iterator[Any]:
    from kvmask import mooncake

    with mooncake.local_master() as master:
        store = mooncake.connect(master)
        try:
            yield store
        finally:
            store.close()


class Counted:
    """Start a real store that holds all keys of the first lookup."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Any = None

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self.store.batch_is_exist(keys)  # type: ignore[no-any-return]


def fill(shape: str, tokens: int, store: Any) -> None:
    """Store one byte for every key that stock asks for."""
    ready = ReadyStore(1)
    ready.calls = []
    lookup(shape, tokens, "stock", ready).run()
    for (keys,) in ready.calls:
        for key in keys:
            store.put(key, b"x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--shape", nargs="*", default=list(SHAPES))
    parser.add_argument("--operation", nargs="*", default=[*OPERATIONS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--live", action="store_true", help="lookups on a real store, wall time")
    parser.add_argument("--cold", action="store_true", help="blocks that were never used before")
    args = parser.parse_args()
    COLD["cold"] = args.cold
    if args.live:
        return live(args)
    print(
        f"{'operation':9} {'shape':7} {'tokens':>7} {'stock us':>10} {'exact us':>9} "
        f"{'x':>6} {'staged us':>9} {'x':>6}"
    )
    for operation in args.operation:
        sides = SIDES if operation == "lookup" else SIDES[:2]
        for shape in args.shape:
            for tokens in args.tokens:
                made = {side: OPERATIONS[operation](shape, tokens, side) for side in sides}
                check(made, operation)
                t = medians(made, args.rounds)
                line = f"{operation:9} {shape:7} {tokens:7} {t['stock'] * 1e6:10.1f}"
                for side in sides[1:]:
                    line += f" {t[side] * 1e6:9.1f} {t['stock'] / t[side]:6.1f}"
                print(line, flush=True)
    return 0


def live(args: Any) -> int:
    with live_store() as store:
        for shape in args.shape:
            for tokens in args.tokens:
                fill(shape, tokens, store)
                made = {s: lookup(shape, tokens, s, Counted(store)) for s in SIDES}
                times: dict[str, list[float]] = {side: [] for side in SIDES}
                for _ in range(args.rounds):
                    for side, bench in made.items():
                        start = time.perf_counter()
                        bench.run()
                        times[side].append(time.perf_counter() - start)
                print(
                    shape, tokens, {s: round(statistics.median(v) * 1e6) for s, v in times.items()}
                )
                store.remove_all(True)
    return 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(benchmark: Any, operation: str, shape: str, tokens: int, side: str) -> None:
    if side == "staged" and operation != "lookup":
        pytest.skip("the strategy only concerns lookups")
    made = {s: OPERATIONS[operation](shape, tokens, s) for s in {"stock", side}}
    check(made, operation)
    benchmark.group = f"{operation} {shape} {tokens}"
    benchmark(made[side].run)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
