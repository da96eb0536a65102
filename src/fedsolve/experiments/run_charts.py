"""The charts that the cells of a run can give: against settings, along layers and rounds, and over costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.experiments.charts import ACCURACY, EVERYWHERE, Chart, Read, chart_plots, seeds_told
from fedsolve.experiments.metrics import METRICS, axis_label, spoken, tell
from fedsolve.experiments.observations import (
    Observation,
    chosen_stages,
    distinct,
    groups,
    mean_error,
    names_of,
    pairs,
    varied,
)
from fedsolve.gradient.alignment import CHOICES
from fedsolve.pages.plots import Axis, Panel, Plot

MOST_MAPS = 4


# -- accuracy against a setting of the experiment --------------------------------------------------


def accuracy_at(place: Callable[[Observation], float | None]) -> Read:
    """The accuracy at the place of an observation, if it has one."""
    return lambda item: [] if (x := place(item)) is None else [(x, item.accuracy)]


def _clients(item: Observation) -> int:
    return int(item.cell["partition"]["clients"])


def _skew(name: str, option: str, x: Axis) -> Chart:
    """Accuracy against the option of one kind of partition."""

    def place(item: Observation) -> float | None:
        dealt = item.cell["partition"]
        # Even shares are the limit of a large alpha.
        limit = math.inf if option == "alpha" and dealt["kind"] == "iid" else None
        return float(dealt[option]) if option in dealt else limit

    title = "Accuracy against the skew of the partition."
    return Chart(name, title, x, {"": accuracy_at(place)}, held=_clients, told="{} clients".format)


SETTINGS = (
    _skew("alpha", "alpha", Axis("Dirichlet α (smaller is more skewed)", log=True, tried=True)),
    _skew("shards", "per_client", Axis("shards per client (fewer is more skewed)", whole=True)),
    _skew("classes", "classes_per_client", Axis("classes per client (fewer is more skewed)", whole=True)),
    Chart(
        "clients",
        "Accuracy against the number of clients.",
        Axis("number of clients", log=True, tried=True),
        {"": accuracy_at(_clients)},
        held=lambda item: item.setting,
    ),
    Chart(
        "noise",
        "Accuracy against label noise.",
        Axis("flipped training labels (%)"),
        {"": accuracy_at(lambda item: 100.0 * item.noise)},
        without=("noise",),
    ),
)


def sensitivity_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """What the grids of one partition show: a line, rows of points for words, or maps."""
    drawn = max(groups(items, lambda item: item.partition).values(), key=len)
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
        numbers = all(map(_is_number, values))
        chart = _along_numbers(name, sorted(values), of) if numbers else _along_words(name, values)
        level = fixed if numbers and len(groups(fixed, names_of(fixed))) <= 2 else []
        yield from chart_plots(chart, [*of, *level])


def _along_words(name: str, values: Sequence[Any]) -> Chart:
    """A row of points for every value of a parameter."""
    rows = Axis.of("", [tell(name, value) for value in values])
    read = accuracy_at(lambda item: values.index(dict(item.grid)[name]))
    title = f"Accuracy by {spoken(name)}."
    return Chart(f"parameter-{name}", title, rows, {"": read}, kind="rows", without=(name,), single=True)


def _along_numbers(name: str, values: Sequence[float], items: Sequence[Observation]) -> Chart:
    """Accuracy along a parameter; on a log axis where its values span magnitudes or were doubled.

    Methods other than those of `items` are level lines.
    """
    label, place = spoken(name), {value: float(value) for value in values}
    some = sorted(abs(value) for value in values if value)
    steps = [later / earlier for earlier, later in itertools.pairwise(some)]
    wide = bool(steps) and (some[-1] > 15 * some[0] or (len(steps) > 1 and min(steps) > 1.5))
    axis = Axis(label, log=wide, tried=wide, whole=not wide and all(isinstance(v, int) for v in values))
    if wide and values[0] <= 0:
        # A logarithm has no place for 0: even steps, each under its value.
        place = {value: float(index) for index, value in enumerate(values)}
        axis = Axis.of(label, [tell(name, value) for value in values])
    own = {item.method for item in items}
    read = accuracy_at(lambda item: place[dict(item.grid)[name]] if item.method in own else EVERYWHERE)
    return Chart(f"parameter-{name}", f"Sensitivity to {label}.", axis, {"": read}, without=(name,))


def _maps(method: str, items: Sequence[Observation], parameters: Mapping[str, list[Any]]) -> Iterator[Plot]:
    """Accuracy over the two parameters with most values, one map for every value of the others."""
    ranked = sorted(parameters, key=lambda name: -len(parameters[name]))
    row, column = sorted(ranked[:2], key=list(parameters).index)
    known = (parameters[axis] for axis in (row, column))
    rows, columns = (sorted(values) if all(map(_is_number, values)) else values for values in known)
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- side by side, and along layers and rounds -----------------------------------------------------


def method_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """A row for every method: one marker per depth, or per partition where nothing else shows those."""
    if varied(items) or len(distinct(item.noise for item in items)) > 1:
        return
    methods = distinct(item.method for item in items)
    read, title = accuracy_at(lambda item: methods.index(item.method)), "The methods side by side."
    more: dict[str, Any] = {"names": lambda i: i.partition, "held": lambda i: "", "told": str}
    if len(distinct(item.named_depth for item in items if item.named_depth is not None)) > 1:
        more = {"names": lambda i: "no layers" if i.named_depth is None else f"T = {i.named_depth}"}
    if len(methods) >= 3:
        rows = Axis.of("", methods)
        yield from chart_plots(
            Chart("methods", title, rows, {"": read}, kind="rows", single=True, **more), items
        )


BLOCKS, ROUNDS = Axis("residual blocks T", whole=True), Axis("rounds", whole=True)
LAYERS = Axis("layer, in the order in which they run", whole=True)


def _layers(metric: str, level: bool = False) -> Read:
    """A metric after every layer. level: a method without layers has its only value everywhere."""

    def read(item: Observation) -> Iterable[tuple[float, float]]:
        if level and item.cell["seconds_per_layer"] is None:
            return [(EVERYWHERE, value) for value in item.layers(metric)]
        return enumerate(item.layers(metric))

    return read


def _kept(field: str, factor: float = 1.0, kind: str | None = None) -> Read:
    """A list that a cell keeps under `field`, or under `kind` of it."""

    def read(item: Observation) -> Iterable[tuple[float, float]]:
        values: Any = item.cell.get(field) or []
        if kind is not None:
            values = values[kind] if values else []
        return enumerate((math.nan if value is None else factor * value for value in values), start=1)

    return read


def _gained(read: Read, items: Sequence[Observation]) -> Read:
    """How far what is read differs with feedback alignment from what it is without, for the same seed."""
    without = {
        one.cell["key"]: before
        for host, aligned in pairs(items)
        for one in aligned
        for before in host
        if before.seed == one.seed
    }

    def change(item: Observation) -> list[tuple[float, float]]:
        before = without.get(item.cell["key"])
        both = () if before is None else zip(read(item), read(before), strict=False)
        return [(x, value - earlier) for (x, value), (_, earlier) in both]

    return change


def _priced(metric: str) -> Read:
    """Accuracy over a cost, point by point along the layers where there are any."""

    def read(item: Observation) -> Iterable[tuple[float, float]]:
        depths: list[int | None] = [None]
        layers = item.layers("test")
        if len(layers) > 1:
            asked = sorted(item.cell["depths"])
            depths = list(asked if len(asked) > 1 else range(0, len(layers), max(1, len(layers) // 8)))
        for depth in depths:
            paid, reached = (METRICS[key].of(item.cell, depth) for key in (metric, "test"))
            if paid:
                yield paid, math.nan if reached is None else reached

    return read


def _choices(item: Observation) -> dict[str, float]:
    """The share of each stage of the network in the choices of feedback alignment."""
    # Layers named in the file are chosen every time; that needs no figure.
    return chosen_stages(item.cell) if item.cell["parameters"].get("feedback") in CHOICES else {}


def curves(items: Sequence[Observation]) -> Iterator[Chart]:
    """Costs, values along layers and rounds, and where feedback alignment acted."""

    def chart(name: str, title: str, x: Axis | None, y: str, panels: dict[str, Read], **more: Any) -> Chart:
        return Chart(name, title, x, panels, Axis(y), without=("depth",), **more)

    alike = bool(varied(items)) and len({item.method for item in items}) == 1
    sent = {(item.partition, item.cell["bytes_up"]) for item in items}
    same = alike and len(sent) == len({item.partition for item in items})
    if not same and len({item.noise for item in items}) == 1:  # else what varies does not change the cost
        paid = {"megabytes, all clients, up and down": _priced("megabytes")}
        paid["seconds of training"] = _priced("seconds")
        caption = "Up and to the left is better; lines join the depths of one training ({where})."
        title = "Accuracy against cost."
        yield chart("cost", title, None, ACCURACY.label, paid, caption=caption, least=3, single=True)
    title, parts = "Accuracy after every residual block.", {"test rows": "test", "training rows": "train"}
    read = {part: _layers(metric, level=True) for part, metric in parts.items()}
    yield chart("depth", title, BLOCKS, "accuracy (%)", read, most=6)
    ratios = {
        "CSR: within against between classes": _layers("test_csr"),
        "IFS: class variance against spread": _layers("test_ifs"),
        "DM: scatter within against between": _layers("test_dm"),
    }
    yield chart("separability", "Separability of the test rows; lower is better.", BLOCKS, "ratio", ratios)
    risk = {"": _layers("risk")}
    yield chart("risk", "Regularised risk per layer.", BLOCKS, "risk", risk, most=6, magnitudes=True)
    reached, drift = _kept("accuracy_per_round", 100.0), _kept("drift_per_round")
    calmed = _gained(_kept("drift_per_round", -1.0), items)
    gain, label = {"": _gained(reached, items)}, METRICS["drift"].label
    yield chart("rounds", "Accuracy round by round.", ROUNDS, ACCURACY.label, {"": reached})
    yield chart("drift", "Drift round by round.", ROUNDS, label, {"": drift})
    title = "What feedback alignment gains."
    yield chart("feedback-gain", title, ROUNDS, "gain in test accuracy (points)", gain)
    title = "Drift feedback alignment removes."
    yield chart("drift-reduction", title, ROUNDS, f"reduction of {label}", {"": calmed})
    kinds = {"within classes": "intra", "between classes": "inter", "between / within": "ratio"}
    apart = {part: _kept("representation_per_round", kind=kind) for part, kind in kinds.items()}
    title = "Distances of the test rows' features to the means of their classes, and between these means."
    yield chart("representation", title, ROUNDS, "distance", apart)
    agreed = {"first round": _kept("feedback", kind="first"), "all rounds": _kept("feedback", kind="mean")}
    title = "How far clients agree on each layer (cosine)."
    yield chart("alignment", title, LAYERS, "alignment z", agreed)
    stages = distinct(stage for item in items for stage in _choices(item))

    def acted(item: Observation) -> list[tuple[float, float]]:
        shares = _choices(item)
        return [(place, 100.0 * shares.get(stage, 0.0)) for place, stage in enumerate(stages) if shares]

    rows: dict[str, Any] = {"kind": "rows", "single": True, "told": lambda held: ""}
    caption = "share of all choices, one a round for each layer asked for; {where}."
    title, label = "Where feedback alignment acted.", METRICS["selected"].label
    yield chart("selected", title, Axis.of("", stages), label, {"": acted}, caption=caption, **rows)
