"""Model files: equal models are equal bytes; damage, truncation and newer versions are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import container
from fedsolve.closedform.predictors import DeepModel


def federation(labels: Any, clients: int = 3, **options: Any) -> fs.LocalFederation:
    X = np.random.default_rng(0).standard_normal((len(labels), 6))
    owners = np.arange(len(labels)) % clients
    return fs.LocalFederation.from_arrays(X, labels, owners, clients=clients, **options)


CLASSES: dict[str, Any] = {
    "integers": np.arange(60) % 3,
    "text": np.array(["rot", "grün", "blau"])[np.arange(60) % 3],
    "objects": np.array(["yes", "no"], dtype=object)[np.arange(60) % 2],
    "floats": np.array([0.5, -1.25])[np.arange(60) % 2],
    "booleans": np.arange(60) % 2 == 0,
    "bytes": np.array([b"a", b"b"])[np.arange(60) % 2],
}
METHODS = {
    "afl": fs.AFL(ridge=0.1),
    "afl-intercept": fs.AFL(ridge=0.1, intercept=True),
    "afl-scaled": fs.AFL(ridge=0.1, scale="standard"),
    "deepafl": fs.DeepAFL(layers=3, width=16),
    "deepafl-scaled": fs.DeepAFL(layers=2, width=16, scale="standard", intercept=True, block_input="initial"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("labels", CLASSES)
def test_round_trip(tmp_path: Path, method: str, labels: str) -> None:
    silo = federation(CLASSES[labels])
    model = METHODS[method].fit(silo)
    model.save(tmp_path / "m.safetensors")
    loaded = fs.load_model(tmp_path / "m.safetensors")
    X = np.random.default_rng(1).standard_normal((40, 6))
    np.testing.assert_array_equal(model.decision_function(X), loaded.decision_function(X))
    predicted = loaded.predict(X)
    np.testing.assert_array_equal(model.predict(X), predicted)
    assert set(predicted.tolist()) <= set(np.unique(silo.participants[0].data.labels).tolist())
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_two_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name, workers in (("a", 1), ("b", 3)):
        fs.DeepAFL(layers=4, width=32).fit(federation(CLASSES["integers"], 7, workers=workers)).save(
            tmp_path / name
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_stages_and_early_exit() -> None:
    silo = federation(CLASSES["integers"])
    model = fs.DeepAFL(layers=4, width=16).fit(silo)
    X = np.random.default_rng(1).standard_normal((40, 6))
    y = np.arange(40) % 3
    staged = model.staged_predict(X)
    assert staged.shape == (5, 40)
    scores = model.staged_score(X, y)
    for depth in range(5):
        shallow = fs.DeepAFL(layers=depth, width=16).fit(silo)
        np.testing.assert_allclose(
            model.decision_function(X, layers=depth), shallow.decision_function(X), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_array_equal(staged[depth], model.predict(X, layers=depth))
        assert scores[depth] == model.score(X, y, layers=depth)
    np.testing.assert_array_equal(model.decision_function(X), model.transform(X) @ model.classifiers[-1])
    with pytest.raises(fs.DataError, match=r"between 0 and 4; got 5"):
        model.predict(X, layers=5)


def test_prediction_in_passes_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fs.DeepAFL(layers=2, width=16).fit(federation(CLASSES["integers"]))
    X = np.random.default_rng(1).standard_normal((1000, 6))
    whole = model.decision_function(X)
    monkeypatch.setattr("fedsolve.closedform.predictors._PASS_BYTES", 1)
    np.testing.assert_allclose(model.decision_function(X), whole, rtol=1e-12, atol=1e-13)


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    fs.DeepAFL(layers=1, width=8).fit(federation(CLASSES["integers"])).save(path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(fs.ModelFileError, match=r"damaged, truncated"):
        fs.load_model(path)


def rewritten(path: Path, drop: str | None = None, **changes: Any) -> Path:
    arrays, note = container.from_bytes(path.read_bytes(), what="", error=fs.ModelFileError)
    arrays.pop(drop, None)
    path.write_bytes(container.to_bytes(arrays, {**note, **changes}))
    return path


def test_another_version(tmp_path: Path) -> None:
    with pytest.raises(fs.ModelFileError, match="version 99; this fedsolve reads 2"):
        fs.load_model(rewritten(saved(tmp_path), model=99))


def test_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(fs.ModelFileError, match="'quantum'"):
        fs.load_model(rewritten(saved(tmp_path), family="quantum"))


def test_missing_array(tmp_path: Path) -> None:
    with pytest.raises(fs.ModelFileError, match=r"incomplete.*left\.0"):
        fs.load_model(rewritten(saved(tmp_path), drop="left.0"))


def test_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello, I am a text file of some length")
    with pytest.raises(fs.ModelFileError, match="not written by fedsolve"):
        fs.load_model(tmp_path / "x")
    with pytest.raises(fs.ModelFileError, match="cannot read"):
        fs.load_model(tmp_path / "missing")
    with pytest.raises(fs.ModelFileError, match="cannot read"):
        fs.load_model(tmp_path)


def test_a_checkpoint_is_not_a_model(tmp_path: Path) -> None:
    fs.DeepAFL(layers=1, width=8).fit(federation(CLASSES["integers"]), checkpoint=tmp_path / "c")
    with pytest.raises(fs.ModelFileError, match="checkpoint"):
        fs.load_model(tmp_path / "c")


def test_unwritable_target_leaves_nothing(tmp_path: Path) -> None:
    model = fs.AFL(ridge=1.0).fit(federation(CLASSES["integers"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.ModelFileError, match="cannot write"):
        model.save(tmp_path / "file" / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((3, 5)), r"rows of 6 features; got an array of shape \(3, 5\)"),
        (np.zeros(6), r"rows of 6 features"),
        (np.full((3, 6), np.nan), "NaN"),
        (np.full((3, 6), "a"), "real numbers"),
    ],
)
def test_bad_features(features: np.ndarray, message: str) -> None:
    model = fs.AFL(ridge=1.0).fit(federation(CLASSES["integers"]))
    with pytest.raises(fs.DataError, match=message):
        model.predict(features)


def test_bad_labels_to_score() -> None:
    model: DeepModel = fs.DeepAFL(layers=0, width=8).fit(federation(CLASSES["integers"]))
    with pytest.raises(fs.DataError, match="3 rows but 2 labels"):
        model.score(np.zeros((3, 6)), [0, 1])
    with pytest.raises(fs.DataError, match="no rows"):
        model.score(np.zeros((0, 6)), [])


@pytest.mark.parametrize("method", [fs.DeepAFL(layers=1, width=8), fs.Cascade(layers=1, width=8)])
def test_a_model_of_other_projections_is_refused(tmp_path: Path, method: Any) -> None:
    path = tmp_path / "m"
    method.fit(federation(CLASSES["integers"])).save(path)
    with pytest.raises(fs.ModelFileError, match=r"random projections.*'fingerprint': 'other'"):
        fs.load_model(rewritten(path, fingerprint="other"))
