"""Closed-form solvers as pure functions of sums. Solve, never invert."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh, svd
from scipy.linalg.lapack import dpocon

from fedsolve.container import Array
from fedsolve.errors import ConditionWarning
from fedsolve.threads import blas_threads

ONE_THREAD_WIDTH = 2048
"""Systems up to this width are solved on one BLAS thread: more gain little on free cores, lose a factor
of ten on busy ones, and would make the last bits depend on the number of cores."""

EPS = float(np.finfo(np.float64).eps)


def _threads(width: int) -> AbstractContextManager[Any]:
    return blas_threads(1 if width <= ONE_THREAD_WIDTH else None)


def ridge_solve(gram: Array, cross: Array, ridge: float = 0.0) -> Array:
    """W minimising |Y - X W|² + ridge |W|², from gram = XᵀX (d, d) and cross = XᵀY (d, C).

    By Cholesky of gram + ridge I. When that fails, or its reciprocal condition number is below
    d·eps, eigenvalues below d·eps·max are dropped and the minimum-norm solution is taken; a
    `ConditionWarning` names the condition number.
    """
    with _threads(len(gram)):
        return _ridge_solve(gram, cross, ridge)


def regularised_risk(
    weight: Array, gram: Array, cross: Array, label_square: Array, ridge: float, penalty: float = 0.0
) -> float:
    """|Y - X W|² + ridge |W|² + penalty, from the sums gram = XᵀX, cross = XᵀY and the squares of Y."""
    fit = np.sum(weight * (gram @ weight - 2.0 * cross))
    return float(np.sum(label_square) + fit + (ridge * np.sum(weight**2) + penalty))


def _ridge_solve(gram: Array, cross: Array, ridge: float) -> Array:
    width = len(gram)
    system = gram.copy()
    system.flat[:: width + 1] += ridge
    norm = float(np.max(np.sum(np.abs(system), axis=0), initial=0.0))
    reciprocal = 0.0
    try:
        factor = cho_factor(system, lower=False, check_finite=False)
        reciprocal = float(dpocon(factor[0], norm)[0])
    except LinAlgError:
        pass
    if reciprocal >= width * EPS:
        return np.ascontiguousarray(cho_solve(factor, cross, check_finite=False))
    return _minimum_norm(system, cross, ridge)


def _minimum_norm(system: Array, cross: Array, ridge: float) -> Array:
    """The same solution through eigenvalues; directions the data do not determine get zero."""
    values, vectors = eigh(system, driver="evd", check_finite=False)
    largest = max(float(values[-1]), 0.0)
    keep = values > len(system) * EPS * largest
    smallest = float(np.min(np.abs(values)))
    condition = largest / smallest if smallest > 0 else np.inf
    warnings.warn(
        f"the system of width {len(system)} is singular to working precision (condition number "
        f"{condition:.1e}, rank {int(keep.sum())}); the minimum-norm solution is used. "
        f"A larger ridge (now {ridge:g}) avoids this.",
        ConditionWarning,
        stacklevel=5,
    )
    kept = vectors[:, keep]
    return np.ascontiguousarray(kept @ ((kept.T @ cross) / values[keep, None]))


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

    @property
    def square(self) -> float:
        """|Omega|²"""
        return float(np.sum(self.left**2))


def sandwich_solve(hidden_gram: Array, residual: Array, weight: Array, ridge: float) -> Sandwich:
    """Omega minimising |R - F Omega W|² + ridge |Omega|² (DeepAFL Eq. 7), in thin form.

    hidden_gram = FᵀF (d_F, d_F), residual = FᵀR (d_F, C), weight = W (d, C). With the thin SVD
    W = U S Zᵀ and FᵀF = V diag(l) Vᵀ:
        Omega = A Uᵀ,  A = V [(Vᵀ residual Z S) / (ridge + l ⊗ S²)],
    which is Eq. 8 without the d - C directions in which W vanishes. Eigenvalues are clamped at 0;
    at ridge 0 the directions with l S² below d_F·eps of the largest are dropped.
    """
    with _threads(len(hidden_gram)):
        return _sandwich_solve(hidden_gram, residual, weight, ridge)


def _sandwich_solve(hidden_gram: Array, residual: Array, weight: Array, ridge: float) -> Sandwich:
    right, singular, z = svd(weight, full_matrices=False, check_finite=False)
    values, vectors = eigh(hidden_gram, driver="evd", check_finite=False)
    below = max(0.0, -float(values[0]))
    values = np.maximum(values, 0.0)
    target = residual @ (z.T * singular)
    curvature = np.outer(values, singular**2)
    floor = len(hidden_gram) * EPS * float(curvature.max(initial=0.0))
    usable = curvature > floor if ridge == 0.0 else np.ones_like(curvature, dtype=bool)

    def solve(wanted: Array) -> Array:
        inner = vectors.T @ wanted
        np.divide(inner, ridge + curvature, out=inner, where=usable)
        inner[~usable] = 0.0
        return np.asarray(vectors @ inner)

    left = solve(target)
    # One step of refinement: the stationarity residual of A itself, free of the rounding of V. It
    # converges only while what was clamped is small beside the ridge (not so for float32 sums).
    if ridge == 0.0 or below * float(singular[0]) ** 2 <= 0.5 * ridge:
        left += solve(target - ridge * left - (hidden_gram @ left) * singular**2)
    return Sandwich(np.ascontiguousarray(left), np.ascontiguousarray(right))
