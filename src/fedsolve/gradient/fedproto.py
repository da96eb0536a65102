"""FedProto: only mean features of the classes travel; every client's network is its own.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Eq. 3, 6 and 7.
With f(x) what enters the last layer,

    client    p_i,c = sum of f(x) over its rows of class c, after training: sent, with their number
    server    g_c   = sum_i p_i,c / sum_i n_i,c        (weighting "uniform": the mean of the clients' means)
    L         = CE + pull * mean over rows of mean_j (f_j(x) - g_y,j)²

Rows whose class nobody has sent yet have no second term. Eq. 6 divides by the number of clients once more,
which would shrink every prototype; the authors' code takes the mean of the clients' means. Prototypes are
sums, so secure sums carry them. The weights that travel down are the run's first, where a client begins.

A client's own model is its network. One that never took part trains as in a round.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import F, Tensor
from fedsolve.gradient.fedper import OwnPart
from fedsolve.gradient.gradient_method import ClientGroup, Step, Term, Total, parameter, register
from fedsolve.gradient.prototypes import class_means
from fedsolve.gradient.server_state import ServerState, Weights


@register(
    paper="Tan et al., AAAI 2022",
    up="sums of features and rows by class; weights never",
    down="mean features by class, and the first weights",
)
class FedProto(OwnPart):
    """FedProto: networks of each client's own, drawn to common class prototypes."""

    takes_weights = False
    hidden = "compares their features"

    network: str = parameter("mlp:256", "Its hidden layers make the features; linear has none.")
    buffers: Literal["local"] = parameter("local", "Running statistics stay with the clients.")
    pull: float = parameter(1.0, "Strength of the pull to the prototypes (lambda).", least=0)

    def withheld(self, group: ClientGroup) -> list[str]:
        return group.names

    def losses(self, step: Step) -> Tensor:
        output, received = step.forward(), step.group.received
        losses = step.cross_entropy(output.logits)
        if self.pull == 0 or "prototypes" not in received:
            return losses
        targets = F.embedding(step.targets, received["prototypes"])
        known = received["known"][step.targets]
        return losses + self.pull * step.mean(known * (output.features - targets).square().mean(dim=-1))

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        forward = group.reference(group.start | group.weights_of(client), group.buffers_now())
        means = class_means(group, client, lambda inputs: forward(inputs[None]).features[0])
        counts = group.class_counts[client].double().cpu().numpy()
        weights = counts if self.weighting == "size" else np.minimum(counts, 1.0)
        term.arrays["prototypes"] = means.double().cpu().numpy() * weights[:, None]
        term.arrays["known"] = weights

    def extras(self, server: ServerState) -> dict[str, Array]:
        return {name: server.memory[name] for name in ("prototypes", "known") if name in server.memory}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        known = total["known"] > 0
        before = server.memory.get("prototypes", np.zeros_like(total["prototypes"]))
        means = total["prototypes"] / np.where(known, total["known"], 1.0)[:, None]
        server.memory["prototypes"] = np.where(known[:, None], means, before)
        server.memory["known"] = np.maximum(known, server.memory.get("known", 0.0)).astype(np.float64)
