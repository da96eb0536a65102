"""Several labels a row: least squares on a matrix of 0 and 1, whoever owns the rows, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from sklearn.datasets import make_multilabel_classification
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.multiclass import OneVsRestClassifier
from statsmodels.datasets import randhie

import fedsolve as fs
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.folds import fold_numbers, row_hashes
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.scoring.evaluation import evaluate
from fedsolve.tables.schema import Schema, from_toml, to_toml
from tests.command import document, fedsolve
from tests.network.pretended import PretendedLink
from tests.oracle import relative_difference

X, Y = make_multilabel_classification(n_samples=1500, n_features=20, n_classes=4, random_state=0)
NAMES = ("edema", "effusion", "fracture", "nodule")
METHODS = (
    fs.AFL(ridge=1.0, intercept=True),
    fs.KernelAFL(landmarks=40, ridge=0.1),
    fs.DeepAFL(layers=2, width=32, intercept=True),
)


def federate(features=X, labels=Y, clients=7, names=NAMES, **options) -> fs.LocalFederation:
    owners = np.random.default_rng(clients).integers(clients, size=len(features))
    return fs.LocalFederation.from_arrays(features, labels, owners, clients, label_names=names, **options)


@pytest.fixture(scope="module")
def health() -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The RAND health insurance experiment: 20,190 years of people, and how they were."""
    table = randhie.load_pandas().data
    features = table[["lncoins", "idp", "lpi", "fmde", "disea"]].to_numpy()
    told = {"good": table.hlthg, "fair": table.hlthf, "poor": table.hlthp}
    told |= {"limited": table.physlm > 0, "saw a doctor": table.mdvis > 0}
    return features, np.column_stack(list(told.values())).astype(int), tuple(told)


def agrees_with_ridge(features, labels, names) -> None:
    model = fs.AFL(ridge=2.0, intercept=True).fit(federate(features, labels, names=names))
    whole = Ridge(alpha=2.0, solver="cholesky").fit(features, labels)
    each = OneVsRestClassifier(RidgeClassifier(alpha=2.0, solver="cholesky")).fit(features, labels)
    scores = model.decision_function(features)
    assert relative_difference(scores, whole.predict(features)) <= 1e-9
    # RidgeClassifier learns -1 and 1 in place of 0 and 1.
    assert relative_difference(2 * scores - 1, each.decision_function(features)) <= 1e-9
    assert np.array_equal(model.predict(features), each.predict(features))
    assert model.labels == names


def test_afl_is_scikit_learns_ridge_of_every_label():
    agrees_with_ridge(X, Y, NAMES)


def test_a_real_table_has_scikit_learns_ridge_of_every_label(health):
    agrees_with_ridge(*health)


def test_a_kernel_machine_solves_all_labels_with_one_gram_matrix():
    model = fs.KernelAFL(landmarks=60, ridge=0.5).fit(federate())
    kernels = model.transform(X)
    weights = KernelRidge(alpha=0.5, kernel="linear").fit(kernels, Y - Y.mean(axis=0))
    assert np.abs(weights.predict(kernels) + Y.mean(axis=0) - model.decision_function(X)).max() <= 1e-6


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.key)
def test_neither_partition_nor_secure_sums_change_the_model(method):
    one = method.fit(federate(clients=1))
    for federation in (federate(clients=12), fs.privacy.SecureFederation(federate())):
        other = method.fit(federation)
        assert relative_difference(other.decision_function(X), one.decision_function(X)) <= 1e-9
        assert federation.evaluate(other) == pytest.approx(one.score(X, Y), abs=1e-12)


def test_a_label_that_few_rows_have_is_refused_by_name_under_secure_sums():
    rare = Y.copy()
    rare[:, 2] = np.arange(len(Y)) == 5
    with pytest.raises(CohortError, match="'fracture' \\(fewest_rows is 10\\)"):
        METHODS[0].fit(fs.privacy.SecureFederation(federate(labels=rare)))


def test_calibrated_probabilities_are_platts_of_every_label():
    model = fs.AFL(ridge=5.0, intercept=True).fit(federate(), calibrate=True)
    # The same rows are held out of a training by hand: fold 0 of three.
    held = fold_numbers(row_hashes(X, Y)) == 0
    trial = Ridge(alpha=5.0).fit(X[~held], Y[~held])
    for place in range(4):
        scores = 2 * trial.predict(X[held])[:, place, None] - 1
        platt = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(scores, Y[held, place])
        expected = [platt.coef_[0, 0], platt.intercept_[0]]
        found = [model.calibration.slope[place], model.calibration.biases[place]]
        assert found == pytest.approx(expected, rel=0.03, abs=0.03)
    assert model.calibration.rows == held.sum()


