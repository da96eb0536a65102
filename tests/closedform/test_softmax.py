"""Softmax: the optimum of the pooled rows, whoever owns them; errors, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression

import fedsolve as fs
from fedsolve.privacy.census import OFF
from tests.oracle import relative_difference


def federate(features, labels, clients=7, **options) -> fs.LocalFederation:
    owners = fs.partition.dirichlet(labels, clients, alpha=0.3, seed=1)
    return fs.LocalFederation.from_arrays(features, labels, owners, clients, **options)


def centred(weight: np.ndarray) -> np.ndarray:
    """Logits are known up to what all classes have in common."""
    return weight - weight.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize(("curvature", "steps"), [("exact", 15), ("bound", 250)])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_coefficients_are_those_of_scikit_learn(digits, curvature, steps, fit_intercept):
    few = digits.head(600)
    reference = LogisticRegression(
        C=0.5, solver="newton-cg", tol=1e-13, max_iter=500, fit_intercept=fit_intercept
    ).fit(few.features, few.labels)
    method = fs.Softmax(ridge=2.0, intercept=fit_intercept, tolerance=1e-9, steps=steps, curvature=curvature)
    model = method.fit(federate(few.features, few.labels))
    weight, intercept = model.plain()
    close = {"rtol": 0, "atol": 1e-6}
    np.testing.assert_allclose(centred(weight), centred(reference.coef_.T), **close)
    np.testing.assert_allclose(centred(intercept), centred(reference.intercept_), **close)
    assert np.allclose(model.predict_proba(few.features), reference.predict_proba(few.features), atol=1e-7)


def test_two_classes_have_one_column_as_in_scikit_learn():
    features, labels = load_breast_cancer(return_X_y=True)
    reference = LogisticRegression(C=0.25, solver="newton-cholesky", tol=1e-13)
    standard = (features - features.mean(axis=0)) / features.std(axis=0)
    reference.fit(standard, labels)
    model = fs.Softmax(ridge=4.0, scale="standard").fit(federate(features, labels))
    assert np.max(np.abs(model.weight[:, 1] - reference.coef_[0])) <= 1e-6
    assert len(model.history) <= 10
    assert np.allclose(model.predict_proba(features), reference.predict_proba(standard), atol=1e-8)


def coefficients(model: fs.Model) -> np.ndarray:
    """Of the second class against the first, the intercept last."""
    weight, intercept = model.plain()
    return np.append(weight[:, 1] - weight[:, 0], intercept[1] - intercept[0])


def logistic_by_hand(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Coefficients (intercept last): iteratively weighted least squares."""
    rows = np.hstack([features, np.ones((len(features), 1))])
    value = np.zeros(rows.shape[1])
    for _ in range(50):
        chance = expit(rows @ value)
        root = np.sqrt(chance * (1 - chance))
        value = value + np.linalg.lstsq(rows * root[:, None], (labels - chance) / root, rcond=None)[0]
    return value


