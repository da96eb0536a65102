"""Calibrated probabilities: the minimiser, the same for any partition, kept by files."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp

import fedsolve as fs
from fedsolve.calibration import Calibration
from fedsolve.federation.folds import fold_numbers, row_hashes
from fedsolve.federation.recipe import exchanges
from fedsolve.privacy.census import OFF
from fedsolve.scoring.calibrating import LEAST_ROWS, SLOPES, Search, calibration_sums
from fedsolve.tables.schema import Column, Schema


def divided(features, labels, clients, seed=0, **more):
    owners = np.random.default_rng(seed).integers(0, clients, len(labels))
    return fs.LocalFederation.from_arrays(features, labels, owners, clients=clients, workers=1, **more)


@pytest.mark.parametrize(("classes", "biases"), [(2, True), (2, False), (4, True), (10, False)])
def test_the_fit_is_the_minimiser(classes, biases):
    rng = np.random.default_rng(classes)
    labels = rng.choice(classes, 300, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    scores = 0.4 * np.eye(classes)[labels] + 0.25 * rng.standard_normal((300, classes))
    weights = rng.uniform(0.5, 2.0, 300)
    spread = 1 / (1 + weights.sum())

    def objective(values):
        logits = values[0] * scores + (values[1:] if biases else 0)
        told = (1 - spread) * logits[np.arange(300), labels] + spread * logits.mean(axis=1)
        return weights @ (logsumexp(logits, axis=1) - told)

    start = np.r_[4.0, np.zeros(classes * biases)]
    best = minimize(objective, start, method="BFGS", options={"gtol": 1e-9})
    slope, found = fitted(scores, labels, weights, biases)
    here = objective(np.r_[slope, found if biases else []])
    assert here - best.fun < 1e-6 * abs(best.fun)
    assert slope == pytest.approx(best.x[0], rel=1e-3)


def test_rows_without_a_mistake_ask_for_no_infinite_slope():
    labels = np.arange(60) % 3
    slope, _ = fitted(np.eye(3)[labels], labels)
    assert slope < SLOPES[-1] / 10


@pytest.mark.parametrize(("classes", "biases"), [(2, True), (2, False), (4, True), (4, False)])
def test_scores_that_carry_nothing_give_the_frequencies_of_the_classes(classes, biases):
    rng = np.random.default_rng(0)
    shares = np.arange(1, classes + 1) / np.arange(1, classes + 1).sum()
    labels = rng.choice(classes, 900, p=shares)
    scores = rng.standard_normal((900, classes))
    slope, found = fitted(scores, labels, biases=biases)
    told = Calibration(slope, found).probabilities(scores)
    seen = np.bincount(labels) / 900
    assert slope > 0
    np.testing.assert_allclose(told.mean(axis=0), seen, atol=0.01)
    losses = [-np.log(each[np.arange(900), labels]).mean() for each in (told, np.tile(seen, (900, 1)))]
    assert losses[0] < losses[1] + 2e-3
    # Of scores that are the wrong way round, too: more of a score never makes a class less probable.
    slope, found = fitted(-2.0 * np.eye(classes)[labels], labels, biases=biases)
    assert slope > 0
    told = Calibration(slope, found).probabilities(-2.0 * np.eye(classes)[labels])
    assert -np.log(told[np.arange(900), labels]).mean() < losses[1] + 0.05


@pytest.mark.parametrize(("signal", "least", "most"), [(0.35, 0.1, 0.9), (3.0, 0.95, 1.0)])
def test_the_best_of_many_is_trusted_less(signal, least, most):
    """By what the best of so many gains by chance: hardly where scores say much."""
    rng = np.random.default_rng(3)
    labels = (rng.random(300) < 0.4).astype(int)
    scores = np.stack([np.zeros(300), signal * labels + rng.standard_normal(300) + 2], axis=1)
    alone, (slope, found) = fitted(scores, labels, biases=True), fitted(scores, labels, biases=True, tried=15)
    assert least < slope / alone[0] < most
    told = Calibration(slope, found).probabilities(scores)
    assert told[:, 1].mean() == pytest.approx(labels.mean(), abs=0.005)


def fitted(scores, codes, weights=None, biases=False, tried=1):
    search = Search(biases, scores.shape[1], tried)
    while search.steps < search.exchanges:
        search.absorb(calibration_sums(scores, codes, search.candidates, weights))
    return search.result()


METHODS = {
    "afl": fs.AFL(ridge=1.0, intercept=True),
    "deepafl": fs.DeepAFL(layers=2, width=32, ridge=10.0),
    "apfl": fs.APFL(width=32, refinement_width=16, ridge=1.0),
}


@pytest.mark.parametrize("name", METHODS)
def test_probabilities_do_not_depend_on_the_partition(digits, name):
    rows = digits.features[:900], digits.labels[:900]
    models = [
        fs.Recipe(METHODS[name], calibrate=True).fit(divided(*rows, *how)) for how in ((1,), (7, 1), (20, 2))
    ]
    first, *others = (model.predict_proba(digits.features) for model in models)
    plain = METHODS[name].fit(divided(*rows, 3))
    for probabilities, model in zip(others, models[1:], strict=True):
        np.testing.assert_allclose(probabilities, first, atol=1e-9)
        scores = model.decision_function(digits.features)
        np.testing.assert_allclose(scores, plain.decision_function(digits.features), atol=1e-9)
    np.testing.assert_allclose(first.sum(axis=1), 1.0)
    assert np.array_equal(first.argmax(axis=1), models[0].decision_function(digits.features).argmax(axis=1))


def test_the_calibration_is_that_of_the_rows_held_out(digits):
    features, labels = digits.features[:800], digits.labels[:800]
    model = METHODS["afl"].fit(divided(features, labels, 5), calibrate=True)
    apart = fold_numbers(row_hashes(features, labels)) == 0
    other = METHODS["afl"].fit(divided(features[~apart], labels[~apart], 3))
    slope, _ = fitted(other.decision_function(features[apart]), labels[apart])
    assert model.calibration.slope == pytest.approx(slope, rel=1e-9)
    assert model.calibration.rows == apart.sum()
    kinds = [record.kind for record in model.history]
    assert kinds == ["classifier", "calibrate", "held-out evaluation", "classifier"]
    assert [record.exchange for record in model.history] == [0, 1, 2, 3]


def test_secure_sums_calibrate_alike(digits):
    pytest.importorskip("cryptography")
    rows = digits.features[:500], (digits.labels[:500] > 4).astype(int)
    plain = fs.Recipe(METHODS["afl"], calibrate=True).fit(divided(*rows, 4))
    federation = fs.privacy.SecureFederation(divided(*rows, 4), limits=OFF)
    secure = fs.Recipe(METHODS["afl"], calibrate=True).fit(federation)
    np.testing.assert_allclose(
        secure.predict_proba(digits.features), plain.predict_proba(digits.features), atol=1e-9
    )
    assert np.array_equal(secure.calibration.thresholds, plain.calibration.thresholds)


def test_tables_with_a_schema_and_class_weights():
    rng = np.random.default_rng(0)
    labels = np.array(["no", "yes"])[(rng.random(1500) < 0.1).astype(int)]
    features = rng.normal(size=(1500, 3)) + 1.2 * (labels == "yes")[:, None]
    features[rng.random((1500, 3)) < 0.05] = np.nan
    schema = Schema(tuple(Column(name) for name in "abc"), "label", ("no", "yes"))
    method = fs.Recipe(fs.AFL(ridge=1.0), schema, class_weight="balanced", calibrate=True)
    models = [method.fit(divided(features, labels, *how, schema=schema)) for how in ((2,), (6, 1))]
    first, second = (model.predict_proba(features) for model in models)
    np.testing.assert_allclose(second, first, atol=1e-9)
    # Weighted, the answer is "yes" far too often; the probabilities know how many there are.
    assert np.mean(models[0].predict(features) == "yes") > 0.2
    assert first[:, 1].mean() == pytest.approx(0.1, abs=0.02)


def test_files_keep_probabilities(digits, tmp_path):
    model = fs.Recipe(METHODS["afl"], calibrate=True).fit(divided(digits.features, digits.labels % 2, 3))
    model.save(tmp_path / "m.safetensors")
    again = fs.load_model(tmp_path / "m.safetensors")
    assert np.array_equal(again.predict_proba(digits.features), model.predict_proba(digits.features))
    assert again.threshold(0.9) == model.threshold(0.9)
    assert again.to_bytes() == model.to_bytes()
    assert repr(again) == "LinearModel(64 features, 2 classes; calibrated)"
    with pytest.raises(fs.DataError, match="held out of training, and this model knows of none"):
        METHODS["afl"].fit(divided(digits.features, digits.labels % 2, 3)).threshold(0.9)


def test_clients_models_of_their_own_are_calibrated(digits, tmp_path):
    owners = fs.partition.dirichlet(digits.labels[:1200], 6, alpha=0.3, seed=0)
    federation = fs.LocalFederation.from_arrays(digits.features[:1200], digits.labels[:1200], owners)
    model = fs.Recipe(METHODS["apfl"], calibrate=True).fit(federation)
    own = model.personal("client-0")
    assert own.calibration is model.own_calibration
    assert own.calibration.slope != model.calibration.slope
    own.save(tmp_path / "own.safetensors")
    again = fs.load_model(tmp_path / "own.safetensors")
    rows = digits.features[1200:]
    assert np.array_equal(again.predict_proba(rows), own.predict_proba(rows))
    assert again.with_balance(0.1).calibration is again.calibration


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "Ditto", "FedPCL"])
def test_gradient_models_and_their_clients_own(digits, name):
    method = getattr(fs.gradient, name)(network="mlp:8", rounds=2, rate=0.5)
    model = fs.Recipe(method, calibrate=True).fit(divided(digits.features[:400], digits.labels[:400], 3))
    predictors = {"shared": model} if model.predicts else {}
    predictors |= {"own": model.personal("client-0")} if model.personalises else {}
    assert predictors
    for predictor in predictors.values():
        probabilities = predictor.predict_proba(digits.features[400:500])
        assert predictor.calibration is not None
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)


def test_a_run_goes_on_from_every_exchange(digits):
    federation = divided(digits.features[:300], digits.labels[:300] % 2, 2)
    method = fs.Recipe(fs.DeepAFL(layers=1, width=8), calibrate=True)
    whole = method.fit(federation)
    for done in range(1, len(whole.history)):
        run = method.start(federation.describe())
        for _ in zip(range(done), exchanges(run, federation), strict=False):
            pass
        resumed = method.start(federation.describe())
        resumed.restore(run.to_bytes(), "here")
        assert len(list(exchanges(resumed, federation))) == len(whole.history) - done
        assert resumed.model().to_bytes() == whole.to_bytes()


def test_too_few_rows_leave_the_model_as_it_is():
    rng = np.random.default_rng(0)
    labels = np.arange(12) % 3
    features = rng.normal(size=(12, 2)) + labels[:, None]
    with pytest.warns(fs.CalibrationWarning, match=f"and {LEAST_ROWS} are the fewest"):
        model = fs.Recipe(fs.AFL(ridge=1.0), calibrate=True).fit(divided(features, labels, 2))
    assert model.calibration is None
    assert np.array_equal(model.weight, fs.AFL(ridge=1.0).fit(divided(features, labels, 2)).weight)
    # A class of which every row is held out: the others are not enough to learn it from.
    features, labels = rng.normal(size=(80, 2)), np.r_[np.zeros(79, dtype=int), 1]
    features[-1] = next(
        row for row in rng.normal(size=(99, 2)) if fold_numbers(row_hashes(row[None], labels[-1:]))[0] == 0
    )
    with pytest.warns(fs.CalibrationWarning, match="not calibrated"):
        model = fs.Recipe(fs.AFL(ridge=1.0), calibrate=True).fit(divided(features, labels, 2))
    assert model.calibration is None
    targets = divided(features, labels.astype(float), 2, task="regression")
    with pytest.warns(fs.CalibrationWarning, match="there are no intervals"):
        model = fs.Recipe(fs.AFL(), calibrate=True).fit(targets)
    assert model.spread is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AFLClassifier", "DeepAFLClassifier"])
def test_estimators_calibrate(digits, kind):
    train, test = slice(0, 1000), slice(1000, None)
    estimator = getattr(fs, kind)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.fit(digits.features[train], digits.labels[train])
        probabilities = estimator.predict_proba(digits.features[test])
    plain = getattr(fs, kind)(calibrate=False).fit(digits.features[train], digits.labels[train])
    true = np.arange(len(probabilities)), digits.labels[test]
    told = probabilities, plain.predict_proba(digits.features[test])
    loss = [-np.log(np.maximum(each[true], 1e-9)).mean() for each in told]
    assert loss[0] < 0.6 * loss[1]
    assert np.array_equal(estimator.predict(digits.features), plain.predict(digits.features))
    few = getattr(fs, kind)().fit(digits.features[:20], digits.labels[:20])
    with pytest.warns(fs.CalibrationWarning, match="too few"):
        few.predict_proba(digits.features[:2])


@pytest.mark.slow
def test_a_method_that_chooses_does_so_once_and_goes_on_from_every_exchange():
    rng = np.random.default_rng(3)
    labels = np.arange(160) % 2
    features = rng.normal(size=(160, 4)) + labels[:, None]
    schema = Schema(tuple(Column(f"x{i}") for i in range(4)), "y", (0, 1))
    federation = divided(features, labels, 2, schema=schema)
    method = fs.Recipe(fs.Auto(methods="softmax"), schema, calibrate=True)
    whole = method.fit(federation)
    kinds = [record.kind for record in whole.history]
    stages = list(dict.fromkeys(record.stage for record in whole.history))
    assert stages == ["preparation", "choice", "calibration", "training"], "folds of the choice calibrate it"
    assert whole.calibration.rows == len(labels)
    chosen = next(tried for tried in whole.tried if tried.chosen)
    assert whole.parameters["ridge"] == chosen.settings["ridge"]
    # The model is that of the chosen method on all rows.
    again = fs.Recipe(fs.Softmax(**whole.parameters), schema).fit(federation)
    assert np.array_equal(whole.decision_function(features), again.decision_function(features))
    for done in range(1, len(kinds)):
        run = method.start(federation.describe())
        for _ in zip(range(done), exchanges(run, federation), strict=False):
            pass
        resumed = method.start(federation.describe())
        resumed.restore(run.to_bytes(), "here")
        assert len(list(exchanges(resumed, federation))) == len(kinds) - done
        assert resumed.model().to_bytes() == whole.to_bytes()


def test_a_budget_of_exchanges_counts_all_stages():
    rng = np.random.default_rng(3)
    labels = np.arange(160) % 2
    features = rng.normal(size=(160, 4)) + labels[:, None]
    for limit in (10, 40):  # 10: of AFL alone, a preparation, its two exchanges twice, 1 and 4 between them
        model = fs.Auto(max_exchanges=limit).fit(divided(features, labels, 2), calibrate=True)
        assert len(model.history) <= limit
        assert model.calibration is not None
    with pytest.raises(fs.DataError, match="afl takes 10 exchanges in all"):
        fs.Auto(max_exchanges=9).fit(divided(features, labels, 2), calibrate=True)
