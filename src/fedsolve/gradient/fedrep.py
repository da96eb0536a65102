"""FedRep: in every round first each client's own classifier, then the shared base.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1:

    head_i <- `head_epochs` passes over the client's rows, on the base received
    base_i <- --epochs passes under that classifier
    base   <- sum_i p_i base_i

Both parts have an optimiser of their own. The classifier stays, as in FedPer.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsolve.gradient.fedper import FedPer
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, parameter, register
from fedsolve.gradient.personalised import as_method
from fedsolve.gradient.prototypes import base_names, head_names


@dataclass(frozen=True, kw_only=True)
class _Head(GradientMethod):
    """Training of the classifier alone."""

    def moved(self, group: ClientGroup) -> list[str]:
        return head_names(group)


@register(
    paper="Collins et al., ICML 2021",
    up="rows * base weights and rows; the classifier never",
    down="base weights, and the first classifier",
)
class FedRep(FedPer):
    """FedRep: in every round first each client's own classifier, then the shared base."""

    hidden = "shares those as the base"

    network: str = parameter("mlp:256", "Its hidden layers are the base; linear has none.")
    head_epochs: int = parameter(10, "Passes over the rows that train the classifier.", least=1)

    def prepare(self, group: ClientGroup) -> None:
        super().prepare(group)
        method = as_method(_Head, self, epochs=self.head_epochs, local_steps=None)
        part = group.again(method, group.weights_now())
        part.train()
        heads = head_names(group)
        group.put({name: weight for name, weight in part.weights_now().items() if name in heads})

    def moved(self, group: ClientGroup) -> list[str]:
        return base_names(group)
