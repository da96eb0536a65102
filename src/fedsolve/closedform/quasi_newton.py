"""Directions of descent from gradients alone: L-BFGS about a preconditioner, as pure functions of arrays.

    H_0 = gamma M^-1,   gamma = sᵀy / yᵀM^-1 y   of the newest pair s (step), y (change of the gradient)

M is a matrix that can be solved with, near the Hessian or above it. Nocedal and Wright, Numerical
Optimization, Algorithm 7.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedsolve.container import Array

Solve = Callable[[Array], Array]


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
