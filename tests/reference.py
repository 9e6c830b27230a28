"""The rules of masks and hits again, in slow plain Python over lists of bool.

This is the oracle for the compiled core: each rule is stated by what a block is good for, not by
how bits are filled, so that a mistake is unlikely to be made twice. It is itself compared with the
real engine by `vllm_oracle.py`. Nothing here is fast, and nothing here imports the core.

Presence is one list of bool per group, over blocks, or over hash blocks when hits may end inside a
block (`partial_hits`); everything past the end of a list is absent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow

Mask = list[bool]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align_down(value: int, unit: int) -> int:
    return value // unit * unit


# --- what is worth storing -------------------------------------------------------------------


def replay_boundaries(num_prompt_tokens: int, alignment: int, eagle: bool) -> list[int]:
    """Token positions at which a later request with the same prompt can resume."""
    if not eagle:
        return [num_prompt_tokens - 1]
    # The same prompt again must compute its last token; a longer one need not. Either is cut to the
    # alignment and gives up one aligned unit to the drafter.
    return [
        max(0, align_down(limit, alignment) - alignment)
        for limit in (num_prompt_tokens - 1, num_prompt_tokens)
    ]


def window_need(group: Any, eagle: bool) -> int:
    """Blocks that a window needs left of a boundary, and the drafter's block right of it."""
    coverage = group.window + group.extra_retained_tokens
    return ceil_div(coverage - 1, group.block_size) + eagle


