"""Rows of the clients of a group, gathered batch by batch from where they lie or copied to a device once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.devices import torch_type
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.federation.participant import ClientData
from fedsolve.gradient import networks
from fedsolve.gradient.augmentation import ImageInputs

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

_DEVICE_BYTES = 8 << 30
_COPIES: dict[tuple[int, str], tuple[Any, Tensor]] = {}
_LOCK = threading.Lock()


class GroupRows:
    """The rows of the clients of a group, in the group's order.

    numbers: of each client's rows among all of them; clients that share an array share its rows.
    codes: their labels as numbers of classes. sizes: rows of each client. counted: the same by the rows'
    weights, where they have any.
    """

    def __init__(
        self,
        method: GradientMethod,
        clients: Sequence[ClientData],
        names: Sequence[str],
        codes: Sequence[Array],
        features: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.dtype: torch.dtype = getattr(torch, method.precision)
        self.clients = names
        self.codes = codes
        self.weights = [client.own_weights() for client in clients]
        self.sizes = np.array([len(client) for client in clients])
        weighed = zip(self.sizes.tolist(), self.weights, strict=True)
        self.counted = np.array([rows if given is None else float(given.sum()) for rows, given in weighed])
        self._images = ImageInputs(method.parameters(), features, device)
        sources = {id(client.source): client.source for client in clients}
        ends = np.cumsum([len(source) for source in sources.values()])
        starts = dict(zip(sources, [0, *ends.tolist()], strict=False))
        self.numbers = [
            starts[id(client.source)]
            + (np.arange(len(client)) if client.rows is None else np.asarray(client.rows, dtype=np.int64))
            for client in clients
        ]
        self._stored = _stored(list(sources.values()), device)

    @property
    def weighted(self) -> bool:
        """Whether rows of a client count by weights."""
        return any(given is not None for given in self.weights)

    @property
    def moved(self) -> bool:
        """Whether images are cut or mirrored in training."""
        return self._images.moved

    def read(self, numbers: Tensor, moves: Tensor | None = None) -> Tensor:
        """Inputs of the network from the rows with these numbers; moves (rows, 3) for images in training."""
        if isinstance(self._stored, torch.Tensor):
            return self._images.read(self._stored[numbers], moves)
        rows = np.ascontiguousarray(_plain(self._stored[numbers.cpu().numpy()]))
        return self._images.read(torch.from_numpy(rows).to(self.device), moves)

    def of(self, client: int, rows: int = 2048) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows of a client in their order, at most `rows` at a time: inputs and targets."""
        numbers, targets = (
            torch.as_tensor(own[client], device=self.device) for own in (self.numbers, self.codes)
        )
        for first in range(0, len(numbers), rows):
            yield self.read(numbers[first : first + rows]), targets[first : first + rows]


def _stored(arrays: list[Array], device: torch.device) -> Array | Tensor:
    """The arrays, one after the other: on a GPU where they fit there, otherwise as they lie.

    They keep the type they are stored in: bytes stay bytes.
    """
    if len({array.dtype for array in arrays}) > 1:
        # Scaled before they are joined: afterwards bytes could not be told from other numbers.
        arrays = [networks.scaled(array) for array in arrays]
    if device.type == "cpu" or sum(array.nbytes for array in arrays) > _DEVICE_BYTES:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    parts = [_device_copy(array, device) for array in arrays]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _device_copy(array: Array, device: torch.device) -> Tensor:
    """The array on the device, copied once for as long as the array lives."""
    key = (id(array), str(device))
    with _LOCK:
        entry = _COPIES.get(key)
        if entry is None:
            # A copy first: stored features are mapped read-only, and torch wants to write.
            tensor = torch.from_numpy(np.array(_plain(array))).to(device)
            # The copy goes when the array goes; its address may then be another array's.
            entry = (weakref.ref(array, lambda _: _COPIES.pop(key, None)), tensor)
            _COPIES[key] = entry
        return entry[1]


def _plain(array: Array) -> Array:
    """The array in a type that torch has; truth values become numbers."""
    kind = np.dtype(np.float32) if array.dtype == bool else torch_type(array.dtype)
    return array.astype(kind, copy=False)
