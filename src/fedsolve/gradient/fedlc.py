"""FedLC: logits are calibrated by how rare their class is with the client.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022. With n_c
the client's rows of class c,

    f'_c = f_c - calibration * n_c^{-1/4}
    softmax:  L = -log( e^{f'_y} / sum_c e^{f'_c} )
    paper:    L = -log( e^{f'_y} / sum_{c != y} e^{f'_c} )

The paper's form leaves the true class out of the denominator and is not bounded below; public
implementations use the softmax, as is the default here. A class that the client lacks is masked
(0^{-1/4} is infinite): it takes no part in the client's loss. Where no other class is left, there is
nothing to compare with, and the loss is 0 in both forms. With calibration 0 nothing is masked.
"""

from __future__ import annotations

from typing import Literal

from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Step, parameter, register


@register(paper="Zhang et al., ICML 2022")
class FedLC(GradientMethod):
    """FedLC: logits calibrated by how rare their class is with the client."""

    tensors_only = True

    calibration: float = parameter(1.0, "Strength of the margin (tau of the paper).", least=0)
    calibration_form: Literal["softmax", "paper"] = parameter(
        "softmax", "softmax, or paper: without the true class in the denominator."
    )

    def prepare(self, group: ClientGroup) -> None:
        counts = group.class_counts
        if self.calibration == 0:
            margin, rivals = torch.zeros_like(counts), torch.full_like(counts[:, 0], group.classes - 1)
        else:
            margin, rivals = self.calibration * counts.pow(-0.25), (counts > 0).sum(dim=1) - 1
        group.scratch["margin"], group.scratch["alone"] = margin, rivals < 1

    def losses(self, step: Step) -> Tensor:
        logits = step.forward().logits - step.leading(step.group.scratch["margin"]).unsqueeze(1)
        return step.cross_entropy(logits) if self.calibration_form == "softmax" else self._paper(step, logits)

    def _paper(self, step: Step, logits: Tensor) -> Tensor:
        true = step.targets.unsqueeze(-1)
        alone = step.leading(step.group.scratch["alone"])
        rivals = logits.scatter(-1, true, -torch.inf)
        # Before the logarithm: a sum over nothing has no gradient, not even one multiplied by 0.
        rivals = rivals.masked_fill(alone[:, None, None], 0.0)
        rows = torch.logsumexp(rivals, dim=-1) - logits.gather(-1, true).squeeze(-1)
        return step.mean(rows.masked_fill(alone[:, None], 0.0))
