"""FedALA: a client starts from a mixture of the global model and its own, learnt entry by entry.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023. With w_i
what the client ended its last round with, W what it received, and A_i in [0, 1] for every entry of the last
`merge_tensors` tensors (1 at first),

    theta = w_i + (W - w_i) A,    A <- clip(A - merge_rate * grad CE(theta) (W - w_i), 0, 1)

over a random `merge_share` of the client's rows: once, the first time until the standard deviation of ten
losses (the last batch's of each pass) is below `merge_threshold`. Other tensors are W's. Local training from
theta and the mean are FedAvg's. With BatchNorm theta is judged by statistics of the batch; only weights are
merged.

A client's own model is what it would start the next round from: theta of the final global model, with A
learnt in one more pass. One that never took part has no w_i; its model is the global one.
"""

from __future__ import annotations

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.gradient.gradient_method import ClientGroup, State, Step, parameter, register
from fedsolve.gradient.personalised import PersonalMethod, arrays_of

OWN = "own"
MERGE = "merge"
LEARNT = "merge_learnt"
LOSSES = 10
"""Losses whose standard deviation says whether the first merge has settled."""

PASSES = 200
"""Passes after which a first merge that has not settled is taken as it is."""


@register(paper="Zhang et al., AAAI 2023", up="rows * weights and rows; of the mixture, nothing")
class FedALA(PersonalMethod):
    """FedALA: FedAvg from a learnt mixture of the global model and the client's own."""

    keeps_state = True

    merge_rate: float = parameter(
        1.0, "Learning rate of the mixture (eta); 0 keeps the global model.", least=0
    )
    merge_share: float = parameter(
        0.8, "Share of a client's rows that the mixture is learnt on (s).", above=0, most=1
    )
    merge_tensors: int = parameter(
        2, "How many of the last weight tensors are mixed: 2 are the head's weight and bias, 0 none.", least=0
    )
    merge_threshold: float = parameter(
        0.1, "Standard deviation of the losses below which the first mixture has settled.", least=0
    )

    @property
    def keeps(self) -> bool:
        return self.merge_rate != 0 and self.merge_tensors != 0

    def prepare(self, group: ClientGroup) -> None:
        if self.keeps:
            group.scratch["merge"] = merge = Merge(self, group)
            merge.learn()
            group.put(merge.theta())

    def state(self, group: ClientGroup, client: int) -> State:
        merge: Merge = group.scratch["merge"]
        mixture, weights = group.client_of(merge.mixture, client), group.weights_of(client)
        named = {f"{OWN}.{name}": weights[name] for name in mixture}
        named |= {f"{MERGE}.{name}": value for name, value in mixture.items()}
        return arrays_of(named) | {LEARNT: np.array(int(merge.learnt[client]))}

    def finish(self, group: ClientGroup) -> None:
        self.prepare(group)


class Merge:
    """The mixtures of a group of clients, with a client axis in a stack.

    names: of the tensors that are mixed. mixture: A by name. learnt: which clients' A has settled once.
    """

    def __init__(self, method: FedALA, group: ClientGroup) -> None:
        self._method = method
        self._group = group
        self.names = group.names[-method.merge_tensors :]
        ones = {name: torch.ones_like(group.start[name]) for name in group.names}
        own, mixture = group.state(OWN, group.start), group.state(MERGE, ones)
        # A clone: a state that is kept in memory must not change under a repeated request.
        self.mixture = {name: mixture[name].clone() for name in self.names}
        self._own = [own[name] for name in self.names]
        # W - w_i: zeros for a client without a state, which therefore starts from W itself.
        self._away = [group.start[name] - own[name] for name in self.names]
        states = [group.own_state(client) or {} for client in range(len(group.clients))]
        self.learnt = np.array([bool(state.get(LEARNT, 0)) for state in states])
        moved = torch.stack([group.learners.per_client(away).ne(0).any(dim=1) for away in self._away])
        # Clients that have weights of their own, other than those received.
        self._differs = np.array([bool(state) for state in states]) & moved.any(dim=0).cpu().numpy()

    def learn(self) -> None:
        """Passes over each client's share of rows: one, or the first time as many as it takes to settle."""
        active = self._differs.copy()
        if not active.any():
            return
        plans = [self._plan(client) if active[client] else [] for client in range(len(active))]
        part = self._group.again(self._method, self._group.weights_now() | self.theta(), plans=plans)
        seen: list[list[float]] = [[] for _ in active]
        while active.any():
            losses = self._pass(part, active)
            for client in np.flatnonzero(active):
                own = seen[client]
                own.append(losses[max(0, len(plans[client]) - 1)][client])
                calm = len(own) > LOSSES and np.std(own[-LOSSES:]) < self._method.merge_threshold
                active[client] = not (self.learnt[client] or calm or len(own) >= PASSES)
        self.learnt |= self._differs

    def _pass(self, part: ClientGroup, active: Array) -> Array:
        """One pass; only the active clients' mixtures change. Losses (steps, clients)."""
        rate, count = self._method.merge_rate, len(self.names)
        per_step = [] if part.steps.any() else [torch.zeros_like(part.losses[:, 0])]
        mask = torch.as_tensor(active, dtype=part.dtype, device=part.device)
        away = [distance * part.learners.spread(mask, distance) for distance in self._away]
        for number in range(int(part.steps.max())):
            step = Step(part, number, len(active))
            losses = step.cross_entropy(step.forward().logits)
            gradients = torch.autograd.grad(losses.sum(), step.weights[-count:])
            with torch.no_grad():
                for name, gradient, distance in zip(self.names, gradients, away, strict=True):
                    self.mixture[name].sub_(gradient * distance, alpha=rate).clamp_(0, 1)
                for weight, theta in zip(part.learners.weights[-count:], self.theta().values(), strict=True):
                    weight.copy_(theta)
            per_step.append(losses.detach())
        return torch.stack(per_step).double().cpu().numpy()

    def _plan(self, client: int) -> list[Array]:
        """A client's share of its rows, in batches; the same in every pass of a round."""
        group, method = self._group, self._method
        rows = int(group.sizes[client])
        count = max(1, round(method.merge_share * rows))
        chosen = group.generator(client, "merge").permutation(rows)[:count]
        batches = [chosen[first : first + method.batch] for first in range(0, count, method.batch)]
        return [batch for batch in batches if len(batch) >= group.least]

    def theta(self) -> dict[str, Tensor]:
        """What clients start from; without weights of their own, what they received."""
        parts = zip(self.names, self._own, self._away, strict=True)
        return {name: torch.addcmul(own, away, self.mixture[name]) for name, own, away in parts}
