"""No command writes over what it reads, by whatever name the file is called."""

from __future__ import annotations

import os

import pytest

from tests.command import fedsolve, refused

TABLE = "a,b,y\n" + "".join(f"{row % 7}.5,{row % 5}.25,{row % 2}\n" for row in range(40))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a table, links to it, a schema and a model."""
    monkeypatch.chdir(tmp_path)
    for name in ("data.csv", "test.csv"):
        (tmp_path / name).write_text(TABLE)
    os.link("data.csv", "hard.csv")
    os.symlink("data.csv", "soft.csv")
    assert fedsolve("schema", "data.csv", "--out", "schema.toml").exit_code == 0
    trained = fedsolve("train", "data.csv", "--method", "apfl", "--width", 4, "--clients", 2, "--out", "m")
    assert trained.exit_code == 0
    return tmp_path


TRAIN = ("train", "data.csv", "--method", "afl", "--clients", 2)


CASES = [
    (*TRAIN, "--out", "data.csv"),
    (*TRAIN, "--out", "./data.csv"),
    (*TRAIN, "--out", "hard.csv"),
    (*TRAIN, "--out", "soft.csv"),
    (*TRAIN, "--checkpoint", "data.csv"),
    (*TRAIN, "--checkpoint", "data.csv", "--resume"),
    (*TRAIN, "--test", "test.csv", "--out", "test.csv"),
    (*TRAIN, "--schema", "schema.toml", "--out", "schema.toml"),
    ("train", "csv:data.csv?label=y", "--method", "afl", "--out", "data.csv"),
    ("train", "csv:data.csv?test=test.csv", "--method", "afl", "--out", "test.csv"),
    ("predict", "m", "data.csv", "--out", "data.csv"),
    ("predict", "m", "data.csv", "--out", "m"),
    ("predict", "m", "csv:data.csv", "--out", "hard.csv"),
    ("predict", "m", "csv:data.csv", "--data-root", ".", "--out", "data.csv"),
    ("personalise", "m", "data.csv", "--out", "data.csv"),
    ("personalise", "m", "data.csv", "--out", "m"),
    ("schema", "data.csv", "--out", "data.csv"),
]


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join(map(str, words)))
def test_an_input_is_never_written_over(folder, words):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(fedsolve(*words), 4, "is an input of this command", "Name another file")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_image_of_a_folder_is_written_over(folder):
    (folder / "images" / "cat").mkdir(parents=True)
    (folder / "images" / "cat" / "1.png").write_bytes(b"a picture")
    result = fedsolve("predict", "m", "folder:images", "--out", "images/cat/1.png")
    refused(result, 4, "images/cat/1.png is an input")
    assert (folder / "images" / "cat" / "1.png").read_bytes() == b"a picture"


def test_other_files_are_written_as_before(folder):
    assert fedsolve(*TRAIN, "--out", "m").exit_code == 0
    assert fedsolve("predict", "m", "data.csv", "--out", "new.csv").exit_code == 0
    assert fedsolve("predict", "m", "data.csv", "--out", "new.csv").exit_code == 0
