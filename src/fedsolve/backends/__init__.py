"""Where closed forms are computed: the same few kernels in numpy and scipy, and in torch.

    kernels = kernels_on("cuda")      # of a device by name; "cpu" is numpy, "torch:cpu" torch without a GPU
    kernels = kernels_of(array)       # of an array: numpy's, or those of the device it lies on

Kernels are passed in, or follow from the arrays that are; there is no current backend. Arrays of both kinds
share Python's operators (`a @ b`, `a * b`, `a.T`, `a.sum(axis=0)`, slices): a formula is written once, and
`Kernels` holds what differs. Results of numpy do not depend on whether torch is installed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsolve.backends.devices import resolve
from fedsolve.backends.kernels import Kernels

__all__ = ["NUMPY", "Kernels", "host", "kernels_of", "kernels_on"]

NUMPY = Kernels()


def kernels_on(device: str) -> Kernels:
    """The kernels of a device: "cpu" (numpy), "cuda", "cuda:1", "torch:cpu", or "auto"."""
    return _kernels(resolve(device))


def kernels_of(array: Any) -> Kernels:
    """The kernels of the place where this array lies."""
    if isinstance(array, np.ndarray | np.generic):
        return NUMPY
    place = str(array.device)
    return _kernels("torch:cpu" if place == "cpu" else place)


def host(array: Any) -> NDArray[Any]:
    """The array in the host's memory, as numpy's; the same one where it lies there already."""
    return kernels_of(array).host(array)


@cache
def _kernels(device: str) -> Kernels:
    if device == "cpu":
        return NUMPY
    from fedsolve.backends.torch_kernels import TorchKernels

    return TorchKernels(device)
