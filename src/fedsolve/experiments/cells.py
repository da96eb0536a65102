"""One cell of an experiment: split the rows, train, score, measure the cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.predictors import StagedModel
from fedsolve.closedform.separability import ClassSums, class_sums, separability
from fedsolve.data import partitions
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import build, parameter_names
from fedsolve.experiments.config import Cell
from fedsolve.experiments.outcomes import Clock, Outcome, enter_rounds, watches
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.experiments.trials import Contender, LocalParts, Trial
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.followers import Followers, Training
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.method import Method
from fedsolve.federation.participant import Participant
from fedsolve.model import Model
from fedsolve.scoring.client_scores import ClientScores

LARGEST_COUNTS = 1 << 16
"""Largest (clients, classes) table, in entries, that is kept for drawing."""

_SPAN = 8192


def train_cell(
    cell: Cell,
    rows: ExperimentRows,
    workers: int | None = None,
    tick: Tick = lambda remark: None,
    follow: Followers | None = None,
) -> Outcome:
    """Scores, costs and the partition of a cell as JSON values, and the model that was trained.

    Training accuracy is measured against the labels trained on, flipped ones included. Rows are dealt by
    the labels as they were before.
    """
    trial = Trial(cell, rows, workers, tick, follow or Followers())
    parameters = dict(cell.parameters)
    if "seed" in parameter_names(cell.method.algorithm):
        parameters["seed"] = cell.seed
    built: Contender | Method[Any] = build(cell.method.algorithm, parameters)
    if not isinstance(built, Method):
        outcome = _compared(built, trial)
    elif cell.measure.local:
        outcome = run_locally(built, trial)
    else:
        outcome = _federated(built, trial)
    counts = partitions.class_counts(trial.true, trial.owners, trial.clients)
    outcome.values["partition"] = cell.partition.as_dict() | {
        "heterogeneity": partitions.heterogeneity(trial.true, trial.owners),
        "clients": trial.clients,
        "empty_clients": int(np.sum(counts.sum(axis=1) == 0)),
        "classes": [str(label) for label in np.unique(trial.true)],
    }
    if counts.size <= LARGEST_COUNTS:
        outcome.values["partition"]["class_counts"] = counts.tolist()
    scores = {name: outcome.values[name] for name in ("accuracy", "train_accuracy")}
    found = {**scores, **outcome.values["measures"]}
    trial.follow.scored({name: float(value) for name, value in found.items() if value is not None})
    return outcome


def _compared(chosen: Contender, trial: Trial) -> Outcome:
    """The outcome of a baseline. It is not a method, so this function notifies the followers."""
    classes, features = trial.classes, int(trial.rows.x_train.shape[1])
    clients = trial.names or tuple(map(str, range(trial.clients)))
    spec = Spec(features, classes, len(classes), "bytes", trial.cell.device)
    parameters = dict(trial.cell.parameters)
    trial.follow.started(Training(trial.cell.method.algorithm, parameters, spec, clients, expected=0))
    try:
        outcome = chosen.run(trial)
    except BaseException as problem:
        trial.follow.stopped(problem)
        raise
    trial.follow.finished(None)
    return outcome


# -- one model for all -----------------------------------------------------------------------------


def _federated(method: Method[Any], trial: Trial) -> Outcome:
    """A method trained over a federation, every layer scored once."""
    rows, measure = trial.rows, trial.cell.measure
    besides = Followers(*watches(method, rows, measure), trial.follow)
    clock = Clock(trial.tick, besides)
    with _federation(trial) as federation:
        model = method.fit(federation, follow=(clock, besides))
    outcome = Outcome(model)
    outcome.enter_costs(model, clock.ends, clock.now())
    trial.tick("scoring")
    parts = {"train": (rows.x_train, trial.labels)} if measure.train or measure.separability else {}
    if rows.x_test is not None and rows.y_test is not None:
        parts["test"] = (rows.x_test, rows.y_test)
    for part, (features, truth) in parts.items():
        hits, sums = _score(model, features, truth, measure.separability)
        outcome.enter_scores(part, hits, trial.cell.method.depths if isinstance(model, StagedModel) else None)
        if sums:
            outcome.values["separability"] = outcome.values["separability"] or {}
            outcome.values["separability"][part] = [vars(separability(layer)) for layer in sums]
    enter_rounds(outcome.values, model.history, measure.score)
    return outcome


def _federation(trial: Trial) -> AbstractContextManager[Federation]:
    rows, workers, device = trial.rows, trial.workers, trial.cell.device
    owners = trial.owners if trial.names is None else np.array(trial.names)[trial.owners]
    dealt = rows.x_train, trial.labels, owners, trial.clients
    if trial.cell.engine == "ray":
        from fedsolve.cluster.ray_federation import RayFederation

        return RayFederation.from_arrays(*dealt, workers=workers, device=device)
    return nullcontext(LocalFederation.from_arrays(*dealt, workers=workers, device=device))


def _score(model: Model, features: Array, truth: Array, separable: bool) -> tuple[Array, list[ClassSums]]:
    """Which rows are right, (layers, rows), and the class sums of every layer's features, in one pass."""
    if model.classes is None:
        raise DataError("experiments classify; the model has no classes.")
    hits: list[Array] = []
    sums: list[ClassSums] = []
    for start in range(0, len(features), _SPAN):
        labels, part = np.asarray(truth[start : start + _SPAN]), np.asarray(features[start : start + _SPAN])
        if not isinstance(model, StagedModel):
            hits.append((model.predict(part) == labels)[np.newaxis])
            continue
        # Test rows of a class that nobody trained on count as wrong and have no place in class sums.
        known = np.isin(labels, model.classes)
        right = []
        for layer, (phi, scores) in enumerate(model.stages(part)):
            right.append(model.classes[np.argmax(scores, axis=1)] == labels)
            if separable:
                own = class_sums(phi[known], labels[known], model.classes)
                if start == 0:
                    sums.append(own)
                else:
                    sums[layer] += own
        hits.append(np.stack(right))
    return np.concatenate(hits, axis=1), sums


