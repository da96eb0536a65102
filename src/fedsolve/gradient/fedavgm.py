"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, 2019. With D = mean of the local models - W and beta = server_momentum,
three forms go by this name:

    classic    v <- beta v + D             W <- W + v             (the paper's)
    nesterov   v <- beta v + D             W <- W + D + beta v
    damped     v <- beta v + (1 - beta) D  W <- W + v

D is multiplied by server_step. Under a constant D the classic form moves 1 / (1 - beta) times as far as the
damped one. Momentum covers weights only: on a running variance it could make it negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedsolve.federation.messages import Total
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.server_state import ServerState, Weights
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register


@register(
    Info(
        key="fedavgm",
        title="FedAvgM: FedAvg with momentum at the server",
        paper="Hsu et al., arXiv 1909.06335, 2019",
        exchanges="rounds",
        up="rows * weights and rows",
        down="weights",
    )
)
@dataclass(frozen=True, kw_only=True)
class FedAvgM(GradientMethod):
    """Parameters of FedAvgM."""

    key: ClassVar[str] = "fedavgm"
    averages: ClassVar[bool] = True
    steady: ClassVar[bool] = True

    server_momentum: float = parameter(
        0.9,
        "Momentum of the server (beta); 0 is FedAvg, and at 1 the velocity would never fade.",
        least=0,
        below=1,
    )
    server_form: Literal["classic", "nesterov", "damped"] = parameter(
        "classic", "Momentum as in the paper (classic), Nesterov's, or with steps damped by 1 - beta."
    )

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        beta, mean = self.server_momentum, self.stepped(server, mean)
        if beta == 0:
            server.weights = mean
            return
        before = server.kept("velocity")
        share = 1 - beta if self.server_form == "damped" else 1.0
        after = {name: beta * before[name] + share * (mean[name] - server.weights[name]) for name in mean}
        # The steps of the head written from the mean: W + D is the mean itself, without its rounding.
        if self.server_form == "classic":
            ahead = before
        elif self.server_form == "nesterov":
            ahead = after
        else:
            ahead = {name: before[name] - (mean[name] - server.weights[name]) for name in mean}
        server.keep("velocity", after)
        server.weights = {name: mean[name] + beta * ahead[name] for name in mean}
