"""Replay a request trace: look up each request, then save its missing blocks.

    python bench/replay.py [--trace PATH] [--shape dsv4] [--requests N] [--limit SECONDS]

Before a request is saved, it is looked up in several ways, with the same contents of the store:

    vLLM      vLLM's own store worker, if vLLM is installed
    exact     kvmask, with the same keys as vLLM
    staged    kvmask, with as few keys as possible
    hinted    staged, with hints from the saves of this process: the default of KVTransfer

The order of the ways rotates from request to request. So no way always finds the store's caches
warm or the leases new. Latency is the wall time of the whole lookup. CPU is the CPU time of the
calling thread. Blocks hold 16 bytes, so that the store moves very few bytes.

The exit status is 1 if the hits of a request differ, or do not match what was saved before.

    python bench/replay.py --pressure [--trace PATH | --agents] [--capacity 0.05 0.1 0.3 0.6]

With `--pressure` the trace is replayed against a store that holds only a part of all keys, in this
process (see `pressure.py`). The table compares the tokens hit. The exit status is 1 if lookups with
renewals find less than 0.995 of what vLLM finds, or renew more than a quarter of what it asks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import pressure
import traces
import vllm_side
from shapes import DIGEST_BYTES, SHAPES, Shape, block_hashes

from kvmask import Contract, HitHints, KVLayout, KVTransfer, mooncake
from kvmask.cli.terminal import Progress

BLOCK_BYTES = 16
# Shares of the lookups whose latency is written for pictures: half percents, then thousandths.
SHARES = (*(i / 200 for i in range(1, 198)), *(i / 1000 for i in range(990, 1001)))
# Mooncake's offset allocator (0.3.13.post1) holds at most one object per KiB of a segment, whatever
# their size. With more objects the store evicts some, although its memory is almost unused.
SEGMENT_BYTES_PER_OBJECT = 2048
LEAST_SEGMENT_BYTES = 1 << 30


class MemoryStore:
    """A set of keys in this process, for runs without Mooncake.

    Counts of keys and calls are as with a store. Latencies leave out the store.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.keys) for key in keys]

    def batch_put_from_multi_buffers(self, keys: list[str], *args: Any) -> list[int]:
        self.keys.update(keys)
        return [0] * len(keys)

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0


class Counting:
    """Forwards the lookups' calls to the store. Counts their keys and measures their time."""

    def __init__(self, store: Any) -> None:
        self.batch_put_from_multi_buffers = store.batch_put_from_multi_buffers
        self.register_buffer = store.register_buffer
        self.unregister_buffer = store.unregister_buffer
        self._exist = store.batch_is_exist
        self.reset()

    def reset(self) -> None:
        self.keys = self.calls = 0
        self.seconds = 0.0

    def batch_is_exist(self, keys: list[str]) -> Sequence[int]:
        start = time.perf_counter()
        answers: Sequence[int] = self._exist(keys)
        self.seconds += time.perf_counter() - start
        self.keys += len(keys)
        self.calls += 1
        return answers


