"""How good a regression is, from sums over rows alone: `RegressionEvaluation`.

errors   (10, targets) sums of e, |e|, e², e⁴, t, t², t³, t⁴, e² t and e² t², with e = truth - prediction and
         t = truth - origin, a number near the targets
covered  (targets, 20) rows by |e| in steps of the error on rows held out (`Spread`)
shown    (3, targets, 12) by the prediction: rows, sum of e and of e²; bins in which a client has fewer than
         `FEWEST` rows are left out of its sums
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import STEPS, Spread
from fedsolve.federation.participant import ClientData
from fedsolve.labels import regression_targets
from fedsolve.scoring.quality import NORMAL, truth_of

if TYPE_CHECKING:
    from fedsolve.model import Model

FEWEST = 10
"""Nothing is said of a group or a bin with fewer rows."""

_BINS = 12


def error_sums(
    model: Model, data: ClientData, spread: Spread | None = None, origin: Array | None = None
) -> dict[str, Array]:
    """The sums of a client's rows, some of them at a time; spread and origin are the model's when None."""
    labels, outputs = data.own_labels, model.outputs
    sums = {"errors": np.zeros((10, outputs))}
    known = spread if spread is not None else model.spread
    if known is not None:
        sums |= {"covered": np.zeros((outputs, len(STEPS) + 1)), "shown": np.zeros((3, outputs, _BINS))}
    # Nothing depends on where targets are counted from; near them, their powers keep all digits.
    origin = origin_of(model) if origin is None else origin
    for span in data.spans():
        target = regression_targets(truth_of(model, labels[span]), outputs).astype(np.float64)
        predicted = model.estimates(data.features(span, data.source.dtype))
        e, t = target - predicted, target - origin
        powers = (e, np.abs(e), e**2, e**4, t, t**2, t**3, t**4, e**2 * t, (e * t) ** 2)
        sums["errors"] += [power.sum(axis=0) for power in powers]
        if known is None:
            continue
        steps = np.searchsorted(STEPS, np.abs(e) / known.scale, side="left")
        bins = np.clip((predicted - known.centre) / known.deviation * (_BINS / 6) + _BINS / 2, 0, _BINS - 1)
        for place in range(outputs):
            sums["covered"][place] += np.bincount(steps[:, place], minlength=len(STEPS) + 1)
            inside = bins[:, place].astype(np.int64)
            for row, weights in enumerate((None, e[:, place], e[:, place] ** 2)):
                sums["shown"][row, place] += np.bincount(inside, weights, minlength=_BINS)
    if known is not None:
        sums["shown"] *= sums["shown"][0] >= FEWEST
    return sums


def origin_of(model: Model) -> Array:
    """From where targets are counted: the mean on rows held out, or what is near them by the model."""
    if model.spread is not None:
        return model.spread.centre
    return model.middle


@dataclass(frozen=True)
class RegressionEvaluation:
    """R², MAE and RMSE of a regression with 95 % intervals, and how often its own intervals hold the truth.

    Of several targets, means over them. Intervals are those of other rows of the same kind, by the delta
    method from sums of powers. origin: from where targets are counted in the sums.
    """

    rows: int
    sums: Mapping[str, Array]
    origin: Array
    spread: Spread | None = None

    @cached_property
    def _moments(self) -> tuple[Array, Array, Array, Array]:
        """Means of |e| and e², mean and variance of t, about the origin."""
        mean = self.sums["errors"] / max(1, self.rows)
        return mean[1], mean[2], mean[4], np.maximum(mean[5] - mean[4] ** 2, 0.0)

    @property
    def r2(self) -> float:
        """1 - sum e² / sum (truth - mean)²; NaN where all truths are alike."""
        _, square, _, variance = self._moments
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.mean(np.where(variance > 0, 1 - square / variance, np.nan)))

    @property
    def mae(self) -> float:
        return float(np.mean(self._moments[0]))

    @property
    def rmse(self) -> float:
        return float(np.mean(np.sqrt(self._moments[1])))

    @property
    def bias(self) -> float:
        """Mean of truth - prediction."""
        return float(np.mean(self.sums["errors"][0]) / max(1, self.rows))

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        count = max(1, self.rows)
        size, square, middle, variance = self._moments
        first, _, _, fourth, _, second, third, quartic, lean, bend = self.sums["errors"] / count
        # Moments about the mean of the targets: of e² d² and of d⁴, with d = t - mean.
        cross = bend - 2 * middle * lean + middle**2 * square
        spread = quartic - 4 * middle * third + 6 * middle**2 * second - 3 * middle**4
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = square / variance
            of_ratio = (fourth - 2 * ratio * cross + ratio**2 * spread) / variance**2
            of_root = (fourth - square**2) / (4 * square)
        found = {}
        noises = (of_ratio, square - size**2, of_root, square - first**2)
        for (name, value), noise in zip(self.measures().items(), noises, strict=True):
            # Of several targets as if their errors went together, which is the widest.
            reach = NORMAL * float(np.mean(np.sqrt(np.maximum(noise, 0.0) / count)))
            found[name] = value - reach, value + reach
        return found

    def coverage(self, level: float = 0.95) -> float | None:
        """Share of rows whose truth lies in the model's interval of this level; None where it has none."""
        if self.spread is None or "covered" not in self.sums:
            return None
        reach = self.spread.reach(level) / self.spread.scale
        edges = np.concatenate([[0.0], STEPS])
        inside = [
            np.interp(far, edges, np.concatenate([[0.0], np.cumsum(row[:-1])]))
            for far, row in zip(reach, self.sums["covered"], strict=True)
        ]
        return float(np.mean(inside) / max(1, self.rows))

    @property
    def residuals(self) -> list[dict[str, Any]]:
        """By the prediction, in bins with rows: from, to, rows, mean residual and its standard deviation."""
        if self.spread is None or "shown" not in self.sums:
            return []
        found = []
        edges = self.spread.centre[:, None] + self.spread.deviation[:, None] * np.linspace(-3, 3, _BINS + 1)
        for place, bins in enumerate(zip(edges[:, :-1], edges[:, 1:], *self.sums["shown"], strict=True)):
            for low, high, rows, first, second in zip(*bins, strict=True):
                if rows >= FEWEST:
                    mean = first / rows
                    off = np.sqrt(max(0.0, second / rows - mean**2))
                    bounds = {"target": place, "from": float(low), "to": float(high), "rows": int(rows)}
                    found.append(bounds | {"mean": float(mean), "deviation": float(off)})
        return found

    rates: ClassVar[dict[str, float]] = {}
    rate_intervals: ClassVar[dict[str, tuple[float, float]]] = {}

    def measures(self) -> dict[str, float]:
        return {"r2": self.r2, "mae": self.mae, "rmse": self.rmse, "bias": self.bias}

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            **self.measures(),
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "coverage": self.coverage(),
            "residuals": self.residuals,
        }

    def __repr__(self) -> str:
        return (
            f"RegressionEvaluation({self.rows} rows: R² {self.r2:.4f}, MAE {self.mae:.4g}, "
            f"RMSE {self.rmse:.4g})"
        )
