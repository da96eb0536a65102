"""The file that holds a client's rows: read by the worker that answers for the client, and sent nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.parquet_rows import FileStamp, ParquetRows
from fedsolve.errors import DataError, FedsolveError, unreadable
from fedsolve.federation.participant import ClientData
from fedsolve.tables.table_file import read_npy, read_npz

_ROWS = 65536
"""Rows compared at a time where a system does not tell which file is mapped."""


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

    def stamps(self) -> tuple[FileStamp, ...]:
        """What tells these files from others under their paths."""
        path = Path(self.path)
        if path.is_dir():
            return tuple(
                FileStamp.of(path / name) for name in ("manifest.json", "x_train.npy", "y_train.npy")
            )
        mapped = self.labels is not None and path.suffix.lower() == ".npy"
        return tuple(FileStamp.of(name) for name in (self.path, self.labels if mapped else None) if name)

    def _chosen(self, features: Any, labels: Array) -> ClientData:
        if self.start is None and self.stop is None:
            return ClientData(features, labels)
        rows = np.arange(*slice(self.start, self.stop).indices(len(labels)))
        if not isinstance(features, np.ndarray):
            return ClientData(features, labels, rows)
        first, last = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
        return ClientData(features[first:last], labels[rows])

    def _arrays(self) -> tuple[Any, Array | None]:
        path = Path(self.path)
        suffix = path.suffix.lower()
        if path.is_dir():
            from fedsolve.data.feature_store import FeatureStore

            found = FeatureStore(path.parent).get(path.name)
            return found.x_train, found.classes[found.y_train]
        if suffix == ".npz":
            remedy = "Write it with np.savez(path, x=features, y=labels)."
            return read_npz(path, "train", remedy=remedy)[:2]
        if suffix == ".npy":
            return read_npy(path, mapped=True), None if self.labels is None else read_npy(self.labels)
        if suffix in (".parquet", ".pq"):
            rows = ParquetRows(self.path, self.label)
            return rows, rows.labels
        raise DataError("rows are read from npz, npy, parquet or a feature set's folder.")


def file_of(features: Any) -> str | None:
    """The .npy file of which this array is the whole.

    None for a part, for changes not in the file, and where another file has taken the path since.
    """
    path = getattr(features, "filename", None)
    if not isinstance(features, np.memmap) or features.mode == "c" or not str(path).endswith(".npy"):
        return None
    try:
        whole = np.load(str(path), mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None

    def place(array: Any) -> tuple[object, ...]:
        return array.shape, array.strides, array.dtype, array.offset

    if place(whole) != place(features):
        return None
    try:
        same = _mapped_file(whole) == _mapped_file(features)
    except OSError:  # a system that does not tell: an equal file will do
        blocks = [slice(start, start + _ROWS) for start in range(0, len(whole), _ROWS)]
        same = all(whole[block].tobytes() == features[block].tobytes() for block in blocks)
    return str(Path(str(path)).absolute()) if same else None


def _mapped_file(array: np.memmap[Any, Any]) -> tuple[str, str]:
    """Device and inode of the file that is mapped where this array lies."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, _, _, device, inode = line.split()[:5]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= array.ctypes.data < last:
            return device, inode
    raise OSError("no file is mapped there")
