"""MOON: local features are drawn to the global model's and away from the client's previous ones.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021. With z, z_g and z_p the features (the input
of the last layer) of the current model, of the one received and of the client's previous one,

    L = CE + contrast * mean( -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) ) )

Of several previous models (`previous_models`), as in the authors' pool, each adds its own e^{cos(z, z_p)/T}
to the denominator.

The network is taken as it is; the paper's projection before the classifier is part of the user's network.
A client that takes part for the first time has the received model as its previous one: the term is log 2
then, without a gradient. With `newcomer` "first" it has the weights that the run began with; in the authors'
code it has random weights of its own. On frozen features ("linear") it has none at all, and MOON is FedAvg.
"""

from __future__ import annotations

import math
from typing import Literal

from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.container import with_prefix
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, State, Step, parameter, register

PREVIOUS, STATISTICS = "previous", "statistics"
"""What stands before the names of a previous model's arrays, with its age behind it; the newest has none."""


@register(paper="Li, He, Song, CVPR 2021")
class MOON(GradientMethod):
    """MOON: features drawn to the global model's, away from the client's previous ones."""

    keeps_state = True

    contrast: float = parameter(1.0, "Strength of the contrastive term (mu of the paper).", least=0)
    temperature: float = parameter(0.5, "What cosines are divided by.", above=0)

    previous_models: int = parameter(1, "How many of its previous models a client compares with.", least=1)
    newcomer: Literal["received", "first"] = parameter(
        "received", "Previous model in a first participation: what is received, or the run's first weights."
    )

    @property
    def keeps(self) -> bool:
        """Whether a previous model is needed: with one linear layer the features are the inputs."""
        return self.contrast != 0 and self.network != "linear"

    def prepare(self, group: ClientGroup) -> None:
        states = [group.own_state(client) for client in range(len(group.clients))]
        begins = self.newcomer == "first" and group.round > 0
        if not self.keeps or not (begins or any(states)):
            return
        start, buffers = group.first_model() if begins and not all(states) else (group.start, group.buffers)
        anchors, known = [group.reference(group.start)], []
        for age in range(self.previous_models):
            kept = [f"{PREVIOUS}{age or ''}.{group.names[0]}" in (state or {}) for state in states]
            here = [has or (begins and age == 0) for has in kept]
            if any(here):
                known.append(here)
                # Weights that are not trained are no part of the state.
                previous = group.start | group.state(f"{PREVIOUS}{age or ''}", start)
                own = group.own_buffers(f"{STATISTICS}{age or ''}") if all(kept) else buffers
                anchors.append(group.reference(previous, own))
        if known:
            group.scratch["anchors"] = anchors
            group.scratch["known"] = torch.tensor(known, device=group.device)[..., None]

    def losses(self, step: Step) -> Tensor:
        output = step.forward()
        losses = step.cross_entropy(output.logits)
        if not self.keeps or not output.features.requires_grad:
            return losses
        if "anchors" not in step.group.scratch:
            return losses + self.contrast * math.log(2)
        features = output.features.flatten(2)
        near, *far = (
            F.cosine_similarity(features, anchor(step.inputs).features.flatten(2), dim=-1)
            for anchor in step.group.scratch["anchors"]
        )
        known = step.group.scratch["known"][:, : step.active]
        # The cross-entropy of these logits, the first of them true, without exponentials that overflow.
        if len(far) == 1:
            contrastive = -F.logsigmoid((near - far[0]) / self.temperature)
        else:
            others = torch.stack([(one - near) / self.temperature for one in far])
            # Before the logarithm: a sum over nothing has no gradient, not even one that is not used.
            others = others.masked_fill(~known, -torch.inf).masked_fill(~known.any(dim=0), 0.0)
            contrastive = F.softplus(torch.logsumexp(others, dim=0))
        # Who takes part for the first time compares the received model with itself: log 2, and no gradient.
        return losses + self.contrast * step.mean(contrastive.where(known.any(dim=0), math.log(2)))

    def state(self, group: ClientGroup, client: int) -> State:
        now = group.snapshot(client, PREVIOUS, STATISTICS)
        before = group.own_state(client) or {}
        for age in range(self.previous_models - 1):
            for part in (PREVIOUS, STATISTICS):
                older = with_prefix(before, f"{part}{age or ''}.")
                now |= {f"{part}{age + 1}.{name}": array for name, array in older.items()}
        return now
