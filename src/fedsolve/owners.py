"""Which rows belong to each client."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError


def rows_by_client(owners: Any, clients: int) -> tuple[Array, Array]:
    """All rows, those of the first client first, and where each client's begin; the last bound is the end."""
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(np.asarray(owners)[order], np.arange(clients + 1))


def owned_rows(owners: Any, clients: int) -> list[Array]:
    """The rows of each client, in their order."""
    order, bounds = rows_by_client(owners, clients)
    return np.split(order, bounds[1:-1])


def check_owners(owners: Array, rows: int, clients: int | None) -> int:
    """How many clients there are; refused where owners do not fit them."""
    if owners.shape != (rows,) or owners.dtype.kind not in "iu":
        raise DataError(
            f"owners must be {rows} integers or names, one client per row; got shape {owners.shape}, "
            f"dtype {owners.dtype}."
        )
    count = int(owners.max()) + 1 if clients is None else clients
    if owners.min() < 0 or owners.max() >= count:
        raise DataError(
            f"owners must lie between 0 and {count - 1}; got {owners.min()} to {owners.max()}. "
            "Raise clients= or fix the partition."
        )
    return count
