"""Evaluations and importances: from sums, equal to scikit-learn's on the rows, the same for any partition."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

import fedsolve as fs
from fedsolve.calibration import lower_edges, threshold
from fedsolve.scoring.evaluation import tally
from fedsolve.scoring.importance import feature_importances
from fedsolve.scoring.quality import Evaluation, resampled
from fedsolve.tables.schema import Column, Schema


def divided(features, labels, clients, seed=0, **more):
    owners = np.random.default_rng(seed).integers(0, clients, len(labels))
    return fs.LocalFederation.from_arrays(features, labels, owners, clients=clients, workers=1, **more)


def of(probabilities, codes, classes=None):
    names = np.arange(probabilities.shape[1]) if classes is None else np.array(classes)
    return Evaluation(names, tally(probabilities, probabilities.argmax(axis=1), codes))


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.3), (1, 1.0), (2, 4.0)])
def test_the_measures_of_two_classes_are_those_of_scikit_learn(seed, noise):
    rng = np.random.default_rng(seed)
    codes = (rng.random(700) < 0.2).astype(int)
    second = 1 / (1 + np.exp(-(3 * codes - 2 + noise * rng.standard_normal(700))))
    second[:20] = np.round(second[:20])  # certain, rightly or wrongly
    found = of(np.stack([1 - second, second], axis=1), codes)
    answers = second > 0.5
    assert abs(found.auc - metrics.roc_auc_score(codes, second)) <= found.auc_bound + 1e-12
    assert found.auc_bound < 2e-3
    assert found.accuracy == metrics.accuracy_score(codes, answers)
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(codes, answers))
    assert found.brier == pytest.approx(metrics.brier_score_loss(codes, second))
    assert found.log_loss == pytest.approx(metrics.log_loss(codes, second))
    assert np.array_equal(found.confusion, metrics.confusion_matrix(codes, answers))
    for name, (low, high) in found.intervals.items():
        if name != "ece":  # noise adds to it, never takes away
            assert low <= getattr(found, name) <= high
        assert low <= high

    # The interval of the AUC is that of resampling the rows themselves.
    picks = rng.integers(0, 700, (100, 700))
    again = [metrics.roc_auc_score(codes[pick], second[pick]) for pick in picks]
    np.testing.assert_allclose(found.intervals["auc"], np.quantile(again, (0.025, 0.975)), atol=0.015)


def test_the_measures_of_many_classes_are_those_of_scikit_learn(digits):
    model = fs.Recipe(fs.AFL(ridge=1.0, intercept=True), calibrate=True).fit(
        divided(digits.features, digits.labels, 3)
    )
    federation = divided(digits.features, digits.labels, 5)
    found = fs.evaluate(federation, model, detailed=True)
    told, labels = model.predict_proba(digits.features), digits.labels
    expected = metrics.roc_auc_score(labels, told, multi_class="ovr")
    assert abs(found.auc - expected) <= found.auc_bound
    assert found.auc_bound < 2e-4
    assert found.log_loss == pytest.approx(metrics.log_loss(labels, told))
    assert found.brier == pytest.approx(np.mean(np.sum((told - digits.targets) ** 2, axis=1)))
    assert found.accuracy == fs.evaluate(federation, model) == model.score(digits.features, labels)
    table = found.calibration_table
    assert sum(row["rows"] for row in table) == found.rows
    error = sum(row["rows"] * abs(row["told"] - row["true"]) for row in table) / found.rows
    assert found.ece == pytest.approx(error)
    with pytest.raises(fs.DataError, match="which class"):
        found.at(0.5)
    assert fs.evaluate(federation, model, fs.Part((0,)), detailed=True).rows < 0.4 * found.rows


def test_everything_is_the_same_for_any_partition(digits):
    rows = digits.features[:600], digits.labels[:600] % 2
    model = fs.Recipe(fs.DeepAFL(layers=2, width=24), calibrate=True).fit(divided(*rows, 2))
    first, *others = (
        fs.evaluate(divided(*rows, *how), model, detailed=True) for how in ((1,), (8, 1), (30, 2))
    )
    for other in others:
        for name in ("confusion", "histogram"):
            assert np.array_equal(other.sums[name], first.sums[name])
        for name in ("reliability", "losses"):
            np.testing.assert_allclose(other.sums[name], first.sums[name], rtol=1e-12)
        for name, pair in other.intervals.items():
            np.testing.assert_allclose(pair, first.intervals[name], atol=1e-9)
    columns = ["feature 10", "feature 36", "feature 0"]
    found = [feature_importances(divided(*rows, *how), model, columns=columns) for how in ((1,), (9, 3))]
    for one, other in zip(*found, strict=True):
        assert one.column == other.column
        assert other.loss == pytest.approx(one.loss, abs=1e-9)
        assert (other.error, other.accuracy) == pytest.approx((one.error, one.accuracy), abs=1e-9)
    blank = next(one for one in found[0] if one.column == "feature 0")
    assert (blank.loss, blank.accuracy) == (0.0, 0.0)


def test_a_threshold_finds_the_share_it_was_chosen_for():
    rng = np.random.default_rng(0)
    codes = np.arange(400) % 2
    second = 1 / (1 + np.exp(-(codes - 0.5 + rng.standard_normal(400))))
    found = of(np.stack([1 - second, second], axis=1), codes, ["no", "yes"])
    for wanted in (0.5, 0.9, 0.95, 1.0):
        limit = threshold(found.sums["histogram"][0], wanted)
        called = second >= limit
        reached = found.threshold(limit, wanted)
        assert reached.sensitivity == np.mean(called[codes == 1]) >= wanted
        assert reached.specificity == pytest.approx(np.mean(~called[codes == 0]))
        assert reached.positive == "yes"
        higher = lower_edges(found.sums["histogram"].shape[-1])
        (above, _) = found.at(higher[higher > limit][0])
        assert above < wanted
    with pytest.raises(fs.DataError, match="a sensitivity is a share"):
        threshold(found.sums["histogram"][0], 1.5)
    # The first class, seen from its side.
    assert found.at(0.5, "no") == pytest.approx(found.at(0.5)[::-1])


def test_resampled_counts_keep_their_total_and_depend_on_nothing_else():
    counts = np.array([[5, 0, 7], [0, 1, 0]])
    again = resampled(counts, 50)
    assert np.array_equal(again, resampled(counts.copy(), 50))
    assert (again.sum(axis=(1, 2)) == 13).all()
    assert (again[:, 0, 1] == 0).all()
    assert not resampled(np.zeros((2, 2), dtype=int)).any()


def test_importance_knows_what_matters_and_takes_columns_whole():
    rng = np.random.default_rng(0)
    rows = 1200
    colour = rng.integers(0, 3, rows)
    size, noise = rng.normal(size=rows), rng.normal(size=rows)
    labels = np.where(rng.random(rows) < 0.1, rng.integers(0, 2, rows), (size + (colour == 2) > 0.5))
    columns = (
        Column("colour", "category", categories=("r", "g", "b")),
        Column("size", missing="flag"),
        Column("noise"),
    )
    schema = Schema(columns, "label", (0, 1))
    size[::9] = np.nan
    encoded = np.stack([*np.eye(4)[colour].T, size, np.isnan(size), noise], axis=1)
    labels = labels.astype(int)
    model = fs.Recipe(fs.AFL(ridge=1.0, intercept=True), schema, calibrate=True).fit(
        divided(encoded, labels, 3, schema=schema)
    )
    found = feature_importances(divided(encoded, labels, 3, schema=schema), model)
    assert [one.column for one in found] == ["size", "colour", "noise"]
    assert found[1].loss > 10 * abs(found[2].loss)
    assert abs(found[2].loss) < 3 * found[2].error + 0.005
    again = feature_importances(divided(encoded, labels, 7, 5, schema=schema), model)
    np.testing.assert_allclose([one.loss for one in again], [one.loss for one in found], atol=1e-9)
    with pytest.raises(fs.DataError, match="no column called 'weight'"):
        feature_importances(divided(encoded, labels, 3, schema=schema), model, columns=["weight"])


def test_what_cannot_be_evaluated_is_refused(digits):
    targets = digits.labels.astype(float)
    federation = divided(digits.features, targets, 2, task="regression")
    model = fs.AFL(ridge=1.0).fit(federation)
    with pytest.raises(fs.DataError, match="has no classes, and so no probabilities"):
        model.predict_proba(digits.features)
    wide = np.repeat(digits.features, 5, axis=1)
    model = fs.AFL(ridge=1.0).fit(divided(wide, digits.labels, 2))
    with pytest.raises(fs.DataError, match="320 columns, each of which"):
        feature_importances(divided(wide, digits.labels, 2), model)


def test_a_regression_of_probabilities_is_judged_by_them():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 2))
    y = (rng.random(300) < 1 / (1 + np.exp(-x[:, 0]))).astype(float)
    rows = fs.LocalFederation.from_arrays(x, y, np.arange(300) % 3, task="regression")
    model = fs.GLM("y ~ x0 + x1", family="binomial").fit(rows)
    assert fs.evaluate(rows, model) == pytest.approx(model.score(x, y), abs=1e-12)
    found = fs.evaluate(rows, model, detailed=True)
    assert found.brier == pytest.approx(np.mean((model.predict(x) - y) ** 2), abs=1e-12)
    assert found.calibrated
    other = fs.GLM("exp(y) ~ x0 + x1").fit(rows)
    with pytest.raises(fs.DataError, match="made of columns"):
        fs.evaluate(rows, other)
