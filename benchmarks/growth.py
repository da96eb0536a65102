"""How seconds grow with rows N, width d, clients K and layers T, for AFL and lean DeepAFL."""

from __future__ import annotations

import time
from typing import Any

import fedsolve as fs
from benchmarks.data import Rows, owners_of, synthetic
from benchmarks.machine import OtherWork, progress
from benchmarks.operations import afl_operations, lean_operations

CLASSES = 10
BASE = {"N": 10_000, "d": 512, "K": 50, "T": 3}
STEPS = {
    "N": (2_500, 5_000, 10_000, 20_000, 40_000),
    "d": (128, 256, 512, 1024, 2048),
    "K": (1, 10, 100, 1000),
    "T": (1, 2, 4, 8),
}


def measure(
    base: dict[str, int] | None = None, steps: dict[str, tuple[int, ...]] | None = None, repeats: int = 2
) -> list[dict[str, Any]]:
    """One entry per point: the four sizes, and the fastest of `repeats` runs of both methods.

    d is the width of the features and of the network alike.
    """
    base, steps = base or BASE, steps or STEPS
    points = []
    for varied, values in steps.items():
        for value in values:
            size = base | {varied: value}
            rows = synthetic(size["N"], size["d"], CLASSES)
            deep = lean_operations(size["N"], size["d"], size["d"], CLASSES, size["T"])
            counted: dict[str, tuple[Any, int]] = {
                "afl": (fs.AFL(ridge=1.0), afl_operations(size["N"], size["d"], CLASSES)),
                "deepafl": (
                    fs.DeepAFL(layers=size["T"], width=size["d"], exchange="lean"),
                    sum(deep.values()),
                ),
            }
            entry: dict[str, Any] = {"varied": varied, **size}
            for name, (method, operations) in counted.items():
                runs = [_train(method, rows, size["K"], operations) for _ in range(repeats)]
                entry[name] = min(runs, key=lambda run: run["seconds"])
            progress(f"growth with {varied} = {value}: {entry['deepafl']['seconds']:.2f} s")
            points.append(entry)
    return points


def _train(method: Any, rows: Rows, clients: int, operations: int) -> dict[str, Any]:
    owners = owners_of(rows.labels, clients, None)
    federation = fs.LocalFederation.from_arrays(rows.features, rows.labels, owners, clients)
    others = OtherWork()
    started = time.perf_counter()
    model = method.fit(federation)
    seconds = time.perf_counter() - started
    asking = sum(record.seconds for record in model.history)
    return {
        "seconds": seconds,
        "exchange_seconds": asking,
        "rate": operations / asking,
        "others": others.share(),
    }
