"""FedACG: clients start from a look-ahead model and are pulled towards it.

Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024.

    sent      W' = W + lookahead * m
    client    L = CE + (proximal/2) |w - W'|²
    server    m <- lookahead * m + mean_i (w_i - W'),   W <- W + m

Together the server's two lines give W <- mean_i w_i, with m the latest step of W. The model is W, not W'.
"""

from __future__ import annotations

from typing import Literal

from fedsolve.federation.messages import Total
from fedsolve.gradient.fedprox import pull
from fedsolve.gradient.gradient_method import GradientMethod, ServerState, Step, Weights, parameter, register


@register(paper="Kim et al., CVPR 2024", up="weights and 1")
class FedACG(GradientMethod):
    """FedACG: a look-ahead model is sent, and local training is pulled towards it.

    The authors' code has a pull of 0.001 without the factor 1/2.
    """

    tensors_only = True

    weighting: Literal["size", "uniform"] = parameter(
        "uniform", "Whether clients count by their rows or all alike, as in the authors' code."
    )
    lookahead: float = parameter(
        0.85, "Share of the newest step taken in advance (lambda); 1 would never fade.", least=0, below=1
    )
    proximal: float = parameter(0.002, "Strength of the pull (beta) with the factor 1/2.", least=0)

    def edit(self, step: Step) -> None:
        pull(step, self.proximal)

    def outgoing(self, server: ServerState) -> Weights:
        momentum = server.kept("momentum")
        return {name: array + self.lookahead * momentum[name] for name, array in server.weights.items()}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        server.keep("momentum", {name: mean[name] - array for name, array in server.weights.items()})
        server.weights = mean
