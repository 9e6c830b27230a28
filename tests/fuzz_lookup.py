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

import reference
from reference import ReferenceCoordinator, align_down
from rig import ask, scheme_of

from kvmask import (
    Bitset,
    ChunkedLocal,
    Coordinator,
    CostModel,
    FullAttention,
    HitHints,
    LookupPlan,
    Mamba,
    PlanTools,
    SlidingWindow,
    VllmKeys,
)
from kvmask.plans import Held

WORD_EDGES = (63, 64, 65, 127, 128, 129)
# A prefix hit of its own: of all groups; of full attention alone; any blocks of any group.
HELD = ("prefix", "full", "blocks")
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
    held: str  # one of HELD: how the engine says what it holds
    blocks: tuple[tuple[bool, ...], ...]  # per group, when it says it block by block
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
    local_tokens = rng.choice((0, 0, near, near + rng.randint(0, common), 1 << 32))
    held = "prefix" if rng.random() < 0.5 else "full"
    hint = rng.choice((0, near, near, rng.randint(0, num_tokens), 1 << 32))
    blocks: list[tuple[bool, ...]] = []
    if rng.random() < 0.3:
        held = "blocks"
        blocks = [random_units(rng, num_hashes * hash_block // g.block_size) for g in groups]
    return Case(
        groups=tuple(groups),
        hash_block=hash_block,
        alignment=alignment,
        partial=partial,
        num_tokens=num_tokens,
        num_hashes=num_hashes,
        present=tuple(present),
        local_tokens=local_tokens,
        held=held,
        blocks=tuple(blocks),
        hint=hint,
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


def held_blocks(case: Case, g: int) -> set[int]:
    """Blocks of a group that the engine holds itself."""
    group = case.groups[g]
    if case.held == "blocks":
        return {i for i, there in enumerate(case.blocks[g]) if there}
    if case.held == "full" and not isinstance(group, FullAttention):
        return set()
    return reference.held_blocks(group, case.local_tokens, len(case.present[g][0]) + 1)


def held_argument(case: Case) -> tuple[Any, int]:
    """What a plan is told of that, and the length that a hit must pass to be of use."""
    if case.held == "prefix":
        return case.local_tokens, case.local_tokens
    if case.held == "full":
        tokens = tuple(
            case.local_tokens if isinstance(g, FullAttention) else 0 for g in case.groups
        )
        return Held(tokens, case.local_tokens), case.local_tokens
    bits = tuple(Bitset(row) for row in case.blocks)
    # Blocks say nothing of a hit of the engine's own here: that is tested by itself.
    return Held(bits, 0), 0


def expected(case: Case) -> tuple[int, list[list[bool]], tuple[int, ...]]:
    """The reference's lookup, with what the engine holds itself counted as present."""
    nothing = 0, [[] for _ in case.groups], (0,) * len(case.groups)
    asked = align_down(case.num_tokens, case.unit)
    if not asked or not case.num_hashes:
        return nothing
    coord = ReferenceCoordinator(*case.args)
    lists = []
    masks = coord.lookup_mask(asked)
    for g, (group, rows, mask) in enumerate(zip(case.groups, case.present, masks, strict=True)):
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
        for block in held_blocks(case, g):
            if (block + 1) * per_block - 1 < n:
                units[(block + 1) * per_block - 1] = True
        lists.append(units)
    hit, masks, tails = coord.find_hit(lists, asked)
    if hit >= case.num_tokens:
        hit, masks, tails = coord.find_hit(lists, align_down(case.num_tokens - 1, case.unit))
    local = held_argument(case)[1]
    if local and hit <= local:
        return nothing
    return hit, [list(m) for m in masks], tails


class OneHint(HitHints):
    """Predicts one length, whatever was learned."""

    tokens: int

    def __new__(cls, tokens: int) -> OneHint:
        made = super().__new__(cls, 1)
        made.tokens = tokens
        return made

    def predict(self, *_: Any) -> int:
        return self.tokens

    def learn(self, *_: Any) -> None:
        pass


def drive(plan: LookupPlan, held: set[str]) -> list[list[str]]:
    """Answer a plan from a set of keys; the batches it asked."""
    batches = ask(plan, held)
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
    hit = plan.result
    return hit.length, [list(m) for m in hit.masks], hit.tail_tokens


def check(case: Case) -> int:
    """Everything that holds for every case; the calls that staged took."""
    names = schemas(case)
    held = contents(case)
    hashes = digests(case.num_hashes)
    wanted = expected(case)
    # Digests may end before the tokens do, as an engine's adapter is free to have it.
    scheme = scheme_of(Coordinator(*case.args), schemas=names, covers=False)

    def plan(strategy: str, hint: int) -> LookupPlan:
        return LookupPlan(
            scheme,
            hashes,
            case.num_tokens,
            held=held_argument(case)[0],
            strategy=strategy,
            tools=PlanTools(costs=case.costs, hints=OneHint(hint) if hint else None),
        )

    exact = plan("exact", 0)
    batches = drive(exact, held)
    assert result(exact) == wanted, ("exact", result(exact), wanted)
    assert len(batches) <= 1
    all_keys = [key for batch in batches for key in batch]
    allowed = set(all_keys)
    assert len(allowed) == len(all_keys), "exact asks a key twice"
    if case.held != "blocks" and not case.local_tokens:
        assert exact.exact_keys == len(all_keys)
    for g, (group, row_names) in enumerate(zip(case.groups, names, strict=True)):
        if group.prefix_cacheable:
            scale = group.block_size // case.hash_block
            for i in held_blocks(case, g):
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
        assert staged.result.present == sum(key in held for key in keys)
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
