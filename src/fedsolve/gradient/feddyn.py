"""FedDyn: a linear term in each client's loss lets the clients' optima agree with the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. With alpha = dynamic, the
duals g_i of all N clients starting at 0, and the cohort S:

    client    L = CE - <g_i, w> + (alpha/2) |w - W|²,   then   g_i <- g_i - alpha (w_i - W)
    server    h <- h - (alpha/N) sum_S (w_i - W),       W <- mean_S w_i - h / alpha

So h is the mean of all N duals, whoever takes part; the server keeps their sum, which stays right when the
federation grows. N counts every client of the federation, empty ones too.

The reported model is mean_S w_i, as in the authors' code, not the W that is sent next. alpha is the same
for every client. The authors' code divides it by N p_i, the client's rows over the mean of all clients' rows;
with `dynamic_by_rows` the clients do so, and h / alpha above is the mean of g_i / alpha_i. The mean is then
asked for once, of those who take part in the first round.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.backends.torch_later import torch
from fedsolve.federation.method import Laws, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.gradient.fedprox import pull
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, State, Step, parameter, register
from fedsolve.gradient.server_state import ServerState, Weights

ROWS = "feddyn-rows"


@register(paper="Acar et al., ICLR 2021", up="weights and 1")
class FedDyn(GradientMethod):
    """FedDyn: dynamic regularisation by a dual of every client.

    H is the mean of the duals only with weighting "uniform".
    """

    laws = Laws(partition=None, empty=False)  # the server counts every client, with rows or without
    keeps_state = True
    reported = "aggregated"

    weighting: Literal["uniform"] = parameter("uniform", "Only uniform: clients count all alike.")
    dynamic: float = parameter(
        0.1, "Strength of the regularisation (alpha); the server divides by it.", above=0
    )

    dynamic_by_rows: bool = parameter(
        False, "Divide alpha by a client's rows over the mean rows, as the authors' code does."
    )

    def prepare(self, group: ClientGroup) -> None:
        group.scratch["dual"] = group.state("dual", group.nothing())
        if self.dynamic_by_rows:
            rows = torch.as_tensor(group.sizes, dtype=group.dtype, device=group.device)
            group.scratch["alpha"] = self.dynamic * group.received["mean_rows"] / rows.clamp_min(1)

    def edit(self, step: Step) -> None:
        if self.dynamic_by_rows:
            alpha = step.leading(step.group.scratch["alpha"])
            for gradient, distance in zip(step.gradients, step.away(), strict=True):
                gradient.add_(distance.mul_(step.group.learners.spread(alpha, distance)))
        else:
            pull(step, self.dynamic)
        torch._foreach_sub_(step.gradients, step.own(step.group.scratch["dual"]))

    def state(self, group: ClientGroup, client: int) -> State:
        dual = group.client_of(group.scratch["dual"], client)
        weights = group.weights_of(client)
        alpha = group.scratch["alpha"][client] if self.dynamic_by_rows else self.dynamic
        return {
            f"dual.{name}": (dual[name] - alpha * (weights[name] - group.start[name])).cpu().numpy()
            for name in group.names
        }

    def prelude(self, server: ServerState) -> tuple[str, dict[str, Any]] | None:
        return (ROWS, {}) if self.preludes(server) else None

    def preludes(self, server: ServerState) -> int:
        return int(self.dynamic_by_rows and "mean_rows" not in server.memory)

    def heard(self, server: ServerState, total: Total) -> None:
        rows = total.count("rows")
        check_rows(rows)
        server.memory["mean_rows"] = np.array(rows / len(total.cohort))

    def extras(self, server: ServerState) -> dict[str, Array]:
        return {"mean_rows": server.memory["mean_rows"]} if self.dynamic_by_rows else {}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        sent, trained = server.sent(), total.count("trained")
        duals = {
            name: dual - self.dynamic * trained * (mean[name] - sent[name])
            for name, dual in server.kept("duals").items()
        }
        server.keep("duals", duals)
        share = 1 / (server.clients * self.dynamic)
        server.weights = {name: mean[name] - share * duals[name] for name in mean}


@step(ROWS)
def answer_rows(client: ClientData, request: Request, memory: Memory) -> Term:
    """How many rows a client has."""
    return Term({}, {"rows": len(client)})
