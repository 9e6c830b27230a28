"""Masks as a picture for documents: SVG that can be read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from kvmask.cli.explain import Picture, Row, counted, describe, heading

_WIDTH, _LEFT, _RIGHT = 760, 62, 118
_CELL, _GAP, _LINE = 14, 5, 20
_MOST_CELLS = 96
_LETTER = 7.4  # width of a letter of the fonts in question, at most
_TITLES = {"store": "stored", "lookup": "asked", "load": "loaded"}
# Colours of the rows and of text: on light pages, then on dark ones. The page shows through.
_STYLE = """
    text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f; }
    .head { font-weight: 600; }
    .none { fill: #d0d7de; }
    .store { fill: #1a7f37; }
    .lookup { fill: #0969da; }
    .load { fill: #bc4c00; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .none { fill: #3d444d; }
      .store { fill: #3fb950; }
      .lookup { fill: #58a6ff; }
      .load { fill: #f0883e; }
    }
"""


def cells(row: Row, total: int, most: int = _MOST_CELLS) -> list[float]:
    """How much of each cell is set, from 0 to 1. A cell stands for one block or for several.

    Args:
        row: The mask.
        total: Blocks of the group.
        most: Cells at most.
    """
    step = max(1, -(-total // most))
    found = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        low, high = max(start, row.first), max(stop, row.first)
        if row.mask is None:
            count = high - low
        else:
            count = row.mask[low - row.first : high - row.first].count(True)
        found.append(count / (stop - start))
    return found


def _runs(values: list[float]) -> Iterator[tuple[int, int, float]]:
    """(first, last + 1, value) of equal neighbours."""
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[start]:
            yield start, i, values[start]
            start = i


def _row(row: Row, total: int, top: int) -> Iterator[str]:
    values = cells(row, total)
    size = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    middle = top + _CELL - 3
    yield f'<text x="4" y="{middle}">{_TITLES[row.name]}</text>'
    for first, stop, value in _runs(values):
        # Blocks stay apart where they are few; a long run of many is one rectangle.
        apart = size >= 6
        for i in range(first, stop) if apart else [first]:
            count = 1 if apart else stop - first
            x, width = _LEFT + i * size, count * size - (1 if apart else 0)
            box = f'x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{_CELL}"'
            if value < 1:
                yield f'<rect class="none" {box}/>'
            if value:
                # A cell of which a part is set keeps its colour, paler.
                faded = "" if value == 1 else f' opacity="{0.35 + 0.5 * value:.2f}"'
                yield f'<rect class="{row.name}" {box}{faded}/>'
    yield (f'<text x="{_WIDTH - _RIGHT + 8}" y="{middle}">{row.used} of {row.count}</text>')


def svg(picture: Picture, title: str = "", details: tuple[str, ...] = ()) -> str:
    """A picture as SVG.

    Args:
        picture: The masks.
        title: A line above it.
        details: Per group what else is said of it.
    """
    top, parts, longest = 18, [], 0
    for text in (title, heading(picture)):
        if text:
            longest = max(longest, len(text))
            parts.append(f'<text class="head" x="4" y="{top}">{escape(text)}</text>')
            top += _LINE
    for g, group in enumerate(picture.coord.groups):
        top += _GAP
        more = f"; {details[g]}" if details and details[g] else ""
        text = f"group {g}: {describe(group)}, {counted(picture.blocks[g], 'block')}{more}"
        longest = max(longest, len(text))
        parts.append(f'<text x="4" y="{top + 12}">{escape(text)}</text>')
        top += _LINE
        for row in picture.rows[g]:
            parts += _row(row, picture.blocks[g], top)
            top += _CELL + _GAP
    said = escape(title or heading(picture))
    body = "\n  ".join(parts)
    width = max(_WIDTH, round(longest * _LETTER) + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 6}" '
        f'width="{width}" height="{top + 6}" role="img" aria-label="{said}">\n'
        f"  <title>{said}</title>\n  <style>{_STYLE}  </style>\n  {body}\n</svg>\n"
    )
