"""FedAvg on a linear softmax head in plain numpy, for comparisons that need nothing but the core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.container import Array
from fedsolve.experiments.comparisons import hits
from fedsolve.experiments.outcomes import Outcome
from fedsolve.owners import owned_rows
from fedsolve.parameters import check, parameter

if TYPE_CHECKING:
    from fedsolve.experiments.trials import Trial


@dataclass(frozen=True)
class SoftmaxFedAvg:
    """FedAvg (McMahan et al., AISTATS 2017) on a softmax head: local SGD, an average weighted by rows."""

    rounds: int = parameter(100, "Exchanges; every client takes part in each.", least=1)
    epochs: int = parameter(5, "Passes over a client's rows in a round.", least=1)
    batch: int = parameter(32, "Rows of a local step.", least=1)
    rate: float = parameter(0.5, "Learning rate.", least=0)
    seed: int = parameter(0, "Seed of the clients' shuffles, drawn in every round.", least=0)

    def __post_init__(self) -> None:
        check(self)

    def run(self, trial: Trial) -> Outcome:
        """The average head after all rounds; its weights are the outcome's model."""
        trial.refuse_local("SoftmaxFedAvg")
        features, codes = trial.coded
        started = time.perf_counter()
        weight = self.fit(features, codes, owned_rows(trial.owners, trial.clients), len(trial.classes))
        # One head down and one up for each client, as the closed-form methods count their payload.
        moved = self.rounds * trial.clients * weight.nbytes
        seconds = time.perf_counter() - started
        outcome = Outcome(weight, exchanges=self.rounds, bytes_up=moved, bytes_down=moved, seconds=seconds)
        outcome.enter_scores("train", [hits(_with_ones(features) @ weight, codes)], len(codes))
        if trial.coded_test is not None:
            test, truth = trial.coded_test
            outcome.enter_scores("test", [hits(_with_ones(test) @ weight, truth)], len(truth))
        return outcome

    def fit(self, features: Array, codes: Array, clients: list[Array], classes: int) -> Array:
        """The weights (width + 1, classes) from zero, the last row being the intercept.

        features: (rows, width). codes: (rows,) classes from 0. clients: the rows of each.
        """
        inputs = _with_ones(features)
        weight = np.zeros((inputs.shape[1], classes))
        for number in range(self.rounds):
            total = np.zeros_like(weight)
            for client, rows in enumerate(clients):
                if len(rows):
                    rng = np.random.default_rng([self.seed, client, number])
                    total += len(rows) * self._local(inputs[rows], codes[rows], weight.copy(), rng)
            weight = total / len(inputs)
        return weight

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


def _with_ones(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def _softmax(scores: Array) -> Array:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores
