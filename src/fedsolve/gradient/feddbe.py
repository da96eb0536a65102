"""FedDBE: a client's own bias of the features is kept apart from what is shared.

Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023. With
f(x) what enters the last layer, m_i a vector of client i that never leaves it, and g the mean feature over
all rows,

    logits = head(f(x) + m_i)
    L      = CE + consistency * mean_j (mu_j - g_j)² / 2
    mu    <- (1 - mean_momentum) mu + mean_momentum * mean of f(x) over the batch
    m_i   <- m_i - shift_rate * dL/dm_i

mu is 0 at the start of every round, and its past has no gradient. m_i starts at 0 and stays from round to
round; it is moved by plain SGD, without momentum, decay or clipping. Everything else is FedAvg.

g is found once, by sums: in the first round clients train without the second term and send the sum of their
features, under the model they end with, and their rows; the weights are averaged. `discard_first` is the
authors' form: that round has no m_i, g is the mean by rows of every client's mu at its end, and the rest of
what it trained is thrown away. Under partial participation g is that of the first round's clients. On frozen
features ("linear") the second term has no gradient, and only m_i acts.

A client's own model is the shared one with its m_i; that of a client that never took part has m_i = 0, so
it is the shared one.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData
from fedsolve.gradient import networks
from fedsolve.gradient.gradient_method import ClientGroup, State, Step, Term, Total, parameter, register
from fedsolve.gradient.learners import NetworkOutput, SingleNetwork
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.optimisers import factor_of
from fedsolve.gradient.personalised import PersonalMethod, kept
from fedsolve.gradient.prototypes import head_width
from fedsolve.gradient.server_state import ServerState, Weights


@register(
    paper="Zhang et al., NeurIPS 2023",
    up="rows * weights and rows; in the first round the sum of features; the shift never",
    down="weights and the mean feature",
)
class FedDBE(PersonalMethod):
    """FedDBE: each client's own shift of the features, and one mean feature for all.

    The authors' example, batches of 10, has a consistency of 50; at rate 0.05 that overwhelms the
    cross-entropy.
    """

    averages = True
    keeps_state = True

    consistency: float = parameter(
        1.0, "Strength of the pull of mean features to the common mean (kappa of the paper).", least=0
    )
    mean_momentum: float = parameter(
        1.0, "Share of the newest batch in a client's mean feature; 1 is that batch alone.", above=0, most=1
    )
    shift_rate: float | None = parameter(
        None, "Rate of a client's shift, decaying like --rate; 0 has no shift.", least=0, none="as --rate"
    )

    discard_first: bool = parameter(
        False, "The first round finds the mean feature alone, from batches, as the authors do."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discard_first and self.rounds == 1:
            raise DataError(
                "discard_first throws away what the first round trains, and there is no other. Give more "
                "rounds."
            )

    @property
    def keeps(self) -> bool:
        return self.shift_rate != 0

    @property
    def _pulls(self) -> bool:
        """Whether a mean feature is needed: with one linear layer the features are the inputs."""
        return self.consistency != 0 and self.network != "linear"

    def _discards(self, round_: int) -> bool:
        """Whether what is trained in this round is thrown away."""
        return self.discard_first and round_ == 0

    def _moves(self, group: ClientGroup) -> bool:
        """Whether shifts act and move in this round."""
        return self.keeps and not self._discards(group.round)

    def prepare(self, group: ClientGroup) -> None:
        scratch, shape = group.scratch, (len(group.clients), head_width(group))
        scratch["mean"] = torch.zeros(shape, dtype=group.dtype, device=group.device)
        if self.keeps:
            states = [group.own_state(client) or {} for client in range(shape[0])]
            shifts = [state.get("shift", np.zeros(shape[1])) for state in states]
            scratch["shift"] = torch.as_tensor(np.stack(shifts), dtype=group.dtype, device=group.device)
        if isinstance(group.learners, SingleNetwork):
            scratch["classifier"] = networks.head_of(group.learners.network)[1].weight
            if self.keeps and group.round == 0:
                _check_last(group)

    def losses(self, step: Step) -> Tensor:
        scratch = step.group.scratch
        output = step.forward()
        if self._moves(step.group):
            # The output for shifted features: the last layer is linear, so its weight times m is added.
            scratch["moved"] = moved = step.leading(scratch["shift"]).detach().clone().requires_grad_()
            weight = step.weights[-2] if step.group.learners.stacked else scratch["classifier"][None]
            shift = torch.matmul(moved.unsqueeze(-2), weight.mT)
            output = step.output = NetworkOutput(output.features, output.logits + shift)
        losses = step.cross_entropy(output.logits)
        if self._pulls and self._discards(step.group.round):
            scratch["newest"] = self._mean(step, output.features).detach()
        if self._pulls and "anchor" in step.group.received and output.features.requires_grad:
            mean = self._mean(step, output.features)
            if self.mean_momentum != 1:
                scratch["newest"] = mean.detach()
            away = (mean - step.group.received["anchor"]).square().mean(dim=-1)
            losses = losses + 0.5 * self.consistency * away
        return losses

    def gradients(self, step: Step) -> None:
        losses, scratch, group = self.losses(step), step.group.scratch, step.group
        moves = self._moves(group)
        step.gradients = step.differentiate(losses, *([scratch["moved"]] if moves else []))
        step.losses = losses.detach()
        # In place throughout: a recorded step finds the same tensors again.
        if moves:
            rate = group.rate if self.shift_rate is None else self.shift_rate * factor_of(self, group.round)
            step.leading(scratch["shift"]).sub_(step.gradients.pop(), alpha=rate)
        if "newest" in scratch:
            step.leading(scratch["mean"]).copy_(scratch["newest"])

    def _mean(self, step: Step, features: Tensor) -> Tensor:
        """mu of this step, (clients, width)."""
        real = step.real_rows()
        if isinstance(real, bool):
            newest = features.mean(dim=1)
        else:
            newest = (features * real.unsqueeze(-1)).sum(dim=1) / real.sum(dim=1, keepdim=True)
        if self.mean_momentum == 1:
            return newest
        before = step.leading(step.group.scratch["mean"])
        return (1 - self.mean_momentum) * before + self.mean_momentum * newest

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        if self._discards(group.round):
            for name in [name for name in term.arrays if name.startswith("b.")]:
                del term.arrays[name], term.factors[name]
        if not self._pulls or "anchor" in group.received:
            return
        network, rows = group.whole(client), float(group.sizes[client])
        total = np.zeros(head_width(group))
        if self._discards(group.round):
            total += rows * group.scratch["mean"][client].double().cpu().numpy()
        else:
            with torch.no_grad():
                for inputs, _ in group.rows.of(client):
                    total += networks.features_of(network, inputs)[0].double().sum(dim=0).cpu().numpy()
        term.arrays |= {"features": total, "feature_rows": np.array([rows])}

    def state(self, group: ClientGroup, client: int) -> State:
        if self._discards(group.round):
            return {"shift": np.zeros(head_width(group), dtype=self.precision)}
        return {"shift": group.scratch["shift"][client].cpu().numpy().copy()}

    def extras(self, server: ServerState) -> dict[str, Array]:
        return {"anchor": server.memory["anchor"]} if "anchor" in server.memory else {}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        if self._pulls and "anchor" not in server.memory:
            server.memory["anchor"] = total["features"] / float(total["feature_rows"][0])
        if not self._discards(server.round):
            super().update(server, mean, total)

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> ShiftedModel:
        shifted = ShiftedModel.of(model, {}, kept(state))
        width = networks.head_of(model.network())[1].in_features
        shifted.shift = (state or {}).get("shift", np.zeros(width, dtype=self.precision))
        return shifted


def _check_last(group: ClientGroup) -> None:
    """Refuse a network that changes the output of its last layer: a shift would not follow that change."""
    network = group.whole(0)
    for inputs, _ in itertools.islice(group.rows.of(0, 2), 1):
        with torch.no_grad():
            features, logits = networks.features_of(network, inputs)
            expected = networks.head_of(network)[1](features)
        if not torch.allclose(expected, logits, atol=1e-5, rtol=1e-4):
            raise DataError(
                f"FedDBE shifts what enters the last nn.Linear, and network '{group.method.network}' changes "
                "what comes out of it. End the network with that layer, or do without a shift (shift_rate=0)."
            )


class ShiftedModel(PersonalGradientModel):
    """The shared network with one client's shift (width,) of what enters its last layer."""

    family = "gradient-shifted"
    further = ("shift",)
    shift: Array

    def network(self) -> Any:
        network = super().network()
        head = networks.head_of(network)[1]
        shift = torch.as_tensor(self.shift).to(head.weight)
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0] + shift, *inputs[1:]))
        return network
