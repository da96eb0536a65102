"""RowFile: rows of every kind of file as the command line reads them, and files named where they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import FedsolveError
from fedsolve.tables.table_file import read_table

FEATURES = np.random.default_rng(0).standard_normal((40, 3))
LABELS = np.arange(40) % 2


@pytest.mark.parametrize("names", [("x", "y"), ("X", "Y"), ("x_train", "y_train"), ("features", "target")])
def test_an_npz_is_what_the_command_line_reads(tmp_path: Path, names: tuple[str, str]):
    path = tmp_path / "a.npz"
    packed = np.round((FEATURES + 5) * 20).astype(np.uint8)
    arrays: dict[str, Any] = {names[0]: packed, names[1]: LABELS, "scale": np.float32(0.05), "offset": [-5.0]}
    np.savez(path, **arrays, x_test=packed[:1], y_test=LABELS[:1])
    table = read_table(path, part="train")
    data = fs.RowFile(str(path), start=10).open()
    assert np.array_equal(data.features(slice(None)), table.features[10:])
    assert np.allclose(data.features(slice(None)), FEATURES[10:], atol=0.03)
    assert np.array_equal(data.own_labels, LABELS[10:])


def says(file: fs.RowFile, *words: str) -> None:
    """The file is refused with all these words, and a message that names a path once."""
    with pytest.raises(FedsolveError) as caught:
        file.open()
    text = str(caught.value)
    for word in words:
        assert word in text
    named = [path for path in (file.path, file.labels) if path and path in text]
    assert [text.count(path) for path in named] == [1]
    assert not text.endswith("..")


def test_files_that_cannot_be_used_are_named_once(tmp_path: Path):
    def at(name: str) -> str:
        return str(tmp_path / name)

    np.savez(at("a.npz"), x=FEATURES, y=LABELS)
    np.save(at("x.npy"), FEATURES)
    np.save(at("y.npy"), LABELS)
    whole = Path(at("a.npz")).read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[:700])
    (tmp_path / "wrong.npz").write_bytes(whole[:300] + b"\xff" * 100 + whole[400:])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "short.npy").write_bytes(Path(at("x.npy")).read_bytes()[:300])
    for name in ("short.npz", "wrong.npz", "empty.npz"):
        says(fs.RowFile(at(name)), at(name), "not an npz file", "write it again")
    for name in ("short.npy", "empty.npy"):
        says(fs.RowFile(at(name), labels=at("y.npy")), at(name), "not an npy file")
        says(fs.RowFile(at("x.npy"), labels=at(name)), at(name), "not an npy file")
    says(fs.RowFile(at("none.npz")), f"cannot read {at('none.npz')}: No such file")
    says(fs.RowFile(at("none.npy"), labels=at("y.npy")), f"cannot read {at('none.npy')}")
    says(fs.RowFile(at("x.npy"), labels=at("none.npy")), f"cannot read {at('none.npy')}")
    says(fs.RowFile(at("x.npy")), at("x.npy"), "labels=")
    says(fs.RowFile(at("a.csv")), at("a.csv"), "rows are read from npz")


def test_arrays_that_are_not_there_or_not_numbers_are_named(tmp_path: Path):
    path = str(tmp_path / "a.npz")
    np.savez(path, inputs=FEATURES, outcome=LABELS)
    says(fs.RowFile(path), path, "inputs, outcome", "np.savez(path, x=features, y=labels)")
    np.savez(path, x=FEATURES, outcome=LABELS)
    says(fs.RowFile(path), path, "x, outcome", "np.savez(path, x=features, y=labels)")
    np.savez(path, x=FEATURES, y=np.array([None] * 40))
    says(fs.RowFile(path), path, "'y' holds Python objects")
    np.savez(path, x=FEATURES[:, 0], y=LABELS)
    says(fs.RowFile(path), path, "two-dimensional")
    np.savez(path, x=np.where(FEATURES > 2, np.nan, FEATURES), y=LABELS)
    says(fs.RowFile(path), path, "NaN")


def test_a_parquet_file_is_named_once(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"a": FEATURES[:, 0], "y": LABELS}), path)
    says(fs.RowFile(path, label="z"), path, "no column 'z'")
    says(fs.RowFile(str(tmp_path / "none.parquet")), "cannot read", "No such file")
    (tmp_path / "b.parquet").write_bytes(Path(path).read_bytes()[:100])
    says(fs.RowFile(str(tmp_path / "b.parquet")), "b.parquet", "not a parquet file")
    whole = bytearray(Path(path).read_bytes())
    whole[4:24] = b"\xff" * 20
    (tmp_path / "c.parquet").write_bytes(whole)
    says(fs.RowFile(str(tmp_path / "c.parquet")), "c.parquet", "not a parquet file")
