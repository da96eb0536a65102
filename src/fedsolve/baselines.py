"""What closed-form training is compared with: clients on their own, and FedAvg by gradient descent.

Plain numpy on the same features, so that the comparison needs nothing but the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsolve.checks import check_not_negative, check_whole
from fedsolve.closedform.laws import local_only
from fedsolve.container import Array
from fedsolve.errors import DataError


@dataclass(frozen=True)
class FedAvgHead:
    """FedAvg (McMahan et al., AISTATS 2017) on a softmax head: local SGD, then a weighted average.

    rounds: exchanges; every client takes part in each. epochs: passes over a client's rows a round.
    batch:  rows per step. rate: learning rate. seed: of the clients' shuffles, drawn per round.
    """

    rounds: int = 100
    epochs: int = 5
    batch: int = 32
    rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(1, rounds=self.rounds, epochs=self.epochs, batch=self.batch)
        check_whole(0, seed=self.seed)
        check_not_negative(rate=self.rate)

    def fit(
        self,
        features: Array,
        codes: Array,
        owners: Array,
        clients: int,
        classes: int,
        progress: Callable[[SoftmaxHead], None] | None = None,
    ) -> SoftmaxHead:
        """The average head after all rounds, from zero weights.

        features: (rows, width). codes: (rows,) classes from 0. owners: (rows,) clients from 0.
        progress: called after every round with the head so far.
        """
        if not len(features) == len(codes) == len(owners) or len(features) == 0:
            raise DataError(f"{len(features)} rows, {len(codes)} codes and {len(owners)} owners do not fit.")
        started = time.perf_counter()
        inputs = _with_ones(features)
        held = [(k, np.flatnonzero(owners == k)) for k in range(clients)]
        weight = np.zeros((inputs.shape[1], classes))
        head = SoftmaxHead(weight, 0, 0, 0.0)
        for round_ in range(self.rounds):
            total, count = np.zeros_like(weight), 0
            for client, rows in held:
                if len(rows):
                    rng = np.random.default_rng([self.seed, client, round_])
                    total += len(rows) * self._local(inputs[rows], codes[rows], weight.copy(), rng)
                    count += len(rows)
            weight = total / count
            # One head down and one up for each client, as the closed-form methods count their payload.
            travelled = head.nbytes + 2 * clients * weight.nbytes
            head = SoftmaxHead(weight, round_ + 1, travelled, time.perf_counter() - started)
            if progress is not None:
                progress(head)
        return head

    def _local(self, inputs: Array, codes: Array, weight: Array, rng: np.random.Generator) -> Array:
        """A client's epochs of mini-batch gradient descent on the mean cross-entropy, in place."""
        for _ in range(self.epochs):
            order = rng.permutation(len(inputs))
            for start in range(0, len(order), self.batch):
                rows = order[start : start + self.batch]
                error = _softmax(inputs[rows] @ weight)
                error[np.arange(len(rows)), codes[rows]] -= 1.0
                weight -= (self.rate / len(rows)) * (inputs[rows].T @ error)
        return weight


@dataclass(frozen=True)
class SoftmaxHead:
    """A linear softmax classifier: weight (width + 1, classes), the last row being the intercept.

    rounds, nbytes and seconds tell what it took to train: payload up and down over all clients.
    """

    weight: Array
    rounds: int
    nbytes: int
    seconds: float

    def predict(self, features: Array) -> Array:
        """The most probable class of each row, as a position from 0."""
        return np.asarray(np.argmax(_with_ones(features) @ self.weight, axis=1))


def local_accuracies(
    train: tuple[Array, Array], test: tuple[Array, Array], owners: Array, clients: int, ridge: float
) -> Array:
    """Test accuracy of each client's own ridge model; NaN where a client has no rows.

    train and test: features (rows, width) and codes (rows,) from 0.
    """
    (features, codes), (test_features, test_codes) = train, test
    targets = np.eye(int(max(codes.max(), test_codes.max())) + 1)[codes]
    models = local_only(features, targets, owners, clients, ridge)
    accuracies = np.full(clients, np.nan)
    for client, weight in enumerate(models):
        if np.any(owners == client):
            accuracies[client] = np.mean(np.argmax(test_features @ weight, axis=1) == test_codes)
    return accuracies


def _with_ones(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def _softmax(scores: Array) -> Array:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores
