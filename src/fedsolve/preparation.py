"""Means and scales from sums, and how they prepare encoded rows: filled and standardised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.container import Array

EPS = float(np.finfo(np.float64).eps)


def mean_and_deviation(
    weight: Any, first: Array, second: Array, tolerance: float = 16 * EPS
) -> tuple[Array, Array]:
    """Mean and standard deviation from n, sum x and sum x².

    A column whose variance is at most `tolerance` of its square counts as constant, with deviation 1: what
    the difference of two large sums leaves of such a variance is rounding.
    """
    mean = first / weight
    variance = second / weight - mean**2
    constant = variance <= tolerance * (mean**2 + np.abs(variance))
    return mean, np.sqrt(np.where(constant, 1.0, variance))


@dataclass(frozen=True)
class TablePreparation:
    """x -> (x - centre) / scale for every encoded column, after `mean` took the place of what is missing."""

    mean: Array
    centre: Array
    scale: Array

    def apply(self, features: Array) -> Array:
        """Prepared rows, float64; `features` are left as they are."""
        values: Array = np.subtract(features, self.centre, dtype=np.float64)
        values /= self.scale
        rows, columns = np.nonzero(np.isnan(values))
        if len(rows):
            values[rows, columns] = ((self.mean - self.centre) / self.scale)[columns]
        return values

    def arrays(self) -> dict[str, Array]:
        return {"mean": self.mean, "centre": self.centre, "scale": self.scale}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> TablePreparation:
        return cls(arrays["mean"], arrays["centre"], arrays["scale"])
