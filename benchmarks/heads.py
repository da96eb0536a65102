"""Which method for frozen features: seconds, memory, exchanges, bytes and accuracy, each in its own process.

Nothing is set but what a row's name says: settings are the methods' defaults, which no test row chose.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.data import Rows, owners_of
from benchmarks.machine import OtherWork, peak_memory, progress
from fedsolve.cli.train import tried_table
from fedsolve.federation.method import Record

ENTRIES: dict[str, Callable[[], Any]] = {
    "AFL": fs.AFL,
    "AFL, LDA head": lambda: fs.AFL(head="lda"),
    "AFL, FedCGS head": lambda: fs.AFL(head="fedcgs"),
    "AFL, nearest mean": lambda: fs.AFL(head="mean"),
    "AFL, normalised (Fed3R)": lambda: fs.AFL(head="normalised"),
    "Softmax": fs.Softmax,
    "DeepAFL, T=5": lambda: fs.DeepAFL(layers=5),
    "DeepAFL, T=20": fs.DeepAFL,
    "KernelAFL, 8,192 landmarks": lambda: fs.KernelAFL(landmarks=8192),
    "KernelAFL": fs.KernelAFL,
    "KernelAFL, 32,768 landmarks, 8 GB": lambda: fs.KernelAFL(landmarks=32_768),
    "KernelAFL, 32,768 landmarks, 1.5 GB": lambda: fs.KernelAFL(landmarks=32_768),
    "KernelAFL, 2,048 landmarks in steps": lambda: fs.KernelAFL(landmarks=2048, solver="steps"),
    "Auto": fs.Auto,
    "DeepAFLClassifier": fs.DeepAFLClassifier,
    "FedAvg, linear, 200 rounds": lambda: fs.gradient.FedAvg(network="linear", rounds=200, rate=0.05),
}

MEMORY = {"KernelAFL, 32,768 landmarks, 8 GB": 8.0, "KernelAFL, 32,768 landmarks, 1.5 GB": 1.5}
"""What clients may keep together, in GB, where a row's name says it."""

ON_REQUEST = {*MEMORY, "KernelAFL, 2,048 landmarks in steps", "Auto", "DeepAFLClassifier"}
"""Rows that take long, or 9 GB and more; only where named."""

GRID = {
    f"KernelAFL, bandwidth {bandwidth:g}, ridge {ridge:g}": {"bandwidth": bandwidth, "ridge": ridge}
    for bandwidth in (0.5, 1.0, 2.0)
    for ridge in (0.003, 0.03, 0.3)
}
"""Settings of which test labels choose the best, to see what Auto's choice by rows held out gave up."""


def measure(
    rows: Rows, clients: int, alpha: float, only: tuple[str, ...] = (), memory: float = 4.0
) -> Iterator[dict[str, Any]]:
    """A row for every entry, by name: all so far, after each of them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        _store(rows, clients, alpha, folder)
        for name in only or [name for name in ENTRIES if name not in ON_REQUEST]:
            progress(name)
            kept = MEMORY.get(name, memory)
            found[name] = _run({"data": folder, "entry": name, "clients": clients, "memory": kept})
            found[name]["memory_GB"] = kept
            yield {"data": rows.name, "clients": clients, "alpha": alpha, "rows": dict(found)}


def _store(rows: Rows, clients: int, alpha: float, folder: str) -> None:
    """Write the rows, and who owns them, for a process of their own."""
    arrays = {
        "x": rows.features,
        "y": rows.labels,
        "owners": owners_of(rows.labels, clients, alpha or None),
        "x_test": rows.test_features,
        "y_test": rows.test_labels,
    }
    for name, array in arrays.items():
        np.save(Path(folder, f"{name}.npy"), array)


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One row: the whole run, and the test rows afterwards."""
    folder = Path(task["data"])
    x, y, owners, x_test, y_test = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "owners", "x_test", "y_test")
    )
    if task.get("other"):  # the same rows, divided otherwise
        owners, task = np.arange(len(y)) % 7, {**task, "clients": 7}
    federation = fs.LocalFederation.from_arrays(
        np.asarray(x), y, owners, task["clients"], memory_budget=int(task["memory"] * 1e9)
    )
    name = task["entry"]
    method = fs.KernelAFL(**GRID[name]) if name in GRID else ENTRIES[name]()
    others, started = OtherWork(), time.perf_counter()

    def told(record: Record, of: int) -> None:
        spent = time.perf_counter() - started
        numbers = {name: value for name, value in record.metrics.items() if name != "tried"}
        progress(f"  {record.exchange + 1}/{of} {record.kind} {spent:.0f} s {numbers}")

    if isinstance(method, fs.DeepAFLClassifier):  # an estimator: all rows are one client's
        model, parameters = method.fit(np.asarray(x), y).model_, method.get_params()
    else:
        quiet = isinstance(method, fs.gradient.FedAvg)
        model, parameters = method.fit(federation, follow=None if quiet else told), method.parameters()
    seconds = time.perf_counter() - started
    if "scores" in task:
        np.save(task["scores"], model.decision_function(np.asarray(x_test)))
    return {
        "accuracy": model.score(np.asarray(x_test), y_test),
        "exchanges": len(model.history),
        "bytes_up": sum(record.bytes_up for record in model.history),
        "bytes_down": sum(record.bytes_down for record in model.history),
        "seconds": seconds,
        "peak_bytes": peak_memory(),
        "others": others.share(),
        "parameters": parameters,
        "tried": [tried.as_dict() for tried in model.tried],
    }


