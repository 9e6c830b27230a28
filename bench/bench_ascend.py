"""vllm-ascend's own AscendStore worker against the same with kvmask, in one run. No NPU is needed.

    python bench/bench_ascend.py [--tokens 131072] [--rounds 9] [--digests text|bytes] [--check]

Prints the median CPU time (`time.process_time`) of both, the median of the rounds' ratios, and the
keys and calls that the store got. Both run in turn on one worker, over a store that answers from a
prepared set. "first" is a request that was never looked up before, and addresses that no table
keeps yet; "again" is the same once more. Every round has a request of its own. Hits and descriptors
are compared before anything is timed. The scheduler sends digests as text, which is made right
before each lookup, as the lookup server decodes it; `--digests bytes` hands over bytes. With
`--check` the exit status says whether every goal is reached.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

# Groups of the shapes, as `ascend_world.make_worker` takes them, and the rest of the worker.
DSV4 = [
    {"kind": "full", "block_size": 256},
    {"kind": "window", "block_size": 64, "span": 128},
    {"kind": "window", "block_size": 64, "span": 512, "tag": 1},
    {"kind": "window", "block_size": 4, "span": 16},
    {"kind": "window", "block_size": 8, "span": 64},
]
DSV4_WORKER = {"hash_block_size": 4, "mla": True}
GROUPED = [{"kind": "full", "block_size": 128}]
GROUPED_WORKER = {"tp_size": 8, "kv_heads": 8}
# Goals of "first": times less CPU, times fewer keys.
GOALS = {
    "DeepSeek-V4, all present": (100, 15),
    "DeepSeek-V4, half present": (100, 15),
    "grouped queries, 8 ranks": (20, 1),
    "prepare_value, 512 blocks, 61 regions": (8, None),
}
REGIONS, BLOCKS = 61, 512


class Store:
    """A backend that answers from a set, or has everything."""

    def __init__(self, keys: set[str] | None) -> None:
        self.keys = keys
        self.ready: dict[int, list[int]] = {}
        self.asked = self.calls = 0

    def exists(self, keys: list[str]) -> list[int]:
        """1 for a key that is present."""
        self.asked += len(keys)
        self.calls += 1
        if self.keys is not None:
            present = self.keys
            return [int(key in present) for key in keys]
        if len(keys) not in self.ready:
            self.ready[len(keys)] = [1] * len(keys)
        return self.ready[len(keys)]


def measure(
    sides: dict[str, Callable[[Any], Any]],
    rounds: int,
    prepare: Callable[[int], Any],
    reset: Callable[[], Any] = lambda: None,
) -> Any:
    """Median seconds, and median ratio of the first side's to it, per side.

    Every side is called with what is prepared for it in a round. A reset begins every round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    for i in range(rounds):
        reset()
        for name, run in sides.items():
            prepared = prepare(i)
            began = time.process_time()
            run(prepared)
            seconds[name].append(time.process_time() - began)
    stock = next(iter(seconds.values()))
    return {
        name: (
            statistics.median(took),
            statistics.median(a / b for a, b in zip(stock, took, strict=True)),
        )
        for name, took in seconds.items()
    }


def lookup_row(
    what: str,
    worker: Any,
    requests: list[list[bytes]],
    text: bool,
    tokens: int,
    keys: set[str] | None,
) -> tuple[Any, ...]:
    """One row of the table: lookups by both, one request per round and one before them."""
    from kvmask.ascend import lookup, releases

    stock = releases.seams.stock("worker.lookup_scheduler")
    ids = list(range(worker.num_kv_cache_groups))
    store = worker.m_store = Store(keys)
    sides: dict[str, Callable[[Any], Any]] = {
        "stock": lambda hashes: stock(worker, tokens, hashes, ids, False, 0),
        "first": lambda hashes: lookup.lookup_scheduler(worker, tokens, hashes, ids, False, 0),
    }

    def prepare(i: int) -> list[Any]:
        return [d.hex() for d in requests[i]] if text else list(requests[i])

    sides["again"] = sides["first"]
    hits, counts = set(), {}
    for name, run in sides.items():
        store.asked = store.calls = 0
        hits.add(run(prepare(-1)))
        counts[name] = store.asked, store.calls
    if len(hits) != 1:
        raise SystemExit(f"{what}: the hits differ: {hits}")
    return what, measure(sides, len(requests) - 1, prepare), counts


