"""Parameters and arrays that are refused by name, with the value seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError

_CHECK_ROWS = 65536


def check_whole(least: int, **values: Any) -> None:
    """Refuse parameters that are not whole numbers of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise DataError(f"{name} must be a whole number, at least {least}; got {value!r}.")


def check_not_negative(**values: Any) -> None:
    """Refuse parameters that are not finite numbers of at least zero."""
    for name, value in values.items():
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not np.isfinite(value) or value < 0:
            raise DataError(f"{name} must be a finite number >= 0; got {value!r}.")


def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of the known ones."""
    if value not in known:
        raise DataError(f"{name} must be {' or '.join(map(repr, known))}; got {value!r}.")


def check_rows(rows: int) -> None:
    """Refuse a total over no rows: every client that answered is empty."""
    if rows == 0:
        raise DataError("no rows at all: every client that answered is empty.")


def check_classes(present: int, listed: str = "") -> None:
    """Refuse to classify a single class; listed: the classes, where they are known."""
    if present < 2:
        raise DataError(f"only one class in the whole federation{listed}; a classifier needs at least two.")


def check_arrays(
    features: Array, labels: Array, weights: Array | None = None, *, missing: bool = False
) -> None:
    """Refuse what no method can use: wrong shapes, non-numbers, NaN and infinity, negative weights.

    missing: whether NaN stands for a missing value that will be filled.
    """
    if features.ndim != 2:
        raise DataError(
            f"features must be two-dimensional (rows, width); got shape {features.shape}. "
            "Reshape your data, one row per sample."
        )
    if features.shape[1] == 0:
        raise DataError("features have 0 columns; at least one is needed.")
    if features.dtype.kind not in "fiub":
        raise DataError(
            f"features must be real numbers; got dtype {features.dtype}. Encode text or categories first."
        )
    if len(labels) != len(features) or labels.ndim not in (1, 2):
        raise DataError(
            f"{len(features)} rows of features but labels of shape {labels.shape}; give one label per row."
        )
    if weights is not None:
        if weights.shape != (len(features),):
            raise DataError(f"sample weights must have shape ({len(features)},); got {weights.shape}.")
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise DataError(
                f"sample weights must be finite and not negative; got {weights[wrong[0]]} in row {wrong[0]}."
            )
    if labels.dtype.kind == "f" and not np.all(np.isfinite(labels)):
        bad = int(np.flatnonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))[0])
        raise DataError(f"labels contain NaN or infinite values (first in row {bad}). Remove those rows.")
    if features.dtype.kind == "f":
        for start in range(0, len(features), _CHECK_ROWS):
            part = features[start : start + _CHECK_ROWS]
            if not missing and _sums_to_finite(part):
                continue
            finite = ~np.isinf(part) if missing else np.isfinite(part)
            if not finite.all():
                row, column = (int(i) for i in np.argwhere(~finite)[0])
                value = part[row, column]
                raise DataError(
                    f"features contain NaN or infinite values ({value} in row {start + row}, column "
                    f"{column}). "
                    "Remove or impute them before training."
                )


def _sums_to_finite(values: Array) -> bool:
    """Whether the sum is finite, which it is only where all values are: one pass, no temporary.

    An overflow gives no for values that are fine; they are looked at one by one then.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)))
