"""Features of a parquet file, read one row group at a time."""

from __future__ import annotations

import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array, StreamedRows, check_whole
from fedsolve.errors import DataError, FedsolveError, reading
from fedsolve.labels import plain_labels
from fedsolve.tables.table_file import sound_parquet


@dataclass(frozen=True)
class FileStamp:
    """A file's size and, on one machine, its modification time.

    modified: in nanoseconds. Copies of a file on several machines may differ in it.
    """

    path: str
    size: int
    modified: int
    machine: str

    @classmethod
    def of(cls, path: str | Path) -> FileStamp:
        with reading(path, "a file"):
            found = os.stat(path)
        return cls(str(path), found.st_size, found.st_mtime_ns, platform.node())

    def check(self) -> FileStamp:
        """Refuse a file that has changed; return its stamp on this machine."""
        now = FileStamp.of(self.path)
        if now.size != self.size or (now.machine == self.machine and now.modified != self.modified):
            raise DataError(
                f"{self.path} is no longer the file that was opened: {self} then, {now} now. "
                "Put that one back as it was (cp -p), or begin again."
            )
        return now

    def __str__(self) -> str:
        return f"{self.size} bytes of {datetime.fromtimestamp(self.modified / 1e9):%Y-%m-%d %H:%M:%S.%f}"


