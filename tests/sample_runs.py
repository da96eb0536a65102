"""Runs with made-up results for tests of figures and report: every kind of experiment, in a moment.

The cells are those of real experiment files; only their outcomes are drawn, from a seed, so that depth
helps, skew hurts FedAvg alone, and parameters have a best value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.data.partitions import class_counts
from fedsolve.experiments.cells import deal
from fedsolve.experiments.config import Cell
from fedsolve.experiments.outcomes import packed
from fedsolve.experiments.reading import read_experiment

TEST_ROWS = 10_000
CLASSES = 10

_DATA = """
[[dataset]]
name = "{name}"
address = "{address}"
backbone = "pixels"
"""

_PARTITION = """
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 30
"""

PARTITIONS = (
    """
title = "Accuracy under partitions"
notes = "Does it matter who owns which rows? Closed-form methods should not care; FedAvg should."
seeds = [0, 1, 2]
paper = {key = "deepafl", table = "2"}
[[partition]]
kind = "iid"
clients = 30
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 30
[[partition]]
kind = "dirichlet"
alpha = 0.01
clients = 30
[[partition]]
kind = "shards"
per_client = 2
clients = 30
[[partition]]
kind = "shards"
per_client = 4
clients = 30
[[method]]
name = "FedAvg"
method = "fedavg"
parameters = {rounds = 50}
[[method]]
name = "AFL"
method = "afl"
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 20, width = 256}
depths = [5, 10, 20]
[table]
baseline = "AFL"
"""
    + _DATA.format(name="CIFAR-10", address="cifar10")
    + _DATA.format(name="digits <8 x 8> & more", address="digits")
)

CLIENTS = """
title = "Accuracy against the number of clients"
seeds = [0, 1]
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 10
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 100
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 1000
[[method]]
name = "FedAvg"
method = "fedavg"
[[method]]
name = "AFL"
method = "afl"
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 5, width = 256}
""" + _DATA.format(name="digits", address="digits")

RIDGE = (
    """
title = "Sensitivity to the ridge"
seeds = [0, 1, 2]
[[method]]
name = "AFL"
method = "afl"
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 10, width = 256}
grid = {ridge = [0.001, 0.01, 0.1, 1.0, 10.0]}
depths = [5, 10]
"""
    + _PARTITION
    + _DATA.format(name="digits", address="digits")
)

WIDTHS = (
    """
title = "Sensitivity to both widths"
seeds = [0, 1]
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 10}
grid = {width = [64, 128, 256, 512], hidden_width = [64, 128, 256, 512, 1024]}
"""
    + _PARTITION
    + _DATA.format(name="digits", address="digits")
)

ACTIVATION = (
    """
title = "Activations"
seeds = [0, 1, 2]
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 10}
grid = {activation = ["gelu", "relu", "tanh", "none"]}
depths = [5, 10]
"""
    + _PARTITION
    + _DATA.format(name="digits", address="digits")
)

ABLATIONS = (
    """
title = "What each part of a block gives"
seeds = [0, 1, 2]
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 20}
depths = [5, 10, 20]
[[method]]
name = "no skip connection"
method = "deepafl"
parameters = {layers = 20, skip = false}
depths = [5, 10, 20]
[[method]]
name = "no random projection"
method = "deepafl"
parameters = {layers = 20, projection = "identity"}
depths = [5, 10, 20]
[[method]]
name = "no activation"
method = "deepafl"
parameters = {layers = 20, activation = "none"}
depths = [5, 10, 20]
[measure]
separability = true
"""
    + _PARTITION
    + _DATA.format(name="digits", address="digits")
)

NOISE = (
    """
