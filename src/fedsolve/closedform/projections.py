"""Random projections as seeds, not messages.

The value is (2u - 1) * (gain / sqrt(inputs)) with u of `uniforms` (scheme 1). Row `inputs` of the
(inputs + 1, outputs) array is the bias. Only exact IEEE operations, so every platform gets the same
bits; a fingerprint lets two sides check that they do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.backends import NUMPY, Kernels, kernels_of
from fedsolve.container import Array
from fedsolve.errors import TermError
from fedsolve.federation.messages import Chain
from fedsolve.uniforms import SCHEME, uniform_bits

_CACHED_BYTES = 256 << 20
_cache: OrderedDict[tuple[object, ...], Projection] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Projection:
    """A fixed affine map: weight (inputs, outputs) and bias (outputs,)."""

    weight: Array
    bias: Array

    def apply(self, rows: Array, out: Array | None = None) -> Array:
        """rows @ weight + bias, where the rows lie"""
        kernels = kernels_of(rows)
        here = self.on(kernels)
        return kernels.affine(rows, here.weight, here.bias, out)

    def on(self, kernels: Kernels) -> Projection:
        """This projection where the kernels compute; copied once, for as long as it is remembered."""
        if kernels is NUMPY:
            return self
        copies: dict[str, Projection] = self.__dict__.setdefault("_copies", {})
        if kernels.device not in copies:
            copies[kernels.device] = Projection(kernels.array(self.weight), kernels.array(self.bias))
        return copies[kernels.device]


def projection(
    seed: int, role: str, layer: int, inputs: int, outputs: int, gain: float = 1.0, dtype: str = "float64"
) -> Projection:
    """The projection of this seed, role and layer; entries uniform in ±gain / sqrt(inputs).

    Recently made ones are remembered (up to 256 MB): all clients of a process share them.
    """
    key = (seed, role, layer, inputs, outputs, gain, dtype)
    with _lock:
        cached = _cache.get(key)
        if cached is None:
            cached = _cache[key] = _make(seed, role, layer, inputs, outputs, gain, dtype)
            while len(_cache) > 1 and sum(p.weight.nbytes for p in _cache.values()) > _CACHED_BYTES:
                _cache.popitem(last=False)
        else:
            _cache.move_to_end(key)
    return cached


def _make(seed: int, role: str, layer: int, inputs: int, outputs: int, gain: float, dtype: str) -> Projection:
    scale = gain / np.sqrt(np.float64(inputs))
    values = uniform_bits(seed, role, layer, inputs, outputs)
    values *= 2.0
    values -= 1.0
    values *= scale
    values = values.astype(dtype, copy=False).reshape(inputs + 1, outputs)
    values.setflags(write=False)
    return Projection(values[:inputs], values[inputs])


def projection_agreement(seed: int) -> dict[str, Any]:
    """What two sides compare before they trust each other's projections."""
    return {"projection_scheme": SCHEME, "fingerprint": fingerprint(seed)}


def fingerprint(seed: int) -> str:
    """Hash of a small projection of this seed, to see that two sides make the same bits."""
    small = _make(seed, "fingerprint", 0, 7, 9, 1.0, "float64")
    return hashlib.sha256(small.weight.tobytes() + small.bias.tobytes()).hexdigest()[:32]


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
