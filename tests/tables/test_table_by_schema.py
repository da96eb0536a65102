"""Described tables from files: pyarrow and Python read the same, and every fault is named by its place."""

from __future__ import annotations

import gzip
import io
import sys

import numpy as np
import pytest

from fedsolve.errors import DataError, ModelFileError
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.schema import Column, Schema
from fedsolve.tables.table_file import TableFile, read_table

SCHEMA = Schema(
    (
        Column("age", missing="flag"),
        Column("sex", "category", categories=("F", "M")),
        Column("visit", "date", format="%d.%m.%Y"),
        Column("id", "unused"),
    ),
    label="y",
    classes=("a", "b"),
    client="site",
)
CSV = (
    "id,site,sex,age,visit,y\n1,north,F,3.5,01.02.2020,a\n2,south,X,NA,,b\n3,south, M ,-4e1,31.12.1999, b \n"
)


@pytest.fixture(params=["typed", "text"])
def reader(request, monkeypatch):
    """Both ways to read csv: numbers as such, and all cells as text."""
    if request.param == "text":
        only_texts(monkeypatch)


def only_texts(monkeypatch):
    cells = TableFile.cells

    def refuse(self, *given, typed=True):
        if typed:
            raise DataError("no numbers")
        return cells(self, *given, typed=False)

    monkeypatch.setattr(TableFile, "cells", refuse)


@pytest.fixture
def write(tmp_path):
    def write(contents, name="d.csv"):
        path = tmp_path / name
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return path

    return write