def test_thresholds_of_rows_held_out_find_the_share_they_promise(tmp_path):
    model = fs.AFL(intercept=True, ridge=1.0).fit(federate(), calibrate=True)
    model.cuts = model.threshold(0.9)
    found = model.predict(X)
    assert ((found == 1) & (Y == 1)).sum(axis=0) / Y.sum(axis=0) == pytest.approx(np.full(4, 0.9), abs=0.06)
    model.save(tmp_path / "model")
    loaded = fs.load_model(tmp_path / "model")
    assert loaded.labels == NAMES
    assert np.array_equal(loaded.predict(X), found)
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert (loaded.calibration.thresholds == model.calibration.thresholds).all()


def test_an_evaluation_is_scikit_learns_label_by_label():
    federation = federate()
    model = fs.DeepAFL(layers=1, width=32).fit(federation, calibrate=True)
    found = evaluate(federation, model, detailed=True)
    shares, called = model.predict_proba(X), model.predict(X)
    for place, (name, one) in enumerate(found.by_label.items()):
        assert name == NAMES[place]
        assert one.accuracy == accuracy_score(Y[:, place], called[:, place])
        assert abs(one.auc - roc_auc_score(Y[:, place], shares[:, place])) <= one.auc_bound + 1e-12
        assert found.as_dict()["labels"][name]["share"] == pytest.approx(Y[:, place].mean())
    assert found.exact == pytest.approx(accuracy_score(Y, called))
    assert found.accuracy == pytest.approx(model.score(X, Y)) == federation.evaluate(model)
    assert model.staged_score(X, Y)[-1] == model.score(X, Y)


@pytest.mark.slow
def test_auto_chooses_among_the_closed_forms():
    model = fs.Auto(methods="afl,softmax,kernelafl").fit(federate(), calibrate=True)
    assert {one.method for one in model.tried} == {"afl", "kernelafl"}
    assert model.predict(X).shape == Y.shape
    assert model.score(X, Y) > fs.AFL(intercept=True).fit(federate()).score(X, Y)


@pytest.mark.parametrize("method", [fs.Softmax(), fs.KernelSoftmax(), fs.APFL(), fs.Private(fs.AFL(), 1.0)])
def test_other_methods_refuse_by_name(method):
    with pytest.raises(DataError, match=f"'{method.key}' learns one label a row, and these have 4"):
        method.fit(federate())


def test_what_is_no_0_or_1_is_refused_by_label_and_row():
    wrong = Y.astype(float)
    wrong[7, 1] = 0.5
    with pytest.raises(DataError, match=r"'effusion' is 0\.5 in row 7"):
        fs.AFL().fit(federate(labels=wrong, clients=1))
    with pytest.raises(DataError, match="label_names"):
        fs.AFL().fit(federate(names=None, task="classification"))


def test_a_schema_over_a_network_has_labels():
    names = [f"x{place}" for place in range(20)]
    schema = Schema.of_numbers(names, labels=NAMES)
    assert from_toml(to_toml(schema)).differences(schema) == []
    sites = [
        Answerer(name, fs.ClientData(X[part], Y[part], schema=schema))
        for name, part in {"north": slice(0, 900), "south": slice(900, None)}.items()
    ]
    settings = {"clients": 2, "interval": 0.001, "grace": 0.0, "patience": 0.05}
    federation = NetworkFederation(PretendedLink(sites), schema=schema, task="regression", **settings)
    model = fs.AFL(ridge=1.0, intercept=True).fit(federation, schema=schema, standardise=False)
    expected = Ridge(alpha=1.0).fit(X, Y).predict(X)
    assert relative_difference(model.decision_function(pandas.DataFrame(X, columns=names)), expected) <= 1e-9
    assert model.labels == NAMES


@pytest.fixture
def tables(tmp_path):
    """A csv to train with and one to test with, labels as numbers and as words, and an owner."""
    table = pandas.DataFrame(X, columns=[f"x{place}" for place in range(20)])
    for place, name in enumerate(NAMES):
        table[name] = Y[:, place] if place else np.where(Y[:, place], "true", "false")
    table["sex"] = np.where(np.arange(len(X)) % 3, "f", "m")
    paths = [tmp_path / "train.csv", tmp_path / "test.parquet"]
    table[:1000].to_csv(paths[0], index=False)
    table[1000:].to_parquet(paths[1])
    return paths


def test_the_command_trains_evaluates_and_predicts(tables, tmp_path):
    train, test = tables
    model, out = tmp_path / "model.safetensors", tmp_path / "out.csv"
    labels = ",".join(NAMES)
    told = document("train", train, "--labels", labels, "--method", "afl", "--out", model, "--test", test)
    assert told["labels"] == list(NAMES)
    seen = document("evaluate", model, test, "--sensitivity", "0.9")
    assert seen["accuracy"] == pytest.approx(told["accuracy"]["test"])
    assert [*seen["labels"]] == [*seen["thresholds"]] == list(NAMES)
    assert fedsolve("predict", model, test, "--probabilities", "--out", out).exit_code == 0
    written = pandas.read_csv(out)
    shown = fs.load_model(model).predict(pandas.read_parquet(test).drop(columns=list(NAMES)))
    assert np.array_equal(written[[f"label_{name}" for name in NAMES]], shown)
    assert written.filter(like="probability_").shape == (500, 4)
    for chosen, method, said in (
        (labels, "softmax", "'softmax' learns one label a row"),
        ("effusion,x1", "afl", "label 'x1' is "),
        ("effusion,sex", "afl", "label 'sex' is 'm' in row"),
    ):
        result = fedsolve("train", train, "--labels", chosen, "--method", method)
        assert result.exit_code == 2
        assert said in result.stderr


