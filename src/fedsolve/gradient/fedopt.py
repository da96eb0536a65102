"""FedOpt: the mean step of the clients as the gradient of an adaptive optimiser at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2. With D = mean of local models - W,

    m <- beta_1 m + (1 - beta_1) D
    adagrad   v <- v + D²
    yogi      v <- v - (1 - beta_2) D² sign(v - D²)
    adam      v <- beta_2 v + (1 - beta_2) D²
    W <- W + server_rate m / (sqrt(v) + adaptivity)

m begins at 0, v at adaptivity². Running statistics of BatchNorm are averaged.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.gradient.gradient_method import GradientMethod, ServerState, Total, Weights, parameter, register


@register(paper="Reddi et al., ICLR 2021")
class FedOpt(GradientMethod):
    """FedOpt: FedAdam, FedYogi and FedAdagrad, an adaptive optimiser at the server."""

    averages = False
    tensors_only = True

    server_optimiser: Literal["adam", "yogi", "adagrad"] = parameter("adam", "How squares are remembered.")
    server_rate: float = parameter(0.1, "Learning rate of the server (eta).", above=0)
    beta_1: float = parameter(0.9, "How much of the mean step is kept from before.", least=0, below=1)
    beta_2: float = parameter(0.99, "How much of the squares is kept; adam and yogi.", least=0, below=1)
    adaptivity: float = parameter(1e-3, "Added to the root of the squares (tau).", above=0)

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        steps = {name: mean[name] - weight for name, weight in server.weights.items()}
        first, squares = server.kept("first"), server.kept("squares", self.adaptivity**2)
        for name, step in steps.items():
            first[name] = self.beta_1 * first[name] + (1 - self.beta_1) * step
            before, new = squares[name], step**2
            if self.server_optimiser == "adagrad":
                squares[name] = before + new
            elif self.server_optimiser == "yogi":
                squares[name] = before - (1 - self.beta_2) * new * np.sign(before - new)
            else:
                squares[name] = self.beta_2 * before + (1 - self.beta_2) * new
            moved = first[name] / (np.sqrt(squares[name]) + self.adaptivity)
            server.weights[name] = server.weights[name] + self.server_rate * moved
        server.keep("first", first)
        server.keep("squares", squares)
