"""Findings in sentences: each is computed, and appears only if its numbers exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.experiments.metrics import METRICS, axis_label
from fedsolve.experiments.observations import (
    LEVEL,
    Observation,
    by_dataset,
    compare,
    distinct,
    groups,
    mean_error,
    names_of,
    pairs,
    scored,
    varied,
)
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.pages.words import capital, counted, listed, unbroken

MOST_LISTED = 4
"""Methods that one sentence lists; nobody would read more."""


def findings(run: RunFolder) -> dict[str, list[str]]:
    """The sentences on each dataset of a run, the one its experiment is about first.

    Sentences about all of them are under "", and so is everything where there is only one.
    """
    datasets = by_dataset(run)
    paragraphs = {"": list(_backbones(run))}
    for dataset, cells in datasets.items():
        items = scored(cells)
        sentences = [sentence for kind in _KINDS for sentence in kind(items)] if items else []
        if not varied(items):
            sentences += _deviation(cells)
        if items and not sentences and not paragraphs[""]:
            sentences = list(_plain(items))
        paragraphs.setdefault(dataset if len(datasets) > 1 else "", []).extend(sentences)
    return {dataset: [*map(unbroken, sentences)] for dataset, sentences in paragraphs.items() if sentences}


def overall(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Findings over all runs: which models do not depend on the partition, and what depth gains."""
    invariant, gains = [], []
    for cells in (cells for run in runs for cells in by_dataset(run).values()):
        for of in groups(scored(cells), lambda item: item.entry).values():
            cell, several = of[0].cell, len(distinct(item.partition for item in of)) > 1
            # Only sums over all clients enter: theory guarantees the same model on every partition.
            closed = cell.get("local") is None and (cell["algorithm"] == "afl" or _deepafl(cell))
            invariant += [_invariant(of)] if several and closed else []
        layers = [cell.get("accuracy_per_layer") or [] for cell in cells if _deepafl(cell)]
        gains += [100.0 * (accuracies[-1] - accuracies[0]) for accuracies in layers if len(accuracies) > 1]
    if all(invariant) and invariant:
        yield (
            "Wherever a closed-form model was trained on several partitions of the same rows "
            f"({counted(len(invariant), 'comparison')}), it read the same test rows correctly on each."
        )
    elif any(invariant):
        yield (
            f"In {sum(invariant)} of {len(invariant)} comparisons a closed-form model read the same test "
            "rows correctly on every partition of the same rows."
        )
    if gains:
        up = sum(gain > 0 for gain in gains)
        yield (
            f"DeepAFL's residual blocks raised test accuracy in {up} of {len(gains)} trainings, "
            f"by {np.mean(gains):.1f} points on average."
        )


def _backbones(run: RunFolder) -> Iterator[str]:
    """What each method reaches through each backbone, where one dataset has several."""
    scores: dict[tuple[str, str], dict[str, str]] = {}
    for cells in by_dataset(run).values():
        dataset = cells[0]["dataset"]
        for method, of in _methods(_deepest(scored(cells))):
            backbone = dataset["backbone"] or "none"
            scores.setdefault((dataset["name"], method), {})[backbone] = _percent(_score(of))
    for (dataset, method), reached in scores.items():
        if len(reached) > 1:
            results = listed([f"{score} through {backbone}" for backbone, score in reached.items()])
            yield f"On {dataset} {method} reaches {results}."


def _parameters(items: Sequence[Observation]) -> Iterator[str]:
    """Where the best point of a grid lies, and how much the grid matters."""
    for method, of in _methods(items):
        parameters = varied(of)
        if not parameters:
            continue
        means = {grid: _score(at) for grid, at in groups(_deepest(of), lambda item: item.grid).items()}
        best = max(means, key=lambda grid: means[grid][0])
        worst = min(mean for mean, _ in means.values())
        where = listed([axis_label(name, value) for name, value in best if name in parameters])
        ties = sum(mean == means[best][0] for mean, _ in means.values()) - 1
        tied = f" ({counted(ties, 'other setting')} just as well)" if ties else ""
        yield (
            f"{method} is best at {where} with {_percent(means[best])}{tied}; over the {len(means)} settings "
            f"tried, accuracy moves by {means[best][0] - worst:.1f} points."
        )


