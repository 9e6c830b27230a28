"""KV tensors to regions, block ids to addresses and sizes.

A *region* is one piece of every block of a KV cache group, in bytes: block `i` has it at
`base + i * stride`, `size` bytes long. The bytes of a stored object are the block's regions one
after another. Regions follow from addresses, strides and storages alone. The logical shape says
only which dimension counts blocks. Two engines of equal shapes that order heads and tokens
differently get different tags (`KVLayout.tag`), even where a block is one piece for both.

Order of a block's bytes: tensors in the order given, and within a tensor ascending address. Pieces
that touch in every block and belong to one storage are one region, because the object's bytes stay
the same and the store moves fewer pieces.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from kvmask._core import Regions
from kvmask.arrays import ArrayView, check_integer, is_array, view_of
from kvmask.errors import AlignmentError, LayoutError

__all__ = ["MAX_SEGMENTS", "KVLayout", "head_shards"]

#: Pieces of one block above which a layout is refused: no store moves that many per key.
MAX_SEGMENTS = 65_536

Region: TypeAlias = tuple[int, int, int]
Range: TypeAlias = tuple[int, int]


class KVLayout:
    """Where the blocks of one KV cache group lie in memory.

    Made by `from_tensors` or `from_regions`. It keeps its tensors alive: an address is good as long
    as the layout exists. Whoever hands addresses to another thread or to a store keeps the layout
    until the transfer is done.

    Attributes:
        num_blocks: Block ids are `0 <= id < num_blocks`.
        block_bytes: Bytes of one block, over all regions.
        device: Device of the tensors, such as "cpu" or "cuda:0"; None when nobody said.
        tag: Short digest of what an object's bytes mean: element types, sizes and the order of the
            dimensions in memory. Equal for equal layouts in other allocations, so it belongs in
            the namespace of a key.
        owners: The objects whose memory this is.
    """

    __slots__ = (
        "_core",
        "_regions",
        "_storages",
        "block_bytes",
        "device",
        "num_blocks",
        "owners",
        "tag",
    )

    def __init__(
        self,
        regions: Sequence[Region],
        num_blocks: int,
        storages: Sequence[Range],
        device: str | None,
        owners: tuple[Any, ...],
        tag: str,
    ) -> None:
        """Take regions as they are; `from_tensors` and `from_regions` prepare and check them."""
        self._core = Regions(list(regions), num_blocks)
        self._regions = tuple(regions)
        self._storages = tuple(storages)
        self.num_blocks = num_blocks
        self.block_bytes = sum(size for _, size, _ in regions)
        self.device = device
        self.owners = owners
        self.tag = tag

    @classmethod
    def from_tensors(
        cls, tensors: Iterable[Any], num_blocks: int, *, block_dim: int = 0
    ) -> KVLayout:
        """Describe the blocks of a group's KV tensors.

        Args:
            tensors: torch tensors, or arrays with `__array_interface__` (NumPy) or
                `__cuda_array_interface__` (CuPy). Empty ones are skipped. Views that lie within
                another one in every block are dropped; so are repeated ones.
            num_blocks: Blocks of the group.
            block_dim: The dimension that counts blocks. Its size is `num_blocks`, or a multiple
                of it when a kernel's blocks are smaller: then that many entries are one block.

        Returns:
            The layout, which keeps the tensors.

        Raises:
            LayoutError: A tensor cannot be read, has another number of blocks, repeats elements
                (an expanded view), leaves its storage, partly overlaps another one, or lies on
                another device; or all tensors are empty.

        >>> import numpy as np
        >>> KVLayout.from_tensors([np.zeros((4, 2, 16), np.float32)], num_blocks=4)
        KVLayout(num_blocks=4, regions=1, block_bytes=128, device='cpu')
        """
        owners, views = _views(tensors)
        return cls._from_views(views, num_blocks, block_dim, owners)

    @classmethod
    def from_regions(
        cls,
        regions: Iterable[Region],
        num_blocks: int,
        storages: Iterable[Range],
        device: str | None = None,
        owners: Iterable[Any] = (),
    ) -> KVLayout:
        """Take the descriptors that an engine made itself.

        The bytes of an object stay as the engine has them: regions keep their order, and one that
        lies within another is kept.

        Args:
            regions: (base, size, stride) of every region: address of block 0, bytes of one piece,
                bytes from one block to the next.
            num_blocks: Blocks of every region.
            storages: (address, bytes) of the memory that holds them.
            device: Where that is, such as "cuda:0".
            owners: Objects to keep alive with the layout.

        Returns:
            The layout, with touching regions merged.

        Raises:
            LayoutError: A value is no unsigned 64 bit integer, a region leaves the storages or
                partly overlaps another one, or there are no regions.

        >>> layout = KVLayout.from_regions([(4096, 512, 512)], 4, storages=[(4096, 2048)])
        >>> layout.addresses([0, 3])
        ([[4096], [5632]], [[512], [512]])
        """
        num_blocks = check_integer(num_blocks, "`num_blocks`", 1, 1 << 63)
        given = [_integers(r, 3, f"`regions[{i}]`") for i, r in enumerate(regions)]
        ranges = [_integers(s, 2, f"`storages[{i}]`") for i, s in enumerate(storages)]
        text = f"regions {[size for _, size, _ in given]}"
        merged, kept = _prepare(given, num_blocks, ranges, drop=False)
        return cls(merged, num_blocks, kept, device, tuple(owners), _tag(text))

    @classmethod
    def _from_views(
        cls, views: Sequence[ArrayView], num_blocks: int, block_dim: int, owners: tuple[Any, ...]
    ) -> KVLayout:
        num_blocks = check_integer(num_blocks, "`num_blocks`", 1, 1 << 63)
        if not views:
            raise LayoutError("`tensors` must hold a tensor that is not empty, got none")
        raw: list[Region] = []
        texts: list[str] = []
        for view in views:
            if view.device != views[0].device:
                raise LayoutError(
                    f"`tensors` must lie on one device, got {views[0].device} at index "
                    f"{views[0].index} and {view.device} at index {view.index}"
                )
            regions, text = _segments(view, num_blocks, block_dim)
            raw += regions
            texts.append(text)
            _check_count(len(raw), view.index)
        regions, storages = _prepare(raw, num_blocks, [v.storage for v in views], drop=True)
        texts.append(f"{sum(size for _, size, _ in regions)} bytes")
        return cls(regions, num_blocks, storages, views[0].device, owners, _tag("; ".join(texts)))

    @property
    def regions(self) -> list[Region]:
        """(base, size, stride) of every region, in the order of an object's bytes."""
        return list(self._regions)

    @property
    def storages(self) -> list[Range]:
        """(address, bytes) of the memory to register, each piece once, sorted, none empty.

        Overlapping storages are one entry. Ones that only touch stay apart: they are separate
        allocations.
        """
        return list(self._storages)

    def addresses(
        self, block_ids: Sequence[int] | Any, *, null_block: int | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Give the address and size of every piece of some blocks.

        Args:
            block_ids: Integers in a list, tuple, range or one-dimensional array.
            null_block: The block that stands for "no block" in the engine's tables; refused.

        Returns:
            Addresses and sizes, one row per block and one entry per region. All rows of sizes are
            the same list object, also in later calls: read it, do not change it.

        Raises:
            BlockIdError: An entry is no integer, is not `0 <= id < num_blocks`, or is the null
                block.
        """
        rows: tuple[list[list[int]], list[list[int]]] = self._core.addresses(block_ids, null_block)
        return rows

    def __repr__(self) -> str:
        return (
            f"KVLayout(num_blocks={self.num_blocks}, regions={len(self._regions)}, "
            f"block_bytes={self.block_bytes}, device={self.device!r})"
        )


def head_shards(
    tensors: Iterable[Any],
    num_blocks: int,
    *,
    num_kv_heads: int,
    local_tp: int,
    store_tp: int,
    tp_rank: int,
    head_dim: int = 1,
    block_dim: int = 0,
) -> dict[int, KVLayout]:
    """Cut this rank's KV heads into the shards of a store that several TP sizes share.

    The store holds every block as `store_tp` objects of `num_kv_heads / store_tp` heads. A rank of
    an engine with fewer ranks owns several of them. The bytes of a shard are the same whatever
    `local_tp` is, as long as the engines order heads and tokens alike in memory (equal tags).

    Args:
        tensors: As in `KVLayout.from_tensors`, with this rank's heads in dimension `head_dim`.
        num_blocks: Blocks of the group.
        num_kv_heads: KV heads of the model, over all ranks.
        local_tp: Tensor-parallel size of this engine.
        store_tp: Tensor-parallel size that the store's objects are cut for.
        tp_rank: This rank.
        head_dim: The dimension that counts heads.
        block_dim: The dimension that counts blocks.

    Returns:
        Shard id to layout, for the shards of this rank.

    Raises:
        AlignmentError: `local_tp` does not divide `store_tp`, or `store_tp` not `num_kv_heads`.
        LayoutError: A size is not positive, the rank does not exist, or a tensor does not fit.
    """
    num_kv_heads = check_integer(num_kv_heads, "`num_kv_heads`", 1, 1 << 31)
    local_tp = check_integer(local_tp, "`local_tp`", 1, 1 << 31)
    store_tp = check_integer(store_tp, "`store_tp`", 1, 1 << 31)
    tp_rank = check_integer(tp_rank, "`tp_rank`", 0, local_tp)
    if store_tp % local_tp:
        raise AlignmentError(
            f"`store_tp` must be a multiple of `local_tp`, got {store_tp} and {local_tp}"
        )
    if num_kv_heads % store_tp:
        raise AlignmentError(
            f"`num_kv_heads` must be a multiple of `store_tp`, got {num_kv_heads} and {store_tp}"
        )
    owners, views = _views(tensors)
    local_heads, heads = num_kv_heads // local_tp, num_kv_heads // store_tp
    for view in views:
        head_dim = check_integer(head_dim, f"`head_dim` of tensor {view.index}", 0, len(view.shape))
        if head_dim == block_dim or view.shape[head_dim] != local_heads:
            raise LayoutError(
                f"`tensors[{view.index}]` must have {local_heads} heads in dimension {head_dim}, "
                f"which is not the one of the blocks, got shape {view.shape}"
            )
    shards = store_tp // local_tp
    return {
        tp_rank * shards + i: KVLayout._from_views(
            [view.narrow(head_dim, i * heads, heads) for view in views],
            num_blocks,
            block_dim,
            owners,
        )
        for i in range(shards)
    }


def _views(tensors: Iterable[Any]) -> tuple[tuple[Any, ...], list[ArrayView]]:
    """The tensors, and what memory those are that have elements."""
    if is_array(tensors) or not isinstance(tensors, Iterable):
        raise LayoutError(f"`tensors` must be a list of tensors, got one {type(tensors).__name__}")
    owners = tuple(tensors)
    return owners, [view for i, t in enumerate(owners) if (view := view_of(t, i)) is not None]


def _integers(values: Any, count: int, name: str) -> tuple[Any, ...]:
    """A tuple of `count` unsigned 64 bit integers."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise LayoutError(f"{name} must be {count} integers, got {values!r}")
    return tuple(check_integer(value, name, 0, 1 << 64) for value in values)


def _check_count(count: int, index: int) -> None:
    if count > MAX_SEGMENTS:
        raise LayoutError(
            f"`tensors` must have at most {MAX_SEGMENTS} segments per block, "
            f"got {count} up to index {index}"
        )


def _segments(view: ArrayView, num_blocks: int, block_dim: int) -> tuple[list[Region], str]:
    """Regions of one tensor by ascending address, and the text of its layout for the tag."""
    name = f"`tensors[{view.index}]`"
    block_dim = check_integer(block_dim, f"`block_dim` of tensor {view.index}", 0, len(view.shape))
    entries = view.shape[block_dim]
    if entries % num_blocks:
        raise LayoutError(
            f"{name} must have a multiple of `num_blocks` entries in dimension {block_dim}, "
            f"got {entries} and {num_blocks}"
        )
    per_block = entries // num_blocks

    # A dimension of one entry has no stride to speak of.
    dims = [
        (stride, n, d)
        for d, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True))
        if n > 1
    ]
    dims.sort()
    extent = view.itemsize
    for stride, n, d in dims:
        if stride < extent:
            raise LayoutError(
                f"{name} must not repeat or interleave elements, got stride {stride} in dimension "
                f"{d}, whose entries span {extent} bytes"
            )
        extent += stride * (n - 1)

    block_stride = view.strides[block_dim] * per_block
    inner = [
        (stride, per_block if d == block_dim else n)
        for stride, n, d in dims
        if d != block_dim or per_block > 1
    ]
    size = view.itemsize
    while inner and inner[0][0] == size:
        size *= inner.pop(0)[1]
    _check_count(math.prod(n for _, n in inner), view.index)
    steps = [range(0, stride * n, stride) for stride, n in reversed(inner)]
    # The stride of a single block means nothing; give one that depends on the bytes alone.
    step = size if num_blocks == 1 else block_stride
    regions = [(view.address + sum(offsets), size, step) for offsets in itertools.product(*steps)]
    order = [f"b{per_block}" if d == block_dim else f"{d}:{n}" for _, n, d in reversed(dims)]
    if num_blocks * per_block == 1:
        order.insert(0, "b1")
    return regions, f"{view.dtype}*{view.itemsize} {' '.join(order)}"


