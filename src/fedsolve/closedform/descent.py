"""Steps down a convex function whose value and slope come one exchange at a time, and what measures them.

Softmax regression, generalised linear models and Cox regression all take them; `towards` is their own.

    trial = weight - reach * towards      accepted where  f(trial) <= f - 1e-4 reach <slope, towards>

Where second derivatives are dear, L-BFGS about a preconditioner gives `towards` from gradients alone (Nocedal
and Wright, Numerical Optimization, Algorithm 7.4). M is a matrix that can be solved with, near the Hessian or
above it:

    H_0 = gamma M^-1,   gamma = sᵀy / yᵀM^-1 y   of the newest pair s (step), y (change of the gradient)

Of softmax regression M is Boehning's bound, which all classes share, or the Hessian itself. Weights are
(width + 1, columns) with the intercepts in the last row. A shared curvature is a matrix of that height; an
exact one has a block for every pair of columns, column after column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.linalg import eigh

from fedsolve.arrays import Array
from fedsolve.backends import kernels_on
from fedsolve.errors import DataError

Solve = Callable[[Array], Array]

Turn = Callable[[Array, Array], None]
"""Of the step that was taken and the change of the slope, finds the next direction."""


def direction(gradient: Array, steps: Sequence[Array], changes: Sequence[Array], solve: Solve) -> Array:
    """H gradient, to be subtracted: the inverse Hessian as the pairs (oldest first) and M describe it."""
    left = gradient.copy()
    shares = []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        share = inner(step, left) / inner(step, change)
        left -= share * change
        shares.append(share)
    found = solve(left)
    if steps:
        found *= inner(steps[-1], changes[-1]) / inner(changes[-1], solve(changes[-1]))
    for step, change, share in zip(steps, changes, reversed(shares), strict=True):
        found += (share - inner(change, found) / inner(step, change)) * step
    return found


def inner(left: Array, right: Array) -> float:
    """The sum of products, of arrays of any shape."""
    return float(np.vdot(left, right))


_MOST_HALVINGS = 30
_ENOUGH = 1e-4
_ROUNDING = 1e-12


class Descent:
    """Asks for value and slope at the trial point of a line search.

    weight: the best point so far; loss and gradient belong to it. halvings: of this step; gradients: asked
    for in all.
    """

    def __init__(self) -> None:
        self.weight = self.gradient = self.towards = np.zeros((0, 0))
        self.loss = np.inf
        self.reach = 1.0
        self.halvings = 0
        self.gradients = 0

    def trial(self) -> Array:
        """The point that is asked about next."""
        return self.weight - self.reach * self.towards

    def step_length(self) -> float:
        """How long the next step is."""
        raise NotImplementedError

    def descend(
        self, loss: float, slope: Array, goal: float, steps: int, turn: Turn
    ) -> tuple[Literal["", "near", "stuck", "spent"], dict[str, Any]]:
        """Move to the trial point where it is low enough, and `turn`; else halve the way to it.

        Why the descent ends: the next step is at most `goal` long (near), no step goes down, however short,
        so that rounding is all that is left (stuck), or `steps` were taken (spent). And what a record of the
        exchange says of it.
        """
        step, change = self.trial() - self.weight, slope - self.gradient
        self.gradients += 1
        promised = self.loss - _ENOUGH * self.reach * inner(self.gradient, self.towards)
        if accepted := bool(loss <= promised + _ROUNDING * abs(self.loss)):
            self.weight, self.loss, self.gradient = self.trial(), loss, slope
            self.reach, self.halvings = 1.0, 0
            turn(step, change)
        else:
            self.reach *= 0.5
            self.halvings += 1
        length = self.step_length()
        told = {"risk": self.loss, "metrics": {"loss": loss, "step_length": length}}
        if accepted and length <= goal:
            return "near", told
        spent = self.gradients >= steps
        return ("stuck" if self.halvings > _MOST_HALVINGS else "spent" if spent else ""), told


# -- what steps are measured by --------------------------------------------------------------------

FLAT = 1e-8
"""The share of curvature below which every row that counts has a probability of almost 0 or 1."""


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

    def step_length(self, gradient: Array, weight: Array) -> float:
        """|M^-1 gradient| as a share of |weight|, both measured by M."""
        side = weight.T.reshape(-1, 1) if self.exact else weight
        squares = inner(gradient, self.solve(gradient)), inner(side, self.matrix @ side)
        step, size = (float(np.sqrt(max(square, 0.0))) for square in squares)
        return step / size if size > 0 else float(step > 0)


def flattest(last: Array, first: Array) -> float:
    """The least share that is left of a curvature in any direction.

    Where the share is almost 0, a coefficient grows without end: the likelihood has no maximum.
    """
    return float(eigh(last, first, eigvals_only=True, subset_by_index=[0, 0])[0])


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
    """The Hessian, with curvature added in the one direction that does not change the loss.

    Adding the same vector to every column changes no probability. Gradients are zero in that direction, so
    any curvature will do; this one has the size of the bound.
    """
    if columns == 1:
        return hessian
    return hessian + np.kron(np.full((columns, columns), 0.5 / columns), whole)
