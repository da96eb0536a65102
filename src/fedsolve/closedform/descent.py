"""Steps down a convex function whose value and slope come one exchange at a time.

Softmax regression, generalised linear models and Cox regression all take them; `towards` is their own.

    trial = weight - reach * towards      accepted where  f(trial) <= f - 1e-4 reach <slope, towards>

Where second derivatives are dear, L-BFGS about a preconditioner gives `towards` from gradients alone (Nocedal
and Wright, Numerical Optimization, Algorithm 7.4). M is a matrix that can be solved with, near the Hessian or
above it:

    H_0 = gamma M^-1,   gamma = sᵀy / yᵀM^-1 y   of the newest pair s (step), y (change of the gradient)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array

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


def curves_upwards(step: Array, change: Array) -> bool:
    """Whether a pair says something of a convex function, and not of rounding."""
    return inner(step, change) > 1e-14 * float(np.linalg.norm(step) * np.linalg.norm(change))


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
