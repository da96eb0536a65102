"""Share of the machine's matrix-multiply rate that participants reach in a lean run.

Counted operations of the participants over the seconds spent in exchanges (terms added included),
over the best of five 2048 x 2048 float64 products on all threads in the same run.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import fedsolve as fs
from benchmarks.data import owners_of, synthetic
from benchmarks.machine import SIDE, OtherWork, matmul_rate, progress
from benchmarks.operations import lean_operations

TARGET = 0.60


def measure(
    clients: int = 40,
    rows_each: int = 500,
    features: int = 512,
    width: int = 1024,
    layers: int = 5,
    repeats: int = 3,
    side: int = SIDE,
) -> dict[str, Any]:
    """The share, and seconds and rate of every kind of exchange, as JSON values.

    Products and runs take turns; the best products and the fastest run count.
    """
    rows = synthetic(clients * rows_each, features)
    owners = owners_of(rows.labels, clients, None)
    operations = lean_operations(len(rows.labels), features, width, 10, layers)
    products: list[float] = []
    loads: list[float | None] = []
    runs: list[dict[str, float]] = []
    for turn in range(repeats):
        others = OtherWork()
        products.append(matmul_rate(None, side))
        federation = fs.LocalFederation.from_arrays(rows.features, rows.labels, owners, clients)
        model = fs.DeepAFL(layers=layers, width=width, exchange="lean").fit(federation)
        seconds: dict[str, float] = defaultdict(float)
        for record in model.history:
            seconds[record.kind] += record.seconds
        runs.append(dict(seconds))
        loads.append(others.share())
        reached = sum(operations.values()) / sum(seconds.values()) / products[-1]
        progress(f"rate, turn {turn + 1}: {reached:.0%} of {products[-1] / 1e9:.0f} GFLOP/s")
    machine = max(products)
    best = min(runs, key=lambda run: sum(run.values()))
    return {
        "clients": clients,
        "rows_each": rows_each,
        "features": features,
        "width": width,
        "layers": layers,
        "operations": operations,
        "seconds": best,
        "all_seconds": [sum(run.values()) for run in runs],
        "others": loads,
        "matmul_rates": products,
        "matmul_rate": machine,
        "rate": sum(operations.values()) / sum(best.values()),
        "share": sum(operations.values()) / sum(best.values()) / machine,
    }
