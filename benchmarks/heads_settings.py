"""The held-out numbers behind the defaults of Softmax and KernelAFL; no test row is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.data import Rows
from fedsolve.federation.folds import row_hashes

CLIENTS = 8
RIDGES = (0.0002, 0.0006, 0.002, 0.006, 0.02)
"""As shares of a column's mean square sum."""
TOLERANCES = (1e-2, 3e-3, 2e-3, 1e-3, 1e-4)
STEPS = (3, 5, 8, 10, 12, 14)
KERNELS = ((1.0, 0.01), (1.0, 0.1), (1.0, 0.001), (1.0, 1.0), (0.5, 0.01), (0.5, 0.1), (2.0, 0.01))
"""Bandwidth and ridge."""

PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
COUNTS = (3_000, 6_000, 12_000)
"""Rows that kernels with a third as many landmarks are trained on."""


def held_out(features: Any, labels: Any, share: float, key: str) -> Any:
    """Which rows are held out, about this share of them, by their content: a mask."""
    return (row_hashes(features, labels, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share


def softmax(rows: Rows) -> Iterator[dict[str, Any]]:
    """Held-out accuracy of every ridge and tolerance."""
    apart = held_out(rows.features, rows.labels, 0.2, key="softmax")
    federation, x, y = _federation(rows, apart), rows.features[apart], rows.labels[apart]
    inside = rows.features[~apart]
    size = float(np.sum((inside - inside.mean(axis=0)) ** 2)) / inside.shape[1]
    for share in RIDGES:
        for tolerance in TOLERANCES:
            model = fs.Softmax(ridge=share * size, tolerance=tolerance).fit(federation)
            yield {
                "ridge": f"{share:g} = {share * size:.1f}",
                "tolerance": tolerance,
                "exchanges": len(model.history),
                "held out %": round(100 * model.score(x, y), 2),
            }


def kernel(rows: Rows, landmarks: int, all_kernels: bool) -> Iterator[dict[str, Any]]:
    """Held-out accuracy after so many steps, of every bandwidth and ridge, or of the default ones alone."""
    apart = held_out(rows.features, rows.labels, 0.2, key="kernel")
    x, y = rows.features[apart], rows.labels[apart]
    for bandwidth, ridge in KERNELS if all_kernels else KERNELS[:1]:
        federation = _federation(rows, apart)
        method = fs.KernelAFL(
            landmarks=landmarks,
            bandwidth=bandwidth,
            ridge=ridge,
            steps=STEPS[-1],
            solver="steps",
            precision="float32",
        )
        run = method.start(federation.describe())
        found: dict[str, Any] = {"landmarks": landmarks, "bandwidth": bandwidth, "ridge": ridge}
        while (request := run.request(federation.clients)) is not None:
            run.absorb(federation.exchange(request, run.chain))
            if run.taken in STEPS:
                found[f"step {run.taken} %"] = round(100 * run.model().score(x, y), 2)
        yield found


def penalties(rows: Rows) -> Iterator[dict[str, Any]]:
    """Held-out accuracy of every penalty of a kernel, with more and more rows and landmarks."""
    apart = held_out(rows.features, rows.labels, 0.12, key="penalties")
    x, y = rows.features[apart], rows.labels[apart]
    order = np.flatnonzero(~apart)
    for count in COUNTS:
        taken = np.random.default_rng(count).permutation(order)[:count]
        federation = fs.LocalFederation.from_arrays(
            rows.features[taken], rows.labels[taken], np.arange(count) % CLIENTS
        )
        found: dict[str, Any] = {"rows": count}
        for ridge in PENALTIES:
            model = fs.KernelAFL(landmarks=count // 3, ridge=ridge).fit(federation)
            found[f"ridge {ridge:g} %"] = round(100 * model.score(x, y), 2)
        yield found


def _federation(rows: Rows, apart: Any) -> fs.LocalFederation:
    x, y = rows.features[~apart], rows.labels[~apart]
    return fs.LocalFederation.from_arrays(x, y, np.arange(len(y)) % CLIENTS)
