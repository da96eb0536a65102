"""FedProx: FedAvg with a pull towards the weights received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    L = CE + (proximal/2) |w - W|²,   so that   grad += proximal (w - W)

Clients may do unequal work: with chance `stragglers` one makes, in a round, a number of passes drawn evenly
from 1 to --epochs, and what it has learnt counts like everybody's.

The pull is added to the gradient directly; nothing of it enters the autograd graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from fedsolve.arrays import stream
from fedsolve.backends.torch_later import torch
from fedsolve.errors import DataError
from fedsolve.gradient.gradient_method import GradientMethod, Step, parameter, register


@register(paper="Li et al., MLSys 2020")
class FedProx(GradientMethod):
    """FedProx: FedAvg with a pull towards the weights received."""

    tensors_only = True

    proximal: float = parameter(
        0.001, "Strength of the pull (mu of the paper, whose term has the factor 1/2).", least=0
    )

    stragglers: float = parameter(0.0, "Chance that a client makes fewer passes in a round.", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stragglers and (self.epochs == 1 or self.local_steps is not None):
            raise DataError(
                f"stragglers make fewer passes than others, and with epochs {self.epochs} and local_steps "
                f"{self.local_steps} there are no fewer. Give epochs of at least 2, or leave it out."
            )

    def passes_of(self, client: str, round_: int) -> int:
        drawn = stream(self.seed, "stragglers", client, round_)
        return int(drawn.integers(1, self.epochs + 1)) if drawn.random() < self.stragglers else self.epochs

    def with_passes(self, epochs: int) -> Self:
        return replace(super().with_passes(epochs), stragglers=0.0)

    def edit(self, step: Step) -> None:
        pull(step, self.proximal)


def pull(step: Step, strength: float) -> None:
    """gradients += strength * (w - W)"""
    if strength != 0:
        torch._foreach_add_(step.gradients, step.away(), alpha=strength)
