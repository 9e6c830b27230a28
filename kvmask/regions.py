"""Regions in memory: that they lie within storages, which ones touch and which overlap.

A region is (base, size, stride), as `kvmask.layout` says. A storage is (address, bytes).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

from kvmask._core import Regions
from kvmask.errors import LayoutError

#: Largest number of pieces per block. No store moves so many per key.
MAX_SEGMENTS = 65_536

Region: TypeAlias = tuple[int, int, int]
Range: TypeAlias = tuple[int, int]


def check_count(count: int, index: int) -> None:
    if count > MAX_SEGMENTS:
        raise LayoutError(
            f"`tensors` must have at most {MAX_SEGMENTS} segments per block, "
            f"got {count} up to index {index}"
        )


def prepare_regions(
    raw: list[Region], num_blocks: int, storages: Iterable[Range], drop: bool
) -> tuple[list[Region], list[Range]]:
    """Check and merge regions. Return them with the storages that contain them."""
    if not raw:
        raise LayoutError("`regions` must hold at least one region, got none")
    check_count(len(raw), len(raw) - 1)
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
    # Drop covered regions before merging. Otherwise a covered one may be merged with a neighbour
    # into a region that is only partly covered. Merged regions can cover others, so drop again.
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
    """Merge ranges that overlap, so that each byte is in one range.

    Adjacent ranges are not merged. They are separate allocations and are registered separately.

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


_Homed: TypeAlias = tuple[Region, int]


def _merge(homed: list[_Homed], num_blocks: int) -> list[_Homed]:
    """Merge successive regions that are adjacent in every block and in the same storage."""
    merged: list[_Homed] = []
    for (base, size, stride), home in homed:
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


def _drop_contained(homed: list[_Homed], num_blocks: int) -> list[_Homed]:
    """Drop regions that lie within another one in every block. Of equal ones the first is kept."""
    kept: list[int] = []
    previous, reach = -1, -1
    # The stride of a single block has no meaning.
    strides = [0 if num_blocks == 1 else stride for (_, _, stride), _ in homed]
    order = range(len(homed))
    for i in sorted(order, key=lambda i: (strides[i], homed[i][0][0], -homed[i][0][1], i)):
        (base, size, _), _ = homed[i]
        stride = strides[i]
        if stride != previous:
            previous, reach = stride, -1
        if base + size > reach:
            reach = base + size
            kept.append(i)
    return [homed[i] for i in sorted(kept)]


def _check_overlaps(homed: list[_Homed], num_blocks: int) -> None:
    homes: dict[int, list[Region]] = {}
    for region, home in homed:
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
    """True when all strides are equal and the regions do not overlap modulo the stride.

    This is a fast check for the usual block-major layouts. Others need the check of all pairs.
    """
    stride = regions[0][2]
    if any(s != stride for _, _, s in regions):
        return False
    arcs = sorted((base % stride, size) for base, size, _ in regions) if stride else []
    return bool(arcs) and all(
        start + size <= next_start
        for (start, size), (next_start, _) in itertools.pairwise([*arcs, (arcs[0][0] + stride, 0)])
    )
