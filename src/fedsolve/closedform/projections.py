"""Random projections as seeds, not messages.

The value is (2u - 1) * (gain / sqrt(inputs)) with u of `uniforms` (scheme 1). Row `inputs` of the
(inputs + 1, outputs) array is the bias. Only exact IEEE operations, so every platform gets the same
bits; a fingerprint lets two sides check that they do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedsolve import formats
from fedsolve.backends import NUMPY, Kernels, kernels_of
from fedsolve.container import Array
from fedsolve.errors import TermError
from fedsolve.federation.messages import Chain
from fedsolve.uniforms import uniform_key

_CACHED_BYTES = 256 << 20
_cache: OrderedDict[tuple[object, ...], _Drawn] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class _Drawn:
    """A projection that was drawn, perhaps beside other work; `take` gives its numbers."""

    take: Callable[[], Array]
    inputs: int
    nbytes: int

    def projection(self) -> Projection:
        values = self.take()
        return Projection(values[: self.inputs], values[self.inputs])


@dataclass(frozen=True)
class Projection:
    """A fixed affine map: weight (inputs, outputs) and bias (outputs,), both where it is to be applied."""

    weight: Array
    bias: Array

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
) -> Projection:
    """The projection of this seed, role and layer; entries uniform in ±gain / sqrt(inputs).

    It is made where the kernels compute, with the same bits everywhere. Recently made ones are remembered
    (up to 256 MB on each device): all clients of a process share them.
    """
    return _drawn(seed, role, layer, inputs, outputs, gain, dtype, kernels).projection()


def draw_ahead(
    seed: int, role: str, layer: int, inputs: int, outputs: int, gain: float, dtype: str, kernels: Kernels
) -> None:
    """Let a device begin with this projection while it has other work; `projection` gives it."""
    _drawn(seed, role, layer, inputs, outputs, gain, dtype, kernels)


def _drawn(
    seed: int, role: str, layer: int, inputs: int, outputs: int, gain: float, dtype: str, kernels: Kernels
) -> _Drawn:
    key = kernels.device, seed, role, layer, inputs, outputs, gain, dtype
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
        else:
            take = kernels.aside(lambda: _make(seed, role, layer, inputs, outputs, gain, dtype, kernels))
            _cache[key] = _Drawn(take, inputs, inputs * outputs * np.dtype(dtype).itemsize)
            _forget(kernels.device)
        return _cache[key]


def _forget(device: str) -> None:
    """Drop what was not used for longest, until a device holds no more than it may."""
    held = [key for key in _cache if key[0] == device]
    size = sum(_cache[key].nbytes for key in held)
    for key in held[:-1]:
        if size <= _CACHED_BYTES:
            return
        size -= _cache.pop(key).nbytes


def _make(
    seed: int,
    role: str,
    layer: int,
    inputs: int,
    outputs: int,
    gain: float,
    dtype: str,
    kernels: Kernels = NUMPY,
) -> Array:
    """The numbers of a projection, (inputs + 1, outputs)."""
    scale = float(gain / np.sqrt(np.float64(inputs)))
    values = kernels.uniforms(uniform_key(seed, role, layer, inputs, outputs), (inputs + 1) * outputs)
    values *= 2.0
    values -= 1.0
    values *= scale
    values = kernels.array(values, dtype).reshape(inputs + 1, outputs)
    if kernels is NUMPY:
        values.setflags(write=False)
    return values


def projection_agreement(seed: int) -> dict[str, Any]:
    """What two sides compare before they trust each other's projections."""
    return {"projection_scheme": formats.PROJECTIONS.version, "fingerprint": fingerprint(seed)}


@lru_cache(maxsize=64)
def fingerprint(seed: int) -> str:
    """Hash of a small projection of this seed, to see that two sides make the same bits."""
    small = _make(seed, "fingerprint", 0, 7, 9, 1.0, "float64")
    return hashlib.sha256(small.tobytes()).hexdigest()[:32]


def check_projections(chain: Chain) -> None:
    """Refuse a run whose random projections this participant would not make with the same bits."""
    opening = chain.blocks[0].note["opening"]
    mine = projection_agreement(opening["parameters"]["seed"])
    asked = {name: opening.get(name) for name in mine}
    if mine != asked:
        raise TermError(
            f"the random projections differ: the server has {asked}, this participant {mine}. "
            "Install the same fedsolve and numpy on both sides."
        )