class ParquetRows(StreamedRows):
    """The rows of a parquet file of numbers, of which at most `memory` bytes are in memory.

    label:   the column of labels or targets, read once, as `labels`; None where there is none.
    columns: those that are features, in this order; all but the label when None. A single column of lists of
             one length is the features of a row.
    memory:  bytes of row groups kept. A file whose row groups are larger is refused: they are the least that
             can be read. Rows are read fastest where each client's lie together.

    The file must stay as it is: one that changes is refused when rows are read next.
    """

    def __init__(
        self,
        path: str | Path,
        label: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        memory: int = 256 << 20,
    ) -> None:
        check_whole(1, memory=memory)
        if isinstance(columns, str):
            columns = [columns]
        if columns is not None and label in columns:
            raise DataError(f"'{label}' is the label, and among the columns of features; leave it out.")
        self.path = str(path)
        self.label = label
        self.memory = memory
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Array] = OrderedDict()
        self._stamp = FileStamp.of(path)
        with self._reading() as file:
            names = [str(name) for name in file.schema_arrow.names]
            self.columns = [name for name in names if name != label] if columns is None else list(columns)
            for name in [*self.columns, *([] if label is None else [label])]:
                if name not in names:
                    raise DataError(f"{path} has no column '{name}'; it has {', '.join(names[:10])}.")
            if not self.columns:
                raise DataError(f"{path} has no columns of features.")
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._bounds = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
            self.labels: Array | None = None
            if label is not None:
                self.labels = plain_labels(file.read(columns=[label]).column(0).to_numpy())
            width, self._lists = self._layout(file)
        self._stamp.check()
        self.shape = (int(self._bounds[-1]), width)
        largest = max(groups, default=0) * width * self.dtype.itemsize
        if largest > memory:
            raise DataError(
                f"{path} has row groups of {_size(largest)} as numbers, and {_size(memory)} may be in "
                "memory. Write it with smaller ones (row_group_size=), or allow more (memory=)."
            )

    def __getitem__(self, rows: slice | Array) -> Array:
        rows = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        if rows.dtype == bool:
            if len(rows) != len(self):
                raise IndexError(f"{len(rows)} marks for the {len(self)} rows of {self.path}.")
            rows = np.flatnonzero(rows)
        wrong = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(wrong):
            raise IndexError(f"there is no row {wrong[0]}: {self.path} has {len(self)} rows.")
        rows = np.where(rows < 0, rows + len(self), rows)
        wanted = np.empty((len(rows), self.shape[1]), dtype=self.dtype)
        places = np.searchsorted(self._bounds, rows, side="right") - 1
        for group in np.unique(places):
            here = places == group
            wanted[here] = self._group(int(group))[rows[here] - self._bounds[group]]
        return wanted

    def __getstate__(self) -> dict[str, Any]:
        # The path travels, the features do not; the file must be the same where they are read.
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._kept = OrderedDict()

    def _group(self, group: int) -> Array:
        """The features of a row group: kept ones, or read now in place of those used longest ago."""
        with self._lock:
            self._check_file()
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            rows = int(self._bounds[group + 1] - self._bounds[group])
            size = rows * self.shape[1] * self.dtype.itemsize
            while self._kept and size + sum(array.nbytes for array in self._kept.values()) > self.memory:
                self._kept.popitem(last=False)
            with self._reading() as file:
                here = file.metadata.row_group(group).num_rows if group < file.num_row_groups else 0
                if here != rows:
                    raise DataError(
                        f"{self.path} has {here} rows in row group {group}, and had {rows} when it was "
                        "opened. Put the former file back, or begin again."
                    )
                table = file.read_row_group(group, columns=self.columns)
            self._check_file()
            self._kept[group] = array = self._numbers(table, int(self._bounds[group]))
            return array

    def _check_file(self) -> None:
        """Refuse a file that is not the one that was opened, and keep nothing of either."""
        try:
            self._stamp = self._stamp.check()
        except FedsolveError:
            self._kept.clear()
            raise

    def _numbers(self, table: Any, start: int) -> Array:
        """The features of a table whose first row is row `start` of the file."""
        for name in self.columns:
            self._refuse_nulls(table.column(name), name, start)
        if self._lists:
            return self._flat(table.column(0), start).reshape(len(table), self.shape[1])
        array = np.empty((len(table), len(self.columns)), dtype=self.dtype)
        for place, name in enumerate(self.columns):
            array[:, place] = table.column(name).to_numpy()
        return array

    def _flat(self, column: Any, start: int) -> Array:
        """The values of lists, all of the width of the file and none of them null."""
        import pyarrow
        from pyarrow import compute

        width, name = self.shape[1], self.columns[0]
        lengths = compute.list_value_length(column).to_numpy()
        wrong = np.flatnonzero(lengths != width)
        if len(wrong):
            raise DataError(
                f"{self.path}: '{name}' has lists of different lengths: {lengths[wrong[0]]} in row "
                f"{start + wrong[0]}, {width} in the rows before. Write lists of one length."
            )
        parts = [part.flatten() for part in column.chunks]
        values = pyarrow.chunked_array(parts, type=column.type.value_type)
        self._refuse_nulls(values, name, start, width)
        return np.asarray(values.to_numpy()).astype(self.dtype, copy=False)

    def _refuse_nulls(self, values: Any, name: str, start: int, width: int = 1) -> None:
        """Refuse values of which some are null; `width` of them are a row."""
        if values.null_count:
            place = int(np.argmax(np.asarray(values.is_null())))
            raise DataError(
                f"{self.path}: '{name}' has missing values (first in row {start + place // width}). Remove "
                "or impute them before training."
            )

    def _layout(self, file: Any) -> tuple[int, bool]:
        """The width, and whether one column of lists holds it; `dtype` is set."""
        from pyarrow import types

        fields = [file.schema_arrow.field(name).type for name in self.columns]
        lists = any(
            kind(fields[0]) for kind in (types.is_fixed_size_list, types.is_list, types.is_large_list)
        )
        if lists and len(fields) > 1:
            raise DataError(f"{self.path}: '{self.columns[0]}' holds lists; name it alone (columns=).")
        kinds = [fields[0].value_type] if lists else fields
        for name, kind in zip(self.columns, kinds, strict=True):
            if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
                raise DataError(f"{self.path}: '{name}' holds {kind}, not numbers. Leave it out (columns=).")
        self.dtype = np.result_type(*{np.dtype(kind.to_pandas_dtype()) for kind in kinds})
        if not lists:
            return len(fields), False
        if types.is_fixed_size_list(fields[0]):
            return int(fields[0].list_size), True
        first = next(iter(file.iter_batches(batch_size=1, columns=self.columns)), None)
        if first is None:
            return 0, True
        self._refuse_nulls(first.column(0), self.columns[0], 0)
        return len(first.column(0)[0]), True

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        from pyarrow import parquet

        with sound_parquet(self.path), parquet.ParquetFile(self.path) as file:
            yield file


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.3g} kB"
