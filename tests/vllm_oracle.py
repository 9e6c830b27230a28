"""Random configurations of cache groups, judged by the engine's own store coordinator and worker.

    python tests/vllm_oracle.py --cases 100000 --seed 1 [--subject core|reference] [--jobs N]

Prints the seed, the number of cases, how many differ and the first few of those in full; the exit
status is 0 only without one. Case `i` of a seed is always the same (`--first i --cases 1`).

Compared are the store masks (from a start token, with and without states), lookup masks, load
masks, the hit search (length and masks), and the worker's whole lookup with its tail boundaries
and, for the core, its keys.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: the package may not be installed
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from reference import ReferenceCoordinator, ceil_div
from vllm_cases import Case, random_case

from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow

# --- the engine's side -----------------------------------------------------------------------


@functools.cache
def engine() -> Any:
    """The engine's modules, imported late: this takes many seconds."""
    import types

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
        coordinator,
        data,
        worker,
    )
    from vllm.v1 import kv_cache_interface as specs

    return types.SimpleNamespace(
        torch=torch, coordinator=coordinator, data=data, worker=worker, specs=specs
    )


@functools.lru_cache(100_000)
def engine_spec(group: Any) -> Any:
    e = engine()
    tag = group.spec or 0
    attention = {"num_kv_heads": 1, "head_size": 8 * (tag + 1), "dtype": e.torch.float16}
    size = group.block_size
    if not group.prefix_cacheable:
        return e.specs.CircularBufferSpec(block_size=size, **attention)
    if isinstance(group, FullAttention):
        return e.specs.FullAttentionSpec(block_size=size, **attention)
    if isinstance(group, SlidingWindow):
        return e.specs.SlidingWindowSpec(block_size=size, sliding_window=group.window, **attention)
    if isinstance(group, ChunkedLocal):
        return e.specs.ChunkedLocalAttentionSpec(
            block_size=size, attention_chunk_size=group.chunk_size, **attention
        )
    assert isinstance(group, Mamba)
    return e.specs.MambaSpec(
        block_size=size,
        shapes=((1, tag + 1),),
        dtypes=(e.torch.float32,),
        mamba_cache_mode="align",
    )


@functools.cache
def digest(i: int) -> bytes:
    return bytes([i % 251, i >> 8, 0xA5, i & 0xFF])


class ScriptedStore:
    """Answers existence from a set and keeps what it was asked."""

    def __init__(self, keys: set[str]) -> None:
        self.keys = keys
        self.asked: list[str] = []

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked.extend(keys)
        return [int(key in self.keys) for key in keys]


def key_prefix(group: int, rank: int) -> str:
    """As the engine builds it, by its own code."""
    data = engine().data
    return str(
        data.PoolKey.build_prefix(data.KeyMetadata("model", 0, 0, 0, 0, group), tp_rank=rank)
    )


