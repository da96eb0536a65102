"""FedAS: the shared part of the network is first fitted to what the client knew, its classifier stays home.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024. The base is
everything before the last layer, the head that layer. Client i keeps the model it ended with. In a round:

    prototypes  p_c = mean of the old base over the client's rows of class c
    alignment   base <- base - alignment_rate grad sum_c MSE(base(x) of class c, p_c), classes of a batch,
                from the base received; then its own head on top of it
    training    CE, all weights
    server      base <- sum_i T_i base_i / sum_i T_i,   T_i = sum over batches |grad of their mean CE|²

The head is not sent; the one that travels down is the run's first, for clients that join. Each T_i base_i
and T_i is a term of a sum. Alignment and T_i go through the batches of the round's first epoch, in eval
mode: alignment leaves running statistics alone. At its first time a client's old model is the one received,
so its alignment draws features to their own class means. T_i grows with the number of batches, as in the
authors' code. The base is copied for every client; the authors' server hands out its own, which each client
changes for the next.

On frozen features ("linear") there is no base: nothing is aligned or shared, and clients train by themselves.

A client's own model is the final base, aligned once more, under its own head, as the authors evaluate it.
One that never took part has no head: it first trains as in a round, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.gradient.batches import steps_per_epoch
from fedsolve.gradient.gradient_method import ClientGroup, State, Step, parameter, register
from fedsolve.gradient.learners import SingleNetwork
from fedsolve.gradient.personalised import PersonalMethod
from fedsolve.gradient.prototypes import base_names, class_means, head_names

PREVIOUS, STATISTICS = "previous", "statistics"
LEAST = 1e-30
"""T_i of a client whose gradients vanish: if all do, they count alike instead of not at all."""


@register(
    paper="Yang, Huang, Ye, CVPR 2024",
    up="trace * base weights and trace; the classifier never",
    down="base weights, and the first classifier",
)
class FedAS(PersonalMethod):
    """FedAS: base aligned to the client's prototypes and weighted by Fisher traces, heads stay."""

    keeps_state = True
    shares_a_predictor = False
    stays = "classifier"

    alignment_epochs: int = parameter(
        1, "Passes over the rows before training that fit the base to the prototypes; 0 is none.", least=0
    )
    alignment_rate: float = parameter(0.01, "Learning rate of these passes, plain SGD.", least=0)
    fisher: bool = parameter(True, "Clients count by their Fisher traces; otherwise by --weighting.")

    def prepare(self, group: ClientGroup) -> None:
        previous = group.state(PREVIOUS, group.start)
        if self.alignment_epochs * self.alignment_rate > 0 and base_names(group):
            self._align(group, previous)
        group.put({name: previous[name] for name in head_names(group)})

    def _align(self, group: ClientGroup, previous: dict[str, Tensor]) -> None:
        """Fit the bases received to the class means of the clients' previous ones."""
        prototypes = torch.stack([_prototypes(group, previous, k) for k in range(len(group.clients))])
        stacked, weights = group.learners.stacked, group.learners.weights
        bases = [group.names.index(name) for name in base_names(group)]
        for _ in range(self.alignment_epochs):
            for step in _first_epoch(group):
                losses = _distances(step, step.forward().features, step.leading(prototypes))
                if not losses.requires_grad:
                    continue  # the other trained weights do not affect the features
                gradients = step.differentiate(losses)
                with torch.no_grad():
                    for number in bases:
                        weight = weights[number][: step.active] if stacked else weights[number]
                        weight.sub_(gradients[number], alpha=self.alignment_rate)

    def weight(self, group: ClientGroup, client: int) -> float:
        if not self.fisher or not base_names(group):
            return super().weight(group, client)
        if "traces" not in group.scratch:
            group.scratch["traces"] = fisher_traces(group)
        return max(float(group.scratch["traces"][client]), LEAST)

    def withheld(self, group: ClientGroup) -> list[str]:
        return head_names(group)

    def state(self, group: ClientGroup, client: int) -> State:
        return group.snapshot(client, PREVIOUS, STATISTICS)

    def finish(self, group: ClientGroup) -> None:
        if group.own_state(0) is None:
            group.train()
        else:
            self.prepare(group)


def fisher_traces(group: ClientGroup) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """T_i (clients,): squared gradients of the batches' mean cross-entropy at the weights of the moment."""
    traces = torch.zeros(len(group.clients), dtype=torch.float64, device=group.device)
    for step in _first_epoch(group):
        gradients = step.differentiate(step.cross_entropy(step.forward().logits))
        for gradient in gradients:
            traces[: step.active] += group.learners.per_client(gradient).double().square().sum(dim=1)
    return traces.cpu().numpy()


def _prototypes(group: ClientGroup, weights: dict[str, Tensor], client: int) -> Tensor:
    """Class means (classes, width) of a client's rows under these weights."""
    own = group.start | group.client_of(weights, client)
    forward = group.reference(own, group.own_buffers(STATISTICS))
    return class_means(group, client, lambda inputs: forward(inputs[None]).features[0])


def _distances(step: Step, features: Tensor, prototypes: Tensor) -> Tensor:
    """Sum over the classes of each client's batch of the MSE of their features to the prototype."""
    classes = prototypes.shape[1]
    present = F.one_hot(step.targets, classes).to(features.dtype)
    real = step.real_rows()
    if not isinstance(real, bool):
        present = present * real.unsqueeze(-1)
    # Each row counts 1 / (rows of its class in the batch), padding not at all.
    share = (present / present.sum(dim=1, keepdim=True).clamp(min=1)).sum(dim=-1)
    target = prototypes.gather(1, step.targets.unsqueeze(-1).expand(-1, -1, prototypes.shape[2]))
    return (share * (features - target).square().mean(dim=-1)).sum(dim=1)


def _first_epoch(group: ClientGroup) -> Iterator[Step]:
    """The batches of the round's first epoch.

    A single network is in eval mode meanwhile: no running statistics move, no dropout draws.
    """
    lengths = np.minimum(steps_per_epoch(group.method, group.sizes, group.least), group.steps)
    with ExitStack() as stack:
        if isinstance(group.learners, SingleNetwork):
            stack.callback(group.learners.network.eval().train)
        for number in range(int(lengths.max(initial=0))):
            yield Step(group, number, int(np.sum(lengths > number)))