# -- a model for every client ----------------------------------------------------------------------


def run_locally(method: Method[Any], trial: Trial) -> Outcome:
    """A method measured client by client: each one's model on test rows of its own distribution."""
    parts = trial.parts
    total = sum(map(len, parts.train))
    participants = [
        Participant(name, data, memory_budget=LOCAL_MEMORY * len(data) // max(1, total))
        for name, data in zip(parts.names, parts.train, strict=True)
    ]
    federation = LocalFederation(
        participants, classes=trial.classes.tolist(), workers=trial.workers, device=trial.cell.device
    )
    clock = Clock(trial.tick, trial.follow)
    model = method.fit(federation, follow=(clock, trial.follow))
    trained = clock.now()
    trial.tick("personalising and scoring")
    outcome = Outcome(model)
    if not model.personalises:
        outcome.enter_costs(model, clock.ends, trained)
        if isinstance(model, StagedModel):
            layers = _by_layer(model, parts)
            outcome.enter_local(layers[-1])
            outcome.values["accuracy_per_layer"] = [layer.mean for layer in layers]
        else:
            outcome.enter_local(parts.score(model))
        return outcome
    balances: list[float | None] = []
    started = time.perf_counter()
    scores = parts.score(_noted(model, participants, balances))
    outcome.enter_costs(model, clock.ends, trained + time.perf_counter() - started)
    compared = {}
    if model.predicts:
        compared["shared"] = parts.score(model)
    if hasattr(model, "alone"):
        compared["alone"] = parts.score(_noted(model.alone(), participants, []))
    outcome.enter_local(scores, compared, balances)
    return outcome


def _noted(model: Model, participants: list[Participant], balances: list[float | None]) -> Iterator[Any]:
    """Each client's own model, one at a time; its balance, where it has one, is kept."""
    for participant in participants:
        personal = participant.personalise(model)
        balances.append(getattr(personal, "balance", None))
        yield personal


def _by_layer(model: StagedModel, parts: LocalParts) -> list[ClientScores]:
    """Local scores after every layer."""
    rows = np.array([len(data) for data in parts.test])
    correct = np.zeros((model.layers + 1, len(rows)), dtype=np.int64)
    for client, data in enumerate(parts.test):
        if len(data):
            hits = model.staged_predict(data.features(slice(None))) == data.own_labels()
            correct[:, client] = hits.sum(axis=1)
    return [ClientScores(parts.names, layer, rows) for layer in correct]