def noisy(rows: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Columns of very different size and place, and labels that no rule gets all right."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(rows, 5)) * [1.0, 2.0, 300.0, 0.01, 5.0] + [0.0, 1.0, 1e4, 3.0, -7.0]
    logits = (features - features.mean(axis=0)) @ [0.5, 0.3, 0.002, 40.0, -0.1]
    return features, (rng.random(rows) < expit(logits)).astype(int)


@pytest.mark.parametrize("scale", [None, "standard"])
def test_two_classes_at_ridge_0_are_the_likelihoods_maximum(scale):
    features, labels = noisy()
    model = fs.Softmax(ridge=0.0, scale=scale).fit(federate(features, labels))
    value = logistic_by_hand(features, labels)
    assert np.max(np.abs(coefficients(model) / value - 1)) <= 1e-6
    columns = " + ".join(f"x{place}" for place in range(5))
    glm = fs.GLM(f"y ~ {columns}", family="binomial").fit(
        federate(features, labels.astype(float), task="regression")
    )
    assert np.max(np.abs(np.roll(glm.coefficient, -1) / value - 1)) <= 1e-6


def test_a_weight_counts_as_so_many_rows():
    features, labels = noisy(200)
    weights = np.arange(200) % 3
    weighted = fs.Softmax(ridge=0.0).fit(federate(features, labels, sample_weight=weights))
    repeated = np.repeat(np.arange(200), weights)
    several = fs.Softmax(ridge=0.0).fit(federate(features[repeated], labels[repeated]))
    assert np.allclose(coefficients(weighted), coefficients(several), rtol=1e-8)


def test_without_a_maximum_it_says_so():
    features, labels = load_iris(return_X_y=True)
    one_against_two = np.minimum(labels, 1)
    with pytest.raises(fs.DataError, match="classes are separable"):
        fs.Softmax(ridge=0.0).fit(federate(features, one_against_two))
    with pytest.raises(fs.DataError, match="linearly independent"):
        fs.Softmax(ridge=0.0).fit(federate(np.hstack([features, features[:, :1]]), one_against_two))


def test_rows_that_separate_in_part_are_refused_too():
    features, labels = noisy()
    flag = np.zeros(len(labels))
    flag[np.flatnonzero(labels == 1)[:20]] = 1.0  # a category in which everybody is of one class
    with pytest.raises(fs.DataError, match="ridge > 0"):
        fs.Softmax(ridge=0.0).fit(federate(np.column_stack([features, flag]), labels))


def test_the_partition_does_not_matter(synthetic):
    scores = []
    for owners in (np.zeros(5000, dtype=int), fs.partition.dirichlet(synthetic.labels, 30, 0.1)):
        federation = fs.LocalFederation.from_arrays(synthetic.features, synthetic.labels, owners)
        scores.append(fs.Softmax().fit(federation).decision_function(synthetic.features))
    assert relative_difference(*scores) <= 1e-8


def test_a_class_without_rows_is_never_predicted(digits):
    there = digits.labels != 4
    federation = federate(digits.features[there], digits.labels[there], classes=range(10))
    model = fs.Softmax(ridge=1.0).fit(federation)
    assert 4 not in model.predict(digits.features)
    assert np.all(model.predict_proba(digits.features)[:, 4] == 0)
    others = fs.Softmax(ridge=1.0).fit(federate(digits.features[there], digits.labels[there]))
    assert np.array_equal(model.predict(digits.features), others.predict(digits.features))


def test_over_a_deep_model_it_learns_from_the_last_layer(digits, tmp_path):
    few = digits.head(500)
    federation = federate(few.features, few.labels)
    deep = fs.DeepAFL(layers=2, width=48).fit(federation)
    over = fs.Softmax(ridge=0.5).over(deep).fit(federation)
    pooled = fs.Softmax(ridge=0.5).fit(federate(deep.transform(few.features), few.labels))
    assert relative_difference(over.weight, pooled.weight) <= 1e-8
    over.save(tmp_path / "over.safetensors")
    again = fs.load_model(tmp_path / "over.safetensors")
    assert np.array_equal(again.decision_function(few.features), over.decision_function(few.features))
    with pytest.raises(fs.DataError, match="representation"):
        fs.Softmax().over(fs.AFL(ridge=1.0).fit(federation))


def test_a_run_over_a_model_resumes(digits, tmp_path):
    few = digits.head(300)
    federation = federate(few.features, few.labels)
    method = fs.Softmax(ridge=0.5).over(fs.DeepAFL(layers=1, width=24).fit(federation))
    whole = method.fit(federation)
    run = fs.Recipe(method).start(federation.describe())
    for _ in range(3):
        run.absorb(federation.exchange(run.request(federation.clients), run.chain))
    path = tmp_path / "run.checkpoint"
    path.write_bytes(run.to_bytes())
    resumed = method.fit(federation, checkpoint=path, resume=True)
    assert np.array_equal(resumed.weight, whole.weight)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_estimator_is_scikit_learns(classes):
    features, labels = load_iris(return_X_y=True)
    features, labels = features[labels < classes], np.array(["a", "b", "c"])[labels[labels < classes]]
    ours = fs.SoftmaxClassifier(ridge=2.0, scale=None).fit(features, labels)
    theirs = LogisticRegression(C=0.5, solver="newton-cg", tol=1e-12, max_iter=500).fit(features, labels)
    assert np.allclose(centred(ours.coef_.T), centred(theirs.coef_.T), atol=1e-6)
    assert np.allclose(ours.predict_proba(features), theirs.predict_proba(features), atol=1e-7)
    assert np.array_equal(ours.predict(features), theirs.predict(features))


def test_secure_sums_give_the_same_weights(digits):
    pytest.importorskip("cryptography")
    few = digits.head(300)
    plain = fs.Softmax(ridge=1.0).fit(federate(few.features, few.labels, clients=4))
    secure = fs.Softmax(ridge=1.0).fit(
        fs.privacy.SecureFederation(federate(few.features, few.labels, clients=4), limits=OFF)
    )
    assert relative_difference(secure.weight, plain.weight) <= 1e-8
