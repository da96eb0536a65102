"""What gradient methods do round by round, and what feedback alignment changes and where it acts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsolve.experiments.figures.lines import ACCURACY, Axis, Series, compared, lines, panels
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot, described, shown, variants, where
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, chosen_stages, distinct
from fedsolve.experiments.round_metrics import REPRESENTATION
from fedsolve.gradient.alignment import CHOICES

ROUNDS = Axis("rounds", whole=True)
DISTANCES = {
    "intra": "within classes",
    "inter": "between classes",
    "ratio": "between / within",
}
MOST_LAYERS = 60
"""Layers that can be told apart along an axis."""


def round_plots(items: Sequence[Observation]) -> list[Plot]:
    """Test accuracy and drift after every round."""
    drawn = shown(items)
    plots = []
    for field, factor, plot, title, axis, unit in (
        ("accuracy_per_round", 100.0, "rounds", "Accuracy round by round.", Axis(ACCURACY), " %"),
        ("drift_per_round", 1.0, "drift", "Drift round by round.", Axis(METRICS["drift"].label), ""),
    ):
        series = _over_rounds(drawn, _scaled(field, factor))
        if series and len(series) <= MOST_SERIES:
            basis = "on the test rows" if plot == "rounds" else "of the clients' updates from their mean"
            words = described(series, unit, f"{axis.label} over rounds")
            caption = f"After every round, {basis} ({where(drawn)})."
            plots.append(Plot(plot, title, caption, words, lines(series, ROUNDS, axis)))
    return plots


def gained_plots(items: Sequence[Observation]) -> list[Plot]:
    """What feedback alignment changes in accuracy and drift, round by round: a line for each host."""
    drawn = shown(items)
    of_variant = {variant.items[0].variant: variant for variant in variants(drawn)}
    plots = []
    for field, sign, plot, title, axis in (
        (
            "accuracy_per_round",
            100.0,
            "feedback-gain",
            "What feedback alignment gains, round by round.",
            Axis("gain in test accuracy (points)"),
        ),
        (
            "drift_per_round",
            -1.0,
            "drift-reduction",
            "Drift that feedback alignment takes away, round by round.",
            Axis("reduction of drift H"),
        ),
    ):
        series = []
        for host, aligned in pairs(drawn):
            variant = of_variant[aligned[0].variant]
            change = variant.series(_changes(host, aligned, _scaled(field, sign)), first=1)
            if len(change.x) > 1:
                series.append(dataclasses.replace(change, name=aligned[0].method))
        if series and len(series) <= MOST_SERIES:
            caption = (
                f"Each method with and without feedback alignment; above zero is better ({where(drawn)})."
            )
            words = described(series, "", f"{axis.label} over rounds")
            plots.append(Plot(plot, title, caption, words, lines(series, ROUNDS, axis)))
    return plots


def representation_plots(items: Sequence[Observation]) -> list[Plot]:
    """Distances within and between classes in the features before the classifier, and their ratio."""
    drawn = shown(items)
    parts = {kind: _over_rounds(drawn, _distances(kind)) for kind in REPRESENTATION}
    if not parts["ratio"] or len(parts["ratio"]) > MOST_SERIES:
        return []
    words = [described(series, "", f"Distance {DISTANCES[kind]}") for kind, series in parts.items()]
    return [
        Plot(
            "representation",
            "Representation round by round.",
            "Distances of the test rows' features before the classifier to the means of their classes, and "
            f"between these means; a higher ratio is better separated ({where(drawn)}).",
            " ".join(words),
            panels([(DISTANCES[kind], series) for kind, series in parts.items()], ROUNDS, Axis("distance")),
        )
    ]


def alignment_plots(items: Sequence[Observation]) -> list[Plot]:
    """How far clients agree on each layer in the first round, and on average."""
    drawn = shown(items)
    series: list[Series] = []
    layers: list[str] = []
    every = variants(drawn)
    for variant in every:
        feedback = variant.items[0].cell.get("feedback") or {}
        if any(value is None for value in feedback.get("first", [None])):
            continue
        if layers and feedback["layers"] != layers:
            continue
        layers = feedback["layers"]
        known = [item for item in variant.items if item.cell["feedback"]["layers"] == layers]
        for number, (kind, words) in enumerate((("first", ", first round"), ("mean", ", all rounds"))):
            rows = [_numbers(item.cell["feedback"][kind]) for item in known]
            series.append(variant.series(rows, 1, words, look=number * len(every)))
    if not 1 < len(layers) <= MOST_LAYERS or len(series) > MOST_SERIES:
        return []
    axis = Axis("layer, in the order in which they run", whole=True)
    return [
        Plot(
            "alignment",
            "How far clients agree on each layer.",
            f"Mean cosine of a client's update and the mean update, from {layers[0]} to {layers[-1]} "
            f"({where(drawn)}).",
            described(series, "", "Alignment z over layers"),
            lines(series, axis, Axis("alignment z")),
        )
    ]


def selection_plots(items: Sequence[Observation]) -> list[Plot]:
    """How often feedback alignment acted on each stage of the network."""
    drawn = shown(items)
    # Layers named in the file are chosen every time; that needs no figure.
    chosen = [
        variant
        for variant in variants(drawn)
        if variant.items[0].cell["parameters"].get("feedback") in CHOICES
        and chosen_stages(variant.items[0].cell)
    ]
    stages = distinct(stage for of in chosen for item in of.items for stage in chosen_stages(item.cell))
    if not chosen or len(chosen) > MOST_SERIES:
        return []
    series = []
    for variant in chosen:
        shares = [chosen_stages(item.cell) for item in variant.items]
        series.append(variant.series([100.0 * share.get(stage, 0.0) for stage in stages] for share in shares))
    summary = "; ".join(
        f"{line.name}: "
        + ", ".join(f"{stage} {share:.0f} %" for stage, share in zip(stages, line.y, strict=True))
        for line in series
    )
    return [
        Plot(
            "selected",
            "Where feedback alignment acted.",
            f"Share of all choices, one a round for each layer asked for ({where(chosen[0].items)}).",
            f"{summary}.",
            compared(stages, series, METRICS["selected"].label),
        )
    ]


def pairs(items: Sequence[Observation]) -> list[tuple[list[Observation], list[Observation]]]:
    """Observations of a method without feedback alignment and with it, all else and the seeds alike."""
    plain: dict[Any, list[Observation]] = {}
    aligned: dict[Any, list[Observation]] = {}
    for item in items:
        parameters = item.cell["parameters"]
        if "feedback" not in parameters:
            continue
        settings = [(name, str(value)) for name, value in sorted(parameters.items())]
        others = tuple(pair for pair in settings if not pair[0].startswith("feedback"))
        host = (item.cell["algorithm"], item.noise, item.partition, others)
        if parameters["feedback"] is None:
            plain.setdefault(host, []).append(item)
        else:
            own = tuple(pair for pair in settings if pair[0].startswith("feedback"))
            aligned.setdefault((host, own), []).append(item)
    matches = []
    for (host, _), of in aligned.items():
        # An unfinished run may have a seed for one and not for the other.
        seeds = {item.seed for item in of} & {item.seed for item in plain.get(host, [])}
        if seeds:
            sides = [[item for item in side if item.seed in seeds] for side in (plain[host], of)]
            matches.append((sides[0], sides[1]))
    return matches


def _changes(
    host: Sequence[Observation], aligned: Sequence[Observation], values: Callable[[Observation], list[float]]
) -> list[list[float]]:
    """The difference of two methods round by round, for each seed."""
    before = {item.seed: item for item in reversed(host)}
    return [
        [later - earlier for earlier, later in zip(values(before[item.seed]), values(item), strict=False)]
        for item in aligned
        if item.seed in before
    ]


def _over_rounds(items: Sequence[Observation], values: Callable[[Observation], list[float]]) -> list[Series]:
    """A series over rounds for every variant that has at least two."""
    series = [variant.series(map(values, variant.items), first=1) for variant in variants(items)]
    return [line for line in series if len(line.x) > 1]


def _scaled(field: str, factor: float) -> Callable[[Observation], list[float]]:
    return lambda item: [factor * value for value in item.cell.get(field) or []]


def _distances(kind: str) -> Callable[[Observation], list[float]]:
    return lambda item: _numbers((item.cell.get("representation_per_round") or {}).get(kind) or [])


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]
