"""Per-FedAvg: a model from which one step at a client leads far.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1. A batch is cut into halves D and D', and

    w' = w - inner_rate grad f(w; D)
    w <- w - rate [grad f(w'; D') - inner_rate h]
    h  = 0                                                                       (hessian "none", first order)
    h  = [grad f(w + delta g; D) - grad f(w - delta g; D)] / (2 delta), g = grad f(w'; D')   ("free")

The paper draws a third batch for h; here it is D again. A batch of one row is both halves. Afterwards every
client fine-tunes: `fine_epochs` passes at `inner_rate`, and sends nothing.
"""

from __future__ import annotations

from typing import Literal

from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.gradient.fedavg_ft import FineTuning
from fedsolve.gradient.gradient_method import Step, parameter, register
from fedsolve.gradient.steps import row_losses


@register(key="per-fedavg", paper="Fallah, Mokhtari, Ozdaglar, NeurIPS 2020")
class PerFedAvg(FineTuning):
    """Per-FedAvg: gradients where one step at the client leads, then that step at every client."""

    takes_weights = False

    inner_rate: float = parameter(0.01, "Rate of the inner step (alpha) and of fine-tuning.", least=0)
    hessian: Literal["none", "free"] = parameter("none", "Leave it out, or use differences of gradients.")
    delta: float = parameter(1e-3, "Length of these differences.", above=0)

    def gradients(self, step: Step) -> None:
        if step.group.round >= self.rounds:
            super().gradients(step)
            return
        first, second = _halves(step)
        inner = step.differentiate(_loss(step, first))
        output = step.output
        with step.shifted([-self.inner_rate * slope for slope in inner]):
            losses = _loss(step, second)
            gradients = step.differentiate(losses)
        if self.hessian == "free":
            apart = []
            for sign in (1.0, -1.0):
                with step.shifted([sign * self.delta * slope for slope in gradients]):
                    apart.append(step.differentiate(_loss(step, first)))
            curved = torch._foreach_sub(*apart)
            torch._foreach_add_(gradients, curved, alpha=-self.inner_rate / (2 * self.delta))
        step.gradients, step.losses, step.output = gradients, losses.detach(), output

    def rate_of(self, round_: int) -> float:
        return super().rate_of(round_) if round_ < self.rounds else self.inner_rate


def _halves(step: Step) -> tuple[Tensor, Tensor]:
    """What each row counts in the means over the first and over the second half of its client's batch."""
    real = torch.ones_like(step.targets, dtype=torch.bool) & step.real_rows()
    count = real.sum(dim=1, keepdim=True)
    first = real & (real.cumsum(dim=1) <= (count + 1) // 2)
    second = torch.where(count > 1, real & ~first, first)
    parts = [half.to(step.group.dtype) for half in (first, second)]
    return parts[0] / parts[0].sum(dim=1, keepdim=True), parts[1] / parts[1].sum(dim=1, keepdim=True)


def _loss(step: Step, share: Tensor) -> Tensor:
    """Each client's cross-entropy over some of its rows."""
    return (row_losses(step.forward().logits, step.targets) * share).sum(dim=1)
