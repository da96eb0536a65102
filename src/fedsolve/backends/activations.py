"""The activations of the papers, in place and block by block so that they stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erf, expit

from fedsolve.arrays import Array
from fedsolve.errors import DataError

_BLOCK = 1 << 15
_GELU_SLOPE = float(np.sqrt(2.0 / np.pi))

Kernel = Callable[[Array, Array], Any]
"""In place on a one-dimensional block, with scratch of the same size."""


def activate(name: str, values: Array) -> Array:
    """Apply the activation `name` to a contiguous array in place and return it."""
    kernel = known(name, ACTIVATIONS)
    flat = values.reshape(-1)
    scratch = np.empty(min(_BLOCK, flat.size), dtype=flat.dtype)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        kernel(block, scratch[: block.size])
    return values


def known(name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The entry of this name in a table of activations."""
    if name not in table:
        raise DataError(f"unknown activation '{name}'; choose one of {', '.join(table)}.")
    return table[name]


def _gate(x: Array, gate: Array) -> None:
    """x (1 + gate) / 2"""
    gate += 1.0
    gate *= 0.5
    x *= gate


def _gelu(x: Array, scratch: Array) -> None:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))) / 2"""
    np.multiply(x, x, out=scratch)
    scratch *= 0.044715 * _GELU_SLOPE
    scratch += _GELU_SLOPE
    scratch *= x
    _gate(x, np.tanh(scratch, out=scratch))


def _gelu_erf(x: Array, scratch: Array) -> None:
    """x (1 + erf(x / sqrt(2))) / 2"""
    np.multiply(x, np.sqrt(0.5), out=scratch)
    _gate(x, erf(scratch, out=scratch))


def _hardswish(x: Array, scratch: Array) -> None:
    """x clip(x + 3, 0, 6) / 6"""
    np.add(x, 3.0, out=scratch)
    np.clip(scratch, 0.0, 6.0, out=scratch)
    x *= scratch
    x /= 6.0


ACTIVATIONS: dict[str, Kernel] = {
    "none": lambda x, scratch: x,
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "relu": lambda x, scratch: np.maximum(x, 0.0, out=x),
    "leaky_relu": lambda x, scratch: np.maximum(x, np.multiply(x, 0.01, out=scratch), out=x),
    "tanh": lambda x, scratch: np.tanh(x, out=x),
    "hardswish": _hardswish,
    "softshrink": lambda x, scratch: np.subtract(x, np.clip(x, -0.5, 0.5, out=scratch), out=x),
    "sigmoid": lambda x, scratch: expit(x, out=x),
}
