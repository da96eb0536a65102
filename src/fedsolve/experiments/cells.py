"""One cell of an experiment: deal the rows, train a method or a comparison, score, measure the cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.predictors import StagedModel
from fedsolve.closedform.separability import class_sums, separability
from fedsolve.data import partitions
from fedsolve.data.partitions import named_rng
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import Comparison, build, parameter_names
from fedsolve.experiments.config import Cell, PartitionSpec
from fedsolve.experiments.outcomes import Clock, Outcome, enter_rounds
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.federation.engine import Federation, Followers, Spec, Training
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.method import Method
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.labels import encode_labels
from fedsolve.model import Model
from fedsolve.scoring.client_scores import ClientScores, client_rows, client_scores

LARGEST_COUNTS = 1 << 16
"""Largest (clients, classes) table, in entries, that is kept for drawing."""

_SPAN = 8192


@dataclass(frozen=True)
class LocalParts:
    """Each client's training and test rows, as views into the dataset."""

    train: list[ClientData]
    test: list[ClientData]
    names: tuple[str, ...]

    def score(self, predictors: Any) -> ClientScores:
        return client_scores(predictors, self.test, self.names)


@dataclass(frozen=True)
class Trial:
    """What a method or a comparison is run on. follow: who hears of the training."""

    cell: Cell
    rows: ExperimentRows
    workers: int | None = None
    tick: Tick = lambda remark: None
    follow: Followers = field(default_factory=Followers)

    @cached_property
    def true(self) -> Array:
        """The labels of the training rows, by which they are dealt."""
        return np.asarray(self.rows.y_train)

    @cached_property
    def labels(self) -> Array:
        """The labels trained on, flipped ones included."""
        return flip_labels(self.true, self.cell.noise, self.cell.seed) if self.cell.noise else self.true

    @cached_property
    def owners(self) -> Array:
        """Which client owns each training row."""
        # A wrong label does not move a row to another client: along the axis of noise nothing else differs.
        return deal(self.cell.partition, self.true, self.cell.seed, self.rows)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The clients, sorted, where a column says who they are; None where they are numbered."""
        partition = self.cell.partition
        return named_owners(partition, self.rows)[0] if partition.kind == "column" else None

    @property
    def clients(self) -> int:
        return self.cell.partition.clients or int(self.owners.max()) + 1

    @cached_property
    def classes(self) -> Array:
        return np.unique(self.labels)

    @cached_property
    def coded(self) -> tuple[Array, Array]:
        """Training features as float64, and labels as positions among the classes."""
        return np.asarray(self.rows.x_train, dtype=np.float64), encode_labels(self.labels, self.classes)

    @cached_property
    def coded_test(self) -> tuple[Array, Array] | None:
        """The same of the test rows, -1 for a class that nobody trained on; None where there are none."""
        if self.rows.x_test is None or self.rows.y_test is None:
            return None
        codes = encode_labels(self.rows.y_test, self.classes, known=False)
        return np.asarray(self.rows.x_test, dtype=np.float64), codes

    @property
    def parts(self) -> LocalParts:
        """Every client's own training and test rows.

        Test rows of the dataset are dealt so that each client's classes have the shares of its training
        rows; where there are none, every client keeps a quarter of its own rows for testing.
        """
        rows, owners, clients, seed = self.rows, self.owners, self.clients, self.cell.seed
        x_train = np.asarray(rows.x_train)
        held_out = None
        if rows.x_test is not None and rows.y_test is not None:
            tested = partitions.alike(rows.y_test, self.true, owners, clients, seed=seed)
            test = client_rows(np.asarray(rows.x_test), rows.y_test, tested, clients)
        else:
            held_out = partitions.held_out(self.true, owners, seed=seed)
            test = client_rows(x_train, self.true, owners, clients, held_out)
        train = client_rows(x_train, self.labels, owners, clients, None if held_out is None else ~held_out)
        digits = len(str(clients - 1))
        numbered = tuple(f"client-{client:0{digits}d}" for client in range(clients))
        return LocalParts(train, test, self.names or numbered)


def deal(partition: PartitionSpec, labels: Array, seed: int, rows: ExperimentRows | None = None) -> Array:
    """Which client owns each training row. rows: needed where a column of the data says it."""
    if partition.kind == "column":
        return named_owners(partition, rows)[1]
    return partitions.deal(partition.kind, labels, partition.clients, seed, partition.options)


def named_owners(partition: PartitionSpec, rows: ExperimentRows | None) -> tuple[tuple[str, ...], Array]:
    """The owners that the column of the data names, sorted, and the place of each row's among them.

    A federation has its clients in this order, and draws batches and cohorts by these names.
    """
    column = partition.options["column"]
    if rows is None or rows.owners is None or rows.owner_column != column:
        raise DataError(
            f"partition '{partition.name}': the dataset does not say who owns its rows by '{column}'. "
            f"Name the column in its address: csv:FILE?client={column}."
        )
    names, places = np.unique(rows.owners.astype(str), return_inverse=True)
    return tuple(names.tolist()), places


def flip_labels(labels: Any, rate: float, seed: int = 0) -> Array:
    """A copy in which a random share `rate` of the labels is another class, drawn uniformly.

    Exactly round(rate * rows) labels change (DeepAFL, Appendix O).
    """
    flipped: Array = np.array(labels)
    if not 0.0 <= rate <= 1.0:
        raise DataError(f"the noise rate must lie in [0, 1]; got {rate!r}.")
    classes, codes = np.unique(flipped, return_inverse=True)
    if len(classes) < 2:
        raise DataError("labels of a single class cannot be flipped to another.")
    rng = named_rng(seed, "label noise")
    rows = rng.permutation(len(flipped))[: round(rate * len(flipped))]
    shift = rng.integers(1, len(classes), size=len(rows))
    flipped[rows] = classes[(codes[rows] + shift) % len(classes)]
    return flipped


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
    built: Comparison | Method[Any] = build(cell.method.algorithm, parameters)
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
    trial.follow.tell("scored", {name: float(value) for name, value in found.items() if value is not None})
    return outcome


def _compared(chosen: Comparison, trial: Trial) -> Outcome:
    """The outcome of a baseline. It is not a method, so this function notifies the followers."""
    if trial.cell.measure.local and not chosen.local:
        name = type(chosen).__name__
        raise DataError(f"{name} is not measured client by client; leave it out, or leave out 'local'.")
    classes, features = trial.classes, int(trial.rows.x_train.shape[1])
    clients = trial.names or tuple(map(str, range(trial.clients)))
    spec = Spec(features, classes, len(classes), "bytes", trial.cell.device)
    parameters = dict(trial.cell.parameters)
    trial.follow.tell("started", Training(trial.cell.method.algorithm, parameters, spec, clients, expected=0))
    try:
        outcome = chosen.run(trial)
    except BaseException as problem:
        trial.follow.tell("stopped", problem)
        raise
    trial.follow.tell("finished", None)
    return outcome


# -- one model for all -----------------------------------------------------------------------------


def _federated(method: Method[Any], trial: Trial) -> Outcome:
    """A method trained over a federation, every layer scored once."""
    rows, measure, watches = trial.rows, trial.cell.measure, []
    if isinstance(method, GradientMethod):
        from fedsolve.gradient.networks import build_network
        from fedsolve.gradient.watch import Watch

        # Torch loads some of its parts at their first use, which is not training.
        build_network("mlp:1", 1, 1)
        if rows.x_test is not None and rows.y_test is not None:
            watches.append(Watch(rows.x_test, rows.y_test, representation=measure.representation))
    besides = Followers([*watches, trial.follow])
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
            outcome.values["separability"][part] = [separability(layer) for layer in sums]
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


def _score(model: Model, features: Array, truth: Array, separable: bool) -> tuple[Array, list[Array]]:
    """Which rows are right, (layers, rows), and the class sums of every layer's features, in one pass."""
    if model.classes is None:
        raise DataError("experiments classify; the model has no classes.")
    hits: list[Array] = []
    sums: list[Array] = []
    for start in range(0, len(features), _SPAN):
        labels, part = np.asarray(truth[start : start + _SPAN]), np.asarray(features[start : start + _SPAN])
        if not isinstance(model, StagedModel):
            hits.append((model.predict(part) == labels)[np.newaxis])
            continue
        # Test rows of a class that nobody trained on count as wrong and have no place in class sums.
        known = np.isin(labels, model.classes)
        right, own = [], []
        for phi, scores in model.stages(part):
            right.append(model.classes[np.argmax(scores, axis=1)] == labels)
            if separable:
                own.append(class_sums(phi[known], labels[known], model.classes))
        hits.append(np.stack(right))
        sums = [one + other for one, other in zip(sums, own, strict=True)] if sums else own
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
            rows = np.array([len(data) for data in parts.test])
            correct = np.zeros((model.layers + 1, len(rows)), dtype=np.int64)
            for client, data in enumerate(parts.test):
                if len(data):
                    hits = model.staged_predict(data.features(slice(None))) == data.own_labels
                    correct[:, client] = hits.sum(axis=1)
            layers = [ClientScores(parts.names, layer, rows) for layer in correct]
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
