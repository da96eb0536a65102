"""Exact k-fold errors of ridge regression from sums: every ridge at once, without a further exchange.

Every row has a fold by its content (`fedsolve.held_out`), and every client sends its sums by fold. Total
minus a fold is what that fold's model is trained on, and the fold's own sums are all that its squared error
needs:

    |Y - 1b - X W|² = sum|y|² - 2 tr(WᵀH) + tr(WᵀGW) + n|b|² - 2 b·(sum y) + 2 b·(Wᵀ sum x)

A fold of a client's rows is fewer rows, and says more about each of them, than all of its rows do; under
secure sums nobody sees one client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.messages import Total

KEY = "ridge"
"""The key of the marks that give a row its fold."""

RELATIVE = tuple(10.0 ** (step / 2) for step in range(-10, 9))
"""Ridges that are compared, smallest first, as multiples of the mean square of a feature."""

_TIE = 1e-9


def fold_count(width: int) -> int:
    """How many folds: a Gram matrix each travels, so the wider the features, the fewer."""
    return 5 if width <= 512 else 3 if width <= 2048 else 2


@dataclass(frozen=True)
class FoldSums:
    """What ridge regression needs of some rows; the last three are for an intercept."""

    gram: Array
    cross: Array
    label_square: Array
    weight: float
    feature: Array
    target: Array

    @classmethod
    def of(cls, total: Total, prefix: str = "") -> FoldSums:
        """The sums of a total."""
        names = ("gram", "cross", "label_square", "weight", "feature", "target")
        gram, cross, square, weight, feature, target = (total[f"{prefix}{name}"] for name in names)
        return cls(gram, cross, square, float(weight[0]), feature, target)

    def plus(self, other: FoldSums, sign: int = 1) -> FoldSums:
        """The sums of both, or of these rows without the others."""
        return FoldSums(
            self.gram + sign * other.gram,
            self.cross + sign * other.cross,
            self.label_square + sign * other.label_square,
            self.weight + sign * other.weight,
            self.feature + sign * other.feature,
            self.target + sign * other.target,
        )

    def centred(self, intercept: bool) -> tuple[Array, Array, Array, Array]:
        """Gram and cross matrix about the means, and the means; as they are without an intercept."""
        if not intercept or self.weight <= 0:
            return self.gram, self.cross, np.zeros_like(self.feature), np.zeros_like(self.target)
        mean, target = self.feature / self.weight, self.target / self.weight
        gram = self.gram - self.weight * np.outer(mean, mean)
        return gram, self.cross - self.weight * np.outer(mean, target), mean, target

    def error(self, weight: Array, intercept: Array) -> float:
        """The squared error of a model on these rows."""
        fit = np.sum(self.label_square) + np.sum(weight * (self.gram @ weight - 2.0 * self.cross))
        moved = self.weight * intercept - 2.0 * self.target + 2.0 * (self.feature @ weight)
        return float(fit + intercept @ moved)


def fold_sums(total: Total, folds: int) -> list[FoldSums]:
    """The sums of every fold."""
    return [FoldSums.of(total, f"fold{fold}.") for fold in range(folds)]


def added(parts: Sequence[FoldSums]) -> FoldSums:
    """The sums of all folds together: those of all rows."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.plus(part)
    return whole


def choose_ridge_by_folds(
    parts: Sequence[FoldSums], intercept: bool
) -> tuple[float, list[float], list[float]]:
    """The ridge with the least k-fold error, the largest of equals; with all ridges and their errors."""
    whole = added(parts)
    gram, _, _, _ = whole.centred(intercept)
    if whole.weight <= 0:
        raise DataError("all sample weights are zero; at least one row must count.")
    unit = float(np.trace(gram)) / (len(gram) * whole.weight) or 1.0
    ridges = [unit * relative for relative in RELATIVE]
    errors = np.zeros(len(ridges))
    for part in parts:
        gram, cross, mean, target = whole.plus(part, -1).centred(intercept)
        values, vectors = eigh(gram, driver="evd", check_finite=False)
        values, turned = np.maximum(values, 0.0), vectors.T @ cross
        for place, ridge in enumerate(ridges):
            weight = vectors @ (turned / (values + ridge)[:, None])
            errors[place] += part.error(weight, target - mean @ weight)
    best = np.flatnonzero(errors <= errors.min() + _TIE * abs(errors.min()))[-1]
    return ridges[int(best)], ridges, errors.tolist()