def value_row(worker: Any, rounds: int) -> tuple[Any, ...]:
    """One row of the table: descriptors by both."""
    from kvmask.ascend import database, releases

    stock = releases.seams.stock("database.prepare_value")
    db = worker.token_database
    bases = [(1 << 40) + (i << 32) for i in range(REGIONS)]
    db.set_group_buffers({0: bases}, {0: [36_864] * REGIONS}, {0: [40_960] * REGIONS})
    size = db.get_block_size(0)
    table = [(7 * i + 1) % 4096 for i in range(BLOCKS)]

    def side(function: Any) -> Callable[[Any], Any]:
        return lambda table: [
            function(db, i * size, (i + 1) * size, table, kv_cache_group_id=0, block_id=block)
            for i, block in enumerate(table)
        ]

    sides = {"stock": side(stock), "first": side(database.prepare_value)}
    sides["again"] = sides["first"]
    if sides["stock"](table) != sides["first"](table):
        raise SystemExit("the descriptors differ")
    forget = functools.partial(db.__dict__.pop, "_kvmask_tables", None)
    return (
        "prepare_value, 512 blocks, 61 regions",
        measure(sides, rounds, lambda _: table, forget),
        {},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--digests", choices=("text", "bytes"), default="text")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    import ascend_world

    if not ascend_world.available():
        print("vllm-ascend's source is missing: run scripts/ascend_source.py", file=sys.stderr)
        return 2
    ascend_world.modules()

    def requests(unit: int) -> list[list[bytes]]:
        return [
            [hashlib.sha256(b"%d/%d" % (r, i)).digest() for i in range(args.tokens // unit)]
            for r in range(args.rounds + 1)
        ]

    text = args.digests == "text"

    rows = []
    worker = ascend_world.make_worker(DSV4, **DSV4_WORKER)
    asked = requests(4)
    rows.append(lookup_row("DeepSeek-V4, all present", worker, asked, text, args.tokens, None))
    worker = ascend_world.make_worker(DSV4, **DSV4_WORKER)
    half = [lambda i, s=g["block_size"]: (i + 1) * s <= args.tokens // 2 for g in DSV4]
    keys: set[str] = set()
    for row in asked:
        keys |= ascend_world.fill_store(worker, random.Random(1), row, half, lost=0)
    rows.append(lookup_row("DeepSeek-V4, half present", worker, asked, text, args.tokens, keys))
    worker = ascend_world.make_worker(GROUPED, **GROUPED_WORKER)
    asked = requests(128)
    rows.append(lookup_row("grouped queries, 8 ranks", worker, asked, text, args.tokens, None))
    rows.append(value_row(worker, args.rounds))

    print(f"vllm-ascend {ascend_world.VERSION}, {args.tokens} tokens, digests as {args.digests}")
    print("| shape | AscendStore | kvmask, first | again |")
    print("|---|---|---|---|")
    short = []
    for what, found, counts in rows:
        cells = []
        for name in ("stock", "first", "again"):
            seconds, ratio = found[name]
            text = f"{seconds * 1e3:.3g} ms"
            if name != "stock":
                text += f" ({ratio:.0f}x)"
            if name in counts:
                text += f", {counts[name][0]} keys, {counts[name][1]} calls"
            cells.append(text)
        print(f"| {what} | {' | '.join(cells)} |")
        times, fewer = GOALS[what]
        if found["first"][1] < times:
            short.append(f"{what}: {found['first'][1]:.1f}x, the goal is {times}x")
        if fewer and counts["stock"][0] < fewer * counts["first"][0]:
            short.append(f"{what}: {counts['first'][0]} keys of {counts['stock'][0]}")
    for text in short:
        print(f"below the goal: {text}")
    return 1 if short and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
