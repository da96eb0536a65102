"""fedsolve over many machines of one organisation, by Ray core.

    row_file         where a client's rows are, so that whoever answers for it reads them there
    shard            the worker's side: answers for clients and folds their terms, without Ray
    sum_tree         sums of neighbours meet in a tree whose shape depends on the cohort alone
    addresses        whether a cluster answers at an address
    ray_federation   RayFederation: the engine that a method sees

Nothing is imported before it is used: ray is an optional extra.
"""

from __future__ import annotations

import importlib.util
import os

from fedsolve.errors import DataError

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment in which Ray calls nobody, and leaves a machine's GPUs visible to workers without one."""


def require_ray() -> None:
    """Refuse, with the extra to install, where Ray is missing; and switch off what it sends home."""
    if importlib.util.find_spec("ray") is None:
        raise DataError("this needs Ray, which is not installed. Install it: pip install 'fedsolve[ray]'.")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
