"""Where a data file has its features and labels, and what is to be read from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsolve.container import Array
from fedsolve.errors import ModelFileError
from fedsolve.schema import Schema

Part = Literal["train", "test"]
PARTS: tuple[Part, ...] = ("test", "train")

Columns = tuple[Array, Array | None, Array | None, Schema | None]
"""Features, labels and owners as a file has them, and the names of its columns where it has names."""


@dataclass(frozen=True)
class ColumnLayout:
    """Where a file has its features, labels and owners.

    features_key, labels_key: arrays of an npz; found by their usual names when None.
    label:     label column of a csv or parquet file, by name or by position (from 0; -1 is the last).
    client:    column or npz array that says who owns each row.
    drop:      columns to leave out.
    delimiter: of a csv file; "auto" takes the most frequent of , ; tab | in the first line.
    header:    whether a csv file starts with column names.
    decimal, thousands, encoding: how a csv file spells its cells; see `text_tables.Dialect`.
    """

    features_key: str | None = None
    labels_key: str | None = None
    label: str | None = None
    client: str | None = None
    drop: tuple[str, ...] = ()
    delimiter: str = ","
    header: bool = True
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Wish:
    """What a reader is asked for; see `tables.read_table`."""

    layout: ColumnLayout
    part: Part | None
    labelled: bool
    owned: bool
    width: int | None

    @property
    def learns(self) -> bool:
        """Whether a model is made of these rows, rather than given them."""
        return self.labelled and self.width is None


def damaged(path: str | Path, what: str, problem: Exception) -> ModelFileError:
    """The error for a file that cannot be decoded."""
    reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    return ModelFileError(f"{path} is damaged, truncated or not {what} ({reason}). Fetch or write it again.")


def unreadable(path: str | Path, problem: OSError) -> ModelFileError:
    """The error for a file that is not there or must not be read."""
    # Not `strerror`: pyarrow's repeats the path.
    return ModelFileError(f"cannot read {path}: {os.strerror(problem.errno) if problem.errno else problem}.")
