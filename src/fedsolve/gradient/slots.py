"""Slots: what a client trains with while it trains, kept for the next one.

A slot has the modules of a network, the steps recorded with them, and on a GPU a stream of its own. Clients
in different slots train side by side: the kernels of a small network fill a small part of a large GPU, and
those of different streams run at the same time. What a client computes does not depend on who trains beside
it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedsolve.backends.torch_later import Tensor, nn, torch
from fedsolve.gradient import networks
from fedsolve.gradient.graphs import Pool, Recordings, replays

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

_POOL: OrderedDict[tuple[Any, ...], list[Slot]] = OrderedDict()
_KINDS = 4
"""How many kinds of slots are kept for reuse: the most recently used ones."""

_STREAMS = 32
"""How many slots of a kind are made rather than taken from a run whose recorded steps would be lost."""

_LOCK = threading.Lock()


class Slot:
    """Modules of one kind, the steps recorded with them, and a stream of the GPU.

    user: the method that the slot was last used by. pool: memory of the recorded steps.
    """

    def __init__(self, make: Callable[[], nn.Module], device: torch.device) -> None:
        self._make = make
        self._modules: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self._lent = 0
        self._recordings: dict[int, Recordings] = {}
        self.user: Any = None
        self.pool = Pool()
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def lend(self) -> nn.Module:
        """A module in training mode, lent to one user until the slot is given back.

        Building a deep network costs more than a step of training it, so modules are used again. Buffers
        that do not travel, such as counters of batches, start as they were built, since who used them last
        is chance.
        """
        if self._lent == len(self._modules):
            network = self._make()
            fresh = {name: counter.clone() for name, counter in _counters(network).items()}
            self._modules.append((network, fresh))
        network, fresh = self._modules[self._lent]
        self._lent += 1
        for name, counter in _counters(network).items():
            counter.copy_(fresh[name])
        return network.train()

    def recordings(self, network: nn.Module) -> Recordings:
        """What was recorded with one of the slot's modules."""
        return self._recordings.setdefault(id(network), Recordings(self.pool))

    @contextmanager
    def used(self) -> Iterator[Slot]:
        """The slot, at work on its own stream; done when the block ends."""
        self._lent = 0
        with torch.cuda.stream(self.stream):
            yield self
        if self.stream is not None:
            self.stream.synchronize()


@contextmanager
def borrowed(method: GradientMethod, features: int, outputs: int, device: torch.device) -> Iterator[Slot]:
    """A slot for the method's network, which comes back at the end."""
    networks.check_allowed(method.network)  # also where the module was made for somebody else
    kind = method.network, networks.custom.serial(method.network)
    key = (*kind, features, outputs, method.precision, method.shape, str(device))
    with _LOCK:
        slot = _chosen(_POOL.get(key, []), method, replays(device))
    if slot is None:
        slot = Slot(lambda: method.build(features, outputs).to(device), device)
    slot.user = method
    try:
        with slot.used():
            yield slot
    finally:
        with _LOCK:
            _POOL.setdefault(key, []).append(slot)
            _POOL.move_to_end(key)
            while len(_POOL) > _KINDS:
                _POOL.popitem(last=False)


def _chosen(spare: list[Slot], method: GradientMethod, records: bool) -> Slot | None:
    """The slot that this method used last; else any, where nothing recorded is lost or there are many."""
    for place in reversed(range(len(spare))):
        if spare[place].user == method:
            return spare.pop(place)
    return spare.pop(0) if spare and (not records or len(spare) >= _STREAMS) else None


def _counters(network: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in network.named_buffers() if not value.is_floating_point()}
