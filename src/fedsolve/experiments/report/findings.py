"""What the numbers say, in sentences: each is computed, and appears only where its numbers exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.experiments.figures.round_curves import pairs
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import (
    Observation,
    by_dataset,
    distinct,
    groups,
    names_of,
    scored,
    varied,
)
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.significance import LEVEL, compare, mean_error
from fedsolve.experiments.wording import axis_label, counted, listed
from fedsolve.markup import unbroken

MOST_LISTED = 4
"""Methods that one sentence lists; nobody would read more."""


def findings(run: RunFolder) -> dict[str, list[str]]:
    """The sentences on each dataset of a run, the one its experiment is about first.

    Sentences about all of them are under "", and so is everything where there is only one.
    """
    datasets = by_dataset(run)
    paragraphs = {"": _backbones(run)}
    for dataset, cells in datasets.items():
        items = scored(cells)
        sentences = []
        if items:
            sentences = [
                *_parameters(items),
                *_noise(items),
                *_partitions(items),
                *_best(items),
                *_feedback(items),
                *_depth(items),
                *_separability(items),
            ]
        if not varied(items):
            sentences += _deviation(cells)
        if items and not sentences and not paragraphs[""]:
            sentences = _plain(items)
        paragraphs.setdefault(dataset if len(datasets) > 1 else "", []).extend(sentences)
    return {dataset: [*map(unbroken, sentences)] for dataset, sentences in paragraphs.items() if sentences}


def overall(runs: Sequence[RunFolder]) -> list[str]:
    """What holds over all runs together: which models ignore the partition, and what depth gains."""
    same = moved = 0
    gains = []
    for run in runs:
        for cells in by_dataset(run).values():
            items = scored(cells)
            for of in groups(items, lambda item: item.entry).values():
                if len(distinct(item.partition for item in of)) > 1 and _closed(of[0]):
                    same, moved = (same + 1, moved) if _invariant(of) else (same, moved + 1)
            gains += [gain for cell in cells if _deepafl(cell) and (gain := _gain(cell)) is not None]
    sentences = []
    if same and not moved:
        sentences.append(
            "Wherever a closed-form model was trained on several partitions of the same rows "
            f"({counted(same, 'comparison')}), it read exactly as many test rows correctly on each."
        )
    elif same:
        sentences.append(
            f"In {same} of {same + moved} comparisons a closed-form model read exactly as many test rows "
            "correctly on every partition of the same rows."
        )
    if gains:
        up = sum(gain > 0 for gain in gains)
        sentences.append(
            f"DeepAFL's residual blocks raised test accuracy in {up} of {len(gains)} trainings, "
            f"by {np.mean(gains):.1f} points on average."
        )
    return sentences


def _backbones(run: RunFolder) -> list[str]:
    """What each method reaches through each backbone, where one dataset has several."""
    scores: dict[tuple[str, str], dict[str, str]] = {}
    for cells in by_dataset(run).values():
        dataset = cells[0]["dataset"]
        for method, of in groups(_deepest(scored(cells)), lambda item: item.method).items():
            backbone = dataset["backbone"] or "none"
            scores.setdefault((dataset["name"], method), {})[backbone] = _percent(_score(of))
    sentences = []
    for (dataset, method), reached in scores.items():
        if len(reached) > 1:
            results = listed([f"{score} through {backbone}" for backbone, score in reached.items()])
            sentences.append(f"On {dataset} {method} reaches {results}.")
    return sentences


def _parameters(items: Sequence[Observation]) -> list[str]:
    """Where the best point of a grid lies, and how much the grid matters."""
    sentences = []
    for method, of in groups(items, lambda item: item.method).items():
        parameters = varied(of)
        if not parameters:
            continue
        means = {grid: _score(at) for grid, at in groups(_deepest(of), lambda item: item.grid).items()}
        best = max(means, key=lambda grid: means[grid][0])
        worst = min(mean for mean, _ in means.values())
        where = listed([axis_label(name, value) for name, value in best if name in parameters])
        ties = sum(mean == means[best][0] for mean, _ in means.values()) - 1
        tied = f" ({counted(ties, 'other setting')} just as well)" if ties else ""
        sentences.append(
            f"{method} is best at {where} with {_percent(means[best])}{tied}; over the {len(means)} settings "
            f"tried, accuracy moves by {means[best][0] - worst:.1f} points."
        )
    return sentences


def _noise(items: Sequence[Observation]) -> list[str]:
    """What flipped labels cost each method."""
    rates = sorted(distinct(item.noise for item in items))
    if len(rates) < 2:
        return []
    costs = []
    for method, of in groups(_deepest(items), lambda item: item.method).items():
        clean, worst = (
            mean_error(i.accuracy for i in of if i.noise == rate)[0] for rate in (rates[0], rates[-1])
        )
        costs.append(f"{method} {clean - worst:.1f} points ({clean:.1f} to {worst:.1f} %)")
    share = f"{100 * rates[-1]:g} % flipped labels instead of {100 * rates[0]:g} %"
    return [f"{share} cost {listed(costs[:MOST_LISTED])}."]


def _partitions(items: Sequence[Observation]) -> list[str]:
    """Which methods do not notice who owns the rows, and how much the others do.

    Where clients are scored on rows of their own, the partition also deals the test rows, and no comparison
    is possible.
    """
    items = [item for item in items if item.cell.get("local") is None]
    names = distinct(item.partition for item in items)
    if len(names) < 2:
        return []
    same: list[str] = []
    spreads: list[str] = []
    for method, of in groups(items, lambda item: item.method).items():
        entries = groups(of, lambda item: item.entry).values()
        if all(_invariant(entry) for entry in entries):
            same.append(method)
        else:
            spread = max(_spread(entry) for entry in entries)
            spreads.append(f"{method} by up to {spread:.1f} points")
    sentences = []
    if same:
        verb = "reads" if len(same) == 1 else "read"
        sentences.append(
            f"{listed(same)} {verb} exactly as many test rows correctly on all {len(names)} partitions"
        )
    if spreads:
        sentences.append(f"{listed(spreads[:MOST_LISTED])}")
    if same and spreads:
        return [f"{sentences[0]}; the partition moves {sentences[1]}."]
    return [f"{sentences[0]}." if same else f"The partition moves {sentences[0]}."]


def _best(items: Sequence[Observation]) -> list[str]:
    """The best method and the next one, with the test of their difference."""
    clean = _clean(items)
    name = names_of(clean)
    of = groups(clean, lambda item: item.entry)
    means = {entry: _score(items) for entry, items in of.items()}
    ranked = sorted(means, key=lambda entry: -means[entry][0])
    rival = next((entry for entry in ranked if entry[0] != ranked[0][0]), None)
    if rival is None:
        return []
    gap = means[ranked[0]][0] - means[rival][0]
    across = " over all partitions" if len(distinct(item.partition for item in clean)) > 1 else ""
    # The best round was chosen by the test rows, so they are no sample to test its accuracy with.
    tested = not any(_scored_at_best(item) for entry in (ranked[0], rival) for item in of[entry])
    certainty = _significance(of[ranked[0]], of[rival]) if tested else ""
    return [
        f"{name(of[ranked[0]][0])} is best with {_percent(means[ranked[0]])}{across}, {gap:.1f} points above "
        f"{name(of[rival][0])}{certainty}."
    ]


def _feedback(items: Sequence[Observation]) -> list[str]:
    """What feedback alignment does to accuracy and drift, over the methods that were run with and without."""
    gains, drifts = [], []
    for host, aligned in pairs([item for item in items if _unablated(item.cell["parameters"])]):
        gains.append(_score(aligned)[0] - _score(host)[0])
        known = [[item.values["drift"] for item in of if "drift" in item.values] for of in (host, aligned)]
        if all(known):
            drifts.append(float(np.mean(known[1]) / np.mean(known[0]) - 1))
    if not gains:
        return []
    if len(gains) == 1:
        sentence = f"Feedback alignment changes accuracy by {gains[0]:+.2f} points"
        sentence += f" and drift by {100 * drifts[0]:+.1f} %" if drifts else ""
        return [f"{sentence}."]
    raised = sum(gain > 0 for gain in gains)
    sentence = (
        f"Feedback alignment raises accuracy in {raised} of {len(gains)} comparisons; the mean change is "
        f"{np.mean(gains):+.2f} points ({min(gains):+.2f} to {max(gains):+.2f})"
    )
    if drifts:
        lowered = sum(drift < 0 for drift in drifts)
        sentence += (
            f". Drift falls in {lowered} of {len(drifts)}; its mean change is {100 * np.mean(drifts):+.1f} %"
        )
    return [f"{sentence}."]


def _depth(items: Sequence[Observation]) -> list[str]:
    """How accuracy changes from the first layer to the last; `_parameters` covers methods with a grid."""
    changes = []
    for method, of in groups(_clean(items), lambda item: item.method).items():
        if varied(of):
            continue
        once = {item.cell["key"]: item.layers("test") for item in of}
        layers = [row for row in once.values() if len(row) > 1]
        if layers:
            first, last = (float(np.mean([row[place] for row in layers])) for place in (0, -1))
            changes.append(
                f"{method} from {first:.1f} to {last:.1f} % ({counted(len(layers[0]) - 1, 'layer')})"
            )
    return [f"Depth takes the accuracy of {listed(changes[:MOST_LISTED])}."] if changes else []


def _separability(items: Sequence[Observation]) -> list[str]:
    """How separable the test rows become from layer to layer, where that was measured."""
    changes = []
    for method, of in groups(items, lambda item: item.method).items():
        once = {item.cell["key"]: item.layers("test_csr") for item in of}
        layers = [row for row in once.values() if row]
        if layers:
            first, last = (float(np.mean([row[place] for row in layers])) for place in (0, -1))
            changes.append(f"{first:.3g} to {last:.3g} for {method}")
    if not changes:
        return []
    return [
        f"CSR of the test rows ({METRICS['test_csr'].direction}) goes from {listed(changes[:MOST_LISTED])}."
    ]


def _deviation(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far aggregated weights lie from those of the pooled rows, where that was measured."""
    worst: dict[str, float] = {}
    for cell in cells:
        deviation = METRICS["deviation"].of(cell, None)
        if deviation is not None:
            worst[cell["method"]] = max(deviation, worst.get(cell["method"], 0.0))
    gaps = [f"{value:.1e} for {method}" for method, value in worst.items()]
    return [f"Aggregated weights deviate from the pooled solution by at most {listed(gaps)}."] if gaps else []


