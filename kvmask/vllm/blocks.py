"""What the two transfer threads share: the blocks of a request, their keys and descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvmask._core import Bitset, BlockHashes, KeyBuilder, build_keys
from kvmask.errors import AlignmentError
from kvmask.vllm.layouts import Rows, tables_of
from kvmask.vllm.releases import StockDatabase, group_id_of


class KeyNames(NamedTuple):
    """Key builders of a token database.

    Attributes:
        shards: One per shard that this rank moves, in the layout's order.
        lifecycle: Builds the group id that all shards of a block share.
    """

    shards: tuple[KeyBuilder, ...]
    lifecycle: KeyBuilder


def key_names(db: Any) -> KeyNames | None:
    """Builders of a database's keys; None when it does not key and place blocks as stock does."""
    layout = db.store_layout
    kept = db.__dict__.get("_kvmask_keys")
    if kept is not None and kept[0] is layout:
        return kept[1]
    names = None
    plain = getattr(type(db), "process_tokens", None) is StockDatabase.process_tokens
    if plain and "process_tokens" not in db.__dict__ and "key_for" not in layout.__dict__:
        prefixes = [layout.key_for(shard, b"") for shard in layout.local_shard_ids]
        if all(p.endswith("@") for p in prefixes):
            lifecycle = KeyBuilder(group_id_of(db.metadata, ""))
            names = KeyNames(tuple(KeyBuilder(p) for p in prefixes), lifecycle)
    db.__dict__["_kvmask_keys"] = (layout, names)
    return names


def thread_names(thread: Any) -> list[KeyNames | None] | None:
    """Key builders of every group that a thread moves; None leaves its requests to stock."""
    names: list[KeyNames | None] = []
    for db, takes_part in zip(thread.token_databases, thread.group_participates, strict=True):
        found = key_names(db) if takes_part else None
        if takes_part and found is None:
            return None
        names.append(found)
    return names


def check_digests(token_len: int, unit: int, hashes: BlockHashes) -> None:
    """Refuse a length that its digests do not name."""
    if token_len % unit or token_len // unit > len(hashes):
        raise AlignmentError(
            "`token_len` must be covered by whole hash blocks, "
            f"got {token_len} tokens and {len(hashes)} digests of {unit}"
        )


class Part:
    """Keys of one group, ascending by block; the shards of a block come together.

    Args:
        group: Group id.
        db: Its token database.
        table: Its block table.
        start: First block that was considered.
        planned: The blocks from there on that are moved.
        ids: Their entries in the block table.
        width: Shards per block.
    """

    __slots__ = ("db", "group", "ids", "ordinals", "planned", "start", "table", "width")

    def __init__(
        self,
        group: int,
        db: Any,
        table: list[int],
        start: int,
        planned: Bitset,
        ids: list[int],
        width: int,
    ) -> None:
        self.group = group
        self.db = db
        self.table = table
        self.start = start
        self.planned = planned
        self.ids = ids
        self.width = width
        self.ordinals: list[int] | None = None  # keys that are left; None: all

    def __len__(self) -> int:
        return len(self.ids) * self.width if self.ordinals is None else len(self.ordinals)

    def only(self, ordinals: list[int]) -> Part:
        """The keys at these positions."""
        part = Part(self.group, self.db, self.table, self.start, self.planned, self.ids, self.width)
        part.ordinals = ordinals
        return part

    def blocks(self) -> list[int]:
        """The block of every key."""
        if self.start:
            every = [self.start + i for i in self.planned.indices()]
        else:
            every = self.planned.indices()
        if self.ordinals is not None:
            return [every[i // self.width] for i in self.ordinals]
        return every if self.width == 1 else [b for b in every for _ in range(self.width)]

    def block_ids(self) -> list[int]:
        """The block id of every key."""
        if self.ordinals is not None:
            return [self.ids[i // self.width] for i in self.ordinals]
        return self.ids if self.width == 1 else [b for b in self.ids for _ in range(self.width)]

    def shards(self) -> list[int]:
        """The shard of every key, counted from this rank's first."""
        if self.ordinals is not None:
            return [i % self.width for i in self.ordinals]
        return list(range(self.width)) * len(self.ids)

    def descriptors(self, token_len: int) -> tuple[Rows, Rows, int]:
        """Addresses, sizes and bytes of the keys."""
        layout = self.db.store_layout
        tables = tables_of(layout)
        if tables is not None and len(tables.regions) == self.width:
            if self.ordinals is None:
                return tables.every(self.ids)
            return tables.some(self.block_ids(), self.shards())
        size = self.db.block_size
        chunks = [(b * size, min((b + 1) * size, token_len)) for b in self.blocks()]
        local = layout.local_shard_ids
        addresses, sizes, _ = layout.prepare_values(
            chunks, self.table, [local[s] for s in self.shards()]
        )
        return addresses, sizes, sum(map(sum, sizes))


def keys_of(builders: Sequence[KeyBuilder], hashes: BlockHashes, part: Part) -> list[str]:
    """One key per block and builder."""
    scale = part.db.block_size // part.db.hash_block_size
    return build_keys(tuple(builders), hashes, part.planned, part.start, scale)
