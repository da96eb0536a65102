"""Which rows belong to each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError


def rows_by_client(owners: Any, clients: int) -> tuple[Array, Array]:
    """All rows, those of the first client first, and where each client's begin; the last bound is the end."""
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(np.asarray(owners)[order], np.arange(clients + 1))


def owned_rows(owners: Any, clients: int) -> list[Array]:
    """The rows of each client, in their order."""
    order, bounds = rows_by_client(owners, clients)
    return np.split(order, bounds[1:-1])


def owners_of(owners: Any, rows: int, clients: int | None) -> tuple[tuple[str, ...] | None, Array, int]:
    """Names of clients, sorted, where owners are names; which of them owns each row; how many there are.

    Owners out of range are refused.
    """
    numbers, names = np.asarray(owners), None
    if numbers.shape == (rows,) and numbers.dtype.kind in "USO":
        # An array of text drops NULs at the end and makes text of bytes: a list is taken as it is.
        names, numbers = _named(owners if isinstance(owners, list | tuple) else numbers.tolist(), clients)
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu":
        raise DataError(
            f"owners must be {rows} integers or names, one client per row; got shape {numbers.shape}, "
            f"dtype {numbers.dtype}."
        )
    count = int(numbers.max()) + 1 if clients is None else clients
    if numbers.min() < 0 or numbers.max() >= count:
        raise DataError(
            f"owners must lie between 0 and {count - 1}; got {numbers.min()} to {numbers.max()}. "
            "Raise clients= or fix the partition."
        )
    return names, numbers, count


def _named(owners: Sequence[Any], clients: int | None) -> tuple[tuple[str, ...], Array]:
    if not all(isinstance(owner, str | bytes) and owner for owner in owners):
        raise DataError("owners that are names must all be text; one is empty or of another type.")
    some, text = (next((one for one in owners if isinstance(one, kind)), None) for kind in (bytes, str))
    if some is not None and text is not None:
        raise DataError(f"owners are text, such as {text!r}, and bytes, such as {some!r}. Decode the bytes.")
    try:
        owners = owners if some is None else [owner.decode() for owner in owners]
    except UnicodeDecodeError as problem:
        raise DataError(f"owner {problem.object!r} is not UTF-8. Give the names as text.") from problem
    found = sorted(set(owners))
    padded = next((name for name in found if name.endswith("\0")), None)
    if padded is not None:
        raise DataError(f"owner {padded!r} ends with a NUL, which arrays of text drop. Strip it.")
    if clients is not None and clients != len(found):
        raise DataError(f"owners name {len(found)} clients, and clients is {clients}. Leave clients out.")
    places = {name: place for place, name in enumerate(found)}
    return tuple(map(str, found)), np.fromiter(map(places.__getitem__, owners), np.intp, len(owners))
