"""What clients train on: the rows of a group, where they lie or copied to a device, and their batches."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array, stream
from fedsolve.backends.devices import torch_type
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.federation.participant import ClientData
from fedsolve.gradient import networks
from fedsolve.gradient.augmentation import ImageInputs, plan_moves
from fedsolve.gradient.learners import laid_out

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod
    from fedsolve.gradient.steps import Batch

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
        self.weights = [client.own_weights for client in clients]
        self.sizes = np.array([len(client) for client in clients])
        weighed = zip(self.sizes.tolist(), self.weights, strict=True)
        self.counted = np.array([rows if given is None else float(given.sum()) for rows, given in weighed])
        self.images = ImageInputs(method.parameters(), features, device)
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

    def read(self, numbers: Tensor, moves: Tensor | None = None) -> Tensor:
        """Inputs of the network from the rows with these numbers; moves (rows, 3) for images in training."""
        if isinstance(self._stored, torch.Tensor):
            return self.images.read(self._stored[numbers], moves)
        rows = np.ascontiguousarray(_plain(self._stored[numbers.cpu().numpy()]))
        return self.images.read(torch.from_numpy(rows).to(self.device), moves)

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


class GroupBatches:
    """The batches of a group's clients, with padding behind short ones.

    plans: of each client, its batches as positions among its rows. stacked: the clients' networks are.
    tall: rows of all batches with their padding; those of the longest when None.
    steps: batches of each client.
    """

    def __init__(
        self,
        rows: GroupRows,
        method: GradientMethod,
        plans: Sequence[Sequence[Array]],
        round_: int,
        stacked: bool,
        tall: int | None = None,
    ) -> None:
        self._rows, self._stacked = rows, stacked
        self.steps = np.array([len(plan) for plan in plans])
        self._lengths = np.zeros((len(plans), max(1, int(self.steps.max()))), dtype=np.int64)
        for client, plan in enumerate(plans):
            self._lengths[client, : len(plan)] = [len(batch) for batch in plan]
        self._tall = max(1, int(self._lengths.max())) if tall is None else tall
        shape = *self._lengths.shape, self._tall
        numbers, targets = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        # What each row counts in the mean of its batch.
        share = np.zeros(shape)
        for client, plan in enumerate(plans):
            own, codes, given = rows.numbers[client], rows.codes[client], rows.weights[client]
            if len(own):
                # Padding is a row of the client's own: a bad row affects nobody else, and losses that leave
                # missing classes out stay finite.
                numbers[client], targets[client] = own[0], codes[0]
            for number, batch in enumerate(plan):
                place = client, number, slice(len(batch))
                numbers[place], targets[place] = own[batch], codes[batch]
                share[place] = 1.0 / max(1, len(batch))
                if given is not None and rows.counted[client] > 0:
                    # By the mean weight of the client, not of the batch: then a batch's gradient is on
                    # average that of all rows.
                    share[place] *= given[batch] * (len(given) / rows.counted[client])
        self._numbers = torch.as_tensor(numbers, device=rows.device)
        self._targets = torch.as_tensor(targets, device=rows.device)
        self._share = torch.as_tensor(share, dtype=rows.dtype, device=rows.device)
        self._moves: Tensor | None = None
        if rows.images.moved:
            moves = plan_moves(method, self._lengths, rows.clients, round_, self._tall)
            self._moves = torch.as_tensor(moves, device=rows.device)

    def at(self, number: int, active: int) -> Batch:
        """A step's batch of the leading clients."""
        rows, tall = self._rows, self.tall(number)
        place = slice(active), number, slice(tall)
        moves = None if self._moves is None else self._moves[place].flatten(0, 1)
        inputs = rows.read(self._numbers[place].flatten(), moves)
        if not self._stacked:
            inputs = laid_out(inputs)
        plain = self._is_full(number, active) and not rows.weighted
        share = None if plain else self._share[place]
        return inputs.reshape(active, tall, *inputs.shape[1:]), self._targets[place], share

    def tall(self, number: int) -> int:
        """Rows of a step's batch with its padding; a single network sees a short batch as it is."""
        return self._tall if self._stacked else int(self._lengths[0, number])

    def _is_full(self, number: int, active: int) -> bool:
        return bool((self._lengths[:active, number] == self.tall(number)).all())

    def real_rows(self, number: int, active: int) -> Tensor | bool:
        """Which rows of a batch are not padding."""
        if self._is_full(number, active):
            return True
        lengths = torch.as_tensor(self._lengths[:active, number], device=self._rows.device)
        return torch.arange(self._tall, device=self._rows.device) < lengths[:, None]

    def lengths(self, client: int, first: int = 0) -> list[int]:
        """Rows of a client's batches, from this one on."""
        lengths: list[int] = self._lengths[client, first : int(self.steps[client])].tolist()
        return lengths


def plan_batches(method: GradientMethod, rows: int, round_: int, client: str, least: int) -> list[Array]:
    """The batches of all epochs, as positions among the client's rows."""
    rng = stream(method.seed, "batches", client, round_)
    batches: list[Array] = []
    passes = method.passes_of(client, round_)
    if method.local_steps is not None:
        # As many passes as it takes; the last one may be cut short.
        a_pass = int(steps_per_epoch(method, np.array([rows]), least)[0])
        passes = math.ceil(method.local_steps / max(1, a_pass))
    for _ in range(passes):
        # A single batch stays in the order of the rows: then its sums are those of plain gradient descent.
        order = np.arange(rows) if rows <= method.batch else rng.permutation(rows)
        for first in range(0, rows, method.batch):
            batch = order[first : first + method.batch]
            if len(batch) >= (method.batch if method.last_batch == "drop" else least):
                batches.append(batch)
    return batches[: method.local_steps]


def steps_per_epoch(method: GradientMethod, sizes: Array, least: int) -> Array:
    """Steps that clients with so many rows take in one epoch."""
    is_short = sizes % method.batch < (method.batch if method.last_batch == "drop" else least)
    return sizes // method.batch + ~is_short
