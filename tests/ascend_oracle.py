"""Random comparison of AscendStore's own worker with and without kvmask.

    python tests/ascend_oracle.py --cases 100000 --seed 1 [--first N]

Prints the number of cases, how many differ and the first few of those; the exit status is 0 only
without one. Case `i` of a seed is always the same (`--first i --cases 1`). The environment variable
KVMASK_ASCEND_VERSION chooses the release.

Compared are the scheduler's lookup (its hit, staged and exact, and that every key asked is one that
stock asks, in its order for exact), store, lookup and load masks, the keys of a request with their
digests and block ids, and descriptors.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: the package may not be installed
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import ascend_world
from ascend_cases import Case, random_case

#: What happened, for the summary: a comparison of stock with stock proves nothing.
counts: Counter[str] = Counter()


@functools.cache
def digest(i: int) -> bytes:
    return bytes([i % 251, i >> 8, 0xA5, i & 0xFF])


@functools.cache
def adapter() -> Any:
    ascend_world.modules()
    from kvmask.ascend import database, lookup, masks, releases, said

    class Space:
        pass

    space: Any = Space()
    space.database, space.lookup, space.masks = database, lookup, masks
    space.stock = releases.seams.stock
    space.release, space.said = releases.current(), said.times
    return space


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A result, or the kind of exception that was raised."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error).__mro__[-3].__name__ if len(type(error).__mro__) > 2 else "Exception"


def listed(function: Any, *args: Any) -> list[Any]:
    """All that an iterator gives."""
    return list(function(*args))


def is_part(part: list[str], whole: list[str]) -> bool:
    """Whether a list is another one with some items left out."""
    rest = iter(whole)
    return all(item in rest for item in part)


class Everything:
    """A store that has every key, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def exists(self, keys: list[str]) -> list[int]:
        self.asked += keys
        return [1] * len(keys)


def ask_all(worker: Any, case: Case, hashes: list[Any]) -> list[str]:
    """Every key that stock can ask for."""
    kept, worker.m_store = worker.m_store, Everything()
    stock = adapter().stock("worker.lookup_scheduler")
    stock(worker, case.num_tokens, list(hashes), list(case.ids), False, hbm_hit_tokens=0)
    asked: list[str] = worker.m_store.asked
    worker.m_store = kept
    return asked


def is_state(case: Case, key: str) -> bool:
    """Whether a key is one of a group of recurrent states."""
    group = int(key.partition("@group:")[2].partition("@")[0])
    return bool(case.groups[group]["kind"] == "state")


