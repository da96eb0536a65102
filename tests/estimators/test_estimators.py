"""The scikit-learn estimators: scikit-learn's own checks, exact oracles, and everyday use."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import fedsolve as fs
from fedsolve.calibration import project_to_simplex
from fedsolve.estimators import (
    AFLClassifier,
    AFLRegressor,
    AutoRegressor,
    DeepAFLClassifier,
    DeepAFLRegressor,
    KernelAFLRegressor,
)
from tests.conftest import Dataset
from tests.oracle import DeepOracle, one_hot, relative_difference

TOLERANCE = 1e-9
FIXED: dict[str, Any] = {"ridge": 10.0, "residual_ridge": 1.0, "gain": 1.0, "scale": "standard"}
SMALL: dict[str, Any] = {"layers": 2, "width": 24, **FIXED}
CLASSIFIERS = {"afl": AFLClassifier(ridge=1.0), "deepafl": DeepAFLClassifier(**SMALL)}
REGRESSORS = {"afl": AFLRegressor(ridge=1.0), "deepafl": DeepAFLRegressor(**SMALL)}
ALL = [*CLASSIFIERS.values(), *REGRESSORS.values()]


def name_of(value: Any) -> str:
    check = getattr(value, "func", value)
    return getattr(check, "__name__", type(value).__name__)


every_estimator = pytest.mark.parametrize("estimator", ALL, ids=name_of)
every_classifier = pytest.mark.parametrize("estimator", CLASSIFIERS.values(), ids=name_of)
every_regressor = pytest.mark.parametrize("estimator", REGRESSORS.values(), ids=name_of)


def table(
    rows: int = 120, columns: int = 5, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Unscaled columns, some far from zero, and labels by a noisy rule; every class occurs."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, columns))
    labels = np.argmax(normal[:, :classes] + 0.5 * rng.standard_normal((rows, classes)), axis=1)
    labels[:classes] = np.arange(classes)
    return normal * np.geomspace(0.1, 50.0, columns) + np.linspace(-20.0, 20.0, columns), labels


def scores(estimator: Any, features: np.ndarray) -> np.ndarray:
    found = getattr(estimator, "decision_function", estimator.predict)(features)
    return np.asarray(found, dtype=np.float64)


X, Y = table()


# -- scikit-learn's own opinion --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "check"), [pair for one in ALL for pair in estimator_checks_generator(one)], ids=name_of
)
def test_scikit_learn_check(estimator: Any, check: Any) -> None:
    try:
        check(estimator)
    except SkipTest as reason:
        # Optional packages; the array interface has its turn in the next test.
        if not re.search(r"(pandas|polars) is not installed|SCIPY_ARRAY_API is not set", str(reason)):
            raise


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        "AFLClassifier()",
        "AFLRegressor()",
        "AutoClassifier(methods='afl,kernelafl')",  # all of them would take minutes
        "DeepAFLClassifier()",
        "AutoRegressor(methods='afl')",
        "DeepAFLRegressor()",
        "KernelAFLClassifier()",
        "KernelAFLRegressor(32)",
        "SoftmaxClassifier()",
    ],
)
def test_check_estimator_with_default_parameters(made: str) -> None:
    program = (
        "from sklearn.utils.estimator_checks import check_estimator\n"
        "from fedsolve.estimators import *\n"
        f"results = check_estimator({made})\n"
        "assert not any(result['expected_to_fail'] for result in results)\n"
        "print(sum(result['status'] == 'passed' for result in results))"
    )
    environment = os.environ | {"SCIPY_ARRAY_API": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 40


# -- oracles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 1.0, 30.0])
def test_afl_is_ridge_regression_on_one_hot_labels(ridge: float, intercept: bool) -> None:
    weights = np.random.default_rng(1).uniform(0.1, 3.0, len(X))
    expected = Ridge(alpha=ridge, fit_intercept=intercept, solver="svd").fit(X, one_hot(Y), weights)
    found = AFLClassifier(ridge=ridge, fit_intercept=intercept).fit(X, Y, weights)
    assert relative_difference(found.coef_, expected.coef_) <= TOLERANCE
    assert relative_difference(found.decision_function(X), expected.predict(X)) <= TOLERANCE
    assert np.array_equal(found.predict(X), np.argmax(expected.predict(X), axis=1))
    if ridge == 0:
        plain = LinearRegression(fit_intercept=intercept).fit(X, one_hot(Y), weights)
        assert relative_difference(found.coef_, plain.coef_) <= TOLERANCE


def test_afl_has_the_coefficients_of_scikit_learns_ridge_classifier() -> None:
    binary = AFLClassifier(ridge=1.0).fit(X, Y > 0)
    expected = RidgeClassifier(solver="svd").fit(X, Y > 0)
    assert relative_difference(binary.coef_, np.atleast_2d(expected.coef_)) <= TOLERANCE
    assert relative_difference(binary.intercept_, np.atleast_1d(expected.intercept_)) <= TOLERANCE
    assert relative_difference(binary.decision_function(X), expected.decision_function(X)) <= TOLERANCE
    # scikit-learn encodes classes as -1 and 1, twice as far apart.
    multiclass = RidgeClassifier(solver="svd").fit(X, Y)
    assert relative_difference(2.0 * AFLClassifier(ridge=1.0).fit(X, Y).coef_, multiclass.coef_) <= TOLERANCE


def test_an_intercept_keeps_all_digits_far_from_the_origin() -> None:
    far = X + 1e7
    expected = LinearRegression().fit(far, X[:, 0])
    found = AFLRegressor(ridge=0.0).partial_fit(far[:7], X[:7, 0]).partial_fit(far[7:], X[7:, 0])
    assert relative_difference(found.coef_, expected.coef_) <= TOLERANCE
    found = AFLRegressor(ridge=0.0).fit(far, X[:, 0])
    assert relative_difference(found.coef_, expected.coef_) <= TOLERANCE


@pytest.mark.parametrize("clients", [1, 20])
def test_deepafl_is_the_federated_model(digits: Dataset, clients: int) -> None:
    data = digits.head(600)
    owners = fs.partition.dirichlet(data.labels, clients, alpha=0.1, seed=4)
    federation = fs.LocalFederation.from_arrays(data.features, data.labels, owners, clients)
    parameters: dict[str, Any] = {"layers": 4, "width": 64, "ridge": 2.0, "residual_ridge": 0.1, "gain": 1.5}
    expected = fs.DeepAFL(**parameters, scale="standard", intercept=True, seed=7).fit(federation)
    found = DeepAFLClassifier(**parameters, scale="standard", random_state=7).fit(data.features, data.labels)
    for mine, theirs in zip(found.model_.classifiers, expected.classifiers, strict=True):
        assert relative_difference(mine, theirs) <= TOLERANCE
    for mine, theirs in zip(found.model_.blocks, expected.blocks, strict=True):
        assert relative_difference(mine.omega, theirs.omega) <= TOLERANCE
    assert np.array_equal(found.predict(data.features), expected.predict(data.features))


@pytest.mark.parametrize("block_input", ["previous", "initial"])
def test_deepafl_is_the_textbook_on_standardised_rows(block_input: str) -> None:
    options: dict[str, Any] = {"layers": 3, "width": 40, "hidden_width": 30, "block_input": block_input}
    oracle = DeepOracle(**options, ridge=10.0, residual_ridge=1.0)
    scaler, targets = StandardScaler().fit(X), one_hot(Y)
    oracle.fit(scaler.transform(X), targets - targets.mean(axis=0))
    expected = oracle.decision_function(scaler.transform(X)) + targets.mean(axis=0)
    found = DeepAFLClassifier(**options, **FIXED).fit(X, Y)
    assert relative_difference(found.decision_function(X), expected) <= TOLERANCE
    plain = DeepOracle(**options, ridge=10.0, residual_ridge=1.0).fit(X, targets)
    found = DeepAFLClassifier(**options, **FIXED | {"scale": None}, fit_intercept=False).fit(X, Y)
    assert relative_difference(found.decision_function(X), plain.decision_function(X)) <= TOLERANCE


# -- rows that come in batches, rows that weigh ----------------------------------------------------


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([0.01, 1.0]))
def test_any_sequence_of_partial_fits_is_one_fit(
    data: st.DataObject, intercept: bool, weighted: bool, ridge: float
) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(X) - 1), unique=True, max_size=8).map(sorted))
    order = np.random.default_rng(data.draw(st.integers(0, 999))).permutation(len(X))
    weights = np.random.default_rng(5).uniform(0.0, 4.0, len(X)) if weighted else None
    options: dict[str, Any] = {"ridge": ridge, "fit_intercept": intercept}
    whole = AFLClassifier(**options).fit(X, Y, weights)
    continuous = AFLRegressor(**options).fit(X, X[:, :2] ** 2, weights)
    batched, regressor = AFLClassifier(**options), AFLRegressor(**options)
    for rows in np.split(order, cuts):
        part = None if weights is None else weights[rows]
        batched.partial_fit(X[rows], Y[rows], classes=[2, 1, 0], sample_weight=part)
        regressor.partial_fit(X[rows], X[rows, :2] ** 2, part)
    for found, expected in ((batched, whole), (regressor, continuous)):
        assert relative_difference(found.model_.weight, expected.model_.weight) <= TOLERANCE
        assert relative_difference(scores(found, X), scores(expected, X)) <= TOLERANCE


def test_partial_fit_continues_a_fit_and_a_batch_may_lack_classes() -> None:
    whole = AFLClassifier().fit(X, Y)
    continued = AFLClassifier().fit(X[:50], Y[:50]).partial_fit(X[50:], Y[50:])
    assert relative_difference(continued.coef_, whole.coef_) <= TOLERANCE
    by_class = AFLClassifier().partial_fit(X[Y == 1], Y[Y == 1], classes=[0, 1, 2])
    assert set(by_class.predict(X)) == {1}
    for rows in (Y == 0, Y == 2):
        by_class.partial_fit(X[rows], Y[rows])
    assert relative_difference(by_class.coef_, whole.coef_) <= TOLERANCE


def test_wide_and_singular_sums_add_up_too() -> None:
    """More columns than rows, and more than one tile of the triangle that sums are added in."""
    rng = np.random.default_rng(8)
    features, targets = rng.standard_normal((90, 200)), rng.standard_normal(90)
    found = AFLRegressor().fit(features[:40], targets[:40]).set_params(ridge=0.0)
    with pytest.warns(fs.ConditionWarning):
        found.partial_fit(features[40:], targets[40:])
    with pytest.warns(fs.ConditionWarning):
        expected = AFLRegressor(ridge=0.0).fit(features, targets)
    assert relative_difference(found.coef_, expected.coef_) <= TOLERANCE
    assert relative_difference(found.predict(features), targets) <= TOLERANCE


def test_the_ridge_may_change_between_partial_fits() -> None:
    model = AFLRegressor(ridge=5.0).fit(X[:60], Y[:60]).set_params(ridge=0.5).partial_fit(X[60:], Y[60:])
    expected = AFLRegressor(ridge=0.5).fit(X, Y)
    assert relative_difference(model.coef_, expected.coef_) <= TOLERANCE


def test_a_refused_batch_leaves_the_model_as_it_was() -> None:
    model = AFLClassifier().partial_fit(X, Y, classes=[0, 1, 2])
    before = model.coef_.copy()
    for bad in ({"y": Y + 1}, {"X": X[:, 1:]}, {"sample_weight": -np.ones(len(X))}, {"classes": [0, 1]}):
        with pytest.raises(ValueError):  # noqa: PT011 - the messages are tested below
            model.partial_fit(**{"X": X, "y": Y, **bad})
    assert np.array_equal(model.coef_, before)
    model.partial_fit(X, Y)
    expected = AFLClassifier().fit(np.vstack([X, X]), np.hstack([Y, Y]))
    assert relative_difference(model.coef_, expected.coef_) <= TOLERANCE


@every_estimator
def test_whole_weights_are_repeated_rows_and_zero_weights_removed_ones(estimator: Any) -> None:
    weights = np.random.default_rng(2).integers(0, 4, len(X))
    weighted = scores(clone(estimator).fit(X, Y, weights), X)
    rows = np.repeat(np.arange(len(X)), weights)
    assert relative_difference(weighted, scores(clone(estimator).fit(X[rows], Y[rows]), X)) <= TOLERANCE
    spoiled = np.where(weights[:, None] > 0, X, 1e6)
    assert relative_difference(scores(clone(estimator).fit(spoiled, Y, weights), X), weighted) <= TOLERANCE


@every_estimator
def test_weights_enter_sums_not_the_row_count(estimator: Any) -> None:
    """A common factor on the weights is the same factor on every penalty: nothing else sees it."""
    factor = 64.0
    penalties = {n: v * factor for n, v in estimator.get_params().items() if n.endswith("ridge")}
    weights = np.random.default_rng(3).uniform(0.5, 2.0, len(X))
    expected = scores(clone(estimator).fit(X, Y, weights), X)
    found = scores(clone(estimator).set_params(**penalties).fit(X, Y, weights * factor), X)
    assert relative_difference(found, expected) <= TOLERANCE
    assert not np.allclose(scores(clone(estimator).fit(X, Y, weights * factor), X), expected, rtol=1e-6)


# -- labels, probabilities, stages -----------------------------------------------------------------


@every_classifier
@pytest.mark.parametrize(
    "names",
    [
        np.array(["b", "a", "longer"]),
        np.array(["b", "a", "longer"], dtype=object),
        np.array([7, -3, 5]),
        np.array([7, -3, 5], dtype=object),
        np.array([2.0, 0.0, 1.0]),
        np.array([True, False, True]),
        np.array([3, 200, 7], dtype=np.uint8),
    ],
    ids=lambda names: f"{names.dtype}-{type(names[0]).__name__}",
)
def test_labels_of_any_type(estimator: Any, names: np.ndarray, tmp_path: Path) -> None:
    labels = names[Y]
    model = clone(estimator).fit(X, labels)
    codes = np.unique(labels, return_inverse=True)[1]
    assert model.classes_.tolist() == sorted(set(names.tolist()))
    assert model.score(X, labels) == np.mean(model.predict(X) == labels) > 0.6
    assert model.predict(X).tolist() == model.classes_[clone(estimator).fit(X, codes).predict(X)].tolist()
    model.model_.save(tmp_path / "m.safetensors")
    loaded = fs.load_model(tmp_path / "m.safetensors")
    assert loaded.predict(X).tolist() == model.predict(X).tolist()


@every_classifier
def test_two_classes_have_one_score_and_more_have_one_each(estimator: Any) -> None:
    binary = clone(estimator).fit(X, np.where(Y == 1, "yes", "no"))
    decision = binary.decision_function(X)
    assert decision.shape == (len(X),)
    assert np.array_equal(binary.predict(X), np.where(decision > 0, "yes", "no"))
    assert clone(estimator).fit(X, Y).decision_function(X).shape == (len(X), 3)


@every_classifier
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_probabilities_are_probabilities_of_the_prediction(estimator: Any, classes: int) -> None:
    features, labels = table(classes=classes, columns=6)
    model = clone(estimator).fit(features, labels)
    probabilities = model.predict_proba(features * 3)
    assert probabilities.shape == (len(features), classes)
    assert probabilities.min() >= 0
    assert np.max(np.abs(probabilities.sum(axis=1) - 1)) <= 1e-12
    assert np.array_equal(model.classes_[np.argmax(probabilities, axis=1)], model.predict(features * 3))


@settings(max_examples=200, deadline=None)
@given(
    arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.integers(2, 6)),
        elements=st.one_of(st.floats(-2, 2), st.floats(-1e300, 1e300)),
    )
)
def test_projection_onto_the_simplex(values: np.ndarray) -> None:
    found = project_to_simplex(values)
    assert np.all(found >= 0)
    assert np.max(np.abs(found.sum(axis=1) - 1)) <= 1e-12
    rows = np.arange(len(values))
    assert np.array_equal(found[rows, np.argmax(values, axis=1)], found.max(axis=1))
    # Optimality: s - p is one constant tau where p > 0 and nowhere larger than it.
    with np.errstate(over="ignore"):
        excess = values - values.max(axis=1, keepdims=True) - found
    tau = np.array([np.mean(row[p > 0]) for row, p in zip(excess, found, strict=True)])[:, None]
    assert np.all(np.abs(np.where(found > 0, excess - tau, 0.0)) <= 1e-12)
    assert np.all(excess <= tau + 1e-12)


def test_points_of_the_simplex_project_onto_themselves() -> None:
    inside = np.random.default_rng(0).dirichlet(np.ones(5), size=50)
    assert np.allclose(project_to_simplex(inside), inside, rtol=0, atol=1e-15)


@pytest.mark.parametrize("estimator", [CLASSIFIERS["deepafl"], REGRESSORS["deepafl"]], ids=name_of)
def test_stages_end_at_the_prediction(estimator: Any) -> None:
    model = clone(estimator).fit(X, Y)
    weights = np.random.default_rng(0).uniform(size=len(X))
    stages, rates = model.staged_predict(X), model.staged_score(X, Y, weights)
    assert stages.shape == (model.layers + 1, len(X))
    assert np.array_equal(stages[-1], model.predict(X))
    assert rates[-1] == model.score(X, Y, weights)
    assert rates[0] == clone(estimator).set_params(layers=0).fit(X, Y).score(X, Y, weights)


# -- regression ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_regressors_explain_what_they_should() -> None:
    linear = load_diabetes(return_X_y=True, scaled=False)
    assert cross_val_score(AFLRegressor(), *linear).mean() > 0.45
    curved = make_friedman1(400, noise=0.5, random_state=0)
    by_line = cross_val_score(AFLRegressor(), *curved).mean()
    assert by_line > 0.6
    assert cross_val_score(DeepAFLRegressor(layers=5, width=128), *curved).mean() > by_line + 0.05


@every_regressor
def test_the_unit_of_the_targets_does_not_matter(estimator: Any) -> None:
    targets = np.sin(X[:, 0] * 5) + X[:, 1]
    expected = clone(estimator).fit(X, targets).predict(X)
    for unit, offset in ((1e-5, 0.0), (1e6, 3e6)):
        found = clone(estimator).fit(X, unit * targets + offset)
        assert relative_difference(found.predict(X) - offset, unit * expected) <= TOLERANCE
        assert np.array_equal(found.model_.predict(X), found.predict(X))


@every_regressor
def test_targets_keep_their_shape(estimator: Any) -> None:
    targets = np.column_stack([Y, 40.0 * X[:, 0], np.full(len(X), 3.0)])
    both = clone(estimator).fit(X, targets)
    assert both.predict(X).shape == targets.shape
    assert np.allclose(both.predict(X)[:, 2], 3.0, rtol=1e-12)
    assert clone(estimator).fit(X, targets[:, :1]).predict(X).shape == (len(X), 1)
    assert clone(estimator).fit(X, targets[:, 0]).predict(X).shape == (len(X),)


def test_linear_targets_are_solved_one_by_one() -> None:
    targets = np.column_stack([Y, X[:, 0] ** 2])
    both = AFLRegressor(ridge=1.0).fit(X, targets)
    for column in range(2):
        alone = AFLRegressor(ridge=1.0).fit(X, targets[:, column])
        assert relative_difference(both.coef_[column], alone.coef_) <= TOLERANCE
        assert abs(both.intercept_[column] - alone.intercept_) <= TOLERANCE * abs(alone.intercept_)


# -- everyday use ----------------------------------------------------------------------------------


@every_estimator
def test_clone_parameters_and_pickle(estimator: Any) -> None:
    model = clone(estimator).set_params(ridge=3.5).fit(X, Y)
    again = clone(model)
    assert again.get_params() == model.get_params()
    assert again.get_params()["ridge"] == 3.5
    with pytest.raises(NotFittedError):
        again.predict(X)
    restored = pickle.loads(pickle.dumps(model))
    assert np.array_equal(scores(restored, X), scores(model, X))
    assert np.array_equal(scores(again.fit(X, Y), X), scores(model, X))


def test_a_pickled_model_goes_on_learning() -> None:
    restored = pickle.loads(pickle.dumps(AFLClassifier().fit(X[:70], Y[:70])))
    expected = AFLClassifier().fit(X, Y)
    assert relative_difference(restored.partial_fit(X[70:], Y[70:]).coef_, expected.coef_) <= TOLERANCE


@pytest.mark.slow
def test_pipelines_searches_and_calibration() -> None:
    features, labels = load_wine(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), AFLClassifier())
    assert cross_val_score(pipeline, features, labels).mean() > 0.95
    # Grids made by numpy hand over numpy scalars.
    grid = {"layers": np.arange(1, 3), "ridge": np.logspace(0, 1, 2, dtype=np.float32)}
    search = GridSearchCV(DeepAFLClassifier(width=48), grid, cv=3).fit(features, labels)
    assert search.best_score_ > 0.95
    assert set(search.best_params_) == {"layers", "ridge"}
    calibrated = CalibratedClassifierCV(DeepAFLClassifier(**SMALL), cv=3).fit(features, labels)
    assert np.allclose(calibrated.predict_proba(features).sum(axis=1), 1.0)


@pytest.mark.slow
def test_defaults_serve_unscaled_tables() -> None:
    features, labels = load_breast_cancer(return_X_y=True)
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    assert cross_val_score(DeepAFLClassifier(), features, labels, cv=3).mean() > (
        cross_val_score(linear, features, labels, cv=3).mean() - 0.02
    )


@every_estimator
def test_sensible_defaults_do_not_warn_and_singular_systems_do(estimator: Any) -> None:
    doubled = np.hstack([X, X, np.ones((len(X), 1))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clone(estimator).fit(doubled, Y)
        clone(estimator).fit(doubled[:6], Y[:6])
    with pytest.warns(fs.ConditionWarning, match=r"condition number .* A larger ridge \(now 0\)"):
        singular = clone(estimator).set_params(ridge=0.0).fit(doubled[:12], Y[:12])
    assert np.all(np.isfinite(scores(singular, doubled)))


def test_single_precision_features_are_summed_in_double_precision() -> None:
    single = (3.0 * StandardScaler().fit_transform(X) + 1.0).astype(np.float32)
    for kind in (AFLClassifier, AFLRegressor):
        expected = kind().fit(single.astype(np.float64), Y)
        assert relative_difference(kind().fit(single, Y).coef_, expected.coef_) <= TOLERANCE


def test_random_state_is_the_seed() -> None:
    def seed(state: Any) -> int:
        return DeepAFLClassifier(**SMALL, random_state=state).fit(X, Y).model_.parameters["seed"]

    assert seed(11) == seed(np.int64(11)) == 11
    assert seed(np.random.RandomState(3)) == seed(np.random.RandomState(3)) != seed(np.random.RandomState(4))
    assert seed(None) != seed(None)
    first, second = (DeepAFLClassifier(**SMALL, random_state=s).fit(X, Y) for s in (0, 1))
    assert not np.allclose(first.decision_function(X), second.decision_function(X))


@every_estimator
def test_column_names_are_remembered(estimator: Any) -> None:
    named = pyarrow.table({f"column {i}": values for i, values in enumerate(X.T)})
    model = clone(estimator).fit(named, Y)
    assert model.n_features_in_ == X.shape[1]
    assert model.feature_names_in_.tolist() == named.column_names
    assert np.array_equal(model.predict(named), clone(estimator).fit(X, Y).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(named.rename_columns([f"other {i}" for i in range(X.shape[1])]))


# -- bad input -------------------------------------------------------------------------------------

NAN, INFINITE = X.copy(), X.copy()
NAN[3, 1], INFINITE[3, 1] = np.nan, np.inf
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"X": NAN}, "contains NaN"),
    "infinite": ({"X": INFINITE}, "contains infinity"),
    "nan label": ({"y": np.where(Y == 1, np.nan, Y)}, "y contains NaN"),
    "rows and labels differ": ({"y": Y[:-1]}, "inconsistent numbers of samples"),
    "one dimension": ({"X": X[:, 0]}, "Expected 2D array"),
    "no rows": ({"X": X[:0], "y": Y[:0]}, r"0 sample"),
    "text": ({"X": X.astype(str).astype(object) + "x"}, "could not convert string"),
    "negative weights": ({"sample_weight": np.where(Y == 1, -1.0, 1.0)}, "not negative"),
    "zero weights": ({"sample_weight": np.zeros(len(X))}, "all 120 sample weights are zero"),
    "nan weights": ({"sample_weight": np.full(len(X), np.nan)}, "must be finite"),
    "weights of another length": ({"sample_weight": np.ones(7)}, r"shape \(120,\); got \(7,\)"),
}
BAD_LABELS: dict[str, tuple[dict[str, Any], str]] = {
    "single class": ({"y": np.full(len(X), "only")}, r"only one class \('only'\)"),
    "single weighted class": ({"sample_weight": (Y == 2).astype(float)}, r"only one class \(2\)"),
    "continuous labels": ({"y": X[:, 0]}, "Unknown label type"),
    "mixed labels": ({"y": np.array([1, "a"], dtype=object)[Y % 2]}, "mix values of types"),
    "two-dimensional labels": ({"y": one_hot(Y)}, "should be a 1d array"),
}


@every_estimator
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(estimator: Any, case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        clone(estimator).fit(**{"X": X, "y": Y, **changes})


@every_classifier
@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels_are_refused(estimator: Any, case: str) -> None:
    changes, message = BAD_LABELS[case]
    with pytest.raises(ValueError, match=message):
        clone(estimator).fit(**{"X": X, "y": Y, **changes})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"layers": 1.5}, "layers must be 'auto' or a whole number, at least 0; got 1.5"),
        ({"width": 0}, "width must be 'auto' or a whole number, at least 1; got 0"),
        ({"residual_ridge": -1.0}, "residual_ridge must be 'auto' or a finite number >= 0; got -1.0"),
        ({"activation": "swish"}, "got 'swish'. Did you mean 'hardswish'?"),
        ({"scale": "robust"}, "scale must be None, 'standard', 'centred' or 'auto'; got 'robust'"),
        ({"precision": "half"}, "precision must be 'float64' or 'float32'; got 'half'"),
    ],
)
@pytest.mark.parametrize("kind", [DeepAFLClassifier, DeepAFLRegressor])
def test_bad_parameters_are_refused_by_fit(kind: type, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.DataError, match=re.escape(message)):
        kind(**parameters).fit(X, Y)


@pytest.mark.parametrize("kind", [AFLClassifier, AFLRegressor])
def test_a_negative_ridge_is_refused(kind: type) -> None:
    with pytest.raises(fs.DataError, match="ridge must be 'auto' or a finite number >= 0; got -2"):
        kind(ridge=-2.0).fit(X, Y)


class Noted(AFLRegressor):
    """Has a parameter of its own."""

    def __init__(self, *, note: str = "", ridge: Any = "auto", calibrate: bool = True) -> None:
        super().__init__(ridge=ridge, calibrate=calibrate)
        self.note = note


def test_a_derived_estimator_may_have_parameters_of_its_own() -> None:
    X, y = load_diabetes(return_X_y=True)
    scores = [kind.fit(X, y).score(X, y) for kind in (Noted(note="mine"), AFLRegressor())]
    assert scores[0] == scores[1]


def test_partial_fit_says_what_does_not_fit() -> None:
    with pytest.raises(fs.DataError, match=r"first call of partial_fit needs classes=\[\.\.\.\]"):
        AFLClassifier().partial_fit(X, Y)
    with pytest.raises(fs.DataError, match=r"label 2 in row \d+ is not one of the 2 classes \(0, 1\)"):
        AFLClassifier().partial_fit(X, Y, classes=[0, 1])
    with pytest.raises(fs.DataError, match=r"only one class .*\[0\]"):
        AFLClassifier().partial_fit(X, Y, classes=[0])
    model = AFLClassifier().fit(X, Y)
    with pytest.raises(fs.DataError, match=r"classes \[0, 9\] differ from .* \[0, 1, 2\]"):
        model.partial_fit(X, Y, classes=[0, 9])
    with pytest.raises(ValueError, match="X has 4 features, but AFLClassifier is expecting 5"):
        model.partial_fit(X[:, :4], Y)
    with pytest.raises(fs.DataError, match="fit_intercept became False between two partial fits"):
        model.set_params(fit_intercept=False).partial_fit(X, Y)
    with pytest.raises(fs.DataError, match="y has 2 targets per row, but the batches before had 1"):
        AFLRegressor().fit(X, Y).partial_fit(X, X[:, :2])


@pytest.mark.slow
def test_the_how_to_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to-estimators.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {"__name__": "how_to"})


def test_auto_is_the_method_over_one_silo_and_calibrates_what_it_chose() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((240, 3))
    labels = np.where(np.sum(features**2, axis=1) > 2.4, "out", "in")
    silo = fs.LocalFederation.from_arrays(features, labels, np.zeros(len(labels), dtype=int))
    found = fs.AutoClassifier(methods="afl,kernelafl").fit(features, labels)
    model = fs.Auto(methods="afl,kernelafl").fit(silo)
    assert np.array_equal(found.model_.decision_function(features), model.decision_function(features))
    assert [one.as_dict() for one in found.tried_] == [one.as_dict() for one in model.tried]
    assert found.method_.key == "kernelafl"
    # The calibration is that of the chosen method without the rows held out; nothing is chosen again.
    assert found.model_.calibration is not None
    shares = found.predict_proba(features)
    assert np.allclose(shares.sum(axis=1), 1.0)
    assert found.score(features, labels) > 0.9


@pytest.mark.parametrize(
    "estimator", [*REGRESSORS.values(), AutoRegressor(methods="afl"), KernelAFLRegressor(32)], ids=name_of
)
def test_regressors_know_how_far_they_are_off(estimator: Any) -> None:
    features, targets = make_friedman1(600, noise=1.0, random_state=0)
    fitted = clone(estimator).fit(features[:300], targets[:300])
    shares = []
    for level in (0.5, 0.9):
        low, high = fitted.predict_interval(features[300:], level)
        np.testing.assert_allclose((low + high) / 2, fitted.predict(features[300:]))
        shares.append(np.mean((targets[300:] >= low) & (targets[300:] <= high)))
    np.testing.assert_allclose(shares, (0.5, 0.9), atol=0.08)
    with pytest.raises(fs.DataError, match="no rows were held out"):
        clone(estimator).set_params(calibrate=False).fit(features, targets).predict_interval(features)


def test_auto_regressor_bends_where_the_targets_do() -> None:
    features, targets = make_friedman1(400, noise=0.5, random_state=1)
    fitted = AutoRegressor().fit(features[:300], targets[:300])
    assert fitted.method_.key == "kernelafl"
    straight = AFLRegressor().fit(features[:300], targets[:300]).score(features[300:], targets[300:])
    assert fitted.score(features[300:], targets[300:]) > straight + 0.1
    assert all(one.errors is None for one in fitted.tried_)
