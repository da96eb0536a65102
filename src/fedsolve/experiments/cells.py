"""One cell of an experiment: deal the rows, train, score, count what it cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.data import partitions
from fedsolve.experiments.algorithms import build, parameter_names
from fedsolve.experiments.config import Cell
from fedsolve.experiments.federated import Federated
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.experiments.trials import Contender, Trial
from fedsolve.federation.engine import Spec
from fedsolve.federation.followers import Followers, Training
from fedsolve.federation.method import Method


def run_cell(
    cell: Cell,
    rows: ExperimentRows,
    workers: int | None = None,
    tick: Tick | None = None,
    follow: Followers | None = None,
) -> dict[str, Any]:
    """The outcome of a cell as JSON values: scores, costs, and what the partition turned out to be.

    Training accuracy is measured against the labels trained on, flipped ones included. Rows are dealt by
    the labels as they were before.
    """
    return train_cell(cell, rows, workers, tick, follow).values


def train_cell(
    cell: Cell,
    rows: ExperimentRows,
    workers: int | None = None,
    tick: Tick | None = None,
    follow: Followers | None = None,
) -> Outcome:
    """The outcome of a cell together with the model that was trained."""
    trial = Trial.of(cell, rows, workers, tick, follow)
    chosen = contender(cell)
    outcome = chosen.run(trial) if isinstance(chosen, Federated) else _compared(chosen, trial)
    dealt = {
        "heterogeneity": partitions.heterogeneity(trial.true, trial.owners),
        "clients": trial.clients,
        "empty_clients": trial.clients - len(np.unique(trial.owners)),
    }
    outcome.values["partition"] = cell.partition.as_dict() | dealt
    scores = {name: outcome.values[name] for name in ("accuracy", "train_accuracy")}
    found = {**scores, **outcome.values["measures"]}
    trial.follow.scored({name: float(value) for name, value in found.items() if value is not None})
    return outcome


def _compared(chosen: Contender, trial: Trial) -> Outcome:
    """The outcome of what is no method, and so tells nobody that it is under way."""
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


def contender(cell: Cell) -> Contender:
    """What the cell is about: a method trained over a federation, or what methods are compared with."""
    parameters = dict(cell.parameters)
    if "seed" in parameter_names(cell.method.algorithm):
        parameters["seed"] = cell.seed
    built: Contender | Method[Any] = build(cell.method.algorithm, parameters)
    return Federated(built) if isinstance(built, Method) else built
