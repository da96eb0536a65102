"""Closed-form solvers as pure functions of sums. Solve, never invert."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import Kernels, host, kernels_of
from fedsolve.errors import ConditionWarning

EPS = float(np.finfo(np.float64).eps)


def ridge_solve(gram: Array, cross: Array, ridge: float = 0.0) -> Array:
    """W minimising |Y - X W|² + ridge |W|², from gram = XᵀX (d, d) and cross = XᵀY (d, C).

    By Cholesky of gram + ridge I. When that fails, or its reciprocal condition number is below
    d·eps, eigenvalues below d·eps·max are dropped and the minimum-norm solution is taken; a
    `ConditionWarning` names the condition number.
    """
    kernels = kernels_of(gram)
    with kernels.threads(len(gram)):
        system = kernels.copy(gram)
        kernels.add_diagonal(system, ridge)
        factor = kernels.cholesky(system, least=ridge)
        if factor is not None:
            return kernels.cholesky_solve(factor, cross)
        return _minimum_norm(system, cross, ridge)


RELATIVE = tuple(10.0 ** (step / 2) for step in range(-10, 9))
"""Ridges that are compared, smallest first, as multiples of the mean square of a feature."""

_TIE = 1e-9


def gcv_ridge(
    gram: Array, cross: Array, label_square: float, rows: float, fitted: int = 0, least: float = 0.0
) -> tuple[float, list[float], list[float]]:
    """The ridge with the least error of generalised cross-validation, the largest of equals; with all ridges
    that were compared and their errors.

        GCV(ridge) = n |Y - X W|² / (n - tr A)²,   tr A = fitted + sum_i v_i / (v_i + ridge)

    from gram = XᵀX = V diag(v) Vᵀ (d, d), cross = XᵀY (d, C), the sum of the squares of Y, and n = rows: what
    leaving rows out one by one would tell, without a fold. fitted: parameters beside W, such as an intercept
    that gram and cross are centred by. least: share of the largest eigenvalue below which a ridge is lost in
    the rounding of gram.
    """
    with kernels_of(gram).threads(len(gram)):
        values, vectors = kernels_of(gram).eigh(gram)
        values, turned = host(values).clip(min=0.0), host(((vectors.T @ cross) ** 2).sum(axis=1))
    unit = float(values.sum()) / (len(gram) * rows) or 1.0
    ridges = np.array(RELATIVE) * unit
    shifted = values + ridges[:, None]
    # Not over shifted**2: of features around 1e90 or 1e-90 that is more or less than float64 holds.
    left = label_square - (turned / shifted * ((values + 2.0 * ridges[:, None]) / shifted)).sum(axis=1)
    free = rows - fitted - (values / shifted).sum(axis=1)
    # What is left of a perfect fit is rounding; without a degree of freedom nothing is known of the error.
    errors = rows * np.maximum(left, EPS * label_square) / np.maximum(free, EPS * rows) ** 2
    errors[ridges < least * float(values[-1])] = np.inf
    best = np.flatnonzero(errors <= errors.min() * (1.0 + _TIE))[-1]
    return float(ridges[best]), ridges.tolist(), errors.tolist()


def score_moments(mean: Array, second: Array, weight: Array, constant: Array) -> list[Any]:
    """Means of a linear model's scores (classes,) and their spread beside that of their sum, from moments of
    its features."""
    spread = weight.T @ (second - np.outer(mean, mean)) @ weight
    scale = float(np.sqrt(max(0.0, np.trace(spread) - spread.mean() * len(spread))))
    return [(mean @ weight + constant).tolist(), scale]


def regularised_risk(
    weight: Array, gram: Array, cross: Array, label_square: Array, ridge: float, penalty: float = 0.0
) -> float:
    """|Y - X W|² + ridge |W|² + penalty, from the sums gram = XᵀX, cross = XᵀY and the squares of Y."""
    fit = (weight * (gram @ weight - 2.0 * cross)).sum()
    return float(label_square.sum() + fit + (ridge * (weight**2).sum() + penalty))


EXACT = 1e-12
"""A system counts as solved up to this residual, relative to the norms of its parts."""


def solves(gram: Array, cross: Array, ridge: float, weight: Array) -> bool:
    """Whether (gram + ridge I) weight = cross but for rounding: then it is as good as any solution.

    Only where a ridge determines the solution. Without one, directions that the data leave open could hold
    anything; the minimum-norm solution is compared by its own numbers.
    """
    if ridge <= 0 or weight.shape != cross.shape:
        return False
    kernels = kernels_of(gram)
    found = kernels.array(weight)
    left = gram @ found + ridge * found - cross
    size = (float((gram**2).sum()) ** 0.5 + ridge) * float((found**2).sum()) ** 0.5
    size += float((cross**2).sum()) ** 0.5
    return bool(float((left**2).sum()) ** 0.5 <= EXACT * size)


def _minimum_norm(system: Array, cross: Array, ridge: float) -> Array:
    """The same solution through eigenvalues; directions the data do not determine get zero."""
    kernels = kernels_of(system)
    values, vectors = kernels.eigh(system)
    largest = max(float(values[-1]), 0.0)
    keep = values > len(system) * EPS * largest
    smallest = float(abs(values).min())
    condition = largest / smallest if smallest > 0 else np.inf
    warnings.warn(
        f"the system of width {len(system)} is singular to working precision (condition number "
        f"{condition:.1e}, rank {int(keep.sum())}); the minimum-norm solution is used. "
        f"A larger ridge (now {ridge:g}) avoids this.",
        ConditionWarning,
        stacklevel=4,
    )
    kept = vectors[:, keep]
    return kernels.contiguous(kept @ ((kept.T @ cross) / values[keep][:, None]))


@dataclass(frozen=True)
class Sandwich:
    """Omega = left rightᵀ in thin form: left (d_F, r), right (d, r) with orthonormal columns."""

    left: Array
    right: Array

    @property
    def omega(self) -> Array:
        return self.left @ self.right.T

    def astype(self, dtype: Any) -> Sandwich:
        return Sandwich(self.left.astype(dtype, copy=False), self.right.astype(dtype, copy=False))

    def gap(self, other: Sandwich) -> float:
        """How far another one is from meaning the same: |Omega' - Omega| / |Omega|, or how far its right side
        is from orthonormal columns. Their shapes are the same.
        """
        # |A'U'ᵀ - AUᵀ| without d_F x d products: what lies in the columns of U', which are orthonormal or
        # refused, and what does not.
        skew = float(np.linalg.norm(other.right.T @ other.right - np.eye(other.right.shape[1])))
        size = float(np.linalg.norm(self.left))
        turned = float(np.linalg.norm(other.left - self.left @ (self.right.T @ other.right)))
        outside = self.right.T - (self.right.T @ other.right) @ other.right.T
        missed = float(np.linalg.norm(np.linalg.qr(self.left, mode="r") @ outside))
        apart = float(np.hypot(turned, missed))
        return max(skew, apart / size if size > 0 else (np.inf if apart > 0 else 0.0))

    @cached_property
    def square(self) -> float:
        """|Omega|²"""
        return float((self.left**2).sum())

    def on(self, kernels: Kernels) -> Sandwich:
        """The same where these kernels compute."""
        return Sandwich(kernels.array(self.left), kernels.array(self.right))


Decomposition = tuple[Array, Array, Array]
"""U, s and Zᵀ of the thin SVD of a classifier."""


def sandwich_solve(
    hidden_gram: Array,
    residual: Array,
    weight: Array,
    ridge: float,
    decomposition: Decomposition | None = None,
) -> Sandwich:
    """Omega minimising |R - F Omega W|² + ridge |Omega|² (DeepAFL Eq. 7), in thin form.

    hidden_gram = FᵀF (d_F, d_F), residual = FᵀR (d_F, C), weight = W (d, C). With the thin SVD
    W = U S Zᵀ and FᵀF = V diag(l) Vᵀ:
        Omega = A Uᵀ,  A = V [(Vᵀ residual Z S) / (ridge + l ⊗ S²)],
    which is Eq. 8 without the d - C directions in which W vanishes. Eigenvalues are clamped at 0;
    at ridge 0 the directions with l S² below d_F·eps of the largest are dropped. Where there are few
    columns beside the width, each column of A is its own system, (ridge I + S_j² FᵀF) a_j, and is solved by
    Cholesky instead; a matrix that fails there falls back to its eigenvalues. decomposition: that of W,
    where it is known already.
    """
    kernels = kernels_of(hidden_gram)
    with kernels.threads(len(hidden_gram)):
        right, singular, z = kernels.thin_svd(weight) if decomposition is None else decomposition
        target = residual @ (z.T * singular)
        left = None
        if ridge > 0.0 and kernels.prefers_shifts(len(hidden_gram), len(singular)):
            left = kernels.shifted_solve(hidden_gram, singular**2, ridge, target)
        if left is None:
            left = _by_eigenvalues(hidden_gram, target, singular, ridge)
        return Sandwich(kernels.contiguous(left), kernels.contiguous(right))


def _by_eigenvalues(hidden_gram: Array, target: Array, singular: Array, ridge: float) -> Array:
    """A of every column at once, by the eigenvalues of FᵀF."""
    kernels = kernels_of(hidden_gram)
    values, vectors = kernels.eigh(hidden_gram)
    lowest = values[0]
    values = values.clip(min=0.0)
    curvature = values[:, None] * (singular**2)[None, :]
    usable = None
    if ridge == 0.0:
        floor = len(hidden_gram) * EPS * (float(curvature.max()) if len(singular) else 0.0)
        usable = curvature > floor

    def solve(wanted: Array) -> Array:
        inner = vectors.T @ wanted
        if usable is None:
            inner /= ridge + curvature
        else:
            inner = kernels.where(usable, inner / kernels.where(usable, curvature, 1.0), 0.0)
        return kernels.matmul(vectors, inner)

    left = solve(target)
    # One step of refinement: the stationarity residual of A itself, free of the rounding of V. It
    # converges only while what was clamped is much smaller than the ridge (not so for float32 sums).
    if ridge == 0.0 or max(0.0, -float(lowest)) * float(singular[0]) ** 2 <= 0.5 * ridge:
        left += solve(target - ridge * left - (hidden_gram @ left) * singular**2)
    return left
