"""`fedsolve train north.csv south.csv`: one client for each file, columns by name."""

from __future__ import annotations

import numpy as np
import pytest

from fedsolve import load_model
from tests.command import document, fedsolve, refused


def write(path, columns, rows):
    lines = [",".join(columns)]
    lines += [",".join(str(columns[name][row]) for name in columns) for row in rows]
    path.write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """All rows in one file with owners, and the same rows as a file for each owner in another order."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    owners = np.array(["north", "south", "south"] * 20)
    labels = rng.integers(0, 2, 60)
    columns = {
        "a": rng.normal(size=60) + labels,
        "b": 4 * rng.normal(size=60),
        "c": rng.normal(size=60) - labels,
    }
    columns["kind"] = np.where(labels, "ill", "well")
    write(tmp_path / "all.csv", columns | {"site": owners}, range(60))
    write(tmp_path / "north.csv", columns, np.flatnonzero(owners == "north"))
    turned = {name: columns[name] for name in ("kind", "c", "a", "b")}
    write(tmp_path / "south.csv", turned, np.flatnonzero(owners == "south"))
    return tmp_path


WORDS = ("--method", "afl", "--label", "kind")


def test_files_are_clients_and_give_the_model_of_one_file(folder):
    told = document("train", "north.csv", "south.csv", *WORDS, "--out", "several")
    whole = document("train", "all.csv", *WORDS, "--client-column", "site", "--out", "one")
    assert told["clients"] == whole["clients"] == 2
    assert told["rows"] == 60
    assert told["accuracy"] == whole["accuracy"]
    several, one = load_model("several"), load_model("one")
    for name, array in one.arrays().items():
        np.testing.assert_allclose(several.arrays()[name], array, rtol=1e-12, atol=1e-12)
    assert [column.name for column in several.schema.used] == ["a", "b", "c"]


def test_clients_are_called_as_their_files(folder):
    words = ("--method", "apfl", "--width", 4, "--label", "kind", "--personal", "own")
    document("train", "north.csv", "south.csv", *words)
    assert {path.name for path in (folder / "own").iterdir()} == {"north.safetensors", "south.safetensors"}


def test_a_schema_describes_all_files(folder):
    document("schema", "north.csv", "--label", "kind", "--out", "schema.toml")
    told = document(
        "train", "north.csv", "south.csv", "--schema", "schema.toml", "--method", "afl", "--out", "m"
    )
    assert told["clients"] == 2
    assert document("evaluate", "m", "south.csv")["rows"] == 40


def test_what_does_not_fit_is_refused_by_file_and_name(folder):
    text = (folder / "south.csv").read_text()
    (folder / "south.csv").write_text(text.replace("c,", "cc,", 1))
    refused(
        fedsolve("train", "north.csv", "south.csv", *WORDS, "--out", "m"), 2, "south.csv", "'c' is missing"
    )
    assert not (folder / "m").exists()
    (folder / "south.csv").write_text(text.replace("ill", "1").replace("well", "0"))
    refused(fedsolve("train", "north.csv", "south.csv", *WORDS), 2, "south.csv", "Spell them alike")


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("north.csv", "south.csv", "--clients", "3"), "each is one client"),
        (("north.csv", "south.csv", "--client-column", "site"), "each is one client"),
        (("north.csv", "north.csv"), "rename 'north.csv'"),
        (("north.csv", "digits"), "not an address"),
    ],
)
def test_words_that_do_not_go_with_several_files(folder, words, fragment):
    refused(fedsolve("train", *words, *WORDS), 2, fragment)


def test_no_file_of_several_is_written_over(folder):
    before = (folder / "south.csv").read_bytes()
    refused(fedsolve("train", "north.csv", "south.csv", *WORDS, "--out", "south.csv"), 4, "is an input")
    assert (folder / "south.csv").read_bytes() == before
