"""How well classes separate in a representation, from sums: counts, class sums, class square sums.

DeepAFL, Appendix R.2 names three measures in words; the formulas are our reading. With n_c rows
and mean m_c in class c, n rows, mean m, C classes with rows, and square sums q_c = sum |x|²:

    within  S_W = sum_c (q_c - n_c |m_c|²)              between  S_B = sum_c n_c |m_c - m|²

    CSR = [mean over classes of the mean squared distance to the class mean]
          / [mean over pairs of classes of the squared distance of their means]
    IFS = [mean over classes of the class variance] / [mean over classes of |m_c - m̄|²],
          m̄ the plain mean of the class means
    DM  = S_W / S_B

Lower is better for all three. Every quantity is a function of sums over rows, so clients can
answer with a term of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError


@dataclass(frozen=True)
class ClassSums:
    """Sums per class: rows (C,), features (C, width), squares (C,)."""

    rows: Array
    features: Array
    squares: Array

    def __add__(self, other: ClassSums) -> ClassSums:
        return ClassSums(self.rows + other.rows, self.features + other.features, self.squares + other.squares)


@dataclass(frozen=True)
class Separability:
    """The three ratios; lower means better separated."""

    csr: float
    ifs: float
    dm: float


def class_sums(features: Array, labels: Array, classes: Array) -> ClassSums:
    """The sums of these rows for the given (sorted) classes."""
    codes = np.searchsorted(classes, labels)
    rows = np.bincount(codes, minlength=len(classes)).astype(np.float64)
    onehot = np.zeros((len(classes), len(features)))
    onehot[codes, np.arange(len(features))] = 1.0
    values = np.asarray(features, dtype=np.float64)
    return ClassSums(rows, onehot @ values, onehot @ np.sum(values**2, axis=1))


def separability(sums: ClassSums) -> Separability:
    """CSR, IFS and DM of the rows behind these sums; classes without rows do not count."""
    present = sums.rows > 0
    if int(present.sum()) < 2:
        raise DataError("separability needs rows of at least two classes.")
    rows, means = sums.rows[present], sums.features[present] / sums.rows[present, None]
    scatter = np.maximum(sums.squares[present] - rows * np.sum(means**2, axis=1), 0.0)
    variances = scatter / rows
    overall = np.sum(sums.features[present], axis=0) / rows.sum()
    between = float(np.sum(rows * np.sum((means - overall) ** 2, axis=1)))
    spread = float(np.mean(np.sum((means - means.mean(axis=0)) ** 2, axis=1)))
    # Mean squared distance over pairs of distinct means = 2 C / (C - 1) times their spread.
    pairs = 2.0 * len(means) / (len(means) - 1) * spread
    compactness = float(np.mean(variances))
    return Separability(csr=compactness / pairs, ifs=compactness / spread, dm=float(scatter.sum()) / between)
