"""Clients in slots: recorded steps serve other clients, rounds and threads, and give the same numbers.

A stub stands for CUDA's graphs: it replays what was recorded, with the tensors that were there at the time,
so that whatever a client forgets to put in place shows.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.gradient import (
    MOON,
    FedAvg,
    FedGen,
    FedLC,
    FedProx,
    FedRS,
    Scaffold,
    group,
    slots,
)
from fedsolve.gradient.gradient_method import GradientMethod

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def recorded(monkeypatch):
    """Steps are recorded and replayed by a stub; how many were."""
    count = {"recorded": 0, "replayed": 0}

    def capture(work):
        results = work()
        count["recorded"] += 1

        def replay():
            count["replayed"] += 1
            with torch.no_grad():
                for kept, new in zip(results, work_again(work), strict=True):
                    kept.copy_(new)

        # Recording only writes down what to do; the weights move when it is replayed.
        return replay, tuple(result.detach() for result in results)

    def work_again(work):
        with torch.enable_grad():
            return [result.detach().clone() for result in work()]

    def restored(pool, work):
        """As on a GPU: nothing happens to any tensor while it is recorded."""
        network = _weights_of(work)
        before = [tensor.detach().clone() for tensor in network]
        found = capture(work)
        with torch.no_grad():
            for tensor, old in zip(network, before, strict=True):
                tensor.copy_(old)
        return found

    for module in (group, slots):
        monkeypatch.setattr(module, "replays", lambda device: True)
    monkeypatch.setattr(slots, "has_room", lambda device: True)
    monkeypatch.setattr(slots.Pool, "record", restored)
    monkeypatch.setattr(slots, "_POOL", OrderedDict())
    return count


def _weights_of(work):
    """Everything that a recorded step writes: weights, statistics and moments."""
    cells = inspect.getclosurevars(work).nonlocals
    inner = inspect.getclosurevars(cells["advance"]).nonlocals
    learners = cells["step"].group.learners
    return [*learners.network.parameters(), *learners.network.buffers(), *inner["optimiser"]._first]


def federation(workers: int, rows: int = 230, clients: int = 6) -> fs.LocalFederation:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, rows)
    images = np.clip(rng.normal(60 * labels[:, None], 40, (rows, 64)), 0, 255).astype(np.uint8)
    owners = rng.integers(0, clients, rows)
    return fs.LocalFederation.from_arrays(images, labels, owners, clients, workers=workers)


SETTING = {
    "network": "cnn",
    "shape": "1,8,8",
    "rounds": 3,
    "epochs": 2,
    "batch": 8,
    "rate": 0.02,
    "rate_decay": 0.7,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "crop": 1,
    "flip": 0.5,
    "precision": "float64",
    "participation": 0.67,
}
FEEDBACK = {"feedback": "lowest", "feedback_first": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(**SETTING),
        FedGen(**SETTING),
        FedLC(**SETTING, **FEEDBACK),
        FedProx(**SETTING, proximal=0.5, **FEEDBACK),
        FedRS(**SETTING),
        Scaffold(**SETTING),
        MOON(**SETTING),
    ],
    ids=lambda method: method.key,
)
def test_recorded_steps_serve_every_client_and_round(method, recorded, monkeypatch) -> None:
    found = []
    for workers in (1, 3):
        slots._POOL.clear()
        recorded.update(recorded=0, replayed=0)
        found.append(method.fit(federation(workers)))
        assert recorded["replayed"] > recorded["recorded"] > 0
        if method.uses_tensors_only:
            # A size is recorded once in a slot, not once a client, a round and a choice of layers.
            assert recorded["recorded"] <= workers * 8
    monkeypatch.setattr(type(method), "recordable", False)
    wanted = method.fit(federation(1))
    for model in found:
        for name in wanted.weights:
            np.testing.assert_array_equal(model.weights[name], wanted.weights[name])


def test_who_inherits_a_steady_method_says_so_anew(recorded) -> None:
    class Fading(FedAvg):
        def edit(self, step):
            for gradient in step.gradients:
                gradient.mul_(1 / (1 + step.group.round))

    method = Fading(**SETTING)
    assert FedAvg(**SETTING).uses_tensors_only
    assert not method.uses_tensors_only


def test_methods_from_outside_are_recorded_where_they_say_that_nothing_is_drawn_in_a_step(recorded) -> None:
    class Noisy(GradientMethod):
        key = "tests.noisy"

        def losses(self, step):
            return super().losses(step) * np.random.default_rng(step.number).uniform(0.5, 1.5)

    class Plain(GradientMethod):
        key = "tests.plain"
        tensors_only = True

    page = (Path(__file__).parents[2] / "docs" / "how-to-own-method.md").read_text()
    assert re.findall(r"`(\w+): ClassVar\[bool\] = True`", page) == ["tensors_only"]
    assert FedAvg(**SETTING).recordable
    assert Plain(**SETTING).recordable
    assert not Noisy(**SETTING).recordable
    assert not FedAvg(**SETTING | {"optimiser": "adam", "momentum": 0.0}).recordable
    # Its matrices are made in the first pass back.
    assert not FedAvg(**SETTING, **FEEDBACK, feedback_route="direct").recordable


@pytest.mark.slow
def test_another_run_begins_with_nothing_recorded(recorded) -> None:
    first = FedLC(**SETTING)
    other = FedLC(**SETTING | {"weight_decay": 0.0})
    alone = other.fit(federation(1))
    slots._POOL.clear()
    first.fit(federation(1))
    after = other.fit(federation(1))
    for name in alone.weights:
        np.testing.assert_array_equal(after.weights[name], alone.weights[name])


@pytest.mark.parametrize("room", [True, False])
def test_what_an_earlier_run_recorded_makes_way_where_memory_is_short(recorded, monkeypatch, room) -> None:
    monkeypatch.setattr(slots, "has_room", lambda device: room)
    slots._POOL.clear()
    for rate in (0.01, 0.02, 0.03):
        FedAvg(**SETTING | {"rate": rate, "rounds": 1}).fit(federation(1))
    assert sum(map(len, slots._POOL.values())) == (3 if room else 1)


def test_a_slot_keeps_the_graphs_used_last(monkeypatch) -> None:
    monkeypatch.setattr(slots, "MOST", 2)
    kept = slots.Recordings(slots.Pool())
    monkeypatch.setattr(kept, "_recorded", lambda step, advance: advance)
    for size in (1, 2, 1, 3):
        run = kept.stepper(lambda step: None, [size] * 9, False)
        for _ in range(3):
            step = SimpleNamespace(targets=np.zeros((1, size)))
            step.copied = lambda: None
            run(step)
    assert list(kept.graphs) == [(1, False), (3, False)]
