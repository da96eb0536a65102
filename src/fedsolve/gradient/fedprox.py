"""FedProx: FedAvg with a pull towards the weights received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    L = CE + (proximal/2) |w - W|²,   so that   grad += proximal (w - W)

Clients may do unequal work: with chance `stragglers` one makes, in a round, a number of passes drawn evenly
from 1 to --epochs, and what it has learnt counts like everybody's.

The pull is added to the gradient directly; nothing of it enters the autograd graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedsolve.errors import DataError
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.steps import Step
from fedsolve.gradient.streams import stream
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register


@register(
    Info(
        key="fedprox",
        title="FedProx: FedAvg with a pull towards the weights received",
        paper="Li et al., MLSys 2020",
        exchanges="rounds",
        up="rows * weights and rows",
        down="weights",
    )
)
@dataclass(frozen=True, kw_only=True)
class FedProx(GradientMethod):
    """Parameters of FedProx."""

    key: ClassVar[str] = "fedprox"
    steady: ClassVar[bool] = True

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
        passes = self.passes(round_)
        drawn = stream(self.seed, "stragglers", client, round_)
        return int(drawn.integers(1, passes + 1)) if drawn.random() < self.stragglers else passes

    def with_passes(self, epochs: int) -> Self:
        return replace(super().with_passes(epochs), stragglers=0.0)

    def edit(self, step: Step) -> None:
        pull(step, self.proximal)


def pull(step: Step, strength: float) -> None:
    """gradients += strength * (w - W)"""
    import torch

    if strength == 0:
        return
    weights = [weight.detach() for weight in step.weights]
    away = torch._foreach_sub(weights, step.received())
    torch._foreach_add_(step.gradients, away, alpha=strength)
