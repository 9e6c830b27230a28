"""`kvmask explain`: draw masks as text, to show which blocks are stored, looked up and loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvmask.coordinator import Coordinator
from kvmask.errors import ArgumentError
from kvmask.groups import Group

ALL, SOME, NONE = "#", "+", "."
# Blocks of all groups together. All masks of so many blocks take 100 MB.
MAX_BLOCKS = 1 << 28


def describe(group: Group) -> str:
    """Describe a group: its kind of attention, and its sizes in tokens.

    >>> import kvmask
    >>> describe(kvmask.SlidingWindow(block_size=64, window=128, eagle=True))
    'sliding window 128, blocks of 64, EAGLE'
    """
    text = f"{group.title}, blocks of {group.block_size}"
    if group.eagle:
        text += ", EAGLE"
    return text if group.prefix_cacheable else text + ", not cacheable"


def draw_mask(
    mask: Sequence[bool] | None, num_blocks: int, width: int = 64, first_block: int = 0
) -> str:
    """Draw a mask in at most `width` characters.

    A character shows whether all, some or none of its blocks are set.

    Args:
        mask: One bit per block, from `first_block` on. None means that all are set.
        num_blocks: Number of blocks to draw, from block 0 on.
        width: Number of characters. Each stands for the same number of blocks; the last one may
            stand for fewer.
        first_block: First block of the mask. Blocks before it are drawn as not set.

    >>> draw_mask([False, False, True, True], 4), draw_mask(None, 3)
    ('..##', '###')
    >>> draw_mask([False, True] * 4 + [True] * 8, 16, width=4)
    '++##'
    """
    if width < 1:
        raise ArgumentError(f"`width` must be at least 1, got {width}")
    step = max(1, -(-num_blocks // width))
    cells = []
    for start in range(0, num_blocks, step):
        stop = min(start + step, num_blocks)
        low, high = max(start, first_block), max(stop, first_block)
        if mask is None:
            hits = high - low
        else:
            # A slice of a bitset is a bitset. A list of bools would take eight bytes per bit.
            hits = mask[low - first_block : high - first_block].count(True)
        cells.append(ALL if hits == stop - start else SOME if hits else NONE)
    return "".join(cells)


def explain(
    coord: Coordinator,
    num_tokens: int,
    *,
    start_token: int = 0,
    num_prompt_tokens: int | None = None,
    width: int = 64,
) -> str:
    """Draw the store, lookup and load mask of every group for a prefix of `num_tokens`.

    Args:
        coord: The groups.
        num_tokens: Tokens of the prefix. Rounded down to the hit alignment.
        start_token: First token of the store mask.
        num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention.
            None means `num_tokens`.
        width: Number of characters per mask.

    Raises:
        ArgumentError: There are more than `MAX_BLOCKS` blocks.
    """
    length = coord.align(num_tokens)
    blocks = sum(-(-length // g.block_size) for g in coord.groups if g.prefix_cacheable)
    if blocks > MAX_BLOCKS:
        raise ArgumentError(
            f"`tokens` must give at most {MAX_BLOCKS} blocks, got {blocks} for {num_tokens} tokens"
        )
    tokens = str(length) if length == num_tokens else f"{length} of {num_tokens}"
    prompt = num_tokens if num_prompt_tokens is None else num_prompt_tokens
    masks = {
        "store": coord.store_mask(length, start_token, prompt),
        "lookup": coord.lookup_mask(length),
        "load": coord.load_mask(length),
    }
    retention = "dense" if coord.retention_interval is None else str(coord.retention_interval)
    lines = [
        f"{tokens} tokens, hash blocks of {coord.hash_block_size}, alignment {coord.alignment}, "
        f"retention {retention}" + (", partial hits" if coord.partial_hits else ""),
        f"{ALL} all blocks of a cell, {SOME} some, {NONE} none",
    ]
    for g, group in enumerate(coord.groups):
        total = -(-length // group.block_size)
        lines += ["", f"group {g}: {describe(group)}, {total} blocks"]
        if not group.prefix_cacheable:
            continue
        for name, per_group in masks.items():
            first = -(-start_token // group.block_size) if name == "store" else 0
            mask, count = per_group[g], max(0, total - first)
            used = count if mask is None else mask.count()
            # The store mask starts at `start_token`. Blocks before it are not stored again.
            picture = draw_mask(mask, total, width, first)
            lines.append(f"  {name:6} {picture}  {used} of {count}")
    return "\n".join(lines)