title = "Flipped labels"
seeds = [0, 1]
[noise]
rates = [0.0, 0.1, 0.2, 0.4]
[[method]]
name = "AFL"
method = "afl"
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 5}
"""
    + _PARTITION
    + _DATA.format(name="digits", address="digits")
)

ALL = {
    "partitions": PARTITIONS,
    "clients": CLIENTS,
    "ridge": RIDGE,
    "widths": WIDTHS,
    "activation": ACTIVATION,
    "ablations": ABLATIONS,
    "noise": NOISE,
}


def write_run(folder: Path, text: str, *, leave_out: int = 0) -> Path:
    """A run folder with an outcome for every cell of the experiment but the last `leave_out`."""
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    experiment = read_experiment(folder / "experiment.toml")
    cells = experiment.cells()
    records = [record(cell) for cell in cells[: len(cells) - leave_out]]
    lines = "".join(json.dumps(one, sort_keys=True) + "\n" for one in records)
    (folder / "cells.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_all(folder: Path) -> list[Path]:
    """One run of every kind; the one on clients has cells missing."""
    return [write_run(folder / name, text, leave_out=2 * (name == "clients")) for name, text in ALL.items()]


def record(cell: Cell) -> dict[str, Any]:
    """A line of cells.jsonl."""
    return {
        "key": cell.key("0" * 64),
        "cell": cell.id,
        "dataset": {
            **cell.dataset.identity(),
            "name": cell.dataset.name,
            "key": "0" * 64,
            "rows": 50_000,
            "test_rows": TEST_ROWS,
            "features": 512,
            "classes": CLASSES,
        },
        "partition": _partition(cell),
        **cell.labels(),
        "parameters": dict(cell.parameters),
        "noise": cell.noise,
        "seed": cell.seed,
        **_outcome(cell),
        "versions": {"fedsolve": "0.1.0", "numpy": "2.0.0", "scipy": "1.14.0", "python": "3.12.1"},
        "machine": {"cpu": "Example CPU at 3 GHz", "cores": 2, "system": "Linux x86_64"},
        "time": f"2026-02-0{1 + cell.seed}T10:{int(cell.id[:2], 16) % 60:02d}:00+00:00",
    }


def _partition(cell: Cell) -> dict[str, Any]:
    known = cell.partition.as_dict() | {"heterogeneity": 0.5, "empty_clients": 0}
    known["classes"] = [str(label) for label in range(CLASSES)]
    if cell.seed == 0:
        labels = np.arange(1000) % CLASSES
        counts = class_counts(labels, deal(cell.partition, labels, 0), cell.partition.clients)
        known["class_counts"] = counts.tolist()
    return known


def _outcome(cell: Cell) -> dict[str, Any]:
    algorithm = cell.method.algorithm
    layers = cell.parameters.get("layers") if algorithm in ("deepafl", "cascade") else None
    # Closed-form results depend on the seed's projections, never on who owns the rows.
    rng = np.random.default_rng([cell.seed, len(cell.method.name)])
    loss = 12.0 * cell.noise
    if algorithm == "fedavg":
        skew = cell.partition.options.get("alpha", 1.0)
        loss += 4.0 * max(0.0, -np.log10(skew)) + 1.5 * np.log10(cell.partition.clients)
    level = {"fedavg": 91.0, "afl": 89.1}.get(algorithm, 89.3) - loss - _off(cell)
    depths = np.arange((layers or 0) + 1)
    gain = (0.6 if "no " in cell.method.name else 2.0) * (1 - np.exp(-depths / 6.0))
    seeded = 0.0 if algorithm == "afl" else rng.normal(0.0, 0.1, len(depths))
    correct = np.rint(TEST_ROWS / 100 * (level + gain * (layers is not None) + seeded)).astype(int).tolist()
    per_layer = {
        "accuracy_per_layer": [count / TEST_ROWS for count in correct],
        "train_accuracy_per_layer": [
            min(1.0, count / TEST_ROWS + 0.002 * t) for t, count in enumerate(correct)
        ],
        "seconds_per_layer": (0.4 + 0.3 * depths).tolist(),
        "exchanges_per_layer": (1 + 2 * depths).tolist(),
        "bytes_up_per_layer": (10_000_000 + 4_000_000 * depths).tolist(),
        "bytes_down_per_layer": (1_000_000 * depths).tolist(),
        "risk": (4000 * np.exp(-depths / 15.0)).tolist(),
        "separability": _separability(cell, depths),
    }
    if layers is None:
        per_layer = dict.fromkeys(per_layer)
    rounds = {"fedavg": 50, "afl": 1}.get(algorithm, 2 * len(depths) - 1)
    return {
        "accuracy": correct[-1] / TEST_ROWS,
        "train_accuracy": correct[-1] / TEST_ROWS,
        "hits": {
            "" if layers is None else str(depth): _hits(cell, correct[depth])
            for depth in (cell.method.depths or (len(correct) - 1,))
        },
        "test_rows": TEST_ROWS,
        "exchanges": rounds,
        "bytes_up": 3_000_000 * rounds,
        "bytes_down": 500_000 * rounds,
        "seconds": 0.2 + 0.3 * rounds,
        "measures": {},
        **per_layer,
    }


def _hits(cell: Cell, correct: int) -> str:
    """So many rows are right, the same ones wherever a method has as many."""
    order = np.random.default_rng(len(cell.method.name)).permutation(TEST_ROWS)
    return packed(order < correct)


def _off(cell: Cell) -> float:
    """Points lost by parameters away from their best value."""
    ridge = abs(np.log10(cell.grid.get("ridge", 0.1) / 0.1))
    width = sum(np.log2(1024 / cell.grid.get(name, 1024)) for name in ("width", "hidden_width"))
    word = {"gelu": 0.0, "tanh": 0.4, "relu": 0.7, "none": 2.0}[cell.grid.get("activation", "gelu")]
    return float(0.3 * ridge + 0.5 * width + word)


def _separability(cell: Cell, depths: Any) -> dict[str, list[dict[str, float]]] | None:
    if not cell.measure.separability:
        return None
    fall = np.exp(-depths / (30.0 if "no " in cell.method.name else 12.0))
    return {
        part: [{"csr": 0.8 * f * s, "ifs": 1.5 * f * s, "dm": 1.4 * f * s} for f in fall.tolist()]
        for part, s in (("train", 1.0), ("test", 1.2))
    }
