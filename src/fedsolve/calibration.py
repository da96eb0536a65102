"""What a model keeps of rows held out: how scores become probabilities, how far predictions are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from fedsolve.arrays import Array
from fedsolve.errors import DataError

FLAT = 2.0**-6
"""The smallest slope: with it, probabilities are as good as the shares of the classes."""

REACH = 16.0
"""Logits further out than this are in the outermost bin but one of a histogram."""


class HeldOut:
    """What is kept of rows held out: a dataclass of arrays and JSON values, some of them None."""

    def parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and a JSON note, for the model file."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        arrays = {name: value for name, value in known.items() if isinstance(value, np.ndarray)}
        return arrays, {name: value for name, value in known.items() if name not in arrays}


@dataclass(frozen=True)
class Calibration(HeldOut):
    """How a classifier's scores become probabilities, and what was seen of it on the rows held out.

    biases:  (classes,) or None. rows: how many were held out, in all folds.
    metrics: what the calibrated models of the other rows reached on them. thresholds: (2, bins) rows of the
             first and second class by the logit of the second's probability, of two classes only.
    """

    slope: float
    biases: Array | None = None
    rows: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Array | None = None

    def probabilities(self, scores: Array) -> Array:
        """Probabilities (rows, classes) of scores."""
        logits = self.slope * scores
        if self.biases is not None:
            logits += self.biases
        shares: Array = softmax(logits, axis=1)
        return shares

    def moved(self, fitted: tuple[Array, float], now: tuple[Array, float]) -> Calibration:
        """The same for scores of another centre (classes,) and scale: as far apart as those it was fitted to.

        A penalty that is chosen by the rows may be much stronger for all of them than without a part.
        """
        (centre, scale), (own_centre, own_scale) = fitted, now
        if not (scale > 0 and own_scale > 0):
            return self
        slope, biases = self.slope * scale / own_scale, self.biases
        if biases is not None:
            biases = biases + self.slope * centre - slope * own_centre
            held = np.zeros(0) if self.thresholds is None else self.thresholds.sum(axis=1)
            if self.slope <= FLAT and own_centre.min() > 0:
                biases = np.log(own_centre) - slope * own_centre
            elif len(held) and held.min() > 0 and own_centre.min() > 0:
                # Scores are shares on average: those of all rows are better known than of those held out.
                biases = biases + np.log(own_centre / held)
            biases = biases - biases.mean()
        return replace(self, slope=slope, biases=biases)


@dataclass(frozen=True)
class LabelCalibration(HeldOut):
    """How the scores of several labels become probabilities: sigmoid(slope (2 score - 1) + bias), each.

    slope, biases: (labels,). thresholds: (labels, 2, bins) rows without and with a label by the logit of its
    probability. rows and metrics as `Calibration` has them.
    """

    slope: Array
    biases: Array
    rows: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Array | None = None

    def probabilities(self, scores: Array) -> Array:
        """Probabilities (rows, labels) of scores."""
        return np.asarray(expit(self.slope * (2.0 * scores - 1.0) + self.biases))


STEPS = np.array([0.25, 0.5, 0.75, 1, 1.15, 1.3, 1.45, 1.6, 1.7, 1.8, 1.9, 2, 2.1, 2.2, 2.4, 2.7, 3.2, 4, 6])
"""Edges of the bins in which absolute errors are counted, in root mean squared errors; the last is open."""


@dataclass(frozen=True)
class Spread(HeldOut):
    """How far a regression's predictions were from the truth, on rows that their model was not trained on.

    centre, deviation: (targets,) of the targets. scale: (targets,) root mean squared error. counts: (targets,
    20) rows by |error| / scale (`STEPS`). rows: how many were held out. metrics: R², MAE and RMSE on them.
    """

    centre: Array
    deviation: Array
    scale: Array
    counts: Array
    rows: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def reach(self, level: float = 0.95) -> Array:
        """(targets,) how far to either side of a prediction an interval goes that holds this share of rows.

        Of new rows like those held out, the share of the truths inside is at least that, on average, but for
        the width of a bin: the quantile of n errors is the one of rank (n + 1) level.
        """
        rank = np.ceil((self.rows + 1) * level - 1e-9)
        if not 0 < level < 1 or rank > (least := self.counts[:, :-1].sum(axis=1).min()):
            most = np.floor(1000 * least / (self.rows + 1)) / 1000 if 0 < level < 1 else 0.999
            raise DataError(f"an interval of {self.rows} rows held out has a level of at most {most:g}.")
        edges = np.concatenate([[0.0], STEPS])
        places = [np.interp(rank, np.concatenate([[0.0], np.cumsum(row[:-1])]), edges) for row in self.counts]
        return np.asarray(np.array(places) * self.scale)


def kept_from(arrays: Mapping[str, Array], note: Mapping[str, Any]) -> Any:
    """The `Calibration`, `LabelCalibration` or `Spread` of such parts."""
    kind: Any = Spread if "counts" in arrays else LabelCalibration if "slope" in arrays else Calibration
    return kind(**arrays, **note)


def lower_edges(bins: int) -> Array:
    """The smallest probability of every bin."""
    logits = np.linspace(-REACH, REACH, bins - 1)[:-1]
    edges: Array = np.concatenate([[0.0, 0.0], 1 / (1 + np.exp(-logits[1:])), [1.0]])
    return edges


def threshold(histogram: Array, sensitivity: float) -> float:
    """The largest edge of a bin from which on at least this share of the class's rows lies.

    Whoever calls rows of at least this probability finds that share of them, on the rows of the histogram.
    """
    if not 0 < sensitivity <= 1:
        raise DataError(f"a sensitivity is a share of rows, above 0 and at most 1; got {sensitivity!r}.")
    found = np.cumsum(histogram[1][::-1])[::-1]
    if found[0] == 0:
        raise DataError("no row of the class was held out, so no threshold can be chosen.")
    # With slack: 0.95 of 20 rows are 19 of them, whatever 0.95 * 20 rounds to.
    place = int(np.flatnonzero(found >= sensitivity * found[0] - 1e-9)[-1])
    return float(lower_edges(histogram.shape[-1])[place])


def project_to_simplex(scores: Array) -> Array:
    """Rows p (rows, classes) minimising |p - s|² over p >= 0, sum p = 1.

    p = max(s - tau, 0) with the one tau per row that makes the sum 1, found by sorting. Order is
    kept: no class overtakes another.
    """
    # tau lies at most 1 below the largest score, so anything further down is 0 all the same.
    shifted = np.maximum(scores - np.max(scores, axis=1, keepdims=True), -1.0)
    descending = -np.sort(-shifted, axis=1)
    excess = np.cumsum(descending, axis=1) - 1.0
    support = np.sum(descending * np.arange(1, scores.shape[1] + 1) > excess, axis=1)
    tau = excess[np.arange(len(scores)), support - 1] / support
    return np.asarray(np.maximum(shifted - tau[:, None], 0.0))
