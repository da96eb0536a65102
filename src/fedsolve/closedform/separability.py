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

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError


def class_sums(features: Array, labels: Array, classes: Array) -> Array:
    """The sums of these rows for the given (sorted) classes, a row for each: n_c, q_c, and the sum of x."""
    values = np.asarray(features, dtype=np.float64)
    onehot = np.zeros((len(classes), len(values)))
    onehot[np.searchsorted(classes, labels), np.arange(len(values))] = 1.0
    return np.column_stack([onehot.sum(axis=1), onehot @ np.sum(values**2, axis=1), onehot @ values])


def separability(sums: Array) -> dict[str, float]:
    """CSR, IFS and DM of the rows behind these sums; classes without rows do not count."""
    present = sums[sums[:, 0] > 0]
    if len(present) < 2:
        raise DataError("separability needs rows of at least two classes.")
    rows, squares, features = present[:, 0], present[:, 1], present[:, 2:]
    means = features / rows[:, None]
    scatter = np.maximum(squares - rows * np.sum(means**2, axis=1), 0.0)
    overall = np.sum(features, axis=0) / rows.sum()
    between = float(np.sum(rows * np.sum((means - overall) ** 2, axis=1)))
    spread = float(np.mean(np.sum((means - means.mean(axis=0)) ** 2, axis=1)))
    # Mean squared distance over pairs of distinct means = 2 C / (C - 1) times their spread.
    pairs = 2.0 * len(means) / (len(means) - 1) * spread
    compactness = float(np.mean(scatter / rows))
    return {"csr": compactness / pairs, "ifs": compactness / spread, "dm": float(scatter.sum()) / between}
