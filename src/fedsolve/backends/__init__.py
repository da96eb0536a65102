"""Where closed forms are computed: the same few kernels in numpy and scipy, and in torch.

    kernels = kernels_on("cuda")      # of a device by name; "cpu" is numpy, "torch:cpu" torch without a GPU
    kernels = kernels_of(array)       # of an array: numpy's, or those of the device it lies on

Kernels are passed in, or follow from the arrays that are; there is no current backend. Arrays of both kinds
share Python's operators (`a @ b`, `a * b`, `a.T`, `a.sum(axis=0)`, slices): a formula is written once, and
`Kernels` holds what differs. Results of numpy do not depend on whether torch is installed.
"""

from fedsolve.backends.devices import NUMPY, host, kernels_of, kernels_on
from fedsolve.backends.kernels import Kernels

__all__ = ["NUMPY", "Kernels", "host", "kernels_of", "kernels_on"]
