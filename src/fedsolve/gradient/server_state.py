"""What the server of a gradient method holds from round to round, and what it is sent by single clients.

Arrays that are no addends of a sum travel under their client's name, `own.NAME@CLIENT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import with_prefix
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Term, Total

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

Weights = dict[str, Array]


@dataclass
class ServerState:
    """The server's state of a gradient method.

    weights: the global model in float64. buffers: averaged running statistics. memory: whatever the
    algorithm keeps, as named arrays. aggregated: the mean of the newest local models. clients: how many the
    federation has. cohort: who is asked in this round.
    """

    method: GradientMethod
    spec: Spec
    weights: Weights
    buffers: Weights
    round: int = 0
    clients: int = 0
    cohort: tuple[str, ...] = ()
    memory: dict[str, Array] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    aggregated: Weights = field(default_factory=dict)

    def sent(self) -> Weights:
        """The weights as this round's clients received them: rounded to the precision they travel in."""
        precision = np.dtype(self.method.precision)
        return doubles({n: w.astype(precision) for n, w in self.method.outgoing(self).items()})

    def kept(self, prefix: str, first: float = 0.0) -> Weights:
        """Arrays `prefix.NAME` of the memory by weight name, and what they hold at first."""
        return {
            name: self.memory.get(f"{prefix}.{name}", np.full(array.shape, first))
            for name, array in self.weights.items()
        }

    def keep(self, prefix: str, values: Mapping[str, Array]) -> None:
        self.memory |= {f"{prefix}.{name}": array for name, array in values.items()}


def doubles(weights: Mapping[str, Any]) -> Weights:
    """The same weights, arrays or tensors of the host, in float64."""
    return {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}


def set_apart(term: Term, client: str, names: Iterable[str]) -> None:
    """Let these arrays of a term travel by themselves instead of as addends; `weight` stays in the sum."""
    for name in names:
        term.arrays[f"own.{name}@{client}"] = term.arrays.pop(name)
        term.factors.pop(name, None)
    term.arrays[f"weight@{client}"] = term.arrays["weight"]


def trained(total: Total) -> list[str]:
    """The clients that trained, in the order of every sum."""
    return [client for client in total.cohort if f"weight@{client}" in total.term.arrays]


def weight_of(total: Total, client: str) -> float:
    return float(total[f"weight@{client}"][0])


def gathered(total: Total) -> dict[str, Weights]:
    """By client and name: what was set apart."""
    by_client: dict[str, Weights] = {client: {} for client in trained(total)}
    for full, array in with_prefix(total.term.arrays, "own.").items():
        name, _, client = full.partition("@")
        if client in by_client:
            by_client[client][name] = array
    return by_client


def weighted_mean(parts: Mapping[str, Weights], weights: Mapping[str, float]) -> Weights:
    """sum_i weight_i part_i / sum_i weight_i, in the order and with the rounding of a sum of terms."""
    total, whole = Term(), 0.0
    for client, arrays in parts.items():
        total.add(Term(dict(arrays), factors=dict.fromkeys(arrays, weights[client])))
        whole += weights[client]
    return {name: array / whole for name, array in total.arrays.items()}
