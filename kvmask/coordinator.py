"""Coordinator: which blocks of each KV cache group to store, to look up and to load.

The rules are those of vLLM 0.32.0 (see docs/semantics.md). The core computes them on bitsets.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmask._core import MAX_SETS, MAX_TOKENS, Bitset, CoordinatorCore, check_integer
from kvmask.errors import AlignmentError, ArgumentError
from kvmask.groups import KINDS, FullAttention, Group

_UNSET: Any = object()


@dataclass(frozen=True)
class Hit:
    """A reusable prefix.

    Attributes:
        length: Tokens of the prefix that every group can reuse.
        masks: Per group, the blocks that must be loaded. Empty for groups that are not
            prefix-cacheable.
        tail_tokens: Per group, the token boundary whose digest identifies the group's last block in
            the store, or 0 if there is no such block. Otherwise it is ``length``, except that with
            partial hits it can be another boundary.
        asked: Number of keys that the lookup asked the store for.
        probes: Number of calls that the lookup made.
        present: Number of these keys that the store has.
        exact_keys: Number of keys that ``exact`` asks for in a lookup of the same request.
        store_seconds: Time inside the store's calls.
        other_seconds: Time outside the store's calls.
        unknown: Asked keys that the store gave no usable answer to: they count as not present.
        cause: Why the store did not answer, which ended the lookup with a length of 0: what a call
            raised, or a StoreError, also when no call was made because the store did not answer a
            moment ago. A StoreError too when an answer did not fit its call. None when none of it
            happened.
        held: What the engine held itself when it asked; a load must hold as much.

    Two hits are equal when their length, masks and tails are; the rest is not compared.
    """

    length: int
    masks: tuple[Bitset, ...]
    tail_tokens: tuple[int, ...]
    asked: int = field(default=0, compare=False)
    probes: int = field(default=0, compare=False)
    present: int = field(default=0, compare=False)
    exact_keys: int = field(default=0, compare=False)
    store_seconds: float = field(default=0.0, compare=False)
    other_seconds: float = field(default=0.0, compare=False)
    unknown: int = field(default=0, compare=False)
    cause: BaseException | None = field(default=None, compare=False)
    held: Any = field(default=None, compare=False)

    @classmethod
    def _bare(cls, length: int, masks: tuple[Bitset, ...], tail_tokens: tuple[int, ...]) -> Hit:
        """A hit that no store was asked for.

        The constructor of a frozen dataclass takes as long as a search. Here the other fields keep
        their defaults, which are attributes of the class.
        """
        hit = object.__new__(cls)
        hit.__dict__.update(length=length, masks=masks, tail_tokens=tail_tokens)
        return hit

    @classmethod
    def _looked_up(cls, fields: dict[str, Any]) -> Hit:
        """A lookup's hit; like `_bare`, with all fields."""
        hit = object.__new__(cls)
        object.__setattr__(hit, "__dict__", fields)
        return hit

    @property
    def answered(self) -> bool:
        """The store answered every key. Otherwise a longer hit may be there."""
        return self.cause is None and self.unknown == 0


def group_row(group: Group) -> tuple[str, int, int]:
    """Return kind, block size and span of a group for the core.

    The span is the window (with extra tokens) or the chunk size, in tokens; 0 for other kinds.
    """
    if isinstance(group, tuple(KINDS.values())):
        return group.kind, group.block_size, group.span
    raise TypeError(f"`groups` must hold kvmask groups, got {type(group).__name__}")


