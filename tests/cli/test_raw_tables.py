"""`fedsolve train` on a table as a hospital has it, without a schema; predictions of rows that look wrong."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from fedsolve import load_model
from fedsolve.cli.main import main
from fedsolve.tables.schema import read_schema
from tests.command import document, fedsolve, refused

ROWS = 240
HEAD = "patient_id;hospital;sex;age;crp;saturation;lactate;admitted;note;diagnosis"


def line(rng, row):
    """One row with an identifier, text, a date, missing cells and decimal commas."""
    ill = row % 3 == 0
    age = "" if row % 17 == 5 else f"{rng.normal(60 + 12 * ill, 9):.1f}".replace(".", ",")
    crp = "<0,6" if row % 11 == 4 else f"{rng.gamma(3 + 3 * ill, 2):.2f}".replace(".", ",")
    lactate = "-999" if row % 13 == 2 else rng.integers(1, 40)
    day = f"{1 + row % 28:02d}.{1 + row % 12:02d}.{2021 + row % 3}"
    word = ("fever", "cough", "pain")[row % 5 % 3]
    cells = [700_000 + row, ("north", "south")[row % 2], "FM?"[(row // 4) % 3], age, crp]
    cells += [f"{rng.integers(85, 100)}%", lactate, day, f"came with {word} and felt ill", "yn"[ill]]
    return ";".join(map(str, cells))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    lines = [line(rng, row) for row in range(ROWS)]
    (folder / "patients.csv").write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")
    return folder


def train(folder, *words):
    data, out = folder / "patients.csv", folder / "model.safetensors"
    named = ("--label", "diagnosis", "--client-column", "hospital", "--method", "afl", "--ridge", 1)
    return fedsolve("train", data, *named, *words, "--out", out)


@pytest.fixture(scope="module")
def trained(folder):
    result = train(folder, "--schema-out", folder / "schema.toml")
    assert result.exit_code == 0, result.stderr
    return result


def test_noise_does_not_cover_a_schema_that_is_read_off_the_rows(folder, trained, tmp_path):
    """Refused without a schema; with one that people reviewed, it trains."""
    data, out = folder / "patients.csv", tmp_path / "m.safetensors"
    words = ("--epsilon", 4, "--out", out)
    asked = fedsolve("train", data, "--label", "diagnosis", "--client-column", "hospital", *words)
    assert asked.exit_code == 2
    assert "is not covered by --epsilon" in asked.stderr
    assert "--schema" in asked.stderr
    assert not out.exists()
    result = fedsolve("train", data, *words, "--schema", folder / "schema.toml")
    assert result.exit_code == 0, result.stderr


def test_train_proposes_the_schema_and_says_so(trained, folder):
    for part in (
        "numbers: age, crp, saturation, lactate",
        "categories: sex",
        "dates: admitted",
        "left out: 'patient_id': looks like an identifier (240 different values in 240 rows)",
        "'crp': the sign < left out",
        "'lactate': taken as missing: '-999'",
    ):
        assert part in trained.stderr
    model = load_model(folder / "model.safetensors")
    assert model.schema.identifiers == ("patient_id",)
    assert read_schema(folder / "schema.toml").digest == model.schema.digest


def test_the_written_schema_gives_the_same_model(trained, folder, tmp_path):
    words = ("--schema", folder / "schema.toml", "--method", "afl", "--ridge", 1)
    document("train", folder / "patients.csv", *words, "--out", tmp_path / "m")
    again, first = load_model(tmp_path / "m"), load_model(folder / "model.safetensors")
    np.testing.assert_array_equal(again.weight, first.weight)


def test_several_files_are_looked_at_together(tmp_path):
    rng = np.random.default_rng(2)
    for name, words, labels in (("north", "AB", "xy"), ("south", "BC", "yz")):
        rows = [f"{rng.normal():.3f},{words[row % 2]},{labels[row // 3 % 2]}" for row in range(60)]
        (tmp_path / f"{name}.csv").write_text("a,kind,label\n" + "\n".join(rows))
    files = (tmp_path / "north.csv", tmp_path / "south.csv")
    document("train", *files, "--method", "afl", "--ridge", 1, "--out", tmp_path / "m")
    schema = load_model(tmp_path / "m").schema
    assert schema.columns[1].categories == ("A", "B", "C")
    assert schema.classes == ("x", "y", "z")


def test_a_plain_table_of_numbers_is_taken_as_it_is(tmp_path):
    rng = np.random.default_rng(1)
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in rng.normal(size=(60, 2))]
    (tmp_path / "d.csv").write_text("a,b,y\n" + "\n".join(rows))
    words = ("--method", "afl", "--ridge", 1, "--clients", 3, "--no-calibrate", "--out", tmp_path / "m")
    result = fedsolve("train", tmp_path / "d.csv", *words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert load_model(tmp_path / "m").preparing is None


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [(";1", ";1e300", None), ("%;", "000%;", "240 of 240 rows"), (",", "00,", None)],
    ids=["1e300", "other units", "another unit"],
)
def test_numbers_far_from_training_are_told(trained, folder, tmp_path, old, new, rows):
    text = (folder / "patients.csv").read_text()
    head, *lines = text.splitlines()
    changed = [each.replace(old, new) for each in lines]
    if old == ";1":
        changed = [*lines[:3], lines[3].replace(lines[3].split(";")[3], "1e300", 1), *lines[4:]]
    path = tmp_path / "new.csv"
    path.write_text("\n".join([head, *changed]) + "\n")
    model = folder / "model.safetensors"
    told = fedsolve("predict", model, path)
    assert told.exit_code == 0, told.stderr
    assert "far from what the model was trained on" in told.stderr
    assert (rows or "new.csv: column 'age'") in told.stderr
    warned = document("evaluate", model, path)["warnings"]
    assert any("far from what the model" in each for each in warned)
    refused(fedsolve("predict", model, path, "--strict"), 2, "far from what the model was trained on")
    assert "far from" not in fedsolve("predict", model, folder / "patients.csv", "--strict").stderr


METHODS = {
    "afl": ("--scale", "standard", "--intercept", "--ridge", 1),
    "kernelafl": ("--landmarks", 20),
    "kernelsoftmax": ("--landmarks", 20),
}


@pytest.mark.parametrize("method", METHODS)
def test_plain_tables_are_guarded_by_what_the_method_knows(tmp_path, method):
    rng = np.random.default_rng(0)
    weight, height = rng.normal(70, 10, 300), rng.normal(170, 8, 300)
    rows = pd.DataFrame({"weight": weight, "height": height, "y": (weight > height - 100).astype(int)})
    rows.to_csv(tmp_path / "train.csv", index=False)
    model, new = tmp_path / "m", tmp_path / "new.csv"
    words = ("--label", "y", "--method", method, *METHODS[method], "--no-calibrate", "--out", model)
    assert fedsolve("train", tmp_path / "train.csv", *words).exit_code == 0
    assert "far from" not in fedsolve("predict", model, tmp_path / "train.csv").stderr
    rows["weight"] *= 1000
    rows.loc[7, "height"] = 1e300
    rows.to_csv(new, index=False)
    told = fedsolve("predict", model, new)
    assert told.exit_code == 0
    assert "column 'weight': 300 of 300 rows are far" in told.stderr
    assert "column 'height': 1 of 300 rows are far" in told.stderr
    assert "such as 1e+300 in row 7" in told.stderr
    refused(fedsolve("predict", model, new, "--strict"), 2, "column 'weight': 300 of 300 rows")


def test_a_raw_table_comes_from_standard_input(trained, folder, tmp_path):
    words = [
        "train",
        "-",
        "--label",
        "diagnosis",
        "--client-column",
        "hospital",
        "--method",
        "afl",
        "--ridge",
        "1",
    ]
    given = (folder / "patients.csv").read_bytes()
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "m")], input=given)
    assert result.exit_code == 0, result.stderr
    assert "standard input: without --schema, the columns are" in result.stderr
    assert (tmp_path / "m").read_bytes() == (folder / "model.safetensors").read_bytes()
    result = CliRunner().invoke(main, [*words[:2], "--label", "nowhere"], input=given)
    assert (result.exit_code, "standard input: " in result.stderr) == (2, True)
    assert "/fedsolve-" not in result.stderr
