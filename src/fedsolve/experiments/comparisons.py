"""What closed forms are compared with: clients on their own, and the aggregation law pair by pair.

Neither is a federated method; each runs on dealt rows by itself and gives an outcome as a method does.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.linalg import LinAlgError, LinAlgWarning

from fedsolve.closedform import laws
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.experiments.outcomes import Outcome
from fedsolve.federation.local_scores import Predictor
from fedsolve.federation.participant import ClientData
from fedsolve.owners import owned_rows
from fedsolve.parameters import check, parameter

if TYPE_CHECKING:
    from fedsolve.experiments.trials import Trial


@dataclass(frozen=True)
class LocalRidge:
    """Every client by itself, never aggregated (AFL, Table A.2)."""

    ridge: float = parameter(1.0, "Penalty on each client's own model.", least=0)
    statistic: Literal["mean", "best"] = parameter("mean", "Test accuracy over clients with rows.")

    def __post_init__(self) -> None:
        check(self)

    def run(self, trial: Trial) -> Outcome:
        """Accuracy of each client's own model on all test rows, or on test rows like the client's own."""
        if trial.cell.measure.local:
            parts = trial.parts
            started = time.perf_counter()
            predictors = [self._predictor(data, trial.classes) for data in parts.train]
            outcome = self._outcome(started)
            outcome.enter_local(parts.score(predictors))
            return outcome
        if trial.coded_test is None:
            raise DataError("'local' is measured on test rows, and this dataset has none.")
        (features, codes), (test, truth) = trial.coded, trial.coded_test
        started = time.perf_counter()
        targets = np.eye(len(trial.classes))[codes]
        weights = laws.local_only(features, targets, trial.owners, trial.clients, self.ridge)
        outcome = self._outcome(started)
        correct = [hits(test @ weights[client], truth) for client in np.unique(trial.owners)]
        best, mean = max(correct) / len(truth), float(np.mean(correct)) / len(truth)
        outcome.values |= {"test_rows": len(truth), "measures": {"local_best": best, "local_mean": mean}}
        outcome.values["accuracy"] = best if self.statistic == "best" else mean
        if self.statistic == "best":
            outcome.values["test_correct"] = max(correct)
        return outcome

    def _outcome(self, started: float) -> Outcome:
        seconds = time.perf_counter() - started
        return Outcome(exchanges=0, bytes_up=0, bytes_down=0, seconds=seconds)

    def _predictor(self, data: ClientData, classes: Array) -> Predictor:
        targets = np.eye(len(classes))[np.searchsorted(classes, data.own_labels())]
        weight = np.zeros((data.width, len(classes)))
        if len(data):
            weight = laws.local_solution(data.features(slice(None)), targets, self.ridge).weight
        return lambda features: np.asarray(classes[np.argmax(features @ weight, axis=1)])


@dataclass(frozen=True)
class AggregationLaw:
    """AFL by the paper's own route: local solutions merged pair by pair (AFL, Tables 3 and A.1)."""

    regulariser: float = parameter(1.0, "What every client adds to its Gram matrix.", least=0)
    remove: bool = parameter(True, "Whether the regulariser is taken out again (RI).")

    def __post_init__(self) -> None:
        check(self)

    def run(self, trial: Trial) -> Outcome:
        """AFL, Eq. 5-16, and how far it is from the joint solution: the sum of absolute differences.

        Singular systems give no model, and neither does the removal of a regulariser of 0.
        """
        trial.refuse_local("AggregationLaw")
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
        outcome.enter_scores("train", [hits(features @ weight, codes)], len(codes))
        if trial.coded_test is not None:
            test, truth = trial.coded_test
            outcome.enter_scores("test", [hits(test @ weight, truth)], len(truth))
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


def hits(scores: Array, codes: Array) -> int:
    """How many rows have their highest score at their class."""
    return int(np.sum(np.argmax(scores, axis=1) == codes))