class EngineCoordinator:
    """The engine's answers for one case, in the shape of `kvmask.Coordinator`'s."""

    def __init__(self, case: Case) -> None:
        e = engine()
        self.case = case
        self.groups = [
            e.specs.KVCacheGroupSpec(
                layer_names=[f"l{i}"], kv_cache_spec=engine_spec(g), is_eagle_group=g.eagle
            )
            for i, g in enumerate(case.groups)
        ]
        self.coord = e.coordinator.MooncakeStoreCoordinator(
            self.groups,
            scheduler_block_size=case.effective_alignment,
            hash_block_size=case.hash_block_size,
            retention_interval=case.retention,
            enable_partial_hash_hits=case.partial,
        )
        self.hashes = [digest(i) for i in range(case.hash_blocks)]
        self.exists = {
            (g, self.hashes[(i + 1) * case.per_block(g) - 1])
            for g, units in enumerate(case.present)
            if case.groups[g].prefix_cacheable
            for i, there in enumerate(units)
            if there
        }

    def store_mask(self, states: bool) -> tuple[Any, ...]:
        c = self.case
        if not states:
            return self.coord.store_mask(c.store_tokens, c.start_token, c.num_prompt_tokens)
        return self.coord._reachable_masks(
            c.store_tokens,
            c.start_token,
            retention_interval=c.retention,
            num_prompt_tokens=c.num_prompt_tokens,
        )

    def lookup_mask(self) -> tuple[Any, ...]:
        return self.coord.lookup_mask(self.case.store_tokens)

    def load_mask(self) -> tuple[Any, ...]:
        return self.coord.load_mask(self.hashes, self.case.load_tokens)

    def find_hit(self) -> tuple[int, tuple[Any, ...]]:
        pool = engine().coordinator.ExternalCachedBlockPool(self.case.hash_block_size, self.exists)
        masks, hit = self.coord.find_longest_cache_hit(self.hashes, self.case.max_length, pool)
        return hit, masks

    def lookup(self) -> tuple[int, dict[int, int] | None, list[str]]:
        """Hit, tail boundary per group (None where the engine's own assertion about them fails: at
        the edge of an attention chunk, for windows of one token), keys asked."""
        e, c = engine(), self.case
        worker = object.__new__(e.worker.MooncakeStoreWorker)
        worker._capacity_only = False
        worker.coord = self.coord
        worker.hash_block_size = c.hash_block_size
        worker._kv_cache_groups = self.groups
        worker._record_kv_connector_operation = lambda *a, **k: None
        worker._lookup_key_prefixes = tuple(
            tuple(key_prefix(g, r) for r in range(n)) for g, n in enumerate(c.ranks)
        )
        worker.token_dbs = [
            e.data.ChunkedTokenDatabase(
                e.data.KeyMetadata("model", 0, 0, 0, 0, i),
                g.block_size,
                c.hash_block_size if g.prefix_cacheable else g.block_size,
            )
            for i, g in enumerate(c.groups)
        ]
        worker.store = store = ScriptedStore(self.store_keys())
        try:
            result = worker.lookup(c.num_tokens, self.hashes)
        except AssertionError:
            store.asked.clear()
            worker._tail_key_boundaries = lambda *a: ()
            return worker.lookup(c.num_tokens, self.hashes).hit_length, None, store.asked
        return (
            result.hit_length,
            {b.group_id: b.num_tokens for b in result.tail_key_boundaries},
            store.asked,
        )

    def store_keys(self) -> set[str]:
        """Keys in the store: all ranks of what is present, and the first rank of some more."""
        keys = {
            f"{key_prefix(g, rank)}@{h.hex()}"
            for g, h in self.exists
            for rank in range(self.case.ranks[g])
        }
        for g, n in enumerate(self.case.ranks):
            if n > 1:
                keys.update(f"{key_prefix(g, 0)}@{h.hex()}" for h in self.hashes[::3])
        return keys


# --- the comparison --------------------------------------------------------------------------


def plain(masks: Any) -> tuple[list[bool] | None, ...]:
    return tuple(None if m is None else list(m) for m in masks)


def without_rings(case: Case, masks: Any) -> tuple[list[bool] | None, ...]:
    return tuple(m for m, g in zip(plain(masks), case.groups, strict=True) if g.prefix_cacheable)


def as_lists(present: Any) -> Any:
    return [list(units) for units in present]


def as_bitsets(present: Any) -> Any:
    from kvmask import Bitset

    return [Bitset.from_bools(units) for units in present]


def core_coordinator(*args: Any) -> Any:
    import kvmask

    return kvmask.Coordinator(*args)


@dataclass(frozen=True)
class Subject:
    make: Callable[..., Any]
    present: Callable[..., Any]


SUBJECTS = {
    "reference": Subject(ReferenceCoordinator, as_lists),
    "core": Subject(core_coordinator, as_bitsets),
}


