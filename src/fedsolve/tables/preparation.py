"""Means and scales from sums: how they prepare rows, and which numbers of new rows are far from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.tables.schema import Schema

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
class Preparation:
    """x -> (x - origin) / scale, applied before a method sees the rows.

    mean:        of each column; takes the place of what is missing.
    target_mean: added back to every score; empty where targets are not centred.
    target_scale: by which centred targets of a regression are divided in training; None where they are not.
    centre:      the origin where it is not the mean, as in tables.
    """

    mean: Array
    scale: Array
    target_mean: Array = field(default_factory=lambda: np.zeros(0))
    centre: Array | None = None
    target_scale: Array | None = None

    @property
    def origin(self) -> Array:
        return self.mean if self.centre is None else self.centre

    def apply(self, features: Array) -> Array:
        """Prepared rows, float64; `features` are left as they are."""
        values: Array = np.subtract(features, self.origin, dtype=np.float64)
        values /= self.scale
        if self.centre is not None:
            rows, columns = np.nonzero(np.isnan(values))
            if len(rows):
                values[rows, columns] = self.fill[columns]
        return values

    @property
    def fill(self) -> Array:
        """What a missing value becomes."""
        return np.asarray((self.mean - self.origin) / self.scale)

    def arrays(self, prefix: str = "") -> dict[str, Array]:
        """What it holds, by names that begin with `prefix`."""
        known = {name: value for name, value in vars(self).items() if value is not None and np.size(value)}
        return {f"{prefix}{name}": value for name, value in known.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], prefix: str = "") -> Preparation:
        names = [name for name in cls.__dataclass_fields__ if f"{prefix}{name}" in arrays]
        return cls(**{name: arrays[f"{prefix}{name}"] for name in names})


FAR = 20.0
"""Report a number that is more than this many standard deviations from the mean."""

SHIFT = 5.0
"""Report a column whose median is more than this many standard deviations from the mean."""

_FEW = 5


def far_outside(
    schema: Schema | None, preparation: Preparation | None, features: Array, source: str
) -> list[str]:
    """One sentence for each column whose numbers or dates do not look like those of training."""
    told: list[str] = []
    if schema is None or preparation is None:
        return told  # names or spread of the columns are not known
    for place, column in schema.places("number", "date"):
        distance = np.abs(features[:, place] - preparation.origin[place]) / preparation.scale[place]
        beyond = np.flatnonzero(distance > FAR)
        seen = distance[~np.isnan(distance)]
        shifted = len(seen) >= _FEW and float(np.median(seen)) > SHIFT
        if not len(beyond) and not shifted:
            continue
        row = int(beyond[0] if len(beyond) else np.nanargmax(distance))
        many = f"{len(beyond)} of {len(features)} rows are" if len(beyond) else "most rows are"
        told.append(
            f"{source}: column '{column.name}': {many} far from what the model was trained on, such as "
            f"{features[row, place]:g} in row {row} (mean {preparation.mean[place]:.4g}, standard deviation "
            f"{preparation.scale[place]:.3g}). Check its unit, and numbers that mean missing."
        )
    return told