def _noise(items: Sequence[Observation]) -> Iterator[str]:
    """What flipped labels cost each method."""
    rates = sorted(distinct(item.noise for item in items))
    costs = []
    for method, of in _methods(_deepest(items)):
        clean, worst = (_mean(i for i in of if i.noise == rate) for rate in (rates[0], rates[-1]))
        costs.append(f"{method} {clean - worst:.1f} points ({clean:.1f} to {worst:.1f} %)")
    if len(rates) > 1:
        share = f"{100 * rates[-1]:g} % flipped labels instead of {100 * rates[0]:g} %"
        yield f"{share} cost {listed(costs[:MOST_LISTED])}."


def _partitions(items: Sequence[Observation]) -> Iterator[str]:
    """Which methods do not depend on the partition, and how much the others do.

    Where clients are scored on rows of their own, the partition also deals the test rows, and no comparison
    is possible.
    """
    items = [item for item in items if item.cell.get("local") is None]
    count = len(distinct(item.partition for item in items))
    if count < 2:
        return
    same: list[str] = []
    moved: list[str] = []
    for method, of in _methods(items):
        entries = groups(of, lambda item: item.entry).values()
        if all(map(_invariant, entries)):
            same.append(method)
        else:
            moved.append(f"{method} by up to {max(map(_spread, entries)):.1f} points")
    verb = "reads" if len(same) == 1 else "read"
    alike = f"{listed(same)} {verb} the same test rows correctly on all {count} partitions" if same else ""
    moves = f"the partition moves {listed(moved[:MOST_LISTED])}" if moved else ""
    text = "; ".join(filter(None, (alike, moves)))
    yield f"{text if same else capital(text)}."


def _best(items: Sequence[Observation]) -> Iterator[str]:
    """The best method and the next one, with the test of their difference."""
    clean = _clean(items)
    name, of = names_of(clean), groups(clean, lambda item: item.entry)
    means = {entry: _score(items) for entry, items in of.items()}
    best, *others = sorted(means, key=lambda entry: -means[entry][0])
    rival = next((entry for entry in others if entry[0] != best[0]), None)
    if rival is None:
        return
    across = " over all partitions" if len(distinct(item.partition for item in clean)) > 1 else ""
    test, p = "", compare(of[best], of[rival])
    if p is not None:
        chance = "" if p < LEVEL else ", which may be chance"
        test = f"{chance}; {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}"
    yield (
        f"{name(of[best][0])} is best with {_percent(means[best])}{across}, "
        f"{means[best][0] - means[rival][0]:.1f} points above {name(of[rival][0])}{test}."
    )


def _feedback(items: Sequence[Observation]) -> Iterator[str]:
    """What feedback alignment does to accuracy and drift, over the methods that were run with and without."""
    gains, drifts = [], []
    # As in its paper: through the global weights, rescaled, layer by layer.
    usual = {"feedback_matrix": "global", "feedback_scaling": "layer", "feedback_route": "layer"}
    whole = [item for item in items if usual.items() <= item.cell["parameters"].items()]
    for host, aligned in pairs(whole):
        gains.append(_score(aligned)[0] - _score(host)[0])
        known = [[item.values["drift"] for item in of if "drift" in item.values] for of in (host, aligned)]
        if all(known):
            drifts.append(100 * float(np.mean(known[1]) / np.mean(known[0]) - 1))
    if len(gains) == 1:
        drift = f" and drift by {drifts[0]:+.1f} %" if drifts else ""
        yield f"Feedback alignment changes accuracy by {gains[0]:+.2f} points{drift}."
    elif gains:
        raised, lowered = sum(gain > 0 for gain in gains), sum(drift < 0 for drift in drifts)
        yield (
            f"Feedback alignment raises accuracy in {raised} of {len(gains)} comparisons; the mean change is "
            f"{np.mean(gains):+.2f} points ({min(gains):+.2f} to {max(gains):+.2f})."
        )
        if drifts:
            yield f"Drift falls in {lowered} of {len(drifts)}; its mean change is {np.mean(drifts):+.1f} %."


def _depth(items: Sequence[Observation]) -> Iterator[str]:
    """How accuracy changes from the first layer to the last; `_parameters` covers methods with a grid."""
    changes = [
        f"{method} from {first:.1f} to {last:.1f} % ({counted(layers, 'layer')})"
        for method, first, last, layers in _layers(_clean(items), "test")
        if layers
    ]
    if changes:
        yield f"Depth takes the accuracy of {listed(changes[:MOST_LISTED])}."


