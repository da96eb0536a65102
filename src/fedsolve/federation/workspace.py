"""Buffers that are used again: fresh arrays cost as much in page faults as the arithmetic in them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fedsolve.container import Array


class Workspace:
    """Named scratch arrays of one worker, kept between calls and grown when needed.

    A buffer is valid until the same name is asked for again.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}
        self._sums: dict[str, Array] = {}
        self._within: dict[str, dict[str, Array]] = {}

    def within(self, name: str) -> Workspace:
        """A workspace whose sums are apart from those of others; scratch arrays are the same."""
        inner = Workspace()
        inner._buffers = self._buffers
        inner._sums = self._within.setdefault(name, {})
        return inner

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        """An array of this shape with unspecified contents."""
        size = int(np.prod(shape, dtype=np.int64))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != np.dtype(dtype) or buffer.size < size:
            buffer = np.zeros(size, dtype=dtype)
            self._buffers[name] = buffer
        view: np.ndarray[Any, Any] = buffer[:size].reshape(shape)
        return view

    def sums(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        """An array for a term: zeroed when its shape is new, so that an unused lower triangle stays zero."""
        array = self._sums.get(name)
        if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
            array = np.zeros(shape, dtype=dtype)
            self._sums[name] = array
        return array
