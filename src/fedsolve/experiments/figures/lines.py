"""Figures whose values follow a number: depth, alpha, clients, a parameter, a layer, a cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from fedsolve.experiments.figures.style import INK, blank, legend_above, series_style, styled
from fedsolve.experiments.metrics import METRICS

ACCURACY = METRICS["test"].label
MOST_TICKS = 9
ERROR_TICKS = (80.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1)
CROWDED = 12
"""From this many points a series is drawn as a band and a line, below it as points with bars."""


@dataclass(frozen=True)
class Series:
    """Values over x with their standard errors (nan where there is only one seed).

    look: which marker, dash and colour it wears, the same in every panel and figure that shows what it is
        about, whatever else they show. One without points is not drawn.
    """

    name: str
    look: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] = ()

    @property
    def errors(self) -> tuple[float, ...]:
        return self.error or (math.nan,) * len(self.x)


@dataclass(frozen=True)
class Axis:
    """What an axis shows: its words with the unit, its scale, and names for single places on it.

    tried:  the values were chosen, so they are the ticks, if there is room for them.
    errors: the values are errors in per cent, drawn upside down on a log scale under the accuracies that they
        leave: 94 and 99 per cent are far apart, and so they look.
    """

    label: str
    log: bool = False
    whole: bool = False
    tried: bool = False
    errors: bool = False
    named: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One part of a figure of lines."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis


def lines(series: Sequence[Series], x: Axis, y: Axis | None = None) -> Figure:
    """Each series as a line over x."""
    return _row([Panel("", series, x, y or Axis(ACCURACY))], 6.4, 3.6)


def panels(groups: Sequence[tuple[str, Sequence[Series]]], x: Axis, y: Axis) -> Figure:
    """Several line figures side by side under one legend, each with its own vertical scale."""
    row = [
        Panel(title, series, x, Axis("", y.log) if place else y)
        for place, (title, series) in enumerate(groups)
    ]
    return _row(row, 2.0 + 2.3 * len(groups), 3.3)


def cost(groups: Sequence[tuple[str, Sequence[Series]]]) -> Figure:
    """Accuracy against what it takes: one panel per kind of cost, on a log scale."""
    row = [
        Panel("", series, Axis(title, log=True), Axis("" if place else ACCURACY))
        for place, (title, series) in enumerate(groups)
    ]
    return _row(row, 2.2 + 2.9 * len(groups), 3.6, sharey=True, crowded=False)


def _row(
    row: Sequence[Panel], width: float, height: float, sharey: bool = False, crowded: bool | None = None
) -> Figure:
    """Panels side by side under one legend."""

    def draw() -> Figure:
        figure = blank(width, height)
        axes = figure.subplots(1, len(row), squeeze=False, sharey=sharey)[0]
        alone = len({line.name for panel in row for line in panel.series}) == 1
        for place, panel in zip(axes, row, strict=True):
            draw_lines(place, panel, alone, crowded)
        legend_above(figure, axes, [line for panel in row for line in panel.series])
        return figure

    return styled(draw)


def compared(names: Sequence[str], groups: Sequence[Series], label: str = ACCURACY) -> Figure:
    """A row of points per name (a method, a variant), one marker per group (a partition).

    groups: series whose x are places in `names` and whose y are what `label` says.
    """

    def draw() -> Figure:
        figure = blank(6.4, 1.5 + 0.3 * len(names))
        axes = figure.subplots()
        # Markers of the same row stand a little apart, so that equal values stay visible.
        spread = 0.36 / max(1, len(groups) - 1)
        for index, group in enumerate(groups):
            shift = (index - (len(groups) - 1) / 2) * spread
            style = series_style(group.look) | {"linestyle": "none"}
            places = [place + shift for place in group.x]
            axes.errorbar(
                group.y, places, xerr=_bars(group), label=group.name, elinewidth=1.0, markersize=5.5, **style
            )
        axes.set_yticks(range(len(names)), list(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(label)
        axes.margins(x=0.06)
        legend_above(figure, [axes], groups)
        return figure

    return styled(draw)


def draw_lines(axes: Axes, panel: Panel, alone: bool = False, crowded: bool | None = None) -> None:
    """Draw the lines of a panel and scale its axes. alone: there is but one line in the whole figure."""
    series, x, y = panel.series, panel.x, panel.y
    if crowded is None:
        crowded = max(len(line.x) for line in series) >= CROWDED
    for line in series:
        if not line.x:
            continue
        style = series_style(line.look) | ({"color": INK} if alone else {})
        if crowded:
            every = max(1, len(line.x) // 8)
            axes.plot(line.x, line.y, label=line.name, markevery=(line.look % every, every), **style)
            low, high = (np.add(line.y, sign * np.nan_to_num(line.errors)) for sign in (-1, 1))
            axes.fill_between(line.x, low, high, color=style["color"], alpha=0.16, linewidth=0)
        else:
            axes.errorbar(line.x, line.y, yerr=_bars(line), label=line.name, elinewidth=1.0, **style)
    axes.set_title(panel.title)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    if y.errors:
        low, high = (end(value for line in series for value in line.y) for end in (min, max))
        axes.set_yscale("log")
        axes.set_ylim(1.25 * high, low / 1.5)
        ticks = [tick for tick in ERROR_TICKS if low / 1.5 <= tick <= 1.25 * high]
        _number_ticks(axes.yaxis, ticks, {tick: f"{100 - tick:g}" for tick in ticks})
    elif y.log:
        axes.set_yscale("log")
        _number_ticks(axes.yaxis, _round_numbers(sorted(value for line in series for value in line.y)))
    _scale_x(axes, series, x)


def _scale_x(axes: Axes, series: Sequence[Series], x: Axis) -> None:
    values = sorted({value for line in series for value in line.x})
    if not x.log:
        if x.named:
            axes.set_xticks([place for place, _ in x.named], [name for _, name in x.named])
        elif x.whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
        axes.margins(x=0.03)
        return
    axes.set_xscale("log")
    axes.margins(x=0.06)
    ticks = values if x.tried and len(values) <= MOST_TICKS and _clear(values) else _round_numbers(values)
    _number_ticks(axes.xaxis, ticks, dict(x.named))


def _number_ticks(
    axis: XAxis | YAxis, ticks: Sequence[float], names: Mapping[float, str] | None = None
) -> None:
    """Ticks at these places only, as plain numbers where they have no names."""
    labels = [(names or {}).get(tick, f"{tick:g}") for tick in ticks]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter(labels))
    axis.set_minor_locator(NullLocator())


def _clear(values: Sequence[float]) -> bool:
    """Whether labels at these places of a log axis would stand clear of each other."""
    whole = math.log(values[-1] / values[0])
    return all(math.log(b / a) > 0.07 * whole for a, b in itertools.pairwise(values))


def _round_numbers(values: Sequence[float]) -> list[float]:
    """Ticks of a log axis: powers of ten where there are enough in sight, else finer ones."""
    low, high = 0.9 * values[0], 1.1 * values[-1]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: -(-len(ticks) // MOST_TICKS)]


def _bars(line: Series) -> list[float] | None:
    """Standard errors for bars; None where no point has one."""
    errors = [0.0 if math.isnan(error) else error for error in line.errors]
    return errors if any(errors) else None
