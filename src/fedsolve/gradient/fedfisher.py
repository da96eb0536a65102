"""FedFisher: one round; local models meet where their Fisher information says they should.

Jhunjhunwala, Wang, Joshi, "FedFisher: Leveraging Fisher Information for One-Shot Federated Learning",
AISTATS 2024.

    minimise over w   sum_i p_i (w - w_i)ᵀ F_i (w - w_i)

F_i is the Fisher information at w_i under the network's own prediction, not the true labels. With its
diagonal alone the solution is a closed form of two sums:

    w = sum_i p_i F_i w_i / sum_i p_i F_i,   and the mean where the denominator is below `floor`

With Kronecker factors (see `kfac`) it is FedLPA's linear system without damping, and factors are gathered.
That system is always singular: softmax ignores a common shift of all logits. So floor |w - mean|² joins the
objective: where there is curvature it changes next to nothing, and where there is none the mean stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedsolve.backends.torch_later import Tensor, nn, torch
from fedsolve.gradient import kfac
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Term, Total, parameter, register
from fedsolve.gradient.oneshot import contribute_curvature, solve_layers
from fedsolve.gradient.server_state import ServerState, Weights

_NUMBERS = 1 << 24
"""Gradients of single rows that are held at a time."""


@dataclass(frozen=True, kw_only=True)
class _Fisher(GradientMethod):
    """Parameters of both forms."""

    takes_weights = False
    one_shot = True

    rounds: int = 1
    epochs: int = 30
    rate: float = 0.01
    momentum: float = 0.9
    draws: int = parameter(
        0,
        "Labels drawn from the prediction for every row; 0 takes all classes with their probability.",
        least=0,
    )
    floor: float = parameter(1e-6, least=0)

    def labels(self, group: ClientGroup, client: int) -> kfac.Losses:
        return kfac.predicted_labels(self.draws, group.generator(client, "fisher"))


@register(
    paper="Jhunjhunwala, Wang, Joshi, AISTATS 2024",
    exchanges="1",
    up="rows * weights, rows * Fisher, rows * Fisher * weights, and rows",
)
class FedFisher(_Fisher):
    """FedFisher: one round, weights averaged by their Fisher information (diagonal)."""

    floor: float = parameter(1e-6, "Fisher information below which a weight is the mean's.")

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        network = group.whole(client)
        rows, labels = group.rows.of(client, self.batch), self.labels(group, client)
        if group.learners.stacked:
            fisher = kfac.diagonals(network, kfac.factored_layers(network, group.names), rows, labels)
        else:
            fisher = diagonal_fisher(network, group.names, rows, labels)
        weight = float(term.arrays["weight"][0])
        for name, value in group.weights_of(client).items():
            diagonal = fisher[name].cpu().numpy()
            term.arrays[f"fisher.{name}"] = diagonal
            term.arrays[f"product.{name}"] = diagonal * value.double().cpu().numpy()
            term.factors |= {f"fisher.{name}": weight, f"product.{name}": weight}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        weight = float(total["weight"][0])
        server.weights = dict(mean)
        for name in mean:
            if f"fisher.{name}" in total.term.arrays:
                fisher = total[f"fisher.{name}"] / weight
                known = (fisher >= self.floor) & (fisher > 0)
                product = total[f"product.{name}"] / weight
                server.weights[name] = np.divide(product, fisher, out=mean[name].copy(), where=known)


@register(
    key="fedfisher-kfac",
    paper="Jhunjhunwala, Wang, Joshi, AISTATS 2024",
    exchanges="1",
    up="rows * weights and rows; per layer two Fisher factors of each client and their right side",
)
class FedFisherKFAC(_Fisher):
    """FedFisher: one round, weights averaged by their Fisher information (Kronecker factors)."""

    gathers = True

    floor: float = parameter(
        1e-6,
        "Strength of the pull towards the mean. Deeper networks need more of it than the default, which only "
        "settles what has no curvature.",
    )

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        contribute_curvature(group, client, term, self.labels(group, client), damping=0.0)

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        server.weights = solve_layers(server, mean, total, self.floor)


def diagonal_fisher(
    network: nn.Module, names: list[str], batches: Iterator[kfac.Batch], losses: kfac.Losses
) -> dict[str, Tensor]:
    """The mean over rows of the squared gradients of any network, by weight name, in float64."""
    from torch.func import functional_call, grad, vmap

    rest = {name: parameter.detach() for name, parameter in network.named_parameters()}
    weights = {name: rest.pop(name) for name in names}
    rest |= dict(network.named_buffers())
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    numbers = sum(weight.numel() for weight in weights.values())
    together = max(1, _NUMBERS // numbers)

    def loss(weights: dict[str, Tensor], row: Tensor, slope: Tensor) -> Tensor:
        logits: Tensor = functional_call(network, {**weights, **rest}, (row[None],))
        return (logits[0] * slope).sum()

    squares = vmap(grad(loss), in_dims=(None, 0, 0))
    rows = 0
    for inputs, targets in batches:
        rows += len(targets)
        with torch.no_grad():
            logits = network(inputs)
        for loss_of_rows in losses(logits.requires_grad_(), targets):
            (slope,) = torch.autograd.grad(loss_of_rows.sum(), logits, retain_graph=True)
            for first in range(0, len(targets), together):
                part = slice(first, first + together)
                for name, gradient in squares(weights, inputs[part], slope[part]).items():
                    sums[name] += gradient.double().square_().sum(dim=0)
    return {name: value / max(1, rows) for name, value in sums.items()}