@pytest.mark.slow
def test_groups_importance_and_a_page_are_label_by_label(tables, tmp_path):
    train, test = tables
    model, page = tmp_path / "model.safetensors", tmp_path / "page.html"
    words = (
        "--labels",
        ",".join(NAMES),
        "--drop",
        "sex",
        "--method",
        "afl",
        "--no-calibrate",
        "--out",
        model,
    )
    assert fedsolve("train", train, *words).exit_code == 0
    asked = ("--by", "sex", "--importance", "--column", "x0", "--column", "x1", "--html", page)
    seen = document("evaluate", model, test, *asked)
    rows, truth = pandas.read_parquet(test), Y[1000:]
    loaded = fs.load_model(model)
    shown = rows.drop(columns=list(NAMES))
    told, answers = loaded.predict_proba(shown), loaded.predict(shown)
    for place, name in enumerate(NAMES):
        for group in seen["by"]["labels"][name]:
            inside = (rows["sex"] == group["group"]).to_numpy()
            assert group["rows"] == inside.sum()
            assert group["accuracy"] == pytest.approx(np.mean((answers == truth)[inside, place]), abs=1e-12)
            assert group["predicted_share"] == pytest.approx(told[inside, place].mean(), abs=1e-12)
            assert group["observed_share"] == pytest.approx(truth[inside, place].mean(), abs=1e-12)
        assert {"f", "m"} == {group["group"] for group in seen["by"]["labels"][name]}
    for one in seen["importance"]:
        each = one["labels"]
        assert [*each] == list(NAMES)
        for key in ("loss", "accuracy"):
            assert one[key] == pytest.approx(np.mean([own[key] for own in each.values()]), abs=1e-12)
    text = page.read_text()
    for name in NAMES:
        for words in (f"ROC: {name}", f"Calibration: {name}", f"{name}: by sex", f"{name}: measures"):
            assert words in text
    printed = fedsolve("evaluate", model, test, *asked).stdout
    assert all(f"{name}: by sex" in printed and f"{name}: Columns by importance" in printed for name in NAMES)


def test_the_importance_of_a_label_is_that_of_its_own_model():
    model = fs.AFL(ridge=1.0, intercept=True).fit(federate())
    found = {one.column: one for one in fs.feature_importances(federate(), model)}
    assert fs.feature_importances(federate(clients=3), model)[0].column == next(iter(found))
    without = fs.AFL(ridge=1.0, intercept=True).fit(federate(np.where(np.arange(20) == 4, 0.0, X)))
    nothing = {one.column: one for one in fs.feature_importances(federate(), without)}["feature 4"]
    assert all(abs(one.loss) < 1e-9 and abs(one.accuracy) < 1e-9 for one in nothing.labels.values())
    assert set(found["feature 4"].labels) == set(NAMES)


def test_a_proposed_schema_and_an_npz_have_labels(tables, tmp_path):
    schema, npz = tmp_path / "schema.toml", tmp_path / "rows.npz"
    document("schema", tables[0], "--labels", ",".join(NAMES), "--out", schema)
    by_schema = document("train", tables[0], "--schema", schema, "--method", "afl")
    direct = document("train", tables[0], "--labels", ",".join(NAMES), "--method", "afl")
    assert by_schema["accuracy"] == direct["accuracy"]
    np.savez(npz, x=X, y=Y)
    model = tmp_path / "model.safetensors"
    told = document("train", npz, "--labels", ",".join(NAMES), "--method", "afl", "--out", model)
    assert document("evaluate", model, npz)["accuracy"] == pytest.approx(told["accuracy"]["train"])


def test_an_onnx_file_gives_the_same_labels(tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    for calibrate in (False, True):
        model = fs.AFL(intercept=True, ridge=1.0).fit(federate(), calibrate=calibrate)
        model.cuts = np.array([0.5, 0.4, 0.3, 0.6])
        model.to_onnx(tmp_path / "model.onnx")
        session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        names = [edge.name for edge in session.get_outputs()]
        found = dict(zip(names, session.run(None, {"features": X.astype(np.float64)}), strict=True))
        assert np.array_equal(found["label"], model.predict(X))
        assert np.abs(found["probabilities"] - model.predict_proba(X)).max() <= 1e-9
