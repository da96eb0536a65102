"""ParquetRows: what a file holds is given as it is, or refused by row, column and path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError, FedsolveError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write_lists(path: Path, lists: list[Any], kind: Any, group: int = 4) -> Path:
    labels = np.arange(len(lists)) % 2
    table = pyarrow.table({"x": pyarrow.array(lists, type=kind), "y": labels})
    parquet.write_table(table, path, row_group_size=group)
    return path


def test_lists_of_unequal_lengths_are_refused_by_row_where_their_total_balances(tmp_path: Path):
    lists = np.arange(120.0).reshape(10, 12).tolist()
    lists[6].append(lists[5].pop())
    rows = fs.ParquetRows(write_lists(tmp_path / "a.parquet", lists, pyarrow.list_(pyarrow.float64())), "y")
    assert np.array_equal(rows[:4], np.arange(48.0).reshape(4, 12))
    with pytest.raises(
        DataError, match=r"a\.parquet: 'x' has lists of different lengths: 11 in row 5, 12 in"
    ):
        rows[4:6]


KINDS = {
    "bool": lambda: pyarrow.bool_(),
    "int8": lambda: pyarrow.int8(),
    "int64": lambda: pyarrow.int64(),
    "float32": lambda: pyarrow.float32(),
}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nulls_within_lists_are_refused_by_row(tmp_path: Path, kind: str, fixed: bool):
    row = [True, False, True] if kind == "bool" else [1, 0, 1]
    lists: list[list[Any]] = [list(row) for _ in range(10)]
    lists[6][1] = None
    of = pyarrow.list_(KINDS[kind](), 3) if fixed else pyarrow.list_(KINDS[kind]())
    rows = fs.ParquetRows(write_lists(tmp_path / "a.parquet", lists, of), "y")
    assert np.array_equal(rows[:4], np.array(lists[:4]))
    with pytest.raises(DataError, match=r"'x' has missing values \(first in row 6\)"):
        rows[np.array([5])]


def write_columns(path: Path, features: np.ndarray, group: int) -> None:
    columns = {f"x{number}": column for number, column in enumerate(features.T)}
    table = pyarrow.table({**columns, "y": np.arange(len(features)) % 2})
    parquet.write_table(table, path, row_group_size=group)


@pytest.mark.parametrize("travelled", [False, True])
@pytest.mark.parametrize("change", ["values", "groups", "removed"])
def test_a_file_that_changes_is_refused_and_nothing_of_it_kept(tmp_path: Path, change: str, travelled: bool):
    features = np.random.default_rng(0).standard_normal((40, 3))
    path = tmp_path / "a.parquet"
    write_columns(path, features, 10)
    rows = fs.ParquetRows(path, "y")
    packed = pickle.dumps(rows)
    assert np.array_equal(rows[:20], features[:20])
    before = path.stat()
    if change == "removed":
        path.unlink()
    else:
        written = features[::-1] if change == "values" else np.vstack([features, features])
        write_columns(path, written, 10 if change == "values" else 20)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    if travelled:
        rows = pickle.loads(packed)
    for asked in (slice(0, 5), slice(20, 30), np.array([3])):
        with pytest.raises(FedsolveError, match=r"cannot read .*a\.parquet|a\.parquet is no longer the file"):
            rows[asked]
    assert not rows._kept
    write_columns(path, features, 10)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert np.array_equal(rows[:], features)


def test_a_copy_on_another_machine_may_have_another_time(tmp_path: Path, monkeypatch):
    features = np.random.default_rng(0).standard_normal((40, 3))
    path = tmp_path / "a.parquet"
    write_columns(path, features, 10)
    packed = pickle.dumps(fs.ParquetRows(path, "y"))
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    os.utime(path, ns=(0, 0))
    rows = pickle.loads(packed)
    assert np.array_equal(rows[:], features)
    os.utime(path, ns=(0, 1))
    with pytest.raises(DataError, match="is no longer the file"):
        rows[:1]
    rows = pickle.loads(packed)
    rows._bounds = np.arange(0, 45, 5)
    with pytest.raises(DataError, match="10 rows in row group 0, and had 5"):
        rows[:1]


def test_a_first_list_that_is_null_is_refused_by_row(tmp_path: Path):
    path = write_lists(tmp_path / "a.parquet", [None, [1.0, 2.0]], pyarrow.list_(pyarrow.float64()))
    with pytest.raises(DataError, match=r"'x' has missing values \(first in row 0\)"):
        fs.ParquetRows(path, "y")


def test_large_lists_are_lists(tmp_path: Path):
    values = np.arange(30.0).reshape(10, 3)
    path = write_lists(tmp_path / "a.parquet", values.tolist(), pyarrow.large_list(pyarrow.float64()))
    assert np.array_equal(fs.ParquetRows(path, "y")[:], values)


def test_rows_are_numbered_as_numpy_numbers_them(tmp_path: Path):
    features = np.random.default_rng(0).standard_normal((40, 3))
    write_columns(tmp_path / "a.parquet", features, 10)
    rows = fs.ParquetRows(tmp_path / "a.parquet", "y")
    assert np.array_equal(rows[np.array([-1, 0, -40, 39])], features[[-1, 0, -40, 39]])
    assert np.array_equal(rows[::-1], features[::-1])
    assert rows[np.array([], dtype=int)].shape == (0, 3)
    for wrong in (40, -41):
        with pytest.raises(IndexError, match=rf"no row {wrong}: .*a\.parquet has 40 rows"):
            rows[np.array([3, wrong])]
    with pytest.raises(IndexError, match=r"39 marks .* 40 rows"):
        rows[np.ones(39, dtype=bool)]


def test_what_cannot_be_meant_is_refused(tmp_path: Path):
    features = np.random.default_rng(0).standard_normal((40, 3))
    path = tmp_path / "a.parquet"
    write_columns(path, features, 40)
    for memory in (0, -1, 1.5):
        with pytest.raises(DataError, match="memory must be a whole number, at least 1"):
            fs.ParquetRows(path, "y", memory=memory)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"groups of 0\.938 kB as numbers, and 0\.0977 kB may be"):
        fs.ParquetRows(path, "y", memory=100)
    with pytest.raises(DataError, match="'y' is the label, and among the columns"):
        fs.ParquetRows(path, "y", columns=["x0", "y"])
    assert fs.ParquetRows(path, "y", columns="x1").shape == (40, 1)
