"""Random projections as seeds, not messages.

The value is (2u - 1) * (gain / sqrt(inputs)) with u of `uniforms` (scheme 1). Row `inputs` of the
(inputs + 1, outputs) array is the bias, or zeros. Only exact IEEE operations, so every platform gets the same
bits; a fingerprint lets two sides check that they do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array, uniform_key
from fedsolve.backends import NUMPY, Kernels, kernels_of
from fedsolve.errors import FedsolveError, ModelFileError, TermError
from fedsolve.federation.messages import Chain

_CACHED_BYTES = 256 << 20
_cache: OrderedDict[tuple[str, Drawn], Projection] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Drawn:
    """Which projection: entries are uniform in ±gain / sqrt(inputs); without a bias its row is zeros."""

    seed: int
    role: str
    layer: int
    inputs: int
    outputs: int
    gain: float = 1.0
    dtype: str = "float64"
    bias: bool = True

    def make(self, kernels: Kernels = NUMPY) -> Array:
        """Its numbers, (inputs + 1, outputs), with the same bits wherever they are made."""
        scale = float(self.gain / np.sqrt(np.float64(self.inputs)))
        key = uniform_key(self.seed, self.role, self.layer, self.inputs, self.outputs)
        values = kernels.uniforms(key, (self.inputs + 1) * self.outputs)
        values *= 2.0
        values -= 1.0
        values *= scale
        values = kernels.array(values, self.dtype).reshape(self.inputs + 1, self.outputs)
        if not self.bias:
            values[self.inputs] = 0.0
        if kernels is NUMPY:
            values.setflags(write=False)
        return values

    @property
    def nbytes(self) -> int:
        return self.inputs * self.outputs * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Projection:
    """A fixed affine map, weight (inputs, outputs) and bias (outputs,), where it is to be applied.

    A device may still be drawing it beside other work: `take` waits for its numbers and gives them.
    """

    take: Callable[[], Array]
    drawn: Drawn

    @property
    def weight(self) -> Array:
        return self.take()[: self.drawn.inputs]

    @property
    def bias(self) -> Array:
        bias: Array = self.take()[self.drawn.inputs]
        return bias

    def apply(self, rows: Array, out: Array | None = None) -> Array:
        """rows @ weight + bias"""
        return kernels_of(rows).affine(rows, self.weight, self.bias, out)


def projection(
    seed: int,
    role: str,
    layer: int,
    inputs: int,
    outputs: int,
    gain: float = 1.0,
    dtype: str = "float64",
    kernels: Kernels = NUMPY,
    bias: bool = True,
) -> Projection:
    """The projection that `Drawn` describes, made where the kernels compute.

    Those made last are remembered (up to 256 MB on each device): all clients of a process share them.
    """
    drawn = Drawn(seed, role, layer, inputs, outputs, gain, dtype, bias)
    key = kernels.device, drawn
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
        else:
            _cache[key] = Projection(kernels.aside(partial(drawn.make, kernels)), drawn)
            held = [other for other in _cache if other[0] == kernels.device]
            size = sum(other[1].nbytes for other in held)
            for other in held[:-1]:  # the one not used for longest comes first
                if size > _CACHED_BYTES:
                    size -= _cache.pop(other).drawn.nbytes
        return _cache[key]


def projection_agreement(seed: int) -> dict[str, Any]:
    """What two sides compare before they trust each other's projections."""
    return {"projection_scheme": version.PROJECTIONS, "fingerprint": fingerprint(seed)}


@lru_cache(maxsize=64)
def fingerprint(seed: int) -> str:
    """Hash of a small projection of this seed, to see that two sides make the same bits."""
    small = Drawn(seed, "fingerprint", 0, 7, 9).make()
    return hashlib.sha256(small.tobytes()).hexdigest()[:32]


def check_projections(chain: Chain) -> None:
    """Refuse a run whose random projections this participant would not make with the same bits."""
    opening = chain.opening
    check_agreement(projection_agreement(opening["parameters"]["seed"]), opening, "random projections")


def check_model(note: Mapping[str, Any]) -> None:
    """Refuse a model whose random projections this machine would not make with the same bits."""
    mine = projection_agreement(note["parameters"]["seed"])
    check_agreement(mine, note, "random projections of the model", ModelFileError)


def check_agreement(
    mine: Mapping[str, Any], note: Mapping[str, Any], what: str, error: type[FedsolveError] = TermError
) -> None:
    """Refuse a run, or a model, whose random numbers this machine would not draw with the same bits."""
    theirs = {name: note.get(name) for name in mine}
    if mine != theirs:
        raise error(
            f"the {what} differ: asked for are {theirs}, this fedsolve makes {dict(mine)}. Install the same "
            "fedsolve and numpy everywhere, and read models with the version that wrote them."
        )
