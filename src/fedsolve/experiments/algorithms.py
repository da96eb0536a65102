"""The algorithms an experiment can name: the registered methods, and baselines for closed forms.

The baselines are local models, the aggregation law and FedAvg in numpy. None is a federated method; each runs
on dealt rows by itself and gives an outcome as a method does.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from scipy.linalg import LinAlgError, LinAlgWarning
from scipy.special import softmax

import fedsolve.closedform.cascade
import fedsolve.gradient  # noqa: F401  (both enter the registry)
from fedsolve import parameters, registry
from fedsolve.arrays import Array, owned_rows
from fedsolve.closedform import laws
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.errors import DataError
from fedsolve.experiments.outcomes import Outcome
from fedsolve.federation.participant import ClientData
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.parameters import check, parameter
from fedsolve.scoring.client_scores import Predictor

if TYPE_CHECKING:
    from fedsolve.experiments.cells import Trial


class Comparison(ABC):
    """What methods are compared with: parameters as the fields of a frozen dataclass."""

    local: ClassVar[bool] = False
    """Whether it can be measured client by client."""

    __post_init__ = check

    @abstractmethod
    def run(self, trial: Trial) -> Outcome:
        """The outcome on dealt rows."""


@dataclass(frozen=True)
class LocalRidge(Comparison):
    """Every client by itself, never aggregated (AFL, Table A.2)."""

    local: ClassVar[bool] = True

    ridge: float = parameter(1.0, "Penalty on each client's own model.", least=0)
    statistic: Literal["mean", "best"] = parameter("mean", "Test accuracy over clients with rows.")

    def run(self, trial: Trial) -> Outcome:
        """Accuracy of each client's own model on all test rows, or on test rows like the client's own."""
        outcome = Outcome(exchanges=0, bytes_up=0, bytes_down=0)
        if trial.cell.measure.local:
            parts = trial.parts
            started = time.perf_counter()
            predictors = [self._predictor(data, trial.classes) for data in parts.train]
            outcome.values["seconds"] = time.perf_counter() - started
            outcome.enter_local(parts.score(predictors))
            return outcome
        if trial.coded_test is None:
            raise DataError("'local' is measured on test rows, and this dataset has none.")
        (features, codes), (test, truth) = trial.coded, trial.coded_test
        started = time.perf_counter()
        targets = np.eye(len(trial.classes))[codes]
        weights = laws.local_only(features, targets, trial.owners, trial.clients, self.ridge)
        outcome.values["seconds"] = time.perf_counter() - started
        right = np.stack([hits(test @ weights[client], truth)[0] for client in np.unique(trial.owners)])
        shares = right.mean(axis=1)
        outcome.enter_scores("test", right[[np.argmax(shares)]])
        outcome.values["measures"] = {"local_best": float(shares.max()), "local_mean": float(shares.mean())}
        if self.statistic == "mean":
            outcome.values |= {"accuracy": float(shares.mean()), "hits": None}
        return outcome

    def _predictor(self, data: ClientData, classes: Array) -> Predictor:
        targets = np.eye(len(classes))[np.searchsorted(classes, data.own_labels)]
        weight = np.zeros((data.width, len(classes)))
        if len(data):
            weight = laws.local_solution(data.features(slice(None)), targets, self.ridge).weight
        return lambda features: np.asarray(classes[np.argmax(features @ weight, axis=1)])


@dataclass(frozen=True)
class AggregationLaw(Comparison):
    """AFL by the paper's own route: local solutions merged pair by pair (AFL, Tables 3 and A.1)."""

    regulariser: float = parameter(1.0, "What every client adds to its Gram matrix.", least=0)
    remove: bool = parameter(True, "Whether the regulariser is taken out again (RI).")

    def run(self, trial: Trial) -> Outcome:
        """AFL, Eq. 5-16, and how far it is from the joint solution: the sum of absolute differences.

        Singular systems give no model, and neither does the removal of a regulariser of 0.
        """
        features, codes = trial.coded
        targets = np.eye(len(trial.classes))[codes]
        width, outputs = features.shape[1], targets.shape[1]
        sent, received = 8 * trial.clients * width * (width + outputs), 8 * trial.clients * width * outputs
        outcome = Outcome(exchanges=1, bytes_up=sent, bytes_down=received)
        if self.remove and self.regulariser == 0:
            # Nothing was added that could be removed; the paper's Table 3 has N/A there.
            return outcome
        started = time.perf_counter()
        weight = self._merged(features, targets, owned_rows(trial.owners, trial.clients))
        outcome.values["seconds"] = time.perf_counter() - started
        outcome.values["measures"] = {"singular": weight is None}
        if weight is None:
            return outcome
        joint = ridge_solve(features.T @ features, features.T @ targets, 0.0)
        outcome.values["measures"]["deviation"] = float(np.abs(joint - weight).sum())
        _score(outcome, trial, lambda rows: rows @ weight)
        return outcome

    def _merged(self, features: Array, targets: Array, clients: list[Array]) -> Array | None:
        with warnings.catch_warnings():
            # Ill-conditioned local systems are what the paper's tables without RI are about.
            warnings.simplefilter("ignore", LinAlgWarning)
            try:
                merged = laws.aggregate(
                    laws.local_solution(features[rows], targets[rows], self.regulariser) for rows in clients
                )
                weight = laws.remove_regulariser(merged, self.regulariser) if self.remove else merged.weight
            except (LinAlgError, ValueError):
                # Exactly singular, or grown beyond float64 (scipy refuses what is not finite).
                return None
        return weight if np.all(np.isfinite(weight)) else None


