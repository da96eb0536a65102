"""Means of local models under Kronecker-factored curvature: a linear system for every layer.

Minimising sum_k p_k tr((M - M_k)ᵀ B_k (M - M_k) A_k) over M (out, in) gives

    sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k

The left side is symmetric and positive semi-definite in M. A layer in groups has a leading axis everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsolve.arrays import Array

TOLERANCE = 1e-12
ITERATIONS = 2000


@dataclass(frozen=True)
class Solution:
    """A matrix, its residual relative to the right side, and the steps taken."""

    matrix: Array
    residual: float
    iterations: int


def solve(
    lefts: Sequence[Array],
    rights: Sequence[Array],
    shares: Sequence[float],
    target: Array,
    start: Array,
    floor: float = 0.0,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Solution:
    """M with sum_k p_k B_k M A_k + floor (M - start) = target, by preconditioned conjugate gradients.

    lefts (out, out), rights (in, in), shares p_k sum to 1; target and start (out, in), all float64.
    Directions without curvature at any client keep their start; floor > 0 pulls those with little there too.
    The preconditioner is the same operator with the mean factors in place of the sum, through their
    eigenvalues: exact when all clients' factors agree.
    """
    mean_left = sum(p * left for p, left in zip(shares, lefts, strict=True))
    mean_right = sum(p * right for p, right in zip(shares, rights, strict=True))
    left_values, left_vectors = _spectrum(np.asarray(mean_left))
    right_values, right_vectors = _spectrum(np.asarray(mean_right))
    curvature = left_values[..., :, None] * right_values[..., None, :] + floor
    # Where no client has curvature the residual is rounding, which must not become a direction.
    inverse = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=curvature > 0)

    def operator(matrix: Array) -> Array:
        applied = floor * matrix
        for p, left, right in zip(shares, lefts, rights, strict=True):
            applied += p * (left @ matrix @ right)
        return applied

    def preconditioned(residual: Array) -> Array:
        inner = np.swapaxes(left_vectors, -1, -2) @ residual @ right_vectors * inverse
        return np.asarray(left_vectors @ inner @ np.swapaxes(right_vectors, -1, -2))

    # In terms of the distance from the start, so that a start that solves the system stays untouched.
    step = np.zeros_like(start)
    residual = target - operator(start) + floor * start
    size = float(np.linalg.norm(target))
    limit = tolerance * size
    best, best_norm = step.copy(), float(np.linalg.norm(residual))
    direction = preconditioned(residual)
    product = float(np.vdot(residual, direction))
    taken = 0
    while best_norm > limit and taken < iterations and product > 0:
        image = operator(direction)
        curved = float(np.vdot(direction, image))
        if curved <= 0:
            break
        length = product / curved
        step += length * direction
        residual -= length * image
        taken += 1
        norm = float(np.linalg.norm(residual))
        if norm < best_norm:
            best, best_norm = step.copy(), norm
        following = preconditioned(residual)
        before, product = product, float(np.vdot(residual, following))
        direction = following + (product / before) * direction
    matrix = start + best
    left_over = float(np.linalg.norm(target - operator(matrix) + floor * start))
    return Solution(matrix, left_over / size if size > 0 else left_over, taken)


def _spectrum(factor: Array) -> tuple[Array, Array]:
    """Eigenvalues, zero where they are rounding, and eigenvectors of a positive semi-definite matrix."""
    values, vectors = np.linalg.eigh(factor)
    least = factor.shape[-1] * np.finfo(np.float64).eps * values[..., -1:]
    return np.where(values > least, values, 0.0), vectors
