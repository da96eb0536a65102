"""Run the missing cells of an experiment, one after another, and keep each as soon as it is finished."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.experiments.algorithms import lacking
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import ENGINES, Cell, Experiment
from fedsolve.experiments.run_folder import OPTIONS, TEXT, Journal
from fedsolve.experiments.sources import ExperimentRows, Source
from fedsolve.federation.engine import Follower, Within
from fedsolve.threads import usable_cores
from fedsolve.version import __version__


@dataclass(frozen=True)
class CellProgress:
    """How far a run is: finished cells of all, those found at the start included, and the current one."""

    done: int
    total: int
    cell: str
    remark: str
    seconds_left: float | None  # estimated from the cells that this run finished; None before the first


@dataclass
class Summary:
    """What a run did."""

    folder: Path
    total: int
    found: int = 0
    ran: int = 0
    damaged: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # by method, for want of a package
    seconds: float = 0.0


def run_experiment(
    experiment: Experiment,
    runs: str | Path,
    source: Source,
    *,
    backbone: str | None = None,
    workers: int | None = None,
    progress: Callable[[CellProgress], None] | None = None,
    follow: Sequence[Follower] = (),
    summary: Summary | None = None,
) -> Summary:
    """Run the cells that runs/NAME lacks.

    source:   gives the rows of a dataset (`sources.StoredRows`).
    backbone: to see every image dataset through, instead of the one the file names.
    follow:   who hears of the training of every cell, under the cell's name and digest.
    summary:  filled as the run goes on, for a caller that may be interrupted; also returned.
    """
    folder = Path(runs) / experiment.name
    if backbone is not None:
        experiment = experiment.with_backbone(backbone)
    cells = experiment.cells()
    tally = summary or Summary(folder, len(cells))
    tally.folder, tally.total = folder, len(cells)
    started = time.perf_counter()
    with container.locked(folder / ".lock", f"the experiment in {folder} is being run"):
        container.write_atomically(folder / TEXT, experiment.text.encode())
        container.write_atomically(
            folder / OPTIONS, container.canonical_json({"backbone": backbone}).encode()
        )
        journal = Journal(folder)
        tally.damaged = journal.damaged
        for cell in cells:

            def tick(remark: str, cell: Cell = cell) -> None:
                if progress is not None:
                    done = tally.found + tally.ran
                    left = tally.seconds / tally.ran * (tally.total - done) if tally.ran else None
                    progress(CellProgress(done, tally.total, str(cell), remark, left))

            rows = source(cell.source, cell.seed, tick)
            key = cell.key(rows.key)
            if journal.has(cell.id, key):
                tally.found += 1
            elif lacking(cell.method.algorithm) is not None:
                tally.left_out[cell.method.name] = tally.left_out.get(cell.method.name, 0) + 1
            else:
                tick("")
                about: dict[str, Any] = {
                    "experiment": experiment.name,
                    "cell": cell.id,
                    "dataset": cell.dataset.name,
                }
                about |= {"partition": cell.partition.name, "noise": cell.noise, "seed": cell.seed}
                heard = Within(follow, str(cell), about)
                outcome = train_cell(cell, rows, workers, tick, heard).values
                journal.append(record_of(experiment, cell, key, rows, outcome))
                tally.ran += 1
            tally.seconds = time.perf_counter() - started
    return tally


def record_of(
    experiment: Experiment, cell: Cell, key: str, rows: ExperimentRows, outcome: dict[str, Any]
) -> dict[str, Any]:
    """A finished cell as a line of cells.jsonl."""
    spec, partition = cell.dataset, dict(outcome["partition"])
    if cell.seed != experiment.seeds[0]:
        # One seed is enough for drawing.
        partition.pop("class_counts", None)
    return {
        "key": key,
        "cell": cell.id,
        "experiment": experiment.name,
        "title": experiment.title,
        "dataset": {
            **spec.identity(),
            "name": spec.name,
            "key": rows.key,
            "rows": len(rows.y_train),
            "test_rows": None if rows.y_test is None else len(rows.y_test),
            "features": int(rows.x_train.shape[1]),
            "classes": len(np.unique(rows.y_train)),
            **({} if rows.pixels is None else {"pixels": rows.pixels}),
        },
        **cell.labels(),
        "parameters": dict(cell.parameters),
        "noise": cell.noise,
        "seed": cell.seed,
        **outcome,
        "partition": partition,
        "versions": versions("network" in cell.parameters),
        "machine": machine(cell.device if cell.engine == ENGINES[0] else "cpu"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def versions(networks: bool = False) -> dict[str, str]:
    """Versions of fedsolve, numpy, scipy and Python; of torch too where networks are trained."""
    names = ("numpy", "scipy", "torch") if networks else ("numpy", "scipy")
    installed = {name: importlib.metadata.version(name) for name in names}
    return {"fedsolve": __version__, **installed, "python": platform.python_version()}


@cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine it ran on: processor, usable cores, system, and the GPU where `device` is one."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as stream:
            named = [line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")]
        model = named[0] if named else model
    except OSError:  # not on every platform
        pass
    host = {"cpu": model, "cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}"}
    if device != "cpu":
        import torch

        from fedsolve.backends.devices import find_device

        place = find_device(device)
        host |= {"gpu": torch.cuda.get_device_name(place)} if place.type == "cuda" else {}
    return host
