"""Where a client's rows are: a file that is read by whoever answers for the client, and sent nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.file_mark import FileMark
from fedsolve.data.layout import ColumnLayout, Wish, unreadable
from fedsolve.data.npz import read_npy, read_npz
from fedsolve.errors import DataError, FedsolveError
from fedsolve.federation.participant import ClientData

_TRAIN = Wish(ColumnLayout(), "train", labelled=True, owned=False, width=None)

_WRITE_XY = "Write it with np.savez(path, x=features, y=labels)."


@dataclass(frozen=True)
class RowFile:
    """Features and labels in a file, or some rows of it.

    path:    .npz with the arrays x and y or others that the command line knows, such as x_train and y_train,
             decoded by `scale` and `offset` where it has them; .npy of features, mapped, with `labels` beside
             it; .parquet, read by row groups; or the folder of a feature set in a store (its training part,
             mapped).
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
            if labels is None:
                raise DataError("no labels are named for these features (labels=).")
            return self._chosen(features, labels)
        except FedsolveError as problem:
            if any(path in str(problem) for path in (self.path, self.labels) if path):
                raise
            raise type(problem)(f"{self.path}: {problem}") from problem
        except OSError as problem:
            raise unreadable(self.path, problem) from problem

    def marks(self) -> tuple[FileMark, ...]:
        """What tells these files from others under their paths."""
        path = Path(self.path)
        if path.is_dir():
            return tuple(FileMark.of(path / name) for name in ("manifest.json", "x_train.npy", "y_train.npy"))
        mapped = self.labels is not None and path.suffix.lower() == ".npy"
        return tuple(FileMark.of(name) for name in (self.path, self.labels if mapped else None) if name)

    def _chosen(self, features: Any, labels: Array) -> ClientData:
        """The rows from `start` to `stop`."""
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
            return read_npz(path, _TRAIN, _WRITE_XY)[:2]
        if suffix == ".npy":
            return read_npy(path, mapped=True), None if self.labels is None else read_npy(self.labels)
        if suffix in (".parquet", ".pq"):
            from fedsolve.data.parquet_rows import ParquetRows

            rows = ParquetRows(self.path, self.label)
            return rows, rows.labels
        raise DataError("rows are read from npz, npy, parquet or a feature set's folder.")


def _none(features: Array, labels: Array) -> ClientData:
    return ClientData(features[:0], labels[:0])
