"""Proposals: what a site's file looks like, with the reason for everything that is left out."""

from __future__ import annotations

import numpy as np
import pytest

from fedsolve.errors import DataError, ModelFileError
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.proposal import propose, propose_for, rounded_place
from fedsolve.tables.schema import from_toml, to_toml
from fedsolve.tables.table_file import ColumnLayout, read_table

pd = pytest.importorskip("pandas")

ROWS = 300


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    labels = rng.choice(["B", "M"], ROWS)
    numbers = np.arange(ROWS)
    frame = pd.DataFrame(
        {
            "patient_id": 10_000 + rng.permutation(ROWS),
            "serial": [f"A{number:05d}" for number in rng.permutation(ROWS)],
            "age": rng.normal(60, 9, ROWS).round(2),
            "stamp": 1.7e9 + rng.normal(0, 1000, ROWS),
            "grade": rng.integers(1, 5, ROWS),
            "sex": rng.choice(["F", "M"], ROWS),
            "code": rng.choice(["007", "012"], ROWS),
            "town": [f"town {number % 90}" for number in numbers],
            "visit": (np.datetime64("2021-03-01") + rng.integers(0, 900, ROWS)).astype(str),
            "seen": [f"{1 + number % 12:02d}/{1 + number % 11:02d}/2020" for number in numbers],
            "left": [f"{1 + number % 28:02d}.{1 + number % 12:02d}.2020" for number in numbers],
            "note": [f"the patient came with pain {number % 50}" for number in numbers],
            "version": 1,
            "empty": np.nan,
            "outcome": np.where(labels == "B", "good", "bad"),
            "hospital": rng.choice(["north", "south"], ROWS),
            "diagnosis": labels,
        }
    )
    frame.loc[rng.random(ROWS) < 0.1, ["age"]] = np.nan
    frame.loc[rng.random(ROWS) < 0.1, ["sex"]] = None
    return frame


def columns(schema):
    return {column.name: column for column in schema.columns}


def test_every_column_is_what_it_looks_like(frame):
    schema = propose(frame, label="diagnosis", client="hospital")
    kinds = {name: column.kind for name, column in columns(schema).items()}
    assert kinds == {
        "patient_id": "identifier",
        "serial": "identifier",
        "age": "number",
        "stamp": "number",
        "grade": "number",
        "sex": "category",
        "code": "category",
        "town": "unused",
        "visit": "date",
        "seen": "date",
        "left": "date",
        "note": "text",
        "version": "unused",
        "empty": "unused",
        "outcome": "unused",
    }
    assert (schema.label, schema.client, schema.classes) == ("diagnosis", "hospital", ("B", "M"))
    remarks = {name: column.remark for name, column in columns(schema).items()}
    for name, part in {
        "patient_id": "looks like an identifier (300 different values in 300 rows)",
        "serial": "identifier",
        "town": "many values (90 different ones",
        "version": "constant, always '1'",
        "empty": "no values at all",
        "outcome": "leak",
        "visit": "looks like a date, ISO 8601",
        "seen": "another format fits as well",
        "grade": "a category if they are codes",
        "age": "missing",
    }.items():
        assert part in remarks[name]
        assert part in to_toml(schema)


def test_the_details_fit(frame):
    found = columns(propose(frame, label="diagnosis", client="hospital"))
    assert found["age"].reference in range(58, 63)
    assert (found["age"].scale, found["age"].missing) == (9, "flag")
    assert (found["grade"].missing, found["sex"].missing) == ("mean", "flag")
    assert found["sex"].categories == ("F", "M")
    assert found["code"].categories == ("007", "012")
    assert found["left"].format == "%d.%m.%Y"
    assert found["visit"].reference == (np.datetime64("2022-01-01") - np.datetime64("1970-01-01")).astype(int)
    assert abs(found["stamp"].reference - 1.7e9) <= 1e4
    assert found["stamp"].scale in (900, 1000)


@pytest.mark.parametrize("kind", ["csv", "semicolons", "gz", "parquet", "arrow", "dict"])
def test_files_and_tables_give_the_same_proposal(frame, kind, tmp_path):
    expected = propose(frame, label="diagnosis", client="hospital")
    dialect = None
    if kind == "csv":
        table = tmp_path / "d.csv"
        frame.to_csv(table, index=False)
    elif kind == "semicolons":
        table, dialect = tmp_path / "d.csv", Dialect(decimal=",")
        frame.to_csv(table, index=False, sep=";", decimal=",")
    elif kind == "gz":
        table = tmp_path / "d.csv.gz"
        frame.to_csv(table, index=False)
    elif kind == "parquet":
        pytest.importorskip("pyarrow")
        table = tmp_path / "d.parquet"
        frame.to_parquet(table)
    elif kind == "arrow":
        table = pytest.importorskip("pyarrow").Table.from_pandas(frame)
    else:
        table = {name: frame[name].tolist() for name in frame}
    schema = propose(table, label="diagnosis", client="hospital", dialect=dialect)
    assert schema.differences(expected) == []
    if kind in ("csv", "semicolons", "gz", "parquet"):
        rows = read_table(table, from_toml(to_toml(schema)), dialect, owned=True)
        assert rows.features.shape == (ROWS, schema.width)


