"""Where a client's rows are: a file that is read by whoever answers for the client, and sent nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.participant import ClientData


@dataclass(frozen=True)
class RowFile:
    """Features and labels in a file, or some rows of it.

    path:    .npz with the arrays x and y; .npy of features, mapped, with `labels` beside it; .parquet, read
             by row groups; or the folder of a feature set in a store (its training part, mapped).
    label:   the label column of a parquet file; `y` unless said.
    labels:  the .npy of labels that belongs to a .npy of features.
    start, stop: which rows; all when None.
    machine: the address of the machine that has the file, as Ray names it; None where all can read it.
    """

    path: str
    label: str = "y"
    labels: str | None = None
    start: int | None = None
    stop: int | None = None
    machine: str | None = None

    def open(self) -> ClientData:
        """The rows, checked; nothing is read before it is needed but what npz packs."""
        try:
            features, labels = self._arrays()
        except OSError as problem:
            raise ModelFileError(f"cannot read {self.path}: {problem.strerror or problem}.") from problem
        except (ValueError, KeyError) as problem:
            raise DataError(f"{self.path}: {problem}.") from problem
        if labels is None:
            raise DataError(f"{self.path}: no labels are named for these features (labels=).")
        if self.start is None and self.stop is None:
            return ClientData(features, labels)
        rows = np.arange(*slice(self.start, self.stop).indices(len(labels)))
        if isinstance(features, np.ndarray):
            return (
                ClientData(features[rows[0] : rows[-1] + 1], labels[rows])
                if len(rows)
                else _none(features, labels)
            )
        return ClientData(features, labels, rows)

    def _arrays(self) -> tuple[Any, Array | None]:
        path = Path(self.path)
        suffix = path.suffix.lower()
        if path.is_dir():
            from fedsolve.data.feature_store import FeatureStore

            found = FeatureStore(path.parent).get(path.name)
            return found.x_train, found.classes[found.y_train]
        if suffix == ".npz":
            with np.load(path) as arrays:
                return arrays["x"], arrays["y"]
        if suffix == ".npy":
            return np.load(path, mmap_mode="r"), None if self.labels is None else np.load(self.labels)
        if suffix in (".parquet", ".pq"):
            from fedsolve.data.parquet_rows import ParquetRows

            rows = ParquetRows(path, self.label)
            return rows, rows.labels
        raise DataError(f"{self.path}: rows are read from npz, npy, parquet or a feature set's folder.")


def _none(features: Array, labels: Array) -> ClientData:
    return ClientData(features[:0], labels[:0])
