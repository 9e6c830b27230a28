"""The token database's keys and descriptors, from the core.

The functions here take the place of methods of ChunkedTokenDatabase and give what those give; the
keys of a request are made in one call of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvmask._core import Bitset, BlockHashes, BlockRows, KeyBuilder, Regions, build_keys
from kvmask.ascend.releases import current, seams
from kvmask.ascend.said import stays
from kvmask.errors import ArgumentError, KVMaskError

# AscendStore does not say how many blocks its tensors have: as many as addresses reach.
_MAX_BLOCKS = 1 << 62
_TOP = 1 << 64
# Addresses that a group's table keeps for the next time its blocks are used: about 40 MiB.
KEPT = 1 << 20
MIXED = "block hashes that are not all bytes or all text"


class Chunks(NamedTuple):
    """The blocks of one group that a request names.

    Attributes:
        size: Tokens per block.
        ratio: Tokens per row of the cache.
        scale: Hash blocks per block.
        named: Blocks that have a digest.
        blocks: Those of them that have a whole row.
        last: Tokens of the request.
    """

    size: int
    ratio: int
    scale: int
    named: int
    blocks: int
    last: int

    def start(self, i: int) -> int:
        """First row of a block."""
        return i * self.size // self.ratio

    def end(self, i: int) -> int:
        """Row after the last one."""
        return min((i + 1) * self.size, self.last) // self.ratio


#: A request that names no block of a group.
NO_CHUNKS = Chunks(1, 1, 1, 0, 0, 0)


def _chunks(db: Any, token_len: int, block_hashes: Any, group: int) -> Chunks | None:
    """How a group cuts a request; None leaves it to stock."""
    coord = db.cache_coordinator
    cacheable = getattr(coord, "cacheable_group_ids", None)
    if cacheable is not None and group not in cacheable:
        return NO_CHUNKS
    if type(block_hashes) is not list:
        stays("keys", f"block hashes in a {type(block_hashes).__name__}")
        return None
    if not block_hashes:
        return NO_CHUNKS
    kind = type(block_hashes[0])
    if kind not in (bytes, str) or type(block_hashes[-1]) is not kind:
        stays("keys", MIXED)
        return None
    family = db.group_cache_families.get("kv", {}).get(group, "default")
    ratio = current().ratio(family)
    size = db.get_block_size(group) * ratio
    unit = db.hash_block_size
    if unit < 1 or size < 1 or size % unit:
        stays("keys", "blocks that are not whole hash blocks")
        return None
    scale = size // unit
    if scale > 1 and current().digests_digests:
        stays("keys", "blocks of several hash blocks have digests of their own")
        return None
    named = min(len(block_hashes) // scale, -(-token_len // size)) if token_len > 0 else 0
    count = named
    if count and token_len // ratio <= (count - 1) * size // ratio:
        count -= 1  # the last block has no whole row
    return Chunks(size, ratio, scale, named, count, token_len)


def _selected(
    chunks: Chunks, mask_num: int, chunk_filter: Callable[[int], bool] | None
) -> list[int] | range:
    """Blocks from ``mask_num`` tokens on that the filter lets through."""
    first = max(0, -(-mask_num // chunks.size))
    if chunk_filter is None:
        return range(first, chunks.blocks)
    rows = chunks.size // chunks.ratio
    return [i for i in range(first, chunks.blocks) if chunk_filter(i * rows)]


def _keys(
    prefix: str, block_hashes: list[Any], ids: list[int] | range, chunks: Chunks
) -> list[str]:
    if not ids:
        return []
    step = chunks.scale
    if type(block_hashes[0]) is str:
        return [prefix + block_hashes[(i + 1) * step - 1] for i in ids]
    hashes = BlockHashes.from_list(block_hashes)
    builders = (KeyBuilder(prefix),)
    if type(ids) is range:
        return build_keys(builders, hashes, Bitset.ones(len(ids)), ids.start, step)
    mask = Bitset.from_indices(chunks.blocks, ids)
    return build_keys(builders, hashes, mask, 0, step)


def key_strings(
    self: Any,
    token_len: int,
    block_hashes: Any,
    mask_num: int = 0,
    kv_cache_group_id: int = 0,
    chunk_filter: Callable[[int], bool] | None = None,
    **more: Any,
) -> Iterable[tuple[int, int, str, Any]]:
    """(start, end, key, digest) of a group's blocks."""
    group = kv_cache_group_id
    chunks = _chunks(self, token_len, block_hashes, group)
    if chunks is None:
        return seams.stock("database.key_strings")(
            self, token_len, block_hashes, mask_num, group, chunk_filter, **more
        )
    ids = _selected(chunks, mask_num, chunk_filter)
    try:
        keys = _keys(self._get_key_prefix(group), block_hashes, ids, chunks)
    except (TypeError, ArgumentError):
        stays("keys", MIXED)
        return seams.stock("database.key_strings")(
            self, token_len, block_hashes, mask_num, group, chunk_filter, **more
        )
    step = chunks.scale
    return zip(
        map(chunks.start, ids),
        map(chunks.end, ids),
        keys,
        [block_hashes[(i + 1) * step - 1] for i in ids],
        strict=True,
    )


