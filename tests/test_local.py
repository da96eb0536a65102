"""The engine in one process: order, bounded terms, names in failures, memory within a budget."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform.layers import LayerFeatures
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import ClientData, Memory, Participant, step
from fedsolve.federation.workspace import Workspace

ROWS = np.zeros((2, 3))
LABELS = np.array([0, 1])


class Counting(Participant):
    """Answers with its index after a while, and counts how many terms exist at a time."""

    alive = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, index: int, delay: float) -> None:
        super().__init__(f"client-{index:03d}", ClientData(ROWS, LABELS))
        self.index = index
        self.delay = delay

    def answer(self, request: Request, workspace: Workspace | None = None) -> Term | Needs:
        with self.lock:
            Counting.alive += 1
            Counting.most = max(Counting.most, Counting.alive)
        time.sleep(self.delay)
        return CountedTerm({"value": np.array([10.0 ** (self.index % 17)])}, {"rows": 1})


class CountedTerm(Term):
    """Leaves the count of living terms when it has been added."""

    @property
    def nbytes(self) -> int:
        with Counting.lock:
            Counting.alive -= 1
        return 8


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_terms_are_added_in_client_order_and_few_exist(workers: int) -> None:
    Counting.alive = Counting.most = 0
    delays = np.random.default_rng(0).uniform(0, 0.004, 40)
    participants = [Counting(i, delays[i]) for i in range(40)]
    federation = fs.LocalFederation(participants[::-1], classes=[0, 1], workers=workers)
    total = federation.exchange(Request("test", 0, 0, federation.clients), Chain())
    expected = 0.0
    for index in range(40):  # floating-point addition in this order and no other
        expected += 10.0 ** (index % 17)
    assert total["value"][0] == expected
    assert total.cohort == federation.clients == tuple(sorted(federation.clients))
    assert Counting.most <= workers + 1


@step("test.fail")
def _fail(data: ClientData, request: Request, memory: Memory) -> Term:
    if len(data) == 1:
        raise RuntimeError("disk on fire")
    return Term({"value": np.ones(1)}, {"rows": len(data)})


def failing_federation(**options: Any) -> fs.LocalFederation:
    owners = np.array([0, 0, 1, 2, 2])
    X = np.arange(10.0).reshape(5, 2)
    return fs.LocalFederation.from_arrays(X, np.array([0, 1, 0, 1, 0]), owners, clients=4, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_is_reported_with_the_participants_name(workers: int) -> None:
    federation = failing_federation(workers=workers)
    with pytest.raises(fs.CohortError, match=r"'client-1' failed in exchange 5 .*disk on fire"):
        federation.exchange(Request("test.fail", 5, 0, federation.clients), Chain())


@pytest.mark.parametrize("workers", [1, 2])
def test_missing_continue_reports_coverage(workers: int) -> None:
    federation = failing_federation(workers=workers, missing="continue")
    total = federation.exchange(Request("test.fail", 5, 0, federation.clients), Chain())
    assert total.cohort == ("client-0", "client-2", "client-3")
    assert total.missing == {"client-1": "RuntimeError: disk on fire"}
    assert total.empty == ("client-3",)
    assert total.count("rows") == 4


def test_min_clients() -> None:
    federation = failing_federation(missing="continue", min_clients=4)
    with pytest.raises(fs.CohortError, match=r"3 of 4 participants answered, at least 4"):
        federation.exchange(Request("test.fail", 5, 0, federation.clients), Chain())


def test_an_unknown_kind_names_the_remedy() -> None:
    federation = failing_federation()
    with pytest.raises(fs.CohortError, match="does not know requests of kind 'nonsense'"):
        federation.exchange(Request("nonsense", 0, 0, federation.clients), Chain())


def test_asking_somebody_absent() -> None:
    federation = failing_federation()
    total = federation.exchange(Request("test.fail", 0, 0, ("client-0", "nobody")), Chain())
    assert total.missing == {"nobody": "not part of the federation"}


def test_participants_join_and_leave() -> None:
    federation = failing_federation()
    gone = federation.remove("client-1")
    assert "client-1" not in federation.clients
    federation.add(gone)
    assert federation.clients == ("client-0", "client-1", "client-2", "client-3")
    with pytest.raises(fs.DataError, match="two participants are called 'client-1'"):
        federation.add(gone)
    with pytest.raises(fs.DataError, match="3 features per row"):
        federation.add(Participant("wide", ClientData(ROWS, LABELS)))
    with pytest.raises(fs.DataError, match="no participant"):
        federation.remove("nobody")


def test_federated_evaluation_equals_direct_score(digits: Any) -> None:
    X, y = digits.features, digits.labels
    names = np.array([f"class {label}" for label in y])
    federation = fs.LocalFederation.from_arrays(X, names, fs.partition.dirichlet(y, 20, 0.1), clients=20)
    model = fs.AFL(ridge=1.0).fit(federation)
    assert federation.evaluate(model) == model.score(X, names)


def test_federated_r_squared_equals_direct_score() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 5))
    y = X @ rng.standard_normal((5, 2)) + 0.1 * rng.standard_normal((300, 2)) + 3.0
    federation = fs.LocalFederation.from_arrays(X, y, fs.partition.iid(np.zeros(300), 7), task="regression")
    model = fs.AFL(intercept=True).fit(federation)
    assert federation.evaluate(model) == pytest.approx(model.score(X, y), abs=1e-12)


class TestMemoryBudget:
    """Phi in memory under the budget, else mapped; F kept only if it fits."""

    def features(self, budget: int, scratch: Path) -> LayerFeatures:
        rng = np.random.default_rng(0)
        X, y = rng.standard_normal((500, 8)), np.arange(500) % 3
        federation = fs.LocalFederation.from_arrays(
            X, y, np.zeros(500, dtype=int), memory_budget=budget, scratch=scratch
        )
        fs.DeepAFL(layers=1, width=32, hidden_width=48).fit(federation)
        (participant,) = federation.participants
        found = participant._memory.cache["deepafl"]
        assert isinstance(found, LayerFeatures)
        return found

    phi, hidden = 500 * 32 * 8, 500 * 48 * 8

    def test_everything_fits(self, tmp_path: Path) -> None:
        features = self.features(self.phi + self.hidden, tmp_path)
        assert not features.mapped
        assert features._hidden is not None

    def test_only_phi_fits(self, tmp_path: Path) -> None:
        features = self.features(self.phi + self.hidden - 1, tmp_path)
        assert not features.mapped
        assert features._hidden is None

    def test_nothing_fits_and_no_file_is_left(self, tmp_path: Path) -> None:
        features = self.features(self.phi - 1, tmp_path)
        assert features.mapped
        assert features._hidden is None
        assert list(tmp_path.iterdir()) == []

    def test_working_memory_does_not_grow_with_rows(self, tmp_path: Path) -> None:
        def peak(rows: int) -> int:
            X = np.zeros((rows, 4), dtype=np.float32)
            X[:, 0] = np.arange(rows) % 7
            y = np.arange(rows, dtype=np.int16) % 2
            federation = fs.LocalFederation.from_arrays(
                X, y, np.zeros(rows, dtype=np.int16), memory_budget=1 << 20, scratch=tmp_path
            )
            tracemalloc.start()
            fs.DeepAFL(layers=1, width=128).fit(federation)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        # 16 times the rows: Phi would take 126 MB more; only labels, codes and the row index may stay.
        small, large = peak(8192), peak(8192 * 16)
        assert large - small < 8192 * 15 * 40
