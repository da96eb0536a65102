"""Arrays that travel under their client's name, `PART.NAME@CLIENT`, for methods that are not sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedsolve.container import Array
from fedsolve.federation.messages import Term, Total

Weights = dict[str, Array]


def set_apart(term: Term, client: str, names: Iterable[str]) -> None:
    """Let these arrays of a term travel by themselves instead of as addends; `weight` stays in the sum."""
    for name in names:
        term.arrays[f"own.{name}@{client}"] = term.arrays.pop(name)
        term.factors.pop(name, None)
    term.arrays[f"weight@{client}"] = term.arrays["weight"]


def trained(total: Total) -> list[str]:
    """The clients that trained, in the order of every sum."""
    return [client for client in total.cohort if f"weight@{client}" in total.term.arrays]


def weight_of(total: Total, client: str) -> float:
    return float(total[f"weight@{client}"][0])


def gathered(total: Total, part: str) -> dict[str, Weights]:
    """By client and name: what was sent as `PART.NAME@CLIENT`."""
    by_client: dict[str, Weights] = {client: {} for client in trained(total)}
    for full, array in total.term.arrays.items():
        name, apart, client = full.partition("@")
        if apart and name.startswith(f"{part}.") and client in by_client:
            by_client[client][name.removeprefix(f"{part}.")] = array
    return by_client


def weighted_mean(parts: Mapping[str, Weights], weights: Mapping[str, float]) -> Weights:
    """sum_i weight_i part_i / sum_i weight_i, in the order and with the rounding of a sum of terms."""
    total: Term = Term()
    for client, arrays in parts.items():
        total.add(Term(dict(arrays), factors=dict.fromkeys(arrays, weights[client])))
    whole = np.float64(0.0)
    for client in parts:
        whole += weights[client]
    return {name: array / float(whole) for name, array in total.arrays.items()}
