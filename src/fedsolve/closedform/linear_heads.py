"""Linear classifiers that follow from AFL's sums without another byte: Gram matrix, cross matrix, counts.

    mu_c = H_c / n_c,   m = sum_c H_c / n,   S_w = (G - sum_c n_c mu_c mu_cᵀ) / n,   S = (G - n m mᵀ) / n

    lda         w_c = S_w^-1 mu_c,  b_c = -mu_cᵀ w_c / 2 + log(n_c / n)      Fisher's discriminant
    fedcgs      the same with S: Guan et al., FedCGS (2025)
    mean        w_c = mu_c,         b_c = -|mu_c|² / 2                       the nearest class mean
    normalised  columns of (G + ridge I)^-1 H, each of length 1              Fanì et al., Fed3R (ICML 2024)

The ridge is AFL's: ridge / n is added to the diagonal of a covariance.
"""

from __future__ import annotations

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.errors import DataError

HEADS = ("ridge", "lda", "fedcgs", "mean", "normalised")

NEVER = -1e9
"""The intercept of a class without rows, which is never predicted."""


def solve_head(head: str, gram: Array, cross: Array, counts: Array, ridge: float) -> tuple[Array, Array]:
    """Weight (d, C) and intercept (C,) of a head other than "ridge"; a class without rows is never chosen."""
    if head not in HEADS[1:]:
        raise DataError(f"unknown head '{head}'; choose one of {', '.join(HEADS)}.")
    seen = counts > 0
    weight, intercept = np.zeros_like(cross), np.where(seen, 0.0, NEVER)
    if head == "normalised":
        found = ridge_solve(gram, cross[:, seen], ridge)
        lengths = np.linalg.norm(found, axis=0)
        weight[:, seen] = found / np.where(lengths > 0, lengths, 1.0)
        return weight, intercept
    rows, means = float(np.sum(counts)), cross[:, seen] / counts[seen]
    if head == "mean":
        weight[:, seen] = means
        intercept[seen] = -0.5 * np.sum(means**2, axis=0)
        return weight, intercept
    mean = cross.sum(axis=1) / rows
    taken = means * counts[seen] @ means.T if head == "lda" else rows * np.outer(mean, mean)
    solved = rows * ridge_solve(gram - taken, means, ridge)
    weight[:, seen] = solved
    intercept[seen] = np.log(counts[seen] / rows) - 0.5 * np.sum(means * solved, axis=0)
    return weight, intercept
