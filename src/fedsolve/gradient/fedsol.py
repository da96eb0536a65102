"""FedSOL: the gradient is taken where a step away from the global model's predictions would lead.

Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning",
CVPR 2024. Per batch, with f the logits and W the weights received,

    L_p = KL( softmax(f_W/3) || softmax(f_w/3) ),   g_p = grad L_p at w
    e = radius * A * g_p / (||g_p|| + 1e-12),       grad = grad CE at w + e

and the optimiser moves w, not w + e. A is 1, or adaptive: |w - W| of each tensor over its L2 norm along
the tensor's first axis. ||g_p|| runs over all weights of a client, or over its classifier or the rest alone
where only that part is perturbed.

Where w = W, as in the first step of a round, or ||g_p|| < 1e-6, e is 0: g_p is rounding noise there, and
dividing it by its own norm would make it a random step of length `radius`. Running statistics of BatchNorm
follow the pass at w alone. The loss reported is the one at w + e.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.errors import DataError
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Step, parameter, register
from fedsolve.gradient.prototypes import head_names

TEMPERATURE = 3.0
LEAST = 1e-6
"""The shortest g_p that is more than rounding noise."""


@register(paper="Lee et al., CVPR 2024")
class FedSOL(GradientMethod):
    """FedSOL: gradients where a step away from the global predictions would lead."""

    radius: float = parameter(1.0, "Length of the perturbation (rho of the paper).", least=0)
    adaptive: bool = parameter(True, "Let each weight's part grow with its distance from the one received.")

    perturbed: Literal["all", "head", "body"] = parameter(
        "all", "What is perturbed: everything, the last layer, or all but it."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.perturbed == "body" and self.network == "linear":
            raise DataError("network 'linear' is a last layer without a body; perturb 'all' or 'head'.")

    def prepare(self, group: ClientGroup) -> None:
        if self.radius != 0:
            group.scratch["reference"] = group.reference(group.start)

    def gradients(self, step: Step) -> None:
        if self.radius == 0 or step.number == 0:
            super().gradients(step)
            return
        output = step.forward()
        known = step.group.scratch["reference"](step.inputs).logits
        direction = step.differentiate(step.divergence(output.logits, known, TEMPERATURE))
        with torch.no_grad():
            self._scale(step, direction)
        with step.shifted(direction):
            super().gradients(step)
        step.output = output  # predictions are counted at w

    def _scale(self, step: Step, direction: list[Tensor]) -> None:
        """g_p becomes e, in place."""
        stacked = step.group.learners.stacked
        if self.perturbed != "all":
            head = head_names(step.group)
            for name, part in zip(step.group.names, direction, strict=True):
                if (name in head) != (self.perturbed == "head"):
                    part.zero_()
        away = step.away()
        length = _lengths(direction, stacked)
        moved = (length >= LEAST) & (_lengths(away, stacked) > 0)
        factor = torch.where(moved, self.radius / (length + 1e-12), 0.0)
        for part, distance in zip(direction, away, strict=True):
            part.mul_(factor.reshape(-1, *[1] * (part.dim() - 1)) if stacked else factor)
            if self.adaptive:
                norm = torch.linalg.vector_norm(distance, dim=int(stacked), keepdim=True)
                part.mul_(distance.abs_().div_(norm.clamp_min_(1e-12)))


def _lengths(tensors: Sequence[Tensor], stacked: bool) -> Tensor:
    """The norm over all tensors: (clients,) in a stack, a number for a single network."""
    if stacked:
        parts = [torch.linalg.vector_norm(tensor.flatten(1), dim=1) for tensor in tensors]
    else:
        parts = list(torch._foreach_norm(list(tensors)))
    length: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return length
