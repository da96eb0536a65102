"""Runs on, and questions about, a part of every client's rows: the same rows for any partition."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.federation.evaluation import evaluate
from fedsolve.held_out import held_out

HELD, REST = fs.Part("held out", 0.3, "k"), fs.Part("training", 0.3, "k")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400)
    return rng.normal(size=(400, 6)) + labels[:, None] * np.arange(6) / 4, labels


def divided(rows, seed, clients=7, **more):
    features, labels = rows
    owners = np.random.default_rng(seed).integers(0, clients, len(labels))
    return fs.LocalFederation.from_arrays(features, labels, owners, **more)


METHODS = {
    "afl": fs.AFL(),
    "deepafl": fs.DeepAFL(layers=3, width=32),
    "deepafl, lean": fs.DeepAFL(layers=3, width=32, exchange="lean"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_on_a_part_is_the_run_on_those_rows_alone(rows, name):
    features, labels = rows
    kept = ~held_out(features, labels, 0.3, "k")
    alone = METHODS[name].fit(divided((features[kept], labels[kept]), 0))
    for seed in (1, 2):
        model = fs.OnPart(METHODS[name], REST).fit(divided(rows, seed))
        np.testing.assert_allclose(
            model.decision_function(features), alone.decision_function(features), atol=1e-9
        )
    assert not np.allclose(
        METHODS[name].fit(divided(rows, 1)).decision_function(features), alone.decision_function(features)
    )


def test_a_question_about_a_part(rows):
    features, labels = rows
    model = fs.AFL().fit(divided(rows, 0))
    right = model.predict(features) == labels
    chosen = held_out(features, labels, 0.3, "k")
    assert evaluate(divided(rows, 3), model, HELD) == np.mean(right[chosen])
    assert evaluate(divided(rows, 4), model, REST) == np.mean(right[~chosen])


def test_what_is_kept_of_a_part_is_kept_apart_and_goes_with_the_run(rows):
    """One federation, runs on different parts after another: each as if it were the first."""
    features, _ = rows
    method = fs.DeepAFL(layers=2, width=32)
    federation = divided(rows, 5)
    for part in (REST, HELD, None, REST):
        tried = method if part is None else fs.OnPart(method, part)
        fresh, again = tried.fit(divided(rows, 5)), tried.fit(federation)
        np.testing.assert_array_equal(
            again.decision_function(features), fresh.decision_function(features), str(part)
        )


def test_gradient_methods_and_described_rows(rows):
    pytest.importorskip("torch")
    features, labels = rows
    kept = ~held_out(features, labels, 0.3, "k")
    method = fs.gradient.FedAvg(rounds=2, epochs=1)
    owners = np.random.default_rng(1).integers(0, 3, len(labels))
    part = fs.OnPart(method, REST).fit(fs.LocalFederation.from_arrays(features, labels, owners))
    alone = method.fit(fs.LocalFederation.from_arrays(features[kept], labels[kept], owners[kept]))
    np.testing.assert_array_equal(part.decision_function(features), alone.decision_function(features))


def test_marks_are_those_of_the_raw_rows(rows):
    features, labels = rows
    columns = [fs.Column(f"c{number}", "number") for number in range(6)]
    schema = fs.Schema(tuple(columns), label="y", classes=(0, 1, 2))
    data = fs.ClientData(features, labels, schema=schema)
    federation = fs.LocalFederation([fs.Participant("a", data)])
    model = fs.Described(fs.OnPart(fs.AFL(), REST), schema).fit(federation)
    kept = ~held_out(features, labels, 0.3, "k")
    alone = fs.LocalFederation(
        [fs.Participant("a", fs.ClientData(features[kept], labels[kept], schema=schema))]
    )
    expected = fs.Described(fs.AFL(), schema).fit(alone)
    np.testing.assert_allclose(
        model.decision_function(features), expected.decision_function(features), atol=1e-9
    )


def test_a_share_without_sense_is_refused():
    for share in (0.0, 1.0, -1, float("nan")):
        with pytest.raises(DataError, match="share"):
            fs.Part("held out", share)
    with pytest.raises(DataError, match="side"):
        fs.Part("test")  # type: ignore[arg-type]