def _tag(text: str) -> str:
    return "kv1-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _prepare(
    raw: list[Region], num_blocks: int, storages: Iterable[Range], drop: bool
) -> tuple[list[Region], list[Range]]:
    """Checked, merged regions and the storages that hold them."""
    if not raw:
        raise LayoutError("`regions` must hold at least one region, got none")
    _check_count(len(raw), len(raw) - 1)
    Regions(raw, num_blocks)  # sizes, strides and 64 bit ends
    ranges = merge_ranges(_check_storages(storages))
    starts = [address for address, _ in ranges]
    homes: list[int] = []
    for i, (base, size, stride) in enumerate(raw):
        home = bisect_right(starts, base) - 1
        end = base + (num_blocks - 1) * stride + size
        if base == 0 or home < 0 or end > sum(ranges[home]):
            raise LayoutError(
                f"`regions` must lie within a storage, got bytes {base:#x} to {end:#x} at index {i}"
                f" and {_show(ranges, home)}"
            )
        homes.append(home)
    given = list(zip(raw, homes, strict=True))
    # Covered regions go first, lest one be merged into something that is only partly covered; what
    # merging builds can cover more.
    distinct = _drop_contained(_merge(_drop_contained(given, num_blocks), num_blocks), num_blocks)
    _check_overlaps(distinct, num_blocks)
    regions = _merge(distinct if drop else given, num_blocks)
    return [region for region, _ in regions], ranges


