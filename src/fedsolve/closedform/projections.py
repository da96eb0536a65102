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
from functools import lru_cache
from typing import Any

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array, uniform_key
from fedsolve.backends import NUMPY, Kernels, kernels_of
from fedsolve.errors import FedsolveError, ModelFileError, TermError
from fedsolve.federation.messages import Chain

_CACHED_BYTES = 256 << 20
_cache: OrderedDict[tuple[object, ...], Projection] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Projection:
    """A fixed affine map, weight (inputs, outputs) and bias (outputs,), where it is to be applied.

    A device may still be drawing it beside other work: `take` waits for its numbers and gives them.
    """

    take: Callable[[], Array]
    inputs: int
    nbytes: int

    @property
    def weight(self) -> Array:
        return self.take()[: self.inputs]

    @property
    def bias(self) -> Array:
        bias: Array = self.take()[self.inputs]
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
    """The projection of this seed, role and layer; entries uniform in ±gain / sqrt(inputs), no bias if asked.

    It is made where the kernels compute, with the same bits everywhere. Recently made ones are remembered
    (up to 256 MB on each device): all clients of a process share them.
    """
    key = kernels.device, seed, role, layer, inputs, outputs, gain, dtype, bias
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
        else:
            take = kernels.aside(
                lambda: _make(seed, role, layer, inputs, outputs, gain, dtype, kernels, bias)
            )
            _cache[key] = Projection(take, inputs, inputs * outputs * np.dtype(dtype).itemsize)
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
    bias: bool = True,
) -> Array:
    """The numbers of a projection, (inputs + 1, outputs)."""
    scale = float(gain / np.sqrt(np.float64(inputs)))
    values = kernels.uniforms(uniform_key(seed, role, layer, inputs, outputs), (inputs + 1) * outputs)
    values *= 2.0
    values -= 1.0
    values *= scale
    values = kernels.array(values, dtype).reshape(inputs + 1, outputs)
    if not bias:
        values[inputs] = 0.0
    if kernels is NUMPY:
        values.setflags(write=False)
    return values


def projection_agreement(seed: int) -> dict[str, Any]:
    """What two sides compare before they trust each other's projections."""
    return {"projection_scheme": version.PROJECTIONS, "fingerprint": fingerprint(seed)}


@lru_cache(maxsize=64)
def fingerprint(seed: int) -> str:
    """Hash of a small projection of this seed, to see that two sides make the same bits."""
    small = _make(seed, "fingerprint", 0, 7, 9, 1.0, "float64")
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
