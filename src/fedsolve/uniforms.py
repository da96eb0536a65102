"""Random numbers as seeds, not messages: the same bits on every platform, by name.

Scheme 1: numpy's Philox bit generator keyed by the first 16 bytes (little endian) of
SHA-256("fedsolve projection 1|seed|role|layer|inputs|outputs"); raw 64-bit integers, the upper 53 bits of
each a uniform in [0, 1).
"""

from __future__ import annotations

import hashlib

import numpy as np

from fedsolve import formats
from fedsolve.container import Array


def uniform_bits(seed: int, role: str, layer: int, inputs: int, outputs: int) -> Array:
    """(inputs + 1) * outputs uniforms in [0, 1) of 53 bits each."""
    return philox_uniforms(uniform_key(seed, role, layer, inputs, outputs), (inputs + 1) * outputs)


def uniform_key(seed: int, role: str, layer: int, inputs: int, outputs: int) -> int:
    """The 128 bits by which the numbers of this name are drawn."""
    text = f"fedsolve projection {formats.PROJECTIONS.version}|{seed}|{role}|{layer}|{inputs}|{outputs}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def philox_uniforms(key: int, count: int) -> Array:
    """`count` uniforms in [0, 1) of 53 bits each."""
    raw = np.random.Philox(key=key).random_raw(count)
    raw >>= np.uint64(11)
    return raw.astype(np.float64) * 2.0**-53
