"""Hand-offs: blocks that an engine has saved under the digest of a boundary that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmask._core import MAX_TOKENS, check_integer
from kvmask.errors import ArgumentError
from kvmask.plans.scheme import GroupScheme, Scheme


@dataclass(frozen=True, slots=True)
class Handoff:
    """A block that an engine hands over to be saved under the digest of its own token boundary.

    Recurrent states are saved so where the block table does not keep them, and blocks that a
    partial hit ends in.

    Attributes:
        group: Index or name of the group.
        num_tokens: The boundary: the block holds the state at, or the tokens up to, this length. A
            multiple of the hash block size.
        block_id: The block.
    """

    group: int | str
    num_tokens: int
    block_id: int


def check_handoff(
    scheme: Scheme, group: Any, num_tokens: Any, block_id: Any, where: str = ""
) -> tuple[GroupScheme, int, int]:
    """The group, the boundary in tokens and the block of a hand-off, checked.

    Args:
        scheme: The groups.
        group: Index or name of the group.
        num_tokens: The boundary.
        block_id: The block.
        where: What messages add to these names, with a space before it.

    Raises:
        ArgumentError: There is no such cacheable group, or a number is out of range.
        TypeError: A number is no integer.
    """
    if not isinstance(group, str):
        group = check_integer(group, f"`group`{where}", 0)
    groups, unit = scheme.groups, scheme.coord.hash_block_size
    known = [g for g in groups if group in (g.index, g.name) and g.cacheable]
    if not known:
        raise ArgumentError(
            f"`group`{where} must be a cacheable group of the contract, "
            f"got {group!r} and {[g.name for g in groups if g.cacheable]}"
        )
    boundary = check_integer(num_tokens, f"`num_tokens`{where}", 0, MAX_TOKENS)
    if boundary == 0 or boundary % unit:
        raise ArgumentError(
            f"`num_tokens`{where} must be a multiple of the hash block size above 0, "
            f"got {boundary} and {unit}"
        )
    return known[0], boundary, check_integer(block_id, f"`block_id`{where}", 0)


def note_handoff(
    known: dict[tuple[int, int], int], group: GroupScheme, boundary: int, block_id: int
) -> None:
    """Note the block of a boundary.

    Args:
        known: Per index of the group and boundary the block that was handed over.
        group: The group.
        boundary: Tokens.
        block_id: The block.

    Raises:
        ArgumentError: Another block was handed over for it.
    """
    first = known.setdefault((group.index, boundary), block_id)
    if first != block_id:
        raise ArgumentError(
            "`block_id` must be the one block of its boundary, "
            f"got {block_id} after {first} for {boundary} tokens of group {group.name!r}"
        )


def listed(handoffs: Any) -> list[Handoff]:
    """Hand-offs as a list.

    Raises:
        TypeError: It is no sequence of `Handoff`.
    """
    try:
        found = list(handoffs)
    except TypeError:
        raise TypeError(
            f"`handoffs` must be a sequence of Handoff, got {type(handoffs).__name__}"
        ) from None
    for handoff in found:
        if not isinstance(handoff, Handoff):
            raise TypeError(f"`handoffs` must hold Handoff, got {type(handoff).__name__}")
    return found
