"""A cell measured client by client: every client's model on test rows of that client's own distribution.

Test rows of the dataset are dealt so that each client's classes have the shares of its training rows; where
there are none, every client keeps a quarter of its own rows for testing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.closedform import laws
from fedsolve.closedform.predictors import StagedModel
from fedsolve.container import Array
from fedsolve.data import partitions
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import LocalRidge
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.local_scores import LocalScores, Predictor, client_rows, local_scores
from fedsolve.federation.method import Method, Record
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.model import Model

Costs = Callable[[Model, list[float], float], dict[str, Any]]
"""What training cost, from the model, the times after each exchange and the whole."""


@dataclass(frozen=True)
class LocalParts:
    """Each client's training and test rows, as views into the dataset."""

    train: list[ClientData]
    test: list[ClientData]
    names: tuple[str, ...]

    @classmethod
    def deal(
        cls, rows: ExperimentRows, labels: Array, true: Array, owners: Array, clients: int, seed: int
    ) -> LocalParts:
        """labels: those trained on. true: those that decide who gets which test rows."""
        x_train = np.asarray(rows.x_train)
        held = None
        if rows.x_test is not None and rows.y_test is not None:
            tested = partitions.alike(rows.y_test, true, owners, clients, seed=seed)
            test = client_rows(np.asarray(rows.x_test), rows.y_test, tested, clients)
        else:
            held = partitions.held_out(true, owners, seed=seed)
            test = client_rows(x_train, true, owners, clients, held)
        train = client_rows(x_train, labels, owners, clients, None if held is None else ~held)
        digits = len(str(clients - 1))
        return cls(train, test, tuple(f"client-{client:0{digits}d}" for client in range(clients)))

    def score(self, predictors: Any) -> LocalScores:
        return local_scores(predictors, self.test, self.names)


def run_locally(
    method: Any, parts: LocalParts, classes: Array, workers: int | None, costs: Costs, tick: Tick
) -> dict[str, Any]:
    """Scores and costs of a method whose accuracy is the mean of its clients' local accuracies."""
    if isinstance(method, LocalRidge):
        return _alone(method, parts, classes)
    if not isinstance(method, Method):
        raise DataError(
            f"{type(method).__name__} is not measured client by client; leave it out, or leave out 'local'."
        )
    total = sum(map(len, parts.train))
    participants = [
        Participant(name, data, memory_budget=LOCAL_MEMORY * len(data) // max(1, total))
        for name, data in zip(parts.names, parts.train, strict=True)
    ]
    federation = LocalFederation(participants, classes=classes.tolist(), workers=workers)
    clock: list[float] = []
    started = time.perf_counter()

    def heard(record: Record, expected: int) -> None:
        clock.append(time.perf_counter() - started)
        tick(f"exchange {record.exchange + 1} of {expected}")

    model = method.fit(federation, progress=heard)
    trained = time.perf_counter() - started
    tick("personalising and scoring")
    if not model.personalises:
        outcome = costs(model, clock, trained)
        if isinstance(model, StagedModel):
            return outcome | _per_layer(model, parts)
        return outcome | _told(parts.score(model))
    balances: list[float | None] = []
    started = time.perf_counter()
    scores = parts.score(_noted(model, participants, balances))
    outcome = costs(model, clock, trained + time.perf_counter() - started)
    compared = {}
    if model.predicts:
        compared["shared"] = parts.score(model)
    if hasattr(model, "alone"):
        compared["alone"] = parts.score(_noted(model.alone(), participants, []))
    return outcome | _told(scores, compared, balances)


def _noted(model: Model, participants: list[Participant], balances: list[float | None]) -> Any:
    """Each client's own model, one at a time; its balance, where it has one, is kept."""
    for participant in participants:
        personal = participant.personalise(model)
        balances.append(getattr(personal, "balance", None))
        yield personal


def _alone(method: LocalRidge, parts: LocalParts, classes: Array) -> dict[str, Any]:
    """Every client's own ridge on the features as they are."""
    started = time.perf_counter()
    predictors = [_own(method, data, classes) for data in parts.train]
    seconds = time.perf_counter() - started
    return {"exchanges": 0, "bytes_up": 0, "bytes_down": 0, "seconds": seconds} | _told(
        parts.score(predictors)
    )


def _own(method: LocalRidge, data: ClientData, classes: Array) -> Predictor:
    targets = np.eye(len(classes))[np.searchsorted(classes, data.own_labels())]
    weight = np.zeros((data.width, len(classes)))
    if len(data):
        weight = laws.local_solution(data.features(slice(None)), targets, method.ridge).weight
    return lambda features: np.asarray(classes[np.argmax(features @ weight, axis=1)])


def _per_layer(model: StagedModel, parts: LocalParts) -> dict[str, Any]:
    """Mean local accuracy after every layer."""
    rows = np.array([len(data) for data in parts.test])
    correct = np.zeros((model.layers + 1, len(rows)), dtype=np.int64)
    for client, data in enumerate(parts.test):
        if len(data):
            found = model.staged_predict(data.features(slice(None))) == data.own_labels()
            correct[:, client] = found.sum(axis=1)
    layers = [LocalScores(parts.names, layer, rows) for layer in correct]
    return _told(layers[-1]) | {"accuracy_per_layer": [layer.mean for layer in layers]}


def _told(
    scores: LocalScores, compared: dict[str, LocalScores] | None = None, balances: Any = ()
) -> dict[str, Any]:
    """The fields of a cell. A mean over clients is no share of the rows, so counts are left out."""
    measures: dict[str, Any] = {"worst_decile": scores.worst_decile, "pooled": scores.pooled}
    local: dict[str, Any] = {"correct": scores.correct.tolist(), "rows": scores.rows.tolist()}
    for name, other in (compared or {}).items():
        measures[f"gain_{name}"] = float(np.nanmean(scores.gains(other)))
        local[name] = other.correct.tolist()
    return {
        "accuracy": scores.mean,
        "test_rows": int(scores.rows.sum()),
        "measures": measures,
        "local": local | {"balances": list(balances)},
    }
