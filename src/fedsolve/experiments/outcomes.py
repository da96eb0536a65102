"""The outcome of a cell: scores and costs as JSON values, and the model that they are of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.closedform.predictors import DeepModel, StagedModel
from fedsolve.federation.followers import Follower, Followers
from fedsolve.federation.history import totals
from fedsolve.federation.local_scores import LocalScores
from fedsolve.federation.method import Record
from fedsolve.model import Model

_COSTS = ("exchanges", "bytes_up", "bytes_down")
_LAYERED = ("accuracy", "train_accuracy", "test_correct", "seconds", *_COSTS)
FIELDS = (
    *_LAYERED,
    *(f"{name}_per_layer" for name in _LAYERED),
    "test_rows",
    "risk",
    "separability",
    "local",
)
"""The fields of every cell; null until they are filled in."""


class Outcome:
    """values: the fields of a cell and its `measures`. model: what was trained, for whoever needs it."""

    def __init__(self, model: Any = None, **known: Any) -> None:
        self.model = model
        self.values: dict[str, Any] = dict.fromkeys(FIELDS) | {"measures": {}} | known

    def enter_costs(self, model: Model, clock: Sequence[float], seconds: float) -> None:
        """What training took, in all and up to every layer, and the risk it reached.

        clock: seconds from the start to the end of each exchange.
        """
        history, spent = model.history, totals(model.history)
        self.values |= {name: spent[name] for name in _COSTS} | {"seconds": seconds, "risk": _risks(model)}
        if isinstance(model, StagedModel):
            last = {name: index for index, record in enumerate(history) for name in record.solved}
            ends = [last[f"W{layer}"] + 1 for layer in range(model.layers + 1)]
            layers = [totals(history[:end]) for end in ends]
            self.values |= {f"{name}_per_layer": [layer[name] for layer in layers] for name in _COSTS}
            self.values["seconds_per_layer"] = [clock[end - 1] for end in ends]

    def enter_scores(self, part: str, correct: Sequence[int], rows: int, staged: bool = False) -> None:
        """Correct predictions of the rows of a part, "train" or "test", after each layer."""
        prefix = "train_" if part == "train" else ""
        self.values[f"{prefix}accuracy"] = correct[-1] / rows
        if staged:
            self.values[f"{prefix}accuracy_per_layer"] = [count / rows for count in correct]
        if part == "test":
            self.values |= {"test_correct": correct[-1], "test_rows": rows}
            if staged:
                self.values["test_correct_per_layer"] = list(correct)

    def enter_local(
        self,
        scores: LocalScores,
        compared: Mapping[str, LocalScores] | None = None,
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


class Clock(Follower):
    """Notes when each exchange ended, in seconds from the start, and reports how far training has got.

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


def _risks(model: Model) -> list[float | None]:
    """The regularised risk of every classifier, in order."""
    if isinstance(model, DeepModel):
        # One exchange may solve two classifiers, so the history does not hold the risk of each.
        risks = model.risk.tolist()
    else:
        risks = [record.risk for record in model.history if record.solved]
    return [risk if risk is not None and np.isfinite(risk) else None for risk in risks]
