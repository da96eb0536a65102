"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, 2019. With D = mean of the local models - W and beta = server_momentum,
three forms go by this name:

    classic    v <- beta v + D             W <- W + v             (the paper's)
    nesterov   v <- beta v + D             W <- W + D + beta v
    damped     v <- beta v + (1 - beta) D  W <- W + v

D is multiplied by server_step. Under a constant D the classic form moves 1 / (1 - beta) times as far as the
damped one. Momentum covers weights only, unless `server_statistics`: FLFA's authors move BatchNorm's running
statistics too. A running variance that becomes negative ends the run.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.errors import DivergenceError
from fedsolve.gradient.gradient_method import GradientMethod, ServerState, Total, Weights, parameter, register


@register(paper="Hsu et al., arXiv 1909.06335, 2019")
class FedAvgM(GradientMethod):
    """FedAvgM: FedAvg with momentum at the server."""

    averages = True
    tensors_only = True

    server_momentum: float = parameter(
        0.9, "Momentum of the server (beta); 0 is FedAvg, 1 would never fade.", least=0, below=1
    )
    server_form: Literal["classic", "nesterov", "damped"] = parameter(
        "classic", "Momentum as in the paper (classic), Nesterov's, or with steps damped by 1 - beta."
    )

    server_statistics: bool = parameter(False, "Momentum moves running statistics of BatchNorm too.")

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        server.weights = self._moved(server, "velocity", server.weights, self.stepped(server, mean))

    def statistics(self, server: ServerState, mean: Weights) -> Weights:
        if not self.server_statistics:
            return mean
        moved = self._moved(server, "statistics", server.buffers, mean)
        for name, values in moved.items():
            if name.endswith("running_var") and values.min() < 0:
                raise DivergenceError(
                    f"round {server.round}: momentum made the running variance {name} negative "
                    f"({values.min():.3g}). Lower server_momentum, or leave out server_statistics."
                )
        return moved

    def _moved(self, server: ServerState, prefix: str, now: Weights, mean: Weights) -> Weights:
        """W + v of these arrays, with the velocities that the server keeps under `prefix`."""
        beta = self.server_momentum
        if beta == 0:
            return mean
        before = {name: server.memory.get(f"{prefix}.{name}", np.zeros_like(mean[name])) for name in mean}
        share = 1 - beta if self.server_form == "damped" else 1.0
        after = {name: beta * before[name] + share * (mean[name] - now[name]) for name in mean}
        # The steps of the head written from the mean: W + D is the mean itself, without its rounding.
        if self.server_form == "classic":
            ahead = before
        elif self.server_form == "nesterov":
            ahead = after
        else:
            ahead = {name: before[name] - (mean[name] - now[name]) for name in mean}
        server.keep(prefix, after)
        return {name: mean[name] + beta * ahead[name] for name in mean}