def window_mask(
    group: Any,
    eagle: bool,
    alignment: int,
    retention: int | None,
    boundaries: Sequence[int],
    start: int,
    stop: int,
) -> Mask | None:
    """A block counts when a run that ends at some boundary covers it."""
    size, need = group.block_size, window_need(group, eagle)
    if alignment % size:
        return None
    ends: set[int] = set()  # block indices just past a boundary
    if retention != 0:
        step = (alignment if retention is None else retention) // size
        if need >= step:
            return None
        ends.update(range(step, stop + step + 1, step))
    if retention is not None:
        ends.update(align_down(tokens, alignment) // size for tokens in boundaries)
    return [any(end + eagle - need <= i < end + eagle for end in ends) for i in range(start, stop)]


def state_mask(
    group: Any,
    eagle: bool,
    alignment: int,
    retention: int | None,
    boundaries: Sequence[int],
    start: int,
    stop: int,
) -> Mask | None:
    """A state counts when its block ends at a boundary. Drafters have no state layers."""
    size = group.block_size
    if retention is None:
        return None
    ends = {align_down(tokens, alignment) // size for tokens in boundaries}
    if retention:
        step = retention // size
        if step <= 1:
            return None
        ends.update(range(step, stop + step + 1, step))
    return [i + 1 in ends for i in range(start, stop)]


def dense_mask(*_: object) -> None:
    """Full and chunked local attention: every block counts."""


# --- what an engine holds itself --------------------------------------------------------------


def seen_by_all(group: Any, tokens: int) -> int:
    return 0


def seen_by_window(group: Any, tokens: int) -> int:
    return tokens - (group.window + group.extra_retained_tokens - 1)


def seen_by_chunk(group: Any, tokens: int) -> int:
    return tokens - tokens % group.chunk_size


def seen_by_state(group: Any, tokens: int) -> int:
    """A state stands for all before it; a longer hit needs another one."""
    return tokens


def held_blocks(group: Any, tokens: int, num_blocks: int) -> set[int]:
    """Of the first blocks of a group, those that an engine holds after a prefix hit of its own.

    It goes on at position ``tokens``: it has the blocks that lie wholly before and hold a token
    which that position can see.
    """
    size, first = group.block_size, SEEN[type(group)](group, tokens)
    return {i for i in range(min(tokens // size, num_blocks)) if (i + 1) * size > first}


# --- what can be reused ----------------------------------------------------------------------


@dataclass
class Presence:
    """Presence of a set of groups with one rule: a block is there when every group has it."""

    units: list[list[bool]]
    per_block: int

    def unit(self, i: int) -> bool:
        return all(i < len(units) and units[i] for units in self.units)

    def block(self, i: int) -> bool:
        return self.unit((i + 1) * self.per_block - 1)


@dataclass
class Search:
    """What all searches share. `unit` is the length that hits are multiples of."""

    hash_block: int
    unit: int
    partial: bool

    def fine(self, group: Any) -> bool:
        """Hits of this group may end inside a block."""
        return self.partial and group.block_size > self.hash_block


Found = tuple[int, Mask]


def find_full(search: Search, group: Any, there: Presence, limit: int, drop: bool) -> Found:
    size, unit = group.block_size, search.unit
    run = 0
    while (run + 1) * size <= limit and there.block(run):
        run += 1
    hit = run * size
    if search.fine(group):
        inside = [
            tokens
            for tokens in range(hit + unit, hit + size, unit)
            if tokens <= limit and there.unit(tokens // unit - 1)
        ]
        hit = max(inside, default=hit)
    if drop and hit:
        hit -= min(unit, size)
    hit = align_down(hit, unit)
    return hit, [True] * ceil_div(hit, size)


def find_window(search: Search, group: Any, there: Presence, limit: int, drop: bool) -> Found:
    size, unit = group.block_size, search.unit
    need = max(1, window_need(group, drop))

    def cut(blocks: int) -> int:
        while blocks * size % unit:
            blocks -= 1
        return blocks

    for last in reversed(range(limit // size)):
        if (last + 1 - drop) * size % unit:
            continue
        first = max(0, last + 1 - need)
        if not all(there.block(i) for i in range(first, last + 1)):
            continue
        blocks = last + 1
        if blocks - first < need:  # reaches back to the start of the request
            blocks = cut(blocks)
        if drop and blocks:
            blocks = cut(blocks - 1)
        return blocks * size, [i >= first for i in range(blocks)]
    return 0, []


def find_state(search: Search, group: Any, there: Presence, limit: int, drop: bool) -> Found:
    """One state is enough, and it gives up nothing to the drafter (`drop` has no effect)."""
    size, unit = group.block_size, search.unit
    step = unit if search.fine(group) else size
    for tokens in range(align_down(limit, step), 0, -step):
        present = (
            there.unit(tokens // unit - 1)
            if search.fine(group)
            else there.block(tokens // size - 1)
        )
        if tokens % unit == 0 and present:
            return tokens, [False] * (ceil_div(tokens, size) - 1) + [True]
    return 0, []


def find_chunked(search: Search, group: Any, there: Presence, limit: int, drop: bool) -> Found:
    """Chunks before the current one are not attended. The engine refuses EAGLE here, and every
    alignment but the block size; for others a hit that falls out of its chunk is searched again."""
    size, unit = group.block_size, search.unit
    while True:
        first = align_down(limit, group.chunk_size) // size
        blocks = first
        while (blocks + 1) * size <= limit and there.block(blocks):
            blocks += 1
        hit = align_down(blocks * size, unit)
        if unit == size or hit >= first * size:
            return hit, [i >= first for i in range(ceil_div(hit, size))]
        limit = hit


MASKS = {
    FullAttention: dense_mask,
    SlidingWindow: window_mask,
    ChunkedLocal: dense_mask,
    Mamba: state_mask,
}
SEARCHES = {
    FullAttention: find_full,
    SlidingWindow: find_window,
    ChunkedLocal: find_chunked,
    Mamba: find_state,
}
SEEN = {
    FullAttention: seen_by_all,
    SlidingWindow: seen_by_window,
    ChunkedLocal: seen_by_chunk,
    Mamba: seen_by_state,
}


@dataclass
class RuleSet:
    """Groups whose rules and specs agree: one search for all of them, EAGLE if any has it."""

    group: Any
    members: list[int]
    eagle: bool


def rule_of(group: Any) -> tuple[object, ...]:
    # vLLM 0.33 compares specs after it has folded the retained tokens into the window.
    rule = {
        item.name: getattr(group, item.name)
        for item in fields(group)
        if item.name not in ("prefix_cacheable", "eagle")
    }
    if "window" in rule:
        rule["window"] += rule.pop("extra_retained_tokens", 0)
    return type(group), *rule.values()


class ReferenceCoordinator:
    """The same constructor and methods as `kvmask.Coordinator`, over lists of bool."""

    def __init__(
        self,
        groups: Sequence[Any],
        hash_block_size: int,
        alignment: int | None = None,
        retention_interval: int | None = None,
        partial_hits: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.hash_block_size = hash_block_size
        cacheable = [g for g in self.groups if g.prefix_cacheable]
        self.alignment = alignment or math.lcm(*(g.block_size for g in cacheable))
        self.retention_interval = retention_interval
        self.partial_hits = partial_hits
        self.unit = hash_block_size if partial_hits else self.alignment
        sets: dict[tuple[object, ...], RuleSet] = {}
        for i, group in enumerate(self.groups):
            if group.prefix_cacheable:
                merged = sets.setdefault(rule_of(group), RuleSet(group, [], False))
                merged.members.append(i)
                merged.eagle |= group.eagle
        full = [s for s in sets.values() if isinstance(s.group, FullAttention)]
        self.sets = full + [s for s in sets.values() if s not in full]
        self.eagle = {i: s.eagle for s in self.sets for i in s.members}

    # masks

    def store_mask(
        self,
        num_tokens: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        states: bool = False,
    ) -> tuple[Mask | None, ...]:
        boundaries = (
            []
            if num_prompt_tokens is None
            else replay_boundaries(num_prompt_tokens, self.alignment, any(self.eagle.values()))
        )
        return self._masks(num_tokens, start_token, self.retention_interval, boundaries, states)

    def lookup_mask(self, num_tokens: int) -> tuple[Mask | None, ...]:
        return self._masks(num_tokens, 0, None, [], True)

    def _masks(
        self,
        num_tokens: int,
        start_token: int,
        retention: int | None,
        boundaries: list[int],
        states: bool,
    ) -> tuple[Mask | None, ...]:
        masks: list[Mask | None] = []
        for i, group in enumerate(self.groups):
            stop = num_tokens // group.block_size
            start = min(stop, ceil_div(start_token, group.block_size))
            if not group.prefix_cacheable or (isinstance(group, Mamba) and not states):
                masks.append([False] * (stop - start))
                continue
            masks.append(
                MASKS[type(group)](
                    group, self.eagle[i], self.alignment, retention, boundaries, start, stop
                )
            )
        return tuple(masks)

    # hits

    def load_mask(self, num_tokens: int) -> tuple[Mask, ...]:
        """Every block is there, and the drafter's block was given up when the hit was found."""
        units = num_tokens // self.hash_block_size + 1
        return self._search([[True] * units for _ in self.groups], num_tokens, eagle=False)[1]

    def find_hit(
        self, present: Sequence[Sequence[bool]], max_length: int
    ) -> tuple[int, tuple[Mask, ...], tuple[int, ...]]:
        lists = [list(units) for units in present]
        hit, masks = self._search(lists, max_length, eagle=True)
        return hit, masks, tuple(self._tail(i, lists[i], hit) for i in range(len(self.groups)))

    def lookup(
        self, present: Sequence[Sequence[bool]], num_tokens: int
    ) -> tuple[int, tuple[Mask, ...], tuple[int, ...]]:
        """The hit of a request of `num_tokens`, of which the last is always left to compute.

        The store is asked for blocks within the aligned request only, so the block that a drafter
        would give up is not found past its end.
        """
        asked = align_down(num_tokens, self.unit)
        lists = []
        for group, units, mask in zip(self.groups, present, self.lookup_mask(asked), strict=True):
            size = self.hash_block_size if self.partial_hits else group.block_size
            lists.append(
                [
                    there and (self.partial_hits or mask is None or mask[i])
                    for i, there in enumerate(units[: asked // size])
                ]
            )
        found = self.find_hit(lists, asked)
        if found[0] >= num_tokens > 0:
            found = self.find_hit(lists, align_down(num_tokens - 1, self.unit))
        return found

    def _search(
        self, present: list[list[bool]], limit: int, eagle: bool
    ) -> tuple[int, tuple[Mask, ...]]:
        search = Search(self.hash_block_size, self.unit, self.partial_hits)
        found: list[Found | None] = [None] * len(self.sets)

        def look(i: int, limit: int, drop: bool) -> int:
            rules = self.sets[i]
            per_block = rules.group.block_size // self.hash_block_size if self.partial_hits else 1
            there = Presence([present[m] for m in rules.members], per_block)
            result = SEARCHES[type(rules.group)](search, rules.group, there, limit, drop)
            found[i] = result
            return result[0]

        if len(self.sets) == 1:
            hit = look(0, limit, eagle and self.sets[0].eagle)
        else:
            hit = self._converge(look, found, limit, eagle, search)
            for i, rules in enumerate(self.sets):
                if isinstance(rules.group, FullAttention):
                    mask = found[i][1]  # type: ignore[index]
                    found[i] = hit, mask[: ceil_div(hit, rules.group.block_size)]
        masks: list[Mask] = [[] for _ in self.groups]
        for rules, result in zip(self.sets, found, strict=True):
            for member in rules.members:
                masks[member] = list(result[1])  # type: ignore[index]
        return hit, tuple(masks)

    def _converge(self, look, found, limit, eagle, search):  # type: ignore[no-untyped-def]
        """Each set may only shorten the hit; again until no set does."""
        first_is_full = isinstance(self.sets[0].group, FullAttention)
        dropped: set[int] = set()  # sets that gave up their block at the length at hand
        hit = limit
        while True:
            current = hit
            for i, rules in enumerate(self.sets):
                if isinstance(rules.group, FullAttention) and found[i] is not None:
                    # A shorter prefix of a run is a run: no second search, no second drop.
                    current = min(current, found[i][0])
                    continue
                drop = eagle and rules.eagle and i not in dropped
                # The block that is given up may lie past the hit. States give up none.
                margin = 0
                if drop and isinstance(rules.group, FullAttention) and search.fine(rules.group):
                    margin = self.hash_block_size
                elif drop and not isinstance(rules.group, Mamba):
                    margin = rules.group.block_size
                result = look(i, current + margin, drop)
                if drop:
                    dropped.add(i)
                elif result < current:
                    dropped.clear()
                current = result
            if current >= hit:
                return hit
            hit = current
            if first_is_full and len(self.sets) == 2:
                return hit  # the second set is the last word: the first is a run

    def _tail(self, i: int, units: list[bool], hit: int) -> int:
        """The boundary whose digest keys the block in which the hit ends."""
        group = self.groups[i]
        if not group.prefix_cacheable or not hit or not self.partial_hits:
            return hit if group.prefix_cacheable else 0
        step = self.hash_block_size
        for tokens in range(hit, ceil_div(hit, group.block_size) * group.block_size + 1, step):
            if tokens // step <= len(units) and units[tokens // step - 1]:
                return tokens
        return hit
