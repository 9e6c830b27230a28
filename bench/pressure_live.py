"""A real store under pressure: a small segment, real evictions, the same trace for every way.

    python bench/pressure_live.py [--requests 1200] [--speed 20] [--capacity 0.1]

First one hot prompt: it is looked up twice a second, other prompts fill the store, and a fresh
client looks up how much of the prompt is left. Then a trace of agents: the store holds a part of
what the trace saves, and each way has a master of its own. The trace runs `--speed` times faster
than its clock, and the store's lease and the interval of renewals are as much shorter.

The exit status is 1 if lookups with renewals find less than 0.995 of what `exact` finds, which asks
what vLLM asks, or less of the hot prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import pressure
import traces
from shapes import SHAPES, Shape, block_hashes

from kvmask import Contract, FullAttention, KVLayout, KVTransfer, SlidingWindow, VllmKeys, mooncake
from kvmask.plans import Held, Renewals

BLOCK_BYTES = 4096
# The master evicts when this much is in use, a twentieth of the objects at a time.
WATERMARK = 0.95
HOT_TOKENS = 1920


@contextlib.contextmanager
def store_of(blocks: int, lease_ms: int) -> Iterator[Any]:
    """A client whose segment holds about so many blocks, and a master that evicts."""
    # Segments come in steps of 16 MiB.
    step = 16 << 20
    segment = max(step, round(blocks * BLOCK_BYTES / WATERMARK / step) * step)
    with mooncake.local_master(lease_ms=lease_ms) as master:
        store = mooncake.connect(master, segment_bytes=segment)
        try:
            yield store
        finally:
            store.close()


@contextlib.contextmanager
def transfer(contract: Contract, store: Any, **options: Any) -> Iterator[KVTransfer]:
    """A transfer in which all blocks of a group are the same one."""
    memory = ctypes.create_string_buffer(BLOCK_BYTES * 2 * len(contract.groups))
    base = ctypes.addressof(memory)
    rows = [base + 2 * BLOCK_BYTES * g for g in range(len(contract.groups))]
    layouts = [
        KVLayout.from_regions(
            [(row, BLOCK_BYTES, BLOCK_BYTES)], 2, storages=[(row, 2 * BLOCK_BYTES)]
        )
        for row in rows
    ]
    with KVTransfer(store, contract.bind(layouts), **options) as kv:
        yield kv
    del memory


def save(kv: KVTransfer, contract: Contract, request: Any, tokens: int) -> int:
    """Save a request whose blocks are all block 1; return how many keys failed."""
    tables = [[1] * (tokens // group.block_size) for group in contract.groups]
    return len(kv.save(request, tables, tokens).failures)


def replay(
    shape: Shape, requests: Sequence[traces.Request], way: pressure.Way, blocks: int, speed: float
) -> pressure.Kept:
    """Replay a trace against a real store of so many blocks."""
    contract = shape.contract()
    renewals = Renewals(interval=4.0 / speed) if way.renew else None
    kept = pressure.Kept()
    with (
        store_of(blocks, round(pressure.LEASE * 1000 / speed)) as store,
        transfer(contract, store, renew=renewals) as kv,
    ):
        began = time.monotonic()
        for request in requests:
            ahead = request.timestamp / 1000 / speed - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
            n = request.input_length
            digests = block_hashes(traces.digests(request, shape.hash_block))
            looked_up = contract.request(hashes=digests, num_tokens=n)
            hit = kv.lookup(looked_up, strategy=way.strategy)
            kept.hit_tokens += hit.length
            looked_up.mark = hit.length
            save(kv, contract, looked_up, n)
        kept.asked_keys = int(kv.stats.asked_keys)
        kept.renewed_keys = int(kv.stats.renewed_keys)
    return kept


def hot_prompt(
    strategy: str, *, renew: bool, held: int = 0, seconds: float = 12.0, lease: float = 3.0
) -> list[int]:
    """What is left of a prompt that is looked up twice a second, once other prompts have come.

    Args:
        strategy: Of its lookups.
        renew: What the hits make worth keeping is renewed.
        held: Tokens of full attention that the engine holds, which it does not ask for.
        seconds: How long it is looked up.
        lease: Seconds of the store's lease; renewals come every third of it.

    Returns:
        The hits of requests that leave the prompt after 512, 1,024 and 1,888 tokens.
    """
    groups = [FullAttention(32), SlidingWindow(32, window=64)]
    contract = Contract(groups, 32, VllmKeys("hot"), hashing=None)

    def prompt(name: str) -> Any:
        rows = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(HOT_TOKENS // 32)]
        return contract.request(hashes=rows, num_tokens=HOT_TOKENS)

    renewals = Renewals(interval=lease / 3) if renew else None
    blocks = 3500  # the segment is one step
    own = Held((held, 0), held) if held else 0
    with store_of(blocks, round(lease * 1000)) as store:
        with transfer(contract, store, renew=renewals) as kv:
            hot = prompt("hot")
            save(kv, contract, hot, HOT_TOKENS)
            for _ in range(round(seconds * 2)):
                time.sleep(0.5)
                kv.lookup(hot, own, strategy=strategy)
        with transfer(contract, store) as kv:
            for i in range(2 * blocks // (2 * HOT_TOKENS // 32)):
                save(kv, contract, prompt(str(i)), HOT_TOKENS)
                time.sleep(0.02)  # the master evicts in a thread of its own
        with transfer(contract, store) as fresh:
            left = []
            for tokens in (513, 1025, HOT_TOKENS):
                request = contract.request(hashes=hot.hashes, num_tokens=tokens)
                left.append(fresh.lookup(request, strategy="exact").length)
    return left


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--shape", choices=SHAPES, default="dsv4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=20.0)
    parser.add_argument("--capacity", type=float, default=0.1)
    args = parser.parse_args(argv)
    good = True
    whole = hot_prompt("exact", renew=False)
    print(f"hot prompt, exact: {whole}")
    for held in (0, 1824, 1888):
        for renew in (False, True):
            left = hot_prompt("staged", renew=renew, held=held)
            good &= left == whole or not renew
            name = f"held {held}" if held else "staged"
            print(f"hot prompt, {name}{', renewed' if renew else ''}: {left}", flush=True)
    shape = SHAPES[args.shape]
    requests = list(traces.agents(args.requests, args.seed))
    everything = pressure.run(shape, requests, None, pressure.WAYS[1])
    blocks = int(everything.stored * args.capacity)
    print(f"{len(requests)} requests, {everything.stored} keys, a store of {blocks} blocks")
    base = 0
    for way in pressure.WAYS:
        kept = replay(shape, requests, way, blocks, args.speed)
        base = base or kept.hit_tokens
        ratio = kept.hit_tokens / base
        good &= ratio >= pressure.LEAST_RATIO or not way.renew
        print(
            f"{way.name:<18} {kept.hit_tokens:>10} tokens hit, {ratio:.4f} of stock's, "
            f"{kept.asked_keys} keys asked, {kept.renewed_keys} renewed",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
