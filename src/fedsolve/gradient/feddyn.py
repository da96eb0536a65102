"""FedDyn: a linear term in each client's loss lets the clients' optima agree with the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. With alpha = dynamic, the
duals g_i of all N clients starting at 0, and the cohort S:

    client    L = CE - <g_i, w> + (alpha/2) |w - W|²,   then   g_i <- g_i - alpha (w_i - W)
    server    h <- h - (alpha/N) sum_S (w_i - W),       W <- mean_S w_i - h / alpha

So h is the mean of all N duals, whoever takes part; the server keeps their sum, which stays right when the
federation grows. N counts every client of the federation, empty ones too.

The reported model is mean_S w_i, as in the authors' code, not the W that is sent next. alpha is the same
for every client; the authors' code divides it by the client's share of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedsolve.errors import DataError
from fedsolve.federation.messages import Total
from fedsolve.federation.method import Laws
from fedsolve.federation.states import State
from fedsolve.gradient.fedprox import pull
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.server_state import ServerState, Weights
from fedsolve.gradient.steps import Step
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

if TYPE_CHECKING:
    from torch import Tensor


@register(
    Info(
        key="feddyn",
        title="FedDyn: dynamic regularisation by a dual of every client",
        paper="Acar et al., ICLR 2021",
        exchanges="rounds",
        up="weights and 1",
        down="weights",
    )
)
@dataclass(frozen=True, kw_only=True)
class FedDyn(GradientMethod):
    """Parameters of FedDyn; h is the mean of the duals only with weighting "uniform"."""

    key: ClassVar[str] = "feddyn"
    laws: ClassVar[Laws] = Laws(
        partition=None, empty=False
    )  # the server counts every client, with rows or without
    keeps_state: ClassVar[bool] = True
    reported: ClassVar[str] = "aggregated"

    weighting: Literal["size", "uniform"] = parameter("uniform", "Only uniform: clients count all alike.")
    dynamic: float = parameter(
        0.1, "Strength of the regularisation (alpha); the server divides by it.", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_uniform("FedDyn", self.weighting)

    def prepare(self, group: ClientGroup) -> None:
        group.scratch["dual"] = group.state("dual", nothing(group))

    def edit(self, step: Step) -> None:
        import torch

        pull(step, self.dynamic)
        torch._foreach_sub_(step.gradients, step.own(step.group.scratch["dual"]))

    def state(self, group: ClientGroup, client: int) -> State:
        dual = group.client_of(group.scratch["dual"], client)
        weights = group.weights_of(client)
        return {
            f"dual.{name}": (dual[name] - self.dynamic * (weights[name] - group.start[name])).cpu().numpy()
            for name in group.names
        }

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        sent, trained = server.sent(), total.count("trained")
        duals = {
            name: dual - self.dynamic * trained * (mean[name] - sent[name])
            for name, dual in server.kept("duals").items()
        }
        server.keep("duals", duals)
        share = 1 / (server.clients * self.dynamic)
        server.weights = {name: mean[name] - share * duals[name] for name in mean}


def check_uniform(title: str, weighting: str) -> None:
    """Refuse weighting by size for an algorithm whose sums count all clients alike."""
    if weighting != "uniform":
        raise DataError(f"{title} counts all clients alike; weighting must be 'uniform', got {weighting!r}.")


def nothing(group: ClientGroup) -> dict[str, Tensor]:
    """Zeros for every weight: the state of a client that takes part for the first time."""
    import torch

    return {name: torch.zeros_like(group.start[name]) for name in group.names}
