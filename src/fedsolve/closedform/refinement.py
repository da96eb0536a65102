"""A ridge regression on one client's rows, in the smaller of two forms; more rows can be added later.

    P = (ΨᵀΨ + ridge I)^-1 ΨᵀE          tall: sums of width x width
      = Ψᵀ (ΨΨᵀ + ridge I)^-1 E          short: the rows themselves, while there are no more rows than columns

The sums stay with the rows and are never sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, eigh, solve_triangular
from scipy.linalg.lapack import dpocon

from fedsolve.arrays import Array
from fedsolve.backends.blas import add_gram, cholesky_factor
from fedsolve.closedform.solvers import EPS, ridge_solve
from fedsolve.threads import blas_threads

_CERTAIN = 1e-9
"""How far the leverage h of a row must stay below 1 in the tall form for the other rows to predict it."""


class RidgeSums:
    """What the regression needs of the rows so far: Ψ (rows, width) and E (rows, outputs), or their sums."""

    def __init__(self, width: int, outputs: int) -> None:
        self.width = width
        self.outputs = outputs
        self._held = {"features": np.empty((0, width)), "residuals": np.empty((0, outputs))}

    @property
    def short(self) -> bool:
        """Whether the rows themselves are kept, because there are no more of them than columns."""
        return "features" in self._held

    def add(self, features: Array, residuals: Array) -> None:
        """Add rows of Ψ and E, each multiplied by the square root of its weight."""
        held = self._held
        if self.short:
            more = {"features": features, "residuals": residuals}
            if len(held["features"]) + len(features) <= self.width:
                self._held = {name: np.concatenate([held[name], more[name]]) for name in held}
                return
            square, cross = (self.width, self.width), (self.width, self.outputs)
            self._held = {"gram": np.zeros(square), "cross": np.zeros(cross)}
            self.add(**held)
        if len(features):
            add_gram(np.ascontiguousarray(features), self._held["gram"])
            self._held["cross"] += features.T @ residuals

    def solve(self, ridge: float) -> RidgeSolution:
        """P, with what leave-one-out needs from the system that it solves."""
        # There are many clients with small systems: threads would cost more than they gain.
        with blas_threads(1):
            if not self.short:
                gram, cross = self._held["gram"], self._held["cross"]
                gram = gram + np.triu(gram, 1).T
            else:
                features, residuals = self._held["features"], self._held["residuals"]
                if not len(features):
                    return RidgeSolution(np.zeros((self.width, self.outputs)), ridge, None)
                factor = _cholesky(_plus(features @ features.T, ridge)) if ridge > 0 else None
                if factor is not None:
                    weight = features.T @ cho_solve((factor, True), residuals, check_finite=False)
                    return RidgeSolution(np.ascontiguousarray(weight), ridge, None)
                # Repeated rows with a ridge that is zero or lost in rounding: the tall form warns about it.
                gram, cross = features.T @ features, features.T @ residuals
            return RidgeSolution(ridge_solve(gram, cross, ridge), ridge, _plus(gram, ridge))

    def path(self) -> RidgePath:
        """What leave-one-out needs under many ridges, from one eigendecomposition."""
        return RidgePath(None if self.short else (self._held["gram"], self._held["cross"]))

    def size(self) -> float:
        """The trace of ΨᵀΨ: the sum of the rows' squared lengths, weighted."""
        held = self._held
        return float(np.sum(held["features"] ** 2) if self.short else np.trace(held["gram"]))

    def arrays(self) -> dict[str, Array]:
        """Copies of the sums by name, for a file that stays with the client."""
        return {name: array.copy() for name, array in self._held.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> RidgeSums:
        """The sums of `arrays`."""
        names = ("features", "residuals") if "features" in arrays else ("gram", "cross")
        held = {name: arrays[name] for name in names}
        width, outputs = (array.shape[1] for array in held.values())
        sums = cls(width, outputs)
        sums._held = held
        return sums


@dataclass
class RidgeSolution:
    """P (width, outputs), and what refits without single rows would predict for them.

    system: ΨᵀΨ + ridge I in the tall form; None in the short form, which needs only the rows.
    """

    weight: Array
    ridge: float
    system: Array | None

    @property
    def short(self) -> bool:
        return self.system is None

    def left_out(self, features: Array, residuals: Array, roots: Array) -> Array:
        """f (rows, outputs): what a fit to all other rows would predict for each of these, without refitting.

        features: Ψ and residuals: E of rows that P was fitted to: all of them, in any order, in the short
        form; any of them in the tall form. roots: square roots of the rows' weights w > 0, by which the rows
        were multiplied in the sums.

            tall     f_i = e_i - (e_i - ψ_i P) / (1 - h_i)         h_i = w_i ψ_iᵀ (ΨᵀΨ + ridge I)^-1 ψ_i
            short    f_i = e_i - α_i / (C_ii √w_i)                 C = (ΨΨᵀ + ridge I)^-1,  α = C E

        Both are equal, because 1 - h = ridge C_ii and √w (e - ψP) = ridge α. A few rows of many columns are
        nearly interpolated: the first formula would then divide differences that are lost in rounding, and
        the second never forms them. Rows that determine their own fit (h = 1) get 0: there is no prediction.
        """
        scale = roots[:, None]
        weighted = features * scale
        with blas_threads(1):
            if not self.short:
                free = 1.0 - np.sum(self._whitened(weighted.T) ** 2, axis=0)[:, None]
                return _predicted(residuals, residuals - features @ self.weight, free)
            factor = _cholesky(_plus(weighted @ weighted.T, self.ridge)) if len(features) else None
            if factor is None:
                return np.zeros_like(residuals)
            alpha = cho_solve((factor, True), residuals * scale, check_finite=False)
            root = solve_triangular(factor, np.eye(len(factor)), lower=True, check_finite=False)
            return np.asarray(residuals - alpha / (np.sum(root**2, axis=0)[:, None] * scale))

    def _whitened(self, columns: Array) -> Array:
        """Columns whose squares sum to ψᵀ (ΨᵀΨ + ridge I)^-1 ψ."""
        triangular, root = self._root
        if triangular:
            return np.asarray(solve_triangular(root, columns, lower=True, check_finite=False))
        return np.asarray(root.T @ columns)

    @cached_property
    def _root(self) -> tuple[bool, Array]:
        """The Cholesky factor of the system; where it has none, R with R Rᵀ its pseudo-inverse."""
        assert self.system is not None
        factor = _cholesky(self.system)
        return (True, factor) if factor is not None else (False, _determined(self.system))


class RidgePath:
    """What refits without single rows would predict for them, under any number of ridges.

        tall     ΨᵀΨ = V diag(s) Vᵀ       (ΨᵀΨ + ridge I)^-1 = V diag(1 / (s + ridge)) Vᵀ
        short    ΨΨᵀ = U diag(s) Uᵀ       (ΨΨᵀ + ridge I)^-1 = U diag(1 / (s + ridge)) Uᵀ

    in the formulas of `RidgeSolution.left_out`: after one eigendecomposition, each ridge costs rows *
    min(rows, width). Every eigenvalue carries the rounding error of the largest, so ridges must be well above
    that error.

    sums: upper triangle of ΨᵀΨ, and ΨᵀE, in the tall form; None in the short form, which needs only the rows.
    """

    def __init__(self, sums: tuple[Array, Array] | None) -> None:
        self.short = sums is None
        if sums is not None:
            gram, cross = sums
            with blas_threads(1):
                self._values, self._vectors = _spectrum(gram, lower=False)
                self._cross = self._vectors.T @ cross

    def left_out(
        self, ridges: Iterable[float], features: Array, residuals: Array, roots: Array
    ) -> Iterator[Array]:
        """f (rows, outputs) under each ridge; the other arguments are those of `RidgeSolution.left_out`."""
        scale = roots[:, None]
        if self.short:
            weighted = features * scale
            with blas_threads(1):
                values, turned = _spectrum(weighted @ weighted.T, lower=True)
                cross = turned.T @ (residuals * scale)
        else:
            values, cross = self._values, self._cross
            with blas_threads(1):
                turned = features @ self._vectors
        squared = turned**2
        for ridge in ridges:
            shrunk = 1.0 / (values + ridge)
            with blas_threads(1):
                leverage = (squared @ shrunk)[:, None]
                fitted = turned @ (shrunk[:, None] * cross)
            if self.short:
                yield residuals - fitted / (leverage * scale)
            else:
                yield _predicted(residuals, residuals - fitted, 1.0 - leverage * scale**2)


def _predicted(residuals: Array, errors: Array, free: Array) -> Array:
    """e - error / (1 - h), and 0 for rows that determine their own fit."""
    wrong = np.divide(errors, free, out=np.array(residuals), where=free > _CERTAIN)
    return np.asarray(residuals - wrong)


def _spectrum(system: Array, lower: bool) -> tuple[Array, Array]:
    """Eigenvalues, clamped at zero, and eigenvectors of a symmetric matrix stored in one triangle."""
    values, vectors = eigh(system, lower=lower, driver="evd", check_finite=False)
    return np.maximum(values, 0.0), vectors


def _plus(system: Array, ridge: float) -> Array:
    """system + ridge I, in place."""
    system.flat[:: len(system) + 1] += ridge
    return system


def _determined(system: Array) -> Array:
    """R with R Rᵀ the pseudo-inverse that the minimum-norm solution of `ridge_solve` uses."""
    values, vectors = eigh(system, driver="evd", check_finite=False)
    keep = values > len(system) * EPS * max(float(values[-1]), 0.0)
    return np.asarray(vectors[:, keep] / np.sqrt(values[keep]))


def _cholesky(system: Array) -> Array | None:
    """The lower factor, or None where the system is singular to working precision, as in `ridge_solve`."""
    norm = float(np.max(np.sum(np.abs(system), axis=0), initial=0.0))
    try:
        factor: Array = cholesky_factor(system, lower=True)[0]
    except LinAlgError:
        return None
    return factor if float(dpocon(factor, norm, uplo="L")[0]) >= len(factor) * EPS else None
