"""One cell of an experiment: deal the rows, train, score every layer once, count what it cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, LinAlgWarning

from fedsolve.closedform import laws
from fedsolve.closedform.predictors import DeepModel, StagedModel
from fedsolve.closedform.separability import ClassSums, class_sums, separability
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.container import Array
from fedsolve.data import partitions
from fedsolve.data.noise import flip_labels
from fedsolve.errors import DataError
from fedsolve.experiments import round_metrics
from fedsolve.experiments.algorithms import AggregationLaw, LocalRidge, build, parameter_names
from fedsolve.experiments.config import Cell, Measure, PartitionSpec
from fedsolve.experiments.local_cells import LocalParts, run_locally
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.federation.engine import Federation
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method, Record
from fedsolve.model import Model

_SPAN = 8192


def run_cell(
    cell: Cell, rows: ExperimentRows, workers: int | None = None, tick: Tick | None = None
) -> dict[str, Any]:
    """The outcome of a cell as JSON values: scores, costs, and what the partition turned out to be.

    Training accuracy is measured against the labels trained on, flipped ones included. Rows are dealt by
    the labels as they were before.
    """
    tick = tick or (lambda remark: None)
    true = np.asarray(rows.y_train)
    labels = flip_labels(true, cell.noise, cell.seed) if cell.noise else true
    # Clients own rows; a wrong label does not move a row elsewhere, so noise alone differs along its axis.
    owners = deal(cell.partition, true, cell.seed)
    parameters = dict(cell.parameters)
    if "seed" in parameter_names(cell.method.algorithm):
        parameters["seed"] = cell.seed
    method = build(cell.method.algorithm, parameters)
    if cell.measure.local:
        parts = LocalParts.deal(rows, labels, true, owners, cell.partition.clients, cell.seed)
        outcome = _outcome() | run_locally(method, parts, np.unique(labels), workers, _costs, tick)
    elif isinstance(method, LocalRidge):
        outcome = _local(method, rows, labels, owners, cell.partition.clients)
    elif isinstance(method, AggregationLaw):
        outcome = _law(method, rows, labels, owners, cell.partition.clients)
    elif cell.engine == "flower-simulation":
        from fedsolve.network.simulation import simulate

        outcome = simulate(
            rows.x_train,
            labels,
            owners,
            lambda federation: _federated(method, federation, rows, labels, cell.measure, tick),
            clients=cell.partition.clients,
            workers=workers,
        )
    else:
        federation = LocalFederation.from_arrays(
            rows.x_train, labels, owners, clients=cell.partition.clients, workers=workers
        )
        outcome = _federated(method, federation, rows, labels, cell.measure, tick)
    dealt = {
        "heterogeneity": partitions.heterogeneity(true, owners),
        "empty_clients": cell.partition.clients - len(np.unique(owners)),
    }
    return {"partition": cell.partition.as_dict() | dealt, **outcome}


def deal(partition: PartitionSpec, labels: Array, seed: int) -> Array:
    """Which client owns each row."""
    owners: Array = getattr(partitions, partition.kind)(
        labels, partition.clients, seed=seed, **partition.options
    )
    return owners


# -- registered methods ----------------------------------------------------------------------------


def _federated(
    method: Method[Any],
    federation: Federation,
    rows: ExperimentRows,
    labels: Array,
    measure: Measure,
    tick: Tick,
) -> dict[str, Any]:
    watch = round_metrics.watch(method, rows, measure)
    clock: list[float] = []
    started = time.perf_counter()

    def heard(record: Record, expected: int) -> None:
        clock.append(time.perf_counter() - started)
        tick(f"exchange {record.exchange + 1} of {expected}")

    model = method.fit(federation, progress=heard, watch=watch)
    # Looking at test rows is not training.
    looking = watch.seconds if watch is not None else 0.0
    outcome = _outcome() | _costs(model, clock, time.perf_counter() - started - looking)
    tick("scoring")
    round_metrics.score_where_trained(model, method)
    parts = {"train": (rows.x_train, labels)} if measure.train or measure.separability else {}
    if rows.x_test is not None and rows.y_test is not None:
        parts["test"] = (rows.x_test, rows.y_test)
    staged = isinstance(model, StagedModel)
    for part, (features, truth) in parts.items():
        if staged:
            correct, sums = _score_layers(model, features, truth, measure.separability)
        else:
            correct, sums = [_correct(model, features, truth)], []
        _enter(outcome, part, correct, len(truth), staged)
        if sums:
            outcome["separability"] = outcome["separability"] or {}
            outcome["separability"][part] = [vars(separability(layer)) for layer in sums]
    round_metrics.enter(outcome, model.history, measure.score)
    return outcome


def _costs(model: Model, clock: list[float], seconds: float) -> dict[str, Any]:
    """What training took, in all and up to every layer, and the risk it reached."""
    found: dict[str, Any] = {
        "seconds": seconds,
        "exchanges": len(model.history),
        "bytes_up": sum(record.bytes_up for record in model.history),
        "bytes_down": sum(record.bytes_down for record in model.history),
        "risk": _risks(model),
    }
    if isinstance(model, StagedModel):
        found |= _costs_per_layer(model.history, clock, model.layers)
    return found


def _risks(model: Model) -> list[float | None]:
    """The regularised risk of every classifier, in order."""
    if isinstance(model, DeepModel):
        # One exchange may solve two classifiers, so the history does not hold the risk of each.
        found = model.risk.tolist()
    else:
        found = [record.risk for record in model.history if record.solved]
    return [risk if risk is not None and np.isfinite(risk) else None for risk in found]


def _score_layers(
    model: StagedModel, features: Array, truth: Array, separable: bool
) -> tuple[list[int], list[ClassSums]]:
    """Correct predictions after every layer, and the class sums of its features, in one pass."""
    if model.classes is None:
        raise DataError("experiments classify; the model has no classes.")
    correct = np.zeros(model.layers + 1, dtype=np.int64)
    sums: list[ClassSums] = []
    for start in range(0, len(features), _SPAN):
        span = slice(start, start + _SPAN)
        found = np.asarray(truth[span])
        # Test rows of a class that nobody trained on count as wrong and have no place in class sums.
        known = np.isin(found, model.classes)
        for layer, (phi, scores) in enumerate(model.stages(np.asarray(features[span]))):
            predicted = model.classes[np.argmax(scores, axis=1)]
            correct[layer] += int(np.sum(predicted == found))
            if separable:
                part = class_sums(phi[known], found[known], model.classes)
                if start == 0:
                    sums.append(part)
                else:
                    sums[layer] += part
    return correct.tolist(), sums


def _costs_per_layer(history: Sequence[Record], clock: list[float], layers: int) -> dict[str, list[Any]]:
    """What W_t had cost when it was solved: exchanges, bytes and seconds from the start."""
    last = {name: index for index, record in enumerate(history) for name in record.solved}
    ends = [last[f"W{layer}"] for layer in range(layers + 1)]
    up = np.cumsum([record.bytes_up for record in history])
    down = np.cumsum([record.bytes_down for record in history])
    return {
        "exchanges_per_layer": [end + 1 for end in ends],
        "bytes_up_per_layer": [int(up[end]) for end in ends],
        "bytes_down_per_layer": [int(down[end]) for end in ends],
        "seconds_per_layer": [clock[end] for end in ends],
    }


def _correct(model: Model, features: Array, truth: Array) -> int:
    spans = range(0, len(features), _SPAN)
    return sum(int(np.sum(model.predict(features[s : s + _SPAN]) == truth[s : s + _SPAN])) for s in spans)


# -- what they are compared with -------------------------------------------------------------------


def _local(
    method: LocalRidge, rows: ExperimentRows, labels: Array, owners: Array, clients: int
) -> dict[str, Any]:
    if rows.x_test is None or rows.y_test is None:
        raise DataError("'local' is measured on test rows, and this dataset has none.")
    features, codes = _encoded(rows.x_train, labels, labels)
    test, truth = _encoded(rows.x_test, rows.y_test, labels)
    started = time.perf_counter()
    targets = np.eye(int(codes.max()) + 1)[codes]
    weights = laws.local_only(features, targets, owners, clients, method.ridge)
    seconds = time.perf_counter() - started
    correct = [_hits(test @ weights[client], truth) for client in np.unique(owners)]
    best, mean = max(correct) / len(truth), float(np.mean(correct)) / len(truth)
    outcome = _outcome(exchanges=0, bytes_up=0, bytes_down=0, seconds=seconds, test_rows=len(truth))
    outcome["measures"] = {"local_best": best, "local_mean": mean}
    outcome["accuracy"] = best if method.statistic == "best" else mean
    if method.statistic == "best":
        outcome["test_correct"] = max(correct)
    return outcome


def _law(
    method: AggregationLaw, rows: ExperimentRows, labels: Array, owners: Array, clients: int
) -> dict[str, Any]:
    """AFL, Eq. 5-16, and how far it is from the joint solution: the sum of absolute differences.

    Singular systems give no model, and neither does the removal of a regulariser of 0.
    """
    features, codes = _encoded(rows.x_train, labels, labels)
    targets = np.eye(int(codes.max()) + 1)[codes]
    width, outputs = features.shape[1], targets.shape[1]
    started = time.perf_counter()
    outcome = _outcome(exchanges=1)
    outcome["bytes_up"] = 8 * clients * width * (width + outputs)
    outcome["bytes_down"] = 8 * clients * width * outputs
    if method.remove and method.regulariser == 0:
        # Nothing was added that could be removed; the paper's Table 3 has N/A there.
        return outcome
    weight = _merged(method, features, targets, owners, clients)
    outcome["seconds"] = time.perf_counter() - started
    outcome["measures"] = {"singular": weight is None}
    if weight is None:
        return outcome
    joint = ridge_solve(features.T @ features, features.T @ targets, 0.0)
    outcome["measures"]["deviation"] = float(np.abs(joint - weight).sum())
    _enter(outcome, "train", [_hits(features @ weight, codes)], len(codes), staged=False)
    if rows.x_test is not None and rows.y_test is not None:
        test, truth = _encoded(rows.x_test, rows.y_test, labels)
        _enter(outcome, "test", [_hits(test @ weight, truth)], len(truth), staged=False)
    return outcome


def _merged(
    method: AggregationLaw, features: Array, targets: Array, owners: Array, clients: int
) -> Array | None:
    with warnings.catch_warnings():
        # Ill-conditioned local systems are what the paper's tables without RI are about.
        warnings.simplefilter("ignore", LinAlgWarning)
        try:
            merged = laws.aggregate(
                laws.local_solution(features[owners == k], targets[owners == k], method.regulariser)
                for k in range(clients)
            )
            weight = laws.remove_regulariser(merged, method.regulariser) if method.remove else merged.weight
        except (LinAlgError, ValueError):
            # Exactly singular, or grown beyond float64 (scipy refuses what is not finite).
            return None
    return weight if np.all(np.isfinite(weight)) else None


def _encoded(features: Array, labels: Array, known: Array) -> tuple[Array, Array]:
    """Features as float64 and labels as positions among the sorted known ones; -1 is none of them."""
    classes = np.unique(known)
    codes = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    codes[classes[codes] != labels] = -1
    return np.asarray(features, dtype=np.float64), codes


def _hits(scores: Array, codes: Array) -> int:
    return int(np.sum(np.argmax(scores, axis=1) == codes))


def _outcome(**known: Any) -> dict[str, Any]:
    """The fields every cell has; null until somebody enters them."""
    names = (
        "accuracy",
        "train_accuracy",
        "test_correct",
        "test_rows",
        "accuracy_per_layer",
        "train_accuracy_per_layer",
        "test_correct_per_layer",
        "risk",
        "separability",
        "local",
        "exchanges",
        "bytes_up",
        "bytes_down",
        "seconds",
        "exchanges_per_layer",
        "bytes_up_per_layer",
        "bytes_down_per_layer",
        "seconds_per_layer",
    )
    return dict.fromkeys(names) | {"measures": {}} | known


def _enter(outcome: dict[str, Any], part: str, correct: list[int], rows: int, staged: bool) -> None:
    prefix = "train_" if part == "train" else ""
    outcome[f"{prefix}accuracy"] = correct[-1] / rows
    if staged:
        outcome[f"{prefix}accuracy_per_layer"] = [count / rows for count in correct]
    if part == "test":
        outcome |= {"test_correct": correct[-1], "test_rows": rows}
        if staged:
            outcome["test_correct_per_layer"] = correct
