"""A measure over exchanges as a small drawing, in SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsolve.markup import Markup, tag

_WIDTH, _HEIGHT = 320, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 8, 20, 22


def curve(
    points: Sequence[tuple[float, float]], words: str, low: str, high: str, ends: tuple[str, str]
) -> Markup:
    """A line through (exchange, value) points; low and high: labels of the least and the greatest value."""
    across, values = [x for x, _ in points], [y for _, y in points]
    least, most = min(values), max(values)
    spread = most - least or max(abs(most), 1.0) * 1e-3
    reach = max(across) - min(across) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - min(across)) / reach * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - least) / spread * (_HEIGHT - _TOP - _BOTTOM)
        return round(right, 1), round(down, 1)

    placed = [place(x, y) for x, y in points if math.isfinite(y)]
    last = placed[-1]
    base = _HEIGHT - _BOTTOM
    return tag(
        "svg",
        tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=base, y2=base, class_="axis"),
        tag("polyline", points=" ".join(f"{x},{y}" for x, y in placed), class_="line"),
        tag("circle", cx=last[0], cy=last[1], r="3.5", class_="now"),
        tag("text", high, x=_LEFT, y=_TOP - 8),
        tag("text", low if most > least else "", x=_WIDTH - _RIGHT, y=_TOP - 8, text_anchor="end"),
        tag("text", ends[0], x=_LEFT, y=_HEIGHT - 6),
        tag("text", ends[1] if len(points) > 1 else "", x=_WIDTH - _RIGHT, y=_HEIGHT - 6, text_anchor="end"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=words,
    )