def _plain(items: Sequence[Observation]) -> list[str]:
    """What the methods reach and at what cost, where there is nothing to compare."""
    sentences = []
    for method, of in groups(_deepest(items), lambda item: item.method).items():
        cell = of[0].cell
        traffic = METRICS["megabytes"].of(cell, None) or 0.0
        sentences.append(
            f"{method} reaches {_percent(_score(of))} in {counted(cell['exchanges'] or 0, 'exchange')} with "
            f"{traffic:.3g} MB of traffic and {cell['seconds']:.2g} seconds of training."
        )
    return sentences


def _score(items: Sequence[Observation]) -> tuple[float, float]:
    """Mean accuracy and standard error over seeds; partitions of one seed are no further evidence."""
    seeds = groups(items, lambda item: item.seed).values()
    return mean_error(mean_error(item.accuracy for item in of)[0] for of in seeds)


def _scored_at_best(item: Observation) -> bool:
    """Whether the accuracy is that of the best round on the test rows, and not of the last."""
    rounds = item.cell.get("accuracy_per_round") or []
    return bool(rounds) and 100.0 * max(rounds) == item.accuracy != 100.0 * rounds[-1]


def _clean(items: Sequence[Observation]) -> list[Observation]:
    """The observations with the fewest flipped labels."""
    least = min(item.noise for item in items)
    return [item for item in items if item.noise == least]


