"""FedPCL: only class prototypes travel; every client learns a projection of its own.

Tan et al., "Federated Learning from Pre-trained Models: A Contrastive Learning Approach", NeurIPS 2022. The
projection is everything before the last layer, which is not used. With z(x) its output at length 1,

    client    p_i,c = mean of z over its rows of class c, after training: sent
    server    g_c   = mean of p_i,c over the clients i that have class c
    L(x, y)   = l(g) + mean_i l(p_i),   l(q) = -log( e^{z q_y / T} / sum_c e^{z q_c / T} )

where a class that client i lacks is filled with g_c in p_i. The newest prototypes of every client that ever
took part count. A class that nobody has sent yet is filled with the client's own prototype under the
projection it starts the round with, so in the first round, where nothing was received, L is l of its own
(the authors' loss is 0 there); classes that neither sent nor has are left out of the sums.

Every client is sent all clients' prototypes, which are not sums: they are gathered. The weights that travel
down are the run's first, the same in every round: where a client that joins begins.

A client's own model is its projection with the prototypes of its rows: scores are minus the distances of z
to them, and -100 for a class that it does not have. One that never took part has the first projection. The
shared model is that first network; by itself it predicts nothing of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.federation.participant import ClientData
from fedsolve.gradient import networks
from fedsolve.gradient.gradient_method import ClientGroup, State, Step, Term, Total, parameter, register
from fedsolve.gradient.learners import NetworkOutput, SingleNetwork, load
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.personalised import PersonalMethod, alone, now
from fedsolve.gradient.prototypes import base_names, class_means, head_names
from fedsolve.gradient.server_state import ServerState, Weights

OWN, STATISTICS = "own", "statistics"
FAR = 100.0
"""Distance to a class that a client does not have; no two vectors of length 1 are further apart than 2."""


@register(
    paper="Tan et al., NeurIPS 2022",
    up="class prototypes of each client; weights never",
    down="all clients' prototypes, and the first weights",
)
class FedPCL(PersonalMethod):
    """FedPCL: projections of each client's own, drawn to all clients' class prototypes.

    Optimiser, rate, weight decay and batch begin as in the paper.
    """

    takes_weights = False
    keeps_state = True
    shares_a_predictor = False
    gathers = True
    hidden = "trains those as the projection"
    stays = "network"

    network: str = parameter("mlp:256", "Its hidden layers are the projection; linear has none.")
    batch: int = 32
    rate: float = 0.001
    optimiser: Literal["sgd", "adam"] = "adam"
    weight_decay: float = 1e-4
    weighting: Literal["size"] = parameter("size", "Not used: no mean of the clients' weights is taken.")
    temperature: float = parameter(0.07, "What similarities are divided by.", above=0)

    def prepare(self, group: ClientGroup) -> None:
        own = group.state(OWN, group.start)
        group.put({name: own[name] for name in base_names(group)})
        if isinstance(group.learners, SingleNetwork):
            load(group.learners.network, {}, group.own_buffers(STATISTICS))
        group.scratch |= self._prototypes(group)

    def moved(self, group: ClientGroup) -> list[str]:
        return base_names(group)

    def _prototypes(self, group: ClientGroup) -> dict[str, Tensor]:
        """What clients compare with: `common` (clients, classes, width), `sets` (sets, classes, width).

        known (clients, classes) and owned (sets, classes): which of their rows there are.
        """
        has, received = group.class_counts > 0, group.received

        def mine() -> Tensor:
            return torch.stack([local_prototypes(group, client) for client in range(len(has))])

        if "sets" not in received:
            return {"common": mine(), "known": has}
        known = (received["known"] > 0).expand_as(has)
        common = received["common"].expand(len(has), -1, -1)
        if not bool((known | ~has).all()):
            common = torch.where(known.unsqueeze(-1), common, mine())
        owned = received["owned"] > 0
        return {"common": common, "known": known | has, "sets": received["sets"], "owned": owned}

    def losses(self, step: Step) -> Tensor:
        scratch = step.group.scratch
        features = step.forward().features
        directions = F.normalize(features, dim=-1)
        known = step.leading(scratch["known"]).unsqueeze(1)
        common = torch.matmul(directions, step.leading(scratch["common"]).mT) / self.temperature
        logits = common.masked_fill(~known, -torch.inf)
        step.output = NetworkOutput(features, logits)
        losses = step.cross_entropy(logits)
        if "sets" not in scratch:
            return losses
        # (clients, rows, sets, classes): each set with the common prototypes where it lacks a class.
        apart = torch.einsum("krw,scw->krsc", directions, scratch["sets"]) / self.temperature
        apart = torch.where(scratch["owned"], apart, common.unsqueeze(2))
        logs = apart.masked_fill(~known.unsqueeze(2), -torch.inf).log_softmax(dim=-1)
        targets = step.targets[..., None, None].expand(*logs.shape[:3], 1)
        return losses + step.mean(-logs.gather(-1, targets).mean(dim=(2, 3)))

    def withheld(self, group: ClientGroup) -> list[str]:
        return group.names

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        for name in [name for name in term.arrays if name.startswith("b.")]:
            del term.arrays[name], term.factors[name]
        name, counts = group.clients[client], group.class_counts[client]
        term.arrays[f"prototypes@{name}"] = local_prototypes(group, client).double().cpu().numpy()
        term.arrays[f"owned@{name}"] = (counts > 0).double().cpu().numpy()

    def state(self, group: ClientGroup, client: int) -> State:
        heads = {f"{OWN}.{name}" for name in head_names(group)}
        return {n: a for n, a in group.snapshot(client, OWN, STATISTICS).items() if n not in heads}

    def extras(self, server: ServerState) -> dict[str, Array]:
        clients = sorted(n.removeprefix("owned@") for n in server.memory if n.startswith("owned@"))
        if not clients:
            return {}
        sets = np.stack([server.memory[f"prototypes@{client}"] for client in clients])
        owned = np.stack([server.memory[f"owned@{client}"] for client in clients])
        return {"sets": sets, "owned": owned, **common_prototypes(sets, owned)}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        server.memory |= {name: array for name, array in total.term.arrays.items() if "@" in name}

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> PrototypeModel:
        with alone(self, model, data, state) as group:
            self.prepare(group)
            personal = PrototypeModel.of(model, *now(group))
            # Nothing was received here, so the common prototypes are the client's own.
            personal.prototypes = group.scratch["common"][0].double().cpu().numpy()
            personal.owned = (group.class_counts[0] > 0).cpu().numpy()
        return personal


def common_prototypes(sets: Array, owned: Array) -> dict[str, Array]:
    """g (classes, width), the mean over the sets that have a class, and which classes any has."""
    counts = owned.sum(axis=0)
    sums = (sets * owned[..., None]).sum(axis=0)
    return {"common": sums / np.maximum(counts, 1.0)[:, None], "known": (counts > 0).astype(np.float64)}


def local_prototypes(group: ClientGroup, client: int) -> Tensor:
    """p_i (classes, width) of a client under its weights of the moment, zero for classes it lacks."""
    network = group.whole(client)
    return class_means(
        group, client, lambda inputs: F.normalize(networks.features_of(network, inputs)[0], dim=-1)
    )


class PrototypeModel(PersonalGradientModel):
    """One client's projection and class prototypes: the nearest prototype decides.

    prototypes (classes, width); owned (classes,): which classes the client has.
    """

    family = "gradient-prototypes"
    further = ("prototypes", "owned")
    prototypes: Array
    owned: Array

    def _passes(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        for seen, _ in super()._passes(rows):
            lengths = np.linalg.norm(seen, axis=1, keepdims=True)
            directions = seen / np.maximum(lengths, 1e-12)
            squares = np.square(directions).sum(axis=1)[:, None] + np.square(self.prototypes).sum(axis=1)
            apart = np.sqrt(np.maximum(squares - 2 * directions @ self.prototypes.T, 0.0))
            yield directions, -np.where(self.owned, apart, FAR)