def differences(case: Case, subject: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields what differs: its name, the engine's value and the subject's."""
    other = SUBJECTS[subject]
    theirs, ours = EngineCoordinator(case), other.make(*case.coordinator_args)

    for states in (False, True):
        mask = ours.store_mask(case.store_tokens, case.start_token, case.num_prompt_tokens, states)
        pair = without_rings(case, theirs.store_mask(states)), without_rings(case, mask)
        if pair[0] != pair[1]:
            yield f"store_mask states={states}", *pair
        for g, m in zip(case.groups, plain(mask), strict=True):
            if not g.prefix_cacheable:
                stop = case.store_tokens // g.block_size
                start = min(stop, ceil_div(case.start_token, g.block_size))
                if m != [False] * (stop - start):
                    yield "store_mask of a ring", stop - start, m
    pair = (
        without_rings(case, theirs.lookup_mask()),
        without_rings(case, ours.lookup_mask(case.store_tokens)),
    )
    if pair[0] != pair[1]:
        yield "lookup_mask", *pair
    pair = plain(theirs.load_mask()), plain(ours.load_mask(case.load_tokens))
    if pair[0] != pair[1]:
        yield "load_mask", *pair

    present = other.present(case.present)
    hit, masks = theirs.find_hit()
    found = ours.find_hit(present, case.max_length)
    length, found_masks, tails = (
        found if isinstance(found, tuple) else (found.length, found.masks, found.tail_tokens)
    )
    if (hit, plain(masks)) != (length, plain(found_masks)):
        yield "find_hit", (hit, plain(masks)), (length, plain(found_masks))
    for g, tail in zip(case.groups, tails, strict=True):
        if tail and (not g.prefix_cacheable or not length <= tail <= length + g.block_size):
            yield "range of a tail", length, tails

    if subject == "reference":
        hit, boundaries, _ = theirs.lookup()
        length, _, tails = ours.lookup(present, case.num_tokens)
        mine = None if boundaries is None else {i: t for i, t in enumerate(tails) if t}
        if (hit, boundaries) != (length, mine):
            yield "lookup", (hit, boundaries), (length, mine)
    else:
        yield from plan_differences(case, theirs, ours)


@functools.cache
def schema(group: int, rank: int) -> Any:
    from kvmask import VllmKeys

    return VllmKeys(model="model", tp_rank=rank, group_id=group)


def lookup_scheme(case: Case, coord: Any) -> Any:
    """What a lookup plan needs to know; the worker asks for all blocks that have digests."""
    from kvmask.plans import GroupScheme, Scheme

    groups = (
        GroupScheme(
            g,
            str(g),
            group.kind,
            group.block_size,
            cacheable=group.prefix_cacheable,
            namespaces=tuple(schema(g, rank).builder for rank in range(case.ranks[g])),
        )
        for g, group in enumerate(case.groups)
    )
    return Scheme(coord, tuple(groups), covers=False)


def plan_differences(
    case: Case, theirs: EngineCoordinator, ours: Any
) -> Iterator[tuple[str, Any, Any]]:
    """The worker's lookup against both strategies of the lookup plan."""
    from kvmask import BlockHashes
    from kvmask.plans import LookupPlan, drive

    hit, boundaries, asked = theirs.lookup()
    stored = theirs.store_keys()
    scheme = lookup_scheme(case, ours)
    for strategy in ("exact", "staged"):
        hashes = BlockHashes.from_list(theirs.hashes)
        plan = LookupPlan(scheme, hashes, case.num_tokens, strategy=strategy)
        mine = ScriptedStore(stored)
        found = drive(plan, mine)
        tails = {i: t for i, t in enumerate(found.tail_tokens) if t}
        pair = (hit, boundaries), (found.length, tails if boundaries is not None else None)
        if pair[0] != pair[1]:
            yield f"{strategy} lookup", *pair
        if strategy == "exact" and mine.asked != asked:
            yield "keys of an exact lookup", asked, mine.asked
        if strategy == "staged":
            if not set(mine.asked) <= set(asked):
                yield "keys that only staged asks", asked, set(mine.asked) - set(asked)
            if len(set(mine.asked)) != len(mine.asked):
                yield "keys that staged asks twice", len(set(mine.asked)), len(mine.asked)
        if plan.asked != len(mine.asked):
            yield f"asked count of {strategy}", len(mine.asked), plan.asked


def run_range(task: tuple[int, int, int, str]) -> list[tuple[int, str]]:
    seed, first, last, subject = task
    bad = []
    for i in range(first, last):
        case = random_case(seed, i)
        try:
            found = list(differences(case, subject))
        except Exception as e:
            e.add_note(f"in case {i} of seed {seed}: {case}")
            raise
        if found:
            lines = "\n".join(f"  {n}:\n    engine  {a}\n    subject {b}" for n, a, b in found)
            bad.append((i, f"{case}\n{lines}"))
    return bad


def run(
    cases: int, seed: int, subject: str, jobs: int = 1, first: int = 0
) -> list[tuple[int, str]]:
    """Runs the cases and returns those that differ."""
    step = 500
    last = first + cases
    tasks = [(seed, at, min(at + step, last), subject) for at in range(first, last, step)]
    engine()
    if jobs == 1:
        return [bad for task in tasks for bad in run_range(task)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return [bad for found in pool.imap(run_range, tasks) for bad in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--subject", choices=sorted(SUBJECTS), default="core")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    engine()
    began = time.monotonic()
    bad = run(args.cases, args.seed, args.subject, args.jobs, args.first)
    for i, text in bad[:5]:
        print(f"case {i}: {text}")
    print(
        f"{args.subject} against vLLM: seed {args.seed}, {args.cases} cases, "
        f"{len(bad)} differences, {time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
