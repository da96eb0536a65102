"""The folder of a run: the experiment's text and one JSON line per finished cell.

RUN/experiment.toml   the experiment as it was last run
RUN/cells.jsonl       one object per finished cell, appended in one step
RUN/cells.damaged     lines that a crash left unreadable, kept aside
RUN/options.json      what the command line said besides the file: another backbone
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve import container
from fedsolve.errors import ModelFileError, explained
from fedsolve.experiments.config import Experiment
from fedsolve.experiments.reading import read_experiment

CELLS, DAMAGED, TEXT = "cells.jsonl", "cells.damaged", "experiment.toml"
OPTIONS = "options.json"


@dataclass(frozen=True)
class RunFolder:
    """A run folder: the experiment, its finished cells in the experiment's order, how many it lacks."""

    folder: Path
    experiment: Experiment
    cells: list[dict[str, Any]]
    missing: int
    backbone: str | None = None  # what it was last run with, where that was not the file's own

    @property
    def name(self) -> str:
        return self.experiment.name

    def dealt(self, dataset: str) -> list[dict[str, Any]]:
        """The partitions of a dataset of which it is known who owns which class."""
        known = [cell["partition"] for cell in self.cells if cell["dataset"]["name"] == dataset]
        return list({each["name"]: each for each in known if "class_counts" in each}.values())


def load_run(folder: str | Path) -> RunFolder:
    """The run kept in `folder`; labels are those of its experiment file as it was last run.

    Cells of an earlier version of the file stay in cells.jsonl and are left out here.
    """
    folder = Path(folder)
    if not (folder / TEXT).is_file():
        raise ModelFileError(
            f"{folder} is not a run: it has no {TEXT}. Name a folder that 'fedsolve experiment run' made."
        )
    experiment = read_experiment(folder / TEXT, name=folder.name)
    backbone, options = None, folder / OPTIONS
    if options.is_file():
        with explained(f"{options} is damaged", "Remove it and run the experiment again.", ModelFileError):
            backbone = json.loads(container.read(options)).get("backbone")
    if backbone is not None:
        experiment = experiment.with_backbone(backbone)
    records = {record["cell"]: record for record in read_lines(folder / CELLS)[0]}
    planned = experiment.cells()
    cells = []
    for cell in planned:
        if (record := records.get(cell.id)) is not None:
            labels = {"experiment": experiment.name, "title": experiment.title, **cell.labels()}
            labels["dataset"] = record["dataset"] | {"name": cell.dataset.name}
            labels["partition"] = record["partition"] | {"name": cell.partition.name}
            cells.append(record | labels)
    return RunFolder(folder, experiment, cells, len(planned) - len(cells), backbone)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The readable records of a JSON-lines file, and the lines that are not."""
    records, damaged = [], []
    if not path.exists():
        return [], []
    for line in container.read(path).splitlines(keepends=True):
        try:
            record = json.loads(line)
            # A line without a newline was cut off, even if the rest happens to be JSON.
            whole = line.endswith(b"\n") and isinstance(record, dict) and {"key", "cell"} <= set(record)
        except ValueError:
            whole = False
        if whole:
            records.append(record)
        else:
            damaged.append(line)
    return records, damaged


class Journal:
    """The finished cells of a run; more can be appended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CELLS
        records, damaged = read_lines(self._path)
        self.damaged = len(damaged)
        if damaged:
            with open(folder / DAMAGED, "ab") as aside:
                aside.writelines(line.rstrip(b"\n") + b"\n" for line in damaged)
                aside.flush()
                os.fsync(aside.fileno())
            lines = (container.canonical_json(record).encode() + b"\n" for record in records)
            container.write_atomically(self._path, b"".join(lines))
        self._by_key: dict[str, dict[str, Any]] = {}
        self._latest: dict[str, str] = {}
        for record in records:
            self._note(record)

    def has(self, cell: str, key: str) -> bool:
        """Whether the cell is finished for the rows that `key` names.

        What was computed under another address, or before the rows changed and changed back, is entered
        anew: readers take the last line of a cell.
        """
        if self._latest.get(cell) != key and key in self._by_key:
            self.append(self._by_key[key] | {"cell": cell})
        return self._latest.get(cell) == key

    def append(self, record: dict[str, Any]) -> None:
        """Add a finished cell in a single write, on disk when this returns."""
        line = container.canonical_json(record).encode() + b"\n"
        # Unbuffered: a line is one write.
        with explained(f"cannot write {self._path}", "", ModelFileError), open(self._path, "ab", 0) as stream:
            if stream.write(line) < len(line):
                raise OSError("only a part could be written; the disk may be full")
            os.fsync(stream.fileno())
        self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        self._by_key[record["key"]] = record
        self._latest[record["cell"]] = record["key"]
