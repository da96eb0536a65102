"""Accuracy against a setting of the experiment: the partition, label noise, parameters, the method."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.experiments.metrics import axis_label, spoken, tell
from fedsolve.experiments.observations import Observation, distinct, groups, mean_error, names_of, varied
from fedsolve.experiments.plot_words import (
    ACCURACY,
    MOST_SERIES,
    described,
    reference,
    row_plot,
    seeds_told,
    series_of,
)
from fedsolve.pages.plots import Axis, Panel, Plot, Series
from fedsolve.pages.words import capital

MOST_MAPS = 4


@dataclass(frozen=True)
class Over:
    """Accuracy as a line over a setting.

    place: where an observation stands on the axis; None for nowhere, inf for the end of a log axis.
    held:  what must be the same of all that is drawn; its value with most places is taken.
    told:  that value in words. without: what the axis shows, so that names can leave it out.
    """

    name: str
    title: str
    axis: Axis
    place: Callable[[Observation], float | None]
    held: Callable[[Observation], Any]
    told: Callable[[Any], str]
    without: tuple[str, ...] = ()


SKEWS = {"dirichlet": ("alpha", "α"), "shards": ("per_client", "shards per client")}
SKEWS["pathological"] = ("classes_per_client", "classes per client")


def _setting(item: Observation) -> tuple[str, Any]:
    """Kind and option of the partition, whatever its number of clients."""
    dealt = item.cell["partition"]
    return dealt["kind"], dealt[SKEWS[dealt["kind"]][0]] if dealt["kind"] in SKEWS else None


def _skew(kind: str) -> Callable[[Observation], float | None]:
    def place(item: Observation) -> float | None:
        own, value = _setting(item)
        # Even shares are the limit of a large alpha.
        return float(value) if own == kind else math.inf if (kind, own) == ("dirichlet", "iid") else None

    return place


def _clients(item: Observation) -> float:
    return int(item.cell["partition"]["clients"])


def _partition(item: Observation) -> str:
    return item.partition


def _told_setting(setting: tuple[str, Any]) -> str:
    kind, value = setting
    return f"partition {SKEWS[kind][1]} = {value:g}" if kind in SKEWS else "partition IID"


_SKEWED, _NOISY = "Accuracy against the skew of the partition.", "Accuracy against label noise."
_ALPHA = Axis("Dirichlet α (smaller is more skewed)", log=True, tried=True)
_SHARDS = Axis("shards per client (fewer is more skewed)", whole=True)
_CLASSES = Axis("classes per client (fewer is more skewed)", whole=True)
_MANY, _FLIPPED = Axis("number of clients", log=True, tried=True), Axis("flipped training labels (%)")
_OF_CLIENTS, _OF_PARTITION = "{} clients".format, "partition {}".format

OVER = (
    Over("alpha", _SKEWED, _ALPHA, _skew("dirichlet"), _clients, _OF_CLIENTS),
    Over("shards", _SKEWED, _SHARDS, _skew("shards"), _clients, _OF_CLIENTS),
    Over("classes", _SKEWED, _CLASSES, _skew("pathological"), _clients, _OF_CLIENTS),
    Over("clients", "Accuracy against the number of clients.", _MANY, _clients, _setting, _told_setting),
    Over("noise", _NOISY, _FLIPPED, lambda i: 100.0 * i.noise, _partition, _OF_PARTITION, ("noise",)),
)


def over_plots(over: Over, items: Sequence[Observation], level: Sequence[Observation] = ()) -> Iterator[Plot]:
    """A line for every entry with at least two places.

    level: methods that have no place on the axis and are level lines from end to end of it.
    """
    places: dict[Any, set[float]] = {}
    for item in items:
        if (place := over.place(item)) is not None:
            places.setdefault(over.held(item), set()).add(place)
    held = max(places, key=lambda value: len(places[value] - {math.inf}), default=None)
    finite = sorted(places.get(held, set()) - {math.inf})
    if len(finite) < 2:
        return
    end, axis = 10.0 * finite[-1], over.axis
    if math.inf in places[held]:
        axis = dataclasses.replace(axis, named=((end, "IID"),))
    drawn = [item for item in items if over.held(item) == held and over.place(item) is not None]
    entries = groups(drawn, names_of(drawn, over.without))
    every = [
        series_of(label, look, of, lambda item: min(over.place(item) or 0.0, end))
        for look, (label, of) in enumerate(entries.items())
    ]
    series = [line for line in every if len(line.x) > 1]
    if not series or len(series) > MOST_SERIES:
        return
    ends = min(line.x[0] for line in series), max(line.x[-1] for line in series)
    for look, (label, of) in enumerate(groups(level, names_of(level)).items(), start=len(every)):
        mean, error = mean_error(item.accuracy for item in of)
        series.append(Series(label, look, ends, (mean, mean), (error, error)))
    words = described(series, f"Test accuracy over {axis.label}")
    caption = f"{over.told(held)}; {seeds_told(drawn)}."
    yield Plot(over.name, over.title, capital(caption), words, [Panel(series, axis, ACCURACY)])


def sensitivity_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """What the grids of the reference partition show: a line, rows of points for words, or maps."""
    drawn = [item for item in items if item.partition == reference(items)]
    single: dict[str, list[Observation]] = {}
    fixed: list[Observation] = []
    for method, of in groups(drawn, lambda item: item.method).items():
        parameters = varied(of)
        if not parameters:
            fixed += of
        elif len(parameters) == 1:
            single.setdefault(next(iter(parameters)), []).extend(of)
        else:
            yield from _maps(method, of, parameters)
    for name, of in single.items():
        values = varied(of)[name]
        if all(map(_is_number, values)):
            level = fixed if len(groups(fixed, names_of(fixed))) <= 2 else ()
            yield from over_plots(_parameter(name, sorted(values)), of, level)
        else:
            yield from _words(name, of, values)


def _words(name: str, items: Sequence[Observation], values: Sequence[Any]) -> Iterator[Plot]:
    """A row of points for every value of a parameter that is a word."""
    rows, where = [tell(name, value) for value in values], f"partition {items[0].partition}; "
    series = _row_series(items, names_of(items, (name,)), lambda item: values.index(dict(item.grid)[name]))
    yield from row_plot(f"parameter-{name}", f"Accuracy by {spoken(name)}.", where, rows, series, items)


def _parameter(name: str, values: Sequence[float]) -> Over:
    """Accuracy along a parameter; on a log axis where its values span magnitudes or were doubled."""
    label, place = spoken(name), {value: float(value) for value in values}
    some = sorted(abs(value) for value in values if value)
    steps = [later / earlier for earlier, later in itertools.pairwise(some)]
    wide = bool(steps) and (some[-1] > 15 * some[0] or (len(steps) > 1 and min(steps) > 1.5))
    axis = Axis(label, log=wide, tried=wide, whole=not wide and all(isinstance(v, int) for v in values))
    if wide and values[0] <= 0:
        # A logarithm has no place for 0: even steps, each under its value.
        place = {value: float(index) for index, value in enumerate(values)}
        axis = Axis.of(label, [tell(name, value) for value in values])
    return Over(
        f"parameter-{name}",
        f"Sensitivity to {label}.",
        axis,
        lambda item: place.get(dict(item.grid).get(name)),  # type: ignore[arg-type]
        _partition,
        _OF_PARTITION,
        (name,),
    )


def _maps(method: str, items: Sequence[Observation], parameters: Mapping[str, list[Any]]) -> Iterator[Plot]:
    """Accuracy over the two parameters with most values, one map for every value of the others."""
    ranked = sorted(parameters, key=lambda name: -len(parameters[name]))
    row, column = sorted(ranked[:2], key=list(parameters).index)
    rows, columns = (_ordered(parameters[axis]) for axis in (row, column))
    deepest = max((item.named_depth for item in items if item.named_depth is not None), default=None)
    points = list(itertools.product(*(parameters[name] for name in ranked[2:])))
    for number, point in enumerate(points[:MOST_MAPS], start=1):
        others = dict(zip(ranked[2:], point, strict=True))
        kept = [i for i in items if i.named_depth == deepest and others.items() <= dict(i.grid).items()]
        if not kept:
            continue
        values = np.full((len(rows), len(columns)), math.nan)
        for (down, across), of in groups(kept, lambda i: (dict(i.grid)[row], dict(i.grid)[column])).items():
            values[rows.index(down), columns.index(across)] = mean_error(i.accuracy for i in of)[0]
        down, across = np.unravel_index(int(np.nanargmax(values)), values.shape)
        best = f"{axis_label(row, rows[down])}, {axis_label(column, columns[across])}"
        where = [f"partition {kept[0].partition}", *([] if deepest is None else [f"T = {deepest}"])]
        where += [axis_label(name, value) for name, value in others.items()]
        where.append(seeds_told(kept).removesuffix(", with standard errors"))
        axes = [
            Axis.of(spoken(name), [tell(name, value) for value in places])
            for name, places in ((column, columns), (row, rows))
        ]
        yield Plot(
            f"map-{row}-{column}" + (f"-{number}" if len(points) > 1 else ""),
            f"{method}: accuracy over {spoken(row)} and {spoken(column)}.",
            f"Test accuracy in per cent; darker is higher, the best is framed ({'; '.join(where)}).",
            f"Test accuracy from {np.nanmin(values):.2f} to {np.nanmax(values):.2f} %, best at {best}.",
            [Panel((), axes[0], axes[1], kind="map", table=values)],
        )


# -- side by side ----------------------------------------------------------------------------------


def method_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """A row for every method: one marker per depth, or per partition where nothing else shows those."""
    if varied(items) or len(distinct(item.noise for item in items)) > 1:
        return
    depths = len(distinct(item.named_depth for item in items if item.named_depth is not None)) > 1
    drawn = [item for item in items if item.partition == reference(items)] if depths else list(items)
    methods = distinct(item.method for item in drawn)

    def name(item: Observation) -> str:
        depth = "no layers" if item.named_depth is None else f"T = {item.named_depth}"
        return depth if depths else item.partition

    if len(methods) >= 3:
        series = _row_series(drawn, name, lambda item: methods.index(item.method))
        where = f"partition {drawn[0].partition}; " if depths else ""
        yield from row_plot("methods", "The methods side by side.", where, methods, series, drawn)


def _row_series(
    items: Sequence[Observation], name: Callable[[Observation], str], place: Callable[[Observation], float]
) -> list[Series]:
    return [series_of(label, look, of, place) for look, (label, of) in enumerate(groups(items, name).items())]


def _ordered(values: Sequence[Any]) -> list[Any]:
    return sorted(values) if all(map(_is_number, values)) else list(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
