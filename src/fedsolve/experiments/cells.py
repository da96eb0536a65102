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
from fedsolve.federation.method import Method


def run_cell(
    cell: Cell, rows: ExperimentRows, workers: int | None = None, tick: Tick | None = None
) -> dict[str, Any]:
    """The outcome of a cell as JSON values: scores, costs, and what the partition turned out to be.

    Training accuracy is measured against the labels trained on, flipped ones included. Rows are dealt by
    the labels as they were before.
    """
    return train_cell(cell, rows, workers, tick).values


def train_cell(
    cell: Cell, rows: ExperimentRows, workers: int | None = None, tick: Tick | None = None
) -> Outcome:
    """The outcome of a cell together with the model that was trained."""
    trial = Trial.of(cell, rows, workers, tick)
    outcome = contender(cell).run(trial)
    dealt = {
        "heterogeneity": partitions.heterogeneity(trial.true, trial.owners),
        "clients": trial.clients,
        "empty_clients": trial.clients - len(np.unique(trial.owners)),
    }
    outcome.values["partition"] = cell.partition.as_dict() | dealt
    return outcome


def contender(cell: Cell) -> Contender:
    """What the cell is about: a method trained over a federation, or what methods are compared with."""
    parameters = dict(cell.parameters)
    if "seed" in parameter_names(cell.method.algorithm):
        parameters["seed"] = cell.seed
    built: Contender | Method[Any] = build(cell.method.algorithm, parameters)
    return Federated(built) if isinstance(built, Method) else built
