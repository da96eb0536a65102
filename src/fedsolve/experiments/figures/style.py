"""One look for every figure, and files that are the same bytes for the same data.

Series are told apart by marker and dash first; the colours only help, and differ in lightness, so that
a black-and-white print loses nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Line(Protocol):
    """What a legend lists."""

    @property
    def name(self) -> str: ...

    @property
    def look(self) -> int: ...


Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[Format, ...] = ("png", "svg", "pdf")

INK = "#26292e"
"""Text, axes and single series."""
SOFT = "#70757d"
"""Ticks, reference lines and remarks."""
RULE = "#d9dbdf"
"""The grid."""
SERIES = ("#1d3f72", "#c4562f", "#12836f", "#8a5aa8", "#b58a00", "#5c626b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (8, 3)))

# Any: the names matplotlib accepts differ between its versions, and so does their type.
SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "normal",
    "axes.titlepad": 8.0,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3.5,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "lines.markeredgewidth": 0.0,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "legend.borderaxespad": 0.0,
    "legend.columnspacing": 1.8,
    # Text stays text, so that it can be selected, searched and set in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsolve",
    "pdf.fonttype": 42,
    "figure.dpi": 100,
    "savefig.dpi": 200,
}

# Dates and versions of the drawing library would make equal figures differ.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def styled(draw: Callable[[], Figure]) -> Figure:
    """The figure that `draw` makes under the common settings."""
    with matplotlib.rc_context(SETTINGS):
        return draw()


def blank(width: float = 6.4, height: float = 3.6) -> Figure:
    """An empty figure of this size in inches, whose parts never overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def render(figure: Figure, form: Format = "svg", *, transparent: bool = False) -> bytes:
    """The figure as the contents of a file; equal figures are equal bytes."""
    stream = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(stream, format=form, metadata=_METADATA[form], transparent=transparent)
    return stream.getvalue()


def series_style(look: int) -> dict[str, Any]:
    """Marker, dash and colour of a look; the first thirty pairs of marker and dash all differ."""
    return {
        "color": SERIES[look % len(SERIES)],
        "marker": MARKERS[look % len(MARKERS)],
        # Marker and dash repeat with different periods, so that a pair comes again late.
        "linestyle": DASHES[(look + look // len(MARKERS)) % len(DASHES)],
    }


def legend_above(figure: Figure, panels: Iterable[Axes], series: Iterable[Line]) -> None:
    """One legend over the whole figure, in the order of the looks; none for a single series."""
    drawn: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        drawn |= dict(zip(names, handles, strict=True))
    looks = {line.name: line.look for line in series}
    names = sorted((name for name in looks if name in drawn), key=lambda name: looks[name])
    if len(names) < 2:
        return
    # In characters: what the figure holds across, and what a line, its name and a gap take.
    room, taken = 13 * figure.get_figwidth(), 9 + max(map(len, names))
    columns = max(1, min(len(names), int(room / taken)))
    figure.legend([drawn[name] for name in names], names, loc="outside upper left", ncols=columns)
