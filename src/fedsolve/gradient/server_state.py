"""What the server of a gradient method holds from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.container import Array
from fedsolve.federation.engine import Spec

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

Weights = dict[str, Array]


@dataclass
class ServerState:
    """The server's state of a gradient method.

    weights: the global model in float64. buffers: averaged running statistics. memory: whatever the
    algorithm keeps, as named arrays. aggregated: the mean of the newest local models. clients: how many the
    federation has. cohort: who is asked in this round. received: what the clients were sent.
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

    def kept(self, prefix: str) -> Weights:
        """Arrays `prefix.NAME` of the memory by weight name; zeros before the first."""
        return {
            name: self.memory.get(f"{prefix}.{name}", np.zeros(array.shape))
            for name, array in self.weights.items()
        }

    def keep(self, prefix: str, values: Mapping[str, Array]) -> None:
        self.memory |= {f"{prefix}.{name}": array for name, array in values.items()}


def doubles(weights: Mapping[str, Array]) -> Weights:
    """The same weights in float64."""
    return {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
