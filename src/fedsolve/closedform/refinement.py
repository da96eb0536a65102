"""A ridge over one client's rows, in whichever of two forms is smaller, that can take more rows later.

    P = (ΨᵀΨ + ridge I)^-1 ΨᵀE          tall: sums of width x width
      = Ψᵀ (ΨΨᵀ + ridge I)^-1 E          short: the rows themselves, while there are fewer than columns

The sums stay where the rows are: they are no term of anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, solve_triangular

from fedsolve.closedform.blas import add_gram
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.container import Array
from fedsolve.threads import blas_threads


class RidgeSums:
    """What a ridge needs of the rows seen so far: Ψ (rows, width) and E (rows, outputs), or their sums."""

    def __init__(self, width: int, outputs: int) -> None:
        self.width = width
        self.outputs = outputs
        self._features: Array | None = np.empty((0, width))
        self._residuals = np.empty((0, outputs))
        self._gram = np.empty((0, 0))
        self._cross = np.empty((0, 0))

    @property
    def short(self) -> bool:
        """Whether the rows themselves are kept, being fewer than columns."""
        return self._features is not None

    def add(self, features: Array, residuals: Array) -> None:
        """Take rows of Ψ and E, each times the square root of its weight."""
        if self._features is not None:
            if len(self._features) + len(features) < self.width:
                self._features = np.concatenate([self._features, features])
                self._residuals = np.concatenate([self._residuals, residuals])
                return
            held, self._features = (self._features, self._residuals), None
            self._gram = np.zeros((self.width, self.width))
            self._cross = np.zeros((self.width, self.outputs))
            self.add(*held)
        if not len(features):
            return
        add_gram(np.ascontiguousarray(features), self._gram)
        self._cross += features.T @ residuals

    def copy(self) -> RidgeSums:
        """The same sums, apart from these."""
        return RidgeSums.from_arrays(self.arrays())

    def solve(self, ridge: float) -> RidgeSolution:
        """P, and what leave-one-out needs of the system it was solved with."""
        # Clients are many and their systems small: threads would cost more than they bring.
        with blas_threads(1):
            return self._solve(ridge)

    def _solve(self, ridge: float) -> RidgeSolution:
        features = self._features
        if features is not None:
            if not len(features):
                return RidgeSolution(np.zeros((self.width, self.outputs)), ridge, None, features)
            system = _plus(features @ features.T, ridge)
            factor = _cholesky(system) if ridge > 0 else None
            if factor is not None:
                weight = features.T @ cho_solve((factor, True), self._residuals, check_finite=False)
                return RidgeSolution(np.ascontiguousarray(weight), ridge, factor, features)
            gram, cross = features.T @ features, features.T @ self._residuals
        else:
            gram, cross = self._gram + np.triu(self._gram, 1).T, self._cross
        return RidgeSolution(ridge_solve(gram, cross, ridge), ridge, _plus(gram, ridge), None)

    def arrays(self) -> dict[str, Array]:
        """The sums by name, for a file that stays with the client."""
        if self._features is not None:
            return {"features": self._features.copy(), "residuals": self._residuals.copy()}
        return {"gram": self._gram.copy(), "cross": self._cross.copy()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> RidgeSums:
        """The sums of `arrays`."""
        if "features" in arrays:
            sums = cls(arrays["features"].shape[1], arrays["residuals"].shape[1])
            sums._features, sums._residuals = arrays["features"], arrays["residuals"]
        else:
            sums = cls(*arrays["cross"].shape)
            sums._features = None
            sums._gram, sums._cross = arrays["gram"], arrays["cross"]
        return sums


class RidgeSolution:
    """P (width, outputs), with the system it solves: factored beside Ψ (short), or as it is (tall)."""

    def __init__(self, weight: Array, ridge: float, system: Array | None, features: Array | None) -> None:
        self.weight = weight
        self._ridge = ridge
        self._system = system
        self._features = features
        self._factored = False

    def leverage(self, rows: Array) -> Array:
        """h = ψᵀ (ΨᵀΨ + ridge I)^-1 ψ of every row: the diagonal of the hat matrix.

        From the short form as h = (|ψ|² - |L^-1 Ψψ|²) / ridge, with L Lᵀ = ΨΨᵀ + ridge I. Without a ridge,
        or with one lost in rounding, rows may determine their own fit, and all count as doing so: h = 1.
        """
        with blas_threads(1):
            if self._features is None and self._system is not None and not self._factored:
                # Only a balance that is to be chosen needs the factor, so it waits for the first question.
                self._system = _cholesky(self._system) if self._ridge > 0 else None
                self._factored = True
            return self._leverage(rows, self._system)

    def _leverage(self, rows: Array, factor: Array | None) -> Array:
        if factor is None:
            return np.ones(len(rows))
        if self._features is None:
            return _squares(solve_triangular(factor, rows.T, lower=True, check_finite=False))
        seen = solve_triangular(factor, self._features @ rows.T, lower=True, check_finite=False)
        return np.asarray((np.sum(rows**2, axis=1) - _squares(seen)) / self._ridge)


def _squares(columns: Array) -> Array:
    return np.asarray(np.sum(columns**2, axis=0))


def _plus(system: Array, ridge: float) -> Array:
    """system + ridge I, in place."""
    system.flat[:: len(system) + 1] += ridge
    return system


def _cholesky(system: Array) -> Array | None:
    """The lower factor, or None where the system is singular to working precision."""
    try:
        factor: Array = cho_factor(system, lower=True, check_finite=False)[0]
    except LinAlgError:
        return None
    return factor