def _show(ranges: list[Range], home: int) -> str:
    if not ranges:
        return "no storage"
    address, size = ranges[max(home, 0)]
    return f"a storage of {address:#x} to {address + size:#x}"


def _check_storages(storages: Iterable[Range]) -> list[Range]:
    held = sorted(s for s in storages if s[1] > 0)
    for address, size in held:
        if address == 0 or address + size > 1 << 64:
            raise LayoutError(
                f"`storages` must lie above 0 and within 64 bit addresses, got {address} and {size}"
            )
    return held


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Each byte once: ranges that overlap become one; ranges that merely touch stay apart, since
    two allocations are two registrations.

    >>> merge_ranges([(0, 8), (4, 8), (12, 4), (0, 0)])
    [(0, 12), (12, 4)]
    """
    merged: list[Range] = []
    for address, size in sorted(r for r in ranges if r[1] > 0):
        if merged and address < sum(merged[-1]):
            start, length = merged[-1]
            merged[-1] = (start, max(length, address + size - start))
        else:
            merged.append((address, size))
    return merged


_Placed: TypeAlias = tuple[Region, int]


def _merge(placed: list[_Placed], num_blocks: int) -> list[_Placed]:
    """Join neighbours in order that touch in every block and share a storage."""
    merged: list[_Placed] = []
    for (base, size, stride), home in placed:
        if merged:
            (last_base, last_size, last_stride), last_home = merged[-1]
            one = num_blocks == 1
            if (
                home == last_home
                and base == last_base + last_size
                and (one or (stride == last_stride and last_size + size <= stride))
            ):
                total = last_size + size
                merged[-1] = ((last_base, total, total if one else stride), home)
                continue
        merged.append(((base, size, stride), home))
    return merged


def _drop_contained(placed: list[_Placed], num_blocks: int) -> list[_Placed]:
    """Without regions that lie within another one in every block; the first of equals stays."""
    kept: list[int] = []
    previous, reach = -1, -1
    # The stride of a single block means nothing.
    strides = [0 if num_blocks == 1 else stride for (_, _, stride), _ in placed]
    order = range(len(placed))
    for i in sorted(order, key=lambda i: (strides[i], placed[i][0][0], -placed[i][0][1], i)):
        (base, size, _), _ = placed[i]
        stride = strides[i]
        if stride != previous:
            previous, reach = stride, -1
        if base + size > reach:
            reach = base + size
            kept.append(i)
    return [placed[i] for i in sorted(kept)]


def _check_overlaps(placed: list[_Placed], num_blocks: int) -> None:
    homes: dict[int, list[Region]] = {}
    for region, home in placed:
        homes.setdefault(home, []).append(region)
    for regions in homes.values():
        regions.sort()
        if _apart_in_one_stride(regions):
            continue
        pair = Regions(regions, num_blocks).find_overlap()
        if pair is not None:
            first, second = (regions[i] for i in pair)
            raise LayoutError(
                f"`regions` must not overlap partly, got (base, size, stride) {first} and {second}"
            )


def _apart_in_one_stride(regions: list[Region]) -> bool:
    """True when all strides are equal and the regions are apart modulo the stride.

    That settles the usual block-major layouts in linear time; others need the pairwise check.
    """
    stride = regions[0][2]
    if any(s != stride for _, _, s in regions):
        return False
    arcs = sorted((base % stride, size) for base, size, _ in regions) if stride else []
    return bool(arcs) and all(
        start + size <= next_start
        for (start, size), (next_start, _) in itertools.pairwise([*arcs, (arcs[0][0] + stride, 0)])
    )
