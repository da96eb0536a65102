"""Federated standardisation and centring: one exchange of n, sum x, sum x² and sum y.

The means and scales become a block of the model; clients apply them to every row from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.closedform.sums import Accumulator, Rows, check_opening, chunks
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.messages import Block, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.preparation import mean_and_deviation

KIND = "moments"


@dataclass(frozen=True)
class Preparation:
    """x -> (x - mean) / scale before anything else; target_mean is added back to every score."""

    mean: Array
    scale: Array
    target_mean: Array

    @classmethod
    def solve(cls, total: Total, scale: str | None, intercept: bool) -> Preparation:
        """Means and standard deviations of the union of the cohort's rows.

        Columns whose variance is lost in rounding count as constant and are only centred.
        """
        weight = float(total["weight"][0])
        if weight <= 0:
            raise DataError("no rows at all: every client of the cohort is empty or has zero weights.")
        mean, deviation = mean_and_deviation(weight, total["feature"], total["feature_square"])
        target = total["target"] / weight
        return cls(
            mean=mean,
            scale=deviation if scale == "standard" else np.ones_like(mean),
            target_mean=target if intercept else np.zeros_like(target),
        )

    @classmethod
    def from_arrays(cls, arrays: Any) -> Preparation:
        return cls(arrays["mean"], arrays["scale"], arrays["target_mean"])

    def arrays(self) -> dict[str, Array]:
        return {"mean": self.mean, "scale": self.scale, "target_mean": self.target_mean}

    def block(self) -> Block:
        return Block({"preparation": True}, self.arrays())

    def apply(self, features: Array) -> Array:
        return (np.asarray(features, dtype=np.float64) - self.mean) / self.scale


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """n (as sum of weights), sum x, sum x² and sum y of the client's rows."""
    check_opening(data, memory.chain)
    kernels = memory.kernels
    rows = Rows(data, memory.chain, np.float64, kernels)
    sums = Accumulator(memory.workspace, np.float64, kernels)
    for name, width in (("weight", 1), ("feature", rows.width), ("feature_square", rows.width)):
        sums.declare(name, (width,))
    sums.declare("target", (rows.outputs,))
    for span in chunks(len(rows), rows.width, kernels):
        features, targets = rows.features(span), rows.targets(span)
        root = rows.ones(span)
        features, targets = features * root, targets * root
        sums.add("weight", (root**2).sum(axis=0))
        sums.add("feature", (root.T @ features)[0])
        sums.add("feature_square", (features**2).sum(axis=0))
        sums.add("target", (root.T @ targets)[0])
    term = sums.finish()
    term.counts["rows"] = len(rows)
    return term
