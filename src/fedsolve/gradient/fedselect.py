"""FedSelect: the entries that move most become the client's own, a few at a time.

Tamirisa et al., "FedSelect: Personalized Federated Learning with Customized Selection of Parameters for
Fine-Tuning", CVPR 2024. A client keeps its weights w_i and a mask m_i, 1 where an entry is its own.

    start      w_i where the mask is 1, W elsewhere
    training   in turn a pass that moves the entries with m = 1 and a pass that moves those with m = 0
    mean       W <- sum_i p_i (1 - m_i) w_i / sum_i p_i (1 - m_i), entry by entry; W stays where nobody shares
    selection  after every `select_every` rounds that the client took part in, its first aside: of each
               weight tensor's shared entries, the `select_share` that moved farthest since the last selection
               become its own, unless more than `select_target` already are; the first counts from the weights
               that the client received when it first took part

Biases stay shared. The clients send (1 - m_i) w_i and 1 - m_i: sums. An entry that was just selected is sent
and received once more, and the client's own from then on. Passes are masked gradient descent, so momentum,
weight decay and Adam are refused: they move entries whose gradient is 0. Running statistics of BatchNorm are
averaged or not as `buffers` says; the authors' code keeps them local.

A client's own model is its next round's local part from the final W, which it does not send; without a state
that is local training from W.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import torch
from fedsolve.errors import DataError
from fedsolve.gradient.gradient_method import ClientGroup, State, Step, Term, Total, parameter, register
from fedsolve.gradient.learners import on_host
from fedsolve.gradient.personalised import PersonalMethod, arrays_of
from fedsolve.gradient.server_state import ServerState, Weights

OWN = "own"
MASK = "mask"
CHOSEN = "chosen"
ANCHOR = "anchor"
PARTS = "parts"


@register(
    paper="Tamirisa et al., CVPR 2024", up="shared weights and, entry by entry, whether they are shared"
)
class FedSelect(PersonalMethod):
    """FedSelect: the entries that move most become each client's own."""

    keeps_state = True

    weighting: Literal["size", "uniform"] = "uniform"
    select_share: float = parameter(
        0.25, "Share of a tensor's shared entries that a selection takes; 0 never.", least=0, most=1
    )
    select_target: float = parameter(
        0.8, "Own share of a tensor above which no more are taken; may be overshot.", least=0, most=1
    )
    select_every: int = parameter(3, "Rounds of a client between two selections.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps is not None:
            raise DataError("FedSelect makes a pass for each of its masks; give epochs, not local_steps.")
        if self.momentum != 0 or self.weight_decay != 0 or self.optimiser != "sgd":
            raise DataError(
                f"FedSelect moves masked entries by plain SGD; got optimiser {self.optimiser!r}, momentum "
                f"{self.momentum!r}, weight_decay {self.weight_decay!r}, which move the others too."
            )

    @property
    def keeps(self) -> bool:
        return self.select_share != 0

    @property
    def recordable(self) -> bool:
        # Which entries move changes from pass to pass.
        return False

    def _masked(self, round_: int) -> bool:
        """Whether any client may have entries of its own: the first selection ends a round, not the first."""
        return self.keeps and round_ > self.select_every

    def passes_of(self, client: str, round_: int) -> int:
        return 2 * self.epochs if self._masked(round_) else self.epochs

    def prepare(self, group: ClientGroup) -> None:
        if not self._masked(group.round):
            return
        own, before = group.state(OWN, group.start), group.state(MASK, group.nothing())
        group.scratch["mask"] = group.state(CHOSEN, group.nothing())
        group.put({n: torch.where(before[n] != 0, own[n], group.start[n]) for n in group.names})

    def edit(self, step: Step) -> None:
        """Only entries of one kind move: a client's own in passes 0, 2, ..., shared ones in the others."""
        group = step.group
        if "mask" not in group.scratch:
            return
        a_pass = group.steps[: step.active] // (2 * self.epochs)
        shared = torch.as_tensor(
            (step.number // np.maximum(1, a_pass)) % 2, dtype=group.dtype, device=group.device
        )
        for gradient, mask in zip(step.gradients, step.own(group.scratch["mask"]), strict=True):
            gradient.mul_((mask - group.learners.spread(shared, mask)).abs_())

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        if "mask" not in group.scratch:
            return
        for name, mask in group.client_of(group.scratch["mask"], client).items():
            if selectable(name):
                shared = (mask == 0).cpu().numpy()
                term.arrays[f"w.{name}"] *= shared
                term.arrays[f"shared.{name}"] = shared.astype(np.uint8)
                term.factors[f"shared.{name}"] = term.factors[f"w.{name}"]

    def state(self, group: ClientGroup, client: int) -> State:
        before = group.own_state(client) or {}
        weights = {n: w for n, w in arrays_of(group.weights_of(client)).items() if selectable(n)}
        took_part = int(before.get(PARTS, 0))
        masks = {n: before.get(f"{CHOSEN}.{n}", np.zeros(w.shape, np.uint8)) for n, w in weights.items()}
        anchor = {n: before.get(f"{ANCHOR}.{n}", on_host(group.start[n])) for n in weights}
        chosen = masks
        if took_part > 0 and took_part % self.select_every == 0:
            share, target = self.select_share, self.select_target
            chosen = {n: select(w - anchor[n], masks[n], share, target) for n, w in weights.items()}
            anchor = weights
        state: State = {PARTS: np.array(took_part + 1)}
        for prefix, arrays in ((OWN, weights), (MASK, masks), (CHOSEN, chosen), (ANCHOR, anchor)):
            state |= {f"{prefix}.{n}": array for n, array in arrays.items()}
        return state

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        sent = server.sent()
        for name in mean:
            if f"shared.{name}" in total.term.arrays:
                count = total[f"shared.{name}"]
                average = np.divide(total[f"w.{name}"], count, out=sent[name].copy(), where=count > 0)
                mean[name] = server.aggregated[name] = average
        server.weights = mean


def selectable(name: str) -> bool:
    """Whether a tensor's entries may become a client's own."""
    return "weight" in name.rpartition(".")[2]


def select(moved: Array, mask: Array, share: float, target: float) -> Array:
    """The mask with the shared entries that moved farthest added; ties by position.

    share: of the entries that are shared. No entry when more than `target` of all are the client's own.
    """
    if mask.size == 0 or mask.mean() > target:
        return mask
    shared = np.flatnonzero(mask.reshape(-1) == 0)
    count = round(share * len(shared))
    farthest = np.argsort(-np.abs(moved.reshape(-1)[shared]), kind="stable")[:count]
    grown = mask.copy()
    grown.reshape(-1)[shared[farthest]] = 1
    return grown
