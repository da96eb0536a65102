"""What gradient methods do round by round, and what feedback alignment changes and where it acts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsolve.experiments.figures.lines import ACCURACY, Axis, Series, compared, lines, panels
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot, described, shown, variants, where
from fedsolve.experiments.figures.readings import Reading, distinct, groups, mean_error
from fedsolve.experiments.observations import chosen_stages
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


def round_plots(items: Sequence[Reading]) -> list[Plot]:
    """Test accuracy and drift after every round."""
    name, drawn = shown(items)
    found = []
    for field, factor, plot, title, axis, unit in (
        ("accuracy_per_round", 100.0, "rounds", "Accuracy round by round.", Axis(ACCURACY), " %"),
        ("drift_per_round", 1.0, "drift", "Drift round by round.", Axis("drift H"), ""),
    ):
        series = [_over_rounds(name(of[0]), of, _scaled(field, factor)) for of in variants(drawn)]
        series = [line for line in series if len(line.x) > 1]
        if series and len(series) <= MOST_SERIES:
            told = "on the test rows" if plot == "rounds" else "of the clients' updates from their mean"
            words = described(series, unit, f"{axis.label} over rounds")
            caption = f"After every round, {told} ({where(drawn)})."
            found.append(Plot(plot, title, caption, words, lines(series, ROUNDS, axis)))
    return found


def gained_plots(items: Sequence[Reading]) -> list[Plot]:
    """What feedback alignment changes in accuracy and drift, round by round: a line for each host."""
    _, drawn = shown(items)
    found = []
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
            change = _changes(host, aligned, _scaled(field, sign))
            if len(change.x) > 1:
                series.append(change)
        if series and len(series) <= MOST_SERIES:
            caption = (
                f"Each method with and without feedback alignment; above zero is better ({where(drawn)})."
            )
            words = described(series, "", f"{axis.label} over rounds")
            found.append(Plot(plot, title, caption, words, lines(series, ROUNDS, axis)))
    return found


def representation_plots(items: Sequence[Reading]) -> list[Plot]:
    """Distances within and between classes in the features before the classifier, and their ratio."""
    name, drawn = shown(items)
    parts = {}
    for kind in REPRESENTATION:
        series = [_over_rounds(name(of[0]), of, _distances(kind)) for of in variants(drawn)]
        parts[kind] = [line for line in series if len(line.x) > 1]
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


def alignment_plots(items: Sequence[Reading]) -> list[Plot]:
    """How far clients agree on each layer in the first round, and on average."""
    name, drawn = shown(items)
    series: list[Series] = []
    layers: list[str] = []
    for of in variants(drawn):
        told = of[0].cell.get("feedback") or {}
        if any(value is None for value in told.get("first", [None])):
            continue
        if layers and told["layers"] != layers:
            continue
        layers = told["layers"]
        for kind, words in (("first", "first round"), ("mean", "all rounds")):
            rows = [item.cell["feedback"][kind] for item in of if item.cell["feedback"]["layers"] == layers]
            means = [
                mean_error(math.nan if v is None else v for v in column) for column in zip(*rows, strict=True)
            ]
            places = tuple(float(place) for place in range(1, len(layers) + 1))
            found = Series(f"{name(of[0])}, {words}", places, *zip(*means, strict=True))
            series.append(found)
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


def selection_plots(items: Sequence[Reading]) -> list[Plot]:
    """How often feedback alignment acted on each stage of the network."""
    name, drawn = shown(items)
    # Layers that a file names are chosen always; that needs no figure.
    drawn = [item for item in drawn if item.cell["parameters"].get("feedback") in CHOICES]
    chosen = [of for of in variants(drawn) if chosen_stages(of[0].cell)]
    stages = distinct(stage for of in chosen for item in of for stage in chosen_stages(item.cell))
    if not chosen or len(chosen) > MOST_SERIES:
        return []
    series = []
    for of in chosen:
        shares = [chosen_stages(item.cell) for item in of]
        means = [mean_error(100.0 * share.get(stage, 0.0) for share in shares) for stage in stages]
        places = tuple(float(place) for place in range(len(stages)))
        series.append(Series(name(of[0]), places, *zip(*means, strict=True)))
    told = "; ".join(
        f"{line.name}: "
        + ", ".join(f"{stage} {share:.0f} %" for stage, share in zip(stages, line.y, strict=True))
        for line in series
    )
    return [
        Plot(
            "selected",
            "Where feedback alignment acted.",
            f"Share of all choices, one a round for each layer asked for ({where(drawn)}).",
            f"{told}.",
            compared(stages, series, "share of the choices (%)"),
        )
    ]


def pairs(items: Sequence[Reading]) -> list[tuple[list[Reading], list[Reading]]]:
    """Readings of a method without feedback alignment and with it, all else and the seeds alike."""
    plain: dict[Any, list[Reading]] = {}
    aligned: dict[Any, list[Reading]] = {}
    for item in items:
        parameters = item.cell["parameters"]
        if "feedback" not in parameters:
            continue
        told = [(name, str(value)) for name, value in sorted(parameters.items())]
        others = tuple(pair for pair in told if not pair[0].startswith("feedback"))
        host = (item.cell["algorithm"], item.noise, item.partition, others)
        if parameters["feedback"] is None:
            plain.setdefault(host, []).append(item)
        else:
            own = tuple(pair for pair in told if pair[0].startswith("feedback"))
            aligned.setdefault((host, own), []).append(item)
    found = []
    for (host, _), of in aligned.items():
        # An unfinished run may have a seed of one and not of the other.
        seeds = {item.seed for item in of} & {item.seed for item in plain.get(host, [])}
        if seeds:
            sides = [[item for item in side if item.seed in seeds] for side in (plain[host], of)]
            found.append((sides[0], sides[1]))
    return found


def _changes(
    host: Sequence[Reading], aligned: Sequence[Reading], values: Callable[[Reading], list[float]]
) -> Series:
    """The difference of two methods, seed by seed, as a series over rounds."""
    before = groups(host, lambda item: item.seed)
    rows = []
    for item in aligned:
        for other in before.get(item.seed, [])[:1]:
            rows.append([b - a for a, b in zip(values(other), values(item), strict=False)])
    return _series(aligned[0].method, rows)


def _over_rounds(name: str, items: Sequence[Reading], values: Callable[[Reading], list[float]]) -> Series:
    return _series(name, [values(item) for item in items])


def _series(name: str, rows: Sequence[Sequence[float]]) -> Series:
    """Means over seeds, round by round."""
    means = [mean_error(column) for column in zip(*(row for row in rows if row), strict=False)]
    return Series(
        name,
        tuple(float(number) for number in range(1, len(means) + 1)),
        tuple(mean for mean, _ in means),
        tuple(error for _, error in means),
    )


def _scaled(field: str, factor: float) -> Callable[[Reading], list[float]]:
    return lambda item: [factor * value for value in item.cell.get(field) or []]


def _distances(kind: str) -> Callable[[Reading], list[float]]:
    def values(item: Reading) -> list[float]:
        found = (item.cell.get("representation_per_round") or {}).get(kind) or []
        return [math.nan if value is None else float(value) for value in found]

    return values
