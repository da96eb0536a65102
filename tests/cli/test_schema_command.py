"""`fedsolve schema` and what is trained with it: raw tables in, raw tables at predict."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from fedsolve import load_model
from fedsolve.tables.schema import read_schema
from tests.command import document, fedsolve, refused

ROWS = 240


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A raw table: an identifier, a date, a category, missing values, an owner and a diagnosis."""
    folder = tmp_path_factory.mktemp("site")
    rng = np.random.default_rng(5)
    ill = rng.random(ROWS) < 0.4
    age = np.round(50 + 10 * rng.normal(size=ROWS) + 12 * ill, 1).astype(str)
    age[rng.random(ROWS) < 0.1] = ""
    sex = np.where(rng.random(ROWS) < 0.3 + 0.3 * ill, "F", "M").astype(object)
    sex[rng.random(ROWS) < 0.1] = "NA"
    days = np.datetime64("2020-01-01") + (400 * rng.random(ROWS) + 200 * ill).astype(int)
    columns = {
        "patient_id": 1000 + rng.permutation(ROWS),
        "age": age,
        "sex": sex,
        "visit": days.astype(str),
        "hospital": rng.choice(["north", "south", "west"], ROWS),
        "diagnosis": np.where(ill, "ill", "well"),
    }
    with open(folder / "raw.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    words = ("--label", "diagnosis", "--client-column", "hospital", "--out", folder / "schema.toml")
    told = document("schema", folder / "raw.csv", *words)
    return folder, columns, told


def test_what_was_noticed_is_told_and_written(site):
    folder, _, told = site
    assert "identifier" in told["remarks"]["patient_id"]
    assert "date" in told["remarks"]["visit"]
    text = (folder / "schema.toml").read_text()
    assert "# unused: looks like an identifier" in text
    schema = read_schema(folder / "schema.toml")
    assert (schema.label, schema.client, schema.classes) == ("diagnosis", "hospital", ("ill", "well"))
    assert [column.name for column in schema.used] == ["age", "sex", "visit"]


def test_the_proposal_goes_to_stdout_or_a_file_and_nothing_is_lost(site):
    folder, _, _ = site
    before = (folder / "schema.toml").read_bytes()
    words = ("schema", folder / "raw.csv", "--label", "diagnosis", "--client-column", "hospital")
    assert fedsolve(*words).stdout.encode() == before
    (folder / "edited.toml").write_text("by hand")
    assert fedsolve(*words, "--out", folder / "edited.toml").exit_code == 0
    assert (folder / "edited.toml").read_bytes() == before
    assert (folder / "edited.toml.previous").read_text() == "by hand"
    refused(fedsolve("schema", folder / "raw.csv", "--label", "diagnosys"), 2, "Did you mean 'diagnosis'?")


@pytest.mark.parametrize(
    "words", [("afl",), ("deepafl", "--layers", 1, "--width", 16), ("apfl", "--width", 16)]
)
def test_raw_tables_are_trained_on_and_predicted(site, tmp_path, words):
    folder, columns, _ = site
    out = tmp_path / "m.safetensors"
    told = document(
        "train", folder / "raw.csv", "--schema", folder / "schema.toml", "--method", *words, "--out", out
    )
    assert told["clients"] == 3
    assert told["partition"]["kind"] == "named"
    assert told["accuracy"]["train"] > 0.75
    assert document("evaluate", out, folder / "raw.csv")["accuracy"] == told["accuracy"]["train"]
    names = ["visit", "sex", "age"]
    with open(tmp_path / "new.csv", "w", newline="") as stream:
        writer = csv.writer(stream, delimiter=";")
        writer.writerow(names)
        writer.writerows(zip(*(columns[name] for name in names), strict=True))
    expected = fedsolve("predict", out, folder / "raw.csv", "--scores")
    assert expected.exit_code == 0, expected.stderr
    ids = [line.split(",")[1] for line in expected.stdout.splitlines()]
    assert ids == ["patient_id", *map(str, columns["patient_id"])]  # it tells whose the predictions are
    bare = [line.split(",")[:1] + line.split(",")[2:] for line in expected.stdout.splitlines()]
    found = fedsolve("predict", out, tmp_path / "new.csv", "--scores").stdout.splitlines()
    assert [line.split(",") for line in found] == bare
    if words[0] == "apfl":
        document("personalise", out, folder / "raw.csv", "--out", tmp_path / "own.safetensors")
        own = load_model(tmp_path / "own.safetensors")
        assert own.schema == load_model(out).schema
        assert own.preparing is not None


def test_the_model_does_not_depend_on_who_owns_the_rows(site, tmp_path):
    folder, _, _ = site
    words = ("train", folder / "raw.csv", "--schema", folder / "schema.toml", "--method", "afl")
    document(*words, "--out", tmp_path / "named")
    document(*words, "--partition", "dirichlet", "--clients", 7, "--out", tmp_path / "dealt")
    scores = [
        np.genfromtxt(
            fedsolve("predict", tmp_path / name, folder / "raw.csv", "--scores").stdout.splitlines(),
            delimiter=",",
            skip_header=1,
            usecols=(2, 3),
        )
        for name in ("named", "dealt")
    ]
    np.testing.assert_allclose(*scores, atol=1e-9)


def test_what_a_schema_says_already_is_refused(site):
    folder, _, _ = site
    words = ("train", folder / "raw.csv", "--schema", folder / "schema.toml")
    refused(fedsolve(*words, "--label", "diagnosis"), 2, "leave out --label")
    refused(fedsolve(*words, "--drop", "age"), 2, "leave out --drop")
    refused(
        fedsolve("train", "digits", "--schema", folder / "schema.toml"), 2, "--schema describes the columns"
    )


def test_rows_that_do_not_fit_the_schema_are_refused_by_name(site, tmp_path):
    folder, _, _ = site
    text = (folder / "raw.csv").read_text().replace("visit", "visited", 1)
    (tmp_path / "raw.csv").write_text(text)
    result = fedsolve(
        "train", tmp_path / "raw.csv", "--schema", folder / "schema.toml", "--out", tmp_path / "m"
    )
    refused(result, 2, "column 'visit' is missing", "did you mean 'visited'?")
    assert not (tmp_path / "m").exists()


def test_the_card_of_a_model_with_identifiers_and_a_choice(site, tmp_path):
    folder, _, _ = site
    words = ("--schema", folder / "schema.toml", "--methods", "afl,softmax", "--out", tmp_path / "m")
    document("train", folder / "raw.csv", *words)
    told = document("info", tmp_path / "m")
    assert told["settings"]["scale"] is None  # the schema has brought numbers to unit variance
    page = fedsolve("info", tmp_path / "m").stdout
    assert "identifiers  patient_id" in page
    assert "chosen" in page


def test_a_checkpoint_of_the_default_is_written_and_resumed(site, tmp_path):
    folder, _, _ = site
    words = ("train", folder / "raw.csv", "--schema", folder / "schema.toml", "--methods", "afl,softmax")
    document(*words, "--out", tmp_path / "whole")
    document(*words, "--checkpoint", tmp_path / "run.ckpt", "--out", tmp_path / "a")
    document(*words, "--checkpoint", tmp_path / "run.ckpt", "--resume", "--out", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "whole").read_bytes()
