"""What one-shot methods with Kronecker-factored curvature share: terms of the layers, and their solution.

Minimising sum_k p_k tr((M - M_k)ᵀ B_k (M - M_k) A_k) over M (out, in) gives a linear system for every layer:

    sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k

The left side is symmetric and positive semi-definite in M. A layer in groups has a leading axis everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import ConditionWarning
from fedsolve.gradient import kfac
from fedsolve.gradient.gradient_method import Term, Total
from fedsolve.gradient.server_state import ServerState, Weights, trained, weight_of

if TYPE_CHECKING:
    from fedsolve.gradient.group import ClientGroup

TOLERANCE = {"float32": 1e-7, "float64": 1e-12}
"""Relative residual at which a layer counts as solved: about what its weights can hold."""
ACCEPTED = 100.0
"""A residual above so many tolerances is reported."""
ITERATIONS = 2000


def contribute_curvature(
    group: ClientGroup, client: int, term: Term, losses: kfac.Losses, damping: float
) -> None:
    """Add to a client's term B_k and A_k of every layer under its name, and p_k B_k M_k A_k as an addend.

    Of convolutions they are B T and A / T (T output positions), each with `damping` on its diagonal.
    """
    name = group.clients[client]
    network = group.whole(client)
    layers = kfac.factored_layers(network, group.names)
    factors = kfac.factors(network, layers, group.rows.of(client, group.method.batch), losses)
    weight = float(term.arrays["weight"][0])
    term.arrays[f"weight@{name}"] = term.arrays["weight"]
    weights = {n: value.double().cpu().numpy() for n, value in group.weights_of(client).items()}
    for layer, plain in factors.items():
        # The same curvature, as K-FAC code with inputs divided by T splits it.
        right, left = plain.right / plain.positions, plain.left * plain.positions
        right, left = (factor + damping * np.eye(factor.shape[-1]) for factor in (right, left))
        module = layers[layer]
        matrix = kfac.as_matrix(module, [weights[n] for n in kfac.weight_names(layer, module)])
        term.arrays[f"target.{layer}"] = left @ matrix @ right
        term.factors[f"target.{layer}"] = weight
        for part, factor in (("right", right), ("left", left)):
            term.arrays[f"{part}.{layer}@{name}"] = factor
            if factor.ndim == 2:
                term.symmetric |= {f"{part}.{layer}@{name}"}


def solve_layers(server: ServerState, mean: Weights, total: Total, floor: float = 0.0) -> Weights:
    """The weights with every factored layer solved for, starting from the mean; the others as in the mean."""
    clients = trained(total)
    weights = np.array([weight_of(total, client) for client in clients])
    method, spec = server.method, server.spec
    network = method.build(spec.features, spec.outputs)
    solved = dict(mean)
    residuals = {}
    for layer, module in kfac.factored_layers(network, list(mean)).items():
        if f"target.{layer}" not in total.term.arrays:
            continue
        names = kfac.weight_names(layer, module)
        solution = solve(
            [total[f"left.{layer}@{client}"] for client in clients],
            [total[f"right.{layer}@{client}"] for client in clients],
            list(weights / weights.sum()),
            total[f"target.{layer}"] / weights.sum(),
            kfac.as_matrix(module, [mean[name] for name in names]),
            floor,
            TOLERANCE[method.precision],
        )
        solved |= dict(zip(names, kfac.from_matrix(module, solution.matrix), strict=True))
        residuals[layer] = solution.residual
        if solution.residual > ACCEPTED * TOLERANCE[method.precision]:
            warnings.warn(
                f"layer '{layer}': after {solution.iterations} steps of conjugate gradients the residual is "
                f"{solution.residual:.1e} of the right side; more damping would help.",
                ConditionWarning,
                stacklevel=2,
            )
    server.note["residuals"] = residuals
    return solved


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
    tolerance: float = TOLERANCE["float64"],
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
    while best_norm > limit and taken < ITERATIONS and product > 0:
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
