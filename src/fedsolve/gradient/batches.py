"""Which rows a client trains on, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedsolve.container import Array
from fedsolve.gradient.streams import stream

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod


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
