"""The curvature of softmax regression: Boehning's bound, which all classes share, or the Hessian itself.

Weights are (width + 1, columns) with the intercepts in the last row. A shared curvature is a matrix of that
height; an exact one has a block for every pair of columns, column after column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import eigh

from fedsolve.arrays import Array
from fedsolve.backends import kernels_on
from fedsolve.closedform.descent import inner
from fedsolve.errors import DataError

FLAT = 1e-8
"""So little is left of a curvature where all that counts has a probability below 1e-8."""


@dataclass(frozen=True)
class Curvature:
    """A positive definite matrix that measures steps; solved with once factorised.

    exact: whether it has a block for every pair of columns. device: where it is factorised and solved with.
    """

    matrix: Array
    exact: bool
    device: str = "cpu"

    @cached_property
    def _factor(self) -> Any:
        here = kernels_on(self.device)
        factor = here.cholesky(here.array(self.matrix), least=np.inf)
        if factor is None:
            raise DataError(
                "the curvature of the loss is singular to working precision: columns depend on each other, "
                "or classes can be separated. Raise the ridge."
            )
        return factor

    def solve(self, columns: Array) -> Array:
        """M^-1 columns"""
        side = columns.T.reshape(-1, 1) if self.exact else columns
        here = kernels_on(self.device)
        found = here.host(here.cholesky_solve(self._factor, here.array(side)))
        return np.ascontiguousarray(found.reshape(columns.T.shape).T if self.exact else found)

    def length(self, columns: Array) -> float:
        """The length of a step by this matrix."""
        side = columns.T.reshape(-1, 1) if self.exact else columns
        return float(np.sqrt(max(inner(side, self.matrix @ side), 0.0)))

    def dual_length(self, gradient: Array) -> float:
        """The length of M^-1 gradient by this matrix."""
        return float(np.sqrt(max(inner(gradient, self.solve(gradient)), 0.0)))


def flattest(last: Array, first: Array) -> tuple[float, Array]:
    """The least share that is left of a curvature in any direction, and that direction.

    Where next to nothing is, a coefficient grows without end: the likelihood has no maximum.
    """
    share, directions = eigh(last, first, subset_by_index=[0, 0])
    return float(share[0]), np.asarray(directions[:, 0])


def bordered(gram: Array, weight: float) -> Array:
    """The Gram matrix of [x, 1], of rows counted from their mean, from that of x and the sum of weights."""
    whole = np.zeros((len(gram) + 1, len(gram) + 1))
    whole[:-1, :-1], whole[-1, -1] = gram, weight
    return whole


def at_zero(whole: Array, columns: int) -> Array:
    """The Hessian at W = 0, where all classes are as likely, of the Gram matrix of [x, 1]."""
    if columns == 1:
        return 0.25 * whole
    return np.asarray(np.kron(np.eye(columns) / columns - 1.0 / columns**2, whole))


def penalised(matrix: Array, width: int, ridge: float, intercept: bool) -> Array:
    """matrix + ridge I on weights; without an intercept its rows say nothing and keep it where it is."""
    whole = matrix.copy()
    last = np.arange(width, len(whole), width + 1)
    penalty = np.full(len(whole), ridge)
    penalty[last] = 0.0
    if not intercept:
        whole[last], whole[:, last] = 0.0, 0.0
        penalty[last] = 1.0
    whole.flat[:: len(whole) + 1] += penalty
    return whole


def anchored(hessian: Array, whole: Array, columns: int) -> Array:
    """The Hessian with curvature in the one direction of which the loss knows nothing.

    Adding the same vector to every column changes no probability. Gradients have no part in that direction,
    so any curvature will do there; this one has the size of the bound.
    """
    if columns == 1:
        return hessian
    return hessian + np.kron(np.full((columns, columns), 0.5 / columns), whole)


def hessian_block(features: Array, probabilities: Array) -> tuple[list[Array], Array]:
    """What the Hessian of all classes is made of, for rows [x, 1] times the roots of their weights.

        sum_i (diag(p_i) - p_i p_iᵀ) ⊗ x_i x_iᵀ

    The first part: rows times the root of each class's probability, whose Gram matrices stand on the
    diagonal. The second: rows p ⊗ x, whose Gram matrix is taken off.
    """
    roots = probabilities**0.5
    diagonal = [features * roots[:, [column]] for column in range(roots.shape[1])]
    crossed = (probabilities[:, :, None] * features[:, None, :]).reshape(
        len(features), probabilities.shape[1] * features.shape[1]
    )
    return diagonal, crossed