def test_only_the_first_rows_are_looked_at(frame):
    assert columns(propose(frame, label="diagnosis", rows=10))["grade"].kind == "number"
    frame["age"] = [*frame["age"][:20], *["text"] * (ROWS - 20)]
    assert columns(propose(frame, label="diagnosis", rows=10))["age"].kind == "number"


def test_labels_are_found_named_or_asked_for(frame):
    assert propose(frame.rename(columns={"diagnosis": "Target"})).label == "Target"
    with pytest.raises(DataError, match="which column is the label"):
        propose(frame)
    with pytest.raises(DataError, match=r"no label column 'diagnosi'\. Did you mean 'diagnosis'"):
        propose(frame, label="diagnosi")
    assert propose(frame, label="stamp").classes == ()
    with pytest.raises(DataError, match="one value only"):
        propose(frame, label="version")
    with pytest.raises(DataError, match="no column looks like one to learn from: 'patient_id': unused"):
        propose(frame[["patient_id", "version", "diagnosis"]], label="diagnosis")


def test_bad_files_are_named(tmp_path):
    (tmp_path / "d.csv").write_text("a,a,y\n1,2,3\n")
    with pytest.raises(DataError, match=r"d\.csv: more than one column is called 'a'"):
        propose(tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("a,y\n1\n")
    with pytest.raises(DataError, match="line 2 has 1 cells, the first line 2"):
        propose(tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("a,y\n")
    with pytest.raises(DataError, match="no rows at all"):
        propose(tmp_path / "d.csv")
    with pytest.raises(ModelFileError):
        propose(tmp_path / "none.csv")
    with pytest.raises(ModelFileError):
        propose(tmp_path / "none.parquet")


@pytest.mark.parametrize("middle", [0.0, 3.3, -47.0, 1e6, 1.7e9, -2e-8])
@pytest.mark.parametrize("spread", [1e-9, 0.3, 20.0, 1e5])
def test_the_place_is_near_enough_for_sums(middle, spread):
    values = middle + spread * np.random.default_rng(0).normal(size=500)
    reference, scale = rounded_place(values)
    deviation = values.std()
    assert abs(reference - values.mean()) < max(50 * deviation, 1e-12 * abs(middle))
    assert len(f"{scale:e}".split("e")[0].rstrip("0").rstrip(".")) == 1  # one significant digit


def written(path, head, rows):
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def test_a_table_of_numbers_is_looked_at_by_the_same_rule(tmp_path):
    """Sentinels, columns that give the label away and dates like numbers are told of plain numbers too."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, ROWS)
    age, code = rng.normal(60, 9, ROWS).round(2), 2 * rng.integers(1, 4, ROWS) + label
    lactate = np.where(rng.random(ROWS) < 0.11, -999, rng.gamma(3, 2, ROWS).round(2))
    plain = written(tmp_path / "p.csv", "age,zero,y", zip(age, [0] * ROWS, label, strict=True))
    assert propose_for([plain], ColumnLayout()) is None
    raw = written(tmp_path / "d.csv", "age,lactate,code,y", zip(age, lactate, code, label, strict=True))
    found = propose_for([raw], ColumnLayout())
    assert found == propose(raw)
    told = {name: column.remark for name, column in columns(found).items()}
    assert "taken as missing: '-999'" in told["lactate"]
    assert "a leak? Each of its 6 values goes with one label only" in told["code"]
    assert propose_for([raw], ColumnLayout(), glance=False) is None
    target = rng.normal(50, 10, ROWS).round(3)
    twice = (2 * target + 1).round(3)
    written(tmp_path / "r.csv", "age,leak,y", zip(age, twice, target, strict=True))
    assert columns(propose_for([tmp_path / "r.csv"], ColumnLayout()))["leak"].kind == "unused"


def test_two_rows_give_no_label_away(tmp_path):
    schema = propose(written(tmp_path / "d.csv", "a,b,label", [(1, 2, "x"), (3, 4, "y")]))
    assert {column.remark for column in schema.columns} == {"2 rows are too few to be sure"}


def test_notes_of_which_some_are_common_are_text():
    common = ["no change today", "slept quite well", "felt much better"]
    notes = [
        common[row % 3] if row % 4 else f"saw doctor {'abcdefghij'[row % 7]}{row % 71}" for row in range(ROWS)
    ]
    table = {"note": notes, "age": np.arange(ROWS) * 1.5, "label": ["x", "y"] * (ROWS // 2)}
    assert columns(propose(table))["note"].kind == "text"
