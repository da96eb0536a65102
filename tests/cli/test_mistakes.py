"""Mistakes at the command line: what is wrong, what to do, the exit code, and nothing written."""

from __future__ import annotations

import csv
import gzip

import numpy as np
import pytest
from PIL import Image

from fedsolve import AFL, LocalFederation
from tests.command import document, fedsolve, refused

NAMES = ("age", "pressure", "weight")


def write(path, names, columns, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(names)
        writer.writerows(zip(*columns, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables right and wrong, models, images, a schema; every mistake is made in here."""
    folder = tmp_path_factory.mktemp("mistakes")
    rng = np.random.default_rng(4)
    values = dict(zip(NAMES, rng.normal(size=(3, 60)), strict=True))
    ill = np.where(values["age"] + values["pressure"] > 0, "yes", "no")
    right = [values[name] for name in NAMES]
    write(folder / "d.csv", [*NAMES, "ill"], [*right, ill])
    write(folder / "renamed.csv", ["age", "presure", "weight", "ill"], [*right, ill])
    write(folder / "missing.csv", ["age", "weight", "ill"], [values["age"], values["weight"], ill])
    write(folder / "typed.csv", [*NAMES, "ill"], [["old"] * 60, *right[1:], ill])
    write(folder / "twice.csv", ["age", "age", "pressure", "weight", "ill"], [right[0], *right, ill])
    write(folder / "other.csv", [*NAMES, "ill"], [*right, ["maybe"] * 60])
    write(folder / "gaps.csv", [*NAMES, "ill"], [["", *right[0][1:]], *right[1:], ill])
    write(folder / "text.csv", ["town", "age", "ill"], [["Rome"] * 60, right[0], ill])
    write(folder / "numbers.csv", [1, 2, 3], [[4, 5, 6], [7, 8, 9], [0, 1, 0]])
    write(folder / "one.csv", ["age", "ill"], [[1, 2, 3], ["no", "no", "no"]])
    comma = [[f"{cell:.3f}".replace(".", ",") for cell in column] for column in right]
    write(folder / "comma.csv", [*NAMES, "ill"], [*comma, ill], delimiter=";")
    write(folder / "thousand.csv", [*NAMES, "ill"], [["1.234,5"] * 60, *comma[1:], ill], delimiter=";")
    (folder / "latin.csv").write_bytes("größe,ill\n1,yes\n2,no\n3,yes\n".encode("latin-1"))
    (folder / "ragged.csv").write_text("age,ill\n1,yes\n2,no,3\n")
    (folder / "empty.csv").write_text("")
    (folder / "torn.csv.gz").write_bytes(gzip.compress((folder / "d.csv").read_bytes())[:-9])
    (folder / "torn.npz").write_bytes(b"PK\x03\x04 no more")
    np.savez(folder / "wide.npz", x=rng.normal(size=(10, 5)), y=np.arange(10) % 2)
    (folder / "pictures").mkdir()
    (folder / "none").mkdir()
    for number in range(6):
        place = folder / "pictures" / ("a", "b")[number % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / f"{number}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG not an image")
    document(
        "train", folder / "d.csv", "--method", "afl", "--ridge", 1, "--clients", 2, "--out", folder / "m"
    )
    words = ("--method", "afl", "--ridge", 1, "--clients", 2, "--backbone", "pixels:8")
    document(
        *("train", f"folder:{folder / 'pictures'}?test=0", *words),
        *("--store", folder / "store", "--out", folder / "images"),
    )
    spoilt = AFL().fit(LocalFederation.from_arrays(np.column_stack(right), ill, np.arange(60) % 2))
    spoilt.weight = np.full_like(spoilt.weight, np.nan)
    spoilt.save(folder / "spoilt")
    document("schema", folder / "d.csv", "--label", "ill", "--out", folder / "schema.toml")
    text = (folder / "schema.toml").read_text()
    (folder / "bad.toml").write_text(text.replace('kind = "number"', 'kind = "numbr"', 1))
    return folder


TRAIN = ("train", "d.csv", "--method", "afl", "--out", "new")
MISTAKES = {
    # tables at predict and evaluate
    "renamed": (("predict", "m", "renamed.csv", "--out", "new"), 2, "(did you mean 'presure'?)", "Rename"),
    "missing": (("predict", "m", "missing.csv", "--out", "new"), 2, "'pressure' is missing", "Rename"),
    "typed": (("predict", "m", "typed.csv", "--out", "new"), 2, "60 cells in column 'age' (line 2: 'old'"),
    "twice": (("predict", "m", "twice.csv", "--out", "new"), 2, "more than one column is called 'age'"),
    "gaps": (
        ("predict", "m", "gaps.csv", "--out", "new"),
        2,
        "line 2: it is empty",
    ),
    "unknown label": (("evaluate", "m", "other.csv"), 2, "'maybe'", "is not one of the 2 classes"),
    "wide": (("predict", "m", "wide.npz", "--out", "new"), 2, "3 features are expected; these have 5"),
    "kept": (("predict", "m", "d.csv", "--keep", "name", "--out", "new"), 2, "no column is called 'name'"),
    "ending": (("predict", "m", "schema.toml", "--out", "new"), 2, "unknown kind", ".parquet"),
    "torn gz": (("predict", "m", "torn.csv.gz", "--out", "new"), 4, "damaged", "Fetch or write it again"),
    "torn npz": (("predict", "m", "torn.npz", "--out", "new"), 4, "damaged", "Fetch or write it again"),
    "no file": (("predict", "m", "nowhere.csv", "--out", "new"), 4, "nowhere.csv", "No such file"),
    "stdin twice": (("predict", "m", "-", "-", "--out", "new"), 2, "standard input", "name it once"),
    "over the input": (("predict", "m", "d.csv", "--out", "d.csv"), 4, "would be lost", "Name another file"),
    "not a model": (("predict", "d.csv", "d.csv", "--out", "new"), 4, "d.csv"),
    "nan": (("predict", "spoilt", "d.csv", "--out", "new"), 5, "not finite numbers", "train again"),
    # how a csv is spelled
    "comma": (
        ("predict", "m", "comma.csv", "--decimal", ".", "--out", "new"),
        *(2, "is not a number", "pass --decimal ','"),
    ),
    "point": (
        ("predict", "m", "thousand.csv", "--decimal", ",", "--thousands", "", "--out", "new"),
        *(2, "'1.234,5' is not a number", "--thousands"),
    ),
    "groups": (
        ("predict", "m", "comma.csv", "--thousands", ",", "--out", "new"),
        *(2, "is not a number", "pass --decimal ','"),
    ),
    "same signs": (
        ("predict", "m", "comma.csv", "--decimal", ",", "--thousands", ",", "--out", "new"),
        *(2, "decimal must be one sign and thousands another"),
    ),
    "latin": (("train", "latin.csv", "--out", "new"), 2, "not in utf-8", "--encoding cp1252"),
    "no encoding": (("train", "latin.csv", "--encoding", "latin-77", "--out", "new"), 2, "try utf-8, cp1252"),
    "semicolons": (("train", "comma.csv", "--delimiter", ",", "--out", "new"), 2, "try --delimiter ';'"),
    # training
    "text": (("train", "text.csv", "--drop", "age", "--out", "new"), 2, "'town': unused: constant"),
    "ragged": (("train", "ragged.csv", "--out", "new"), 2, "line 3 has 3 cells, the first line 2"),
    "empty": (("train", "empty.csv", "--out", "new"), 2, "no rows at all"),
    "no header": (("train", "numbers.csv", "--out", "new"), 2, "not column names", "--no-header"),
    "one class": (("train", "one.csv", "--method", "afl", "--clients", 1, "--out", "new"), 2, "class"),
    "twice at train": (("train", "twice.csv", "--out", "new"), 2, "more than one column is called 'age'"),
    "no label": ((*TRAIN, "--label", "sick"), 2, "no label column 'sick'", "The columns are age"),
    "no owner": ((*TRAIN, "--client-column", "hospitl"), 2, "no client column 'hospitl'", "The columns are"),
    "two owners": ((*TRAIN, "--client-column", "age", "--alpha", 1), 2, "leave out --alpha"),
    "method": (("train", "d.csv", "--method", "delpafl", "--out", "new"), 2, "Did you mean 'deepafl'?"),
    "option": ((*TRAIN, "--ridgee", 1), 2, "--ridge"),
    "negative": ((*TRAIN, "--ridge", -1), 2, "ridge"),
    "resume": ((*TRAIN, "--resume"), 2, "--resume needs --checkpoint FILE"),
    "schema and label": ((*TRAIN, "--schema", "schema.toml", "--label", "ill"), 2, "leave out --label"),
    "bad schema": ((*TRAIN, "--schema", "bad.toml"), 2, "unknown kind 'numbr'", "Did you mean 'number'?"),
    "two files": (("train", "d.csv", "renamed.csv", "--out", "new"), 2, "renamed.csv", "'presure'?"),
    # images
    "other preprocessing": (
        ("predict", "images", "pictures", "--backbone", "pixels:8?normalise=half", "--out", "new"),
        *(2, "the preprocessing's mean is [0.5], there [0.0]", "Leave out --backbone"),
    ),
    "no images": (("predict", "images", "none", "--out", "new"), 2, "no images in this folder", ".png"),
    "broken image": (
        ("predict", "images", "broken.png", "--out", "new"),
        2,
        "broken.png",
        "Replace the file",
    ),
    "images for a table": (("predict", "m", "pictures", "--out", "new"), 2, "takes columns of a table"),
    "folder as data": (("train", "pictures", "--out", "new"), 2, "pictures"),
    "no key": (("train", "features:abc123", "--out", "new"), 2, "fedsolve features list"),
    "backbone": (
        ("train", "folder:pictures", "--backbone", "pixles", "--out", "new"),
        *(2, "unknown backbone", "Did you mean 'pixels'?"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_and_nothing_is_written(folder, monkeypatch, mistake):
    words, code, *fragments = MISTAKES[mistake]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDSOLVE_STORE", str(folder / "store"))
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    refused(fedsolve(*words), code, *fragments)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before
