"""A registered method in an experiment: trained over a federation, every layer scored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.closedform.predictors import StagedModel
from fedsolve.closedform.separability import ClassSums, class_sums, separability
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.experiments import round_metrics
from fedsolve.experiments.local_cells import run_locally
from fedsolve.experiments.outcomes import Clock, Outcome
from fedsolve.experiments.trials import Trial
from fedsolve.federation.engine import Federation
from fedsolve.federation.followers import Followers
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method
from fedsolve.model import Model

_SPAN = 8192


@dataclass(frozen=True)
class Federated:
    """A method as what a cell measures."""

    method: Method[Any]

    def run(self, trial: Trial) -> Outcome:
        if trial.cell.measure.local:
            return run_locally(self.method, trial)
        rows, clients = trial.rows, trial.clients
        owners = trial.owners if trial.names is None else np.array(trial.names)[trial.owners]
        if trial.cell.engine == "ray":
            from fedsolve.cluster.ray_federation import RayFederation

            with RayFederation.from_arrays(
                rows.x_train,
                trial.labels,
                owners,
                clients,
                workers=trial.workers,
                device=trial.cell.device,
            ) as workers:
                return self._train(trial, workers)
        federation = LocalFederation.from_arrays(
            rows.x_train,
            trial.labels,
            owners,
            clients=clients,
            workers=trial.workers,
            device=trial.cell.device,
        )
        return self._train(trial, federation)

    def _train(self, trial: Trial, federation: Federation) -> Outcome:
        rows, measure = trial.rows, trial.cell.measure
        besides = Followers(*round_metrics.watches(self.method, rows, measure), trial.follow)
        clock = Clock(trial.tick, besides)
        model = self.method.fit(federation, follow=(clock, besides))
        outcome = Outcome(model)
        outcome.enter_costs(model, clock.ends, clock.now())
        trial.tick("scoring")
        parts = {"train": (rows.x_train, trial.labels)} if measure.train or measure.separability else {}
        if rows.x_test is not None and rows.y_test is not None:
            parts["test"] = (rows.x_test, rows.y_test)
        for part, (features, truth) in parts.items():
            if isinstance(model, StagedModel):
                correct, sums = _score_layers(model, features, truth, measure.separability)
                outcome.enter_scores(part, correct, len(truth), staged=True)
                if sums:
                    outcome.values["separability"] = outcome.values["separability"] or {}
                    outcome.values["separability"][part] = [vars(separability(layer)) for layer in sums]
            else:
                outcome.enter_scores(part, [_correct(model, features, truth)], len(truth))
        round_metrics.enter(outcome.values, model.history, measure.score)
        return outcome


def _score_layers(
    model: StagedModel, features: Array, truth: Array, separable: bool
) -> tuple[list[int], list[ClassSums]]:
    """Correct predictions after every layer, and the class sums of its features, in one pass."""
    if model.classes is None:
        raise DataError("experiments classify; the model has no classes.")
    correct = np.zeros(model.layers + 1, dtype=np.int64)
    sums: list[ClassSums] = []
    for start in range(0, len(features), _SPAN):
        span = slice(start, start + _SPAN)
        labels = np.asarray(truth[span])
        # Test rows of a class that nobody trained on count as wrong and have no place in class sums.
        known = np.isin(labels, model.classes)
        for layer, (phi, scores) in enumerate(model.stages(np.asarray(features[span]))):
            predicted = model.classes[np.argmax(scores, axis=1)]
            correct[layer] += int(np.sum(predicted == labels))
            if separable:
                part = class_sums(phi[known], labels[known], model.classes)
                if start == 0:
                    sums.append(part)
                else:
                    sums[layer] += part
    return correct.tolist(), sums


def _correct(model: Model, features: Array, truth: Array) -> int:
    spans = range(0, len(features), _SPAN)
    return sum(int(np.sum(model.predict(features[s : s + _SPAN]) == truth[s : s + _SPAN])) for s in spans)
