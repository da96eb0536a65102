"""Charts: figures of a run as data. A chart says which points an observation has in each of its panels.

What is drawn follows from that: one series for each method, depth and parameter that differ, with means and
standard errors over seeds, of observations that are alike in all that the chart does not show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, distinct, groups, mean_error, names_of
from fedsolve.pages.plots import Axis, Kind, Panel, Plot, Series
from fedsolve.pages.words import capital

ACCURACY = Axis(METRICS["test"].label)
MOST_SERIES = 8
"""More lines than this in one figure cannot be told apart."""
EVERYWHERE = math.nan
"""The place of a value that holds along a whole axis, as a level line."""

Read = Callable[[Observation], Iterable[tuple[float, float]]]
"""Points (x, y) of an observation; x may be `EVERYWHERE`, or inf for the end of a log axis."""


@dataclass(frozen=True)
class Chart:
    """What a figure shows."""

    name: str
    title: str
    x: Axis | None  # without it the panels' titles are the x axes
    panels: Mapping[str, Read]  # what is read, by the panels' titles
    y: Axis = ACCURACY
    caption: str = "{where}."  # `where` is what all observations have in common, and their seeds
    kind: Kind = "lines"
    # What must be alike in all that is drawn, of which the value with most places is taken; that in words.
    held: Callable[[Observation], Hashable] = attrgetter("partition")
    told: Callable[..., str] = "partition {}".format
    # What the names of series leave out; without "depth" a cell is drawn once, whatever depths are asked for.
    without: tuple[str, ...] = ()
    names: Callable[[Observation], str] | None = None  # of series, where it is not what varies
    most: int = MOST_SERIES  # series that can be told apart
    least: int = 2  # points of the fullest panel
    single: bool = False  # whether a series may have one point
    magnitudes: bool = False  # a log axis where values span a factor of 5


def chart_plots(chart: Chart, items: Sequence[Observation]) -> Iterator[Plot]:
    """The chart's figure, if the observations have enough points for it, and no more series than fit."""
    drawn = _alike(chart, items)
    entries = groups(drawn, chart.names or names_of(drawn, chart.without))
    places = _places(chart, drawn)
    finite = [place for place in places if math.isfinite(place)]
    if len(finite) < (2 if chart.kind == "lines" else 1):
        return
    x, end = chart.x, 10.0 * max(finite)
    if x is not None and math.inf in places:
        x = dataclasses.replace(x, named=((end, "IID"),))
    read = {title: _series(chart, entries, points, end) for title, points in chart.panels.items()}
    panels = {title: series for title, series in read.items() if series}
    points = max((sum(len(line.x) for line in series) for series in panels.values()), default=0)
    if points < chart.least or max(map(len, panels.values())) > chart.most:
        return
    values = [value for series in panels.values() for line in series for value in line.y]
    wide = chart.magnitudes and min(values) > 0 and max(values) > 5 * min(values)
    made, words = [], []
    for place, (title, series) in enumerate(panels.items()):
        across = x or Axis(title, log=True)
        down = Axis("" if place else chart.y.label, wide)
        heading = title if x is not None and len(panels) > 1 else ""
        made.append(Panel(series, across, down, heading, chart.kind))
        words.append(_described(made[-1], heading or chart.y.label.removesuffix(" (%)")))
    held = chart.told(chart.held(drawn[0]))
    where = f"{held}; {seeds_told(drawn)}" if held else seeds_told(drawn)
    caption = capital(chart.caption.format(where=where))
    yield Plot(chart.name, chart.title, caption, " ".join(words), made)


def _alike(chart: Chart, items: Sequence[Observation]) -> list[Observation]:
    """The observations that are alike in what the chart holds fixed, where most places can be shown."""
    alike = groups(items, chart.held)

    def shown(held: Hashable) -> tuple[int, int]:
        return len(_places(chart, alike[held]) - {math.inf}), len(alike[held])

    drawn = alike[max(alike, key=shown)]
    return list({item.cell["key"]: item for item in drawn}.values()) if "depth" in chart.without else drawn


def _places(chart: Chart, items: Sequence[Observation]) -> set[float]:
    """The places along x, of which inf is one and nan is not."""
    reads = (read(item) for read in chart.panels.values() for item in items)
    return {x for points in reads for x, _ in points if not math.isnan(x)}


def _series(
    chart: Chart, entries: Mapping[str, Sequence[Observation]], read: Read, end: float
) -> list[Series]:
    """A series for every entry that has points. Its look follows from its place among all entries."""
    found = {}
    for look, (name, items) in enumerate(entries.items()):
        points = []
        for seeds in groups(items, lambda item: (item.partition, item.entry)).values():
            rows = [row for item in seeds if (row := [*read(item)])]
            for column in zip(*rows, strict=False):
                # Seeds differ in measured places only, such as seconds.
                first, *others = (min(place, end) for place, _ in column)
                x = fmean((first, *others)) if any(each != first for each in others) else float(first)
                points.append((x, *mean_error(value for _, value in column)))
        found[name] = look, sorted(points)
    places = [x for _, points in found.values() for x, *_ in points if not math.isnan(x)]
    series = []
    for name, (look, points) in found.items():
        if points and math.isnan(points[0][0]) and places:
            points = [(x, *points[0][1:]) for x in (min(places), max(places))]
        if len(points) > (0 if chart.single else 1):
            series.append(Series(name, look, *zip(*points, strict=True)))
    return series


def seeds_told(items: Sequence[Observation]) -> str:
    """Over what the means are taken, as part of a sentence."""
    count = len(distinct(item.seed for item in items))
    return "one seed" if count == 1 else f"mean over {count} seeds, with standard errors"


def _described(panel: Panel, what: str) -> str:
    """The panel's data in words: every value of named rows, else where each line begins and ends."""
    phrases = []
    for line in panel.series:
        if panel.kind == "rows":
            names = dict(panel.x.named)
            told = zip((names[x] for x in line.x), line.y, strict=True)
            phrases += [" ".join(filter(None, (name, line.name, f"{y:.1f} %"))) for name, y in told]
            continue
        ends = [f"{_number(y)} at {x:g}" for x, y in zip(line.x, line.y, strict=True)]
        phrases.append(f"{line.name} " + (f"from {ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0]))
    over = f" over {panel.x.label}" if panel.x.label else ""
    return f"{capital(what)}{over}: {'; '.join(phrases)}."


def _number(value: float) -> str:
    if math.isnan(value):
        return "nothing"
    return f"{value:.1f}" if 1 <= abs(value) < 1000 else f"{value:.3g}"
