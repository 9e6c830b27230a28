"""Drawings as SVG that can be read on light and on dark pages, and are equal in every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

# Class to its colour on light pages, then on dark ones.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "none": ("#d8dee4", "#3d444d"),
    "store": ("#1a7f37", "#3fb950"),
    "lookup": ("#0969da", "#58a6ff"),
    "load": ("#bc4c00", "#f0883e"),
    "miss": ("#cf222e", "#f85149"),
    "stock": ("#6e7781", "#9198a1"),
    "box": ("#f6f8fa", "#161b22"),
    "own": ("#ddf4ff", "#122d4f"),
}
TEXT, SOFT, EDGE = ("#1f2328", "#e6edf3"), ("#59636e", "#9ea7b0"), ("#818b98", "#6e7781")
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"


def _style() -> str:
    """The style sheet: the colours of light pages, and those of dark ones."""
    parts = [f"text {{ font: 12px {FONT}; }}", ".head { font-weight: 600; font-size: 13px; }"]
    parts += [".edge { fill: none; }", ".curve { fill: none; stroke-width: 2; }"]
    for dark in (0, 1):
        rules = [
            f"text {{ fill: {TEXT[dark]}; }}",
            f".soft {{ fill: {SOFT[dark]}; }}",
            f".edge, .box, .own {{ stroke: {EDGE[dark]}; }}",
            f".grid {{ stroke: {COLOURS['none'][dark]}; }}",
            f".tip {{ fill: {EDGE[dark]}; }}",
        ]
        for name, colours in COLOURS.items():
            rules.append(f".{name} {{ fill: {colours[dark]}; }}")
            rules.append(f".curve.{name} {{ stroke: {colours[dark]}; fill: none; }}")
        if dark:
            rules = ["@media (prefers-color-scheme: dark) {", *(f"  {r}" for r in rules), "}"]
        parts += rules
    return "\n".join(f"    {part}" for part in parts)


class Drawing:
    """Shapes of one picture, in pixels from its upper left corner.

    Args:
        width, height: Size of the picture.
        title: What it shows, in one sentence, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.title = title
        self._parts: list[str] = []

    def rect(
        self, name: str, x: float, y: float, width: float, height: float, *, round_: float = 0
    ) -> None:
        """Draw a rectangle of the class `name`."""
        corner = f' rx="{round_:g}"' if round_ else ""
        self._parts.append(
            f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"{corner}/>'
        )

    def text(self, x: float, y: float, text: str, name: str = "", anchor: str = "start") -> None:
        """Write text. `anchor` is the end that stands at `x`: start, middle or end."""
        cls = f' class="{name}"' if name else ""
        at = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text{cls} x="{x:.1f}" y="{y:.1f}"{at}>{escape(text)}</text>')

    def line(self, name: str, *points: tuple[float, float]) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline class="{name}" points="{path}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line whose end has a tip."""
        self.line("edge", *points)
        (x0, y0), (x, y) = points[-2:]
        turn = math.degrees(math.atan2(y - y0, x - x0))
        self._parts.append(
            f'<path class="tip" d="M0 0L-8 -4L-8 4Z" '
            f'transform="translate({x:.1f} {y:.1f}) rotate({turn:.1f})"/>'
        )

    def box(
        self, x: float, y: float, width: float, lines: Sequence[str], name: str = "box"
    ) -> float:
        """Draw a box with a heading and further lines, and return its lower edge."""
        height = 16 * len(lines) + 12
        self.rect(name, x, y, width, height, round_=5)
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + 19 + 16 * i, line, "soft" if i else "head", "middle")
        return y + height

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Draw small squares with their meaning, side by side: pairs of class and text."""
        for name, text in entries:
            self.rect(name, x, y - 10, 11, 11)
            self.text(x + 16, y, text)
            x += 16 + 6.8 * len(text) + 22

    def svg(self) -> str:
        """Return the picture as text."""
        width, height = self.size
        said, body = escape(self.title), "\n  ".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="title">\n'
            f'  <title id="title">{said}</title>\n  <style>\n{_style()}\n  </style>\n'
            f'  <rect class="page" width="{width}" height="{height}" rx="6"/>\n  {body}\n</svg>\n'
        )


class LogPlot:
    """A part of a drawing with two logarithmic axes.

    Args:
        drawing: Where to draw.
        left, top, width, height: The plot's place, without what is written beside the axes.
        x, y: (least, most) of each axis.
    """

    def __init__(
        self,
        drawing: Drawing,
        place: tuple[float, float, float, float],
        x: tuple[float, float],
        y: tuple[float, float],
    ) -> None:
        self.drawing = drawing
        self.left, self.top, self.width, self.height = place
        self.x, self.y = x, y

    def across(self, value: float) -> float:
        """The place of a value of the x axis."""
        low, high = map(math.log, self.x)
        return self.left + self.width * (math.log(value) - low) / (high - low)

    def down(self, value: float) -> float:
        """The place of a value of the y axis."""
        low, high = map(math.log, self.y)
        return self.top + self.height * (high - math.log(value)) / (high - low)

    def axes(
        self, title: str, x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]]
    ) -> None:
        """Draw the grid. Both axes take pairs of a value and its text."""
        draw = self.drawing
        bottom, right = self.top + self.height, self.left + self.width
        draw.text(self.left, self.top - 10, title, "head")
        for value, text in x:
            at = self.across(value)
            draw.line("grid", (at, self.top), (at, bottom))
            draw.text(at, bottom + 16, text, "soft", "middle")
        for value, text in y:
            at = self.down(value)
            draw.line("grid", (self.left, at), (right, at))
            if text:
                draw.text(self.left - 6, at + 4, text, "soft", "end")

    def curve(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        """Draw a curve through (x, y) pairs, in units of the axes. Pairs outside are left out."""
        inside = [
            (self.across(x), self.down(y))
            for x, y in points
            if self.x[0] <= x <= self.x[1] and self.y[0] <= y <= self.y[1]
        ]
        self.drawing.line(f"curve {name}", *inside)
