"""Partitions: every row exactly once, always an end, and heterogeneity that follows its parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.data import partitions

labels_strategy = st.lists(st.integers(0, 6), min_size=1, max_size=80)

MAKERS: dict[str, Callable[..., Any]] = {
    "iid": lambda y, k, **o: fs.partition.iid(y, k, **o),
    "dirichlet": lambda y, k, **o: fs.partition.dirichlet(y, k, 0.1, **o),
    "dirichlet-tiny": lambda y, k, **o: fs.partition.dirichlet(y, k, 1e-300, **o),
    "dirichlet-huge": lambda y, k, **o: fs.partition.dirichlet(y, k, 1e12, **o),
    "shards": lambda y, k, **o: fs.partition.shards(y, k, 2, **o),
}


@pytest.mark.parametrize("maker", MAKERS)
@given(labels=labels_strategy, clients=st.integers(1, 120), seed=st.integers(0, 2**32))
def test_every_row_has_one_owner(maker: str, labels: list[int], clients: int, seed: int) -> None:
    owners = MAKERS[maker](labels, clients, seed=seed)
    assert owners.shape == (len(labels),)
    assert owners.dtype.kind == "i"
    assert owners.min() >= 0
    assert owners.max() < clients
    np.testing.assert_array_equal(owners, MAKERS[maker](labels, clients, seed=seed))


@pytest.mark.parametrize("maker", MAKERS)
@given(labels=labels_strategy, clients=st.integers(1, 20), data=st.data())
def test_min_size(maker: str, labels: list[int], clients: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(0, len(labels) // clients))
    owners = MAKERS[maker](labels, clients, min_size=least)
    assert np.bincount(owners, minlength=clients).min() >= least


@given(labels=labels_strategy, clients=st.integers(1, 40), data=st.data())
def test_pathological_holds_few_classes(labels: list[int], clients: int, data: st.DataObject) -> None:
    classes = len(set(labels))
    per_client = data.draw(st.integers(min(classes, -(-classes // clients)), classes))
    owners = fs.partition.pathological(labels, clients, per_client)
    table = partitions.class_counts(labels, owners, clients)
    assert table.sum() == len(labels)
    assert (table > 0).sum(axis=1).max() <= per_client


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = np.bincount(fs.partition.iid(np.zeros(103), 10))
    assert sizes.max() - sizes.min() <= 1


def test_shards_hold_few_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    owners = fs.partition.shards(labels, 50, 2)
    table = partitions.class_counts(labels, owners)
    assert np.all(table.sum(axis=1) == 20)
    assert (table > 0).sum(axis=1).max() <= 2


def test_heterogeneity_follows_alpha() -> None:
    labels = np.repeat(np.arange(10), 500)

    def mean(alpha: float) -> float:
        parts = [fs.partition.dirichlet(labels, 20, alpha, seed) for seed in range(3)]
        return float(np.mean([partitions.heterogeneity(labels, owners) for owners in parts]))

    measured = [mean(alpha) for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert all(np.diff(measured) < 0)
    assert measured[0] > 0.75
    assert measured[-1] < 0.05


def test_capped_clients_get_nothing_more_once_they_have_an_equal_share() -> None:
    labels = np.repeat(np.arange(10), 300)
    owners = partitions.dirichlet(labels, 20, alpha=0.3, seed=2, capped=True)
    for client in range(20):
        own = np.bincount(labels[owners == client], minlength=10)
        held = np.cumsum(own)
        # Classes are dealt in order: from the first one that fills the client on, there is nothing more.
        full = np.flatnonzero(held >= len(labels) / 20)
        assert not len(full) or not own[full[0] + 1 :].any()
    free = partitions.dirichlet(labels, 20, alpha=0.3, seed=2)
    assert np.bincount(owners).max() < np.bincount(free).max()
    first = labels == 0
    np.testing.assert_array_equal(owners[first], free[first])


def test_dirichlet_shares_have_the_right_moments() -> None:
    """E[share] = 1/K and Var[share] = (1/K)(1 - 1/K) / (K alpha + 1)."""
    labels = np.zeros(20_000, dtype=int)
    clients, alpha = 5, 0.4
    shares = np.array(
        [
            np.bincount(fs.partition.dirichlet(labels, clients, alpha, seed), minlength=clients) / len(labels)
            for seed in range(800)
        ]
    )
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(shares.mean(axis=0), 1 / clients, atol=5 * np.sqrt(variance / 800))
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.25)


def test_seeds_differ() -> None:
    labels = np.arange(200) % 5
    assert np.any(fs.partition.dirichlet(labels, 10, 0.5, 0) != fs.partition.dirichlet(labels, 10, 0.5, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fs.partition.iid([], 3), "non-empty"),
        (lambda: fs.partition.iid([0, 1], 0), "clients must be at least 1; got 0"),
        (lambda: fs.partition.iid([0, 1], 2, min_size=2), "need 4 rows; there are 2"),
        (lambda: fs.partition.dirichlet([0, 1], 2, 0.0), "alpha must be a finite number > 0"),
        (lambda: fs.partition.dirichlet([0, 1], 2, float("nan")), "alpha must be"),
        (lambda: fs.partition.shards([0, 1], 2, 0), "per_client must be at least 1"),
        (lambda: fs.partition.pathological([0, 1], 2, 3), "in 1 to 2; got 3"),
        (lambda: fs.partition.pathological([0, 1, 2], 2, 1), "cannot hold 3 classes"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fs.DataError, match=message):
        call()
