"""Scores as probabilities: softmax(slope * scores + biases), fitted to rows that were not trained on.

    minimise  sum_i lse(z_i) - (1 - e) z_i[y_i] - e mean(z_i)       z_i = slope s_i + b,  e = 1 / (1 + rows)

the log loss with one row's weight spread evenly over the classes, so that rows without a mistake do not ask
for an infinite slope. It is convex, and a sum over rows: clients answer with their terms at a list of
candidates, `Search` chooses the next ones. Without biases (a temperature, 1 / slope) one list is enough, and
the order of the classes stays; with them (Platt's two numbers, for two classes) Newton's steps follow, each
with its line search in one list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import logsumexp, softmax

from fedsolve.container import Array

SLOPES = 2.0 ** (np.arange(-12, 23) / 2)
"""The slopes that are tried first: scores may be estimates of ones and zeros, or logits."""
SHIFTS = np.linspace(-6.0, 6.0, 9)
"""The biases of the second class against the first that are tried first."""
FRACTIONS = np.array([1.0, 0.5, 0.25, 1 / 16, 2.0])
"""Of a Newton step, that are tried in one exchange."""
LEAST_ROWS = 10
"""With fewer rows held out, nothing is calibrated."""

_ROWS = 8192
_CLOSE = 1e-3
"""Newton decrement per row below which the objective is as good as quadratic."""


@dataclass(frozen=True)
class Calibration:
    """How a classifier's scores become probabilities, and what was seen of it on the rows held out.

    biases:  (classes,) or None. share, key: which rows were held out, as in `held_out`; rows: how many.
    metrics: what the calibrated model of the other rows reached on them. thresholds: (2, bins) rows of the
             first and second class by the logit of the second's probability, of two classes only.
    """

    slope: float
    biases: Array | None = None
    share: float = 0.0
    key: str = ""
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

    def parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and a JSON note, for the model file."""
        arrays = {"biases": self.biases, "thresholds": self.thresholds}
        note = {"slope": self.slope, "share": self.share, "key": self.key, "rows": self.rows}
        return (
            {name: array for name, array in arrays.items() if array is not None},
            note | {"metrics": dict(self.metrics)},
        )

    @classmethod
    def from_parts(cls, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> Calibration:
        return cls(**note, biases=arrays.get("biases"), thresholds=arrays.get("thresholds"))


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


# -- the fit ---------------------------------------------------------------------------------------


def calibration_sums(
    scores: Array, codes: Array, candidates: Array, weights: Array | None = None
) -> dict[str, Array]:
    """A client's term of the objective at every candidate (slope, biases...), one per row of `candidates`.

    scores: (rows, classes). codes: (rows,) positions of the true classes. With a single column of candidates
    there are no biases. Gives `class_rows`, `linear` (sum of s[y] and of mean(s)), and at each candidate
    `normaliser` = sum lse(z), its gradient and its Hessian in (slope, biases).
    """
    classes, count = scores.shape[1], candidates.shape[1]
    counted = np.ones(len(scores)) if weights is None else weights
    true = np.take_along_axis(scores, codes[:, None], axis=1)[:, 0] if len(scores) else np.zeros(0)
    normaliser = np.zeros(len(candidates))
    gradient = np.zeros((len(candidates), count))
    hessian = np.zeros((len(candidates), count, count))
    for start in range(0, len(scores), _ROWS):
        part, weight = scores[start : start + _ROWS], counted[start : start + _ROWS]
        for place, candidate in enumerate(candidates):
            logits = candidate[0] * part
            if count > 1:
                logits += candidate[1:]
            normaliser[place] += weight @ logsumexp(logits, axis=1)
            shares = softmax(logits, axis=1)
            expected = np.sum(shares * part, axis=1)
            weighted = weight[:, None] * shares
            gradient[place, 0] += weight @ expected
            hessian[place, 0, 0] += np.sum(weighted * (part - expected[:, None]) ** 2)
            if count > 1:
                gradient[place, 1:] += weighted.sum(axis=0)
                across = np.sum(weighted * (part - expected[:, None]), axis=0)
                hessian[place, 0, 1:] += across
                hessian[place, 1:, 0] += across
                hessian[place, 1:, 1:] += np.diag(weighted.sum(axis=0)) - weighted.T @ shares
    return {
        "class_rows": np.bincount(codes, counted, minlength=classes).astype(np.float64),
        "linear": np.array([counted @ true, counted @ scores.mean(axis=1)]),
        "normaliser": normaliser,
        "gradient": gradient,
        "hessian": hessian,
    }


@dataclass
class Search:
    """The minimiser of the objective: `candidates` to ask for, `absorb` takes their sums, until `done`."""

    biases: bool
    classes: int
    steps: int = 0
    best: Array | None = None
    trial: Array | None = None

    @property
    def candidates(self) -> Array:
        """(candidates, 1 or 1 + classes) to ask for next."""
        if self.trial is not None:
            return self.trial
        if self.biases and self.classes == 2:
            slope, shift = np.meshgrid(SLOPES[::2], SHIFTS / 2)
            return np.stack([slope.ravel(), -shift.ravel(), shift.ravel()], axis=1)
        grid = np.zeros((len(SLOPES), 1 + self.classes * self.biases))
        grid[:, 0] = SLOPES
        return grid

    @property
    def done(self) -> bool:
        return self.steps == self.exchanges

    @property
    def exchanges(self) -> int:
        """How many lists are asked for in all."""
        return 1 if not self.biases else 3 if self.classes == 2 else 5

    def absorb(self, sums: Mapping[str, Array]) -> None:
        candidates = self.candidates
        losses, slopes_of, curvatures = _objective(candidates, sums)
        place = int(np.argmin(losses))
        self.steps += 1
        if not self.biases:
            self.best = np.array([_root(candidates[:, 0], slopes_of[:, 0], curvatures[:, 0, 0], place)])
            return
        self.best = candidates[place]
        # The loss does not change when all biases do: the smallest of the solutions is wanted.
        step = np.linalg.lstsq(curvatures[place], -slopes_of[place], rcond=1e-10)[0]
        longest = -0.9 * self.best[0] / step[0] if step[0] < 0 else np.inf  # slopes stay positive
        lengths = np.minimum(FRACTIONS, longest)
        self.trial = np.concatenate([self.best[None], self.best + lengths[:, None] * step])
        if self.done and -slopes_of[place] @ step < _CLOSE * sums["class_rows"].sum():
            self.best = self.trial[1]  # so near to the minimum that the whole step needs no proof

    def result(self) -> tuple[float, Array | None]:
        """Slope and biases."""
        assert self.best is not None
        biases = self.best[1:] - self.best[1:].mean() if self.biases else None
        return float(self.best[0]), biases


def fitted(
    scores: Array, codes: Array, weights: Array | None = None, biases: bool = False
) -> tuple[float, Array | None] | None:
    """Slope and biases for rows that were not trained on; None where they are too few."""
    if len(scores) < LEAST_ROWS:
        return None
    search = Search(biases, scores.shape[1])
    while not search.done:
        search.absorb(calibration_sums(scores, codes, search.candidates, weights))
    return search.result()


def _objective(candidates: Array, sums: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Values, gradients and Hessians of the objective at the candidates."""
    class_rows = sums["class_rows"]
    rows, classes = class_rows.sum(), len(class_rows)
    spread = 1.0 / (1.0 + rows)
    true, mean = sums["linear"]
    drawn = np.empty(candidates.shape[1])
    drawn[0] = (1 - spread) * true + spread * mean
    if len(drawn) > 1:
        drawn[1:] = (1 - spread) * class_rows + spread * rows / classes
    return sums["normaliser"] - candidates @ drawn, sums["gradient"] - drawn, sums["hessian"]


def _root(slopes: Array, derivative: Array, curvature: Array, place: int) -> float:
    """Where the derivative vanishes: between the two slopes at which its sign changes, by a cubic."""
    other = place + (1 if derivative[place] < 0 else -1)
    if not 0 <= other < len(slopes):
        return float(slopes[place])
    two = slice(min(place, other), max(place, other) + 1)
    from scipy.interpolate import CubicHermiteSpline  # brings all of scipy.optimize along

    inside = CubicHermiteSpline(slopes[two], derivative[two], curvature[two]).roots(extrapolate=False)
    return float(inside[0]) if len(inside) else float(slopes[place])
