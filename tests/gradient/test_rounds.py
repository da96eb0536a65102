"""Rounds that go wrong: answers that are lost, cohorts without rows, clients that join, runs side by side."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.messages import Term
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import MOON, FedAvg, FedDisco, FedDyn, Scaffold
from fedsolve.gradient import answers as engine
from fedsolve.gradient.watch import Watch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def rows(count: int = 60, classes: int = 3, width: int = 4):
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, width)), rng.integers(0, classes, count)


def federation(clients: int = 4, **how):
    features, labels = rows()
    return fs.LocalFederation.from_arrays(features, labels, np.arange(len(labels)) % clients, **how)


def network():
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(4, 6),
        torch.nn.ReLU(),
        torch.nn.Linear(6, 5),
        torch.nn.ReLU(),
        torch.nn.Linear(5, 3),
    ]
    return torch.nn.Sequential(*layers)


class Losing(fs.LocalFederation):
    """A federation on whose way back some answers get lost, after the client has worked."""

    def lose(self, kind: str, client: str) -> None:
        self.lost = (kind, client)

    def exchange(self, request, chain):
        kind, client = getattr(self, "lost", ("", ""))
        total = super().exchange(request, chain)
        if request.kind != kind or client not in total.cohort:
            return total
        kept = tuple(name for name in request.cohort if name != client)
        again = super().exchange(type(request)(**{**vars(request), "cohort": kept}), chain)
        again.missing[client] = "lost"
        return again


def losing(clients: int = 4) -> Losing:
    return Losing(federation(clients).participants)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_that_fails_in_any_way_names_its_client(workers, monkeypatch):
    real = engine.ClientGroup

    class Failing(real):
        def train(self):
            if "client-3" in self.clients:
                raise RuntimeError("out of paper")
            super().train()

    monkeypatch.setattr(engine, "ClientGroup", Failing)
    with pytest.raises(CohortError, match=r"client-3.*out of paper"):
        FedAvg(rounds=1).fit(federation(workers=workers))
    going = federation(workers=workers, missing="continue")
    model = FedAvg(rounds=1).fit(going)
    assert model.history[0].cohort == ("client-0", "client-1", "client-2")


def test_many_groups_and_a_failure_do_not_hang(monkeypatch):
    features, labels = rows(300)
    many = fs.LocalFederation.from_arrays(features, labels, np.arange(300) % 150, workers=2)
    monkeypatch.setattr(engine.ClientGroup, "train", lambda self: (_ for _ in ()).throw(RuntimeError("no")))
    outcome = []

    def fit():
        try:
            FedAvg(rounds=1).fit(many)
        except CohortError as problem:
            outcome.append(problem)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome


def test_images_in_bytes_are_read_alike_everywhere():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 90)
    images = np.clip(rng.normal(80 * labels[:, None], 30, (90, 16)), 0, 255).astype(np.uint8)
    held = fs.LocalFederation.from_arrays(images, labels, np.arange(90) % 3)
    model = FedAvg(rounds=10, rate=0.5, network="mlp:8", batch=16).fit(held)
    accuracy = model.score(images, labels)
    assert accuracy > 0.8
    assert held.evaluate(model) == accuracy
    data = [participant.data for participant in held.participants]
    assert fs.client_scores(model, data).pooled == pytest.approx(accuracy)


def test_bytes_beside_floats_are_scaled():
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (20, 4), dtype=np.uint8), rng.integers(0, 2, 20)
    floats = (images / 127.5 - 1.0).astype(np.float32)

    def trained(second):
        parts = [
            fs.Participant("a", fs.ClientData(images, labels)),
            fs.Participant("b", fs.ClientData(second, labels)),
        ]
        return FedAvg(rounds=2, precision="float64").fit(fs.LocalFederation(parts)).weights

    mixed, alike = trained(floats), trained(images)
    for name in alike:
        np.testing.assert_allclose(mixed[name], alike[name], rtol=1e-6, atol=1e-7)


def test_a_cohort_without_rows_changes_nothing():
    features, labels = rows()
    owners = np.arange(60) % 3
    sparse = fs.LocalFederation.from_arrays(features, labels, owners, clients=20)
    model = FedAvg(rounds=30, participation=0.1).fit(sparse)
    idle = [record for record in model.history if "loss" not in record.metrics]
    assert idle
    assert all(record.metrics["idle"] == 2 for record in idle)
    assert model.score(features, labels) > 0.4
    with pytest.raises(DataError, match="no client had a batch"):
        FedAvg(rounds=2, batch=64, last_batch="drop").fit(sparse)


def test_a_run_without_checkpoint_leaves_the_states_of_another_alone(tmp_path):
    method = FedDyn(rounds=6, participation=0.5)
    whole = method.fit(federation(), checkpoint=tmp_path / "whole")
    held, path = federation(), tmp_path / "run"

    def stop(record, expected):
        if record.exchange == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(held, checkpoint=path, follow=stop)
    method.fit(held)
    resumed = method.fit(federation(), checkpoint=path, resume=True)
    assert all(np.array_equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


def test_a_client_that_joined_is_found_after_a_restart(tmp_path):
    method, path = Scaffold(rounds=6), tmp_path / "run"
    everybody = federation().participants

    def stop_at(last, joining=None):
        def progress(record, expected):
            if record.exchange == 1 and joining is not None:
                joining.add(everybody[3])
            if record.exchange == last:
                raise KeyboardInterrupt

        return progress

    first = fs.LocalFederation(everybody[:3], classes=[0, 1, 2])
    with pytest.raises(KeyboardInterrupt):
        method.fit(first, checkpoint=path, follow=stop_at(3, first))
    later = fs.LocalFederation(federation().participants, classes=[0, 1, 2])
    assert len(method.fit(later, checkpoint=path, resume=True).history) == 6


def test_drift_is_of_those_who_trained_or_none():
    held = losing()
    held.lose("gradient", "client-0")
    model = FedAvg(rounds=2, track="drift", network="mlp:5", precision="float64").fit(held)
    drift = [record for record in model.history if record.kind == "drift"]
    assert all(record.cohort == ("client-1", "client-2", "client-3") for record in drift)
    alone = fs.LocalFederation(federation().participants[1:])
    direct = FedAvg(rounds=2, track="drift", network="mlp:5", precision="float64").fit(alone)
    found = [record.metrics["drift"] for record in direct.history if record.kind == "drift"]
    assert [record.metrics["drift"] for record in drift] == found
    held = losing()
    held.lose("gradient-drift", "client-1")
    model = FedAvg(rounds=1, track="drift").fit(held)
    assert model.history[-1].metrics["drift"] is None


def test_updates_are_not_kept_after_drift_was_told():
    held = federation()
    FedAvg(rounds=2, track="drift", participation=0.5).fit(held)
    for participant in held.participants:
        _, _, kept = participant.memory.cache.get("move") or ("", 0, 0.0)
        assert isinstance(kept, float)


@pytest.mark.parametrize("track", [None, "drift"])
def test_the_last_round_is_watched(track):
    features, labels = rows()
    watch = Watch(features, labels, every=4)
    model = FedAvg(rounds=6, track=track).fit(federation(), follow=watch)
    seen = [record.step for record in model.history if "test_accuracy" in record.metrics]
    assert seen == [0, 4, 5]


def test_a_lost_answer_between_prelude_and_training_does_not_stop_a_run():
    held = losing(2)
    held.lose("gradient", "client-1")
    labels = np.array([0] * 10 + [1, 2, 0, 1, 2] * 10)
    owners = np.array([0] * 10 + [1] * 50)
    features = np.random.default_rng(0).standard_normal((60, 4))
    held = Losing(fs.LocalFederation.from_arrays(features, labels, owners).participants)
    held.lose("gradient", "client-1")
    model = FedDisco(rounds=2, discrepancy=2.0, offset=0.0).fit(held)
    assert len([record for record in model.history if record.kind == "train"]) == 2


def test_who_comes_first_is_not_disturbed_by_who_came_before():
    """In a stack with clients that have a previous model, one that has none trains as it does alone."""
    method = MOON(network="mlp:5", rounds=2, contrast=5.0)
    late, chain = federation(), None
    run = method.start(late.describe())
    requests = []
    for _ in range(2):
        request = run.request(("client-0", "client-1"))
        requests.append(request)
        run.absorb(late.exchange(request, run.chain))
        chain = run.chain
    asked = type(request)(**{**vars(requests[1]), "cohort": ("client-0", "client-1", "client-2")})
    alone = type(request)(**{**vars(requests[1]), "cohort": ("client-2",)})
    together = late.exchange(asked, chain).term - late.exchange(requests[1], chain).term
    single = Term()
    single.add(late.exchange(alone, chain).term)
    for name, array in single.arrays.items():
        np.testing.assert_allclose(together.arrays[name], array, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("choice", ["lowest", "highest"])
def test_a_round_uses_the_scores_of_the_round_before(choice, count):
    method = FedAvg(network=network(), rounds=4, feedback=choice, feedback_layers=min(count, 2), rate=0.1)
    history = method.fit(federation()).history
    assert "feedback" not in history[0].metrics
    sign = 1 if choice == "lowest" else -1
    for before, after in pairwise(history):
        scores = before.metrics["alignment"]
        wanted = sorted(scores, key=lambda layer: sign * round(scores[layer], 12))[: min(count, 2)]
        assert after.metrics["feedback"] == wanted


def test_skewness_decides_once_and_the_log_tells_what_feedback_did():
    method = FedAvg(network=network(), rounds=4, feedback="skewness", track="drift", rate=0.1)
    history = [record for record in method.fit(federation()).history if record.kind == "train"]
    assert "skewness" in history[0].metrics
    assert all("skewness" not in record.metrics for record in history[1:])
    for record in history[1:]:
        (layer,) = record.metrics["feedback"]
        assert 0.5 < record.metrics["feedback_ratio"][layer] < 2.0
        assert 0.5 < record.metrics["feedback_cosine"][layer] <= 1.0 + 1e-12


def test_names_with_spaces_and_a_network_that_is_one_layer():
    model = FedAvg(network=network(), rounds=2, feedback="2, 4").fit(federation())
    assert model.history[0].metrics["feedback"] == ["2", "4"]
    bare = torch.nn.Linear(4, 3)
    with_it = FedAvg(network=bare, rounds=2, feedback="lowest", feedback_first=True).fit(federation())
    plain = FedAvg(network=bare, rounds=2).fit(federation())
    assert all(np.array_equal(with_it.weights[name], plain.weights[name]) for name in plain.weights)


def test_requests_do_not_name_the_other_clients():
    method = Scaffold(rounds=2)
    held = federation()
    run = method.start(held.describe())
    for _ in exchanges(run, held):
        request = run.request(held.clients)
        if request is not None:
            assert not any(client in str(request.note) for client in held.clients)


def test_terms_with_factors_add_up_on_both_sides():
    left = Term({"w": np.array([1.0], np.float32)}, factors={"w": 2.0})
    right = Term({"w": np.array([1.0], np.float32)}, factors={"w": 4.0})
    left.add(right)
    assert left.arrays["w"].tolist() == [6.0]
    assert (right + right).arrays["w"].tolist() == [8.0]


def test_a_group_that_fails_where_its_clients_do_not_says_so(monkeypatch):
    real = engine.ClientGroup.train

    def train(self):
        if len(self.clients) > 1:
            raise RuntimeError("too many")
        real(self)

    monkeypatch.setattr(engine.ClientGroup, "train", train)
    with pytest.warns(RuntimeWarning, match="could not answer together"):
        model = FedAvg(rounds=1).fit(federation(workers=1))
    assert len(model.history[0].cohort) == 4


def test_what_is_watched_is_the_model_that_comes_out():
    """FedDyn gives the mean of the local models, not the weights it sends next."""
    features, labels = rows()
    model = FedDyn(rounds=3, rate=0.5).fit(federation(), follow=Watch(features, labels))
    assert model.history[-1].metrics["test_accuracy"] == model.score(features, labels)
    both = Watch(features, labels, targets=("global", "aggregated"))
    told = FedDyn(rounds=3, rate=0.5).fit(federation(), follow=both).history[-1].metrics
    assert told["aggregated_test_accuracy"] == model.score(features, labels)
