"""FedRS: the logits of classes that a client lacks are held back while it trains.

Li, Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.
With n_c the client's rows of class c, the cross-entropy is that of the logits s_c f_c,

    binary:  s_c = 1 where n_c > 0, else restraint
    soft:    s_c = restraint + (1 - restraint) n_c / max_c n_c

The whole logit is scaled, its bias included; predictions use the logits as they are. The paper's classifier
has no bias: with `classifier_bias` false it is 0 and stays so.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.backends.torch_later import Tensor
from fedsolve.gradient import networks
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, ServerState, Step, register
from fedsolve.gradient.kfac import weight_names
from fedsolve.gradient.prototypes import head_names
from fedsolve.parameters import parameter


@register(paper="Li, Zhan, KDD 2021")
class FedRS(GradientMethod):
    """FedRS: logits of classes that a client lacks are held back."""

    tensors_only = True

    restraint: float = parameter(
        0.5, "Scale of a missing class's logit (alpha of the paper); at 0 it learns nothing.", least=0, most=1
    )
    restraint_mode: Literal["binary", "soft"] = parameter(
        "binary", "binary scales missing classes alone, soft all by their rows."
    )

    classifier_bias: bool = parameter(True, "Let the last layer have a bias; the paper's has none.")

    def opening_state(self, server: ServerState) -> None:
        if not self.classifier_bias:
            network = self.build(server.spec.features, server.spec.outputs)
            for bias in weight_names(*networks.head_of(network))[1:]:
                server.weights[bias] = np.zeros_like(server.weights[bias])

    def edit(self, step: Step) -> None:
        if not self.classifier_bias:
            for name, gradient in zip(step.group.names, step.gradients, strict=True):
                if name in head_names(step.group) and name.endswith("bias"):
                    gradient.zero_()

    def prepare(self, group: ClientGroup) -> None:
        if self.restraint == 1:
            return
        counts = group.class_counts
        if self.restraint_mode == "binary":
            share = (counts > 0).to(counts.dtype)
        else:
            share = counts / counts.amax(dim=1, keepdim=True).clamp_min(1)
        # As a weighted mean, so that a full share gives 1 to the last bit.
        group.scratch["scale"] = self.restraint * (1 - share) + share

    def losses(self, step: Step) -> Tensor:
        logits = step.forward().logits
        if self.restraint != 1:
            logits = logits * step.leading(step.group.scratch["scale"]).unsqueeze(1)
        return step.cross_entropy(logits)
