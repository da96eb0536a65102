"""Every client on its own test rows: splits of the same distribution, scores, distributions, gains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.scoring.client_scores import ClientScores, client_rows
from tests.conftest import Dataset


@given(st.integers(0, 1000), st.integers(1, 30), st.floats(0.05, 5.0), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_further_rows_follow_the_shares_that_clients_have(
    seed: int, clients: int, alpha: float, classes: int
) -> None:
    rng = np.random.default_rng(seed)
    own, further = rng.integers(0, classes + 1, 600), rng.integers(0, classes + 1, 240)
    owners = fs.partition.dirichlet(own, clients, alpha, seed=seed)
    found = fs.partition.alike(further, own, owners, clients, seed=seed)
    assert found.shape == (240,)
    assert found.min() >= 0
    assert found.max() < clients
    for label in np.unique(further):
        held = np.bincount(owners[own == label], minlength=clients)
        if not held.any():
            continue
        dealt = np.bincount(found[further == label], minlength=clients)
        assert np.all(np.abs(dealt - held / held.sum() * dealt.sum()) <= 1.0)
        assert not np.any(dealt[held == 0])
    assert np.array_equal(found, fs.partition.alike(further, own, owners, clients, seed=seed))


def test_a_class_that_nobody_owns_is_dealt_by_size() -> None:
    owners = np.r_[np.zeros(300, dtype=int), np.ones(100, dtype=int)]
    found = fs.partition.alike(np.full(40, 9), np.zeros(400), owners)
    assert np.bincount(found).tolist() == [30, 10]
    with pytest.raises(DataError, match="one owner per owned row"):
        fs.partition.alike([1], [1, 2], [0])


@given(st.integers(0, 1000), st.integers(1, 20), st.floats(0.1, 0.9))
@settings(max_examples=40, deadline=None)
def test_what_is_held_out_is_a_share_of_every_class_of_every_client(
    seed: int, clients: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 500)
    owners = fs.partition.dirichlet(labels, clients, 0.3, seed=seed)
    tested = fs.partition.held_out(labels, owners, share, seed=seed)
    for client in np.unique(owners):
        assert not tested[owners == client].all()
        for label in range(4):
            rows = (owners == client) & (labels == label)
            assert abs(tested[rows].sum() - share * rows.sum()) <= 1.0
    assert np.array_equal(tested, fs.partition.held_out(labels, owners, share, seed=seed))


def test_single_rows_are_held_out_as_often_as_their_share() -> None:
    labels, owners = np.arange(4000) % 2, np.arange(4000) // 2
    tested = fs.partition.held_out(labels, owners, 0.25)
    assert 0.2 < tested.mean() < 0.3
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(DataError, match="share"):
            fs.partition.held_out(labels, owners, wrong)
    with pytest.raises(DataError, match="one per row"):
        fs.partition.held_out(labels, owners[:3])


def scores(correct: list[int], rows: list[int]) -> ClientScores:
    return ClientScores(tuple(map(str, range(len(rows)))), np.array(correct), np.array(rows))


def test_means_count_clients_and_pooled_counts_rows() -> None:
    found = scores([1, 90, 0], [2, 100, 0])
    np.testing.assert_array_equal(found.accuracies, [0.5, 0.9, np.nan])
    assert found.mean == pytest.approx(0.7)
    assert found.pooled == pytest.approx(91 / 102)
    assert found.as_dict()["rows"] == [2, 100, 0]


def test_the_worst_decile_is_a_tenth_of_the_clients() -> None:
    found = scores(list(range(30)), [100] * 30)
    assert found.worst_decile == pytest.approx(0.01)
    assert scores([3, 9], [10, 10]).worst_decile == pytest.approx(0.3)
    np.testing.assert_allclose(found.quantiles((0.0, 0.5, 1.0)), [0.0, 0.145, 0.29])
    nobody = scores([0], [0])
    assert np.isnan([nobody.mean, nobody.worst_decile, *nobody.quantiles()]).all()


def test_gains_are_of_the_same_clients() -> None:
    np.testing.assert_allclose(scores([5, 9], [10, 10]).gains(scores([4, 10], [10, 10])), [0.1, -0.1])
    with pytest.raises(DataError, match="same clients"):
        scores([5], [10]).gains(scores([5], [11]))


def test_predictors_may_be_models_functions_or_a_stream_of_them(digits: Dataset) -> None:
    owners = fs.partition.dirichlet(digits.labels, 6, 0.5)
    tests = client_rows(digits.features, digits.labels, owners, 6)
    assert [len(test) for test in tests] == np.bincount(owners, minlength=6).tolist()
    assert all(np.shares_memory(test.source, digits.features) for test in tests)
    model = fs.AFL(ridge=1.0).fit(
        fs.LocalFederation.from_arrays(digits.features, digits.labels, owners, workers=1)
    )
    expected = [model.score(digits.features[owners == k], digits.labels[owners == k]) for k in range(6)]
    made = 0

    def one_by_one() -> Iterator[Any]:
        nonlocal made
        for _ in range(6):
            made += 1
            yield model

    for predictors in (model, model.predict, [model] * 6, one_by_one(), [model.predict] * 6):
        np.testing.assert_allclose(fs.client_scores(predictors, tests).accuracies, expected)
    assert made == 6
    with pytest.raises(DataError, match="2 predictors for 6 clients"):
        fs.client_scores([model] * 2, tests)
    with pytest.raises(DataError, match="more than 6 predictors for 6 clients"):
        fs.client_scores([model] * 7, tests)
    with pytest.raises(DataError, match=r"shape \(\d+, 1\) for \d+ rows"):
        fs.client_scores(lambda features: model.predict(features)[:, None], tests)
    with pytest.raises(DataError, match="1 names for 6 clients"):
        fs.client_scores(model, tests, ["a"])


def test_regression_models_have_no_accuracy(digits: Dataset) -> None:
    targets = digits.features[:, 20]
    owners = fs.partition.iid(digits.labels, 4)
    federation = fs.LocalFederation.from_arrays(
        digits.features, targets, owners, task="regression", workers=1
    )
    model = fs.APFL(width=32, refinement_width=16, ridge=1.0).fit(federation)
    tests = client_rows(digits.features, targets, owners, 4)
    for predictors in (model, [model.personal(name) for name in federation.clients]):
        with pytest.raises(DataError, match="regression model"):
            fs.client_scores(predictors, tests)


def test_some_rows_only(digits: Dataset) -> None:
    owners = fs.partition.iid(digits.labels, 4)
    tested = fs.partition.held_out(digits.labels, owners)
    parts = client_rows(digits.features, digits.labels, owners, 4, tested)
    for client, part in enumerate(parts):
        assert np.array_equal(np.sort(part.rows), np.flatnonzero((owners == client) & tested))


def test_personalising_helps_where_clients_differ(digits: Dataset) -> None:
    owners = fs.partition.dirichlet(digits.labels, 15, 0.1, seed=2)
    tested = fs.partition.held_out(digits.labels, owners, seed=2)
    train, tests = (
        client_rows(digits.features, digits.labels, owners, 15, part) for part in (~tested, tested)
    )
    federation = fs.LocalFederation(
        [fs.Participant(f"{k:02d}", part) for k, part in enumerate(train)], workers=1
    )
    model = fs.APFL(width=128, refinement_width=128, balance="auto", ridge=1.0).fit(federation)
    shared = fs.client_scores(model, tests, federation.clients)
    alone = fs.client_scores(
        (model.alone().personal(c) for c in federation.clients), tests, federation.clients
    )
    personal = fs.client_scores((model.personal(c) for c in federation.clients), tests, federation.clients)
    assert personal.mean > shared.mean + 0.01
    assert personal.mean >= alone.mean
    assert np.nanmean(personal.gains(shared)) == pytest.approx(personal.mean - shared.mean)
