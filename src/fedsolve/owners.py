"""Which rows belong to each client."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array


def rows_by_client(owners: Any, clients: int) -> tuple[Array, Array]:
    """All rows, those of the first client first, and where each client's begin; the last bound is the end."""
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(np.asarray(owners)[order], np.arange(clients + 1))


def owned_rows(owners: Any, clients: int) -> list[Array]:
    """The rows of each client, in their order."""
    order, bounds = rows_by_client(owners, clients)
    return np.split(order, bounds[1:-1])
