"""The outcome of a cell: scores and costs as JSON values, and the model."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.predictors import DeepModel, StagedModel
from fedsolve.federation.card import totals
from fedsolve.federation.engine import Follower, Followers
from fedsolve.federation.method import Record
from fedsolve.model import Model
from fedsolve.scoring.client_scores import ClientScores

_COSTS = ("exchanges", "bytes_up", "bytes_down")
_LAYERED = ("accuracy", "train_accuracy", "seconds", *_COSTS)
FIELDS = (
    *_LAYERED,
    *(f"{name}_per_layer" for name in _LAYERED),
    "test_rows",
    "hits",
    "risk",
    "separability",
    "local",
)
"""The fields of every cell; null until they are filled in."""


class Outcome:
    """values: the fields of a cell and its `measures`. model: the trained model."""

    def __init__(self, model: Any = None, **known: Any) -> None:
        self.model = model
        self.values: dict[str, Any] = dict.fromkeys(FIELDS) | {"measures": {}} | known

    def enter_costs(self, model: Model, clock: Sequence[float], seconds: float) -> None:
        """What training took, in all and up to every layer, and the risk it reached.

        clock: seconds from the start to the end of each exchange.
        """
        history, spent = model.history, totals(model.history)
        # One exchange of a deep model may solve two classifiers: its history does not hold the risk of each.
        solved = [record.risk for record in history if record.solved]
        risks = model.risk.tolist() if isinstance(model, DeepModel) else solved
        self.values |= {name: spent[name] for name in _COSTS}
        self.values |= {"seconds": seconds, "risk": [_finite(risk) for risk in risks]}
        if isinstance(model, StagedModel):
            last = {name: index for index, record in enumerate(history) for name in record.solved}
            ends = [last[f"W{layer}"] + 1 for layer in range(model.layers + 1)]
            layers = [totals(history[:end]) for end in ends]
            self.values |= {f"{name}_per_layer": [layer[name] for layer in layers] for name in _COSTS}
            self.values["seconds_per_layer"] = [clock[end - 1] for end in ends]

    def enter_scores(self, part: str, hits: Array, depths: Sequence[int] | None = None) -> None:
        """Which rows of a part, "train" or "test", are right after each layer, (layers, rows).

        depths: of a staged model, the layers that tables read; the last where there are none.
        """
        prefix = "train_" if part == "train" else ""
        shares = hits.mean(axis=1).tolist()
        self.values[f"{prefix}accuracy"] = shares[-1]
        if depths is not None:
            self.values[f"{prefix}accuracy_per_layer"] = shares
        if part == "test":
            last = len(hits) - 1
            kept = {"": last} if depths is None else {str(depth): depth for depth in depths or (last,)}
            self.values["test_rows"] = hits.shape[1]
            self.values["hits"] = {name: packed(hits[layer]) for name, layer in kept.items()}

    def enter_local(
        self,
        scores: ClientScores,
        compared: Mapping[str, ClientScores] | None = None,
        balances: Sequence[Any] = (),
    ) -> None:
        """Scores by clients. A mean over clients is no share of the rows, so counts are left out.

        compared: scores of the shared model, and of each client's own rows alone.
        """
        self.values["measures"] = {"worst_decile": scores.worst_decile, "pooled": scores.pooled}
        local: dict[str, Any] = {"correct": scores.correct.tolist(), "rows": scores.rows.tolist()}
        for name, other in (compared or {}).items():
            self.values["measures"][f"gain_{name}"] = float(np.nanmean(scores.gains(other)))
            local[name] = other.correct.tolist()
        self.values |= {
            "accuracy": scores.mean,
            "test_rows": int(scores.rows.sum()),
            "local": local | {"balances": list(balances)},
        }


def packed(hits: Array) -> str:
    """Which rows are right, a bit for each, as text."""
    return base64.b64encode(np.packbits(hits).tobytes()).decode()


def unpacked(text: str, rows: int) -> Array:
    """The rows that are right, (rows,) of 0 and 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=rows)


class Clock(Follower):
    """Records when each exchange ended, in seconds from the start, and reports progress.

    besides: who else follows; looking at test rows and writing to trackers is not training.
    """

    def __init__(self, tick: Callable[[str], None], besides: Followers) -> None:
        self.ends: list[float] = []
        self._tick = tick
        self._besides = besides
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started - self._besides.seconds

    def advanced(self, record: Record, expected: int) -> None:
        self.ends.append(self.now())
        self._tick(f"exchange {record.exchange + 1} of {expected}")


REPRESENTATION = ("intra", "inter", "ratio")
"""FLFA, Eqs. 56-58, of the features that enter the classifier."""

TAIL = 0.1
"""Share of the rounds, the last ones, over which FLFA averages."""


def enter_rounds(outcome: dict[str, Any], history: Sequence[Record], score: str) -> None:
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
    if score != "last":
        outcome["hits"] = None  # those of the last round are not those of its score
    looks = [metrics["representation"] for metrics in seen if "representation" in metrics]
    for name in REPRESENTATION if looks else ():
        values = [_finite(look[name]) for look in looks]
        outcome.setdefault("representation_per_round", {})[name] = values
        if known := [value for value in _last(values) if value is not None]:
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
        "mean": [_mean(by_layer[layer] for by_layer in scores if layer in by_layer) for layer in layers],
    }


def _last(values: Sequence[Any]) -> Sequence[Any]:
    return values[-max(1, round(TAIL * len(values))) :]


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _finite(value: float | None) -> float | None:
    """The value; None for NaN and infinity, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
