"""Which rows belong to each client."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array


def owned_rows(owners: Any, clients: int) -> list[Array]:
    """The rows of each client, in their order."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(np.asarray(owners)[order], np.arange(1, clients)))
