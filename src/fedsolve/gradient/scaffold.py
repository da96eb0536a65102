"""SCAFFOLD: control variates take the drift out of local steps.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, with
option II for the controls, or I. c_i of all N clients start at 0, S is the cohort:

    client    w <- w - rate (grad - c_i + c),   then   c_i+ = c_i - c + (W - w_i) / (rate K_i)
    server    W <- W + server_rate * mean_S (w_i - W),   c <- c + (1/N) sum_S (c_i+ - c_i)

Option I has c_i+ = the gradient of the mean cross-entropy over all of the client's rows at W, in eval mode,
which is one more pass over them; neither weight decay nor clipping is in it.

rate is that of the round. K_i is the number of local steps; with momentum rho a gradient acts on all later
steps too, and the divisor that makes c_i+ a mean gradient is the sum over steps k of 1 + rho + ... +
rho^(k-1): 281.8 instead of 37 for rho = 0.9; with Nesterov's momentum each of these sums has one power more.
Weight decay and clipping enter c_i through w_i.

So c is the mean of all N controls, whoever takes part; the server keeps their sum, which stays right when
the federation grows. N counts every client of the federation, empty ones too.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.container import with_prefix
from fedsolve.federation.method import Laws, Term, Total
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, State, Step, parameter, register
from fedsolve.gradient.server_state import ServerState, Weights


@register(
    paper="Karimireddy et al., ICML 2020",
    up="weights, changes of controls and 1",
    down="weights and controls",
)
class Scaffold(GradientMethod):
    """SCAFFOLD: control variates of server and clients correct local steps.

    C is the mean of the controls only with weighting "uniform".
    """

    laws = Laws(partition=None, empty=False)  # the server counts every client, with rows or without
    keeps_state = True

    weighting: Literal["uniform"] = parameter("uniform", "Only uniform: clients count all alike.")
    optimiser: Literal["sgd"] = parameter(
        "sgd", "Only sgd: Adam's steps do not tell the gradients behind them."
    )
    server_rate: float = parameter(
        1.0, "Rate of the server's step (eta_g); 1 takes the mean of the local models.", least=0
    )

    control: Literal["steps", "gradient"] = parameter(
        "steps", "New controls from the steps taken (option II), or from a pass over all rows (option I)."
    )

    def extras(self, server: ServerState) -> dict[str, Array]:
        return {f"control.{name}": total / server.clients for name, total in server.kept("controls").items()}

    def prepare(self, group: ClientGroup) -> None:
        group.scratch["own"] = own = group.state("control", group.nothing())
        group.scratch["correction"] = {n: group.received[f"control.{n}"] - own[n] for n in group.names}
        if self.control == "gradient":
            group.scratch["fresh"] = [full_gradient(group, client) for client in range(len(group.clients))]

    def edit(self, step: Step) -> None:
        torch._foreach_add_(step.gradients, step.own(step.group.scratch["correction"]))

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        changes = self._changes(group, client)
        term.arrays |= {f"control.{name}": change.cpu().numpy() for name, change in changes.items()}

    def state(self, group: ClientGroup, client: int) -> State:
        own = group.client_of(group.scratch["own"], client)
        return {
            f"control.{name}": (own[name] + change).cpu().numpy()
            for name, change in self._changes(group, client).items()
        }

    def _changes(self, group: ClientGroup, client: int) -> dict[str, Tensor]:
        """c_i+ - c_i, in option II (W - w_i) / (rate K_i) - c; none at a rate of 0: it shows no gradient."""
        if self.control == "gradient":
            own = group.client_of(group.scratch["own"], client)
            return {name: value - own[name] for name, value in group.scratch["fresh"][client].items()}
        if group.rate == 0:
            return group.nothing()
        divisor = group.rate * effective_steps(int(group.steps[client]), self.momentum, self.nesterov)
        return {
            name: (group.start[name] - weight) / divisor - group.received[f"control.{name}"]
            for name, weight in group.weights_of(client).items()
        }

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        sent, extra = server.sent(), self.server_rate - 1
        controls = server.kept("controls")
        changes = with_prefix(total.term.arrays, "control.")
        changed = {name: controls[name] + change for name, change in changes.items()}
        server.keep("controls", controls | changed)
        server.weights = {name: mean[name] + extra * (mean[name] - sent[name]) for name in mean}


def effective_steps(steps: int, momentum: float, nesterov: bool = False) -> float:
    """How many times a constant gradient, times the rate, enters the weights in this many steps of SGD."""
    return float(np.cumsum(momentum ** np.arange(steps + nesterov))[int(nesterov) :].sum())


def full_gradient(group: ClientGroup, client: int) -> dict[str, Tensor]:
    """The gradient of a client's mean cross-entropy over all its rows at the weights it has, in eval mode.

    Rows count by their weights.
    """
    network = group.whole(client)
    weights = dict(network.named_parameters())
    total = group.nothing()
    given, first = group.rows.weights[client], 0
    with torch.enable_grad():
        for inputs, targets in group.rows.of(client):
            if given is None:
                loss = F.cross_entropy(network(inputs), targets, reduction="sum")
            else:
                losses = F.cross_entropy(network(inputs), targets, reduction="none")
                loss = losses @ torch.as_tensor(given[first : first + len(targets)]).to(losses)
            first += len(targets)
            parts = torch.autograd.grad(loss, [weights[name] for name in group.names])
            for name, part in zip(group.names, parts, strict=True):
                total[name] += part
    return {name: value / (float(group.counted[client]) or 1.0) for name, value in total.items()}
