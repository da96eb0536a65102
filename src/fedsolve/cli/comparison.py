"""The experiment behind `fedsolve demo`: ways to learn from divided data, and what the division changes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.baselines import FedAvgHead, SoftmaxHead, local_accuracies
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.deepafl import DeepAFL
from fedsolve.closedform.predictors import DeepModel, LinearModel
from fedsolve.container import Array
from fedsolve.data import partitions
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Record

Bar = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Digits:
    """scikit-learn's embedded digits: pixels 0 to 16 as bytes (rows, 64), split once and for all."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    scale: float = 1 / 16

    @classmethod
    def load(cls) -> Digits:
        """A third of each class is kept for testing, the same third whatever the seed of the demo."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        x_train, x_test, y_train, y_test = train_test_split(
            pixels.astype(np.uint8), labels, test_size=1 / 3, stratify=labels, random_state=0
        )
        return cls(x_train, y_train, x_test, y_test)

    @property
    def train(self) -> Array:
        return self.x_train * self.scale

    @property
    def test(self) -> Array:
        return self.x_test * self.scale


@dataclass(frozen=True)
class DemoDivision:
    """A way to deal the rows: what to call it, who owns each row, how many clients."""

    name: str
    owners: Array
    clients: int

    @property
    def sizes(self) -> Array:
        return np.bincount(self.owners, minlength=self.clients)


@dataclass(frozen=True)
class Entry:
    """A line of the comparison; bytes are payload summed over clients."""

    name: str
    accuracy: float
    exchanges: int
    bytes_up: int
    bytes_down: int
    seconds: float
    depth: int | None = None


@dataclass(frozen=True)
class Change:
    """What another division of the same rows changes.

    afl, deepafl, fedavg: largest relative difference |W' - W| / |W| of any weight matrix.
    """

    division: DemoDivision
    afl: float
    deepafl: float
    fedavg: float
    same_predictions: bool
    fedavg_accuracy: float


@dataclass(frozen=True)
class Trained:
    """The models of one division."""

    afl: LinearModel
    deepafl: DeepModel
    fedavg: SoftmaxHead
    afl_seconds: float
    deepafl_seconds: tuple[float, ...]
    early: SoftmaxHead


class Comparison:
    """All methods with fixed parameters on the digits, for any division of the training rows."""

    def __init__(self, digits: Digits, layers: int, width: int, rounds: int, seed: int) -> None:
        self.digits = digits
        self.afl = AFL(ridge=0.1)  # some pixels are blank in every image: without a ridge G is singular
        self.deepafl = DeepAFL(layers=layers, width=width, seed=seed)
        self.fedavg = FedAvgHead(rounds=rounds, seed=seed)
        self.classes = int(digits.y_train.max()) + 1

    @property
    def depths(self) -> list[int]:
        """Four depths worth showing."""
        layers = self.deepafl.layers
        return sorted({0, layers // 4, layers // 2, layers})

    @property
    def early_round(self) -> int:
        """A tenth of FedAvg's rounds, to show how it gets there."""
        return max(1, self.fedavg.rounds // 10)

    def parameters(self) -> dict[str, Any]:
        """What every method was run with."""
        return {
            "afl": self.afl.parameters(),
            "deepafl": self.deepafl.parameters(),
            "fedavg": dataclasses.asdict(self.fedavg),
        }

    def train(self, division: DemoDivision, bar: Bar) -> Trained:
        """AFL, DeepAFL and FedAvg on this division."""
        digits = self.digits
        federation = LocalFederation.from_arrays(
            digits.train, digits.y_train, division.owners, clients=division.clients
        )
        started = time.perf_counter()
        afl = self.afl.fit(federation)
        afl_seconds = time.perf_counter() - started

        clock: list[float] = []
        started = time.perf_counter()

        def tick(record: Record, expected: int) -> None:
            clock.append(time.perf_counter() - started)
            bar(record.exchange + 1, expected, f"DeepAFL, layer {record.step}")

        deepafl = self.deepafl.fit(federation, progress=tick)
        heads: list[SoftmaxHead] = []

        def keep(head: SoftmaxHead) -> None:
            heads.append(head)
            bar(head.rounds, self.fedavg.rounds, "FedAvg")

        fedavg = self.fedavg.fit(
            digits.train, digits.y_train, division.owners, division.clients, self.classes, keep
        )
        return Trained(afl, deepafl, fedavg, afl_seconds, tuple(clock), heads[self.early_round - 1])

    def entries(self, division: DemoDivision, trained: Trained) -> list[Entry]:
        """The comparison, local models included."""
        digits = self.digits
        started = time.perf_counter()
        alone = local_accuracies(
            (digits.train, digits.y_train),
            (digits.test, digits.y_test),
            division.owners,
            division.clients,
            self.afl.ridge,
        )
        alone_seconds = time.perf_counter() - started
        lines = [
            Entry("local only, mean client", float(np.nanmean(alone)), 0, 0, 0, alone_seconds),
            Entry("local only, best client", float(np.nanmax(alone)), 0, 0, 0, alone_seconds),
        ]
        for head in {trained.early.rounds: trained.early, trained.fedavg.rounds: trained.fedavg}.values():
            half = head.nbytes // 2
            lines.append(
                Entry(self.fedavg_name(head), self.accuracy(head), head.rounds, half, half, head.seconds)
            )
        history = trained.afl.history
        up, down = (sum(getattr(r, name) for r in history) for name in ("bytes_up", "bytes_down"))
        accuracy = trained.afl.score(digits.test, digits.y_test)
        lines.append(Entry("AFL", accuracy, len(history), up, down, trained.afl_seconds))
        return lines + list(self._depth_entries(trained))

    def fedavg_name(self, head: SoftmaxHead) -> str:
        return f"FedAvg, {counted(head.rounds, 'round')}"

    def stages(self, model: DeepModel) -> Array:
        """Test accuracy after 0, 1, ..., T blocks."""
        return model.staged_score(self.digits.test, self.digits.y_test)

    def accuracy(self, head: SoftmaxHead) -> float:
        return float(np.mean(head.predict(self.digits.test) == self.digits.y_test))

    def _depth_entries(self, trained: Trained) -> Iterator[Entry]:
        """One run read at several depths: W_t costs what led up to it, as in a run of t blocks."""
        stages = self.stages(trained.deepafl)
        history = trained.deepafl.history
        for depth in self.depths:
            last = next(index for index, record in enumerate(history) if f"W{depth}" in record.solved)
            spent = history[: last + 1]
            yield Entry(
                f"DeepAFL, {counted(depth, 'block')}",
                float(stages[depth]),
                len(spent),
                sum(record.bytes_up for record in spent),
                sum(record.bytes_down for record in spent),
                trained.deepafl_seconds[last],
                depth,
            )

    def change(self, division: DemoDivision, trained: Trained, reference: Trained) -> Change:
        """How the models of this division differ from those of the reference."""
        test = self.digits.test
        pairs = list(zip(reference.deepafl.classifiers, trained.deepafl.classifiers, strict=True))
        blocks = zip(reference.deepafl.blocks, trained.deepafl.blocks, strict=True)
        pairs += [(ours.omega, theirs.omega) for ours, theirs in blocks if ours and theirs]
        same = np.array_equal(reference.afl.predict(test), trained.afl.predict(test))
        same &= np.array_equal(reference.deepafl.staged_predict(test), trained.deepafl.staged_predict(test))
        return Change(
            division,
            afl=relative_difference(reference.afl.weight, trained.afl.weight),
            deepafl=max(relative_difference(*pair) for pair in pairs),
            fedavg=relative_difference(reference.fedavg.weight, trained.fedavg.weight),
            same_predictions=bool(same),
            fedavg_accuracy=self.accuracy(trained.fedavg),
        )


def divisions(labels: Array, clients: int, alpha: float, seed: int) -> list[DemoDivision]:
    """The demo's division first, then three others of the same rows."""
    many = 5 * clients
    scattered = partitions.dirichlet(labels, many, 0.01, seed=seed)
    empty = many - len(np.unique(scattered))
    return [
        DemoDivision(
            f"{counted(clients, 'client')}, Dirichlet {alpha:g}",
            partitions.dirichlet(labels, clients, alpha, seed=seed),
            clients,
        ),
        DemoDivision(
            f"{counted(clients, 'client')}, 2 shards each",
            partitions.shards(labels, clients, 2, seed=seed),
            clients,
        ),
        DemoDivision(f"{many} clients, Dirichlet 0.01, {empty} empty", scattered, many),
        DemoDivision("1 client, all rows pooled", np.zeros(len(labels), dtype=np.int64), 1),
    ]


def counted(number: int, noun: str) -> str:
    """ "1 block", "2 blocks"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def relative_difference(reference: Array, other: Array) -> float:
    """|other - reference| / |reference|, in the Frobenius norm."""
    return float(np.linalg.norm(other - reference) / np.linalg.norm(reference))
