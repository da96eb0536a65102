"""How accuracy follows parameters: a line for one, rows of points for words, maps for two or more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.experiments.figures.conditions import lines_over, listed
from fedsolve.experiments.figures.lines import Axis, compared
from fedsolve.experiments.figures.maps import heat_map
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot, reference, seeds_told, sentence, series_of
from fedsolve.experiments.observations import Observation, groups, names_of, varied
from fedsolve.experiments.significance import mean_error
from fedsolve.experiments.wording import axis_label, spoken, tell

MOST_MAPS = 4
WIDE = 15
"""Values whose largest is more than this many times the smallest stand on a logarithmic axis, ..."""
DOUBLING = 1.5
"""... and so do those of which each is more than this many times the one before."""


def sensitivity_plots(items: Sequence[Observation]) -> list[Plot]:
    """What the grids of the reference partition show."""
    drawn = [item for item in items if item.partition == reference(items)]
    plots: list[Plot] = []
    single: dict[str, list[Observation]] = {}
    fixed: list[Observation] = []
    for method, of_method in groups(drawn, lambda item: item.method).items():
        parameters = varied(of_method)
        if not parameters:
            fixed += of_method
        elif len(parameters) == 1:
            single.setdefault(next(iter(parameters)), []).extend(of_method)
        else:
            plots += _maps(method, of_method, parameters)
    for parameter, of_parameter in single.items():
        values = varied(of_parameter)[parameter]
        if all(map(_is_number, values)):
            plots += _line(parameter, of_parameter, values, fixed)
        else:
            plots += _rows(parameter, of_parameter, values)
    return plots


def _line(
    parameter: str, items: Sequence[Observation], values: Sequence[float], fixed: Sequence[Observation]
) -> list[Plot]:
    """Accuracy along a number; methods that lack the parameter are level lines."""
    axis, place = _axis(parameter, sorted(values))
    return lines_over(
        f"parameter-{parameter}",
        f"Sensitivity to {spoken(parameter)}.",
        f"partition {items[0].partition}",
        items,
        lambda item: place[dict(item.grid)[parameter]],
        axis,
        without=(parameter,),
        level=fixed if len(groups(fixed, names_of(fixed))) <= 2 else (),
    )


def _axis(parameter: str, values: Sequence[float]) -> tuple[Axis, dict[float, float]]:
    """The axis, and where on it each value stands."""
    label = spoken(parameter)
    place = {value: float(value) for value in values}
    if not _wide(values):
        return Axis(label, whole=all(isinstance(value, int) for value in values)), place
    if values[0] > 0:
        return Axis(label, log=True, tried=True), place
    # A logarithm has no place for 0: even steps, each under its value.
    place = {value: float(index) for index, value in enumerate(values)}
    return Axis(label, named=tuple((place[value], tell(parameter, value)) for value in values)), place


def _wide(values: Sequence[float]) -> bool:
    """Whether the values span orders of magnitude, or were chosen by doubling or so."""
    some = sorted(abs(value) for value in values if value)
    steps = [later / earlier for earlier, later in itertools.pairwise(some)]
    return bool(steps) and (some[-1] > WIDE * some[0] or (len(steps) > 1 and min(steps) > DOUBLING))


def _rows(parameter: str, items: Sequence[Observation], values: Sequence[Any]) -> list[Plot]:
    """A row of points per value of a parameter that is a word."""
    rows = [tell(parameter, value) for value in values]
    series = [
        series_of(name, look, of, lambda item: float(values.index(dict(item.grid)[parameter])))
        for look, (name, of) in enumerate(groups(items, names_of(items, (parameter,))).items())
    ]
    if len(series) > MOST_SERIES:
        return []
    return [
        Plot(
            f"parameter-{parameter}",
            f"Accuracy by {spoken(parameter)}.",
            sentence(f"partition {items[0].partition}; {seeds_told(items)}"),
            listed(rows, series),
            compared(rows, series),
        )
    ]


def _maps(method: str, items: Sequence[Observation], parameters: Mapping[str, list[Any]]) -> list[Plot]:
    """Accuracy over the two parameters with most values, one map for every value of the others."""
    ranked = sorted(parameters, key=lambda name: -len(parameters[name]))
    row, column = sorted(ranked[:2], key=list(parameters).index)
    others = ranked[2:]
    deepest = max((item.named_depth for item in items if item.named_depth is not None), default=None)
    points = list(itertools.product(*(parameters[name] for name in others)))
    maps = []
    for number, point in enumerate(points[:MOST_MAPS], start=1):
        others_at = dict(zip(others, point, strict=True))
        kept = [
            item
            for item in items
            if item.named_depth == deepest and others_at.items() <= dict(item.grid).items()
        ]
        if kept:
            name = f"map-{row}-{column}" + (f"-{number}" if len(points) > 1 else "")
            values = {axis: _ordered(parameters[axis]) for axis in (row, column)}
            labels = [axis_label(other, value) for other, value in others_at.items()]
            maps.append(_map(name, method, kept, values, labels))
    return maps


def _map(
    name: str, method: str, items: Sequence[Observation], axes: Mapping[str, list[Any]], others: Sequence[str]
) -> Plot:
    (row, rows), (column, columns) = axes.items()
    places = groups(items, lambda item: (dict(item.grid)[row], dict(item.grid)[column]))
    values = np.full((len(rows), len(columns)), math.nan)
    for (down, across), of in places.items():
        values[rows.index(down), columns.index(across)] = mean_error(item.accuracy for item in of)[0]
    down, across = np.unravel_index(int(np.nanargmax(values)), values.shape)
    best = f"{axis_label(row, rows[down])}, {axis_label(column, columns[across])}"
    depth = [] if items[0].named_depth is None else [f"T = {items[0].named_depth}"]
    seeds = seeds_told(items).removesuffix(", with standard errors")
    where = "; ".join([f"partition {items[0].partition}", *depth, *others, seeds])
    return Plot(
        name,
        f"{method}: accuracy over {spoken(row)} and {spoken(column)}.",
        f"Test accuracy in per cent; darker is higher, the best is framed ({where}).",
        f"Test accuracy from {np.nanmin(values):.2f} to {np.nanmax(values):.2f} %, best at {best}.",
        heat_map(
            values,
            [tell(row, value) for value in rows],
            [tell(column, value) for value in columns],
            spoken(row),
            spoken(column),
        ),
    )


def _ordered(values: Sequence[Any]) -> list[Any]:
    return sorted(values) if all(map(_is_number, values)) else list(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
