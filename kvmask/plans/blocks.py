"""Keys, descriptors and outcomes of selected blocks: what saves and loads share.

The limits of one call to the store live here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvmask._core import (
    MAX_TOKENS,
    Bitset,
    BlockHashes,
    build_keys,
    checked_answers,
    cut_calls,
    row_totals,
)
from kvmask.coordinator import Coordinator
from kvmask.errors import ArgumentError, PlanStateError
from kvmask.groups import check_count
from kvmask.keys.base import KeySchema
from kvmask.layout import KVLayout

Schemas = Sequence[KeySchema | Sequence[KeySchema]]
Layouts = Sequence[KVLayout | Sequence[KVLayout]]
Hashes = BlockHashes | Sequence[bytes]

# Mooncake's return codes that plans act on; kvmask.mooncake names all of them.
INVALID_PARAMS = -600
ALREADY_EXISTS = -705
NO_SPACE = -200
LEASE_EXPIRED = -707

# An owner with a disk tier stages a get through a buffer for direct I/O: every object is rounded
# up to pages and needs two more; vLLM fills nine tenths of the buffer with one batch.
STAGING_PAGE = 4096
STAGING_PADDING = 2 * STAGING_PAGE
STAGING_USABLE = 0.9

# Mooncake's TCP transport cuts a segment into slices and refuses (-800) what does not fit a peer's
# queue of 1,024 (its defaults in 0.3.13). Half of that leaves room for another thread.
SLICE_BYTES = 1 << 16
PIECES_PER_CALL = 512


def check_tokens(value: int, name: str) -> None:
    """Refuse what is no count of tokens."""
    check_count(value, name, 0)
    if value > MAX_TOKENS:
        raise ArgumentError(f"`{name}` must be at most {MAX_TOKENS}, got {value}")


def as_list(items: Any, name: str) -> list[Any]:
    """A list of the items of any iterable; anything else is an error that names the argument."""
    try:
        return list(items)
    except TypeError:
        raise TypeError(f"`{name}` must be a sequence, got {type(items).__name__}") from None


def block_tables(block_ids: Sequence[Sequence[int]], groups: int) -> list[list[int]]:
    """A list per group; lists as they are, since a plan reads them once, when it is made."""
    tables = [
        table if type(table) is list else as_list(table, "block_ids")
        for table in as_list(block_ids, "block_ids")
    ]
    if len(tables) != groups:
        raise ArgumentError(
            f"`block_ids` must hold one table per group, got {len(tables)} and {groups}"
        )
    return tables


def per_group(items: Sequence[Any], kind: type, name: str, groups: int) -> list[tuple[Any, ...]]:
    """One tuple per group out of one item, or one sequence of items, per group."""
    rows: list[tuple[Any, ...]] = []
    for item in as_list(items, name):
        row = (item,) if isinstance(item, kind) else tuple(as_list(item, name))
        for entry in row:
            if not isinstance(entry, kind):
                raise TypeError(f"`{name}` must hold {kind.__name__}, got {type(entry).__name__}")
        rows.append(row)
    if len(rows) != groups:
        raise ArgumentError(f"`{name}` must hold one entry per group, got {len(rows)} and {groups}")
    return rows


def staging_bytes(num_bytes: int) -> int:
    """What one object takes of an owner's staging buffer.

    >>> staging_bytes(4097)
    16384
    """
    return -(-num_bytes // STAGING_PAGE) * STAGING_PAGE + STAGING_PADDING


def split_calls(
    sizes: Sequence[int],
    staging: int | None = None,
    pieces: Sequence[int] | None = None,
    max_pieces: int | None = None,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Cuts one put or get into calls that the store can take.

    Args:
        sizes: Bytes per key.
        staging: Bytes of an owner's staging buffer. One call fills at most nine tenths of it; a
            key between that and the whole goes alone.
        pieces: Transport pieces per key.
        max_pieces: Pieces per call; a key with more goes alone.

    Returns:
        (calls as (start, stop), keys that cannot be staged at all).

    >>> split_calls([1, 1], staging=3 * 12288)
    ([(0, 2)], [])
    """
    if staging is None:
        needs, usable, whole = [0] * len(sizes), 0.0, 0.0
    else:
        check_count(staging, "staging")
        needs = [staging_bytes(size) for size in sizes]
        usable, whole = max(1, int(staging * STAGING_USABLE)), staging
    parts = [0] * len(sizes) if pieces is None else list(pieces)
    return cut_calls(needs, usable, whole, parts, math.inf if max_pieces is None else max_pieces)