@dataclass(frozen=True)
class SoftmaxFedAvg(Comparison):
    """FedAvg (McMahan et al., AISTATS 2017) on a softmax head: local SGD, an average weighted by rows."""

    rounds: int = parameter(100, "Exchanges; every client takes part in each.", least=1)
    epochs: int = parameter(5, "Passes over a client's rows in a round.", least=1)
    batch: int = parameter(32, "Rows of a local step.", least=1)
    rate: float = parameter(0.5, "Learning rate.", least=0)
    seed: int = parameter(0, "Seed of the clients' shuffles, drawn in every round.", least=0)

    def run(self, trial: Trial) -> Outcome:
        """The average head after all rounds; its weights are the outcome's model."""
        features, codes = trial.coded
        started = time.perf_counter()
        weight = self.fit(features, codes, owned_rows(trial.owners, trial.clients), len(trial.classes))
        # One head down and one up for each client, as the closed-form methods count their payload.
        moved = self.rounds * trial.clients * weight.nbytes
        seconds = time.perf_counter() - started
        outcome = Outcome(weight, exchanges=self.rounds, bytes_up=moved, bytes_down=moved, seconds=seconds)
        _score(outcome, trial, lambda rows: _with_ones(rows) @ weight)
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
                error = softmax(inputs[rows] @ weight, axis=1)
                error[np.arange(len(rows)), codes[rows]] -= 1.0
                weight -= (self.rate / len(rows)) * (inputs[rows].T @ error)
        return weight


def _score(outcome: Outcome, trial: Trial, scores: Callable[[Array], Array]) -> None:
    """Enter which training and test rows are right."""
    for part, rows in (("train", trial.coded), ("test", trial.coded_test)):
        if rows is not None:
            outcome.enter_scores(part, hits(scores(rows[0]), rows[1]))


def hits(scores: Array, codes: Array) -> Array:
    """Which rows have their highest score at their class, (1, rows)."""
    return np.asarray(np.argmax(scores, axis=1) == codes)[np.newaxis]


def _with_ones(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


COMPARISONS: dict[str, type[Comparison]] = {
    "local": LocalRidge,
    "law": AggregationLaw,
    "fedavg-numpy": SoftmaxFedAvg,
}

EXTRA = "fedsolve[torch]"
"""What gradient methods need besides the core of fedsolve."""


def algorithms() -> dict[str, type]:
    """Parameter classes by key."""
    return {info.key: registry.method_class(info.key) for info in registry.methods()} | COMPARISONS


def algorithm_class(key: str) -> type:
    """The class of an algorithm: a comparison, a method of ours, or one of other people by its address."""
    return COMPARISONS[key] if key in COMPARISONS else registry.method_class(key)


def lacking(key: str) -> str | None:
    """The package that an algorithm needs and that is not installed, as pip names it; None if none."""
    needs_torch = issubclass(algorithm_class(key), GradientMethod)
    return EXTRA if needs_torch and find_spec("torch") is None else None


def parameter_names(key: str) -> list[str]:
    """The parameters of an algorithm, its seed among them where it has one."""
    return list(parameters.described(algorithm_class(key)))


def build(key: str, values: Mapping[str, Any]) -> Any:
    """The algorithm with these parameters; the others keep their defaults."""
    return parameters.build(algorithm_class(key), values)