def _deepest(items: Sequence[Observation]) -> list[Observation]:
    """Of each method only its deepest observations."""
    most = {
        method: max((item.named_depth for item in of if item.named_depth is not None), default=None)
        for method, of in groups(items, lambda item: item.method).items()
    }
    return [item for item in items if item.named_depth == most[item.method]]


def _invariant(items: Sequence[Observation]) -> bool:
    """Whether, seed by seed, the same number of test rows is read correctly on every partition."""
    return all(
        len({item.counts for item in of}) == 1 and of[0].counts is not None
        for of in groups(items, lambda item: item.seed).values()
    )


def _spread(items: Sequence[Observation]) -> float:
    means = [mean_error(i.accuracy for i in of)[0] for of in groups(items, lambda i: i.partition).values()]
    return max(means) - min(means)


def _closed(item: Observation) -> bool:
    """Whether theory promises the same model on every partition: sums over all clients, nothing else."""
    same_rows = item.cell.get("local") is None
    return same_rows and (item.cell["algorithm"] == "afl" or _deepafl(item.cell))


def _deepafl(cell: Mapping[str, Any]) -> bool:
    """DeepAFL as in its paper: nothing ablated, every client takes part, no labels flipped."""
    usual = {"skip": True, "projection": "random", "transformation": "solved", "participation": 1.0}
    parameters = cell["parameters"]
    whole = all(parameters.get(name, value) == value for name, value in usual.items())
    return (
        cell["algorithm"] == "deepafl" and whole and parameters["activation"] != "none" and not cell["noise"]
    )


def _unablated(parameters: Mapping[str, Any]) -> bool:
    """Feedback alignment as in its paper: through the global weights, rescaled, layer by layer."""
    usual = {"feedback_matrix": "global", "feedback_scaling": "layer", "feedback_route": "layer"}
    return all(parameters.get(name) == value for name, value in usual.items())


def _gain(cell: Mapping[str, Any]) -> float | None:
    layers = cell.get("accuracy_per_layer")
    return 100.0 * (layers[-1] - layers[0]) if layers and len(layers) > 1 else None


def _significance(first: Sequence[Observation], second: Sequence[Observation]) -> str:
    """The end of a sentence: the chi-squared test of two accuracies, each test set counted once."""
    p = compare([item.counts for item in first], [item.counts for item in second])
    if p is None:
        return ""
    p_value = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    return f"; {p_value}" if p < LEVEL else f", which may be chance; {p_value}"


def _percent(mean_and_error: tuple[float, float]) -> str:
    mean, error = mean_and_error
    return f"{mean:.2f} %" if np.isnan(error) else f"{mean:.2f} ± {error:.2f} %"
