"""Label noise for robustness studies."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.partitions import named_rng
from fedsolve.errors import DataError


def flip_labels(labels: Any, rate: float, seed: int = 0) -> Array:
    """A copy in which a random share `rate` of the labels is another class, drawn uniformly.

    Exactly round(rate * rows) labels change (DeepAFL, Appendix O).
    """
    flipped: Array = np.array(labels)
    if not 0.0 <= rate <= 1.0:
        raise DataError(f"the noise rate must lie in [0, 1]; got {rate!r}.")
    classes, codes = np.unique(flipped, return_inverse=True)
    if len(classes) < 2:
        raise DataError("labels of a single class cannot be flipped to another.")
    rng = named_rng(seed, "label noise")
    rows = rng.permutation(len(flipped))[: round(rate * len(flipped))]
    shift = rng.integers(1, len(classes), size=len(rows))
    flipped[rows] = classes[(codes[rows] + shift) % len(classes)]
    return flipped
