"""What an engine holds itself, said once for the lookup and the load of a request.

A number of tokens is the length of the engine's own prefix hit. A full-attention group then holds
every whole block below it. A window group holds the blocks of the window that ends there, and a
chunked group those of its attention chunk; what lies further left may have been freed. A state
group holds nothing that a longer hit could use. A Bitset says block by block what a group holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmask._core import MAX_TOKENS, Bitset, check_integer, held_blocks
from kvmask.errors import ArgumentError
from kvmask.plans.scheme import GroupScheme, Scheme


@dataclass(frozen=True, slots=True)
class Held:
    """What is held, per group.

    Attributes:
        groups: Per group a number of tokens, or a Bitset over its blocks.
        tokens: A hit that does not reach past this many tokens is of no use to the engine.
    """

    groups: tuple[int | Bitset, ...]
    tokens: int

    def blocks(self, group: GroupScheme, num_blocks: int) -> Bitset:
        """The blocks of a group that are held, as ``num_blocks`` bits.

        Args:
            group: The group.
            num_blocks: How many of its blocks are of interest.
        """
        return held_blocks(
            group.kind, group.block_size, group.span, self.groups[group.index], num_blocks
        )


def _one(item: Any, name: str) -> int | Bitset:
    if isinstance(item, Bitset):
        return item
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return Bitset.from_bools(item)
    return check_integer(item, name, 0, MAX_TOKENS)


def held_of(scheme: Scheme, held: Any) -> Held | None:
    """What a caller says is held; None when it is nothing.

    Args:
        scheme: The groups.
        held: Tokens for all groups, or per group tokens or a Bitset, by name or in order. A group
            that a mapping does not name holds nothing.

    Raises:
        ArgumentError: A number is negative, or there is not one entry per group.
        TypeError: An entry is neither.
    """
    if held is None or (type(held) is int and held == 0):
        return None
    groups = scheme.groups
    if isinstance(held, Held):
        if len(held.groups) != len(groups):
            raise ArgumentError(
                f"`held` must hold one entry per group, got {len(held.groups)} and {len(groups)}"
            )
        return held
    if isinstance(held, Mapping):
        names = {g.name for g in groups}
        for name in held:
            if name not in names:
                raise ArgumentError(
                    f"`held` must name groups of the contract, got {name!r} and {sorted(names)}"
                )
        items = tuple(_one(held.get(g.name, 0), "held") for g in groups)
    elif isinstance(held, Sequence) and not isinstance(held, str | bytes):
        items = tuple(_one(item, "held") for item in held)
        if len(items) != len(groups):
            raise ArgumentError(
                f"`held` must hold one entry per group, got {len(items)} and {len(groups)}"
            )
    else:
        tokens = check_integer(held, "held", 0, MAX_TOKENS)
        return Held((tokens,) * len(groups), tokens) if tokens else None
    return Held(items, _own_hit(scheme, items))


def _own_hit(scheme: Scheme, items: tuple[int | Bitset, ...]) -> int:
    """The prefix that the engine can reuse without the store."""
    coord = scheme.coord
    cacheable = [g for g in scheme.groups if g.cacheable]
    if coord.partial_hits or not any(isinstance(items[g.index], Bitset) for g in cacheable):
        return min(
            item if isinstance(item, int) else 0 for item in (items[g.index] for g in cacheable)
        )
    lengths = []
    for g in cacheable:
        item = items[g.index]
        lengths.append(item if isinstance(item, int) else len(item) * g.block_size)
    reach = coord.align(min(lengths))
    bits = [
        held_blocks(g.kind, g.block_size, g.span, items[g.index], reach // g.block_size)
        if g.cacheable
        else Bitset.zeros(0)
        for g in scheme.groups
    ]
    # With a number of tokens a state group holds the one state at that length.
    for g in cacheable:
        item = items[g.index]
        if g.kind == "state" and isinstance(item, int) and item == reach and reach:
            n = reach // g.block_size
            bits[g.index] = Bitset.from_indices(n, [n - 1])
    return coord.find_hit(bits, reach, False).length
