"""FedBN: everything of BatchNorm stays with its client: weights, biases and running statistics.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, Algorithm
1. All other weights are averaged as in FedAvg.
"""

from __future__ import annotations

from typing import Literal, Self

from fedsolve.backends.torch_later import nn
from fedsolve.errors import DataError
from fedsolve.gradient import networks
from fedsolve.gradient.fedper import OwnPart
from fedsolve.gradient.gradient_method import ClientGroup, parameter, register
from fedsolve.gradient.learners import SingleNetwork


@register(
    paper="Li et al., ICLR 2021",
    up="rows * weights but those of BatchNorm, and rows",
    down="weights, those of BatchNorm the first ones",
)
class FedBN(OwnPart):
    """FedBN: FedAvg, with everything of BatchNorm each client's own."""

    network: str = parameter("mobilenet_v2", "One with BatchNorm: mobilenet_v2, resnet18, or your own.")
    buffers: Literal["local"] = parameter("local", "Running statistics stay with the clients.")

    @classmethod
    def trial(cls) -> Self:
        return cls(network=f"{__name__}:{small_network.__name__}", rounds=2, batch=16)

    def withheld(self, group: ClientGroup) -> list[str]:
        found: list[str] = []
        if isinstance(group.learners, SingleNetwork):
            layers = networks.batch_norms(group.learners.network)
            found = [name for name in group.names if name.rpartition(".")[0] in layers]
        if not found:
            raise DataError(
                f"FedBN keeps BatchNorm at the clients, and network '{self.network}' has none. Take "
                "mobilenet_v2, resnet18 or a network of your own with BatchNorm, or train FedAvg."
            )
        return found


def small_network(features: int, outputs: int) -> nn.Module:
    """One hidden layer with BatchNorm, for trials on rows of features."""
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))
