"""Hypothesis strategies for bitsets, cache groups, coordinators and stores.

Sizes sit where the core changes its path: word edges, window edges, multiples of the alignment and
one beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvmask import ChunkedLocal, FullAttention, Mamba, SlidingWindow

WORD_EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193)

lengths = st.one_of(st.sampled_from(WORD_EDGES), st.integers(0, 200))


@st.composite
def bools(draw: Any, n: int) -> list[bool]:
    """n bools: all, none, a prefix, all with a few holes, a few ones, or anything."""
    kind = draw(st.integers(0, 5))
    if kind < 2:
        return [kind == 0] * n
    if kind == 2:
        stop = draw(st.integers(0, n))
        return [i < stop for i in range(n)]
    if kind < 5:
        odd = draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=6))
        return [(i in odd) == (kind == 3) for i in range(n)]
    word = draw(st.integers(0, (1 << n) - 1))
    return [bool(word >> i & 1) for i in range(n)]


bool_lists = lengths.flatmap(bools)


@dataclass(frozen=True)
class Config:
    """Arguments of a coordinator."""

    groups: tuple[Any, ...]
    hash_block_size: int
    alignment: int | None
    retention_interval: int | None
    partial_hits: bool

    @property
    def args(self) -> tuple[Any, ...]:
        return (
            list(self.groups),
            self.hash_block_size,
            self.alignment,
            self.retention_interval,
            self.partial_hits,
        )

    @property
    def cacheable(self) -> list[Any]:
        return [g for g in self.groups if g.prefix_cacheable]

    @property
    def common(self) -> int:
        return self.alignment or math.lcm(*(g.block_size for g in self.cacheable))

    @property
    def unit(self) -> int:
        """What hits are multiples of."""
        return self.hash_block_size if self.partial_hits else self.common

    def entry(self, group: Any) -> int:
        """Tokens per entry of a presence list."""
        return self.hash_block_size if self.partial_hits else group.block_size


@st.composite
def groups(draw: Any, hash_block: int, scales: tuple[int, ...]) -> Any:
    size = hash_block * draw(st.sampled_from(scales))
    kind = draw(st.sampled_from((FullAttention, SlidingWindow, SlidingWindow, ChunkedLocal, Mamba)))
    cacheable = draw(st.sampled_from((True,) * 9 + (False,)))
    eagle = kind is not ChunkedLocal and draw(st.sampled_from((False, False, True)))
    spec = draw(st.sampled_from((None, "x")))
    common = {"prefix_cacheable": cacheable, "eagle": eagle, "spec": spec}
    if kind is SlidingWindow:
        # Windows that end on, before and after a block; some cover more than a word of blocks.
        blocks = draw(st.sampled_from((0, 0, 1, 1, 2, 3, 7, 63, 64, 65)))
        window = max(1, blocks * size + draw(st.integers(-1, 2)))
        extra = draw(st.sampled_from((0, 0, 1, size)))
        return SlidingWindow(size, window=window, extra_retained_tokens=extra, **common)
    if kind is ChunkedLocal:
        chunk = draw(st.integers(1, 9 * size))
        return ChunkedLocal(size, chunk_size=chunk, **common)
    return kind(size, **common)


@st.composite
def configs(draw: Any) -> Config:
    hash_block = draw(st.sampled_from((1, 4, 16)))
    scales = draw(st.sampled_from(((1,), (1, 2, 4), (1, 2, 4, 64), (1, 2, 3), (2, 3, 4), (6,))))
    chosen = draw(st.lists(groups(hash_block, scales), min_size=1, max_size=5))
    if draw(st.booleans()) and len(chosen) > 1:  # a twin, so that groups merge
        first = chosen[0]
        flag = draw(st.booleans()) and not isinstance(first, ChunkedLocal)
        chosen[-1] = replace(first, eagle=flag)
    if not any(g.prefix_cacheable for g in chosen):
        chosen[0] = replace(chosen[0], prefix_cacheable=True)
    # A scratch group's size has to divide nothing.
    chosen = [
        g if g.prefix_cacheable else replace(g, block_size=draw(st.integers(1, 40))) for g in chosen
    ]
    common = math.lcm(*(g.block_size for g in chosen if g.prefix_cacheable))
    alignment = draw(st.sampled_from((None, None, common, 2 * common, 3 * common)))
    unit = alignment or common
    retention = draw(
        st.one_of(
            st.none(),
            st.just(0),
            st.integers(1, 4).map(lambda k: k * unit),
            st.integers(1, 4 * unit),
        )
    )
    return Config(tuple(chosen), hash_block, alignment, retention, draw(st.booleans()))


def token_counts(config: Config, aligned: bool = False) -> st.SearchStrategy[int]:
    """Lengths whose blocks straddle word edges in some group, or lie near the alignment."""
    edges = [edge * g.block_size for g in config.cacheable for edge in (1, 63, 64, 65, 128, 129)]
    near = st.one_of(
        st.builds(lambda k, d: max(0, k * config.unit + d), st.integers(0, 6), st.integers(-1, 1)),
        st.builds(lambda e, d: max(0, e + d), st.sampled_from(edges), st.integers(-1, 1)),
    )
    near = near.map(lambda n: min(n, 4200 * config.hash_block_size))
    return near.map(lambda n: n // config.unit * config.unit) if aligned else near


@st.composite
def presence(draw: Any, config: Config, num_tokens: int) -> list[list[bool]]:
    """Per group which entries the store holds; some lists end early or reach further."""
    out = []
    for g in config.groups:
        n = num_tokens // config.entry(g)
        n = draw(st.sampled_from((n, n, n, n + 1, n + 2, n // 2)))
        out.append(draw(bools(n)))
    return out


def check_bitset(bits: Any) -> None:
    """The invariant of every bitset: whole words, and zeros past the end."""
    words = memoryview(bits)
    assert words.format == "Q"
    assert words.readonly
    assert len(words) == -(-len(bits) // 64)
    if len(bits) % 64:
        assert words[-1] >> len(bits) % 64 == 0
