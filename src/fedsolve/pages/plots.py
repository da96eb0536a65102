"""Figures described by data, and the one renderer that draws them.

A figure is a few panels side by side. A panel says what its axes are, which series it shows, and as what:

lines   a line over x for every series, with bars of standard errors, or a band where points are many
points  the same without lines; steps: as a staircase
rows    a row for every named place of x, a point for every series; bars: a bar
dots    a dot for every entry of a table, its area the number; map: the numbers on grey, the highest framed

Series differ by marker and dash first. Colours only help, and differ in lightness, so that a figure can be
printed in black and white. Equal data give equal bytes.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from fedsolve.arrays import Array
from fedsolve.pages.templates import asset

if TYPE_CHECKING:  # drawing takes long to import; who only describes a figure does without
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[Format, ...] = get_args(Format)
Kind = Literal["lines", "points", "steps", "rows", "bars", "dots", "map"]

INK, SOFT, RULE = "#26292e", "#70757d", "#d9dbdf"
"""Text, axes and single series; ticks and references; the grid."""
SERIES = ("#1d3f72", "#c4562f", "#12836f", "#8a5aa8", "#b58a00", "#5c626b")
COLORS = {INK: "ink", SOFT: "soft", RULE: "rule"}
COLORS |= {color: f"series-{place}" for place, color in enumerate(SERIES, start=1)}
"""What the stylesheet calls these colours: dark pages need others."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (8, 3)))
# Cells of a map keep their own ink, light or dark, whatever the page around them looks like.
ON_LIGHT, ON_DARK = "#101114", "#fcfcfa"
LIGHT, DARK = 0.94, 0.30
MOST_TICKS = 9
CROWDED = 12
"""From this many points a series is drawn as a line with a band, below it as points with bars."""

# Any: the names that matplotlib accepts differ between its versions, and so does their type.
SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titlepad": 8.0,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0.0,
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
    "savefig.dpi": 200,
}

# Dates and versions of the drawing library would make equal figures differ.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True)
class Series:
    """Values y over x with their standard errors (nan where there is only one seed).

    above: how far bars reach above y, where that is not as far as below (`error`).
    look: which marker, dash and colour it has, the same in every panel that shows the same thing. A series
        without points is not drawn.
    """

    name: str
    look: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] = ()
    above: tuple[float, ...] = ()

    @property
    def bars(self) -> Array | None:
        """How far bars reach, (below, above) of each point; None where no point has any."""
        reach = np.nan_to_num(np.array([self.error, self.above or self.error]))
        return reach if reach.any() else None


@dataclass(frozen=True)
class Axis:
    """The label of an axis with its unit, its scale, and names for places on it.

    tried: the values were chosen, so they are the ticks, if there is room for them.
    """

    label: str = ""
    log: bool = False
    whole: bool = False
    tried: bool = False
    named: tuple[tuple[float, str], ...] = ()

    @classmethod
    def of(cls, label: str, names: Sequence[str]) -> Axis:
        """The names, one after the other."""
        return cls(label, named=tuple((float(place), name) for place, name in enumerate(names)))


@dataclass(frozen=True)
class Panel:
    """A part of a figure. table: of the kinds "dots" and "map", (y places, x places).

    reference: a thin line to compare with, at zero or where y equals x.
    """

    series: Sequence[Series]
    x: Axis
    y: Axis
    title: str = ""
    kind: Kind = "lines"
    reference: Literal["zero", "diagonal"] | None = None
    table: Array | None = None


@dataclass(frozen=True)
class Plot:
    """A figure with its words.

    name: part of file names. title, caption: sentences under it. description: its data in words.
    """

    name: str
    title: str
    caption: str
    description: str
    panels: Sequence[Panel]

    @property
    def figure(self) -> Figure:
        return draw(self.panels)


def draw(panels: Sequence[Panel]) -> Figure:
    """The panels side by side under one legend."""
    import matplotlib
    from matplotlib.figure import Figure

    series = {line.name: line.look for panel in panels for line in panel.series if line.x}
    dots = all(panel.kind == "dots" for panel in panels)
    columns = min(len(panels), 2 if dots else 3)
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=_size(panels[0 if dots else -1], columns, rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, panels, strict=False):
            axes.set(title=panel.title, xlabel=panel.x.label, ylabel=panel.y.label)
            _refer(axes, panel)
            _PAINTERS[panel.kind](axes, panel, len(series) == 1)
        _legend(figure, grid, series)
    return figure


