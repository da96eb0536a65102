"""The engine in one process: order, bounded terms, names in failures, memory within a budget."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform.deepafl_client import LayerFeatures
from fedsolve.federation.cohort import RunningSum
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import ClientData, Memory, Participant, Workspace, step
from fedsolve.federation.recipe import exchanges

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
        return Term({"value": np.array([10.0 ** (self.index % 17)])}, {"rows": 1})


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_terms_are_added_in_client_order_and_few_exist(workers: int, monkeypatch: Any) -> None:
    Counting.alive = Counting.most = 0
    add = RunningSum.add

    def count(self: RunningSum, answer: Any) -> None:
        add(self, answer)
        with Counting.lock:
            Counting.alive -= 1

    monkeypatch.setattr(RunningSum, "add", count)
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
    with pytest.raises(fs.CohortError, match="requests of kind 'nonsense' are not known"):
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
        found = participant.memory.cache.get("deepafl")
        assert isinstance(found, LayerFeatures)
        return found

    phi, hidden = 500 * 32 * 8, 500 * 48 * 8

    def test_everything_fits(self, tmp_path: Path) -> None:
        features = self.features(self.phi + self.hidden, tmp_path)
        assert not isinstance(features.phi, np.memmap)
        assert features._hidden is not None

    def test_only_phi_fits(self, tmp_path: Path) -> None:
        features = self.features(self.phi + self.hidden - 1, tmp_path)
        assert not isinstance(features.phi, np.memmap)
        assert features._hidden is None

    def test_nothing_fits_and_no_file_is_left(self, tmp_path: Path) -> None:
        features = self.features(self.phi - 1, tmp_path)
        assert isinstance(features.phi, np.memmap)
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


class Misshapen(Participant):
    """Answers with an array of another shape than everybody else."""

    def answer(self, request: Request, workspace: Workspace | None = None) -> Term | Needs:
        return Term({"value": np.ones(3), "other": np.ones(1)}, {"rows": 1})


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_term_that_does_not_fit_is_its_participants_failure(workers: int) -> None:
    plain = [Counting(i, 0.0) for i in range(10)]
    silos = [*plain[:6], Misshapen("client-005x", ClientData(ROWS, LABELS)), *plain[6:]]
    request = Request("test", 0, 0, tuple(s.name for s in silos))
    for _ in range(10):
        federation = fs.LocalFederation(silos, classes=[0, 1], workers=workers)
        with pytest.raises(
            fs.CohortError, match=r"'client-005x' failed.*'value' of 'client-005x' has shape \(3,\)"
        ):
            federation.exchange(request, Chain())
    tolerant = fs.LocalFederation(silos, classes=[0, 1], workers=workers, missing="continue")
    total = tolerant.exchange(request, Chain())
    assert list(total.missing) == ["client-005x"]
    assert total.term.arrays.keys() == {"value"}


def test_an_overflow_does_not_spoil_later_runs() -> None:
    X = np.random.default_rng(0).standard_normal((60, 4)) * 1e200
    federation = fs.LocalFederation.from_arrays(X, np.arange(60) % 2, np.arange(60) % 3)
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(fs.CohortError, match="NaN or infinite"):
        fs.DeepAFL(layers=0, width=12, zero_activation="none").fit(federation)
    fs.DeepAFL(layers=1, width=10).fit(federation)


def test_an_evaluation_between_exchanges_costs_no_catching_up() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((60, 4)), np.arange(60) % 2
    federation = fs.LocalFederation.from_arrays(X, y, np.arange(60) % 3)
    model = fs.AFL(ridge=1.0).fit(federation)
    run = fs.DeepAFL(layers=3, width=8).start(federation.describe())
    for _ in exchanges(run, federation):
        federation.evaluate(model)
    assert [record.catch_up_bytes for record in run.history] == [0] * 7


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("exchange", ["textbook", "lean", "single"])
def test_tracked_accuracy_is_the_staged_score(exchange: str, intercept: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 4))
    y = (X[:, 0] + 0.3 * rng.standard_normal(200) > 1.2).astype(int)
    federation = fs.LocalFederation.from_arrays(X, y, np.arange(200) % 3)
    method = fs.DeepAFL(layers=3, width=16, exchange=exchange, intercept=intercept, track="accuracy")
    model = method.fit(federation)
    staged = model.staged_score(X, y)
    tracked = {r.step: r.accuracy for r in model.history if r.accuracy is not None}
    assert tracked.keys() == ({1, 2} if exchange == "single" else {0, 1, 2})
    for layer, accuracy in tracked.items():
        assert accuracy == staged[layer]


def test_federated_r_squared_keeps_its_digits_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 3))
    y = 1e8 + X @ rng.standard_normal(3) + 0.01 * rng.standard_normal(300)
    federation = fs.LocalFederation.from_arrays(X, y, np.arange(300) % 4, task="regression")
    model = fs.AFL(intercept=True).fit(federation)
    assert federation.evaluate(model) == pytest.approx(model.score(X, y), abs=1e-9)


@pytest.mark.parametrize(
    ("owners", "told"),
    [
        (["a", "a\0", "b", "a"], r"owner 'a\\x00' ends with a NUL"),
        (["a", b"a", "b", "a"], "owners are text, such as 'a', and bytes, such as b'a'"),
        ([b"a", b"\xff", b"b", b"a"], r"owner b'\\xff' is not UTF-8"),
        (["a", None, "b", "a"], "one is empty or of another type"),
        (["a", 1, "b", "a"], "one is empty or of another type"),
        (["a", "", "b", "a"], "one is empty or of another type"),
    ],
)
def test_names_of_owners_that_could_become_one_are_refused(owners, told):
    for given in (owners, np.array(owners, dtype=object)):
        with pytest.raises(fs.DataError, match=told):
            fs.LocalFederation.from_arrays(np.ones((4, 2)), [0, 1, 0, 1], given)


def test_names_of_owners_are_text_or_utf8():
    for owners in (["ü", "a", "x\0y", "ü"], [text.encode() for text in ("ü", "a", "x\0y", "ü")]):
        federation = fs.LocalFederation.from_arrays(np.ones((4, 2)), [0, 1, 0, 1], owners)
        assert federation.client_rows() == {"a": 1, "x\0y": 1, "ü": 2}


def test_whoever_answers_knows_the_steps_of_all_stages() -> None:
    """A site or a worker has imported nothing but what answers; the first request may be of any kind."""
    code = (
        "from fedsolve.federation.participant import kind_of\n"
        "for kind in ('calibrate', 'calibrate-tally', 'lockstep', 'lockstep-comparison', 'evaluate'):\n"
        "    kind_of(kind).step\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("method", [fs.AFL(), fs.DeepAFL(width=8, layers=1)])
def test_a_run_that_is_over_is_gone_at_once(method: Any) -> None:
    """It holds sums, and others of its size may follow."""
    federation = fs.LocalFederation.from_arrays(np.eye(6), np.arange(6) % 2, np.arange(6) % 3)
    run = method.start(federation.describe())
    while (asked := run.request(federation.clients)) is not None:
        run.absorb(federation.exchange(asked, run.chain))
    gc.disable()
    try:
        known = weakref.ref(run)
        del run, asked
        assert known() is None
    finally:
        gc.enable()


def test_replies_that_nobody_takes_hold_no_threads():
    """A generator with threads waits for them where it is collected, perhaps for ever."""
    data = fs.ClientData(np.ones((4, 2)), np.arange(4) % 2)
    members = [fs.Participant(name, data) for name in "abcd"]
    for member in members:
        member.channels["mirror"] = lambda letter: letter
    replies = fs.LocalFederation(members, workers=2).carry("mirror", dict.fromkeys("abcd", b"?"), 100)
    before = threading.active_count()
    assert next(replies) == ("a", b"?")
    assert threading.active_count() == before
    assert [name for name, _ in replies] == ["b", "c", "d"]


def test_labels_that_are_replaced_are_those_trained_on() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 4)), rng.integers(0, 2, 200)
    x[:, 0] += 8.0 * y - 4.0
    federation = fs.LocalFederation.from_arrays(x, y, np.arange(200) % 4)
    for participant in federation.participants:
        participant.data.labels = 1 - participant.data.labels
    assert fs.AFL(ridge=1.0).fit(federation).score(x, 1 - y) > 0.9


def test_the_schema_of_a_federation_is_that_of_the_participants_it_has() -> None:
    plain, described = np.zeros((3, 1)), fs.Schema.of_numbers(("a",), np.array([0, 1]))
    labels = np.array([0, 1, 0])
    federation = fs.LocalFederation([fs.Participant("a", ClientData(plain, labels))])
    assert federation.schema is None
    federation.add(fs.Participant("b", ClientData(plain, labels, schema=described)))
    assert federation.schema is described
    federation.remove("b")
    assert federation.schema is None