def difference(rows: Rows, clients: int, alpha: float, name: str, memory: float) -> dict[str, Any]:
    """How far test scores of a row differ when the same rows are dealt to 7 clients in turn."""
    with tempfile.TemporaryDirectory() as folder:
        _store(rows, clients, alpha, folder)
        scores = []
        for other in (False, True):
            progress(f"{name}, {'7 clients, rows in turn' if other else f'{clients} clients'}")
            path = str(Path(folder, f"scores{other}.npy"))
            task = {"data": folder, "entry": name, "clients": clients, "memory": memory}
            _run({**task, "scores": path, "other": other})
            scores.append(np.load(path))
    apart = float(np.max(np.abs(scores[1] - scores[0])) / np.max(np.abs(scores[0])))
    return {
        "row": name,
        "clients": [clients, 7],
        "largest difference, as a share of the largest score": apart,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE, title=f"{result['data']}, {result['clients']} clients")
    for heading in (
        "method",
        "test %",
        "exchanges",
        "MB up / client",
        "MB down / client",
        "s",
        "GB",
        "others",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, row in result["rows"].items():
        table.add_row(
            name,
            f"{100 * row['accuracy']:.2f}",
            str(row["exchanges"]),
            *(f"{row[way] / result['clients'] / 1e6:.2f}" for way in ("bytes_up", "bytes_down")),
            f"{row['seconds']:.0f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            "" if row["others"] is None else f"{100 * row['others']:.0f} %",
        )
    console.print(table)
    for name, row in result["rows"].items():
        if row.get("tried"):
            console.print(f"{name}: held out {row['tried'][0]['rows']:,} rows of the trials")
            console.print(tried_table(row["tried"]))
    best = max((row["accuracy"] for name, row in result["rows"].items() if name in GRID), default=None)
    if best is not None:
        console.print(f"best of the grid, chosen with test labels: {100 * best:.2f} %")
    console.print("others: share of the machine that other processes took meanwhile; seconds suffer by it.")


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy against what travels, and against exchanges."""
    import matplotlib
    from matplotlib.figure import Figure

    from fedsolve.pages.plots import MARKERS, SERIES, SETTINGS

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, (name, row) in enumerate(result["rows"].items()):
            travelled = (row["bytes_up"] + row["bytes_down"]) / result["clients"] / 1e6
            look = {"marker": MARKERS[place % len(MARKERS)], "color": SERIES[place % len(SERIES)]}
            for axis, value in ((left, travelled), (right, row["exchanges"])):
                axis.plot(value, 100 * row["accuracy"], linestyle="", markersize=8, label=name, **look)
        for axis, label in ((left, "MB up and down per client"), (right, "exchanges")):
            axis.set_xscale("log")
            axis.set_xlabel(label)
        left.set_ylabel("test accuracy, %")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize="small")
        figure.savefig(path, dpi=130, metadata={"Software": None})


def _run(task: dict[str, Any]) -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.heads", json.dumps(task)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
