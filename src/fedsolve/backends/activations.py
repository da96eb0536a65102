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

Kernel = Callable[[Array, Array], None]
"""In place on a one-dimensional block, with scratch of the same size."""


def activate(name: str, values: Array) -> Array:
    """Apply the activation `name` to a contiguous array in place and return it."""
    kernel = known(name, ACTIVATIONS)
    if name == "none":
        return values
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


def _none(x: Array, scratch: Array) -> None:
    """x"""


def _gelu(x: Array, scratch: Array) -> None:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))) / 2"""
    np.multiply(x, x, out=scratch)
    scratch *= 0.044715 * _GELU_SLOPE
    scratch += _GELU_SLOPE
    scratch *= x
    np.tanh(scratch, out=scratch)
    scratch += 1.0
    scratch *= 0.5
    x *= scratch


def _gelu_erf(x: Array, scratch: Array) -> None:
    """x (1 + erf(x / sqrt(2))) / 2"""
    np.multiply(x, np.sqrt(0.5), out=scratch)
    erf(scratch, out=scratch)
    scratch += 1.0
    scratch *= 0.5
    x *= scratch


def _relu(x: Array, scratch: Array) -> None:
    """max(x, 0)"""
    np.maximum(x, 0.0, out=x)


def _leaky_relu(x: Array, scratch: Array) -> None:
    """max(x, 0.01 x)"""
    np.multiply(x, 0.01, out=scratch)
    np.maximum(x, scratch, out=x)


def _tanh(x: Array, scratch: Array) -> None:
    """tanh(x)"""
    np.tanh(x, out=x)


def _hardswish(x: Array, scratch: Array) -> None:
    """x clip(x + 3, 0, 6) / 6"""
    np.add(x, 3.0, out=scratch)
    np.clip(scratch, 0.0, 6.0, out=scratch)
    x *= scratch
    x /= 6.0


def _softshrink(x: Array, scratch: Array) -> None:
    """sign(x) max(|x| - 0.5, 0)"""
    np.clip(x, -0.5, 0.5, out=scratch)
    x -= scratch


def _sigmoid(x: Array, scratch: Array) -> None:
    """1 / (1 + exp(-x))"""
    expit(x, out=x)


ACTIVATIONS: dict[str, Kernel] = {
    kernel.__name__.removeprefix("_"): kernel
    for kernel in (_none, _gelu, _gelu_erf, _relu, _leaky_relu, _tanh, _hardswish, _softshrink, _sigmoid)
}