@dataclass
class Run:
    """One way to look up, and its times and counts per request."""

    name: str
    lookup: Callable[[int, bytes], int]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def time(self, num_tokens: int, buffer: bytes, store: Counting) -> int:
        """Look up once and note times and counts."""
        store.reset()
        cpu = time.thread_time()
        start = time.perf_counter()
        hit = self.lookup(num_tokens, buffer)
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(time.thread_time() - cpu)
        self.store.append(store.seconds)
        self.keys.append(store.keys)
        self.calls.append(store.calls)
        return hit

    def figures(self) -> dict[str, float]:
        """Return means, percentiles and totals. Times are in milliseconds."""
        ordered = sorted(self.seconds)
        n = len(ordered)
        return {
            "mean_ms": sum(ordered) / n * 1e3,
            "p50_ms": ordered[n // 2] * 1e3,
            "p99_ms": ordered[min(n - 1, n * 99 // 100)] * 1e3,
            "cpu_mean_ms": sum(self.cpu) / n * 1e3,
            "store_mean_ms": sum(self.store) / n * 1e3,
            "keys": sum(self.keys),
            "keys_mean": sum(self.keys) / n,
            "calls_mean": sum(self.calls) / n,
            "calls_max": max(self.calls),
        }

    def quantiles(self) -> list[float]:
        """Return the latency that each of `SHARES` stays within, in milliseconds."""
        ordered = sorted(self.seconds)
        n = len(ordered)
        return [round(ordered[max(0, math.ceil(share * n) - 1)] * 1e3, 4) for share in SHARES]


def transfer(contract: Contract, store: Any, memory: Any, **options: Any) -> KVTransfer:
    """Return a KVTransfer in which all blocks of a group share the same few bytes of `memory`."""
    groups = len(contract.groups)
    stride = len(memory) // groups
    base = ctypes.addressof(memory)
    layouts = [
        KVLayout.from_regions(
            [(base + g * stride, BLOCK_BYTES, BLOCK_BYTES)],
            stride // BLOCK_BYTES,
            storages=[(base + g * stride, stride)],
        )
        for g in range(groups)
    ]
    return KVTransfer(store, contract.bind(layouts), **options)


def kvmask_lookup(contract: Contract, kv: KVTransfer, strategy: str) -> Callable[[int, bytes], int]:
    def call(num_tokens: int, buffer: bytes) -> int:
        request = contract.request(hashes=block_hashes(buffer), num_tokens=num_tokens)
        return kv.lookup(request, strategy=strategy).length

    return call


@dataclass
class Outcome:
    """Results of a replay."""

    shape: str
    requests: int
    tokens: int
    hit_tokens: int
    saved_keys: int
    failed_keys: int
    differing: int
    lost: int
    seconds: float
    cold_calls: dict[str, int]
    runs: dict[str, dict[str, float]]
    quantiles: dict[str, list[float]]

    @property
    def ok(self) -> bool:
        """True when all ways found the same hits, and the hits match what was saved."""
        return not self.differing and not self.lost and not self.failed_keys


def replay(
    shape: Shape,
    requests: Iterable[traces.Request],
    store: Any,
    *,
    with_vllm: bool,
    limit: float = float("inf"),
    cold: int = 50,
    hint_slots: int = 1 << 20,
    progress: Callable[[str], None] = lambda text: None,
    counted: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Replay requests against an empty store.

    Args:
        shape: Groups of the model.
        requests: A trace.
        store: A connected MooncakeDistributedStore, or the same calls.
        with_vllm: Also run vLLM's worker.
        limit: After this many seconds, no further request is started.
        hint_slots: Size of the table of hints. The default is that of KVTransfer.
        cold: Number of requests that are looked up before anything is saved. They count the calls
            with an empty store.
        progress: Called with a line of text when something is wrong.
        counted: Called with the number of requests that are done.
    """
    counting = Counting(store)
    memories = [ctypes.create_string_buffer(2 * BLOCK_BYTES * len(shape.groups)) for _ in range(3)]
    contract = shape.contract()
    exact = transfer(contract, counting, memories[0], hints=None)
    staged = transfer(contract, counting, memories[1], hints=None)
    hinted = transfer(contract, counting, memories[2], hints=HitHints(hint_slots))
    runs = [
        Run("exact", kvmask_lookup(contract, exact, "exact")),
        Run("staged", kvmask_lookup(contract, staged, "staged")),
        Run("hinted", kvmask_lookup(contract, hinted, "staged")),
    ]
    if with_vllm:
        runs.insert(0, Run("vLLM", vllm_side.lookup(shape, counting)))
    model = traces.Model(shape.alignment)
    tables: list[list[int]] = [[] for _ in shape.groups]
    done = tokens = hit_tokens = differing = lost = failed = 0
    source = iter(requests)
    first = list(itertools.islice(source, cold))
    cold_runs = [Run(run.name, run.lookup) for run in runs]
    for request in first:
        buffer = traces.digests(request, shape.hash_block)
        for run in cold_runs:
            if run.time(request.input_length, buffer, counting):
                raise RuntimeError("the store must be empty when a replay begins")
    gc.collect()
    gc.freeze()  # as a serving engine does: the collector skips objects that imports created
    began = time.monotonic()
    for i, request in enumerate(itertools.chain(first, source)):
        if time.monotonic() - began > limit:
            break
        buffer = traces.digests(request, shape.hash_block)
        turn = i % len(runs)
        hits = {
            run.name: run.time(request.input_length, buffer, counting)
            for run in runs[turn:] + runs[:turn]
        }
        hit = hits["exact"]
        if len(set(hits.values())) > 1:
            differing += 1
            progress(f"request {i} of {request.input_length} tokens: the hits differ: {hits}")
        if hit != model.hit(request):
            lost += 1
            progress(f"request {i}: hit {hit}, but {model.hit(request)} tokens were saved before")
        for g, blocks in enumerate(shape.blocks(request.input_length)):
            if len(tables[g]) < blocks:
                tables[g] = [1] * blocks
        saving = contract.request(hashes=block_hashes(buffer), num_tokens=request.input_length)
        saving.mark = hit
        failed += len(hinted.save(saving, tables, request.input_length).failures)
        model.save(request)
        done += 1
        tokens += request.input_length
        hit_tokens += hit
        counted(done)
    outcome = Outcome(
        shape.name,
        done,
        tokens,
        hit_tokens,
        hinted.stats.stored_keys,
        failed,
        differing,
        lost,
        time.monotonic() - began,
        {run.name: max(run.calls, default=0) for run in cold_runs},
        {run.name: run.figures() for run in runs} if done else {},
        {run.name: run.quantiles() for run in runs} if done else {},
    )
    for kv in (exact, staged, hinted):
        kv.close()
    gc.unfreeze()
    return outcome


COLUMNS = (
    ("mean ms", "mean_ms", "{:.3f}"),
    ("p50 ms", "p50_ms", "{:.3f}"),
    ("p99 ms", "p99_ms", "{:.3f}"),
    ("CPU ms", "cpu_mean_ms", "{:.3f}"),
    ("keys", "keys_mean", "{:.1f}"),
    ("calls", "calls_mean", "{:.2f}"),
)


def table(outcome: Outcome) -> list[str]:
    """Format the figures per lookup, and their ratios to the first way."""
    names = list(outcome.runs)
    base = outcome.runs[names[0]]
    rows = [["", *(title for title, _, _ in COLUMNS)]]
    for name in names:
        own = outcome.runs[name]
        rows.append([name, *(form.format(own[key]) for _, key, form in COLUMNS)])
    for name in names[1:]:
        own = outcome.runs[name]
        ratios = [f"{base[key] / own[key]:.1f}x" for _, key, _ in COLUMNS]
        rows.append([f"{names[0]} / {name}", *ratios])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def report(outcome: Outcome) -> str:
    """Format the outcome as text."""
    if not outcome.requests:
        return "no request was replayed"
    calls = ", ".join(f"{name} {n}" for name, n in outcome.cold_calls.items())
    return "\n".join(
        [
            f"{outcome.shape}: {outcome.requests} requests, {outcome.tokens} tokens, "
            f"{outcome.hit_tokens / outcome.tokens:.1%} of them hit; {outcome.saved_keys} keys "
            f"saved, {outcome.failed_keys} failed; {outcome.seconds:.0f} s",
            "",
            *table(outcome),
            "",
            f"most calls on a cold store: {calls}",
            f"{outcome.differing} requests with differing hits, {outcome.lost} that missed what "
            "was saved",
        ]
    )


def objects(shape: Shape, requests: Iterable[traces.Request]) -> int:
    """Return the largest number of keys that a replay can save."""
    ids = len({i for request in requests for i in request.hash_ids})
    per_id = traces.TOKENS_PER_ID
    return ids * len(shape.keys(bytes(per_id // shape.hash_block * DIGEST_BYTES), per_id))


@contextlib.contextmanager
def open_store(kind: str, num_objects: int) -> Iterator[Any]:
    """Start a store: a master on loopback, so large that it never evicts, or a set of keys here."""
    if kind == "memory":
        yield MemoryStore()
        return
    segment = max(LEAST_SEGMENT_BYTES, num_objects * SEGMENT_BYTES_PER_OBJECT)
    with mooncake.local_master() as master:
        store = mooncake.connect(master, segment_bytes=segment)
        try:
            yield store
        finally:
            store.close()


def under_pressure(args: argparse.Namespace, requests: Sequence[traces.Request]) -> int:
    """Replay against stores that evict; print a row per way, and return the exit status."""
    kind = "agents" if args.agents else "generated"
    print(f"{args.shape}, {args.trace or f'{kind}, seed {args.seed}'}: {len(requests)} requests")
    print(pressure.HEAD)
    rows = []
    with Progress(f"replaying {len(requests)} requests") as progress:
        progress.step("with a store that holds everything")
        for row in pressure.measure(SHAPES[args.shape], requests, args.capacity):
            progress.say(pressure.line(row))
            progress.step(f"after {row.name} with {row.capacity:.0%} of the keys")
            rows.append(row)
    if args.json:
        text = json.dumps([vars(row) for row in rows], indent=1)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0 if all(map(pressure.good, rows)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="JSON lines; by default a trace is generated")
    parser.add_argument("--seed", type=int, default=1, help="of the generated trace")
    parser.add_argument("--shape", choices=SHAPES, default="dsv4")
    parser.add_argument("--requests", type=int, help="stop after so many (generated: 1000)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--store", choices=("mooncake", "memory"), default="mooncake")
    parser.add_argument("--hint-slots", type=int, default=1 << 20, help="size of the hints' table")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--agents", action="store_true", help="generate a trace of agents")
    parser.add_argument("--pressure", action="store_true", help="with a store that evicts")
    parser.add_argument(
        "--capacity",
        type=float,
        nargs="+",
        default=pressure.CAPACITIES,
        help="shares of all keys that the store holds, with --pressure",
    )
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.trace:
        requests = list(itertools.islice(traces.load(args.trace), args.requests))
    else:
        generate = traces.agents if args.agents else traces.generate
        requests = list(generate(args.requests or 1000, args.seed))
    if args.pressure:
        return under_pressure(args, requests)
    with_vllm = vllm_side.available() and not args.no_vllm
    source = args.trace or f"generated, seed {args.seed}"
    beside = vllm_side.version() if with_vllm else "not run"
    print(
        f"trace: {source}; store: {args.store}; Python {platform.python_version()}; vLLM {beside}"
    )
    if with_vllm:
        vllm_side.engine()
    shown = Progress("requests")
    with shown, open_store(args.store, objects(SHAPES[args.shape], requests)) as store:
        outcome = replay(
            SHAPES[args.shape],
            requests,
            store,
            with_vllm=with_vllm,
            limit=args.limit,
            hint_slots=args.hint_slots,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
            counted=lambda done: shown(done, len(requests)),
        )
    print(report(outcome))
    if args.json:
        Path(args.json).write_text(json.dumps(vars(outcome), indent=1) + "\n", encoding="utf-8")
    return 0 if outcome.requests and outcome.ok else 1


if __name__ == "__main__":
    sys.exit(main())
