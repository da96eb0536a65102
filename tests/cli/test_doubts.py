"""What a user cannot miss: diverged runs, models with NaN, models that learnt nothing or learnt by heart."""

from __future__ import annotations

import numpy as np
import pytest

from fedsolve import AFL, LocalFederation, load_model
from tests.command import document, fedsolve, refused

ROWS = 60


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, features, labels, names=None):
    names = names or [f"x{place}" for place in range(features.shape[1])]
    lines = [",".join([*names, "y"])]
    lines += [
        ",".join([*map(repr, row), str(label)]) for row, label in zip(features.tolist(), labels, strict=True)
    ]
    path.write_text("\n".join(lines))


def noise(seed=0, width=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, width)), rng.integers(0, 2, ROWS)


def test_a_diverged_run_has_exit_code_5_and_writes_nothing(folder):
    pytest.importorskip("torch")
    features, labels = noise()
    write(folder / "d.csv", features * 1e20, labels)
    words = (
        "train",
        "d.csv",
        "--method",
        "fedavg",
        "--clients",
        2,
        "--rounds",
        4,
        "--rate",
        10,
        "--out",
        "m",
    )
    refused(fedsolve(*words), 5, "loss of 'client-", "Lower rate")
    assert not (folder / "m").exists()


def test_a_model_with_nan_is_refused_with_exit_code_5(folder):
    features, labels = noise()
    write(folder / "d.csv", features, labels)
    model = AFL().fit(LocalFederation.from_arrays(features, labels, np.arange(ROWS) % 2))
    weights = next(array for array in model.arrays().values() if array.dtype.kind == "f" and array.size > 1)
    weights.flat[0] = np.nan
    model.save("m")
    assert any(np.isnan(a).any() for a in load_model("m").arrays().values() if a.dtype.kind == "f")
    for command in ("predict", "evaluate"):
        refused(fedsolve(command, "m", "d.csv"), 5, "m holds values that are not finite numbers")


def test_worse_than_the_majority_is_told(folder):
    features, _ = noise()
    write(folder / "train.csv", features, (features[:, 0] > 0).astype(int))
    write(folder / "test.csv", features, (features[:, 0] < 0).astype(int))
    words = ("train", "train.csv", "--method", "afl", "--clients", 2, "--test", "test.csv", "--out", "m")
    told = document(*words)["warnings"]
    assert any("on test rows is worse than always answering" in doubt for doubt in told)
    assert any("by heart" in doubt for doubt in told)
    result = fedsolve(*words, "--quiet")
    assert result.exit_code == 0
    assert result.stderr.count("warning: ") == 2
    assert "worse than always answering" in fedsolve("evaluate", "m", "test.csv").stderr
    assert fedsolve("evaluate", "m", "train.csv").stderr == ""


def test_an_identifier_is_told_and_dropped_as_told(folder):
    features, _ = noise()
    labels = (features[:, 0] > 0).astype(int)
    numbered = np.column_stack([features, 5000 + np.random.default_rng(1).permutation(ROWS)])
    write(folder / "d.csv", numbered, labels, ["a", "b", "c", "patient"])
    words = ("--method", "afl", "--clients", 2)
    (doubt,) = document("train", "csv:d.csv?test=0", *words)["warnings"]
    assert "'patient'" in doubt
    assert "--drop patient" in doubt
    left_out = document("train", "d.csv", *words)
    assert (left_out["warnings"], left_out["features"]) == ([], 3)
    assert document("train", "d.csv", *words, "--drop", "patient")["warnings"] == []


def test_weighed_classes_are_judged_by_classes_that_count_alike(folder):
    rng = np.random.default_rng(0)
    labels = (rng.random(1500) < 0.08).astype(int)
    write(folder / "d.csv", rng.normal(size=(1500, 3)) + 0.7 * labels[:, None], labels)
    words = ("train", "d.csv", "--methods", "afl,softmax", "--class-weight", "balanced", "--out", "m")
    assert document(*words)["warnings"] == []
    (doubt,) = document("evaluate", "m", "d.csv")["warnings"]
    assert "worse than always answering 0" in doubt
    assert "balanced accuracy 7" in doubt


def test_a_regression_that_has_learnt_nothing_is_remarked_upon(folder):
    rng = np.random.default_rng(5)
    write(folder / "d.csv", rng.normal(size=(240, 3)), rng.normal(size=240))
    words = ("train", "d.csv", "--method", "kernelafl", "--landmarks", 60, "--ridge", 1e-6)
    doubts = document(*words)["warnings"]
    assert any("worse than always answering the mean" in doubt for doubt in doubts)
    assert any("learnt the training rows by heart" in doubt for doubt in doubts)


def test_the_commonest_class_is_told_beside_the_accuracy(tmp_path):
    rows = [f"{n},{n % 7},{'sick' if n % 4 == 0 else 'well'}" for n in range(80)]
    (tmp_path / "d.csv").write_text("a,b,y\n" + "\n".join(rows) + "\n")
    words = ("train", tmp_path / "d.csv", "--label", "y", "--clients", 3)
    assert document(*words, "--method", "afl")["largest_class"] == ["well", 0.75]
    shown = " ".join(fedsolve(*words).stdout.split())
    assert "2 classes, most often 'well' (75.00 %)" in shown
    assert "half of it is the Brier score" in shown
