"""Random cases for `vllm_oracle.py`: groups, a coordinator's arguments, a request, a store.

One to five groups of all kinds (EAGLE, groups that merge, groups that differ in their tensors only,
rings that are not prefix-cacheable), an alignment, a retention interval, maybe hits inside blocks,
a presence with holes, and lengths near the edges of all of these.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow

WORD_EDGES = (63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """One configuration, one request and one state of the store."""

    groups: tuple[Any, ...]
    hash_block_size: int
    alignment: int | None
    retention: int | None
    partial: bool
    hash_blocks: int
    present: tuple[tuple[bool, ...], ...]
    num_tokens: int  # of the request: need not be aligned
    max_length: int
    load_tokens: int
    store_tokens: int
    start_token: int
    num_prompt_tokens: int | None
    ranks: tuple[int, ...]
    """How many rank namespaces hold each group's blocks."""

    @property
    def coordinator_args(self) -> tuple[Any, ...]:
        return self.groups, self.hash_block_size, self.alignment, self.retention, self.partial

    @property
    def effective_alignment(self) -> int:
        sizes = [g.block_size for g in self.groups if g.prefix_cacheable]
        return self.alignment or math.lcm(*sizes)

    @property
    def unit(self) -> int:
        return self.hash_block_size if self.partial else self.effective_alignment

    def per_block(self, group: int) -> int:
        """Digests per entry of `present` in this group."""
        return 1 if self.partial else self.groups[group].block_size // self.hash_block_size


def near(rng: random.Random, unit: int, high: int) -> int:
    """A length in [0, high], most often on or beside a multiple of `unit`."""
    if rng.random() < 0.2:
        return rng.randint(0, high)
    value = rng.randint(0, high // unit) * unit + rng.choice((0, 0, -1, 1))
    return min(max(value, 0), high)


def random_window(rng: random.Random, size: int) -> int:
    """Windows beside whole numbers of blocks, one token included."""
    return max(1, rng.choice((0, 1, 1, 2, 2, 3, 4, 7, 9)) * size + rng.choice((-1, 0, 1, 1, 2)))


def random_groups(rng: random.Random, hash_block: int, partial: bool) -> list[Any]:
    scales = rng.choice(((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 3), (2, 3, 4), (6,)))
    eagle_rate = rng.choice((0, 0, 0.5, 1))
    chunked = rng.random() < 0.2
    groups: list[Any] = []
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))):
        if groups and rng.random() < 0.25:
            twin, eagle = rng.choice(groups), rng.random() < eagle_rate
            groups.append(replace(twin, eagle=eagle and not isinstance(twin, ChunkedLocal)))
            if rng.random() < 0.2:
                groups[-1] = replace(groups[-1], spec=rng.randint(1, 2))
            continue
        size = hash_block * rng.choice(scales)
        eagle = rng.random() < eagle_rate
        kind = rng.choice(("FFFWWMMM" if partial else "FFFWWWWM") + "C" * 3 * chunked)
        if kind == "F":
            groups.append(FullAttention(block_size=size, eagle=eagle))
        elif kind == "W":
            window = random_window(rng, size)
            groups.append(SlidingWindow(block_size=size, window=window, eagle=eagle))
        elif kind == "M":
            groups.append(Mamba(block_size=size, eagle=eagle))
        else:
            # The engine asks for block size == alignment of hits, so the sizes of the others must
            # divide it (settled below).
            chunk = rng.choice((1, 2, 3, 5)) * hash_block * max(scales) + rng.choice((0, 0, 1))
            groups.append(ChunkedLocal(block_size=size, chunk_size=chunk))
    if any(isinstance(g, ChunkedLocal) for g in groups):
        size = hash_block if partial else math.lcm(*(g.block_size for g in groups))
        groups = [replace(g, block_size=size) if isinstance(g, ChunkedLocal) else g for g in groups]
    for i in range(len(groups)):
        if len(groups) > 1 and rng.random() < 0.06:
            ring = FullAttention(block_size=rng.randint(1, 9), prefix_cacheable=False)
            others = groups[:i] + groups[i + 1 :]
            if any(g.prefix_cacheable for g in others):
                groups[i] = ring
    return groups


