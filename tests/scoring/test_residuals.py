"""Evaluations and intervals of regressions, from sums, against numpy and scikit-learn on pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

import fedsolve as fs
from fedsolve.calibration import STEPS, Spread
from fedsolve.scoring.evaluation import evaluation_of
from fedsolve.scoring.residuals import FEWEST, RegressionEvaluation

X, Y = load_diabetes(return_X_y=True)
METHODS = {
    "afl": fs.AFL(ridge="auto", intercept=True),
    "kernelafl": fs.KernelAFL(64, ridge=0.1, scale="standard"),
    "deepafl": fs.DeepAFL(layers=2, width=24, scale="standard", intercept=True),
}


def divided(seed, clients, rows=slice(None), targets=Y):
    owners = np.random.default_rng(seed).integers(0, clients, len(X[rows]))
    return fs.LocalFederation.from_arrays(
        X[rows], targets[rows], owners, clients, workers=1, task="regression"
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_partition_gives_the_same_regression_with_the_same_intervals(name):
    one, other = (METHODS[name].fit(divided(s, c), calibrate=True) for s, c in ((0, 1), (5, 9)))
    size = np.abs(one.predict(X)).max()
    np.testing.assert_allclose(one.predict(X) / size, other.predict(X) / size, atol=1e-9)
    np.testing.assert_allclose(one.spread.scale, other.spread.scale, rtol=1e-9)
    assert np.array_equal(one.spread.counts, other.spread.counts)
    low, high = one.predict_interval(X[:5], 0.9)
    np.testing.assert_allclose((low + high) / 2, one.predict(X[:5]))
    told = fs.evaluate(divided(3, 4), one, detailed=True)
    assert isinstance(told, RegressionEvaluation)
    # A client tells no mean of a bin with few of its rows; everything else is the same.
    pooled = evaluation_of(one, X, Y)
    assert {r["rows"] for r in told.residuals} != {r["rows"] for r in pooled.residuals}
    assert told.coverage() == pytest.approx(pooled.coverage(), abs=1e-12)
    for measure, value in pooled.measures().items():
        assert getattr(told, measure) == pytest.approx(value, abs=1e-9 * size)


def test_measures_are_those_of_scikit_learn_and_intervals_those_of_the_bootstrap():
    model = METHODS["afl"].fit(divided(0, 3), calibrate=True)
    found, predicted = evaluation_of(model, X, Y), model.predict(X)
    assert found.r2 == pytest.approx(r2_score(Y, predicted), abs=1e-12)
    assert found.mae == pytest.approx(mean_absolute_error(Y, predicted), rel=1e-12)
    assert found.rmse == pytest.approx(mean_squared_error(Y, predicted) ** 0.5, rel=1e-12)
    assert fs.evaluate(divided(0, 3), model) == pytest.approx(found.r2, abs=1e-9)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(Y), len(Y)) for _ in range(2000)]
    again = {
        "r2": [r2_score(Y[rows], predicted[rows]) for rows in drawn],
        "mae": [mean_absolute_error(Y[rows], predicted[rows]) for rows in drawn],
        "rmse": [mean_squared_error(Y[rows], predicted[rows]) ** 0.5 for rows in drawn],
    }
    for name, values in again.items():
        low, high = np.quantile(values, [0.025, 0.975])
        np.testing.assert_allclose(found.intervals[name], (low, high), atol=0.12 * (high - low))
    rows = next(one for one in found.residuals if one["from"] <= 150 < one["to"])
    inside = (predicted >= rows["from"]) & (predicted < rows["to"])
    assert rows["rows"] == inside.sum()
    assert rows["mean"] == pytest.approx((Y - predicted)[inside].mean())
    assert all(one["rows"] >= FEWEST for one in found.residuals)


def test_intervals_hold_as_many_truths_as_they_say():
    rng = np.random.default_rng(1)
    shares = []
    for _ in range(20):
        features = rng.normal(size=(1200, 3))
        targets = features @ [1.0, -2.0, 0.5] + rng.standard_t(4, 1200)
        model = fs.AFL(intercept=True).fit(
            fs.LocalFederation.from_arrays(features[:300], targets[:300], np.arange(300) % 4, workers=1),
            calibrate=True,
        )
        shares.append([])
        for level in (0.5, 0.8, 0.95):
            low, high = model.predict_interval(features[300:], level)
            shares[-1].append(np.mean((targets[300:] >= low) & (targets[300:] <= high)))
    np.testing.assert_allclose(np.mean(shares, axis=0), (0.5, 0.8, 0.95), atol=0.02)


def test_levels_beyond_the_rows_are_refused_and_files_keep_intervals(tmp_path):
    model = METHODS["afl"].fit(divided(0, 3, slice(0, 200)), calibrate=True)
    model.save(tmp_path / "m.safetensors")
    again = fs.load_model(tmp_path / "m.safetensors")
    assert np.array_equal(again.predict_interval(X), model.predict_interval(X))
    with pytest.raises(fs.DataError, match=r"a level of at most 0\.9"):
        model.predict_interval(X, 0.999)
    with pytest.raises(fs.DataError, match="intervals follow from rows that were held out"):
        METHODS["afl"].fit(divided(0, 3)).predict_interval(X)
    counts = np.zeros((1, len(STEPS) + 1))
    counts[0, :4] = 25
    known = Spread(np.zeros(1), np.ones(1), np.full(1, 2.0), counts, 100)
    # The 51st of 100 errors: one past the second of four bins.
    assert known.reach(0.5)[0] == pytest.approx(2.0 * (0.5 + 0.25 / 25))


def test_a_run_with_intervals_is_resumed_where_it_stopped(tmp_path):
    recipe = fs.Recipe(METHODS["kernelafl"], calibrate=True)
    whole = recipe.fit(divided(0, 3))
    federation, run = divided(0, 3), recipe.start(divided(0, 3).describe())
    while True:
        again = recipe.start(federation.describe())
        again.restore(run.to_bytes(), "test")
        run = again
        asked = run.request(federation.clients)
        if asked is None:
            break
        run.absorb(federation.exchange(asked, run.chain))
    assert run.model().to_bytes() == whole.to_bytes()


def test_secure_sums_give_the_same_intervals():
    # In cells, rows have other folds where they are few; of so many all have three, as in the open.
    features = np.random.default_rng(6).normal(1.0, 1.0, (900, 3))
    targets = features @ [1.0, 2.0, -1.0] + np.random.default_rng(7).normal(size=900)
    federation = fs.LocalFederation.from_arrays(features, targets, np.arange(900) % 4, workers=1)
    plain = METHODS["afl"].fit(federation, calibrate=True)
    secure = METHODS["afl"].fit(fs.privacy.SecureFederation(federation), calibrate=True)
    np.testing.assert_allclose(secure.predict(features), plain.predict(features), rtol=1e-6)
    np.testing.assert_allclose(secure.spread.reach(), plain.spread.reach(), rtol=0.05)
    told = fs.evaluate(fs.privacy.SecureFederation(federation), plain, detailed=True)
    assert told.r2 == pytest.approx(plain.score(features, targets), abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_secure_sums_of_centred_columns_are_exact_enough(name):
    # Their sums are rounding and nothing else, which is no reason to refuse them.
    assert np.abs(X.sum(axis=0)).max() < 1e-12
    secure = METHODS[name].fit(fs.privacy.SecureFederation(divided(0, 4)))
    np.testing.assert_allclose(secure.predict(X), METHODS[name].fit(divided(0, 4)).predict(X), rtol=1e-6)


def test_auto_takes_the_cheapest_of_equals_for_numbers_too():
    features = np.random.default_rng(2).normal(size=(400, 4))
    noise = np.random.default_rng(3).normal(size=400)
    owners = np.arange(400) % 5
    straight = features @ [1.0, 2.0, 0.0, -1.0] + noise
    bent = np.sin(2 * features[:, 0]) * 3 + features[:, 1] ** 2 + 0.1 * noise
    found = [
        fs.Auto().fit(fs.LocalFederation.from_arrays(features, targets, owners))
        for targets in (straight, bent)
    ]
    chosen = [next(one for one in model.tried if one.chosen) for model in found]
    assert [one.method for one in chosen] == ["afl", "kernelafl"]
    least = min(one.loss for one in found[1].tried)
    assert chosen[1].loss == pytest.approx(least)
    assert all(one.errors is None for one in chosen)


def test_importance_of_columns_is_the_rise_of_the_error():
    rng = np.random.default_rng(4)
    features = rng.normal(size=(600, 3))
    targets = 3 * features[:, 0] + features[:, 1]
    federation = fs.LocalFederation.from_arrays(features, targets, np.arange(600) % 3)
    found = fs.feature_importances(federation, fs.AFL(intercept=True).fit(federation))
    assert [one.column for one in found] == ["feature 0", "feature 1", "feature 2"]
    # Replaced by an independent draw: twice the variance that the column explains.
    assert found[0].loss == pytest.approx(18, rel=0.15)
    assert found[2].loss == pytest.approx(0, abs=1e-9)
