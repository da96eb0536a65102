"""ParquetRows: what a file holds is given as it is, or refused by row, column and path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError

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
