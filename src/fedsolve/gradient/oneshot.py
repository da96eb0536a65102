"""What one-shot methods with Kronecker-factored curvature share: terms of the layers, and their solution."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import ConditionWarning
from fedsolve.gradient import kfac, kronecker
from fedsolve.gradient.gradient_method import Term, Total
from fedsolve.gradient.server_state import ServerState, Weights, trained, weight_of

if TYPE_CHECKING:
    from fedsolve.gradient.group import ClientGroup

TOLERANCE = {"float32": 1e-7, "float64": 1e-12}
"""Relative residual at which a layer counts as solved: about what its weights can hold."""
ACCEPTED = 100.0
"""A residual above so many tolerances is reported."""


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
        right = _damped(plain.right / plain.positions, damping)
        left = _damped(plain.left * plain.positions, damping)
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
        solution = kronecker.solve(
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


def _damped(factor: Array, damping: float) -> Array:
    return factor + damping * np.eye(factor.shape[-1])
