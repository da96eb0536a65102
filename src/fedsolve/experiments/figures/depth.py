"""What depth does: accuracy, risk and separability of every layer, and what each layer costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsolve.experiments.figures.lines import Axis, Series, cost, lines, panels
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot, Variant, described, shown, variants, where
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, varied
from fedsolve.experiments.significance import mean_error

BLOCKS = Axis("residual blocks T", whole=True)
MOST_LINES = 6
"""Curves over layers run close to each other: fewer fit in a figure."""
PARTS = {"test": "test", "train": "training"}
"""Rows that are scored, and what to call them."""
RATIOS = {
    "csr": "CSR: within against between classes",
    "ifs": "IFS: class variance against spread",
    "dm": "DM: scatter within against between",
}
COSTS = {"megabytes": "megabytes, all clients, up and down", "seconds": "seconds of training"}


def depth_plots(items: Sequence[Observation]) -> list[Plot]:
    """Test (and training) accuracy after 0 to T blocks; methods without layers as level lines."""
    drawn = shown(items)
    parts = {}
    for metric, rows in PARTS.items():
        deep = by_layer(drawn, metric)
        if deep:
            parts[rows] = by_layer(drawn, metric, end=max(line.x[-1] for line in deep))
    if not parts or len(parts["test"]) > MOST_LINES:
        return []
    figure = (
        panels([(f"{rows} rows", series) for rows, series in parts.items()], BLOCKS, Axis("accuracy (%)"))
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


def risk_plots(items: Sequence[Observation]) -> list[Plot]:
    """The regularised risk of the training rows, layer by layer."""
    drawn = shown(items)
    series = by_layer(drawn, "risk")
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


def separability_plots(items: Sequence[Observation]) -> list[Plot]:
    """CSR, IFS and DM of every layer's features."""
    drawn = shown(items)
    together = {
        ratio: [line for part in PARTS for line in by_layer(drawn, f"{part}_{ratio}", part=part)]
        for ratio in RATIOS
    }
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


def cost_plots(items: Sequence[Observation]) -> list[Plot]:
    """Test accuracy against megabytes and seconds; a staged method is a line through its depths."""
    drawn = shown(items)
    traffic = {item.cell["bytes_up"] for item in drawn}
    alike = varied(drawn) and len({item.method for item in drawn}) == 1 and len(traffic) == 1
    if alike or len({item.noise for item in drawn}) > 1:
        return []  # what varies does not change the cost
    priced = {title: [_priced(of, metric) for of in variants(drawn)] for metric, title in COSTS.items()}
    panels = [(title, series) for title, series in priced.items() if any(line.x for line in series)]
    points = max((sum(len(line.x) for line in series) for _, series in panels), default=0)
    if points < 3 or max(len(series) for _, series in panels) > MOST_SERIES:
        return []
    return [
        Plot(
            "cost",
            "Accuracy against cost.",
            f"Up and to the left is better; lines join the depths of one training ({where(drawn)}).",
            " ".join(described(series, " %", f"Test accuracy over {title}") for title, series in panels),
            cost(panels),
        )
    ]


def by_layer(
    items: Sequence[Observation], metric: str, end: float | None = None, part: str | None = None
) -> list[Series]:
    """A metric over layers for every variant that has at least two.

    end:  where given, variants with a single value are level lines up to it.
    part: the rows it is of, where lines of both stand in one figure.
    """
    every = variants(items)
    words = "" if part is None else f", {PARTS[part]} rows"
    look = 0 if part is None else list(PARTS).index(part) * len(every)
    series = []
    for variant in every:
        line = variant.series((item.layers(metric) for item in variant.items), words=words, look=look)
        if len(line.x) > 1:
            series.append(line)
        elif line.x and end is not None:
            series.append(Series(line.name, line.look, (0.0, end), 2 * line.y, 2 * line.error))
    return series


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
        (paid, _), (mean, error) = (
            mean_error(math.nan if value is None else value for value in values)
            for values in ((METRICS[key].of(item.cell, depth) for item in items) for key in (metric, "test"))
        )
        if paid > 0:
            points.append((paid, mean, error))
    x, y, errors = zip(*points, strict=True) if points else ((), (), ())
    return Series(variant.name, variant.look, x, y, errors)
