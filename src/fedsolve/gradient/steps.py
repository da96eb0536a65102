"""One step of local training, as an algorithm's loss and gradients see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.gradient.learners import NetworkOutput, SingleNetwork

if TYPE_CHECKING:
    from fedsolve.gradient.group import ClientGroup

Batch = tuple["Tensor", "Tensor", "Tensor | None"]
"""Inputs (clients, rows, ...), targets (clients, rows), and each row's share of its client's mean; None where
all rows have the same."""


class Step:
    """One batch of every client that still has one: what the algorithm's loss and gradients see.

    inputs (clients, rows, ...), targets (clients, rows); `weights` and `gradients` are lists in the order of
    `group.names`, views of the clients taking part. drawn: what the method drew for this step, by name.
    """

    def __init__(
        self,
        group: ClientGroup,
        number: int,
        active: int,
        batch: Batch | None = None,
        drawn: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.group = group
        self.number = number
        self.active = active
        self.inputs, self.targets, self._share = batch or group.batches.at(number, active)
        self.drawn = group.drawn(number) if drawn is None else drawn
        weights = group.learners.weights
        self.weights = (
            [w[:active].detach().requires_grad_() for w in weights] if group.learners.stacked else weights
        )
        self.gradients: list[Tensor] = []
        self.losses: Tensor | None = None
        self.output: NetworkOutput | None = None

    @property
    def reads(self) -> list[Tensor]:
        """The tensors that change from step to step."""
        return [self.inputs, self.targets, *self.drawn.values()]

    def copied(self) -> Step:
        """The same step on tensors of its own."""
        batch = self.inputs.clone(), self.targets.clone(), self._share
        drawn = {name: tensor.clone() for name, tensor in self.drawn.items()}
        return Step(self.group, self.number, self.active, batch, drawn)

    def forward(self) -> NetworkOutput:
        """The networks' output for this batch."""
        self.output = self.group.learners.forward(self.inputs, self.weights)
        return self.output

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each client's rows of `values` (clients, rows), by weight and without the padding."""
        return values.mean(dim=1) if self._share is None else (values * self._share).sum(dim=1)

    def real_rows(self) -> Tensor | bool:
        """Which rows are not padding."""
        return self.group.batches.real_rows(self.number, self.active)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Each client's mean cross-entropy."""
        return self.mean(row_losses(logits, self.targets))

    def divergence(self, logits: Tensor, taught: Tensor, temperature: float = 1.0) -> Tensor:
        """Each client's mean of KL(softmax(taught / temperature) || softmax(logits / temperature))."""
        own, given = (F.log_softmax(values / temperature, dim=-1) for values in (logits, taught))
        return self.mean(F.kl_div(own, given, reduction="none", log_target=True).sum(dim=-1))

    def differentiate(self, losses: Tensor, *more: Tensor) -> list[Tensor]:
        """Gradients of the losses (clients,) by each client's own weights, and by more tensors."""
        wanted = [*self.weights, *more]
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]

    @contextmanager
    def shifted(self, shift: list[Tensor]) -> Iterator[None]:
        """The weights at w + shift within the block; they and running statistics are as before after it."""
        learners = self.group.learners
        tensors: list[Tensor] = [*self.weights]
        if isinstance(learners, SingleNetwork):
            tensors += learners.network.buffers()
        before = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            torch._foreach_add_(self.weights, shift)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, before)

    def leading(self, values: Tensor) -> Tensor:
        """Of values with a client axis: those of the clients in this step."""
        return values[: self.active]

    def received(self) -> list[Tensor]:
        """The weights received, as a list that fits `weights`."""
        start, names = self.group.start, self.group.names
        return [start[name].expand_as(w) for name, w in zip(names, self.weights, strict=True)]

    def away(self) -> list[Tensor]:
        """How far the weights are from those received: w - W."""
        return list(torch._foreach_sub([weight.detach() for weight in self.weights], self.received()))

    def own(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Per-client tensors by weight name, as a list that fits `weights`."""
        stacked = self.group.learners.stacked
        return [values[name][: self.active] if stacked else values[name] for name in self.group.names]


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every row: logits (clients, rows, classes), targets (clients, rows)."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(targets.shape)
