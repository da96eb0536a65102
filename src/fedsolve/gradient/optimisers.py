"""Local optimisers for one network or a stack of them, SGD with momentum and Adam, and their rate by rounds.

The same arithmetic as torch.optim, in the same order, on lists of tensors whose leading entries are the
clients still training. A fresh optimiser per round, as every algorithm here assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.errors import DataError
from fedsolve.gradient.learners import on_host

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass
class Optimiser:
    """Moves weights along gradients.

    name: "sgd", "adam" or "adamw". weight_decay is added to the gradient (L2), as in torch.optim; with adamw
    it shrinks the weights by themselves. nesterov: of SGD's momentum.
    rate: a tensor without axes where recorded steps of SGD read it, so that another one can be put there.
    """

    name: str
    rate: float | Tensor
    momentum: float
    weight_decay: float
    nesterov: bool = False
    steps: int = field(default=0, init=False)
    _first: list[Tensor] = field(default_factory=list, init=False)
    _second: list[Tensor] = field(default_factory=list, init=False)

    def step(self, weights: list[Tensor], gradients: list[Tensor], active: int | None = None) -> None:
        """One step in place; gradients may be changed.

        active: how many leading clients of a stack take part; None for a single network.
        """
        self.steps += 1
        if self.name == "adamw":
            torch._foreach_mul_(weights, 1 - float(self.rate) * self.weight_decay)
        elif self.weight_decay != 0:
            torch._foreach_add_(gradients, weights, alpha=self.weight_decay)
        if self.name != "sgd":
            self._adam(weights, gradients, active)
            return
        if self.momentum != 0:
            self._first = self._first or [torch.zeros_like(gradient) for gradient in gradients]
            moved = _leading(self._first, active)
            torch._foreach_mul_(moved, self.momentum)
            torch._foreach_add_(moved, gradients)
            if self.nesterov:
                moved = list(torch._foreach_add(gradients, moved, alpha=self.momentum))
            gradients = moved
        if isinstance(self.rate, float | int):
            torch._foreach_add_(weights, gradients, alpha=-self.rate)
        else:
            torch._foreach_sub_(weights, torch._foreach_mul(gradients, self.rate))

    def begin(self, rate: float) -> None:
        """Begin afresh with this rate, every tensor staying where it is; for SGD on one network."""
        assert isinstance(self.rate, torch.Tensor)
        self.rate.fill_(rate)
        if self._first:
            torch._foreach_zero_(self._first)

    def state(self) -> dict[str, Array]:
        """Steps and moments, for an optimiser that lives longer than a round."""
        arrays = {"steps": np.array(self.steps)}
        for kind, moments in (("first", self._first), ("second", self._second)):
            arrays |= {f"{kind}.{k}": on_host(moment.double()) for k, moment in enumerate(moments)}
        return arrays

    def resume(self, state: Mapping[str, Array], weights: list[Tensor]) -> None:
        """Take back what `state` gave, in the type of these weights; nothing changes when it is empty."""
        self.steps = int(state.get("steps", 0))
        if self.steps:
            numbered = list(enumerate(weights))
            self._first = [weight.new_tensor(state[f"first.{k}"]) for k, weight in numbered]
            self._second = [weight.new_tensor(state[f"second.{k}"]) for k, weight in numbered]

    def _adam(self, weights: list[Tensor], gradients: list[Tensor], active: int | None) -> None:
        if not self._first:
            self._first = [torch.zeros_like(gradient) for gradient in gradients]
            self._second = [torch.zeros_like(gradient) for gradient in gradients]
        first, second = _leading(self._first, active), _leading(self._second, active)
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, (1 - BETAS[1] ** self.steps) ** 0.5)
        torch._foreach_add_(roots, EPSILON)
        torch._foreach_addcdiv_(weights, first, roots, -float(self.rate) / (1 - BETAS[0] ** self.steps))


def clip_norms(gradients: list[Tensor], limit: float, stacked: bool) -> None:
    """Scale each client's whole gradient down to norm `limit` where it is longer, in place."""
    if not stacked:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return
    square = sum(gradient.flatten(1).square().sum(dim=1) for gradient in gradients)
    factor = torch.clamp(limit / (torch.sqrt(torch.as_tensor(square)) + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.reshape(-1, *[1] * (gradient.dim() - 1)))


def _leading(tensors: list[Tensor], active: int | None) -> list[Tensor]:
    return tensors if active is None else [tensor[:active] for tensor in tensors]


SCHEDULE_FACTOR = 0.1
"""By how much a stepped rate falls unless somebody says otherwise."""


def factor_of(method: GradientMethod, round_: int) -> float:
    """What --rate is multiplied by in a round. With r the round from 0 and R all rounds,

        rate_r = rate * rate_decay^r * schedule(r) * min(1, (r + 1) / warmup)
        step     schedule(r) = schedule_factor^(how many of schedule_rounds are <= r)
        cosine   schedule(r) = (1 + cos(pi (r - warmup) / (R - warmup))) / 2, and 1 while warming up

    A round after the last, in which a client makes its own model, is scheduled as the last; the decay goes
    on.
    """
    factor = method.rate_decay**round_
    inside = min(round_, method.rounds - 1)
    if method.schedule == "step":
        factor *= method.schedule_factor ** sum(first <= inside for first in milestones(method))
    if method.schedule == "cosine":
        past = max(0, inside - method.warmup) / max(1, method.rounds - method.warmup)
        factor *= (1 + math.cos(math.pi * past)) / 2
    if inside < method.warmup:
        factor *= (inside + 1) / method.warmup
    return float(factor)


def milestones(method: GradientMethod) -> list[int]:
    """The rounds from which a stepped rate is lower."""
    text = method.schedule_rounds or ""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(first < 1 for first in found):
        raise DataError(
            f"schedule_rounds are rounds from 1 on, joined by commas, such as 50,75; got {text!r}."
        )
    return found
