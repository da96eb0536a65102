"""A cell with its rows dealt, and what can be run on it: a method, or something it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data import partitions
from fedsolve.data.partitions import named_rng
from fedsolve.errors import DataError
from fedsolve.experiments.config import Cell, PartitionSpec
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.sources import ExperimentRows, Tick
from fedsolve.federation.followers import Followers
from fedsolve.federation.participant import ClientData
from fedsolve.labels import positions
from fedsolve.scoring.client_scores import ClientScores, client_rows, client_scores


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
        return owner_names(partition, self.rows) if partition.kind == "column" else None

    @property
    def clients(self) -> int:
        return self.cell.partition.clients or int(self.owners.max()) + 1

    @cached_property
    def classes(self) -> Array:
        return np.unique(self.labels)

    @cached_property
    def coded(self) -> tuple[Array, Array]:
        """Training features as float64, and labels as positions among the classes."""
        return np.asarray(self.rows.x_train, dtype=np.float64), positions(self.labels, self.classes)

    @cached_property
    def coded_test(self) -> tuple[Array, Array] | None:
        """The same of the test rows, -1 for a class that nobody trained on; None where there are none."""
        if self.rows.x_test is None or self.rows.y_test is None:
            return None
        return np.asarray(self.rows.x_test, dtype=np.float64), positions(self.rows.y_test, self.classes)

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

    def refuse_local(self, name: str) -> None:
        """Refuse `local` measurement for something that gives one model for all clients."""
        if self.cell.measure.local:
            raise DataError(f"{name} is not measured client by client; leave it out, or leave out 'local'.")


class Contender(Protocol):
    """What a cell measures: parameters as the fields of a frozen dataclass, and a run on dealt rows."""

    def run(self, trial: Trial) -> Outcome: ...


def deal(partition: PartitionSpec, labels: Array, seed: int, rows: ExperimentRows | None = None) -> Array:
    """Which client owns each training row. rows: needed where a column of the data says it."""
    if partition.kind == "column":
        names = owner_names(partition, rows)
        assert rows is not None
        assert rows.owners is not None
        # Names in the order of text, in which a federation has its clients.
        return np.searchsorted(names, rows.owners.astype(str))
    return partitions.deal(partition.kind, labels, partition.clients, seed, partition.options)


def owner_names(partition: PartitionSpec, rows: ExperimentRows | None) -> tuple[str, ...]:
    """The owners that the column of the data names, sorted: batches and cohorts are drawn by these names."""
    column = partition.options["column"]
    if rows is None or rows.owners is None or rows.owner_column != column:
        raise DataError(
            f"partition '{partition.name}': the dataset does not say who owns its rows by '{column}'. "
            f"Name the column in its address: csv:FILE?client={column}."
        )
    return tuple(np.unique(rows.owners.astype(str)).tolist())


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