def render(figure: Figure, form: Format = "svg", *, transparent: bool = False) -> bytes:
    """The figure as the contents of a file; equal figures are equal bytes."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(stream, format=form, metadata=_METADATA[form], transparent=transparent)
    written = stream.getvalue()
    if form == "svg" and not transparent:
        return written.replace(b"<defs>", b"<defs>\n  <style>" + _night().encode() + b"</style>", 1)
    return written


def _night() -> str:
    """The rules by which a drawing on its own follows a reader who prefers dark pages, in their colours.

    Programs that do not know such rules show it as it is drawn, on white.
    """
    dark = dict(re.findall(r"--([\w-]+): light-dark\([^,]+, (#\w+)\)", asset("style.css")))
    rules = [
        f'[style*="{part}: {color}"] {{ {part}: {dark[name]} !important }}'
        for color, name in {"#ffffff": "paper", **COLORS}.items()
        for part in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def series_style(look: int) -> dict[str, Any]:
    """Marker, dash and colour of a look; the first thirty pairs of marker and dash all differ."""
    return {
        "color": SERIES[look % len(SERIES)],
        "marker": MARKERS[look % len(MARKERS)],
        # Marker and dash repeat with different periods, so that a pair comes again late.
        "linestyle": DASHES[(look + look // len(MARKERS)) % len(DASHES)],
    }


def _size(panel: Panel, columns: int, rows: int) -> tuple[float, float]:
    """Width and height in inches."""
    down = len((panel.x if panel.kind in ("rows", "bars") else panel.y).named)
    if panel.kind == "map":
        return 1.8 + 0.85 * len(panel.x.named), 1.2 + 0.45 * down
    if panel.kind == "dots":
        classes = 0 if panel.table is None else len(panel.table)
        return 7.2 if columns == 2 else 5.2, 0.5 + rows * (1.5 + 0.12 * max(6, classes))
    if panel.kind in ("rows", "bars"):
        return 6.4 if panel.kind == "rows" else 3.9, 1.2 + (0.3 if panel.kind == "rows" else 0.2) * down
    if panel.reference == "diagonal" or panel.kind == "steps":
        return 3.9, 3.9
    return (6.4, 3.6) if columns == 1 else (2.2 + 2.5 * columns, 3.5)


def _refer(axes: Axes, panel: Panel) -> None:
    thin: dict[str, Any] = {"color": SOFT, "linewidth": 0.9, "linestyle": (0, (3, 3))}
    if panel.reference == "zero":
        across = panel.kind in ("rows", "bars")
        (axes.axvline if across else axes.axhline)(0.0, **thin)
    elif panel.reference == "diagonal":
        axes.plot([0, 1], [0, 1], **thin)
        axes.set_aspect("equal")
        axes.grid(True, axis="both")


def _lines(axes: Axes, panel: Panel, alone: bool) -> None:
    """alone: there is only one series in the whole figure."""
    crowded = max((len(line.x) for line in panel.series), default=0) >= CROWDED
    for line in panel.series:
        if not line.x:
            continue
        style = series_style(line.look) | ({"color": INK} if alone else {})
        if panel.kind == "points":
            style["linestyle"] = "none"
        if panel.kind == "steps":
            axes.step(line.x, line.y, where="mid", label=line.name, **style | {"marker": ""})
        elif crowded and panel.kind == "lines":
            every = max(1, len(line.x) // 8)
            axes.plot(line.x, line.y, label=line.name, markevery=(line.look % every, every), **style)
            if line.bars is not None:
                low, high = np.array(line.y) - line.bars[0], np.array(line.y) + line.bars[1]
                axes.fill_between(line.x, low, high, color=style["color"], alpha=0.16, linewidth=0)
        else:
            axes.errorbar(line.x, line.y, yerr=line.bars, label=line.name, elinewidth=1.0, **style)
    _scale(axes, "x", panel.x, [value for line in panel.series for value in line.x])
    _scale(axes, "y", panel.y, [value for line in panel.series for value in line.y])


def _rows(axes: Axes, panel: Panel, alone: bool) -> None:
    """Every named place of x as a row. Markers of one row stand a little apart, so that all can be seen."""
    spread = 0.36 / max(1, len(panel.series) - 1)
    for index, line in enumerate(panel.series):
        style = series_style(line.look)
        places = np.array(line.x) + (index - (len(panel.series) - 1) / 2) * spread
        if panel.kind == "bars":
            ink = {"ecolor": INK, "elinewidth": 0.9}
            axes.barh(places, line.y, 0.62, xerr=line.bars, color=style["color"], error_kw=ink)
            continue
        style |= {"linestyle": "none", "markersize": 5.5}
        axes.errorbar(line.y, places, xerr=line.bars, label=line.name, elinewidth=1.0, **style)
    _name(axes.yaxis, panel.x)
    if panel.y.named:
        _name(axes.xaxis, panel.y)
    axes.set(ylim=(len(panel.x.named) - 0.5, -0.5), xlabel=panel.y.label, ylabel="")
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)


def _dots(axes: Axes, panel: Panel, alone: bool) -> None:
    assert panel.table is not None
    down, across = np.nonzero(panel.table)
    area = panel.table[down, across] / max(1, panel.table.max())
    axes.scatter(across, down, s=95 * area, color=INK, linewidths=0)
    axes.grid(False)
    axes.set(xlim=(-1, panel.table.shape[1]), ylim=(-1, len(panel.table)))
    _name(axes.xaxis, panel.x)
    _name(axes.yaxis, panel.y)


def _map(axes: Axes, panel: Panel, alone: bool) -> None:
    from matplotlib.patches import Rectangle

    assert panel.table is not None
    low, high = np.nanmin(panel.table), np.nanmax(panel.table)
    for (row, column), value in np.ndenumerate(panel.table):
        if np.isnan(value):
            axes.text(column, row, "–", ha="center", va="center")
            continue
        grey = LIGHT + (DARK - LIGHT) * ((value - low) / (high - low) if high > low else 0.0)
        ink, best = ON_DARK if grey < 0.46 else ON_LIGHT, value == high
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=str(grey), linewidth=0))
        if best:
            frame: dict[str, Any] = {"fill": False, "edgecolor": ink, "linewidth": 2.0}
            axes.add_patch(Rectangle((column - 0.46, row - 0.45), 0.92, 0.9, **frame))
        weight = "bold" if best else "normal"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, weight=weight)
    axes.set(xlim=(-0.5, panel.table.shape[1] - 0.5), ylim=(len(panel.table) - 0.5, -0.5))
    _name(axes.xaxis, panel.x)
    _name(axes.yaxis, panel.y)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


_PAINTERS: Mapping[Kind, Callable[[Axes, Panel, bool], None]] = {
    **dict.fromkeys(("lines", "points", "steps"), _lines),
    **dict.fromkeys(("rows", "bars"), _rows),
    "dots": _dots,
    "map": _map,
}


def _name(place: XAxis | YAxis, axis: Axis) -> None:
    place.set_ticks([at for at, _ in axis.named], labels=[name for _, name in axis.named])


def _scale(axes: Axes, side: Literal["x", "y"], axis: Axis, drawn: Sequence[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

    place = axes.xaxis if side == "x" else axes.yaxis
    if side == "x":
        axes.margins(x=0.06 if axis.log else 0.03)
    if not axis.log:
        if axis.named:
            _name(place, axis)
        elif axis.whole:
            place.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
        return
    (axes.set_xscale if side == "x" else axes.set_yscale)("log")
    values = sorted(set(drawn))
    fits = axis.tried and len(values) <= MOST_TICKS and _clear(values)
    ticks = values if fits else _round_numbers(values)
    names = dict(axis.named)
    place.set_major_locator(FixedLocator(ticks))
    place.set_major_formatter(FixedFormatter([names.get(tick, f"{tick:g}") for tick in ticks]))
    place.set_minor_locator(NullLocator())


def _clear(values: Sequence[float]) -> bool:
    """Whether labels at these places of a log axis do not overlap."""
    whole = math.log(values[-1] / values[0])
    return all(math.log(b / a) > 0.07 * whole for a, b in itertools.pairwise(values))


def _round_numbers(values: Sequence[float]) -> list[float]:
    """Ticks of a log axis: powers of ten if the range has enough of them, else finer ones."""
    low, high = 0.9 * values[0], 1.1 * values[-1]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: -(-len(ticks) // MOST_TICKS)]


def _legend(figure: Figure, panels: Iterable[Axes], looks: Mapping[str, int]) -> None:
    """One legend over the whole figure, in the order of the looks; none for a single series."""
    drawn: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        drawn |= dict(zip(names, handles, strict=True))
    names = sorted((name for name in looks if name in drawn), key=lambda name: looks[name])
    if len(names) < 2:
        return
    # In characters: what the figure holds across, and what a line, its name and a gap take.
    room, taken = 13 * figure.get_figwidth(), 9 + max(map(len, names))
    columns = max(1, min(len(names), int(room / taken)))
    figure.legend([drawn[name] for name in names], names, loc="outside upper left", ncols=columns)
