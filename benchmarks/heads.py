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
    "KernelAFL, 32,768 landmarks": lambda: fs.KernelAFL(landmarks=32_768),
    "FedAvg, linear, 200 rounds": lambda: fs.gradient.FedAvg(network="linear", rounds=200, rate=0.05),
}

ON_REQUEST = {"KernelAFL, 32,768 landmarks"}
"""Rows that take 9 GB and long; only where named."""


def measure(
    rows: Rows, clients: int, alpha: float, only: tuple[str, ...] = (), memory: float = 4.0
) -> Iterator[dict[str, Any]]:
    """A row for every entry, by name: all so far, after each of them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        arrays = {
            "x": rows.features,
            "y": rows.labels,
            "owners": owners_of(rows.labels, clients, alpha or None),
            "x_test": rows.test_features,
            "y_test": rows.test_labels,
        }
        for name, array in arrays.items():
            np.save(Path(folder, f"{name}.npy"), array)
        for name in only or [name for name in ENTRIES if name not in ON_REQUEST]:
            progress(name)
            found[name] = _run({"data": folder, "entry": name, "clients": clients, "memory": memory})
            found[name]["memory_GB"] = memory
            yield {"data": rows.name, "clients": clients, "alpha": alpha, "rows": dict(found)}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One row: the whole run, and the test rows afterwards."""
    folder = Path(task["data"])
    x, y, owners, x_test, y_test = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "owners", "x_test", "y_test")
    )
    federation = fs.LocalFederation.from_arrays(
        np.asarray(x), y, owners, task["clients"], memory_budget=int(task["memory"] * 1e9)
    )
    method, others, started = ENTRIES[task["entry"]](), OtherWork(), time.perf_counter()

    def told(record: Record, of: int) -> None:
        spent = time.perf_counter() - started
        progress(f"  {record.exchange + 1}/{of} {record.kind} {spent:.0f} s {dict(record.metrics)}")

    quiet = isinstance(method, fs.gradient.FedAvg)
    model = method.fit(federation, progress=None if quiet else told)
    seconds = time.perf_counter() - started
    return {
        "accuracy": model.score(np.asarray(x_test), y_test),
        "exchanges": len(model.history),
        "bytes_up": sum(record.bytes_up for record in model.history),
        "bytes_down": sum(record.bytes_down for record in model.history),
        "seconds": seconds,
        "peak_bytes": peak_memory(),
        "others": others.share(),
        "parameters": method.parameters(),
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
    console.print("others: share of the machine that other processes took meanwhile; seconds suffer by it.")


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy against what travels, and against exchanges."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (name, row) in enumerate(result["rows"].items()):
        travelled = (row["bytes_up"] + row["bytes_down"]) / result["clients"] / 1e6
        marker = "osD^vP*X<>hd"[place % 12]
        for axis, value in ((left, travelled), (right, row["exchanges"])):
            axis.plot(value, 100 * row["accuracy"], marker, markersize=8, label=name)
    for axis, label in ((left, "MB up and down per client"), (right, "exchanges")):
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.3)
    left.set_ylabel("test accuracy, %")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=130)


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
