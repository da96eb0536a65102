"""Parameters that are refused by name, with the value seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.errors import DataError


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
    """Refuse a value that is not one of those known."""
    if value not in known:
        raise DataError(f"{name} must be {' or '.join(map(repr, known))}; got {value!r}.")