def lookup_differences(case: Case, worker: Any, hashes: list[Any]) -> Iterator[str]:
    a = adapter()
    rng = random.Random(case.seed)
    unit = worker.token_database.hash_block_size
    share = []
    for group, bits in enumerate(case.present):
        scale = max(1, ascend_world.block_tokens(worker, group) // unit)
        share.append(lambda i, bits=bits, s=scale: bits[min((i + 1) * s, len(bits)) - 1])
    keys = ascend_world.fill_store(worker, rng, hashes, share)

    def ask(function: Any, fails: int | None) -> tuple[Any, list[str]]:
        worker.m_store = ascend_world.ScriptedStore(keys, fails)
        hit = function(
            worker, case.num_tokens, list(hashes), list(case.ids), False, hbm_hit_tokens=case.held
        )
        return hit, worker.m_store.asked

    hit, asked = ask(a.stock("worker.lookup_scheduler"), None)
    if case.fails is not None:
        found, _ = ask(a.lookup.lookup_scheduler, case.fails)
        if found not in (0, hit):
            yield f"a lookup of a failing store: {hit} and {found}"
    for strategy in ("exact", "staged", "staged"):  # the second one has a hint
        a.lookup.set_default(strategy)
        found, mine = ask(a.lookup.lookup_scheduler, None)
        if found != hit:
            yield f"{strategy} hit: {hit} and {found}"
        more = set(mine) - set(asked)
        if more and worker.cache_coordinator is None:
            more -= set(ask_all(worker, case, hashes))  # stock ends at a group without any hit
        if more and strategy == "exact" and case.worker["retention"] is not None:
            more = {key for key in more if not is_state(case, key)}  # stock leaves some out
        if more or len(set(mine)) < len(mine):
            yield f"{strategy} asks {len(more)} keys that stock does not"
        if strategy == "exact" and worker.cache_coordinator is not None:
            ordered = sorted(case.ids) == list(case.ids) and case.worker["retention"] is None
            if ordered and not is_part(mine, asked):
                yield "exact asks in another order"
            plain = case.num_tokens % worker.cache_coordinator.lcm_block_size == 0
            plain = plain and ordered
            plain = plain and not case.worker["eagle"] and not any(g["eagle"] for g in case.groups)
            plain = plain and case.worker["retention"] is None and "families" not in case.worker
            if plain and mine != asked and not a.said:
                yield f"exact asks {len(mine)} keys, stock {len(asked)}"
    counts["lookups that stay stock" if a.said else "lookups"] += 1
    if hit:
        counts["hits"] += 1


def mask_differences(case: Case, worker: Any, hashes: list[Any]) -> Iterator[str]:
    a, coord = adapter(), worker.cache_coordinator
    if coord is None:
        return
    said = a.said.total()
    tokens = case.aligned_tokens
    for name, args in (
        ("store_mask", (tokens, case.num_prompt_tokens)),
        ("lookup_mask", (tokens,)),
        ("load_mask", (hashes, case.num_tokens)),
    ):
        stock = outcome(a.stock("coordinator." + name), coord, *args)
        mine = outcome(getattr(a.masks, name), coord, *args)
        if stock != mine or type(stock) is not type(mine):
            yield f"{name}{args if name != 'load_mask' else args[1:]}: {stock} and {mine}"
    counts["masks" if a.said.total() == said else "masks that stay stock"] += 1


def key_differences(case: Case, worker: Any, hashes: list[Any]) -> Iterator[str]:
    a, db = adapter(), worker.token_database
    rng = random.Random(case.seed)
    for group in range(worker.num_kv_cache_groups):
        keep = None if not case.every else (lambda start: start // 2 % (case.every + 1) > 0)
        args = (case.num_tokens, hashes, case.mask_num, group, keep)
        stock = outcome(listed, a.stock("database.key_strings"), db, *args)
        mine = outcome(listed, a.database.key_strings, db, *args)
        if stock != mine:
            yield f"keys of group {group}: {stock[:3]} and {mine[:3]}"
        size = ascend_world.block_tokens(worker, group)
        table = [
            rng.choice((0, 1, 5, 9)) for _ in range(case.num_tokens // size + rng.randint(-1, 1))
        ]
        rank, shards = case.shard
        args = (case.num_tokens, hashes, table, case.mask_num, group, case.skip_null, keep, rank)
        theirs = a.stock("database.key_strings_with_ids")
        stock = outcome(listed, theirs, db, *args, shards)
        mine = outcome(listed, a.database.key_strings_with_ids, db, *args, shards)
        if stock != mine:
            yield f"keys with ids of group {group}: {stock[:3]} and {mine[:3]}"
        if not any(what == "keys" for what, _ in a.said):
            counts["keys"] += len(stock) if isinstance(stock, list) else 0


def descriptor_differences(case: Case, worker: Any) -> Iterator[str]:
    a, db = adapter(), worker.token_database
    rng = random.Random(case.seed)
    regions = rng.randint(1, 7)
    lengths = [rng.choice((1, 7, 96, 4096, 4608)) for _ in range(rng.randint(1, regions))]
    strides = [n + rng.choice((0, 0, 64)) for n in lengths] if rng.random() < 0.5 else None
    groups = range(worker.num_kv_cache_groups)
    db.set_group_buffers(
        {g: [(g + 1) << 40 | r << 32 for r in range(regions)] for g in groups},
        dict.fromkeys(groups, lengths),
        None if strides is None else dict.fromkeys(groups, strides),
    )
    for _ in range(4):
        group = rng.choice(groups)
        size = db.get_block_size(group)
        start = rng.randint(0, 5) * size
        end = start + rng.choice((size, size, rng.randint(1, size)))
        table = [rng.randint(0, 99) for _ in range(4)]
        role = rng.choice(("kv", "kv", "kv", "state"))
        block = rng.choice((None, None, 3))
        args = (start, end, table, group, role, block)
        stock = outcome(a.stock("database.prepare_value"), db, *args)
        for _ in range(2):  # the second time from what is kept
            mine = outcome(a.database.prepare_value, db, *args)
            if stock != mine:
                yield f"descriptors of {args}: {stock} and {mine}"
        counts["descriptors" if role == "kv" else "descriptors that stay stock"] += 1


def differences(case: Case) -> Iterator[str]:
    """Everything that differs in a case."""
    try:
        worker = ascend_world.make_worker(list(case.groups), **case.worker)
    except (AssertionError, ValueError, NotImplementedError):
        counts["refused by AscendStore"] += 1
        return
    said = adapter().said
    said.clear()
    digests = [digest(i) for i in range(case.hashes)]
    hashes: list[Any] = [d.hex() for d in digests] if case.text else digests
    yield from lookup_differences(case, worker, hashes)
    yield from mask_differences(case, worker, hashes)
    yield from key_differences(case, worker, hashes)
    yield from descriptor_differences(case, worker)
    for what, why in said:
        counts[f"  stock's {what}: {why}"] += 1


def run(cases: int, seed: int, first: int = 0, seconds: float | None = None) -> list[str]:
    """The differences of a range of cases; a time limit ends it early."""
    bad = []
    stop = None if seconds is None else time.monotonic() + seconds
    for i in range(first, first + cases):
        case = random_case(seed, i)
        bad += [f"case {i}: {text}" for text in differences(case)]
        counts["cases"] += 1
        if stop is not None and time.monotonic() > stop:
            break
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    adapter()
    began = time.monotonic()
    bad = run(args.cases, args.seed, args.first)
    for text in bad[:8]:
        print(text[:600])
    print(
        f"vllm-ascend {ascend_world.VERSION}: seed {args.seed}, {counts['cases']} cases, "
        f"{len(bad)} differences, {time.monotonic() - began:.0f} s"
    )
    print(", ".join(f"{name.strip()} {n}" for name, n in sorted(counts.items())))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