def key_strings_with_ids(
    self: Any,
    token_len: int,
    block_hashes: Any,
    block_ids: list[int],
    mask_num: int = 0,
    kv_cache_group_id: int = 0,
    skip_null_blocks: bool = False,
    chunk_filter: Callable[[int], bool] | None = None,
    shard_rank: int | None = None,
    shard_size: int | None = None,
    **more: Any,
) -> Iterable[tuple[int, int, str, Any, int]]:
    """(start, end, key, digest, block id) of the blocks that are this rank's to move."""
    group = kv_cache_group_id
    chunks = _chunks(self, token_len, block_hashes, group)
    if chunks is not None:
        offset = max(chunks.named - len(block_ids), 0)
        ids: list[int] | range = _selected(chunks, mask_num, chunk_filter)
        held = [i for i in ids if 0 <= i - offset < len(block_ids)]
        if skip_null_blocks:
            held = [i for i in held if block_ids[i - offset] > 0]
        if shard_rank is not None and shard_size is not None and shard_size > 1:
            held = held[shard_rank::shard_size] if 0 <= shard_rank < shard_size else []
        try:
            keys = _keys(self._get_key_prefix(group), block_hashes, held, chunks)
        except (TypeError, ArgumentError):
            stays("keys", MIXED)
            keys = None
        if keys is not None:
            step = chunks.scale
            return zip(
                map(chunks.start, held),
                map(chunks.end, held),
                keys,
                [block_hashes[(i + 1) * step - 1] for i in held],
                [block_ids[i - offset] for i in held],
                strict=True,
            )
    return seams.stock("database.key_strings_with_ids")(
        self,
        token_len,
        block_hashes,
        block_ids,
        mask_num,
        group,
        skip_null_blocks,
        chunk_filter,
        shard_rank,
        shard_size,
        **more,
    )


class Table:
    """Where the blocks of one group lie.

    Attributes:
        bases: The list of addresses that it was made of.
        lengths: Bytes per region.
        strides: Bytes from one block to the next.
        block_size: Rows per block.
        rows: Addresses; None when a region is empty or the like, which stock places.
        sizes: Sizes of a block's regions, by the number of rows that are moved.
    """

    __slots__ = ("bases", "block_size", "lengths", "rows", "sizes", "strides")

    def __init__(self, bases: Any, lengths: Any, strides: Any, block_size: int) -> None:
        self.bases, self.lengths, self.strides = bases, lengths, strides
        self.block_size = block_size
        self.sizes: dict[int, list[int]] = {}
        self.rows: BlockRows | None = None
        n = len(lengths)
        steps = strides or lengths
        try:
            regions = [(base, lengths[i % n], steps[i % n]) for i, base in enumerate(bases)]
            blocks = [_MAX_BLOCKS] + [(_TOP - b - size) // step + 1 for b, size, step in regions]
            self.rows = BlockRows(Regions(regions, min(blocks)), KEPT)
        except (KVMaskError, ZeroDivisionError, TypeError, IndexError):
            self.rows = None

    def sizes_of(self, rows: int) -> list[int]:
        """Sizes of so many rows, rounded as stock rounds them."""
        sizes = self.sizes.get(rows)
        if sizes is None:
            n, size = len(self.lengths), self.block_size
            sizes = [int(self.lengths[i % n] / size * rows) for i in range(len(self.bases))]
            if len(self.sizes) > 64:
                self.sizes.clear()
            self.sizes[rows] = sizes
        return sizes


def prepare_value(
    self: Any,
    start: int,
    end: int,
    block_ids: list[int],
    kv_cache_group_id: int = 0,
    cache_role: str = "kv",
    block_id: int | None = None,
) -> tuple[list[int], list[int], int]:
    """Addresses and sizes of a block's regions, and its id. Nobody may change the lists.

    Raises:
        BlockIdError: The id is negative, or lies past the addresses of the table.
    """
    try:
        table: Table = self.__dict__["_kvmask_tables"][kv_cache_group_id]
        fits = (
            table.bases is self.group_kv_caches_base_addr[kv_cache_group_id]
            and table.lengths is self.group_block_len[kv_cache_group_id]
            and table.strides is self.group_block_stride.get(kv_cache_group_id)
        )
    except KeyError:
        fits = False
    if cache_role != "kv":
        why = f"the cache role {cache_role}"
    elif not (fits or _make_table(self, kv_cache_group_id)):
        why = "a cache group without buffers"
    else:
        if not fits:
            table = self.__dict__["_kvmask_tables"][kv_cache_group_id]
        if block_id is None:
            index = start // table.block_size
            if index >= len(block_ids):
                return [], [], 0
            block_id = block_ids[index]
        rows = table.rows
        if rows is not None:
            length = end - start
            return (
                rows.addresses([block_id])[0][0],
                table.sizes.get(length) or table.sizes_of(length),
                block_id,
            )
        why = "a region that is empty or does not fit into 64 bits"
    stays("descriptors", why)
    stock = seams.stock("database.prepare_value")
    return stock(self, start, end, block_ids, kv_cache_group_id, cache_role, block_id)


def _make_table(self: Any, group: int) -> bool:
    """Make the table of a group anew; False when it has no buffers."""
    bases = self.group_kv_caches_base_addr.get(group)
    lengths = self.group_block_len.get(group)
    if not bases or not lengths:
        return False
    size = self.get_block_size(group)
    if type(size) is not int or size < 1:
        return False
    table = Table(bases, lengths, self.group_block_stride.get(group), size)
    self.__dict__.setdefault("_kvmask_tables", {})[group] = table
    return True
