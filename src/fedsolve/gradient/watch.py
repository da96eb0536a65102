"""Watching a run: test accuracy of named targets, loss and representation, round by round."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.calibrated import REFITTING, CalibratedRun
from fedsolve.federation.described import DescribedRun
from fedsolve.federation.followers import Follower
from fedsolve.federation.method import Run
from fedsolve.gradient.alignment import representation
from fedsolve.gradient.run import GradientRun
from fedsolve.labels import positions

TARGETS = ("global", "aggregated")


class Watch(Follower):
    """Looks after every exchange of a run: what the newest models do on test rows.

    features (rows, width), labels (rows,): the test rows.
    targets: "global", "aggregated" or both, the first as `test_accuracy` and the second with its name before
             it; the one that `fit` gives when empty. How well the clients' own models do on their own rows
             while they train, in the last epoch of a round, is in every round's metrics as `local_accuracy`.
    every:   rounds between two looks; the last round is always looked at.
    representation: also measure how classes lie in the features of the last layer (FLFA, Eqs. 56-58).
    """

    def __init__(
        self,
        features: Array,
        labels: Array,
        *,
        targets: tuple[str, ...] = (),
        every: int = 1,
        representation: bool = False,
    ) -> None:
        for target in targets:
            if target not in TARGETS:
                raise DataError(f"unknown target '{target}'; known are {', '.join(TARGETS)}.")
        self.features = features
        self.labels = np.asarray(labels)
        self.targets = targets
        self.every = every
        self.representation = representation

    def look(self, run: Run[Any]) -> dict[str, Any]:
        if isinstance(run, CalibratedRun):  # of the two trainings, the one whose model is given
            return self.look(run.inner) if run.phase == REFITTING else {}
        described = run if isinstance(run, DescribedRun) else None
        inner = run if described is None else described.inner
        if not isinstance(inner, GradientRun):
            raise DataError("Watch follows gradient methods; this run is of another kind.")
        record = inner.history[-1]
        last = record.step == inner.method.rounds - 1
        if record.kind != "train" or not (last or record.step % self.every == 0):
            return {}
        metrics: dict[str, Any] = {}
        models: dict[str, Any] = inner.targets() if described is None else described.targets()
        for number, target in enumerate(self.targets or (inner.reported(),)):
            # Before anybody has trained there is no mean of local models; the global one is what there is.
            model = models.get(target, models["global"])
            features, scores = model.representation(self.features)
            prefix = "" if number == 0 else f"{target}_"
            assert model.classes is not None
            correct = model.classes[np.argmax(scores, axis=1)] == self.labels
            metrics[f"{prefix}test_accuracy"] = float(np.mean(correct))
            metrics[f"{prefix}test_loss"] = _cross_entropy(scores, self.labels, model.classes)
            if self.representation and number == 0:
                metrics["representation"] = representation(features, self.labels)._asdict()
        return metrics


def final_accuracy(history: Any, share: float = 0.1, target: str = "test_accuracy") -> float:
    """Mean of a watched accuracy over the last share of the rounds, as the FLFA paper scores a run."""
    values = [record.metrics[target] for record in history if target in record.metrics]
    if not values:
        raise DataError(f"no record has '{target}'; pass watch=Watch(...) to fit.")
    return float(np.mean(values[-max(1, round(share * len(values))) :]))


def _cross_entropy(scores: Array, labels: Array, classes: Array) -> float | None:
    """Mean loss over the rows whose class is known; None when there is none."""
    codes = positions(labels, classes)
    known = codes >= 0
    if not known.any():
        return None
    scores = scores[known] - scores[known].max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return float(-np.mean(logs[np.arange(len(logs)), codes[known]]))
