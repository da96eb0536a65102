"""The client's answers to a gradient method: local training, and the measure of drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsolve import registry
from fedsolve.backends.devices import find_device, surroundings
from fedsolve.backends.torch_later import torch
from fedsolve.errors import DataError
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, group_step
from fedsolve.gradient import alignment
from fedsolve.gradient.alignment import CHOICES, weight_of
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.slots import borrowed

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

KIND = "gradient"
DRIFT = "gradient-drift"
TOGETHER = 25
"""Clients that train side by side; of the same order as the cost of one more torch call a step."""


def _together(request: Request, chain: Chain, device: str) -> int:
    opening = (chain.blocks or request.blocks)[0].note["opening"]
    method: GradientMethod = registry.method_of(opening)
    return TOGETHER if method.trains_together(opening["features"], opening["outputs"], device) else 1


@group_step(KIND, _together)
def answer_training(
    clients: Sequence[ClientData], request: Request, memories: Sequence[Memory]
) -> list[Term]:
    """Local training of a group of clients from the weights received: weight * w and weight of each."""
    opening = memories[0].chain.opening
    method: GradientMethod = registry.method_of(opening)
    for client in clients:
        client.check_width(opening["features"], "the run")
        if client.weights is not None and not method.takes_weights:
            raise DataError(
                f"method '{method.key}' does not take sample weights or class weights; leave them out, or "
                "use another method, such as FedAvg or DeepAFL."
            )
    device = find_device(memories[0].kernels.device)
    with borrowed(method, opening["features"], opening["outputs"], device) as slot, surroundings(device):
        group = ClientGroup(method, clients, request, memories, device, slot)
        group.train()
        terms = group.terms()
        for place, number in enumerate(group.order):
            if group.steps[place] > 0:
                with torch.no_grad():
                    _measure(group, place, terms[number])
    return terms


def _measure(group: ClientGroup, place: int, term: Term) -> None:
    """What the choice of layers and the measure of drift need, in unweighted sums."""
    method, weights = group.method, group.weights_of(place)
    if method.feedback in CHOICES:
        names = {layer: weight_of(layer) for layer in group.note["layers"]}
        updates = {layer: weights[n].double() - group.start[n].double() for layer, n in names.items()}
        term.arrays |= alignment.alignment_sums(
            updates, method.feedback_sketch, method.seed, method.precision
        )
    if method.track == "drift":
        moves = {n: (w.double() - group.start[n].double()).cpu().numpy() for n, w in weights.items()}
        term.arrays |= {f"move.{name}": array for name, array in moves.items()}
        term.arrays["move_square"] = np.array([sum(float(np.vdot(a, a)) for a in moves.values())])
        group.memories[place].cache["move"] = (group.run, group.exchange, moves)
        if group.agreement:
            # Ratios, cosines, and how many: a layer that starts at zero has neither.
            agreement = np.array(list(group.agreement.values())).T
            defined = np.isfinite(agreement).all(axis=0)
            term.arrays["agreement"] = np.concatenate([*np.where(defined, agreement, 0.0), defined])


@group_step(DRIFT, lambda request, chain, device: 1)
def answer_drift(clients: Sequence[ClientData], request: Request, memories: Sequence[Memory]) -> list[Term]:
    """How far each client's latest update is from the mean over all clients (the paper's H, Eq. 59)."""
    terms = []
    for memory in memories:
        run, exchange, move = memory.cache.get("move", ("", -1, None))
        if (run, exchange) != (memory.chain.digests[1], request.exchange - 1):
            move = None  # it took no part in this round, or has been restarted since
        elif isinstance(move, dict):
            squares = [float(np.sum((own - request.arrays[f"move.{n}"]) ** 2)) for n, own in move.items()]
            move = float(np.sqrt(sum(squares)))
            # The number is enough to answer a repeated question; the update itself is no longer needed.
            memory.cache["move"] = (run, exchange, move)
        terms.append(Term({"drift": np.array([move or 0.0])}, {"trained": int(move is not None)}))
    return terms
