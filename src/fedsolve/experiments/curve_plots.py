"""Values along the layers or the rounds of every cell, what they cost, and where feedback alignment acts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, chosen_stages, distinct, mean_error, pairs, varied
from fedsolve.experiments.plot_words import (
    ACCURACY,
    MOST_SERIES,
    Variant,
    described,
    row_plot,
    shown,
    variants,
    where,
)
from fedsolve.gradient.alignment import CHOICES
from fedsolve.pages.plots import Axis, Panel, Plot, Series
from fedsolve.pages.words import capital

BLOCKS, ROUNDS = Axis("residual blocks T", whole=True), Axis("rounds", whole=True)
LAYERS = Axis("layer, in the order in which they run", whole=True)

Read = Callable[[Observation], Sequence[float]]


def _layers(metric: str) -> Read:
    return lambda item: item.layers(metric)


def _kept(field: str, factor: float = 1.0, kind: str | None = None) -> Read:
    """A list that a cell keeps under `field`, or under `kind` of it."""

    def read(item: Observation) -> Sequence[float]:
        values: Any = item.cell.get(field) or []
        if kind is not None:
            values = values[kind] if values else []
        return [math.nan if value is None else factor * value for value in values]

    return read


@dataclass(frozen=True)
class Curve:
    """A figure of lists: what each panel reads of a cell, over what.

    first:  the place of a list's first value. level: single values are level lines.
    paired: the change that feedback alignment makes to what is read. log: where values span a factor of 5.
    """

    name: str
    title: str
    x: Axis
    y: str
    panels: Mapping[str, Read]
    first: int = 0
    most: int = MOST_SERIES
    level: bool = False
    paired: bool = False
    log: bool = False


_RATIOS = {
    "CSR: within against between classes": _layers("test_csr"),
    "IFS: class variance against spread": _layers("test_ifs"),
    "DM: scatter within against between": _layers("test_dm"),
}
_DISTANCES = {
    "within classes": _kept("representation_per_round", kind="intra"),
    "between classes": _kept("representation_per_round", kind="inter"),
    "between / within": _kept("representation_per_round", kind="ratio"),
}
_AGREED = {"first round": _kept("feedback", kind="first"), "all rounds": _kept("feedback", kind="mean")}
_PARTS = {"test rows": _layers("test"), "training rows": _layers("train")}
_REACHED, _DRIFT = {"": _kept("accuracy_per_round", 100.0)}, {"": _kept("drift_per_round")}
_CALMED = {"": _kept("drift_per_round", -1.0)}
_GAIN, _CALM = "gain in test accuracy (points)", "reduction of drift H"
_APART = "Distances of the test rows' features to the means of their classes, and between these means."

CURVES = (
    Curve("depth", "Accuracy after every residual block.", BLOCKS, "accuracy (%)", _PARTS, 0, 6, level=True),
    Curve("separability", "Separability of the test rows; lower is better.", BLOCKS, "ratio", _RATIOS),
    Curve("risk", "Regularised risk per layer.", BLOCKS, "risk", {"": _layers("risk")}, 0, 6, log=True),
    Curve("rounds", "Accuracy round by round.", ROUNDS, ACCURACY.label, _REACHED, 1),
    Curve("drift", "Drift round by round.", ROUNDS, METRICS["drift"].label, _DRIFT, 1),
    Curve("feedback-gain", "What feedback alignment gains.", ROUNDS, _GAIN, _REACHED, 1, paired=True),
    Curve("drift-reduction", "Drift feedback alignment removes.", ROUNDS, _CALM, _CALMED, 1, paired=True),
    Curve("representation", _APART, ROUNDS, "distance", _DISTANCES, 1),
    Curve("alignment", "How far clients agree on each layer (cosine).", LAYERS, "alignment z", _AGREED, 1),
)


def curve_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    drawn = shown(items)
    for curve in CURVES:
        read = {title: _along(curve, values, drawn) for title, values in curve.panels.items()}
        panels = {title: series for title, series in read.items() if any(len(line.x) > 1 for line in series)}
        if not panels or max(map(len, panels.values())) > curve.most:
            continue
        values = [value for series in panels.values() for line in series for value in line.y]
        wide = curve.log and min(values) > 0 and max(values) > 5 * min(values)
        words = [
            described(series, f"{title or curve.y} over {curve.x.label}") for title, series in panels.items()
        ]
        yield Plot(
            curve.name,
            curve.title,
            capital(f"{where(drawn)}."),
            " ".join(words),
            [
                Panel(series, curve.x, Axis("" if place else curve.y, wide), title * (len(panels) > 1))
                for place, (title, series) in enumerate(panels.items())
            ],
        )


def _along(curve: Curve, read: Read, items: Sequence[Observation]) -> list[Series]:
    """A series for every variant with at least two values; a single one may be a level line."""
    every = variants(items)
    if curve.paired:
        looks = {variant.items[0].variant: variant for variant in every}
        return [
            dataclasses.replace(
                looks[aligned[0].variant].series(_changes(host, aligned, read), curve.first),
                name=aligned[0].method,
            )
            for host, aligned in pairs(items)
            if any(_changes(host, aligned, read))
        ]
    series = [variant.series(map(read, variant.items), curve.first) for variant in every]
    end = max((line.x[-1] for line in series if len(line.x) > 1), default=None)
    if curve.level and end is not None:
        series = [
            dataclasses.replace(line, x=(0.0, end), y=2 * line.y, error=2 * line.error)
            if len(line.x) == 1
            else line
            for line in series
        ]
    return [line for line in series if len(line.x) > 1]


def _changes(host: Sequence[Observation], aligned: Sequence[Observation], read: Read) -> list[list[float]]:
    """The difference of two methods round by round, for each seed."""
    before = {item.seed: read(item) for item in reversed(host)}
    return [
        [later - earlier for earlier, later in zip(before[item.seed], read(item), strict=False)]
        for item in aligned
        if item.seed in before
    ]


def cost_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """Test accuracy against megabytes and seconds; a staged method is a line through its depths."""
    drawn = shown(items)
    alike = varied(drawn) and len({item.method for item in drawn}) == 1
    if (alike and len({item.cell["bytes_up"] for item in drawn}) == 1) or len({i.noise for i in drawn}) > 1:
        return  # what varies does not change the cost
    costs = {"megabytes": "megabytes, all clients, up and down", "seconds": "seconds of training"}
    priced = {title: [_priced(of, metric) for of in variants(drawn)] for metric, title in costs.items()}
    panels = {title: series for title, series in priced.items() if any(line.x for line in series)}
    points = max((sum(len(line.x) for line in series) for series in panels.values()), default=0)
    if points >= 3 and max(map(len, panels.values())) <= MOST_SERIES:
        yield Plot(
            "cost",
            "Accuracy against cost.",
            f"Up and to the left is better; lines join the depths of one training ({where(drawn)}).",
            " ".join(described(series, f"Test accuracy over {t}") for t, series in panels.items()),
            [
                Panel(series, Axis(title, log=True), Axis("") if place else ACCURACY)
                for place, (title, series) in enumerate(panels.items())
            ],
        )


def _priced(variant: Variant, metric: str) -> Series:
    """Accuracy over a cost, point by point along the layers where there are any."""
    items = variant.items
    depths: list[int | None] = [None]
    layers = items[0].layers("test")
    if len(layers) > 1:
        asked = sorted({depth for item in items for depth in item.cell["depths"]})
        depths = list(asked if len(asked) > 1 else range(0, len(layers), max(1, len(layers) // 8)))
    points = []
    for depth in depths:
        values = [[METRICS[key].of(item.cell, depth) for item in items] for key in (metric, "test")]
        (paid, _), (mean, error) = (
            mean_error(math.nan if value is None else value for value in row) for row in values
        )
        if paid > 0:
            points.append((paid, mean, error))
    x, y, errors = zip(*points, strict=True) if points else ((), (), ())
    return Series(variant.name, variant.look, x, y, errors)


def selection_plots(items: Sequence[Observation]) -> Iterator[Plot]:
    """How often feedback alignment acted on each stage of the network."""
    # Layers named in the file are chosen every time; that needs no figure.
    chosen = [
        variant
        for variant in variants(shown(items))
        if variant.items[0].cell["parameters"].get("feedback") in CHOICES
        and chosen_stages(variant.items[0].cell)
    ]
    if not chosen:
        return
    stages = distinct(stage for of in chosen for item in of.items for stage in chosen_stages(item.cell))
    series = []
    for variant in chosen:
        shares = [chosen_stages(item.cell) for item in variant.items]
        series.append(variant.series([100.0 * share.get(stage, 0.0) for stage in stages] for share in shares))
    caption, label = "share of all choices, one a round for each layer asked for; ", METRICS["selected"].label
    title, items = "Where feedback alignment acted.", chosen[0].items
    yield from row_plot("selected", title, caption, stages, series, items, label)
