"""FedBABU: the classifier stays as it was drawn; the body is averaged, and clients fine-tune at the end.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022,
Algorithm 1. With theta the classifier that the run's seed draws,

    training      body_i <- body - rate grad_body CE(body, theta),   body <- sum_i p_i body_i
    fine-tuning   body and classifier, the classifier alone, or the body alone (`fine_part`)
"""

from __future__ import annotations

from typing import Literal

from fedsolve.gradient.fedavg_ft import FineTuning
from fedsolve.gradient.gradient_method import ClientGroup, parameter, register
from fedsolve.gradient.prototypes import head_names


@register(paper="Oh, Kim, Yun, ICLR 2022", up="rows * body weights and rows; of the fine-tuning, nothing")
class FedBABU(FineTuning):
    """FedBABU: a body under a classifier that nobody trains, then fine-tuning at every client."""

    hidden = "trains those as the body"

    network: str = parameter("mlp:256", "Its hidden layers are the body; linear has none.")
    fine_part: Literal["all", "head", "body"] = parameter("all", "What fine-tuning moves.")

    def moved(self, group: ClientGroup) -> list[str]:
        heads = head_names(group)
        part = self.fine_part if group.round >= self.rounds else "body"
        return [name for name in group.names if part == "all" or (name in heads) == (part == "head")]

    def withheld(self, group: ClientGroup) -> list[str]:
        return head_names(group)
