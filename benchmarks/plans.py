"""DeepAFL by each exchange plan against a transcription of the authors' formulation.

Same rows, partition, projections, activations and float64 on both sides. Every run is a process of
its own; the two that matter most, lean and the transcription with the same workers, take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.data import Rows, owners_of
from benchmarks.machine import progress, sustained_rates
from benchmarks.operations import lean_operations, lean_symmetric
from benchmarks.transcription import Setting
from benchmarks.worker import VARIANTS

MAIN_PAIR = ("lean", "transcription")

SPEED_TARGET, UP_TARGET, DOWN_TARGET = 2.0, 5.0, 20.0


def compare(
    rows: Rows,
    setting: Setting,
    clients: int,
    alpha: float | None,
    repeats: int = 3,
    variants: tuple[str, ...] = VARIANTS,
) -> dict[str, Any]:
    """Seconds, payload bytes, peak memory and agreement of every variant, as JSON values."""
    classes, codes = np.unique(rows.labels, return_inverse=True)
    known = np.isin(rows.test_labels, classes)
    owners = owners_of(rows.labels, clients, alpha)
    rates = [sustained_rates()]
    results: dict[str, dict[str, Any]] = {name: {"runs": []} for name in variants}
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as folder:
        arrays = {
            "x": rows.features,
            "y": codes,
            "owners": owners,
            "x_test": rows.test_features[known],
            "y_test": np.searchsorted(classes, rows.test_labels[known]),
        }
        for name, array in arrays.items():
            np.save(Path(folder) / f"{name}.npy", array)
        for turn in range(repeats):
            for number, name in enumerate(variants):
                if turn and name not in MAIN_PAIR:
                    continue
                task = Path(folder) / f"variant-{number}.json"
                task.write_text(
                    json.dumps(
                        {"variant": name, "setting": asdict(setting), "data": folder, "clients": clients}
                    )
                )
                measured = _run(task)
                progress(f"{rows.name}: {name}, turn {turn + 1}: {measured['seconds']:.1f} s")
                results[name]["runs"].append(measured)
            rates.append(sustained_rates())
        for number, name in enumerate(variants):
            results[name] |= _summary(results[name]["runs"])
            own = Path(folder) / f"variant-{number}.npz"
            if "transcription" in variants:
                yardstick = Path(folder) / f"variant-{variants.index('transcription')}.npz"
                results[name]["difference"] = largest_difference(own, yardstick)
    return {
        "data": rows.name,
        "rows": len(codes),
        "features": int(rows.features.shape[1]),
        "classes": len(classes),
        "clients": clients,
        "partition": "IID" if alpha is None else f"Dirichlet {alpha:g}",
        "setting": asdict(setting),
        "variants": results,
        "ratios": ratios(results),
        "floor": floor(rates, setting, len(codes), int(rows.features.shape[1]), len(classes)),
    }


def floor(
    rates: list[dict[str, float]], setting: Setting, rows: int, features: int, classes: int
) -> dict[str, float]:
    """Seconds that a lean run's counted operations take at the best rates seen, and those rates."""
    best = {name: max(rate[name] for rate in rates) for name in rates[0]}
    counted = lean_operations(rows, features, setting.width, classes, setting.layers)
    symmetric = lean_symmetric(rows, setting.width, classes, setting.layers)
    seconds = (sum(counted.values()) - symmetric) / best["dgemm"] + symmetric / best["dsyrk"]
    return best | {"seconds": seconds}


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times faster and smaller than the transcription each variant is."""
    if "transcription" not in results:
        return {}
    yardstick = results["transcription"]
    return {
        name: {
            quantity: yardstick[quantity] / max(result[quantity], 1e-9)
            for quantity in ("seconds", "bytes_up", "bytes_down", "peak_bytes")
            if yardstick[quantity] is not None and result[quantity] is not None
        }
        for name, result in results.items()
    }


def largest_difference(one: Path, other: Path) -> float:
    """Largest relative difference over all weights: max |a - b| / max |b| of every matrix."""
    with np.load(one) as mine, np.load(other) as theirs:
        return max(
            float(np.max(np.abs(mine[name] - theirs[name])) / np.max(np.abs(theirs[name])))
            for name in theirs.files
        )


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest run, with the median over all of them beside it."""
    best = dict(min(runs, key=lambda run: run["seconds"]))
    best["median_seconds"] = median(run["seconds"] for run in runs)
    if best["peak_bytes"] is not None:
        best["peak_bytes"] = max(run["peak_bytes"] for run in runs)
    return best


def _run(task: Path) -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", str(task)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
