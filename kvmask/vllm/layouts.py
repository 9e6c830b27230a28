"""Addresses and sizes of vLLM's store layouts, from region tables in the core.

A layout of a rank's own blocks has one table; a layout shared between tensor-parallel sizes has
one per shard that the rank holds. Tables are kept on the layout and made anew when its addresses
are. Rows of equal sizes are one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask._core import BlockRows, Regions, same_attributes
from kvmask.engines.sources import plain_function
from kvmask.errors import AlignmentError, KVMaskError
from kvmask.vllm.acting import guarded
from kvmask.vllm.binding import adopt, derived, seen, state
from kvmask.vllm.releases import StockDatabase
from kvmask.vllm.seams import stock

Rows = list[list[int]]

# vLLM does not say how many blocks the tensors of a layout have: as many as addresses reach.
_MAX_BLOCKS = 1 << 62
_TOP = 1 << 64

# Addresses that a table keeps for the next time its blocks are used: about 40 MiB when full.
KEPT = 1 << 20


class Tables:
    """Region tables of one layout.

    Attributes:
        regions: One table per shard.
        pieces: Sizes of a block's regions, per shard.
    """

    __slots__ = ("pieces", "regions")

    def __init__(self, shards: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        self.regions = [BlockRows(Regions(list(rows), _blocks(rows)), KEPT) for rows in shards]
        self.pieces = [[size for _, size, _ in rows] for rows in shards]

    def rows(self, ids: list[int], shards: Sequence[int]) -> tuple[Rows, Rows]:
        """Addresses and sizes of one shard of every block id."""
        if len(self.regions) == 1:
            return self.regions[0].addresses(ids)
        addresses: Rows = [[]] * len(ids)
        sizes: Rows = [[]] * len(ids)
        for shard, table in enumerate(self.regions):
            mine = [p for p, s in enumerate(shards) if s == shard]
            found, spans = table.addresses([ids[p] for p in mine])
            for p, row, span in zip(mine, found, spans, strict=True):
                addresses[p] = row
                sizes[p] = span
        return addresses, sizes


def _blocks(rows: Sequence[tuple[int, int, int]]) -> int:
    """Blocks whose addresses all fit in 64 bits."""
    return min([_MAX_BLOCKS, *((_TOP - base - size) // stride + 1 for base, size, stride in rows)])


def _rank_local(layout: Any) -> Tables | None:
    kept = state(layout).get("tables")
    if kept is not None and same_attributes(kept[0]):
        found: Tables | None = kept[1]
        return found
    attributes = seen(layout, "kv_caches_base_addr", "block_len")
    bases, lengths = layout.kv_caches_base_addr, layout.block_len
    tables = None
    try:
        rows = [(b, n, n) for b, n in zip(bases, _repeat(lengths, len(bases)), strict=True)]
        tables = Tables([rows])
    except (KVMaskError, ZeroDivisionError, TypeError):
        tables = None  # empty regions and the like: as stock has it
    state(layout)["tables"] = (attributes, tables)
    return tables


def _repeat(lengths: list[int], n: int) -> list[int]:
    return [lengths[i % len(lengths)] for i in range(n)]


def _sharded(layout: Any) -> Tables | None:
    kept = state(layout).get("tables")
    if kept is not None and same_attributes(kept[0]):
        found: Tables | None = kept[1]
        return found
    attributes = seen(layout, "_shard_addr_bases", "_shard_block_strides", "_shard_sizes")
    parts = (layout._shard_addr_bases, layout._shard_block_strides, layout._shard_sizes)
    tables = None
    try:
        shards = [
            list(zip(*(column.tolist() for column in row), strict=True))
            for row in zip(parts[0], parts[2], parts[1], strict=True)
        ]
        tables = Tables(shards)
    except (KVMaskError, ZeroDivisionError, TypeError):
        tables = None
    state(layout)["tables"] = (attributes, tables)
    return tables


@guarded("layout.prepare_values", strict=True)
def rank_local_values(
    self: Any,
    chunks: Sequence[tuple[int, int]],
    block_ids: list[int],
    shard_ids: Sequence[int] | None = None,
) -> tuple[Rows, Rows, list[int]]:
    """Addresses, sizes and block ids of token ranges of a rank's own blocks.

    Raises:
        AlignmentError: A range is no whole number of hash blocks, or names another rank's shard.
        BlockIdError: A block id is negative.
    """
    if not chunks:
        return [], [], []
    tables = _rank_local(self)
    if tables is None:
        return _stock_values(self, chunks, block_ids, shard_ids)
    if shard_ids is not None and (len(shard_ids) != len(chunks) or any(shard_ids)):
        raise AlignmentError(
            f"`shard_ids` must hold one 0 per chunk, got {len(shard_ids)} for {len(chunks)} chunks"
        )
    block, unit = self.block_size, self.hash_block_size
    whole = True
    for start, end in chunks:
        if (end - start) % unit:
            raise AlignmentError(
                f"`chunks` must be multiples of the hash block, got {end - start} tokens and {unit}"
            )
        whole = whole and 0 < end - start <= block
    ids = [int(block_ids[start // block]) for start, _ in chunks]
    addresses, sizes = tables.regions[0].addresses(ids)
    if not whole:
        counts = [-(-(end - start) // block) for start, end in chunks]
        wide = {n: [n * size for size in tables.pieces[0]] for n in set(counts)}
        sizes = [wide[n] for n in counts]
    return addresses, sizes, ids


def _stock_values(self: Any, chunks: Any, block_ids: Any, shard_ids: Any) -> Any:
    if shard_ids is None:
        return stock("database.prepare_values")(self, chunks, block_ids)
    return stock("layout.prepare_values")(self, chunks, block_ids, shard_ids)


@guarded("sharded_layout.prepare_values", strict=True)
def sharded_values(
    self: Any,
    chunks: Sequence[tuple[int, int]],
    block_ids: list[int],
    shard_ids: Sequence[int],
) -> tuple[Rows, Rows, list[int]]:
    """Addresses, sizes and block ids of whole blocks of the shards that a rank holds.

    Raises:
        ValueError: A chunk is no whole block, or a shard is not this rank's.
        BlockIdError: A block id is negative.
    """
    if not chunks:
        return [], [], []
    tables = _sharded(self)
    first, held, block = self.store_shard_ids[0], self.shards_per_rank, self.block_size
    shards = [s - first for s in shard_ids]
    if (
        tables is None
        or len(chunks) != len(shards)
        or any(end - start != block for start, end in chunks)
        or any(not 0 <= s < held for s in shards)
    ):
        # Stock names what is wrong with the arguments.
        return stock("sharded_layout.prepare_values")(self, chunks, block_ids, shard_ids)
    ids = [int(block_ids[start // block]) for start, _ in chunks]
    addresses, sizes = tables.rows(ids, shards)
    return addresses, sizes, ids


@guarded("database.prepare_values", strict=True)
def database_values(
    self: Any, chunks: Sequence[tuple[int, int]], block_ids: list[int]
) -> tuple[Rows, Rows, list[int]]:
    """Addresses, sizes and block ids of token ranges (to 0.29, where databases place blocks)."""
    values: tuple[Rows, Rows, list[int]] = rank_local_values(self, chunks, block_ids)
    return values


# What takes the place of `prepare_values`, by the seam that it stands behind.
VALUES = {
    "layout.prepare_values": rank_local_values,
    "sharded_layout.prepare_values": sharded_values,
    "database.prepare_values": database_values,
}


def tables_of(layout: Any) -> Tables | None:
    """The tables behind a layout's `prepare_values`, or None when something else is behind it."""
    if "prepare_values" in layout.__dict__:
        return None
    method = getattr(type(layout), "prepare_values", None)
    if method is rank_local_values or method is database_values:
        return _rank_local(layout)
    return _sharded(layout) if method is sharded_values else None


def adopt_addresses(db: Any) -> None:
    """Let a database's layout, or the database where it has none, place blocks from the core.

    A class of others that has a `prepare_values` of its own keeps it.
    """
    for thing in (getattr(db, "store_layout", None), db):
        method = plain_function(getattr(type(thing), "prepare_values", None))
        for seam, values in VALUES.items():
            if method is not None and method is stock(seam):
                stock_class: Any = type(thing)
                adopt(thing, stock_class, derived(stock_class, (("prepare_values", values),)))


class ChunkedTokenDatabase(StockDatabase):  # type: ignore[misc]
    """vLLM's token database, its rank-local layout with descriptors from the core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt_addresses(self)