def random_units(rng: random.Random, n: int) -> list[bool]:
    """Presence of n blocks: all, none, a prefix, or holes; sometimes a list that ends early."""
    kind = rng.random()
    if kind < 0.2:
        units = [True] * n
    elif kind < 0.25:
        units = [False] * n
    elif kind < 0.45:
        units = [i < (n and rng.randrange(n + 1)) for i in range(n)]
    else:
        density = rng.choice((0.3, 0.6, 0.9, 0.97))
        units = [rng.random() < density for _ in range(n)]
    if rng.random() < 0.1:
        del units[rng.randint(0, n) :]
    return units


def random_case(seed: int, index: int) -> Case:
    rng = random.Random(f"{seed}/{index}")
    hash_block = rng.choice((1, 2, 4, 5, 16))
    partial = rng.random() < 0.35
    groups = random_groups(rng, hash_block, partial)
    cacheable = [g.block_size for g in groups if g.prefix_cacheable]
    alignment = math.lcm(*cacheable)
    given: int | None = None
    if not any(isinstance(g, ChunkedLocal) for g in groups):
        given = rng.choice((None, None, alignment, alignment * rng.choice((2, 3))))
        alignment = given or alignment
    if rng.random() < 0.15:
        hash_blocks = rng.choice(WORD_EDGES) * rng.choice(cacheable) // hash_block
        hash_blocks = min(hash_blocks, 520)
    else:
        hash_blocks = rng.randint(0, 5 * alignment // hash_block + 2)
        hash_blocks = min(hash_blocks, rng.choice((12, 40, 80)))
    tokens = hash_blocks * hash_block
    unit = hash_block if partial else alignment
    present = []
    same = rng.random() < 0.5
    everything = rng.random() < 0.1
    shared = random_units(rng, hash_blocks)
    for g in groups:
        if not g.prefix_cacheable:
            present.append(random_units(rng, hash_blocks))
            continue
        per_block = 1 if partial else g.block_size // hash_block
        n = hash_blocks // per_block
        if everything:
            units = [True] * n
        elif same and rng.random() < 0.7:
            units = shared[per_block - 1 :: per_block]
        else:
            units = random_units(rng, n)
        scale = g.block_size // hash_block
        if partial and scale > 1 and rng.random() < 0.5:
            # As saves leave it: whole blocks, and the tail of some request inside one.
            tail = rng.randrange(hash_blocks + 1)
            units = [there and ((i + 1) % scale == 0 or i == tail) for i, there in enumerate(units)]
        present.append(units)
    retention = rng.choice(
        (
            *(None, None, 0, 0),
            alignment * rng.randint(1, 4),
            rng.choice(cacheable) * rng.randint(1, 5),
            rng.randint(1, 3 * alignment),
        )
    )
    prompt = None if rng.random() < 0.3 else max(1, near(rng, alignment, tokens + alignment))
    return Case(
        groups=tuple(groups),
        hash_block_size=hash_block,
        alignment=given,
        retention=retention,
        partial=partial,
        hash_blocks=hash_blocks,
        present=tuple(tuple(units) for units in present),
        num_tokens=near(rng, unit, tokens + hash_block - 1),
        max_length=near(rng, unit, tokens),
        load_tokens=near(rng, unit, tokens) // hash_block * hash_block,
        store_tokens=near(rng, unit, tokens) // unit * unit,
        start_token=rng.choice((0, near(rng, rng.choice(cacheable), tokens))),
        num_prompt_tokens=prompt,
        ranks=tuple(rng.choice((1, 1, 2, 3)) for _ in groups),
    )
