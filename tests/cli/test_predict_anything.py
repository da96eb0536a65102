"""`predict` on any table: packed, parquet, npz, standard input, several files; numbers spelled anyhow."""

from __future__ import annotations

import csv
import gzip
import io

import numpy as np
import pytest
from click.testing import CliRunner

from fedsolve.cli.main import main
from tests.command import document, fedsolve

ROWS = 40
NAMES = ("age", "pressure", "weight")


def text(columns, delimiter=","):
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model by a schema with an identifier, and its rows in every kind of file, columns in other orders."""
    folder = tmp_path_factory.mktemp("anything")
    rng = np.random.default_rng(6)
    values = {name: (rng.normal(size=ROWS) * 2000).round(3) for name in NAMES}
    ids = [f"p{number:03}" for number in range(ROWS)]
    labels = np.where(values["age"] + values["pressure"] > 0, "ill", "well")
    (folder / "train.csv").write_text(text({"patient": ids, **values, "y": labels}))
    document("schema", folder / "train.csv", "--out", folder / "schema.toml")
    words = ("--schema", folder / "schema.toml", "--method", "afl", "--ridge", 1, "--clients", 2)
    document("train", folder / "train.csv", *words, "--out", folder / "m")
    shuffled = {
        "weight": values["weight"],
        "patient": ids,
        "pressure": values["pressure"],
        "age": values["age"],
    }
    plain = text(shuffled)
    german = {
        name: [f"{cell:,.3f}".translate(str.maketrans(",.", ".,")) for cell in values[name]] for name in NAMES
    }
    (folder / "d.csv").write_text(plain)
    (folder / "d.tsv").write_text(text(shuffled, "\t"))
    (folder / "d.csv.gz").write_bytes(gzip.compress(plain.encode()))
    (folder / "german.csv").write_text(text({"patient": ids, **german}, ";"))
    (folder / "german.latin.csv").write_bytes(
        text({"größe": ids, "patient": ids, **german}, ";").encode("latin-1")
    )
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(shuffled), folder / "d.parquet")
    np.savez(folder / "d.npz", x=np.column_stack([values[name] for name in NAMES]))
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return lines("m", "d.csv", folder=folder)


def lines(*words, folder, given=None, told=""):
    line = [
        "predict",
        str(folder / words[0]),
        *(word if word[0] == "-" else str(folder / word) for word in words[1:]),
    ]
    result = CliRunner().invoke(main, line, input=given)
    assert (result.exit_code, result.stderr) == (0, told), result.stderr
    return [row.split(",") for row in result.stdout.splitlines()]


def test_the_identifier_stands_beside_the_label(expected):
    assert expected[0] == ["row", "patient", "label"]
    assert [row[:2] for row in expected[1:]] == [[str(row), f"p{row:03}"] for row in range(ROWS)]
    assert {row[2] for row in expected[1:]} == {"ill", "well"}


@pytest.mark.parametrize("name", ["d.tsv", "d.csv.gz", "d.parquet", "train.csv"])
def test_every_kind_of_table_gives_the_same(folder, expected, name):
    assert lines("m", name, folder=folder) == expected


def test_an_npz_has_no_identifiers(folder, expected):
    assert lines("m", "d.npz", folder=folder) == [[row[0], row[2]] for row in expected]


@pytest.mark.parametrize("name", ["d.csv", "d.tsv", "d.csv.gz", "d.parquet"])
def test_standard_input(folder, expected, name):
    assert lines("m", "-", folder=folder, given=(folder / name).read_bytes()) == expected


def test_an_error_in_standard_input_is_called_so(folder):
    result = CliRunner().invoke(main, ["predict", str(folder / "m"), "-"], input="age,pressure\n1,2\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: standard input: the columns do not fit the schema")


def test_several_files_one_after_the_other(folder, expected):
    first, second = "d.csv.gz", "d.parquet"
    found = lines("m", first, second, folder=folder)
    assert found[0] == ["row", "file", "patient", "label"]
    for place, name in ((1, first), (1 + ROWS, second)):
        part = found[place : place + ROWS]
        assert {row[1] for row in part} == {str(folder / name)}
        assert [[row[0], *row[2:]] for row in part] == expected[1:]
    told = document("predict", folder / "m", folder / first, folder / second)
    assert told["rows"] == 2 * ROWS
    assert told["beside"]["patient"][:2] == ["p000", "p001"]


def test_numbers_spelled_in_german(folder, expected):
    words = ("--decimal=,", "--thousands=.")
    assert lines("m", "german.csv", *words, folder=folder) == expected
    told = f"warning: {folder / 'german.latin.csv'}: the model does not use 'größe', which is ignored.\n"
    latin = lines("m", "german.latin.csv", *words, "--encoding=latin-1", folder=folder, told=told)
    assert latin == expected


def test_training_on_german_numbers_gives_the_same_model(folder, tmp_path):
    """The address and the file, with pyarrow's reader and with Python's."""
    german = (folder / "german.csv").read_text().splitlines()
    labels = [line.rsplit(",", 1)[1] for line in (folder / "train.csv").read_text().splitlines()]
    both = "\n".join(f"{line};{label}" for line, label in zip(german, labels, strict=True))
    (tmp_path / "german.csv").write_text(both + "\n")
    words = ("--method", "afl", "--ridge", 1, "--clients", 2, "--out")
    document("train", folder / "train.csv", "--drop", "patient", *words, tmp_path / "plain")
    spelled = ("--delimiter", ";", "--decimal", ",", "--thousands", ".", "--drop", "patient")
    document("train", tmp_path / "german.csv", *spelled, *words, tmp_path / "file")
    options = "delimiter=;&decimal=,&thousands=.&drop=patient&test=0"
    document("train", f"csv:{tmp_path / 'german.csv'}?{options}", *words, tmp_path / "address")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "address").read_bytes() == (tmp_path / "plain").read_bytes()


def test_other_columns_may_be_kept(folder):
    found = lines("m", "d.csv", "--keep=weight", folder=folder)
    assert found[0] == ["row", "patient", "weight", "label"]
    written = fedsolve("predict", folder / "m", folder / "d.csv", "--keep", "weight", "--scores").stdout
    assert written.splitlines()[0] == "row,patient,weight,label,score_ill,score_well"
    assert written.splitlines()[1].split(",")[:3] == ["0", "p000", found[1][2]]
