"""MOON: local features are drawn to the global model's and away from the client's previous ones.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021. With z, z_g and z_p the features (the input
of the last layer) of the current model, of the one received and of the client's previous one,

    L = CE + contrast * mean( -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) ) )

The network is taken as it is; the paper's projection before the classifier is part of the user's network.
A client that takes part for the first time has the received model as its previous one: the term is log 2
then, without a gradient. On frozen features ("linear") it has none at all, and MOON is FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedsolve.federation.states import State
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.steps import Step
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

if TYPE_CHECKING:
    from torch import Tensor

PREVIOUS, STATISTICS = "previous", "statistics"


@register(
    Info(
        key="moon",
        title="MOON: features drawn to the global model's, away from the client's previous ones",
        paper="Li, He, Song, CVPR 2021",
        exchanges="rounds",
        up="rows * weights and rows",
        down="weights",
    )
)
@dataclass(frozen=True, kw_only=True)
class MOON(GradientMethod):
    """Parameters of MOON."""

    key: ClassVar[str] = "moon"
    keeps_state: ClassVar[bool] = True

    contrast: float = parameter(1.0, "Strength of the contrastive term (mu of the paper).", least=0)
    temperature: float = parameter(0.5, "What cosines are divided by.", above=0)

    @property
    def stateful(self) -> bool:
        return self._contrasts or self.buffers == "local"

    @property
    def _contrasts(self) -> bool:
        """Whether a previous model is needed: with one linear layer the features are the inputs."""
        return self.contrast != 0 and self.network != "linear"

    def prepare(self, group: ClientGroup) -> None:
        if not self._contrasts or not any(map(group.own_state, range(len(group.clients)))):
            return
        import torch

        # Weights that are not trained are no part of the state.
        previous = group.start | group.state(PREVIOUS, group.start)
        known = [[group.own_state(client) is not None] for client in range(len(group.clients))]
        group.scratch["known"] = torch.tensor(known, device=group.device)
        group.scratch["anchors"] = (
            group.reference(group.start),
            group.reference(previous, group.own_buffers(STATISTICS)),
        )

    def losses(self, step: Step) -> Tensor:
        import torch.nn.functional as F

        output = step.forward()
        losses = step.cross_entropy(output.logits)
        if not self._contrasts or not output.features.requires_grad:
            return losses
        if "anchors" not in step.group.scratch:
            return losses + self.contrast * math.log(2)
        features = output.features.flatten(2)
        near, far = (
            F.cosine_similarity(features, anchor(step.inputs).features.flatten(2), dim=-1)
            for anchor in step.group.scratch["anchors"]
        )
        # The cross-entropy of two logits, the first of them true, without exponentials that overflow.
        contrastive = -F.logsigmoid((near - far) / self.temperature)
        # Who takes part for the first time compares the received model with itself: log 2, and no gradient.
        known = step.leading(step.group.scratch["known"])
        return losses + self.contrast * step.mean(contrastive.where(known, math.log(2)))

    def state(self, group: ClientGroup, client: int) -> State | None:
        if not self._contrasts:
            return None
        weights = {f"{PREVIOUS}.{name}": value for name, value in group.weights_of(client).items()}
        buffers = {f"{STATISTICS}.{name}": value for name, value in group.buffers_now().items()}
        return {name: value.cpu().numpy().copy() for name, value in (weights | buffers).items()}
