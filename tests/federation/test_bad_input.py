"""Bad input through the API: a clear error that names the value and the remedy, and no file left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.participant import ClientData, Participant

X = np.random.default_rng(0).standard_normal((30, 4))
Y = np.arange(30) % 3
OWNERS = np.arange(30) % 5
METHODS: dict[str, Any] = {
    "afl": fs.AFL(ridge=0.1),
    "deepafl": fs.DeepAFL(layers=1, width=8),
    "cascade": fs.Cascade(layers=1, width=8),
    "apfl": fs.APFL(width=8, refinement_width=8),
}


def spoiled(value: float) -> np.ndarray:
    features = X.copy()
    features[7, 2] = value
    return features


def train(method: str, folder: Path, **changes: Any) -> None:
    arguments: dict[str, Any] = {"features": X, "labels": Y, "owners": OWNERS, "clients": 5, **changes}
    federation = fs.LocalFederation.from_arrays(**arguments)
    METHODS[method].fit(federation, checkpoint=folder / "run.checkpoint").save(folder / "model.safetensors")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"features": spoiled(np.nan)}, r"nan in row 7, column 2.*Remove or impute"),
    "infinite": ({"features": spoiled(-np.inf)}, r"-inf in row 7, column 2"),
    "label out of range": ({"classes": [0, 1]}, r"label 2 in row .* is not one of the 2 classes \(0, 1\)"),
    "label of another type": ({"classes": ["a", "b"]}, "do not match classes"),
    "nan label": ({"labels": np.where(Y == 1, np.nan, Y)}, r"labels contain NaN .*row 1"),
    "mixed labels": ({"labels": np.array([0, "a", 2] * 10, dtype=object)}, "mix values of types"),
    "missing labels": ({"labels": np.array(["b", "a", None] * 10, dtype=object)}, r"10 labels .*rows 2, 5"),
    "no rows": ({"features": X[:0], "labels": Y[:0], "owners": OWNERS[:0]}, "no rows at all"),
    "single class": ({"labels": np.zeros(30, dtype=int)}, r"only one class .*\[0\]"),
    "single class, others declared": (
        {"labels": np.zeros(30, dtype=int), "classes": [0, 1, 2]},
        "only one class",
    ),
    "repeated classes": ({"classes": [0, 1, 1, 2]}, "different labels"),
    "rows and labels differ": ({"labels": Y[:-1]}, r"30 rows of features but labels of shape \(29,\)"),
    "features of one dimension": ({"features": X[:, 0]}, r"two-dimensional.*\(30,\)"),
    "no columns": ({"features": X[:, :0]}, "0 columns"),
    "text features": ({"features": X.astype(str)}, "real numbers"),
    "complex features": ({"features": X + 0j}, "real numbers"),
    "two-dimensional labels": ({"labels": np.eye(3)[Y]}, "one-dimensional"),
    "owner out of range": ({"owners": OWNERS + 1}, "owners must lie between 0 and 4; got 1 to 5"),
    "negative owner": ({"owners": OWNERS - 1}, "owners must lie between 0 and 4; got -1 to 3"),
    "owners of another length": ({"owners": OWNERS[:-1]}, "owners must be 30 integers"),
    "fractional owners": ({"owners": OWNERS / 2}, "owners must be 30 integers"),
    "negative weights": ({"sample_weight": np.full(30, -1.0)}, "not negative"),
    "weights of another length": ({"sample_weight": np.ones(29)}, r"shape \(30,\); got \(29,\)"),
    "mixed list of labels": ({"labels": [0, "a"] * 15}, "mix values of types"),
    "task": ({"task": "regresion"}, "'classification' or 'regression'; got 'regresion'"),
    "text targets": (
        {"task": "regression", "labels": np.array(["a", "b"])[Y % 2]},
        "regression needs numbers",
    ),
    "workers": ({"workers": 0}, "workers must be a whole number, at least 1; got 0"),
    "missing policy": ({"missing": "ignore"}, "'error' or 'continue'; got 'ignore'"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", BAD)
def test_bad_data(tmp_path: Path, method: str, case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(fs.DataError, match=message) as caught:
        train(method, tmp_path, **changes)
    assert isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_squares_that_overflow(tmp_path: Path, method: str) -> None:
    """Finite features whose Gram matrix is not: the client is named and nothing is written."""
    features = X.copy()
    features[12] = 1e200
    if method not in ("afl", "apfl"):  # tanh keeps the others' own features small
        train(method, tmp_path, features=features)
        return
    with (
        np.errstate(over="ignore"),
        pytest.raises(fs.CohortError, match=r"'client-2'.*NaN or infinite.*rescale"),
    ):
        train(method, tmp_path, features=features)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_dead_participant(tmp_path: Path, method: str) -> None:
    class Dead(Participant):
        def answer(self, *_: Any) -> Any:
            raise ConnectionError("connection reset by peer")

    silos = [Participant("north", ClientData(X, Y)), Dead("south", ClientData(X, Y))]
    with pytest.raises(fs.CohortError, match=r"'south' failed in exchange 0.*connection reset.*resume"):
        METHODS[method].fit(fs.LocalFederation(silos), checkpoint=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_nobody_at_all() -> None:
    with pytest.raises(fs.DataError, match="at least one participant"):
        fs.LocalFederation([])


def test_all_clients_empty() -> None:
    silos = [Participant(name, ClientData(X[:0], Y[:0])) for name in ("north", "south")]
    with pytest.raises(fs.DataError, match="every client is empty"):
        fs.AFL().fit(fs.LocalFederation(silos))
    for method in METHODS.values():
        with pytest.raises(fs.DataError, match="no rows at all"):
            method.fit(fs.LocalFederation(silos, classes=[0, 1]))


def test_empty_clients_are_named_and_harmless() -> None:
    for method in METHODS.values():
        model = method.fit(fs.LocalFederation.from_arrays(X, Y, OWNERS * 2, clients=12))
        assert model.history[0].empty == tuple(f"client-{k:02d}" for k in (1, 3, 5, 7, 9, 10, 11))
        assert len(model.history[0].cohort) == 12


@pytest.mark.parametrize(
    ("targets", "message"),
    [(np.array(["a", "b"])[Y % 2], "such as 'a'.*needs numbers"), (np.ones((len(Y), 2)), "2 values per row")],
)
def test_targets_that_a_regression_model_cannot_be_scored_on(targets: Any, message: str) -> None:
    regression = fs.LocalFederation.from_arrays(X, X[:, 0], OWNERS, task="regression")
    model = fs.AFL().fit(regression)
    with pytest.raises(fs.DataError, match=message):
        model.score(X, targets)
    others = fs.LocalFederation([Participant("north", ClientData(X, targets))], classes=[0, 1])
    with pytest.raises(fs.FedsolveError, match=message):
        others.evaluate(model)


def test_clients_of_different_width() -> None:
    with pytest.raises(fs.DataError, match=r"'south' has 3 features per row, the others \[4\]"):
        fs.LocalFederation(
            [Participant("north", ClientData(X, Y)), Participant("south", ClientData(X[:, :3], Y))]
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.DeepAFL(layers=-1), "layers must be 'auto' or a whole number, at least 0; got -1"),
        (lambda: fs.DeepAFL(width=0), "width must be 'auto' or a whole number, at least 1; got 0"),
        (lambda: fs.DeepAFL(layers=2.5), "layers must be 'auto' or a whole number, at least 0; got 2.5"),  # type: ignore[arg-type]
        (
            lambda: fs.DeepAFL(hidden_width=0),
            "hidden_width must be None or a whole number, at least 1",
        ),
        (lambda: fs.DeepAFL(ridge=-1.0), "ridge must be 'auto' or a finite number >= 0; got -1.0"),
        (lambda: fs.DeepAFL(residual_ridge=float("nan")), "residual_ridge must be 'auto' or a finite"),
        (
            lambda: fs.DeepAFL(activation="gelo"),
            "'gelu', .*got 'gelo'. Did you mean 'gelu'",
        ),
        (lambda: fs.DeepAFL(zero_activation="x"), "zero_activation must be 'none', 'gelu', .*got 'x'"),
        (lambda: fs.DeepAFL(block_input="last"), "'previous' or 'initial'; got 'last'"),  # type: ignore[arg-type]
        (lambda: fs.DeepAFL(exchange="fast"), "'auto', 'textbook', 'lean' or 'single'; got 'fast'"),
        (lambda: fs.DeepAFL(participation=0.0), r"participation must be a number in \(0, 1\]; got 0.0"),
        (lambda: fs.DeepAFL(scale="max"), "scale must be None, 'standard', 'centred' or 'auto'; got 'max'"),  # type: ignore[arg-type]
        (lambda: fs.DeepAFL(track="loss"), "track must be None or 'accuracy'"),  # type: ignore[arg-type]
        (lambda: fs.DeepAFL(precision="float16"), "'float64' or 'float32'; got 'float16'"),  # type: ignore[arg-type]
        (lambda: fs.AFL(ridge=float("inf")), "ridge must be 'auto' or a finite number"),
    ],
)
def test_bad_parameters(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(fs.DataError, match=message):
        make()


def test_all_weights_zero() -> None:
    silos = fs.LocalFederation.from_arrays(X, Y, OWNERS, sample_weight=np.zeros(30))
    with pytest.raises(fs.DataError, match="all sample weights are zero"):
        fs.AFL(ridge=1.0).fit(silos)


def test_a_negative_partition_seed() -> None:
    with pytest.raises(fs.DataError, match="seed must be a whole number, at least 0; got -1"):
        fs.partition.iid(Y, 3, seed=-1)
