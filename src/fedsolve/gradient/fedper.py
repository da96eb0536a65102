"""FedPer: the base is shared, every client has a classifier of its own.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. All weights are trained together;
the base is averaged as in FedAvg, and the last layer never leaves its client.

A client begins each round with the weights received and its own part as it left it; at its first time that is
the run's first. A client's own model is the final shared part with its own; one that never took part first
trains as in a round, and keeps its own part of that alone. FedRep, FedBN and FedProto keep other parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsolve.federation.participant import ClientData
from fedsolve.gradient.gradient_method import ClientGroup, State, register
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.personalised import PersonalMethod, alone, arrays_of, kept
from fedsolve.gradient.prototypes import head_names

OWN = "own"


@dataclass(frozen=True, kw_only=True)
class OwnPart(PersonalMethod):
    """Methods whose clients keep some weights, `withheld`, to themselves."""

    keeps_state = True
    shares_a_predictor = False
    stays = "part of its own"

    def prepare(self, group: ClientGroup) -> None:
        own = group.state(OWN, group.start)
        group.put({name: own[name] for name in self.withheld(group)})

    def state(self, group: ClientGroup, client: int) -> State:
        weights = group.weights_of(client)
        return arrays_of({f"{OWN}.{name}": weights[name] for name in self.withheld(group)})

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> PersonalGradientModel:
        if state is not None or len(data) == 0:
            return PersonalGradientModel.of(model, kept(state, OWN), kept(state))
        with alone(self, model, data) as group:
            group.train()
            own = kept(self.state(group, 0), OWN)
            buffers = arrays_of(group.buffers_now()) if self.buffers == "local" else {}
        return PersonalGradientModel.of(model, own, buffers)


@register(
    paper="Arivazhagan et al., 2019",
    up="rows * base weights and rows; the classifier never",
    down="base weights, and the first classifier",
)
class FedPer(OwnPart):
    """FedPer: a shared base under each client's own classifier."""

    def withheld(self, group: ClientGroup) -> list[str]:
        return head_names(group)
