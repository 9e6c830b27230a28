"""Regions of KV tensors, and addresses and sizes of blocks.

A *region* is one contiguous piece of every block of a KV cache group. The piece of block `i` starts
at address `base + i * stride` and has `size` bytes. A stored object consists of the block's
regions, one after another.

Regions are computed from addresses, strides and storages alone. The shape of a tensor only says
which dimension counts blocks. Two engines can have equal shapes and yet order heads and tokens
differently in memory. Then their tags differ (`KVLayout.tag`), even if a block is one piece for
both.

The bytes of a block are ordered by tensor, in the given order, and then by address. Two pieces that
are adjacent in every block and belong to one storage are merged into one region. This does not
change the bytes of the object, and the store has fewer pieces to move.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvmask._core import Regions, shown
from kvmask.arrays import ArrayView, check_integer, is_array, view_of
from kvmask.errors import AlignmentError, LayoutError
from kvmask.payload import TensorFacts, tensor_facts
from kvmask.regions import Range, Region, check_count, prepare_regions

__all__ = ["KVLayout", "head_shards"]


class KVLayout:
    """Where the blocks of one KV cache group lie in memory.

    Create it with `from_tensors` or `from_regions`. It keeps its tensors alive, so its addresses
    are valid as long as the layout exists. If you pass addresses to another thread or to a store,
    keep the layout until the transfer is done. One that timed out is done when the store's client
    is closed.

    Attributes:
        num_blocks: Number of blocks. Block ids are `0 <= id < num_blocks`.
        block_bytes: Bytes of one block, over all regions.
        device: Device of the tensors, such as "cpu" or "cuda:0". None if it was not given.
        tag: Short digest of the format of an object's bytes: element types, sizes and the order of
            the dimensions in memory. Equal layouts in different allocations have equal tags. So a
            tag can be part of the namespace of a key.
        tensors: TensorFacts per tensor that is not empty, or per region of an engine's own.
        owners: The objects that own the memory.
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
        "tensors",
    )

    def __init__(
        self,
        regions: Sequence[Region],
        num_blocks: int,
        storages: Sequence[Range],
        device: str | None,
        owners: tuple[Any, ...],
        tag: str,
        tensors: Sequence[TensorFacts] = (),
    ) -> None:
        """Take regions unchecked. `from_tensors` and `from_regions` prepare and check them."""
        if device is not None and not isinstance(device, str):
            raise TypeError(f"`device` must be a str or None, got {type(device).__name__}")
        self._core = Regions(list(regions), num_blocks)
        self._regions = tuple(regions)
        self._storages = tuple(storages)
        self.num_blocks = num_blocks
        self.block_bytes = sum(size for _, size, _ in regions)
        self.device = device
        self.owners = owners
        self.tag = tag
        self.tensors = tuple(tensors)

    @classmethod
    def from_tensors(
        cls, tensors: Iterable[Any], num_blocks: int, *, block_dim: int = 0
    ) -> KVLayout:
        """Describe the blocks of a group's KV tensors.

        Args:
            tensors: torch tensors, or arrays with `__array_interface__` (NumPy) or
                `__cuda_array_interface__` (CuPy). Empty tensors are skipped. So are repeated
                tensors, and views that lie within another view in every block.
            num_blocks: Number of blocks of the group.
            block_dim: The dimension that counts blocks. Its size is `num_blocks` or a multiple of
                it. If a kernel uses smaller blocks, several entries make up one block.

        Returns:
            The layout. It keeps the tensors alive.

        Raises:
            LayoutError: A tensor cannot be read, has another number of blocks, repeats elements
                (an expanded view), extends past its storage, partly overlaps another tensor, or is
                on another device. Or all tensors are empty.

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
        """Create a layout from the regions that an engine computed itself.

        The bytes of an object do not change: the regions keep their order, and a region that lies
        within another one is kept.

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
            LayoutError: A value is not an unsigned 64 bit integer, a region extends past the
                storages or partly overlaps another one, or there are no regions.

        >>> layout = KVLayout.from_regions([(4096, 512, 512)], 4, storages=[(4096, 2048)])
        >>> layout.addresses([0, 3])
        ([[4096], [5632]], [[512], [512]])
        """
        num_blocks = check_integer(num_blocks, "`num_blocks`", 1, 1 << 63)
        given = [_integers(r, 3, f"`regions[{i}]`") for i, r in enumerate(regions)]
        ranges = [_integers(s, 2, f"`storages[{i}]`") for i, s in enumerate(storages)]
        text = f"regions {[size for _, size, _ in given]}"
        merged, kept = prepare_regions(given, num_blocks, ranges, drop=False)
        facts = [TensorFacts(None, f"{size} bytes", size) for _, size, _ in given]
        return cls(merged, num_blocks, kept, device, tuple(owners), _tag(text), facts)

    @classmethod
    def _from_views(
        cls, views: Sequence[ArrayView], num_blocks: int, block_dim: int, owners: tuple[Any, ...]
    ) -> KVLayout:
        num_blocks = check_integer(num_blocks, "`num_blocks`", 1, 1 << 63)
        if not views:
            raise LayoutError("`tensors` must hold a tensor that is not empty, got none")
        raw: list[Region] = []
        texts: list[str] = []
        facts: list[TensorFacts] = []
        for view in views:
            if view.device != views[0].device:
                raise LayoutError(
                    f"`tensors` must lie on one device, got {views[0].device} at index "
                    f"{views[0].index} and {view.device} at index {view.index}"
                )
            regions, text = _segments(view, num_blocks, block_dim)
            raw += regions
            texts.append(text)
            facts.append(tensor_facts(view, num_blocks, block_dim, text))
            check_count(len(raw), view.index)
        regions, storages = prepare_regions(raw, num_blocks, [v.storage for v in views], drop=True)
        texts.append(f"{sum(size for _, size, _ in regions)} bytes")
        tag = _tag("; ".join(texts))
        return cls(regions, num_blocks, storages, views[0].device, owners, tag, facts)

    @property
    def regions(self) -> list[Region]:
        """(base, size, stride) of every region, in the order of an object's bytes."""
        return list(self._regions)

    @property
    def storages(self) -> list[Range]:
        """(address, bytes) of the memory to register, sorted by address, without empty ranges.

        Storages that overlap are one entry. Storages that are only adjacent are two entries,
        because they are separate allocations.
        """
        return list(self._storages)

    def addresses(
        self, block_ids: Sequence[int] | Any, *, null_block: int | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the address and size of every piece of some blocks.

        Args:
            block_ids: Integers in a list, tuple, range or one-dimensional array.
            null_block: The id that means "no block" in the engine's tables. It is refused.

        Returns:
            Addresses and sizes, each with one row per block and one entry per region. All rows of
            sizes are the same list object, also in later calls. Do not change it.

        Raises:
            BlockIdError: An entry is not an integer, is out of range, or is the null block.
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
    """Split this rank's KV heads into shards, for a store that engines of several TP sizes share.

    The store holds every block as `store_tp` objects of `num_kv_heads / store_tp` heads each. If
    the engine has fewer ranks than that, each rank owns several of these objects. The bytes of a
    shard do not depend on `local_tp`, if the engines order heads and tokens equally in memory.
    Their tags are then equal.

    Args:
        tensors: As in `KVLayout.from_tensors`, with this rank's heads in dimension `head_dim`.
        num_blocks: Number of blocks of the group.
        num_kv_heads: KV heads of the model, over all ranks.
        local_tp: Tensor-parallel size of this engine.
        store_tp: Number of shards in the store.
        tp_rank: Tensor-parallel rank of this process.
        head_dim: The dimension that counts heads.
        block_dim: The dimension that counts blocks.

    Returns:
        A layout per shard id, for the shards of this rank.

    Raises:
        AlignmentError: `store_tp` is not a multiple of `local_tp`, or `num_kv_heads` is not a
            multiple of `store_tp`.
        LayoutError: A size is not positive, the rank does not exist, or a tensor has another shape.
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
    """Return the tensors, and views of those that are not empty."""
    if is_array(tensors) or not isinstance(tensors, Iterable):
        raise LayoutError(f"`tensors` must be a list of tensors, got one {type(tensors).__name__}")
    owners = tuple(tensors)
    return owners, [view for i, t in enumerate(owners) if (view := view_of(t, i)) is not None]


def _integers(values: Any, count: int, name: str) -> tuple[Any, ...]:
    """Check that `values` are `count` unsigned 64 bit integers, and return them as a tuple."""
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise LayoutError(f"{name} must be {count} integers, got {shown(values)}")
    return tuple(check_integer(value, name, 0, 1 << 64) for value in values)


def _segments(view: ArrayView, num_blocks: int, block_dim: int) -> tuple[list[Region], str]:
    """Return the regions of one tensor by address, and a text that describes it for the tag."""
    name = f"`tensors[{view.index}]`"
    block_dim = check_integer(block_dim, f"`block_dim` of tensor {view.index}", 0, len(view.shape))
    entries = view.shape[block_dim]
    if entries % num_blocks:
        raise LayoutError(
            f"{name} must have a multiple of `num_blocks` entries in dimension {block_dim}, "
            f"got {entries} and {num_blocks}"
        )
    per_block = entries // num_blocks

    # The stride of a dimension with one entry has no meaning.
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
    check_count(math.prod(n for _, n in inner), view.index)
    steps = [range(0, stride * n, stride) for stride, n in reversed(inner)]
    # The stride of a single block has no meaning. Choose one that depends only on its bytes.
    step = size if num_blocks == 1 else block_stride
    regions = [(view.address + sum(offsets), size, step) for offsets in itertools.product(*steps)]
    order = [f"b{per_block}" if d == block_dim else f"{d}:{n}" for _, n, d in reversed(dims)]
    if num_blocks * per_block == 1:
        order.insert(0, "b1")
    return regions, f"{view.dtype}*{view.itemsize} {' '.join(order)}"


def _tag(text: str) -> str:
    return "kv1-" + hashlib.sha256(text.encode()).hexdigest()[:16]
