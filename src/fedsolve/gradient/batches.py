"""Which rows clients train on, step by step: their plans, and the batches of a group as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.arrays import Array, stream
from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData
from fedsolve.gradient.augmentation import ImageInputs, plan_moves
from fedsolve.gradient.learners import laid_out
from fedsolve.gradient.tensors import TensorRows

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod
    from fedsolve.gradient.group import ClientGroup
    from fedsolve.gradient.steps import Batch

AHEAD = 32 << 20
"""Bytes of inputs that a GPU reads at once for the steps to come."""

DRAWN, DRAWN_AT_LEAST = 1 << 18, 1 << 10
"""Rows for which a GPU gets what is drawn at once, and those that a step counts as at least."""


class GroupRows:
    """What the clients of a group hold, in the group's order.

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
        self.features = features
        self.sizes = np.array([len(client) for client in clients])
        self.weights = [client.own_weights() for client in clients]
        self.counted = np.array(
            [
                rows if given is None else float(given.sum())
                for rows, given in zip(self.sizes.tolist(), self.weights, strict=True)
            ]
        )
        self.images = ImageInputs(method.parameters(), features, device)
        self.stored = TensorRows(clients, device)
        # Padding is one of the client's own rows, so that a bad row affects nobody else.
        self.padding = np.array([rows[0] if len(rows) else 0 for rows in self.stored.numbers])

    @property
    def weighted(self) -> bool:
        """Whether rows of a client count by weights."""
        return any(given is not None for given in self.weights)

    def of(self, client: int, rows: int = 2048) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows of a client in their order, at most `rows` at a time: inputs and targets."""
        for first in range(0, int(self.sizes[client]), rows):
            numbers = self.stored.numbers[client][first : first + rows]
            inputs = self.images.read(self.stored.take(numbers))
            targets = torch.as_tensor(self.codes[client][first : first + rows], device=self.device)
            yield inputs, targets


class GroupBatches:
    """The batches of a group's clients: row numbers (clients, steps, rows), -1 where padded; targets; each
    row's share of a mean; and how images are moved, None where they stay as they are.

    plans: of each client, its batches as positions among its rows. stacked: the clients' networks are.
    tall: rows of all batches with their padding; those of the longest when None.
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
        if tall is None:
            tall = max((len(batch) for plan in plans for batch in plan), default=1)
        shape = len(plans), max(1, int(self.steps.max())), tall
        numbers = np.full(shape, -1, dtype=np.int64)
        targets = np.zeros(shape, dtype=np.int64)
        share = np.zeros(shape)
        for client, plan in enumerate(plans):
            # Padding has a label that the client knows: losses that leave missing classes out stay finite.
            codes = rows.codes[client]
            targets[client] = codes[:1] if len(codes) else 0
            for number, batch in enumerate(plan):
                numbers[client, number, : len(batch)] = rows.stored.numbers[client][batch]
                targets[client, number, : len(batch)] = codes[batch]
                share[client, number, : len(batch)] = 1.0 / max(1, len(batch))
                given = rows.weights[client]
                if given is not None and rows.counted[client] > 0:
                    # By the mean weight of the client, not of the batch: then a batch's gradient is on
                    # average that of all rows.
                    share[client, number, : len(batch)] *= given[batch] * (len(given) / rows.counted[client])
        self._numbers = numbers
        self._targets = torch.as_tensor(targets, device=rows.device)
        self._share = torch.as_tensor(share, dtype=rows.dtype, device=rows.device)
        self._read: dict[int, Tensor] = {}
        self._moves: Tensor | None = None
        if rows.images.moved:
            moves = plan_moves(method, plans, rows.clients, round_, tall)
            self._moves = torch.as_tensor(moves, device=rows.device)

    def at(self, number: int, active: int) -> Batch:
        """A step's batch of the leading clients."""
        rows = self._rows
        if not self._stacked:
            # A single network sees its last batch as short as it is: nothing is padded.
            inputs = self._inputs(number)
            share = self._share[:1, number, : len(inputs)] if rows.weighted else None
            return inputs[None], self._targets[:1, number, : len(inputs)], share
        numbers = self._numbers[:active, number]
        filled = np.where(numbers >= 0, numbers, rows.padding[:active, None])
        moves = None if self._moves is None else self._moves[:active, number].flatten(0, 1)
        inputs = rows.images.read(rows.stored.take(filled.reshape(-1)), moves)
        plain = bool((numbers >= 0).all()) and not rows.weighted
        share = None if plain else self._share[:active, number]
        return inputs.reshape(active, -1, *inputs.shape[1:]), self._targets[:active, number], share

    def tall(self, number: int) -> int:
        """Rows of a step's batch, with its padding."""
        numbers = self._numbers[0, number]
        return len(numbers) if self._stacked else int(np.sum(numbers >= 0))

    def real_rows(self, number: int, active: int) -> Tensor | bool:
        """Which rows of a batch are not padding."""
        numbers = self._numbers[:active, number]
        if not self._stacked or bool((numbers >= 0).all()):
            return True
        return torch.as_tensor(numbers >= 0, device=self._rows.device)

    def lengths(self, client: int, first: int = 0) -> list[int]:
        """Rows of a client's batches, from this one on."""
        lengths: list[int] = np.sum(
            self._numbers[client, first : int(self.steps[client])] >= 0, axis=1
        ).tolist()
        return lengths

    def _inputs(self, number: int) -> Tensor:
        """A single network's inputs in a step. A GPU reads those of many steps at once, row by row alike."""
        if number not in self._read:
            rows, numbers = self._rows, self._numbers[0]
            step = numbers.shape[1] * rows.features * rows.dtype.itemsize
            steps = max(1, AHEAD // step) if rows.device.type == "cuda" else 1
            there = numbers[number : number + steps] >= 0
            moves = None
            if self._moves is not None:
                moves = self._moves[0, number : number + steps]
                # Found on the processor: a mask on the device would wait for everything before it.
                moves = moves.flatten(0, 1)[torch.as_tensor(np.flatnonzero(there), device=rows.device)]
            inputs = rows.images.read(rows.stored.take(numbers[number : number + steps][there]), moves)
            ends = np.cumsum(there.sum(axis=1)).tolist()
            self._read = {
                number + k: laid_out(inputs[first:end])
                for k, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
            }
        return self._read[number]


def drawn_ahead(
    group: ClientGroup, number: int, before: Iterable[str] | None
) -> dict[int, dict[str, Tensor]]:
    """What the group's method draws for this step, and on a GPU for some after it, as tensors by name.

    before: names of what was drawn for earlier steps.
    """
    rows = max(DRAWN_AT_LEAST, len(group.clients) * group.batches.tall(number))
    last = min(number + DRAWN // rows, int(group.steps.max())) if group.device.type == "cuda" else 0
    numbers = range(number, max(number + 1, last))
    drawn = group.method.draw(group, numbers)
    names = list(drawn[0] if before is None else before)
    for other in map(list, drawn):
        if other != names:
            raise DataError(
                f"{type(group.method).__name__}.draw gives {names} for one step and {other} for another. "
                "Give every step of a round the same names, in the same order."
            )
    made: dict[int, dict[str, Tensor]] = {step: {} for step in numbers}
    for name in names:
        carried = _carried(group, [one[name] for one in drawn])
        for step, tensor in zip(numbers, carried, strict=True):
            made[step][name] = tensor
    return made


def _carried(group: ClientGroup, arrays: list[Array]) -> list[Tensor]:
    """These arrays on the group's device, in one go; those of fractions in its precision."""
    joined = torch.as_tensor(np.concatenate([array.ravel() for array in arrays]))
    if joined.is_floating_point():
        joined = joined.to(group.dtype)
    parts = torch.split(joined.to(group.device), [array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


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


def rows_per_epoch(method: GradientMethod, sizes: Array, least: int) -> Array:
    """Rows that a client sees in one epoch."""
    rest = sizes % method.batch
    dropped = rest < (method.batch if method.last_batch == "drop" else least)
    return np.where(dropped, sizes - rest, sizes)


def steps_per_epoch(method: GradientMethod, sizes: Array, least: int) -> Array:
    """Steps that a client takes in one epoch."""
    return -(-rows_per_epoch(method, sizes, least) // method.batch)
