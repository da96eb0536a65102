"""Personalised gradient methods: every client leaves with a network of its own.

A run is that of any gradient method. Afterwards `personal` gives a client's predictor where its data are,
from the shared model and what the client kept of the run; nothing is sent. `model.personal(client)` does so
in a local federation, `participant.personalise(model)` anywhere.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fedsolve.backends.devices import find_device, surroundings
from fedsolve.container import Array, with_prefix
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Block, Chain, Request
from fedsolve.federation.method import opening
from fedsolve.federation.participant import ClientData, Memory
from fedsolve.federation.states import State, ticket
from fedsolve.gradient import networks
from fedsolve.gradient.answers import KIND
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.run import GradientRun
from fedsolve.gradient.server_state import Weights
from fedsolve.gradient.slots import borrowed
from fedsolve.gradient.tensors import on_host

if TYPE_CHECKING:
    from torch import Tensor

G = TypeVar("G", bound=GradientMethod)

ALONE = "alone"
"""The name of a client that trains outside an exchange: its random streams do not depend on who it is."""


@dataclass(frozen=True, kw_only=True)
class PersonalMethod(GradientMethod):
    """A gradient method after which every client has a model of its own."""

    shares_a_predictor: ClassVar[bool] = True
    """Whether the shared model is one to predict with, or only what clients make theirs of."""

    @abstractmethod
    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> GradientModel:
        """The predictor of the client that owns `data`.

        model: the shared one. state: what the client ended its last exchange with; None when it never took
        part, or the method's clients keep nothing.
        """

    def start(self, spec: Spec) -> PersonalRun:
        return PersonalRun(self, spec)

    def finished(self, model: GradientModel, federation: Federation) -> GradientModel:
        if isinstance(federation, LocalFederation):
            model.federation = federation
        return model


class PersonalRun(GradientRun):
    """A run whose models know where the clients keep their states."""

    def _model(self, weights: Weights) -> GradientModel:
        model = super()._model(weights)
        model.run = self.chain.digests[1]
        model.kept = {ticket(model.run, client): exchange for client, exchange in self._since.items()}
        return model


@contextmanager
def alone(
    method: GradientMethod,
    model: GradientModel,
    data: ClientData,
    state: State | None = None,
    *,
    rate: float | None = None,
    client: str = ALONE,
    round_: int | None = None,
) -> Iterator[ClientGroup]:
    """A group of one client outside an exchange, on the model's device, as if its weights had just come.

    state: what the client kept. rate: that of the round when None. client, round_: name the random streams;
    the round after the last when None.
    """
    number = method.rounds if round_ is None else round_
    spec = Spec(model.features, model.classes, model.outputs, "bytes")
    memory = Memory(chain=Chain([Block({"opening": opening(method, spec)})]), name=client)
    run = memory.chain.digests[1]
    if state is not None:
        memory.states.write(run, 0, state, None)
    note = {
        "rate": method.rate_of(number) if rate is None else rate,
        "since": {} if state is None else {ticket(run, client): 0},
    }
    arrays = {f"w.{name}": array for name, array in model.weights.items()}
    arrays |= {f"b.{name}": array for name, array in model.buffers.items()}
    request = Request(KIND, 1, number, (client,), note, arrays)
    device = find_device(model.device)
    with borrowed(method, model.features, model.outputs, device) as slot, surroundings(device):
        yield ClientGroup(method, [data], request, [memory], device, slot)


def train_alone(
    method: GradientMethod,
    model: GradientModel,
    data: ClientData,
    state: State | None = None,
    *,
    epochs: int | None = None,
    rate: float | None = None,
    client: str = ALONE,
    round_: int | None = None,
) -> tuple[Weights, Weights]:
    """Weights and buffers after one client's local part of a round, from the model's weights.

    The method's hooks apply: what it prepares, its losses and its edits of gradients. epochs, rate: the
    method's when None. No epochs, or no rows: the model's own. The rest as for `alone`.
    """
    if epochs == 0 or len(data) == 0:
        return model.weights, model.buffers | own_buffers(state)
    if epochs is not None:
        method = method.with_passes(epochs)
    with alone(method, model, data, state, rate=rate, client=client, round_=round_) as group:
        group.train()
        return weights_of(group), buffers_of(group)


def weights_of(group: ClientGroup, client: int = 0) -> Weights:
    """A client's weights as arrays."""
    return arrays_of(group.weights_of(client))


def buffers_of(group: ClientGroup) -> Weights:
    """The running statistics as arrays; none in a stack."""
    return arrays_of(group.buffers_now())


def arrays_of(values: Mapping[str, Tensor]) -> Weights:
    """Tensors as arrays of the same precision."""
    return {name: on_host(value) for name, value in values.items()}


def own_buffers(state: State | None) -> Weights:
    """The running statistics that a client keeps with buffers="local"; none otherwise."""
    return with_prefix(state or {}, "buffer.")


def kept(state: State | None, prefix: str) -> dict[str, Array]:
    """Arrays `prefix.NAME` of a state by NAME; none without a state."""
    return with_prefix(state or {}, f"{prefix}.")


def as_method(kind: type[G], method: GradientMethod, **changes: Any) -> G:
    """A method of another kind with the common parameters of this one, for a part of its round."""
    common = {part.name: getattr(method, part.name) for part in dataclasses.fields(GradientMethod)}
    return kind(**common | {"feedback": None, "track": None} | changes)


def first_weights(group: ClientGroup) -> dict[str, Tensor]:
    """The weights that the run began with: every participant can draw them from the seed.

    For methods whose `outgoing` weights are the global model's.
    """
    method = group.method
    if group.round == 0:
        return group.start
    network = networks.build_network(
        method.network,
        group.features,
        group.classes,
        seed=method.seed,
        dtype=method.precision,
        shape=method.image_shape,
    )
    return {name: p.detach().to(group.device) for name, p in networks.float_parameters(network).items()}
