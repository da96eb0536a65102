"""Personalised gradient methods: every client leaves with a network of its own.

A run is that of any gradient method. Afterwards `personal` gives a client's predictor where its data are,
from the shared model and what the client kept of the run; nothing is sent. `model.personal(client)` does so
in a local federation, `participant.personalise(model)` anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from fedsolve.arrays import Array
from fedsolve.backends.devices import find_device, surroundings
from fedsolve.backends.torch_later import Tensor
from fedsolve.container import with_prefix
from fedsolve.federation.method import Block, Chain, Request, Spec, opening
from fedsolve.federation.participant import ClientData, Memory
from fedsolve.federation.states import State, ticket
from fedsolve.gradient.answers import KIND
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Weights
from fedsolve.gradient.learners import on_host
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.slots import borrowed

G = TypeVar("G", bound=GradientMethod)

ALONE = "alone"
"""The name of a client that trains outside an exchange: its random streams do not depend on who it is."""


@dataclass(frozen=True, kw_only=True)
class PersonalMethod(GradientMethod):
    """A gradient method after which every client has a model of its own."""

    shares_a_predictor: ClassVar[bool] = True
    """Whether the shared model is one to predict with, or only what clients make theirs of."""

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> GradientModel:
        """The predictor of the client that owns `data`: its local part of one more round, not sent.

        model: the shared one. state: what the client ended its last exchange with; None when it never took
        part, or the method's clients keep nothing.
        """
        return train_alone(self, model, data, state, local=self.finish)

    def finish(self, group: ClientGroup) -> None:
        """What a client does for a model of its own: the local part of a round, from the final weights."""
        group.train()


@contextmanager
def alone(
    method: GradientMethod,
    model: GradientModel,
    data: ClientData,
    state: State | None = None,
    *,
    rate: float | None = None,
) -> Iterator[ClientGroup]:
    """A group of one client outside an exchange, on the model's device, as if its weights had just come.

    It is in the round after the last. state: what the client kept. rate: that of the round when None.
    """
    number = method.rounds
    spec = Spec(model.features, model.classes, model.outputs, "bytes")
    memory = Memory(chain=Chain([Block({"opening": opening(method, spec)})]), name=ALONE)
    run = memory.chain.digests[1]
    if state is not None:
        memory.states.write(run, 0, state, None)
    note = {
        "rate": method.rate_of(number) if rate is None else rate,
        "since": {} if state is None else {ticket(run, ALONE): 0},
    }
    arrays = {f"w.{name}": array for name, array in model.weights.items()}
    arrays |= {f"b.{name}": array for name, array in model.buffers.items()}
    request = Request(KIND, 1, number, (ALONE,), note, arrays)
    device = find_device(model.device)
    with borrowed(method, model.features, model.outputs, device) as slot, surroundings(device):
        yield ClientGroup(method, [data], request, [memory], device, slot)


def train_alone(
    method: GradientMethod,
    model: GradientModel,
    data: ClientData,
    state: State | None = None,
    *,
    local: Callable[[ClientGroup], None] = ClientGroup.train,
    rate: float | None = None,
) -> PersonalGradientModel:
    """The network of one client after its local part of a round, from the model's weights.

    The method's hooks apply: what it prepares, its losses and its edits of gradients. local: what the client
    does. Without rows: the model's own weights. The rest as for `alone`.
    """
    if len(data) == 0:
        return PersonalGradientModel.of(model, {}, kept(state))
    with alone(method, model, data, state, rate=rate) as group:
        local(group)
        return PersonalGradientModel.of(model, *now(group))


def now(group: ClientGroup) -> tuple[Weights, Weights]:
    """Weights and running statistics of a group's first client, as arrays; a stack has no statistics."""
    return arrays_of(group.weights_of(0)), arrays_of(group.buffers_now())


def arrays_of(values: Mapping[str, Tensor]) -> Weights:
    """Tensors as arrays of the same precision."""
    return {name: on_host(value) for name, value in values.items()}


def kept(state: State | None, prefix: str = "buffer") -> dict[str, Array]:
    """Arrays `prefix.NAME` of a state by NAME; the running statistics that clients keep with buffers="local"
    unless told otherwise.
    """
    return with_prefix(state or {}, f"{prefix}.")


def as_method(kind: type[G], method: GradientMethod, **changes: Any) -> G:
    """A method of another kind with the common parameters of this one, for a part of its round."""
    common = {part.name: getattr(method, part.name) for part in dataclasses.fields(GradientMethod)}
    return kind(**common | {"feedback": None, "track": None} | changes)