class BlockFailure(NamedTuple):
    """One key that was not moved.

    Attributes:
        group: Group id.
        block: Index of the block in its group.
        block_id: Its entry in the block table.
        key: The key.
        code: The store's return code; for a get also the number of bytes when it was short.
    """

    group: int
    block: int
    block_id: int
    key: str
    code: int


def describe(failed: Sequence[BlockFailure]) -> str:
    """Failures in short: how many, which codes, the first three keys."""
    if not failed:
        return "none"
    codes = sorted({f.code for f in failed})
    keys = ", ".join(f.key for f in failed[:3]) + (", ..." if len(failed) > 3 else "")
    return f"{len(failed)} with codes {codes[:8]}: {keys}"


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of a save: every planned key is stored, was present, or failed.

    Attributes:
        stored: Keys written.
        present: Keys that the store had already.
        failed: The others.
        saved_tokens: High-water mark: everything below it is stored; resume there.
        num_bytes: Bytes written.
    """

    stored: int
    present: int
    failed: tuple[BlockFailure, ...] = field(repr=False)
    saved_tokens: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    def __str__(self) -> str:
        return (
            f"saved up to token {self.saved_tokens}: {self.stored} keys stored "
            f"({self.num_bytes} bytes), {self.present} present, failed: {describe(self.failed)}"
        )

    @property
    def pressure(self) -> bool:
        """The store had no room for some of it: worth another try later."""
        return any(f.code == NO_SPACE for f in self.failed)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load: every planned key is loaded or failed.

    Attributes:
        loaded: Keys read whole.
        failed: The others; their blocks hold nothing that may be used.
        num_bytes: Bytes read.
    """

    loaded: int
    failed: tuple[BlockFailure, ...] = field(repr=False)
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    def __str__(self) -> str:
        return (
            f"{self.loaded} keys loaded ({self.num_bytes} bytes), failed: {describe(self.failed)}"
        )

    def invalid_block_ids(self, group: int) -> list[int]:
        """Block ids of a group that must not be used, ascending."""
        return sorted({f.block_id for f in self.failed if f.group == group})


class TransferBatch(NamedTuple):
    """Arguments of one put or get: per key its addresses and sizes."""

    keys: list[str]
    addresses: list[list[int]]
    sizes: list[list[int]]

    def pick(self, positions: Sequence[int]) -> TransferBatch:
        """The keys at these positions, in this order."""
        return TransferBatch(
            [self.keys[i] for i in positions],
            [self.addresses[i] for i in positions],
            [self.sizes[i] for i in positions],
        )


@dataclass(slots=True)
class Entries:
    """The keys of one group: block-major, the shards of one block together."""

    group: int
    planned: Bitset
    start: int
    tail: int | None
    block_ids: list[int]
    shards: int
    first_key: int
    _blocks: list[int] | None = None

    @property
    def blocks(self) -> list[int]:
        """Index of each entry's block in its group. Made when first asked for: only failures are
        reported by it."""
        if self._blocks is None:
            self._blocks = [self.start + i for i in self.planned.indices()]
            if self.tail is not None:
                self._blocks.append(self.tail)
        return self._blocks