class Coordinator:
    """Masks and hits of an engine's KV cache groups.

    Args:
        groups: The groups. The position of a group is its group id.
        hash_block_size: Tokens per block hash. The block size of every cacheable group must be a
            multiple of it.
        alignment: Hits are multiples of it, in tokens. None takes the least common multiple of the
            block sizes of all cacheable groups.
        retention_interval: Where the blocks of a window (or a state) are stored. None: at every
            aligned boundary. 0: only at the replay boundaries. n > 0: once per n tokens, and at the
            replay boundaries.
        partial_hits: Hits may end at any hash block, also inside a block.

    Raises:
        AlignmentError: A size is not a multiple of another one, as it must be.
        ArgumentError: A number is out of range, or no group is prefix-cacheable.

    >>> from kvmask import SlidingWindow
    >>> coord = Coordinator([FullAttention(64), SlidingWindow(16, window=32)], hash_block_size=16)
    >>> coord.store_mask(256)[1]
    Bitset(16, '2-3,6-7,10-11,14-15')
    """

    def __init__(
        self,
        groups: Sequence[Group],
        hash_block_size: int,
        alignment: int | None = None,
        retention_interval: int | None = None,
        partial_hits: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        rows = [group_row(g) for g in self.groups]
        hash_block_size = check_integer(hash_block_size, "hash_block_size", 1, MAX_TOKENS)
        cacheable = [g for g in self.groups if g.prefix_cacheable]
        if not cacheable:
            raise ArgumentError(
                "`groups` must hold at least one prefix-cacheable group, "
                f"got {len(self.groups)} groups and none"
            )
        for g in cacheable:
            if g.block_size % hash_block_size:
                raise AlignmentError(
                    "`block_size` must be a multiple of `hash_block_size`, "
                    f"got {g.block_size} and {hash_block_size}"
                )
        common = math.lcm(*(g.block_size for g in cacheable))
        if alignment is None:
            alignment = common
        alignment = check_integer(alignment, "alignment", 1, MAX_TOKENS)
        if alignment % common:
            raise AlignmentError(
                "`alignment` must be a multiple of every group's `block_size`, "
                f"got {alignment} and {sorted({g.block_size for g in cacheable})}"
            )
        if retention_interval is not None:
            retention_interval = check_integer(
                retention_interval, "retention_interval", 0, MAX_TOKENS
            )
        self.hash_block_size = hash_block_size
        self.alignment = alignment
        self.retention_interval = retention_interval
        self.partial_hits = bool(partial_hits)

        sets, flagged = _merge(self.groups)
        if len(flagged) > MAX_SETS:
            raise ArgumentError(
                f"`groups` must hold at most {MAX_SETS} different specs, got {len(flagged)}"
            )
        self._core = CoordinatorCore(
            [
                (*row, k >= 0 and flagged[k], g.prefix_cacheable, k)
                for row, g, k in zip(rows, self.groups, sets, strict=True)
            ],
            hash_block_size,
            alignment,
            retention_interval,
            partial=self.partial_hits,
        )

    @property
    def hit_alignment(self) -> int:
        """The unit of hit lengths: the alignment, or with partial hits the hash block size."""
        return self.hash_block_size if self.partial_hits else self.alignment

    def align(self, num_tokens: int) -> int:
        """Round a number of tokens down to a multiple of the hit alignment.

        Args:
            num_tokens: A number of tokens.

        Returns:
            Tokens.
        """
        return num_tokens // self.hit_alignment * self.hit_alignment

    def store_mask(
        self,
        num_tokens: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        states: bool = False,
    ) -> tuple[Bitset | None, ...]:
        """Return the blocks of a computed prefix that a later request can use.

        Args:
            num_tokens: Tokens of the prefix, a multiple of the hit alignment.
            start_token: The masks begin at block ``ceil(start_token / block_size)``.
            num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention.
            states: Apply the rule to state groups too, for engines that keep state blocks in the
                block table. Otherwise no bit of their mask is set. vLLM passes states to its store
                connector in a separate way.

        Returns:
            Per group a Bitset, or None if all blocks are needed.

        Raises:
            AlignmentError: ``num_tokens`` is not aligned.
            ArgumentError: A number is negative or above ``MAX_TOKENS``.
        """
        return self._core.reach_masks(
            num_tokens, start_token, num_prompt_tokens, dense=False, states=states
        )

    def lookup_mask(self, num_tokens: int) -> tuple[Bitset | None, ...]:
        """Return the blocks that can affect a hit: those of the store mask with dense retention.

        Args:
            num_tokens: Largest length of the hit, a multiple of the hit alignment.

        Returns:
            Per group a Bitset, or None if all blocks are needed.

        Raises:
            AlignmentError: ``num_tokens`` is not aligned.
        """
        return self._core.reach_masks(num_tokens, 0, None, dense=True, states=True)

    def load_mask(self, num_tokens: int) -> tuple[Bitset, ...]:
        """Return the blocks that each group must load for a hit of ``num_tokens``.

        ``num_tokens`` is the hit that the lookup returned. The lookup has already dropped the block
        of EAGLE groups, so this does not drop another one.

        Args:
            num_tokens: Length of the hit, in tokens.

        Returns:
            Per group a Bitset over the blocks of the hit; an empty one for a group that is not
            cacheable.

        Raises:
            ArgumentError: ``num_tokens`` is negative or above ``MAX_TOKENS``.

        >>> from kvmask import SlidingWindow
        >>> coord = Coordinator([SlidingWindow(16, window=33)], hash_block_size=16)
        >>> coord.load_mask(128)
        (Bitset(8, '6-7'),)
        """
        return self._core.load_masks(num_tokens)

    def find_hit(
        self,
        present: Sequence[Bitset | Sequence[bool]],
        max_length: int = _UNSET,
        eagle: bool = True,
        *,
        num_tokens: int = _UNSET,
    ) -> Hit:
        """Find the longest prefix of at most ``max_length`` tokens that every group can reuse.

        Args:
            present: Per group the blocks that are present (with partial hits: the hash blocks).
                Blocks past the end of a bitset are absent. Ignored for groups that are not
                cacheable.
            max_length: Largest length of the hit, in tokens. All of them can be a hit, unlike in a
                lookup, which leaves the last token of a request to compute.
            eagle: If False, EAGLE groups do not drop their last block.
            num_tokens: Another name of ``max_length``, as the masks have it.

        Returns:
            The hit, with the same length and masks as in vLLM.

        Raises:
            ArgumentError: There is not one bitset per group.
            TypeError: The length is no integer, is not given, or is given by both names.

        >>> coord = Coordinator([FullAttention(16)], hash_block_size=16)
        >>> coord.find_hit([[True, True, False]], 48).length
        32
        """
        if max_length is _UNSET or num_tokens is not _UNSET:
            if (max_length is _UNSET) == (num_tokens is _UNSET):
                given = "none" if num_tokens is _UNSET else "both"
                raise TypeError(
                    f"exactly one of `max_length` and `num_tokens` must be given, got {given}"
                )
            max_length = num_tokens
        return Hit._bare(*self._core.find_hit(present, max_length, eagle=eagle))

    def __repr__(self) -> str:
        return (
            f"Coordinator({list(self.groups)!r}, hash_block_size={self.hash_block_size}, "
            f"alignment={self.alignment}, retention_interval={self.retention_interval}, "
            f"partial_hits={self.partial_hits})"
        )


def _merge(groups: Sequence[Group]) -> tuple[list[int], list[bool]]:
    """Collect groups with equal specs into sets. Sets of full attention come first.

    The order is that of vLLM's store coordinator: by first appearance, then a stable sort that puts
    full attention first.

    Returns:
        Per group the index of its set, or -1 if it is not cacheable; per set whether one of its
        groups has the EAGLE flag.
    """
    found: dict[tuple[tuple[str, int, int], Hashable], list[int]] = {}
    for i, g in enumerate(groups):
        if g.prefix_cacheable:
            found.setdefault((group_row(g), g.spec), []).append(i)
    ordered = sorted(found.items(), key=lambda item: item[0][0][0] != FullAttention.kind)
    sets = [-1] * len(groups)
    flagged = []
    for k, (_, members) in enumerate(ordered):
        for i in members:
            sets[i] = k
        flagged.append(any(groups[i].eagle for i in members))
    return sets, flagged
