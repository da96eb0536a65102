"""The `fedsolve` command: what it writes, what it says, and how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix

import fedsolve as fs
from fedsolve import registry
from fedsolve.cli.main import COMMANDS
from fedsolve.federation.recipe import exchanges
from fedsolve.scoring.evaluation_page import class_table, confusion_table
from fedsolve.scoring.quality import Confusion
from tests.command import document, fedsolve, refused, told

SMALL = ("--method", "deepafl", "--layers", "2", "--width", "24", "--clients", "5", "--workers", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """300 digits to train with and 100 to test with, as npz and csv, and a small deep and linear model."""
    folder = tmp_path_factory.mktemp("files")
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:400] / 16, labels[:400]
    split = {
        "x_train": pixels[:300],
        "y_train": labels[:300],
        "x_test": pixels[300:],
        "y_test": labels[300:],
    }
    np.savez(folder / "digits.npz", **split)
    owners = np.array(["north", "south", "east"])[np.arange(300) % 3]
    write_csv(folder / "train.csv", pixels[:300], labels[:300], owners)
    write_csv(folder / "test.csv", pixels[300:], labels[300:])
    (folder / "rows.csv").write_text(
        "\n".join([",".join(f"p{k}" for k in range(64)), *(",".join(map(str, row)) for row in pixels[300:])])
    )
    for name, words in {"deep": SMALL, "linear": ("--method", "afl", "--ridge", "0.1")}.items():
        done = fedsolve(
            "train", folder / "digits.npz", *words, "--quiet", "--out", folder / f"{name}.safetensors"
        )
        assert done.exit_code == 0, done.stderr
        assert done.output == ""
    return folder


def write_csv(path, pixels, labels, owners=None):
    lines = [
        ",".join([*(f"p{k}" for k in range(pixels.shape[1])), *(["site"] * (owners is not None)), "digit"])
    ]
    for row, label in enumerate(labels):
        owner = [] if owners is None else [owners[row]]
        lines.append(",".join([*map(str, pixels[row]), *owner, str(label)]))
    path.write_text("\n".join(lines) + "\n")


# -- help and the list of methods ------------------------------------------------------------------


def test_help_teaches():
    top = fedsolve("--help")
    assert top.exit_code == 0
    for command in COMMANDS:
        assert command in top.stdout
        page = fedsolve(command, "--help").stdout
        assert "Examples:" in page
        assert f"fedsolve {command}" in page.split("Examples:")[1]
        # What is no option stands in the usage alone.
        assert not re.search(r"^  [^ -]", page.partition("\nOutput:\n")[2], re.MULTILINE)
    assert "Exit codes:" in top.stdout
    assert fedsolve().stdout == top.stdout
    assert fedsolve("--version").stdout == f"fedsolve {fs.__version__}\n"


@pytest.mark.parametrize(
    "key", ["afl", "apfl", *(pytest.param(key, marks=pytest.mark.torch) for key in ("fedprox", "ditto"))]
)
def test_the_help_page_of_a_method_shows_what_goes_with_it(files, tmp_path, key):
    options = fedsolve("train", "--method", key, "--help").stdout.split("Training:")[1]
    for name, words in (
        ("--evaluate-every", ("--evaluate-every", "1")),
        ("--personal", ("--personal", tmp_path / "own")),
    ):
        result = fedsolve("train", tmp_path / "none.npz", "--method", key, *words)
        # Where it is refused, it is refused before the data are looked for.
        assert (f"  {name} " in options) == ("cannot read" in result.stderr), result.stderr


@pytest.mark.parametrize("key", ["apfl", "deepafl", "fedprox"])
def test_values_keep_their_spelling_in_help(key):
    page = " ".join(fedsolve("train", "--method", key, "--help").stdout.split())
    for spoilt in ("Cpu", "Float32", "Accuracy (closed", "Direct:"):
        assert spoilt not in page
    assert "float32 is faster" in page


def _class(key):
    return registry.method_class(key)


def test_methods_lists_the_registry():
    listed = {told["key"]: told for told in document("methods")["methods"]}
    assert len(listed) == len(registry.methods())
    page = fedsolve("methods").stdout
    for info in registry.methods():
        assert listed[info.key] == listed[info.key] | info.as_dict()
        assert info.key in page
        assert info.paper in page


# -- train -----------------------------------------------------------------------------------------


def test_train_gives_the_model_of_the_library(files, tmp_path):
    out = tmp_path / "m.safetensors"
    words = ("--partition", "dirichlet", "--alpha", "0.3", "--partition-seed", "4", "--out", out)
    told = document("train", files / "digits.npz", *SMALL, *words)
    data = np.load(files / "digits.npz")
    owners = fs.partition.dirichlet(data["y_train"], clients=5, alpha=0.3, seed=4)
    federation = fs.LocalFederation.from_arrays(data["x_train"], data["y_train"], owners, clients=5)
    model = fs.Recipe(fs.DeepAFL(layers=2, width=24), calibrate=True).fit(federation)
    model.card = fs.load_model(out).card
    assert out.read_bytes() == model.to_bytes()
    assert (model.card["exchanges"], model.card["bytes_up"]) == (told["exchanges"], told["bytes_up"])
    assert told["accuracy"]["train"] == federation.evaluate(model)
    assert told["accuracy"]["test"] == model.score(data["x_test"], data["y_test"])
    assert told["bytes_up"] == sum(record.bytes_up for record in model.history)
    assert told["bytes_down"] == sum(record.bytes_down for record in model.history)
    assert (told["exchanges"], told["clients"], told["rows"]) == (5 + 2 + 5, 5, 300)
    assert told["risk"] == pytest.approx(model.risk[-1])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("--layers", "0"), {"layers": 0}),
        (("--hidden-width", "8"), {"hidden_width": 8}),
        (("--ridge", "0.5", "--residual-ridge", "2"), {"ridge": 0.5, "residual_ridge": 2.0}),
        (
            ("--activation", "relu", "--zero-activation", "sigmoid"),
            {"activation": "relu", "zero_activation": "sigmoid"},
        ),
        (("--gain", "4", "--block-input", "initial"), {"gain": 4.0, "block_input": "initial"}),
        (("--plan", "single"), {"exchange": "single"}),
        (("--participation", "0.6", "--inconsistent"), {"participation": 0.6, "consistent": False}),
        (("--scale", "standard", "--intercept"), {"scale": "standard", "intercept": True}),
        (("--scale", "none", "--no-intercept", "--track", "none"), {}),
        (
            ("--track", "accuracy", "--precision", "float32", "--seed", "3"),
            {"track": "accuracy", "precision": "float32", "seed": 3},
        ),
    ],
)
def test_options_reach_the_method_and_the_others_keep_their_defaults(files, words, changed):
    told = document("train", files / "digits.npz", *SMALL, *words)
    expected = {"layers": 2, "width": 24} | changed
    assert told["parameters"] == fs.DeepAFL(**expected).parameters()


@pytest.mark.parametrize("method", [("afl", "--ridge", "0.1"), ("deepafl", "--layers", "2", "--width", "24")])
def test_clients_named_by_a_column_give_the_same_model_as_a_partition(files, tmp_path, method):
    words = ("--method", *method)
    named, dealt = tmp_path / "named.safetensors", tmp_path / "dealt.safetensors"
    told = document(
        "train",
        files / "train.csv",
        "--client-column",
        "site",
        "--test",
        files / "test.csv",
        *words,
        "--out",
        named,
    )
    assert told["clients"] == 3
    assert told["partition"]["kind"] == "named"
    assert told["test_rows"] == 100
    document("train", files / "digits.npz", "--partition", "shards", *words, "--out", dealt)
    ours, theirs = fs.load_model(named), fs.load_model(dealt)
    arrays = theirs.contents()[0]
    for name, array in ours.contents()[0].items():
        if not name.startswith(("left", "right")):  # factors are unique up to the signs of their columns
            assert np.linalg.norm(array - arrays[name]) <= 1e-9 * np.linalg.norm(arrays[name])


@pytest.mark.parametrize("kind", ["iid", "shards", "pathological"])
def test_partitions(files, kind):
    told = document("train", files / "digits.npz", "--method", "afl", "--ridge", "1", "--partition", kind)
    assert told["partition"]["kind"] == kind
    assert told["clients"] == 20
    assert told["accuracy"]["test"] > 0.8


def test_train_prints_a_summary_for_people(files):
    page = fedsolve("train", files / "digits.npz", *SMALL)
    assert page.exit_code == 0
    assert told(page) == ""
    for word in ("clients", "300 of 64 features, 10 classes", "MB up", "training rows", "100 test rows"):
        assert word in page.stdout


def test_secure_training_gives_the_same_model_and_says_so(files):
    words = ("train", files / "digits.npz", "--method", "afl", "--ridge", "1", "--clients", "4")
    uncalibrated = fedsolve(*words, "--secure")
    assert uncalibrated.exit_code == 0
    assert "the probabilities are not calibrated: 300 rows of 64 features are too few" in uncalibrated.stderr
    words = (*words[:-2], "--no-calibrate", *words[-2:])
    plain, secure = document(*words), document(*words, "--secure")
    assert (plain["secure"], secure["secure"]) == (False, True)
    assert secure["accuracy"] == plain["accuracy"]
    assert secure["history"][0]["error_bounds"]["gram"] == 4 * 2.0**-65
    assert "only totals were opened" in fedsolve(*words, "--secure").stdout
    refused(fedsolve(*words[:-1], "2", "--secure"), 3, "2 clients cannot make a secure sum")


def test_warnings_are_single_lines(files):
    result = fedsolve("train", files / "digits.npz", "--method", "afl", "--ridge", 0, "--no-calibrate")
    assert result.exit_code == 0
    assert "warning: the system of width 64 is singular" in result.stderr
    assert told(result).count("\n") == 1


APFL = ("--method", "apfl", "--refinement-width", "16", "--ridge", "1", "--workers", "1")


def test_apfl_warns_of_a_shared_stream_that_fits_all_rows(files):
    few = fedsolve("train", files / "digits.npz", *APFL, "--width", "151", "--clients", "3")
    assert few.exit_code == 0
    assert few.stderr.startswith("warning: 300 rows are few for a shared stream of width 151")
    assert told(few).count("\n") == 1
    enough = fedsolve("train", files / "digits.npz", *APFL, "--width", "150", "--clients", "3")
    assert enough.exit_code == 0
    assert told(enough) == ""


def test_a_folder_of_personal_models_is_of_one_run(files, tmp_path):
    words = (
        "train",
        files / "digits.npz",
        *APFL,
        "--width",
        "24",
        "--out",
        tmp_path / "own" / "all.safetensors",
    )
    own = ("--personal", tmp_path / "own")
    document(*words, *own, "--clients", "4")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "own").iterdir()}
    assert len(before) == 5
    refused(
        fedsolve(*words, *own, "--clients", "2"),
        4,
        "2 models that are not of this run's clients (client-2.safetensors, client-3.safetensors)",
        "another folder",
    )
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "own").iterdir()} == before
    document(*words, *own, "--clients", "4")  # the same clients: their models are replaced
    shared = ("--out", tmp_path / "own" / "client-1.safetensors")
    refused(fedsolve(*words, *own, "--clients", "4", *shared), 2, "also the file of a client")


def test_parquet_trains_like_npz(files, tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    data = np.load(files / "digits.npz")
    columns = {f"p{k}": data["x_train"][:, k] for k in range(64)} | {"label": data["y_train"]}
    parquet.write_table(arrow.table(columns), tmp_path / "d.parquet")
    told = document("train", tmp_path / "d.parquet", *SMALL)
    assert told["accuracy"]["train"] == document("train", files / "digits.npz", *SMALL)["accuracy"]["train"]


def test_resume_continues_to_the_same_bytes(files, tmp_path):
    whole, resumed, checkpoint = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "run.ckpt"))
    document("train", files / "digits.npz", *SMALL, "--out", whole)
    data = np.load(files / "digits.npz")
    owners = fs.partition.iid(data["y_train"], 5)
    federation = fs.LocalFederation.from_arrays(data["x_train"], data["y_train"], owners, workers=1)
    words = ("--checkpoint", checkpoint, "--resume", "--out", resumed)
    for done in (3, 6, 9):  # in the first training, in the calibration, in the second training
        run = fs.Recipe(fs.DeepAFL(layers=2, width=24), calibrate=True).start(federation.describe())
        steps = exchanges(run, federation)
        for _ in range(done):
            next(steps)
        checkpoint.write_bytes(run.to_bytes())
        told = document("train", files / "digits.npz", *SMALL, *words)
        assert told["exchanges"] == 12
        assert resumed.read_bytes() == whole.read_bytes()
    plain = fs.Recipe(fs.DeepAFL(layers=2, width=24))
    checkpoint.write_bytes(plain.start(federation.describe()).to_bytes())
    refused(fedsolve("train", files / "digits.npz", *SMALL, *words), 4, "is of a run with calibrate=False")


# -- predict and evaluate --------------------------------------------------------------------------


def test_predict_writes_a_csv(files, tmp_path):
    out = tmp_path / "p.csv"
    assert fedsolve("predict", files / "deep.safetensors", files / "digits.npz", "--out", out).exit_code == 0
    model = fs.load_model(files / "deep.safetensors")
    expected = model.predict(np.load(files / "digits.npz")["x_test"])
    lines = out.read_text().splitlines()
    assert lines[0] == "row,label"
    assert lines[1:] == [f"{row},{label}" for row, label in enumerate(expected)]
    printed = fedsolve("predict", files / "deep.safetensors", files / "digits.npz")
    assert printed.stdout == out.read_text()


@pytest.mark.parametrize("name", ["test.csv", "rows.csv", "digits.npz"])
def test_predict_takes_labelled_and_unlabelled_rows(files, name):
    words = ("--label", "digit") if name == "test.csv" else ()
    told = document("predict", files / "linear.safetensors", files / name, *words)
    expected = fs.load_model(files / "linear.safetensors").predict(np.load(files / "digits.npz")["x_test"])
    assert told["labels"] == expected.tolist()


def test_predict_scores_and_depth(files):
    words = ("predict", files / "deep.safetensors", files / "digits.npz", "--part", "train", "--layers", "1")
    told = document(*words, "--scores")
    model = fs.load_model(files / "deep.safetensors")
    features = np.load(files / "digits.npz")["x_train"]
    assert np.array_equal(told["scores"], model.decision_function(features, layers=1))
    rows = [line.split(",") for line in fedsolve(*words, "--scores").stdout.splitlines()]
    assert rows[0] == ["row", "label", *(f"score_{k}" for k in range(10))]
    assert np.array_equal(np.array(rows[1:], dtype=float)[:, 2:], told["scores"])


def test_evaluate_reports_what_scikit_learn_reports(files):
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    told = document("evaluate", files / "deep.safetensors", files / "digits.npz")
    data = np.load(files / "digits.npz")
    predicted = fs.load_model(files / "deep.safetensors").predict(data["x_test"])
    assert told["accuracy"] == accuracy_score(data["y_test"], predicted)
    assert told["confusion"] == confusion_matrix(data["y_test"], predicted).tolist()
    expected = precision_recall_fscore_support(data["y_test"], predicted)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [line[name] for line in told["per_class"]] == pytest.approx(values.tolist())
    page = fedsolve("evaluate", files / "deep.safetensors", files / "digits.npz").stdout
    assert f"accuracy {100 * told['accuracy']:.2f} %" in page
    assert "Confusion" in page


def test_evaluate_stages_and_depth(files):
    told = document("evaluate", files / "deep.safetensors", files / "digits.npz", "--staged")
    data = np.load(files / "digits.npz")
    stages = fs.load_model(files / "deep.safetensors").staged_score(data["x_test"], data["y_test"])
    assert told["staged_accuracy"] == stages.tolist()
    first = document("evaluate", files / "deep.safetensors", files / "digits.npz", "--layers", "0")
    assert first["accuracy"] == stages[0]
    assert (
        "blocks" in fedsolve("evaluate", files / "deep.safetensors", files / "digits.npz", "--staged").stdout
    )


def test_report_of_many_classes_shows_the_worst():
    classes = np.array([f"class-{k:02d}" for k in range(30)])
    labels = np.repeat(classes, 4)
    predicted = labels.copy()
    predicted[:3] = "class-07"
    confusion = Confusion(classes, confusion_matrix(labels, predicted, labels=classes))
    assert confusion.mistakes(5) == [(0, 7, 3)]
    assert class_table(confusion).title == "The 20 classes of 30 with the lowest F1:"
    assert class_table(confusion).rows[0] == ("class-00", "1.000", "0.250", "0.400", "4")
    assert confusion_table(confusion).rows == [("class-00", "class-07", "3", "75.00 %")]


def test_report_of_a_class_that_never_occurs():
    report = Confusion(np.arange(3), confusion_matrix([0, 0, 1], [0, 1, 1], labels=[0, 1, 2]))
    assert np.isnan(report.recall[2])
    assert np.isnan(report.precision[2])
    assert report.recall[:2].tolist() == [0.5, 1.0]
    assert report.f1[0] == pytest.approx(2 / 3)


# -- failures --------------------------------------------------------------------------------------


def _npz(path, **arrays):
    np.savez(path, **arrays)
    return path


X = np.random.default_rng(0).standard_normal((30, 4))
Y = np.arange(30) % 3


def _with(value):
    spoilt = X.copy()
    spoilt[7, 2] = value
    return spoilt


BAD_DATA = {
    "nan": ({"x": _with(np.nan), "y": Y}, 2, "nan in row 7, column 2"),
    "infinite": ({"x": _with(np.inf), "y": Y}, 2, "inf in row 7, column 2"),
    "nan labels": ({"x": X, "y": np.where(Y == 1, np.nan, Y)}, 2, "labels contain NaN"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, 2, "no rows at all"),
    "one class": ({"x": X, "y": np.zeros(30, dtype=int)}, 2, "only one class in the whole federation"),
    "mismatched": ({"x": X, "y": Y[:-1]}, 2, "30 rows of features but labels of shape (29,)"),
    "three axes": ({"x": X[:, :, None], "y": Y}, 2, "two-dimensional"),
    "no labels": ({"x": X}, 2, "no array 'y' with labels"),
    "test of other width": ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, 2, "4 features"),
    "test of unknown class": (
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1},
        2,
        "label 3 in row 2",
    ),
    "overflow": ({"x": _with(1e200), "y": Y}, 3, "contains NaN or infinite values"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_train_refuses_bad_data_and_writes_nothing(tmp_path, case):
    arrays, code, fragment = BAD_DATA[case]
    data, out = _npz(tmp_path / "bad.npz", **arrays), tmp_path / "out"
    out.mkdir()
    words = (
        "--method",
        "afl",
        "--no-calibrate",
        "--clients",
        "2",
        "--checkpoint",
        out / "run.ckpt",
        "--out",
        out / "m.safetensors",
    )
    refused(fedsolve("train", data, *words), code, fragment)
    assert list(out.iterdir()) == []


BAD_CSV = {
    "wrong label column": ("a,b,y\n1,2,0\n3,4,1\n", ("--label", "species"), "no label column 'species'"),
    "classes or a quantity": (
        "a,b\n" + "".join(f"{k / 9},{20 + k % 30}\n" for k in range(150)),
        (),
        "30 different whole numbers in 150 rows (such as 20, 21, 22): classes, or a quantity?",
    ),
    "no such owner column": ("a,b,y\n1,2,0\n3,4,1\n", ("--client-column", "ward"), "no client column 'ward'"),
    "other delimiter": ("a;b;y\n1;2;0\n", ("--delimiter", ","), "try --delimiter ';'"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_train_refuses_bad_csv_and_writes_nothing(tmp_path, case):
    text, words, fragment = BAD_CSV[case]
    (tmp_path / "bad.csv").write_text(text)
    out = tmp_path / "out"
    out.mkdir()
    result = fedsolve(
        "train", tmp_path / "bad.csv", "--method", "afl", *words, "--out", out / "m.safetensors"
    )
    refused(result, 2, fragment)
    assert list(out.iterdir()) == []


BAD_WORDS = {
    "other method's parameter": (
        ("--method", "afl", "--layers", "3"),
        2,
        "--layers belongs to apfl, cascade and deepafl, not to afl",
    ),
    "unknown option": (("--depth", "3"), 2, "No such option"),
    "unknown method": (("--method", "sgd"), 2, "unknown method 'sgd'"),
    "negative ridge": (("--ridge", "-1"), 2, "ridge must be 'auto' or a finite number >= 0; got -1.0"),
    "unknown activation": (("--activation", "swish"), 2, "activation must be 'none', 'gelu'"),
    "no participation": (("--participation", "0"), 2, "participation must be a number in (0, 1]; got 0.0"),
    "no clients": (("--clients", "0"), 2, "clients must be at least 1; got 0"),
    "no workers": (("--workers", "0"), 2, "workers must be a whole number, at least 1"),
    "too few rows": (("--min-size", "100"), 2, "need 2000 rows; there are 300"),
    "other partition's parameter": (
        ("--alpha", "1"),
        2,
        "--alpha belongs to --partition dirichlet, not to iid",
    ),
    "two owners": (("--client-column", "y_train", "--clients", "3"), 2, "leave out --clients"),
    "resume from nothing": (("--resume",), 2, "--resume needs --checkpoint"),
    "missing test file": (("--test", "none.npz"), 4, "cannot read none.npz: No such file"),
}


@pytest.mark.parametrize("case", BAD_WORDS)
def test_train_refuses_bad_words_and_writes_nothing(files, tmp_path, case):
    words, code, fragment = BAD_WORDS[case]
    refused(
        fedsolve("train", files / "digits.npz", *words, "--out", tmp_path / "m.safetensors"), code, fragment
    )
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_used_exit_4(files, tmp_path):
    contents = (files / "digits.npz").read_bytes()
    truncated, out = tmp_path / "truncated.npz", tmp_path / "out"
    truncated.write_bytes(contents[: len(contents) // 2])
    out.mkdir()
    refused(fedsolve("train", truncated, "--out", out / "m"), 4, "damaged, truncated or not an npz file")
    refused(fedsolve("train", tmp_path / "none.csv", "--out", out / "m"), 4, "No such file")
    refused(fedsolve("train", files / "digits.npz", "--out", out), 4, "it is a folder")
    refused(
        fedsolve("train", files / "digits.npz", "--out", truncated / "m"), 4, "not a folder you may write to"
    )
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_model_files_that_cannot_be_used_exit_4(files, tmp_path, command):
    good = (files / "deep.safetensors").read_bytes()
    note = json.dumps({"model": 99, "family": "deep"})
    faults = {
        "truncated": (good[: len(good) // 2], "damaged, truncated or was not written by fedsolve"),
        "empty": (b"", "damaged, truncated"),
        "newer": (save({"w": np.ones(2)}, metadata={"fedsolve": note}), "has model version 99"),
        "foreign": (save({"w": np.ones(2)}), "was not written by fedsolve"),
    }
    for name, (contents, fragment) in faults.items():
        path = tmp_path / name
        path.write_bytes(contents)
        refused(fedsolve(command, path, files / "digits.npz"), 4, fragment)
    refused(fedsolve(command, tmp_path / "none", files / "digits.npz"), 4, "No such file")


def test_predict_and_evaluate_refuse_data_that_do_not_fit(files, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    pixels = np.load(files / "digits.npz")["x_test"]
    spoilt = pixels.copy()
    spoilt[3, 5] = np.nan
    cases = {
        "nan": ({"x": spoilt, "y": np.zeros(100, dtype=int)}, "nan in row 3, column 5"),
        "narrow": ({"x": pixels[:, :60], "y": np.zeros(100, dtype=int)}, "rows of 64 features"),
        "none": ({"x": pixels[:0], "y": np.zeros(0, dtype=int)}, "no rows at all"),
    }
    for name, (arrays, fragment) in cases.items():
        path = _npz(tmp_path / f"{name}.npz", **arrays)
        refused(fedsolve("predict", files / "deep.safetensors", path, "--out", out / "p.csv"), 2, fragment)
        refused(fedsolve("evaluate", files / "deep.safetensors", path), 2, fragment)
    unknown = _npz(tmp_path / "unknown.npz", x=pixels, y=np.arange(100))
    refused(fedsolve("evaluate", files / "deep.safetensors", unknown), 2, "label 10 in row 10 is not one of")
    text = _npz(tmp_path / "text.npz", x=pixels, y=np.full(100, "seven"))
    refused(fedsolve("evaluate", files / "deep.safetensors", text), 2, "label 'seven' in row 0")
    refused(
        fedsolve("evaluate", files / "deep.safetensors", files / "digits.npz", "--layers", "9"),
        2,
        "between 0 and 2",
    )
    refused(
        fedsolve("evaluate", files / "linear.safetensors", files / "digits.npz", "--layers", "1"),
        2,
        "model with layers",
    )
    staged = fedsolve("evaluate", files / "linear.safetensors", files / "digits.npz", "--staged")
    refused(staged, 2, "model with layers")
    assert list(out.iterdir()) == []


def test_checkpoints_are_neither_overwritten_nor_mixed_up(files, tmp_path):
    checkpoint, out = tmp_path / "run.ckpt", tmp_path / "m.safetensors"
    run = ("train", files / "digits.npz", *SMALL, "--checkpoint", checkpoint)
    assert fedsolve(*run, "--quiet").exit_code == 0
    before = checkpoint.read_bytes()
    refused(fedsolve(*run, "--out", out), 4, "exists. Pass --resume")
    refused(
        fedsolve(*run, "--resume", "--ridge", "7", "--out", out), 4, "other parameters, classes or features"
    )
    more = ("--resume", "--out", out)
    refused(fedsolve(*run, *more, "--clients", "7"), 4, "other clients: it knows 5", "here are 7")
    refused(fedsolve(*run, *more, "--partition", "dirichlet"), 4, "other rows of 'client-0'", "of 4 more")
    other = tmp_path / "other.npz"
    data = dict(np.load(files / "digits.npz"))
    np.savez(other, **data | {"x_train": data["x_train"][::-1], "y_train": data["y_train"][::-1]})
    refused(fedsolve("train", other, *run[2:], *more), 4, "other rows of", "Give the data and the partition")
    assert checkpoint.read_bytes() == before
    checkpoint.write_bytes(before[:1000])
    refused(fedsolve(*run, "--resume", "--out", out), 4, "damaged, truncated")
    assert not out.exists()


def test_json_errors_are_one_document_on_stdout(tmp_path):
    for words, kind, code in (
        (("train", tmp_path / "none.npz"), "file", 4),
        (("train", tmp_path / "none.npz", "--bogus"), "usage", 2),
        (("train", _npz(tmp_path / "d.npz", x=X, y=Y[:3])), "data", 2),
        (("train", _npz(tmp_path / "e.npz", x=_with(1e200), y=Y), "--method", "afl"), "participants", 3),
    ):
        result = fedsolve(*words, "--json")
        error = json.loads(result.stdout)["error"]
        assert (result.exit_code, error["exit_code"], error["kind"]) == (code, code, kind)
        assert result.stderr == f"error: {error['message']}\n"


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    words = ("train", tmp_path / "none.npz")
    assert "Traceback" in fedsolve(*words, "--debug").stderr
    assert "Traceback" in fedsolve("--debug", *words).stderr
    monkeypatch.setenv("FEDSOLVE_DEBUG", "1")
    result = fedsolve(*words)
    assert "Traceback" in result.stderr
    assert result.exit_code == 4


def test_unforeseen_errors_exit_1_in_one_line(files, monkeypatch):
    def broken(self, *args, **kwargs):
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(fs.AFL, "start", broken)
    result = fedsolve("train", files / "digits.npz", "--method", "afl")
    refused(result, 1, "unforeseen ZeroDivisionError: no luck")


# -- real processes --------------------------------------------------------------------------------


def process(*words):
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "fedsolve", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_process_exit_codes_and_an_empty_output_folder(files, tmp_path):
    data, out = _npz(tmp_path / "d.npz", x=_with(1e200), y=Y), tmp_path / "out"
    out.mkdir()
    model, checkpoint = out / "m.safetensors", ("--checkpoint", out / "run.ckpt")
    cases = (
        (("train", files / "digits.npz", "--ridge", "x", "--out", model), 2),
        (("train", data, "--method", "afl", "--no-calibrate", "--out", model, *checkpoint), 3),
        (("predict", tmp_path / "none", files / "digits.npz", "--out", out / "p.csv"), 4),
    )
    for words, code in cases:
        done = process(*words)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_installed_command_and_module_are_the_same(files):
    installed = Path(sys.executable).parent / "fedsolve"
    ours = subprocess.run([installed, "methods", "--json"], capture_output=True, text=True, check=True)
    assert ours.stdout == process("methods", "--json").stdout
    assert ours.stderr == ""


def test_interrupt_exits_130_and_names_the_checkpoint(files, tmp_path):
    checkpoint, out = tmp_path / "run.ckpt", tmp_path / "m.safetensors"
    start = "from fedsolve.cli.main import main; main()"
    words = (
        "train",
        files / "digits.npz",
        "--method",
        "deepafl",
        "--layers",
        100000,
        "--width",
        32,
        "--out",
        out,
    )
    command = [sys.executable, "-c", start, *map(str, words), "--checkpoint", str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while not checkpoint.exists() and running.poll() is None:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        printed, err = running.communicate()
    assert running.returncode == 130, err
    assert printed == ""
    assert err.startswith(f"error: interrupted; {checkpoint} holds the last exchange.")
    assert err.count("\n") == 1
    assert checkpoint.exists()
    assert not out.exists()


def test_a_cascade_is_read_layer_by_layer(files, tmp_path):
    out = tmp_path / "cascade.safetensors"
    words = ("--method", "cascade", "--layers", "2", "--width", "24", "--workers", "1", "--out", out)
    assert fedsolve("train", files / "digits.npz", *words).exit_code == 0
    assert len(document("evaluate", out, files / "digits.npz", "--staged")["staged_accuracy"]) == 3
    assert fedsolve("predict", out, files / "digits.npz", "--layers", "1").exit_code == 0


@pytest.mark.parametrize("method", ["cascade", "deepafl"])
def test_a_regression_is_evaluated_after_the_layers_that_were_asked(files, tmp_path, method):
    out, data = tmp_path / "model.safetensors", files / "digits.npz"
    words = ("--method", method, "--layers", "2", "--width", "24", "--workers", "1", "--out", out)
    assert fedsolve("train", data, "--task", "regression", *words).exit_code == 0
    staged = document("evaluate", out, data, "--staged")["staged_r2"]
    assert len(set(staged)) == 3
    assert document("evaluate", out, data, "--layers", "0")["r2"] == pytest.approx(staged[0])
    refused(fedsolve("evaluate", out, data, "--layers", "9"), 2, "between 0 and 2")


def test_checkpoint_and_model_must_be_two_files(files, tmp_path):
    both = tmp_path / "same"
    result = fedsolve("train", files / "digits.npz", *SMALL, "--checkpoint", both, "--out", both)
    refused(result, 2, "name the same file")
    assert not both.exists()
