"""What depth does: accuracy, risk and separability of every layer, and what each layer costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsolve.experiments.figures.lines import Axis, Series, cost, lines, panels
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot, described, shown, variants, where
from fedsolve.experiments.figures.readings import Reading, mean_error, varied

BLOCKS = Axis("residual blocks T", whole=True)
MOST_LINES = 6
"""Curves over layers run close to each other: fewer fit in a figure."""
SCORES = {"test": "accuracy", "training": "train_accuracy"}
RATIOS = {
    "csr": "CSR: within against between classes",
    "ifs": "IFS: class variance against spread",
    "dm": "DM: scatter within against between",
}


def depth_plots(items: Sequence[Reading]) -> list[Plot]:
    """Test (and training) accuracy after 0 to T blocks; methods without layers as level lines."""
    name, drawn = shown(items)
    parts = {}
    for part, field in SCORES.items():
        deep = _by_layer(drawn, name, _percent(f"{field}_per_layer"))
        if deep:
            end = float(max(len(line.x) for line in deep) - 1)
            # All in one order, so that a method looks alike in every figure.
            parts[part] = _by_layer(drawn, name, _scores(field), end)
    if not parts or len(parts["test"]) > MOST_LINES:
        return []
    y = Axis("accuracy (%)")
    figure = (
        panels([(f"{part} rows", series) for part, series in parts.items()], BLOCKS, y)
        if len(parts) > 1
        else lines(parts["test"], BLOCKS)
    )
    return [
        Plot(
            "depth",
            "Accuracy against depth.",
            f"After every residual block ({where(drawn)}).",
            described(parts["test"], " %", "Test accuracy over the number of blocks"),
            figure,
        )
    ]


def risk_plots(items: Sequence[Reading]) -> list[Plot]:
    """The regularised risk of the training rows, layer by layer."""
    name, drawn = shown(items)
    series = _by_layer(drawn, name, lambda item: _numbers(item.cell.get("risk")))
    if not series or len(series) > MOST_LINES:
        return []
    values = [value for line in series for value in line.y]
    wide = min(values) > 0 and max(values) > 5 * min(values)
    return [
        Plot(
            "risk",
            "Regularised risk per layer.",
            f"Squared error of the training rows plus both ridge terms ({where(drawn)}).",
            described(series, "", "Risk over the number of blocks"),
            lines(series, BLOCKS, Axis("regularised risk", log=wide)),
        )
    ]


def separability_plots(items: Sequence[Reading]) -> list[Plot]:
    """CSR, IFS and DM of every layer's features."""
    name, drawn = shown(items)
    together: dict[str, list[Series]] = {}
    for ratio in RATIOS:
        together[ratio] = [
            dataclasses.replace(line, name=f"{line.name}, {told} rows")
            for part, told in (("test", "test"), ("train", "training"))
            for line in _by_layer(drawn, name, _ratio(part, ratio))
        ]
    if not together["csr"] or len(together["csr"]) > MOST_SERIES:
        return []
    return [
        Plot(
            "separability",
            "Separability per layer.",
            "How far apart the classes stand in each layer's features; lower is better for all three ratios "
            f"({where(drawn)}).",
            " ".join(described(series, "", f"{ratio.upper()}") for ratio, series in together.items()),
            panels([(RATIOS[ratio], series) for ratio, series in together.items()], BLOCKS, Axis("ratio")),
        )
    ]


def cost_plots(items: Sequence[Reading]) -> list[Plot]:
    """Test accuracy against megabytes and seconds; a staged method is a line through its depths."""
    name, drawn = shown(items)
    traffic = {item.cell["bytes_up"] for item in drawn}
    alike = varied(drawn) and len({item.method for item in drawn}) == 1 and len(traffic) == 1
    if alike or len({item.noise for item in drawn}) > 1:
        return []  # what varies costs nothing
    kinds: dict[str, Callable[[dict[str, float]], float]] = {
        "megabytes, all clients, up and down": lambda cost: (cost["bytes_up"] + cost["bytes_down"]) / 1e6,
        "seconds of training": lambda cost: cost["seconds"],
    }
    found = []
    for title, price in kinds.items():
        series = [_priced(name(of[0]), of, price) for of in variants(drawn)]
        if any(line.x for line in series):
            found.append((title, series))
    points = max((sum(len(line.x) for line in series) for _, series in found), default=0)
    if points < 3 or max(len(series) for _, series in found) > MOST_SERIES:
        return []
    return [
        Plot(
            "cost",
            "Accuracy against cost.",
            f"Up and to the left is better; lines join the depths of one training ({where(drawn)}).",
            " ".join(described(series, " %", f"Test accuracy over {title}") for title, series in found),
            cost(found),
        )
    ]


def _by_layer(
    items: Sequence[Reading],
    name: Callable[[Reading], str],
    layers: Callable[[Reading], list[float]],
    end: float | None = None,
) -> list[Series]:
    """A series over layers for every variant that has at least two.

    end: where given, variants with a single value are level lines up to it.
    """
    found = []
    for variant in variants(items):
        rows = [row for row in map(layers, variant) if len(row) > 1 or (row and end is not None)]
        if rows:
            means = [mean_error(values) for values in zip(*rows, strict=False)]
            level = len(means) == 1
            found.append(
                Series(
                    name(variant[0]),
                    (0.0, end or 0.0) if level else tuple(float(layer) for layer in range(len(means))),
                    tuple(mean for mean, _ in means) * (1 + level),
                    tuple(error for _, error in means) * (1 + level),
                )
            )
    return found


def _priced(name: str, items: Sequence[Reading], price: Callable[[dict[str, float]], float]) -> Series:
    """Accuracy over a cost, point by point along the layers where there are any."""
    depths: list[int | None] = [None]
    layers = items[0].cell.get("accuracy_per_layer") or []
    if layers and items[0].cell.get("seconds_per_layer"):
        asked = sorted({depth for item in items for depth in item.cell["depths"] if depth < len(layers)})
        depths = list(asked if len(asked) > 1 else range(0, len(layers), max(1, len(layers) // 8)))
    points = []
    for depth in depths:
        costs = [price(_costs(item.cell, depth)) for item in items]
        share = [
            100.0 * (item.cell["accuracy"] if depth is None else item.cell["accuracy_per_layer"][depth])
            for item in items
        ]
        paid, (mean, error) = mean_error(costs)[0], mean_error(share)
        if paid > 0:
            points.append((paid, mean, error))
    x, y, errors = zip(*points, strict=True) if points else ((), (), ())
    return Series(name, x, y, errors)


def _costs(cell: Any, depth: int | None) -> dict[str, float]:
    found = {}
    for name in ("bytes_up", "bytes_down", "seconds"):
        value = cell.get(name) if depth is None else cell[f"{name}_per_layer"][depth]
        found[name] = math.nan if value is None else float(value)
    return found


def _scores(field: str) -> Callable[[Reading], list[float]]:
    """Accuracies in per cent of all layers, or the only one."""

    def scores(item: Reading) -> list[float]:
        only = item.cell.get(field)
        return _percent(f"{field}_per_layer")(item) or ([] if only is None else [100.0 * only])

    return scores


def _percent(field: str) -> Callable[[Reading], list[float]]:
    return lambda item: [100.0 * share for share in item.cell.get(field) or []]


def _ratio(part: str, ratio: str) -> Callable[[Reading], list[float]]:
    return lambda item: [
        float(layer[ratio]) for layer in (item.cell.get("separability") or {}).get(part) or []
    ]


def _numbers(values: Any) -> list[float]:
    return [] if not values or any(value is None for value in values) else [float(value) for value in values]
