"""FLFA: FedAvg with feedback alignment in the layer whose updates agree least.

Baek, Kim, Kim, Chung, "Federated Learning with Feedback Alignment". The layer of a round follows from the
updates of the round before by the exact score (Eq. 14, `alignment`); in it the error travels back through the
weights received (Eq. 11, `feedback`). Any other host takes the same option: `FedProx(feedback="lowest")`.
"""

from __future__ import annotations

from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.gradient_method import parameter, register


@register(
    paper="Baek, Kim, Kim, Chung, FLFA",
    up="rows * weights and rows; weight updates, and the same with length 1, of the layers to choose from",
)
class FLFA(FedAvg):
    """FLFA: FedAvg with feedback alignment in the layer whose updates agree least."""

    tensors_only = True

    network: str = parameter(
        "mlp:256", "As in every gradient method, with two layers or more.", metavar="NAME"
    )
    feedback: str | None = parameter(
        "lowest",
        "Layers of feedback alignment: lowest or highest score, skewness, or names.",
        metavar="LAYERS",
    )
    feedback_sketch: int = parameter(
        0, "Numbers that stand for a layer's update in its score; 0 sends it whole, as in the paper.", least=0
    )
