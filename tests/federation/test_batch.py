"""Batches: many clients in one process are made when they are needed, and named when they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform.afl import KIND
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.cohort import RunningSum
from fedsolve.federation.folds import RowCells
from fedsolve.federation.members import BLOCK, MANY, ROWS, SEVERAL, Members, batched
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.participant import ClientData, Workspace
from tests.oracle import ridge

CLIENTS, WIDTH = MANY + 100, 6
FEWER = SEVERAL + 26


def rows(clients: int = CLIENTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows for all clients, some of which have none."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((4 * CLIENTS, WIDTH))
    labels = np.argmax(
        features @ rng.standard_normal((WIDTH, 3)) + rng.standard_normal((len(features), 3)), 1
    )
    owners = rng.integers(0, clients, len(features))
    return features, labels, np.where(owners == 5, 6, owners)


def contents(model: fs.Model) -> dict[str, np.ndarray]:
    return model.contents()[0]


def close(left: fs.Model, right: fs.Model) -> bool:
    one, other = contents(left), contents(right)
    return one.keys() == other.keys() and all(
        np.max(np.abs(one[name] - other[name])) <= 1e-10 * max(1.0, np.max(np.abs(other[name])))
        for name in one
    )


@pytest.mark.parametrize(
    "method",
    [fs.AFL(ridge=0.1, intercept=True, scale="standard"), fs.DeepAFL(layers=2, width=10), fs.Cascade.trial()],
    ids=lambda method: method.key,
)
@pytest.mark.parametrize("clients", [FEWER, CLIENTS])
def test_blocks_give_the_model_of_the_pooled_rows_whatever_the_workers(method, clients):
    features, labels, owners = rows(clients)
    silo = fs.LocalFederation.from_arrays(features, labels, np.zeros(len(labels), dtype=int))
    models = []
    for workers in (1, 3):
        many = fs.LocalFederation.from_arrays(features, labels, owners, clients, workers=workers)
        models.append(method.fit(many))
        assert many.evaluate(models[0]) == silo.evaluate(models[0])
    assert all(np.array_equal(a, b) for a, b in zip(*(contents(m).values() for m in models), strict=True))
    assert close(models[0], method.fit(silo))
    record = models[0].history[0]
    assert len(record.cohort) == clients
    assert len(record.empty) == clients - len(np.unique(owners))


def test_a_client_without_rows_keeps_the_model_of_its_batch_too():
    federation = fs.LocalFederation.from_arrays(*rows(FEWER), FEWER)
    made = [federation[name] for name in ("client-04", "client-05")]
    fs.AFL().fit(federation)
    assert len(made[0]) > len(made[1]) == 0
    assert [len(one.memory.chain) for one in made] == [1, 1]


def in_batches(names: list[str], rows, everybody: bool = True, **more) -> list[tuple[str, ...]]:
    return batched(names, rows, Request(KIND, 0, 0, ()), Chain(), everybody=everybody, **more)


def test_batches_are_of_neighbours_and_large_enough():
    names = [f"{number:04d}" for number in range(MANY)]
    sizes = dict.fromkeys(names[:SEVERAL], 0) | dict(
        zip(names, (700, 400, 0, 9 * ROWS, ROWS // 4 - 1, 0, 5), strict=False)
    )
    found = in_batches(names[:SEVERAL], sizes.__getitem__)
    assert [len(batch) for batch in found] == [2, 2, 3, SEVERAL - 7]
    even = in_batches(names[:400], lambda name: 100)
    lengths = [len(batch) for batch in even]
    assert [name for batch in even for name in batch] == names[:400]
    assert lengths[0] == 11
    assert lengths[-2] == 3
    assert lengths == sorted(lengths[:-1], reverse=True) + lengths[-1:]
    for few, everybody in ((names[: SEVERAL - 1], True), (names[:-1], False)):
        assert in_batches(few, lambda name: 1, everybody) == [(name,) for name in few]
    assert [len(batch) for batch in in_batches(names, lambda name: 1, False)] == [BLOCK] * (MANY // BLOCK)


def test_clients_of_a_device_are_one_batch_where_everybody_is_asked():
    names, places = ["a", "b", "c", "d"], {"a": "cuda:1", "b": "cpu", "c": "cuda:0", "d": "cuda:1"}
    found = in_batches(names, lambda name: 1, device_of=places.__getitem__)
    assert found == [("c",), ("a", "d"), ("b",)]
    assert in_batches(names, lambda name: 1, False, device_of=places.__getitem__) == [(n,) for n in names]


def test_a_part_of_the_clients_is_asked_one_by_one(monkeypatch):
    features, labels, owners = rows(FEWER)
    asked, answer = [], fs.Participant.answer
    monkeypatch.setattr(
        fs.Participant, "answer", lambda self, *given: (asked.append(self.name), answer(self, *given))[1]
    )
    federation = fs.LocalFederation.from_arrays(features, labels, owners, FEWER)
    fs.DeepAFL(layers=1, width=8, participation=0.9).fit(federation)
    assert not any(" to " in name for name in asked)
    fs.DeepAFL(layers=1, width=8).fit(federation)
    assert any(" to " in name for name in asked)


@pytest.mark.parametrize("clients", [FEWER, CLIENTS])
def test_traffic_is_that_of_every_client_by_itself(clients):
    features, labels, owners = rows(clients)
    many = fs.LocalFederation.from_arrays(features, labels, owners, clients)
    one = fs.LocalFederation.from_arrays(features, labels, np.zeros(len(labels), dtype=int))
    method = fs.DeepAFL(layers=1, width=8)
    for mine, single in zip(method.fit(many).history, method.fit(one).history, strict=True):
        assert (mine.bytes_up, mine.bytes_down) == (clients * single.bytes_up, clients * single.bytes_down)


@pytest.mark.parametrize("clients", [FEWER, CLIENTS])
def test_a_client_of_a_block_that_fails_is_named_and_left_out(clients):
    features, labels, owners = rows(clients)
    bad = int(np.flatnonzero(owners == 77)[0])
    features[bad] = 1e200  # finite; its square is not
    stopped = fs.LocalFederation.from_arrays(features, labels, owners, clients)
    name = stopped.clients[77]
    with pytest.raises(CohortError, match=f"'{name}' failed"):
        fs.AFL(ridge=0.1).fit(stopped)
    going = fs.LocalFederation.from_arrays(features, labels, owners, clients, missing="continue")
    model = fs.AFL(ridge=0.1).fit(going)
    rest = owners != 77
    assert name not in model.history[0].cohort
    expected = ridge(features[rest], np.eye(3)[labels[rest]], 0.1)
    assert np.allclose(contents(model)["weight"], expected, rtol=0, atol=1e-10)


def test_clients_that_join_leave_or_change_are_not_lost_in_blocks():
    features, labels, owners = rows()
    federation = fs.LocalFederation.from_arrays(features, labels, owners, CLIENTS)
    fs.AFL(ridge=0.1).fit(federation)
    gone = federation.remove("client-0003")
    assert "client-0003" not in federation.clients
    federation.add(fs.Participant("client-0003", fs.ClientData(features[:7], labels[:7])))
    assert len(gone) == np.sum(owners == 3)
    expected = np.concatenate([np.flatnonzero(owners != 3), np.arange(7)])
    found = contents(fs.AFL(ridge=0.1).fit(federation))["weight"]
    assert np.allclose(found, ridge(features[expected], np.eye(3)[labels[expected]], 0.1), rtol=0, atol=1e-10)
    assert federation.client_rows()["client-0003"] == 7
    with pytest.raises(DataError, match="two participants"):
        federation.add(gone)


def test_a_client_that_may_refuse_is_asked_itself():
    features, labels, owners = rows(FEWER)
    federation = fs.LocalFederation.from_arrays(features, labels, owners, FEWER, missing="continue")
    fs.AFL(ridge=0.1).fit(federation)  # a batch with its rows is known

    def refuse(*_: object) -> None:
        raise PermissionError("not for you")

    in_cells = federation.participants[3]
    codes = labels[owners == 3]
    cells = RowCells(codes, np.zeros_like(codes), np.ones_like(codes))
    in_cells.data = in_cells.data.within(cells)
    asked, answer = [], in_cells.answer
    in_cells.answer = lambda *question, **how: asked.append(question) or answer(*question, **how)
    federation.participants[40].guard = refuse
    model = fs.AFL(ridge=0.1).fit(federation)
    assert model.history[0].missing == {federation.clients[40]: "PermissionError: not for you"}
    assert len(asked) == 1  # it was asked itself, not with its rows in a batch
    rest = owners != 40
    expected = ridge(features[rest], np.eye(3)[labels[rest]], 0.1)
    assert np.allclose(contents(model)["weight"], expected, rtol=0, atol=1e-10)


def test_a_batch_answers_with_one_term_in_the_name_of_all():
    features, labels, owners = rows(FEWER)
    federation = fs.LocalFederation.from_arrays(features, labels, owners, FEWER)
    run = fs.AFL(ridge=0.1).start(federation.describe())
    request = run.request(federation.clients)
    names = federation.clients[:6]
    members = Members(federation.partition)
    found = []
    for union in (True, False):
        if not union:
            members[names[2]].data = ClientData(*(part[owners == 2] for part in (features, labels)))
        (batch,) = members.batches([names], request, run.chain)
        assert (batch.union is not None) == union
        answers, failed = batch.ask(request, run.chain, Workspace(), RunningSum())
        assert not failed
        found += answers
    for one in found:
        assert (one.clients, one.empty) == (names, (names[5],))
        assert one.bytes_up == len(names) * one.term.nbytes
    for name, array in found[0].term.arrays.items():
        half = np.triu if name in found[0].term.symmetric else np.asarray
        assert np.allclose(half(array), half(found[1].term.arrays[name]), rtol=1e-12)


_MEASURED = """
import json, sys, time
import numpy as np
from benchmarks.scale import measure_clients
print(json.dumps(measure_clients("fedsolve", 20000, 5, 16)))
"""


@pytest.mark.slow
def test_a_client_that_only_takes_part_in_sums_takes_no_memory(tmp_path: Path):
    """20,000 clients: by participants of their own they would take about 45 MB."""
    root = Path(__file__).parents[2]
    line = [sys.executable, "-c", _MEASURED]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=root)
    found = json.loads(done.stdout)
    assert found["above_rows"] < 40