class BlockPlan:
    """What saves and loads share: keys and descriptors of selected blocks of every group."""

    def __init__(
        self,
        coord: Coordinator,
        schemas: Schemas,
        layouts: Layouts,
        hashes: Hashes,
        null_block: int | None,
        max_pieces: int | None,
    ) -> None:
        n = len(coord.groups)
        self._coord = coord
        self._schemas: list[tuple[KeySchema, ...]] = per_group(schemas, KeySchema, "schemas", n)
        self._layouts: list[tuple[KVLayout, ...]] = per_group(layouts, KVLayout, "layouts", n)
        self._hashes = hashes if isinstance(hashes, BlockHashes) else BlockHashes.from_list(hashes)
        self._null_block = null_block
        if max_pieces is not None:
            check_count(max_pieces, "max_pieces")
        self._max_pieces = max_pieces
        self.keys: list[str] = []
        self._entries: list[Entries] = []
        self._failed: list[BlockFailure] = []
        self._num_bytes = 0
        self._all = TransferBatch([], [], [])
        self._positions: list[int] = []
        self._bytes: list[int] = []
        self._calls: list[tuple[int, int]] = []
        self._current: tuple[int, int] | None = None
        for g, (names, places) in enumerate(zip(self._schemas, self._layouts, strict=True)):
            if len(names) != len(places) and coord.groups[g].prefix_cacheable:
                raise ArgumentError(
                    f"`schemas` and `layouts` must have equally many shards in group {g}, "
                    f"got {len(names)} and {len(places)}"
                )

    def _digests_for(self, num_tokens: int) -> None:
        held = len(self._hashes) * self._coord.hash_block_size
        if num_tokens > held:
            raise ArgumentError(
                f"`hashes` must cover the tokens, got {held} tokens of digests and {num_tokens}"
            )

    def _add(
        self,
        group: int,
        planned: Bitset,
        start: int,
        block_ids: list[int],
        tail: tuple[int, int, int] | None,
    ) -> None:
        """Adds the planned blocks (from block ``start`` on) and, keyed by its own token boundary,
        a last block: (block, id, boundary)."""
        size = self._coord.groups[group].block_size
        unit = self._coord.hash_block_size
        builders = tuple(s.builder for s in self._schemas[group])
        first_key = len(self.keys)
        keys = build_keys(builders, self._hashes, planned, start, size // unit)
        if tail is not None:
            _, block_id, boundary = tail
            keys += build_keys(builders, [self._hashes[boundary // unit - 1]])
            block_ids = [*block_ids, block_id]
        self.keys += keys
        last = None if tail is None else tail[0]
        self._entries.append(
            Entries(group, planned, start, last, block_ids, len(builders), first_key)
        )

    def _descriptors(
        self, entries: Entries, ordinals: list[int] | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of the keys at these positions of a group (None: of all)."""
        layouts = self._layouts[entries.group]
        if entries.shards == 1:
            ids = entries.block_ids
            if ordinals is not None:
                ids = [ids[i] for i in ordinals]
            return layouts[0].addresses(ids)
        if ordinals is None:
            ordinals = list(range(len(entries.block_ids) * entries.shards))
        addresses: list[list[int]] = [[]] * len(ordinals)
        sizes: list[list[int]] = [[]] * len(ordinals)
        for shard, layout in enumerate(layouts):
            mine = [p for p, i in enumerate(ordinals) if i % entries.shards == shard]
            rows, spans = layout.addresses(
                [entries.block_ids[ordinals[p] // entries.shards] for p in mine]
            )
            for p, row, span in zip(mine, rows, spans, strict=True):
                addresses[p] = row
                sizes[p] = span
        return addresses, sizes

    def _failure(self, position: int, code: int) -> BlockFailure:
        """The failure of the key at this position of all keys."""
        for entries in reversed(self._entries):
            if position >= entries.first_key:
                i = (position - entries.first_key) // entries.shards
                return BlockFailure(
                    entries.group,
                    entries.blocks[i],
                    entries.block_ids[i],
                    self.keys[position],
                    int(code),
                )
        raise PlanStateError(f"no key at position {position} of {len(self.keys)}")

    def _cut(self, batch: TransferBatch, positions: list[int], staging: int | None) -> None:
        """Plans the calls for a batch whose keys stand at these positions of all keys."""
        self._bytes, pieces = row_totals(batch.sizes, SLICE_BYTES)
        self._all = batch
        self._positions = positions
        self._calls, oversize = split_calls(self._bytes, staging, pieces, self._max_pieces)
        self._calls.reverse()
        self._failed += [self._failure(positions[i], INVALID_PARAMS) for i in oversize]

    def next_batch(self) -> TransferBatch | None:
        """Arguments of the next call, or None when all is done.

        Raises:
            PlanStateError: The answers to the last batch are missing.
        """
        if self._current is not None:
            raise PlanStateError("`feed` must be given the answers before the next batch")
        if not self._calls:
            return None
        start, stop = self._current = self._calls.pop()
        if start == 0 and stop == len(self._all.keys):
            return self._all
        return TransferBatch(
            self._all.keys[start:stop],
            self._all.addresses[start:stop],
            self._all.sizes[start:stop],
        )

    def _answers(self, answers: Sequence[int]) -> tuple[int, list[int]]:
        """First key of the current batch and its answers; the batch is then done."""
        if self._current is None:
            raise PlanStateError("`feed` must follow `next_batch`")
        start, stop = current = self._current
        given = checked_answers(answers, stop - start)
        if self._current is not current:  # an iterator's own code, or another thread
            raise PlanStateError("`feed` must be given the answers once, got them while it read")
        self._current = None
        return start, given

    def fail(self, code: int) -> None:
        """Record that the last call as a whole failed (it raised): every key has this code.

        Raises:
            PlanStateError: No batch was asked for.
        """
        if self._current is None:
            raise PlanStateError("`fail` must follow `next_batch`")
        start, stop = self._current
        self._current = None
        for i in range(start, stop):
            self._fail_key(self._positions[i], code)

    def _fail_key(self, position: int, code: int) -> None:
        """Record a failure of the key at this position of all keys."""
        self._failed.append(self._failure(position, code))
