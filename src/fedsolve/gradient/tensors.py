"""Clients' rows as tensors: gathered batch by batch from where they lie, copied to a device once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.devices import torch_type
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.federation.participant import ClientData
from fedsolve.gradient import networks

_DEVICE_BYTES = 8 << 30
_COPIES: dict[tuple[int, str], tuple[Any, Tensor]] = {}
_LOCK = threading.Lock()


def on_host(tensor: Tensor) -> Array:
    """The tensor's values as an array of its own, in C order."""
    array: Array = tensor.detach().cpu().numpy()
    return np.asarray(array, order="C") if tensor.is_cuda else array.copy()


def handed_over(tensor: Tensor) -> Tensor:
    """A copy of the tensor where it lies, for others to read, whatever stream it is made in."""
    copied = tensor.detach().clone()
    if copied.is_cuda:
        # Its memory is used again only after what they have in line.
        copied.record_stream(torch.cuda.default_stream(copied.device))
    return copied


class TensorRows:
    """The features of several clients under one numbering: client k's rows are spans[k].

    On a GPU the source is copied there once and kept as long as the array lives, in the type it is stored
    in (bytes stay bytes); on the CPU batches are gathered from the array itself.
    """

    def __init__(self, clients: Sequence[ClientData], device: torch.device) -> None:
        self._device = device
        sources = {id(client.source): client.source for client in clients}
        starts, place = {}, 0
        for number, source in sources.items():
            starts[number] = place
            place += len(source)
        self.numbers = [
            starts[id(client.source)]
            + (np.arange(len(client)) if client.rows is None else np.asarray(client.rows, dtype=np.int64))
            for client in clients
        ]
        arrays = list(sources.values())
        if len({array.dtype for array in arrays}) > 1:
            # Scaled before they are joined: afterwards bytes could not be told from other numbers.
            arrays = [networks.scaled(array) for array in arrays]
        self._array: Array | None = None
        self._tensor: Tensor | None = None
        if device.type == "cpu" or sum(array.nbytes for array in arrays) > _DEVICE_BYTES:
            self._array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        else:
            parts = [_device_copy(array, device) for array in arrays]
            self._tensor = parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, numbers: Array | Tensor) -> Tensor:
        """The rows with these numbers, (len, width), as they are stored."""
        if self._tensor is not None:
            return self._tensor[torch.as_tensor(numbers, device=self._device)]
        assert self._array is not None
        rows = torch.from_numpy(np.ascontiguousarray(_plain(self._array[np.asarray(numbers)])))
        return rows.to(self._device)


def _device_copy(array: Array, device: torch.device) -> Tensor:
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
    """The array in a type that torch has; of truth values numbers."""
    kind = np.dtype(np.float32) if array.dtype == bool else torch_type(array.dtype)
    return array.astype(kind, copy=False)
