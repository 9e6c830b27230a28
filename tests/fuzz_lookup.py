"""Random lookups: staged, exact and the reference must agree, over any store.

`test_lookup.py` runs some thousands of these cases; as a script this runs until a time is over:

    python tests/fuzz_lookup.py --seconds 60 --seed 1

It prints the number of cases. A case is named by its seed and index: `--seed 1 --index 42` runs
one alone and prints it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from reference import ReferenceCoordinator, align_down, window_need

from kvmask import (
    ChunkedLocal,
    Coordinator,
    CostModel,
    FullAttention,
    LookupPlan,
    Mamba,
    SlidingWindow,
    VllmKeys,
)

WORD_EDGES = (63, 64, 65, 127, 128, 129)
# Calls beyond those of a growing run and a doubling search over boundaries (see `bound`).
SPARE_CALLS = 4


@dataclass(frozen=True)
class Case:
    """A coordinator, what a store holds, and a request."""

    groups: tuple[Any, ...]
    hash_block: int
    alignment: int | None
    partial: bool
    num_tokens: int
    num_hashes: int
    present: tuple[tuple[tuple[bool, ...], ...], ...]  # per group, per rank namespace, per entry
    local_tokens: int
    local_windows: bool
    hint: int
    costs: CostModel

    @property
    def args(self) -> tuple[Any, ...]:
        return list(self.groups), self.hash_block, self.alignment, None, self.partial

    @property
    def common(self) -> int:
        cacheable = [g.block_size for g in self.groups if g.prefix_cacheable]
        return self.alignment or math.lcm(*cacheable)

    @property
    def unit(self) -> int:
        return self.hash_block if self.partial else self.common

    def scale(self, group: Any) -> int:
        """Hash blocks per entry of a presence list."""
        return 1 if self.partial else group.block_size // self.hash_block


def random_group(rng: random.Random, hash_block: int) -> Any:
    size = hash_block * rng.choice((1, 1, 2, 3, 4, 6))
    common: dict[str, Any] = {"spec": rng.choice((None, None, "x"))}
    if rng.random() < 0.08:
        return FullAttention(rng.randint(1, 40), prefix_cacheable=False)
    kind = rng.choice((FullAttention, FullAttention, SlidingWindow, SlidingWindow, Mamba, None))
    if kind is None:
        return ChunkedLocal(size, chunk_size=rng.randint(1, 9 * size), **common)
    common["eagle"] = rng.random() < 0.25
    if kind is SlidingWindow:
        window = max(1, rng.choice((0, 1, 1, 2, 3, 7)) * size + rng.randint(-1, 2))
        return SlidingWindow(
            size, window=window, extra_retained_tokens=rng.choice((0, 0, 0, 1, size)), **common
        )
    return kind(size, **common)


def random_units(rng: random.Random, n: int) -> tuple[bool, ...]:
    kind = rng.random()
    if kind < 0.3:
        return (True,) * n
    if kind < 0.4:
        return (False,) * n
    if kind < 0.55:
        stop = rng.randint(0, n)
        return tuple(i < stop for i in range(n))
    density = rng.choice((0.3, 0.6, 0.9, 0.97))
    return tuple(rng.random() < density for _ in range(n))


def random_case(seed: int, index: int) -> Case:
    rng = random.Random(f"{seed}/{index}")
    hash_block = rng.choice((1, 2, 4, 5))
    groups = [random_group(rng, hash_block) for _ in range(rng.randint(1, 5))]
    if len(groups) > 1 and rng.random() < 0.3:  # equal specs are searched as one set
        twin = groups[0]
        flag = rng.random() < 0.5 and not isinstance(twin, ChunkedLocal)
        groups[-1] = replace(twin, eagle=flag)
    if not any(g.prefix_cacheable for g in groups):
        groups[0] = FullAttention(hash_block)
    common = math.lcm(*(g.block_size for g in groups if g.prefix_cacheable))
    alignment = rng.choice((None, None, None, common, 2 * common))
    partial = rng.random() < 0.35
    if rng.random() < 0.15:
        num_hashes = rng.choice(WORD_EDGES)
    else:
        num_hashes = rng.randint(0, rng.choice((8, 30, 60)))
    num_tokens = num_hashes * hash_block + rng.choice((0, 0, 0, 1, -1, common, -common))
    num_tokens = max(0, num_tokens)
    present = []
    full = rng.random() < 0.15
    for g in groups:
        entry = hash_block if partial else max(g.block_size, 1)
        n = num_hashes * hash_block // entry
        ranks = rng.choice((1, 1, 1, 2, 3))
        units = random_units(rng, n)
        rows = [(True,) * n if full or rng.random() < 0.5 else units for _ in range(ranks)]
        if not full and rng.random() < 0.3:
            rows[-1] = random_units(rng, n)
        present.append(tuple(rows))
    near = align_down(rng.randint(0, num_tokens + common), common)
    costs = CostModel(
        call=rng.choice((1.0, 2.0, 5.0, 430.0)), missing=1.0, miss_rate=rng.choice((0, 0.1, 1.0))
    )
    return Case(
        groups=tuple(groups),
        hash_block=hash_block,
        alignment=alignment,
        partial=partial,
        num_tokens=num_tokens,
        num_hashes=num_hashes,
        present=tuple(present),
        local_tokens=rng.choice((0, 0, near, near + rng.randint(0, common), 1 << 32)),
        local_windows=rng.random() < 0.5,
        hint=rng.choice((0, near, near, rng.randint(0, num_tokens), 1 << 32)),
        costs=costs,
    )


def digests(n: int) -> list[bytes]:
    return [b"%08x" % i for i in range(n)]


def schemas(case: Case) -> list[list[VllmKeys]]:
    return [
        [VllmKeys("m", tp_rank=r, group_id=g) for r in range(len(rows))]
        for g, rows in enumerate(case.present)
    ]


def contents(case: Case) -> set[str]:
    """Keys that the store holds."""
    held: set[str] = set()
    for g, (group, rows) in enumerate(zip(case.groups, case.present, strict=True)):
        if not group.prefix_cacheable:
            continue
        scale = case.scale(group)
        for names, units in zip(schemas(case)[g], rows, strict=True):
            held.update(
                f"{names.prefix}@{(b'%08x' % ((i + 1) * scale - 1)).hex()}"
                for i, there in enumerate(units)
                if there
            )
    return held


def expected(case: Case) -> tuple[int, list[list[bool]], tuple[int, ...]]:
    """The reference's lookup, with what the engine holds itself counted as present."""
    nothing = 0, [[] for _ in case.groups], (0,) * len(case.groups)
    asked = align_down(case.num_tokens, case.unit)
    if not asked or not case.num_hashes:
        return nothing
    coord = ReferenceCoordinator(*case.args)
    lists = []
    for group, rows, mask in zip(case.groups, case.present, coord.lookup_mask(asked), strict=True):
        if not group.prefix_cacheable:
            lists.append([])
            continue
        size = case.hash_block if case.partial else group.block_size
        per_block = group.block_size // size
        n = min(asked // size, len(rows[0]))
        units = [
            all(row[i] for row in rows) and (case.partial or mask is None or mask[i])
            for i in range(n)
        ]
        stop = case.local_tokens // group.block_size
        local = range(0)
        if isinstance(group, FullAttention):
            local = range(min(stop, n))
        elif isinstance(group, SlidingWindow) and case.local_windows:
            local = range(min(n, max(0, stop - window_need(group, False))), min(stop, n))
        for block in local:
            if (block + 1) * per_block - 1 < n:
                units[(block + 1) * per_block - 1] = True
        lists.append(units)
    hit, masks, tails = coord.find_hit(lists, asked)
    if hit >= case.num_tokens:
        hit, masks, tails = coord.find_hit(lists, align_down(case.num_tokens - 1, case.unit))
    if case.local_tokens and hit <= case.local_tokens:
        return nothing
    return hit, [list(m) for m in masks], tails


def drive(plan: LookupPlan, held: set[str]) -> list[list[str]]:
    """Answer a plan from a set of keys; the batches it asked."""
    batches = []
    while keys := plan.next_keys():
        batches.append(keys)
        plan.feed([int(key in held) for key in keys])
        assert len(batches) < 500
    return batches


def bound(case: Case) -> int:
    """Calls that a staged lookup may take.

    A growing run finds the end of a full-attention group of n blocks in 1 + log4(n / first batch)
    calls; boundaries are tried in doubling numbers, 1 + log2(boundaries) calls; each cacheable
    group may send the search back once; a few to spare for a hint and for tails inside a block.
    """
    boundaries = max(2, case.num_tokens // case.hash_block)
    run = 1 + math.ceil(math.log(max(1, case.num_hashes / case.costs.first_batch), 4))
    groups = sum(g.prefix_cacheable for g in case.groups)
    return run + 1 + math.ceil(math.log2(boundaries)) + groups + SPARE_CALLS


def result(plan: LookupPlan) -> tuple[int, list[list[bool]], tuple[int, ...]]:
    hit = plan.hit
    return hit.length, [list(m) for m in hit.masks], hit.tail_tokens


def check(case: Case) -> int:
    """Everything that holds for every case; the calls that staged took."""
    coord = Coordinator(*case.args)
    names = schemas(case)
    held = contents(case)
    hashes = digests(case.num_hashes)
    wanted = expected(case)

    def plan(strategy: str, hint: int) -> LookupPlan:
        return LookupPlan(
            coord,
            names,
            hashes,
            case.num_tokens,
            case.local_tokens,
            strategy,
            local_windows=case.local_windows,
            hint=hint,
            costs=case.costs,
        )

    exact = plan("exact", 0)
    batches = drive(exact, held)
    assert result(exact) == wanted, ("exact", result(exact), wanted)
    assert len(batches) <= 1
    all_keys = [key for batch in batches for key in batch]
    allowed = set(all_keys)
    assert len(allowed) == len(all_keys), "exact asks a key twice"
    if not case.local_tokens:
        assert exact.candidates == len(all_keys)
    for group, rows, row_names in zip(case.groups, case.present, names, strict=True):
        if isinstance(group, FullAttention) and group.prefix_cacheable and not case.partial:
            first = case.local_tokens // group.block_size
            scale = case.scale(group)
            for i in range(min(first, len(rows[0]))):
                digest = (b"%08x" % ((i + 1) * scale - 1)).hex()
                assert all(f"{n.prefix}@{digest}" not in allowed for n in row_names)
    calls = 0
    limit = bound(case)
    for hint in {0, case.hint}:
        staged = plan("staged", hint)
        batches = drive(staged, held)
        assert result(staged) == wanted, (f"staged, hint {hint}", result(staged), wanted)
        keys = [key for batch in batches for key in batch]
        assert len(set(keys)) == len(keys), "staged asks a key twice"
        assert set(keys) <= allowed, sorted(set(keys) - allowed)[:3]
        assert staged.asked == len(keys)
        assert staged.probes == len(batches)
        assert staged.hit.present == sum(key in held for key in keys)
        assert len(batches) <= min(limit, len(keys)), (hint, len(batches), limit)
        calls = max(calls, len(batches))
    return calls


def run(seconds: float, seed: int, start: int = 0, count: int | None = None) -> tuple[int, int]:
    """(cases without a difference, most calls of one lookup)."""
    stop = time.monotonic() + seconds
    index, most = start, 0
    while time.monotonic() < stop and (count is None or index < start + count):
        case = random_case(seed, index)
        try:
            most = max(most, check(case))
        except Exception as error:
            raise AssertionError(f"seed {seed}, index {index}: {error!r}\n{case}") from error
        index += 1
    return index - start, most


def main() -> None:
    parser = argparse.ArgumentParser(description="Random lookups against the reference.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index", type=int)
    options = parser.parse_args()
    if options.index is not None:
        case = random_case(options.seed, options.index)
        print(case)
        print("calls:", check(case))
        return
    cases, most = run(options.seconds, options.seed)
    print(f"{cases} cases without a difference, seed {options.seed}, at most {most} calls")


if __name__ == "__main__":
    main()
