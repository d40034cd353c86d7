"""The pictures of the report's page: plain SVG, without text, so that they stretch to any width; words stand beside them.

Pure: numbers in, markup out. Colours are classes; the page's style says what they are, by day and by night.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from msgspec import Struct

WIDE = 1000.0
POINTS_MAX = 400
"""Of a line; more are thinned out."""


class Block(Struct, frozen=True):
    """A part of a bar."""

    from_: float
    to: float
    """In the bar's own unit."""
    colour: str
    """A class."""
    words: str
    """Shown when it is pointed at."""


def bar(blocks: Iterable[Block], from_: float, to: float, label: str) -> str:
    """One bar; what is thinner than a hair is drawn as a hair."""
    scale = WIDE / max(to - from_, 1e-9)
    drawn = "".join(
        f'<rect class="{block.colour}" x="{(block.from_ - from_) * scale:.2f}" y="0" '
        f'width="{max((block.to - block.from_) * scale, 1.0):.2f}" height="10"><title>{escape(block.words)}</title></rect>'
        for block in blocks
    )
    return (
        f'<svg class="bar" viewBox="0 0 {WIDE:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{drawn}</svg>'
    )


Curve = tuple[int, Sequence[tuple[float, float]]]
"""A colour, of `line0` to `line7`, and points (x, y)."""


def lines(curves: Sequence[Curve], box: tuple[float, float, float, float], label: str) -> str:
    """Curves in a box: x from, x to, y from, y to."""
    left, right, low, high = box
    across, up = WIDE / max(right - left, 1e-9), 300 / max(high - low, 1e-9)
    drawn = []
    for colour, curve in curves:
        points = " ".join(f"{(x - left) * across:.1f},{300 - (y - low) * up:.1f}" for x, y in thinned(curve))
        drawn.append(f'<polyline class="line{colour}" points="{points}"/>')
    grid = "".join(f'<line class="grid" x1="0" x2="{WIDE:g}" y1="{y}" y2="{y}"/>' for y in (1, 75, 150, 225, 299))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDE:g} 300" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{grid}{"".join(drawn)}</svg>'
    )


def thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Its first and last point, and not too many between."""
    if len(curve) <= POINTS_MAX:
        return list(curve)
    stride = len(curve) / (POINTS_MAX - 1)
    return [curve[int(number * stride)] for number in range(POINTS_MAX - 1)] + [curve[-1]]
