"""Heads of AFL's sums against their definitions, and classes that arrive after training."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid

import fedsolve as fs
from fedsolve.closedform.later_classes import united
from tests.oracle import relative_difference


def federate(features, labels, clients=6, **options) -> fs.LocalFederation:
    owners = fs.partition.dirichlet(labels, clients, alpha=0.3, seed=4)
    return fs.LocalFederation.from_arrays(features, labels, owners, clients, **options)


@pytest.fixture(scope="module")
def federation(synthetic) -> fs.LocalFederation:
    return federate(synthetic.features, synthetic.labels)


def test_lda_is_scikit_learns(synthetic, federation):
    reference = LinearDiscriminantAnalysis(solver="lsqr").fit(synthetic.features, synthetic.labels)
    scores = fs.AFL(head="lda").fit(federation).decision_function(synthetic.features)
    expected = reference.decision_function(synthetic.features)
    # Scores are known up to what all classes have in common.
    both = [values - values.mean(axis=1, keepdims=True) for values in (scores, expected)]
    assert relative_difference(*both) <= 1e-9


def test_fedcgs_has_the_covariance_of_all_rows(synthetic, federation):
    x, y = synthetic.features, synthetic.labels
    means = np.stack([x[y == c].mean(axis=0) for c in range(7)])
    weight = np.linalg.solve(np.cov(x.T, bias=True) + 3.0 / len(x) * np.eye(64), means.T)
    shift = np.log(np.bincount(y) / len(y)) - 0.5 * np.sum(means.T * weight, axis=0)
    model = fs.AFL(head="fedcgs", ridge=3.0).fit(federation)
    assert relative_difference(model.decision_function(x), x @ weight + shift) <= 1e-9


def test_the_nearest_mean_is_scikit_learns(synthetic, federation):
    reference = NearestCentroid().fit(synthetic.features, synthetic.labels)
    model = fs.AFL(head="mean").fit(federation)
    assert np.array_equal(model.predict(synthetic.features), reference.predict(synthetic.features))


def test_normalised_columns_are_those_of_afl(federation):
    plain, normalised = (fs.AFL(ridge=2.0, head=head).fit(federation) for head in ("ridge", "normalised"))
    expected = plain.weight / np.linalg.norm(plain.weight, axis=0)
    assert relative_difference(normalised.weight, expected) <= 1e-12


def test_every_head_comes_from_one_total_and_the_same_bytes(synthetic, federation):
    total, spec = fs.AFL().collect(federation), federation.describe()
    sizes = set()
    for head in ("ridge", "lda", "fedcgs", "mean", "normalised"):
        trained = fs.AFL(head=head).fit(federation)
        assert np.array_equal(fs.AFL(head=head).solve(total, spec).weight, trained.weight)
        sizes.add((len(trained.history), trained.history[0].bytes_up, trained.history[0].bytes_down))
    assert len(sizes) == 1
    with pytest.raises(fs.DataError, match="own intercept"):
        fs.AFL(head="lda", intercept=True)
    values = fs.LocalFederation.from_arrays(
        synthetic.features, synthetic.features[:, 0], np.zeros(5000, dtype=int), task="regression"
    )
    with pytest.raises(fs.DataError, match="for classes"):
        fs.AFL(head="mean").fit(values)


@pytest.mark.parametrize("head", ["lda", "fedcgs", "mean", "normalised"])
def test_a_class_without_rows_is_never_chosen(digits, head):
    there = digits.labels != 3
    federation = federate(digits.features[there], digits.labels[there], classes=range(10))
    assert 3 not in fs.AFL(head=head, ridge=1.0).fit(federation).predict(digits.features)


# -- classes that arrive later ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def before_and_after(digits):
    """Digits 0 to 8 at six clients; then 9, with some more of the others, at two newcomers."""
    late = (digits.labels == 9) | (np.arange(len(digits.labels)) % 10 == 0)
    features, labels = digits.features, digits.labels
    old = federate(features[~late], labels[~late])
    new = fs.LocalFederation(
        [
            fs.Participant(f"newcomer-{k}", fs.ClientData(features, labels, np.flatnonzero(late)[k::2]))
            for k in range(2)
        ]
    )
    everybody = fs.LocalFederation([*old.participants, *new.participants])
    return old, new, everybody


@pytest.mark.parametrize("intercept", [False, True])
def test_afl_grows_by_a_column_exactly(before_and_after, intercept):
    old, new, everybody = before_and_after
    method = fs.AFL(ridge=1.0, intercept=intercept)
    kept = method.collect(old)  # all that the server has to keep; the first clients may be gone
    total, spec = united(kept, old.describe(), method.collect(new), new.describe())
    assert list(spec.classes) == list(range(10))
    joint = method.fit(everybody)
    grown = method.solve(total, spec)
    assert relative_difference(grown.weight, joint.weight) <= 1e-9
    assert np.allclose(grown.intercept, joint.intercept, atol=1e-10)
    assert len(total.cohort) == 8


@pytest.mark.slow
def test_softmax_goes_on_to_the_joint_optimum(before_and_after, digits):
    old, new, everybody = before_and_after
    method = fs.Softmax(ridge=1.0, tolerance=1e-9, curvature="exact")
    kept, model = method.collect(old), method.fit(old)
    total, _ = united(kept, old.describe(), method.collect(new), new.describe())
    joint, grown = method.fit(everybody), method.after(total, model).fit(everybody)
    assert (
        relative_difference(grown.predict_proba(digits.features), joint.predict_proba(digits.features))
        <= 1e-6
    )
    both = [each.plain()[0] - each.plain()[0].mean(axis=1, keepdims=True) for each in (grown, joint)]
    assert relative_difference(*both) <= 1e-6
    assert {record.kind for record in grown.history} == {"gradient"}


def test_a_warm_start_saves_gradients(before_and_after):
    old, new, everybody = before_and_after
    method = fs.Softmax(ridge=1.0, curvature="bound")
    model = method.fit(old)
    total, _ = united(method.collect(old), old.describe(), method.collect(new), new.describe())
    assert len(method.after(total, model).fit(everybody).history) < len(method.fit(everybody).history)


def test_what_does_not_fit_together_is_refused(before_and_after, digits):
    old, _, everybody = before_and_after
    method = fs.Softmax(ridge=1.0)
    with pytest.raises(fs.DataError, match="9 classes"):
        method.after(method.collect(old), method.fit(old)).fit(everybody)
    words = federate(digits.features, digits.labels.astype(str))
    with pytest.raises(fs.DataError, match="different types"):
        united(method.collect(old), old.describe(), method.collect(words), words.describe())