def _separability(items: Sequence[Observation]) -> Iterator[str]:
    """How separable the test rows become from layer to layer, where that was measured."""
    changes = [
        f"{first:.3g} to {last:.3g} for {method}" for method, first, last, _ in _layers(items, "test_csr")
    ]
    if changes:
        yield f"CSR of the test rows (lower is better) goes from {listed(changes[:MOST_LISTED])}."


def _layers(items: Sequence[Observation], metric: str) -> Iterator[tuple[str, float, float, int]]:
    """Each method without a grid, its mean in the first and in the last layer, and how many lie between."""
    for method, of in _methods(items):
        once = {item.cell["key"]: item.layers(metric) for item in of}
        rows = [row for row in once.values() if row]
        if rows and not (metric == "test" and varied(of)):
            first, last = (float(np.mean([row[place] for row in rows])) for place in (0, -1))
            yield method, first, last, len(rows[0]) - 1


_KINDS = (_parameters, _noise, _partitions, _best, _feedback, _depth, _separability)


def _deviation(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How far aggregated weights lie from those of the pooled rows, where that was measured."""
    worst: dict[str, float] = {}
    for cell in cells:
        if (deviation := METRICS["deviation"].of(cell, None)) is not None:
            worst[cell["method"]] = max(deviation, worst.get(cell["method"], 0.0))
    if worst:
        gaps = listed([f"{value:.1e} for {method}" for method, value in worst.items()])
        yield f"Aggregated weights deviate from the pooled solution by at most {gaps}."


def _plain(items: Sequence[Observation]) -> Iterator[str]:
    """What the methods reach and at what cost, where there is nothing to compare."""
    for method, of in _methods(_deepest(items)):
        cell = of[0].cell
        traffic = METRICS["megabytes"].of(cell, None) or 0.0
        yield (
            f"{method} reaches {_percent(_score(of))} in {counted(cell['exchanges'] or 0, 'exchange')} with "
            f"{traffic:.3g} MB of traffic and {cell['seconds']:.2g} seconds of training."
        )


def _methods(items: Sequence[Observation]) -> list[tuple[str, list[Observation]]]:
    return list(groups(items, lambda item: item.method).items())


def _mean(items: Iterator[Observation] | Sequence[Observation]) -> float:
    return mean_error(item.accuracy for item in items)[0]


def _score(items: Sequence[Observation]) -> tuple[float, float]:
    """Mean accuracy and standard error over seeds; partitions of one seed are no further evidence."""
    return mean_error(_mean(of) for of in groups(items, lambda item: item.seed).values())


def _clean(items: Sequence[Observation]) -> list[Observation]:
    """The observations with the fewest flipped labels."""
    least = min(item.noise for item in items)
    return [item for item in items if item.noise == least]


def _deepest(items: Sequence[Observation]) -> list[Observation]:
    """Of each method only its deepest observations."""
    most = {method: max((i.named_depth or 0 for i in of), default=0) for method, of in _methods(items)}
    return [item for item in items if (item.named_depth or 0) == most[item.method]]


def _invariant(items: Sequence[Observation]) -> bool:
    """Whether, seed by seed, the same test rows are right on every partition."""
    return all(
        of[0].kept_hits is not None and len({item.kept_hits for item in of}) == 1
        for of in groups(items, lambda item: item.seed).values()
    )


def _spread(items: Sequence[Observation]) -> float:
    means = [_mean(of) for of in groups(items, lambda item: item.partition).values()]
    return max(means) - min(means)


def _deepafl(cell: Mapping[str, Any]) -> bool:
    """DeepAFL as in its paper: nothing ablated, every client takes part, no labels flipped."""
    usual = {"skip": True, "projection": "random", "transformation": "solved", "participation": 1.0}
    own = cell["parameters"]
    whole = cell["algorithm"] == "deepafl" and own["activation"] != "none" and not cell["noise"]
    return whole and all(own.get(name, value) == value for name, value in usual.items())


def _percent(mean_and_error: tuple[float, float]) -> str:
    mean, error = mean_and_error
    return f"{mean:.2f} %" if np.isnan(error) else f"{mean:.2f} ± {error:.2f} %"
