"""What a gradient method did round by round: accuracy, loss, drift, representation, feedback alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.experiments.config import Measure
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.federation.followers import Follower
from fedsolve.federation.method import Method, Record

REPRESENTATION = ("intra", "inter", "ratio")
"""FLFA, Eqs. 56-58, of the features that enter the classifier."""

TAIL = 0.1
"""Share of the rounds, the last ones, over which FLFA averages."""


def watches(method: Method[Any], rows: ExperimentRows, measure: Measure) -> list[Follower]:
    """Who looks at test rows after every round of a gradient method; closed forms are scored at the end."""
    from fedsolve.gradient.gradient_method import GradientMethod

    if not isinstance(method, GradientMethod):
        return []
    from fedsolve.gradient.networks import build_network

    # Torch loads some of its parts at their first use, which is not training.
    build_network("mlp:1", 1, 1)
    if rows.x_test is None or rows.y_test is None:
        return []
    from fedsolve.gradient.watch import Watch

    return [Watch(rows.x_test, rows.y_test, representation=measure.representation)]


def enter(outcome: dict[str, Any], history: Sequence[Record], score: str) -> None:
    """Add the rounds of a gradient method to its outcome; `score` says which of them are its accuracy."""
    seen = [record.metrics for record in history if "loss" in record.metrics]
    if not seen:
        return
    outcome["loss_per_round"] = [metrics["loss"] for metrics in seen]
    drifts = [d for record in history if (d := record.metrics.get("drift")) is not None]
    if drifts:
        outcome["measures"]["drift"] = float(np.mean(drifts))
        outcome["drift_per_round"] = drifts
    _enter_feedback(outcome, seen)
    reached = [metrics["test_accuracy"] for metrics in seen if "test_accuracy" in metrics]
    if not reached:
        return
    outcome["accuracy_per_round"] = reached
    tail = float(np.mean(_last(reached)))
    scores = {"last": reached[-1], "best": max(reached), "tail": tail}
    outcome["measures"] |= {"best_round": scores["best"], "tail_rounds": tail}
    outcome["accuracy"] = scores[score]
    if score == "tail":
        outcome["test_correct"] = None
    else:
        outcome["test_correct"] = round(scores[score] * outcome["test_rows"])
    _enter_representation(outcome, seen)


def _enter_representation(outcome: dict[str, Any], seen: Sequence[Mapping[str, Any]]) -> None:
    looks = [metrics["representation"] for metrics in seen if "representation" in metrics]
    if not looks:
        return
    per_round = {name: [_finite(look[name]) for look in looks] for name in REPRESENTATION}
    outcome["representation_per_round"] = per_round
    for name, values in per_round.items():
        known = [value for value in _last(values) if value is not None]
        if known:
            outcome["measures"][name] = float(np.mean(known))


def _enter_feedback(outcome: dict[str, Any], seen: Sequence[Mapping[str, Any]]) -> None:
    """How often each layer was chosen, and how far clients agreed on it, at first and on average."""
    choices = [layer for metrics in seen for layer in metrics.get("feedback", ())]
    scores = [metrics["alignment"] for metrics in seen if "alignment" in metrics]
    layers = list(dict.fromkeys([*(layer for by_layer in scores for layer in by_layer), *choices]))
    if not layers:
        return
    outcome["feedback"] = {
        "layers": layers,
        "rounds": [choices.count(layer) for layer in layers],
        "first": [_finite(scores[0].get(layer)) if scores else None for layer in layers],
        "mean": [_mean([by_layer[layer] for by_layer in scores if layer in by_layer]) for layer in layers],
    }


def _last(values: Sequence[Any]) -> Sequence[Any]:
    return values[-max(1, round(TAIL * len(values))) :]


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _finite(value: float | None) -> float | None:
    """The value; None for NaN and infinity, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
