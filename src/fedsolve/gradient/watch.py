"""Watching a run: test accuracy of named targets, loss and representation, round by round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Follower
from fedsolve.federation.recipe import StagedRun
from fedsolve.gradient.alignment import CHOICES, representation
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.run import GradientRun
from fedsolve.labels import encode_labels

TARGETS = ("global", "aggregated")


@dataclass(eq=False)
class Watch(Follower):
    """Looks after every exchange of a run: what the newest models do on test rows.

    features (rows, width), labels (rows,): the test rows.
    targets: "global", "aggregated" or both, the first as `test_accuracy` and the second with its name before
             it; the one that `fit` gives when empty. How well the clients' own models do on their own rows
             while they train, in the last epoch of a round, is in every round's metrics as `local_accuracy`.
    every:   rounds between two looks; the last round is always looked at.
    representation: also measure how classes lie in the features of the last layer (FLFA, Eqs. 56-58).
    """

    features: Array
    labels: Array
    _: KW_ONLY
    targets: tuple[str, ...] = ()
    every: int = 1
    representation: bool = False

    def __post_init__(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise DataError(f"unknown target '{target}'; known are {', '.join(TARGETS)}.")
        self.labels = np.asarray(self.labels)

    def look(self, run: StagedRun[Any]) -> dict[str, Any]:
        inner = run.run
        if run.stage != "training":  # of two trainings, the one whose model is given
            return {}
        if not isinstance(inner, GradientRun):
            raise DataError("Watch follows gradient methods; this run is of another kind.")
        return self.measured(inner, run.described)

    def measured(
        self, run: GradientRun, described: Callable[[GradientModel], GradientModel] = lambda model: model
    ) -> dict[str, Any]:
        """What the models of this round say of the rows; nothing in rounds between.

        described: gives a model what it must know to read the rows.
        """
        record = run.history[-1]
        last = record.step == run.method.rounds - 1
        if record.kind != "train" or not (last or record.step % self.every == 0):
            return {}
        metrics: dict[str, Any] = {}
        models = {name: described(model) for name, model in run.targets().items()}
        for number, target in enumerate(self.targets or (run.reported(),)):
            # Before anybody has trained there is no mean of local models; the global one is what there is.
            model = models.get(target, models["global"])
            features, scores = model.representation(self.features)
            prefix = "" if number == 0 else f"{target}_"
            assert model.classes is not None
            correct = model.classes[np.argmax(scores, axis=1)] == self.labels
            metrics[f"{prefix}test_accuracy"] = float(np.mean(correct))
            codes = encode_labels(self.labels, model.classes, known=False)
            known = codes >= 0
            logs = log_softmax(scores[known], axis=1)[np.arange(known.sum()), codes[known]]
            # Over the rows whose class is known; None when there is none.
            metrics[f"{prefix}test_loss"] = float(-np.mean(logs)) if known.any() else None
            if self.representation and number == 0:
                metrics["representation"] = representation(features, self.labels)._asdict()
        return metrics


def final_accuracy(history: Any, share: float = 0.1, target: str = "test_accuracy") -> float:
    """Mean of a watched accuracy over the last share of the rounds, as the FLFA paper scores a run."""
    values = [record.metrics[target] for record in history if target in record.metrics]
    if not values:
        raise DataError(f"no record has '{target}'; pass follow=Watch(...) to fit.")
    return float(np.mean(values[-max(1, round(share * len(values))) :]))


def rounds_of(method: GradientMethod, model: GradientModel) -> dict[str, Any]:
    """What a gradient method reports of its rounds: the newest of what was measured, and layers chosen."""

    def newest(name: str) -> Any:
        return next((r.metrics[name] for r in reversed(model.history) if name in r.metrics), None)

    fixed = None if method.feedback in (None, *CHOICES) else method.feedback.split(",")
    watched = newest("test_accuracy") is not None
    return {
        "rounds": method.rounds,
        "weights": sum(array.size for array in model.weights.values()),
        "loss": newest("loss"),
        "drift": newest("drift"),
        "feedback_layers": fixed or newest("feedback"),
        "final_accuracy": final_accuracy(model.history) if watched else None,
    }
