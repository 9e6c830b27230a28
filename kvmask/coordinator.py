"""Coordinator: which blocks of each KV cache group are worth storing, asking for or loading.

The rules are vLLM's (0.32.0; see docs/semantics.md), computed on bitsets in the core.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvmask._core import MAX_SETS, MAX_TOKENS, Bitset, CoordinatorCore
from kvmask.errors import AlignmentError, ArgumentError
from kvmask.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow, check_count


@dataclass(frozen=True, slots=True)
class Hit:
    """A reusable prefix.

    Attributes:
        length: Tokens of the prefix that every group can reuse.
        masks: Per group, the blocks that must be loaded for it (empty for groups that are not
            prefix-cacheable).
        tail_tokens: Per group, the token boundary whose digest names the group's last block in the
            store; 0 when there is none. It differs from ``length`` only with partial hits.
        asked: Keys the lookup asked the store for.
        probes: Calls the lookup made.
        present: Asked keys that the store has.
        exact_keys: Keys that the ``exact`` strategy asks for the same request.
        store_seconds: Time in the store's calls.
        other_seconds: Time outside them.

    Two hits are equal when their length, masks and tails are; the counters do not count.
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


def group_row(group: Group) -> tuple[str, int, int]:
    """Kind, block size and span of a group, as the core takes them."""
    if isinstance(group, FullAttention):
        return "full", group.block_size, 0
    if isinstance(group, SlidingWindow):
        return "window", group.block_size, group.window + group.extra_retained_tokens
    if isinstance(group, ChunkedLocal):
        return "chunked", group.block_size, group.chunk_size
    if isinstance(group, Mamba):
        return "state", group.block_size, 0
    raise TypeError(f"`groups` must hold kvmask groups, got {type(group).__name__}")


class Coordinator:
    """Masks and hits of an engine's KV cache groups.

    Args:
        groups: The groups; their order is their group id.
        hash_block_size: Tokens per block hash. Every cacheable group's block size is a multiple.
        alignment: What hits are multiples of; None takes the least common multiple of the block
            sizes of the cacheable groups.
        retention_interval: None keeps a window tail (or state) at every aligned boundary, 0 only at
            the replay boundaries, n > 0 once per n tokens.
        partial_hits: Hits may end at any hash block, inside a block.

    Raises:
        AlignmentError: Sizes do not divide as they must.
        ArgumentError: A number is out of range, or no group is prefix-cacheable.

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
        check_count(hash_block_size, "hash_block_size")
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
        check_count(alignment, "alignment")
        if alignment % common:
            raise AlignmentError(
                "`alignment` must be a multiple of every group's `block_size`, "
                f"got {alignment} and {sorted({g.block_size for g in cacheable})}"
            )
        if alignment > MAX_TOKENS:
            raise ArgumentError(f"`alignment` must be at most {MAX_TOKENS}, got {alignment}")
        if retention_interval is not None:
            check_count(retention_interval, "retention_interval", 0)
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
            partial_hits,
        )

    @property
    def hit_alignment(self) -> int:
        """What hit lengths are multiples of: the hash block with partial hits."""
        return self.hash_block_size if self.partial_hits else self.alignment

    def align(self, num_tokens: int) -> int:
        """Round a token count down to what a hit can be."""
        return num_tokens // self.hit_alignment * self.hit_alignment

    def store_mask(
        self,
        num_tokens: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        states: bool = False,
    ) -> tuple[Bitset | None, ...]:
        """Which blocks of a stored prefix a later request can use.

        Args:
            num_tokens: Tokens of the prefix, a multiple of the hit alignment.
            start_token: The masks begin at block ``ceil(start_token / block_size)``.
            num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention.
            states: Apply the reachable rule to state groups too, for engines whose state blocks
                stay where they are; otherwise their mask is all false (vLLM hands states over
                explicitly).

        Returns:
            Per group a Bitset, or None for "all true".

        Raises:
            AlignmentError: ``num_tokens`` is not aligned.
            ArgumentError: A number is negative or above ``MAX_TOKENS``.
        """
        return self._core.reach_masks(num_tokens, start_token, num_prompt_tokens, False, states)

    def lookup_mask(self, num_tokens: int) -> tuple[Bitset | None, ...]:
        """Which blocks can decide a hit: the store rule with dense retention.

        Args:
            num_tokens: Tokens, a multiple of the hit alignment.

        Returns:
            Per group a Bitset, or None for "all true".

        Raises:
            AlignmentError: ``num_tokens`` is not aligned.
        """
        return self._core.reach_masks(num_tokens, 0, None, True, True)

    def load_mask(self, num_tokens: int) -> tuple[Bitset, ...]:
        """Which blocks each group must load for a hit of ``num_tokens``.

        ``num_tokens`` is the hit as the lookup returned it: the EAGLE block is dropped already and
        is not dropped again.

        >>> coord = Coordinator([SlidingWindow(16, window=33)], hash_block_size=16)
        >>> coord.load_mask(128)
        (Bitset(8, '6-7'),)
        """
        return self._core.load_masks(num_tokens)

    def find_hit(
        self, present: Sequence[Bitset | Sequence[bool]], max_length: int, eagle: bool = True
    ) -> Hit:
        """Longest prefix of at most ``max_length`` tokens that every group can reuse.

        Args:
            present: Per group the blocks that are present (hash blocks with partial hits); what
                lies past the end of a bitset is absent. Ignored for groups that are not cacheable.
            max_length: Tokens.
            eagle: False keeps the block that EAGLE groups would drop.

        Returns:
            Hit, with vLLM's length and masks.

        Raises:
            ArgumentError: There is not one bitset per group.

        >>> coord = Coordinator([FullAttention(16)], hash_block_size=16)
        >>> coord.find_hit([[True, True, False]], 48).length
        32
        """
        return Hit(*self._core.find_hit(present, max_length, eagle))

    def __repr__(self) -> str:
        return (
            f"Coordinator({list(self.groups)!r}, hash_block_size={self.hash_block_size}, "
            f"alignment={self.alignment}, retention_interval={self.retention_interval}, "
            f"partial_hits={self.partial_hits})"
        )


def _merge(groups: Sequence[Group]) -> tuple[list[int], list[bool]]:
    """Set index per group (-1: none) and EAGLE flag per set, full attention first.

    Mirrors the grouping of vLLM's store coordinator: by equal specs, in order of appearance, then
    a stable sort that puts full attention first.
    """
    found: dict[tuple[tuple[str, int, int], Hashable], list[int]] = {}
    for i, g in enumerate(groups):
        if g.prefix_cacheable:
            found.setdefault((group_row(g), g.spec), []).append(i)
    ordered = sorted(found.items(), key=lambda item: item[0][0][0] != "full")
    sets = [-1] * len(groups)
    flagged = []
    for k, (_, members) in enumerate(ordered):
        for i in members:
            sets[i] = k
        flagged.append(any(groups[i].eagle for i in members))
    return sets, flagged
