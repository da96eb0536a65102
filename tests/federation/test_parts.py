"""Runs on, and questions about, a part of every client's rows: the same rows for any partition."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.federation.folds import fold_numbers, row_hashes
from fedsolve.scoring.evaluation import evaluate

HELD = fs.Part((0,))
REST = HELD.rest


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
    kept = fold_numbers(row_hashes(features, labels)) != 0
    alone = METHODS[name].fit(divided((features[kept], labels[kept]), 0))
    for seed in (1, 2):
        model = fs.Recipe(METHODS[name], part=REST).fit(divided(rows, seed))
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
    chosen = fold_numbers(row_hashes(features, labels)) == 0
    assert evaluate(divided(rows, 3), model, HELD) == np.mean(right[chosen])
    assert evaluate(divided(rows, 4), model, REST) == np.mean(right[~chosen])


def test_what_is_kept_of_a_part_is_kept_apart_and_goes_with_the_run(rows):
    """One federation, runs on different parts after another: each as if it were the first."""
    features, _ = rows
    method = fs.DeepAFL(layers=2, width=32)
    federation = divided(rows, 5)
    for part in (REST, HELD, None, REST):
        tried = method if part is None else fs.Recipe(method, part=part)
        fresh, again = tried.fit(divided(rows, 5)), tried.fit(federation)
        np.testing.assert_array_equal(
            again.decision_function(features), fresh.decision_function(features), str(part)
        )


def test_gradient_methods_and_described_rows(rows):
    pytest.importorskip("torch")
    features, labels = rows
    kept = fold_numbers(row_hashes(features, labels)) != 0
    method = fs.gradient.FedAvg(rounds=2, epochs=1)
    owners = np.random.default_rng(1).integers(0, 3, len(labels))
    part = fs.Recipe(method, part=REST).fit(fs.LocalFederation.from_arrays(features, labels, owners))
    alone = method.fit(fs.LocalFederation.from_arrays(features[kept], labels[kept], owners[kept]))
    np.testing.assert_array_equal(part.decision_function(features), alone.decision_function(features))


def test_marks_are_those_of_the_raw_rows(rows):
    features, labels = rows
    columns = [fs.Column(f"c{number}", "number") for number in range(6)]
    schema = fs.Schema(tuple(columns), label="y", classes=(0, 1, 2))
    data = fs.ClientData(features, labels, schema=schema)
    federation = fs.LocalFederation([fs.Participant("a", data)])
    model = fs.Recipe(fs.AFL(), schema, part=REST).fit(federation)
    kept = fold_numbers(row_hashes(features, labels)) != 0
    alone = fs.LocalFederation(
        [fs.Participant("a", fs.ClientData(features[kept], labels[kept], schema=schema))]
    )
    expected = fs.Recipe(fs.AFL(), schema).fit(alone)
    np.testing.assert_allclose(
        model.decision_function(features), expected.decision_function(features), atol=1e-9
    )


def test_parts_are_unions_of_one_assignment(rows):
    features, labels = rows
    data = fs.ClientData(features, labels)
    for fold in range(3):
        halves = [set(fs.Part((2 * fold + half,), 6).of(data).rows) for half in (0, 1)]
        assert halves[0] | halves[1] == set(fs.Part((fold,)).of(data).rows)
    assert not set(HELD.of(data).rows) & set(REST.of(data).rows)


@pytest.mark.parametrize(
    ("folds", "count"), [((), 3), ((3,), 3), ((-1,), 3), ((0,), 2000), ((0,), 4), ((0,), 0)]
)
def test_folds_that_there_are_not_are_refused(folds, count):
    with pytest.raises(DataError, match="folds"):
        fs.Part(folds, count)


def test_a_choice_or_a_calibration_on_a_part_is_refused():
    with pytest.raises(DataError, match="leave out part="):
        fs.Recipe(fs.AFL(), calibrate=True, part=REST)