def check(rows):
    np.testing.assert_array_equal(rows.features[:, 0], [3.5, np.nan, -40])
    np.testing.assert_array_equal(rows.features[:, 1], [0, 1, 0])
    np.testing.assert_array_equal(rows.features[:, 2:5], [[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert np.isnan(rows.features[:, 5]).tolist() == [False, True, False]
    assert rows.labels.tolist() == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("contents", "dialect", "name"),
    [
        (CSV, Dialect(), "d.csv"),
        ("\ufeff" + CSV, Dialect(), "d.csv"),
        (CSV.replace("\n", "\r\n"), Dialect(), "d.csv"),
        (CSV.replace(",", "\t"), Dialect(delimiter="tab"), "d.tsv"),
        (CSV.replace(",", ";").replace("3.5", "3,5"), Dialect(decimal=","), "d.csv"),
        (CSV, Dialect(thousands="'"), "d.csv"),
        (CSV.replace("X", "é").encode("cp1252"), Dialect(encoding="cp1252"), "d.csv"),
        (CSV.encode("utf-16"), Dialect(encoding="utf-16"), "d.csv"),
        (gzip.compress(CSV.encode()), Dialect(), "d.csv.gz"),
        (CSV.replace("1,north", '"1\n1",north'), Dialect(), "d.csv"),
        (CSV.replace("\n2", "\n\n2"), Dialect(), "d.csv"),
    ],
    ids=["plain", "mark", "crlf", "tab", "comma", "thousands", "cp1252", "utf-16", "gz", "newline", "blank"],
)
def test_files_are_read(reader, write, contents, dialect, name):
    rows = read_table(write(contents, name), SCHEMA, dialect, owned=True, keep=["id"])
    check(rows)
    assert rows.owners.tolist() == ["north", "south", "south"]
    assert rows.kept["id"].tolist()[1:] == ["2", "3"]


def test_standard_input(reader, monkeypatch):
    for contents in (CSV.encode(), gzip.compress(CSV.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(contents)))
        check(read_table("-", SCHEMA))


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = csv.read_csv(io.BytesIO(CSV.encode()))
    parquet.write_table(table, tmp_path / "d.parquet")
    check(read_table(tmp_path / "d.parquet", SCHEMA))
    parquet.write_table(table.set_column(3, "age", pa.array(["x", "y", "3"])), tmp_path / "bad.parquet")
    with pytest.raises(
        DataError, match=r"bad\.parquet: 2 cells in column 'age' \(row 0: 'x' is not a number"
    ):
        read_table(tmp_path / "bad.parquet", SCHEMA)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ModelFileError, match="damaged"):
        read_table(tmp_path / "bad.parquet", SCHEMA)


def test_parquet_keeps_long_numbers_and_reads_bytes_as_text(tmp_path):
    """float64 would give 2**53 for 2**53 + 1, as pyarrow does where a value is missing."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ids, ages = [2**53 + 1, None, 5], [1.0, 2.0, float("nan")]
    table = {"age": ages, "sex": [b"F", None, b"\xff"], "visit": [None] * 3, "id": ids}
    table["y"] = [b"a", b"b", b"a"]
    parquet.write_table(pa.table(table), tmp_path / "d.parquet")
    rows = read_table(tmp_path / "d.parquet", SCHEMA, keep=("id", "age"), extra="ignore")
    assert rows.kept["id"].tolist() == ["9007199254740993", "", "5"]
    assert rows.kept["age"].tolist() == ["1", "2", ""]
    assert rows.labels.tolist() == ["a", "b", "a"]
    parquet.write_table(pa.table({**table, "sex": [b"F", None, b"M"]}), tmp_path / "d.parquet")
    features = read_table(tmp_path / "d.parquet", SCHEMA, extra="ignore").features
    assert features[:, 2:5].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("cells", [[[1.0], [2.0]], [{"low": 1}, {"low": 2}]])
def test_lists_and_structures_are_refused_by_name(cells, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"age": cells, "y": ["a", "b"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="column 'age': cells must be numbers, text or times"):
        read_table(tmp_path / "d.parquet", Schema((Column("age"),), label="y"))


def test_the_order_of_columns_does_not_matter(reader, write):
    lines = [line.split(",") for line in CSV.splitlines()]
    shuffled = "\n".join(",".join(line[i] for i in (5, 3, 0, 4, 2, 1)) for line in lines)
    check(read_table(write(shuffled), SCHEMA))


def test_labels_have_the_type_of_the_classes(reader, write):
    schema = Schema((Column("a"),), label="y", classes=(0, 1))
    assert read_table(write("a,y\n1,1.0\n2,0\n"), schema).labels.dtype.kind == "i"
    plain = Schema((Column("a"),), label="y")
    assert read_table(write("a,y\n1,1\n2,0\n"), plain).labels.tolist() == [1, 0]
    assert read_table(write("a\n1\n2\n"), schema, labelled=False).labels is None


@pytest.mark.parametrize(
    ("contents", "dialect", "parts"),
    [
        (
            "id,sex,age,visit,y\n1,F,n,01.02.2020,a\n2,X,NA\n3,M,inf,2020-01-31,\n",
            Dialect(),
            [
                "1 lines of another length (line 3 has 3 cells, the first line 5)",
                "2 cells in column 'age' (line 2: 'n' is not a number, line 4: 'inf' is infinite)",
                "column 'visit' (line 4: '2020-01-31' is not a date of the format %d.%m.%Y)",
                "column 'y' (line 4: it is empty)",
            ],
        ),
        (
            "age;sex;visit;y;id\n3,5;F;;a;1\n",
            Dialect(decimal="."),
            ["line 2: '3,5' is not a number", "pass --decimal ','"],
        ),
        ('age,sex,visit,y,id\n"1,000.5",F,,a,1\n', Dialect(thousands=""), ["'1,000.5'", "--thousands"]),
        ("age,sex,visit,y,id\n1_000,F,,a,1\n", Dialect(), ["'1_000' is not a number"]),
        ("age,sex,visit,y,id\n1,F,,q,1\n", Dialect(), ["label 'q' in row 0 is not one of the 2 classes"]),
        ("age,sex,visit,age,y\n1,F,,2,a\n", Dialect(), ["more than one column is called 'age'"]),
        ("Age,sex,visit,y\n1,F,,a\n", Dialect(), ["'age' is missing (did you mean 'Age'?)"]),
        ("age,sex,visit,y\n1,é,,a\n".encode("latin-1"), Dialect(), ["not in utf-8: byte 0xe9", "cp1252"]),
        (CSV.encode("utf-16"), Dialect(), ["in UTF-16"]),
        (CSV, Dialect(encoding="klingon"), ["no encoding is called 'klingon'"]),
        (CSV, Dialect(delimiter="::"), ["the delimiter must be one character"]),
        ("", Dialect(), ["the file is empty"]),
        ("age,sex,visit,y\n", Dialect(), ["no rows at all"]),
    ],
)
def test_faults_are_named(reader, write, contents, dialect, parts):
    with pytest.raises(DataError, match=r"d\.csv: ") as caught:
        read_table(write(contents), SCHEMA, dialect)
    for part in parts:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(reader, write, tmp_path):
    with pytest.raises(ModelFileError, match="cannot read"):
        read_table(tmp_path / "none.csv", SCHEMA)
    with pytest.raises(ModelFileError, match="damaged"):
        read_table(write(gzip.compress(CSV.encode())[:-12], "d.csv.gz"), SCHEMA)
    with pytest.raises(DataError, match="unknown kind of file"):
        read_table(tmp_path / "d.xlsx", SCHEMA)
    with pytest.raises(DataError, match="names no label column"):
        read_table(write(CSV), Schema((Column("age"),)))
    with pytest.raises(DataError, match="no column is called 'name'"):
        read_table(write(CSV), SCHEMA, keep=["name"])


def test_numbers_and_texts_give_the_same_bits(write, monkeypatch):
    rng = np.random.default_rng(0)
    values = [repr(float(v)) for v in rng.normal(size=9000) * 10.0 ** rng.integers(-300, 300, 9000)]
    text = "a,y\n" + "\n".join(f"{value},{number % 2}" for number, value in enumerate(values))
    schema, path = Schema((Column("a"),), label="y", classes=(0, 1)), write(text)
    fast = read_table(path, schema).features
    only_texts(monkeypatch)
    np.testing.assert_array_equal(fast, read_table(path, schema).features)
    np.testing.assert_array_equal(fast[:, 0], [float(value) for value in values])


def test_what_is_said_of_missing_labels_fits_labels(tmp_path):
    """A schema has no rule for them."""
    (tmp_path / "d.csv").write_text("age,y\n1,a\n2,\n")
    schema = Schema((Column("age"),), label="y")
    with pytest.raises(
        DataError, match=r"\(line 3: it is empty\)\. Fill them in, or leave these rows out\.$"
    ):
        read_table(tmp_path / "d.csv", schema)
    (tmp_path / "d.csv").write_text("age\n1\n")
    with pytest.raises(DataError, match=r"'y' is missing\. Rename .* 'fedsolve predict' needs none\.$"):
        read_table(tmp_path / "d.csv", schema)


def test_a_number_without_its_percent_sign_is_not_called_infinite(tmp_path):
    (tmp_path / "d.csv").write_text("share,y\n97%,a\n0.97,b\n")
    with pytest.raises(DataError, match=r"line 3: '0\.97' is without the % that all others have"):
        read_table(tmp_path / "d.csv", Schema((Column("share", signs="%"),), label="y"))
