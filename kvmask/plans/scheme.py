"""Scheme: what plans need to know of the groups of one engine, in the form they use it.

A contract gives one for lookups, a bound contract one that also has this rank's memory, and an
engine's adapter can make its own from the engine's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvmask._core import Bitset, BlockHashes, KeyBuilder, PlanGroup
from kvmask.coordinator import Hit
from kvmask.errors import PlanStateError


class Addresses(Protocol):
    """Where the blocks of a group lie: what `KVLayout` offers, as far as plans use it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all regions."""
        ...

    def addresses(self, block_ids: list[int], /) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes in bytes, one row per block and one entry per region.

        Args:
            block_ids: Which blocks.

        Raises:
            BlockIdError: There is no such block.
        """
        ...


def block_hashes(hashes: BlockHashes | Sequence[bytes]) -> BlockHashes:
    """Digests as the core takes them.

    Raises:
        TypeError: They are no sequence.
        HashInputError: An item is no digest.
    """
    if isinstance(hashes, BlockHashes):
        return hashes
    if type(hashes) is not list and not hasattr(hashes, "__iter__"):
        raise TypeError(f"`hashes` must be a sequence of bytes, got {type(hashes).__name__}")
    return BlockHashes.from_list(hashes)


class Masks(Protocol):
    """What plans ask of a coordinator: `kvmask.Coordinator`, or an adapter's own.

    A lookup searches in the core: its coordinator also has ``_core``, a `CoordinatorCore`, as
    `Coordinator` has. A load whose blocks all arrive asks for sizes alone, and so does a save that
    is given its masks.
    """

    @property
    def hash_block_size(self) -> int:
        """Tokens per digest."""
        ...

    @property
    def alignment(self) -> int:
        """What a save begins at a multiple of, in tokens."""
        ...

    @property
    def hit_alignment(self) -> int:
        """What hits are multiples of, in tokens."""
        ...

    @property
    def partial_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        ...

    def align(self, num_tokens: int, /) -> int:
        """Round a number of tokens down to what is saved."""
        ...

    def store_mask(
        self, num_tokens: int, start_token: int, num_prompt_tokens: int | None, states: bool, /
    ) -> Sequence[Bitset | None]:
        """Per group the blocks to save, from ``ceil(start_token / block_size)`` on."""
        ...

    def load_mask(self, num_tokens: int, /) -> Sequence[Bitset]:
        """Per group the blocks that a hit of this length needs."""
        ...

    def find_hit(self, present: Sequence[Bitset], max_length: int, eagle: bool, /) -> Hit:
        """The longest hit that blocks give, for what a load leaves usable."""
        ...


@dataclass(frozen=True, slots=True)
class GroupScheme:
    """One KV cache group.

    Attributes:
        index: Index of the group.
        name: Its name, for results and messages.
        kind: Name of its kind, as in `kvmask.groups.KINDS`.
        block_size: Tokens per block.
        span: Tokens of its window or attention chunk; 0 for the other kinds.
        cacheable: Whether it takes part in masks, keys and hits.
        namespaces: One builder for every rank namespace that must hold a block for the block to be
            present.
        own: One builder per shard that this rank saves and loads.
        layouts: Where the blocks lie, one per shard.
        writers: How many ranks hold the same bytes and share the writing.
        turn: This rank writes the blocks ``i`` with ``i % writers == turn``.
        eviction: Builds the store's group ids, which name what is evicted together.
    """

    index: int
    name: str
    kind: str
    block_size: int
    span: int = 0
    cacheable: bool = True
    namespaces: tuple[KeyBuilder, ...] = ()
    own: tuple[KeyBuilder, ...] = ()
    layouts: tuple[Addresses, ...] = ()
    writers: int = 1
    turn: int = 0
    eviction: KeyBuilder | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """All groups of an engine.

    Attributes:
        coord: Masks and hits. See `Masks`.
        groups: One entry per group.
        states: States are saved by their position in the block table; False leaves them to
            hand-offs.
        bound: The scheme has memory: saves and loads are possible.
        rank: Loads of different ranks begin at different keys.
        sealed: Every object carries a checksum of its bytes and key.
        check_hashes: Refuses digests that are not of this scheme; None takes all.
        covers: Whether a lookup demands a digest for every full hash block of its tokens.
        namespaces: The namespaces of all groups.
        cacheable: Per group whether it takes part in masks, keys and hits.
        loaded: The groups of which this rank loads something, as the core uses them.
        saved: Those of which it saves something by position in the block table.
    """

    coord: Masks
    groups: tuple[GroupScheme, ...]
    states: bool = True
    bound: bool = False
    rank: int = 0
    sealed: bool = False
    check_hashes: Callable[[BlockHashes], None] | None = None
    covers: bool = True
    namespaces: tuple[tuple[KeyBuilder, ...], ...] = field(init=False)
    cacheable: tuple[bool, ...] = field(init=False)
    loaded: tuple[PlanGroup, ...] = field(init=False, repr=False, compare=False)
    saved: tuple[PlanGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespaces", tuple(g.namespaces for g in self.groups))
        object.__setattr__(self, "cacheable", tuple(g.cacheable for g in self.groups))
        unit = self.coord.hash_block_size
        loaded = tuple(PlanGroup(g, unit) for g in self.groups if g.cacheable and g.own)
        saved = loaded if self.states else tuple(p for p in loaded if p.group.kind != "state")
        object.__setattr__(self, "loaded", loaded)
        object.__setattr__(self, "saved", saved)

    def hashes(self, hashes: BlockHashes | Sequence[bytes]) -> BlockHashes:
        """Digests as the core takes them, refused when they are known to be others.

        Args:
            hashes: One digest per hash block.

        Raises:
            ArgumentError: They are known to be of another hash block size, algorithm or start.
            HashInputError: An item is no digest.
        """
        digests = block_hashes(hashes)
        if self.check_hashes is not None:
            self.check_hashes(digests)
        return digests

    @property
    def core(self) -> Any:
        """The core's search over all groups.

        Raises:
            TypeError: The coordinator is an adapter's own and has none.
        """
        try:
            return self.coord._core  # type: ignore[attr-defined]
        except AttributeError:
            raise TypeError(
                "`coord` of a scheme for lookups must search in the core, as Coordinator does, "
                f"got {type(self.coord).__name__}"
            ) from None

    @property
    def writers(self) -> int:
        """The largest number of ranks that share the writing of a group."""
        return max((g.writers for g in self.groups if g.cacheable), default=1)


def scheme_of(source: Any, *, memory: bool = False) -> Scheme:
    """The scheme of a contract, of a bound contract, or the scheme itself.

    Args:
        source: One of these.
        memory: Whether saves or loads are to be planned.

    Raises:
        TypeError: It is none of them.
        PlanStateError: Memory is needed and the contract is not bound to any.
    """
    found = source if type(source) is Scheme else getattr(source, "scheme", source)
    if not isinstance(found, Scheme):
        raise TypeError(
            "`source` must be a Contract, a bound contract or a Scheme, "
            f"got {type(source).__name__}"
        )
    if memory and not found.bound:
        raise PlanStateError(
            "saves and loads need memory: bind the contract to its layouts with "
            f"`contract.bind(layouts)` first, got {type(source).__name__}"
        )
    return found
