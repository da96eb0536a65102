"""FedNTD: among the classes that are not true, the local model keeps the global one's opinion.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022. With q the softmax at temperature T over the C - 1 logits other than the true one, of the
model received (W) and of the local one (w),

    L = CE + distillation * T² * KL( q_W || q_w )
"""

from __future__ import annotations

from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Step, parameter, register


@register(paper="Lee et al., NeurIPS 2022")
class FedNTD(GradientMethod):
    """FedNTD: the global model's opinion of the classes that are not true is kept."""

    distillation: float = parameter(1.0, "Strength of the distillation (beta of the paper).", least=0)
    temperature: float = parameter(1.0, "What logits are divided by (tau of the paper).", above=0)

    def prepare(self, group: ClientGroup) -> None:
        if self.distillation != 0:
            group.scratch["reference"] = group.reference(group.start)

    def losses(self, step: Step) -> Tensor:
        logits = step.forward().logits
        losses = step.cross_entropy(logits)
        if self.distillation == 0:
            return losses
        known = step.group.scratch["reference"](step.inputs).logits
        opinions, taught = (not_true(values, step.targets) for values in (logits, known))
        away = step.divergence(opinions, taught, self.temperature)
        return losses + self.distillation * self.temperature**2 * away


def not_true(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits (..., classes) without each row's true one, the others in their order."""
    others = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, others + (others >= targets.unsqueeze(-1)))
