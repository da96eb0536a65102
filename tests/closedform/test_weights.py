"""Rows and classes that count by weights: in closed forms, in gradient methods, in files and commands."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.preparing import balanced_weights
from fedsolve.tables.schema import from_toml, to_toml
from tests.command import document, fedsolve, refused
from tests.oracle import relative_difference

RNG = np.random.default_rng(0)
ROWS = 120
X = RNG.standard_normal((ROWS, 4))
Y = np.where(X[:, 0] + RNG.standard_normal(ROWS) > 1.2, "ill", "well")
TWICE = RNG.integers(0, 4, ROWS)


def federation(features=X, labels=Y, clients=3, **more):
    owners = np.arange(len(labels)) % clients
    return fs.LocalFederation.from_arrays(features, labels, owners, **more)


def by_class(labels):
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return balanced_weights(counts.astype(float))[codes]


@pytest.mark.parametrize("method", [fs.AFL(ridge=1.0), fs.DeepAFL.trial(), fs.AFL(ridge="auto")])
def test_balanced_classes_are_sample_weights_from_summed_counts(method):
    balanced = fs.Recipe(method, class_weight="balanced").fit(federation())
    weighted = method.fit(federation(clients=5, sample_weight=by_class(Y)))
    assert balanced.schema is None
    assert relative_difference(balanced.decision_function(X), weighted.decision_function(X)) <= 1e-9
    plain = method.fit(federation())
    assert np.sum(balanced.predict(X) == "ill") > np.sum(plain.predict(X) == "ill")


def test_estimators_balance_classes_and_take_weights_by_label():
    shares = {"ill": 3.0, "well": 0.5}
    for made, weights in (
        (fs.AFLClassifier(ridge=1.0, class_weight="balanced"), by_class(Y)),
        (fs.AFLClassifier(ridge=1.0, class_weight=shares), np.array([shares[label] for label in Y])),
    ):
        expected = fs.AFLClassifier(ridge=1.0).fit(X, Y, sample_weight=weights)
        assert relative_difference(made.fit(X, Y).coef_, expected.coef_) <= 1e-9
    for kind in (fs.SoftmaxClassifier, fs.KernelAFLClassifier):
        expected = kind().fit(X, Y, sample_weight=by_class(Y)).decision_function(X)
        np.testing.assert_allclose(
            kind(class_weight="balanced").fit(X, Y).decision_function(X), expected, rtol=1e-9, atol=1e-9
        )
    with pytest.raises(fs.DataError, match="partial_fit"):
        fs.AFLClassifier(class_weight="balanced").partial_fit(X, Y, classes=["ill", "well"])


@pytest.mark.parametrize("network", ["linear", "mlp:5"])
def test_a_row_of_weight_two_is_two_rows_for_a_gradient_method(network):
    pytest.importorskip("torch")
    method = fs.gradient.FedAvg(
        network=network, rounds=3, batch=1000, rate=0.5, precision="float64", momentum=0.5
    )
    owners = np.arange(ROWS) % 3
    weighted = method.fit(
        fs.LocalFederation.from_arrays(
            X, Y, owners, sample_weight=TWICE.astype(float), classes=["ill", "well"]
        )
    )
    repeated = np.repeat(np.arange(ROWS), TWICE)
    plain = method.fit(
        fs.LocalFederation.from_arrays(X[repeated], Y[repeated], owners[repeated], classes=["ill", "well"])
    )
    for name, array in plain.weights.items():
        assert relative_difference(weighted.weights[name], array) <= 1e-9


def test_gradient_methods_balance_classes_or_refuse_by_name():
    pytest.importorskip("torch")
    settings = {"rounds": 20, "rate": 0.5, "batch": 64}
    plain, balanced = (
        method.fit(federation())
        for method in (
            fs.gradient.FedAvg(**settings),
            fs.Recipe(fs.gradient.FedAvg(**settings), class_weight="balanced"),
        )
    )
    assert np.sum(balanced.predict(X) == "ill") > np.sum(plain.predict(X) == "ill")
    with pytest.raises(fs.DataError, match="'fedgen' does not take sample weights"):
        fs.gradient.FedGen(rounds=1).fit(federation(sample_weight=np.ones(ROWS)))


# -- files and commands ----------------------------------------------------------------------------


@pytest.fixture
def csv(tmp_path):
    def write(name, weights):
        rows = [",".join([*map(repr, x), y, str(w)]) for x, y, w in zip(X.tolist(), Y, weights, strict=True)]
        (tmp_path / name).write_text("\n".join(["a,b,c,d,state,times", *rows]))
        return tmp_path / name

    return write


def test_a_column_of_the_schema_says_how_much_a_row_counts(csv, tmp_path):
    data, schema = csv("d.csv", TWICE), tmp_path / "s.toml"
    assert (
        fedsolve("schema", data, "--label", "state", "--weight-column", "times", "--out", schema).exit_code
        == 0
    )
    read = from_toml(schema.read_text())
    assert read.weight == "times"
    assert from_toml(to_toml(read)) == read
    assert read.digest != fs.Schema(read.columns, read.label, read.classes).digest
    out = tmp_path / "m"
    document("train", data, "--schema", schema, "--method", "afl", "--ridge", 1, "--out", out)
    model = fs.load_model(out)
    assert model.schema.weight == "times"
    standard = (X - np.average(X, axis=0, weights=TWICE)) / np.sqrt(
        np.average((X - np.average(X, axis=0, weights=TWICE)) ** 2, axis=0, weights=TWICE)
    )
    expected = fs.AFL(ridge=1.0).fit(federation(standard, sample_weight=TWICE.astype(float)))
    assert relative_difference(model.decision_function(X), expected.decision_function(standard)) <= 1e-9
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(line.rpartition(",")[0] for line in data.read_text().splitlines()))
    assert fedsolve("evaluate", out, bare).exit_code == 0, "weights are for training"
    refused(fedsolve("train", bare, "--schema", schema), 2, "column 'times' is missing")
    refused(fedsolve("train", csv("w.csv", -TWICE), "--schema", schema), 2, "column 'times'", "at least 0")


def test_the_command_balances_classes(csv, tmp_path):
    data = csv("d.csv", np.ones(ROWS, dtype=int))
    words = ("train", data, "--label", "state", "--method", "afl", "--ridge", 1, "--clients", 2)
    predicted = {}
    for name, more in (("plain", ()), ("balanced", ("--class-weight", "balanced"))):
        document(*words, *more, "--out", tmp_path / name)
        rows = np.column_stack([X, np.ones(ROWS)])
        predicted[name] = int(np.sum(fs.load_model(tmp_path / name).predict(rows) == "ill"))
    assert predicted["balanced"] > predicted["plain"]
