"""Masks as text, to show which blocks are stored, looked up and loaded, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmask._core import Bitset
from kvmask.cli.terminal import Paint
from kvmask.coordinator import Coordinator
from kvmask.errors import ArgumentError
from kvmask.groups import Group

ALL, SOME, NONE = "#", "+", "."
# Row of a picture to its colour on a terminal.
COLOURS = {"store": "green", "lookup": "cyan", "load": "yellow"}
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


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "block"), counted(2, "block")
    ('1 block', '2 blocks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


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


@dataclass(frozen=True)
class Row:
    """One mask of one group.

    Attributes:
        name: "store", "lookup" or "load".
        mask: A bit per block from `first` on; None: all are set.
        first: First block of the mask.
        count: Blocks of the mask.
        used: Bits that are set.
    """

    name: str
    mask: Bitset | None
    first: int
    count: int
    used: int


@dataclass(frozen=True)
class Picture:
    """The masks of a prefix.

    Attributes:
        coord: The groups.
        num_tokens: Tokens that were asked for.
        length: Tokens of the prefix, aligned.
        blocks: Per group its blocks.
        rows: Per group its masks; none for a group that is not cacheable.
    """

    coord: Coordinator
    num_tokens: int
    length: int
    blocks: tuple[int, ...]
    rows: tuple[tuple[Row, ...], ...]

    def used(self, name: str) -> list[int]:
        """Per group the blocks of one kind of mask that are set."""
        return [sum(row.used for row in rows if row.name == name) for rows in self.rows]


def picture_of(
    coord: Coordinator,
    num_tokens: int,
    *,
    start_token: int = 0,
    num_prompt_tokens: int | None = None,
    states: bool = False,
) -> Picture:
    """The store, lookup and load mask of every group for a prefix of `num_tokens`.

    Args:
        coord: The groups.
        num_tokens: Tokens of the prefix. Rounded down to the hit alignment.
        start_token: First token of the store mask.
        num_prompt_tokens: Length of the prompt, for the replay boundaries of sparse retention.
            None means `num_tokens`.
        states: Draw the states that are stored. Otherwise an engine hands them over.

    Raises:
        ArgumentError: There are more than `MAX_BLOCKS` blocks.
    """
    length = coord.align(num_tokens)
    totals = tuple(-(-length // g.block_size) for g in coord.groups)
    blocks = sum(n for n, g in zip(totals, coord.groups, strict=True) if g.prefix_cacheable)
    if blocks > MAX_BLOCKS:
        raise ArgumentError(
            f"`tokens` must give at most {MAX_BLOCKS} blocks, got {blocks} for {num_tokens} tokens"
        )
    prompt = num_tokens if num_prompt_tokens is None else num_prompt_tokens
    masks = {
        "store": coord.store_mask(length, start_token, prompt, states),
        "lookup": coord.lookup_mask(length),
        "load": coord.load_mask(length),
    }
    rows = []
    for g, group in enumerate(coord.groups):
        made = []
        for name, per_group in masks.items() if group.prefix_cacheable else ():
            # The store mask starts at `start_token`. Blocks before it are not stored again.
            first = -(-start_token // group.block_size) if name == "store" else 0
            mask, count = per_group[g], max(0, totals[g] - first)
            made.append(Row(name, mask, first, count, count if mask is None else mask.count()))
        rows.append(tuple(made))
    return Picture(coord, num_tokens, length, totals, tuple(rows))


def heading(picture: Picture) -> str:
    """What is drawn, in a line."""
    coord, length = picture.coord, picture.length
    tokens = str(length) if length == picture.num_tokens else f"{length} of {picture.num_tokens}"
    retention = "dense" if coord.retention_interval is None else str(coord.retention_interval)
    return (
        f"{tokens} tokens, hash blocks of {coord.hash_block_size}, alignment {coord.alignment}, "
        f"retention {retention}" + (", partial hits" if coord.partial_hits else "")
    )


def explain(
    coord: Coordinator,
    num_tokens: int,
    *,
    start_token: int = 0,
    num_prompt_tokens: int | None = None,
    width: int = 64,
    paint: Paint | None = None,
) -> str:
    """Draw the masks of `picture_of` as text.

    Args:
        coord: As there.
        num_tokens: As there.
        start_token: As there.
        num_prompt_tokens: As there.
        width: Number of characters per mask.
        paint: Colours of the masks; none by default.

    Raises:
        ArgumentError: There are more than `MAX_BLOCKS` blocks.
    """
    found = picture_of(
        coord, num_tokens, start_token=start_token, num_prompt_tokens=num_prompt_tokens
    )
    return draw(found, width, Paint(on=False) if paint is None else paint)


def draw(picture: Picture, width: int, paint: Paint, details: Sequence[str] = ()) -> str:
    """A picture as text.

    Args:
        picture: The masks.
        width: Number of characters per mask.
        paint: Colours.
        details: Per group what else is said of it.
    """
    lines = [heading(picture), f"{ALL} all blocks of a cell, {SOME} some, {NONE} none"]
    for g, group in enumerate(picture.coord.groups):
        total = picture.blocks[g]
        more = f"; {details[g]}" if details and details[g] else ""
        lines += ["", f"group {g}: {describe(group)}, {counted(total, 'block')}{more}"]
        for row in picture.rows[g]:
            drawn = paint(draw_mask(row.mask, total, width, row.first), COLOURS[row.name])
            lines.append(f"  {row.name:6} {drawn}  {row.used} of {row.count}")
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """A number of bytes for people.

    >>> size_text(1536), size_text(12), size_text(3 << 30)
    ('1.5 KiB', '12 B', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    digits = f"{num_bytes:.1f}" if num_bytes < 100 else f"{num_bytes:.0f}"
    return f"{digits.removesuffix('.0')} {unit}"


def savings(picture: Picture, block_bytes: Sequence[int | None]) -> list[list[str]]:
    """What the masks leave of all blocks, as rows of a table.

    Args:
        picture: The masks.
        block_bytes: Per group the bytes of one block; None: not known.
    """
    known = all(
        size is not None or not rows for size, rows in zip(block_bytes, picture.rows, strict=True)
    )
    table = [["", "blocks", *(["bytes", "saved"] if known else ["saved"])]]
    whole = [n if rows else 0 for n, rows in zip(picture.blocks, picture.rows, strict=True)]
    rows = [("without masks", whole)]
    rows += [(text, picture.used(name)) for name, text in _WORDS.items()]

    def total(counts: Sequence[int]) -> int:
        if not known:
            return sum(counts)
        return sum(n * (size or 0) for n, size in zip(counts, block_bytes, strict=True))

    for text, counts in rows:
        cells = [text, str(sum(counts))]
        if known and text == "asked":
            cells.append("")  # keys are asked for, no bytes
        elif known:
            cells.append(size_text(total(counts)))
        of = (
            sum(counts) / max(1, sum(whole))
            if text == "asked"
            else total(counts) / max(1, total(whole))
        )
        cells.append("" if counts is whole else f"{100 * (1 - of):.0f}%")
        table.append(cells)
    return table


_WORDS = {"store": "stored", "lookup": "asked", "load": "loaded"}
