"""The engine under every gradient method: what FedAvg must equal, and what must not change anything."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.errors import CohortError, DataError, DivergenceError
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.participant import Workspace
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import answers as engine
from fedsolve.gradient.fedacg import FedACG
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedavgm import FedAvgM
from fedsolve.gradient.feddyn import FedDyn
from fedsolve.gradient.fedfisher import FedFisher
from fedsolve.gradient.fedgen import FedGen
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.optimisers import Optimiser, clip_norms
from fedsolve.gradient.scaffold import Scaffold
from tests.gradient import plain
from tests.gradient.plain import far, federation, finished, network, newest, rows, same_bits, uneven

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch

each_network = pytest.mark.parametrize("name", plain.NETWORKS)


class Normalised(nn.Module):
    """A network with BatchNorm, float64."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(plain.WIDTH, 5)
            self.norm = nn.BatchNorm1d(5, momentum=momentum)
            self.last = nn.Linear(5, plain.CLASSES)
        self.double()

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def fedavg(name: str, **parameters: Any) -> FedAvg:
    return FedAvg(network=network(name), **{"precision": "float64", "rate": 0.3, "rounds": 3} | parameters)


def averaged(method: Any, fed: Any, outputs: int = plain.CLASSES) -> dict[str, Any]:
    """FedAvg written out: the global weights after all rounds."""
    current = plain.weights(plain.built(method, outputs))
    for round_ in range(method.rounds):
        clients = plain.trained(method, fed, current, round_, outputs=outputs).values()
        shares = [c.rows if method.weighting == "size" else 1.0 for c in clients]
        current = plain.mean([c.weights for c in clients], shares)
    return current


# -- FedAvg is gradient descent ---------------------------------------------------------------------


@each_network
def test_one_client_with_a_full_batch_is_gradient_descent_bit_for_bit(name: str) -> None:
    features, labels = rows(40, dtype="float32")
    own = plain.module().float() if name == "module" else name
    method = FedAvg(network=own, rounds=10, batch=40, rate=0.3)
    found = method.fit(federation(features, labels, np.zeros(40, int))).weights
    net, inputs, targets = plain.built(method), torch.from_numpy(features), torch.from_numpy(labels)
    # Heads are multiplied as stacks, here of one: a batched product sums in an order of its own.
    stack = [nn.Parameter(p.detach()[None]) for p in net.parameters()]

    def head() -> Any:
        hidden = inputs[None]
        for layer in range(0, len(stack), 2):
            hidden = torch.relu(hidden) if layer else hidden
            hidden = torch.matmul(hidden, stack[layer].mT) + stack[layer + 1].unsqueeze(-2)
        return hidden[0]

    optimiser = torch.optim.SGD(net.parameters() if name == "module" else stack, lr=0.3)
    for _ in range(10):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs) if name == "module" else head(), targets).backward()
        optimiser.step()
    expected = plain.weights(net)
    if name != "module":
        expected = {n: w[0].detach() for n, w in zip(expected, stack, strict=True)}
    assert same_bits(found, expected)


@each_network
@pytest.mark.parametrize("batch", [64, 2000])
def test_full_batches_of_one_step_are_gradient_descent_on_the_union(name: str, batch: int) -> None:
    features, labels = rows(40)
    method = fedavg(name, rounds=6, batch=batch)
    found = method.fit(federation(features, labels, uneven())).weights
    net = plain.built(method)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(torch.from_numpy(features)), torch.from_numpy(labels)).backward()
        optimiser.step()
    assert far(found, plain.weights(net)) < 1e-10


SETTINGS: list[dict[str, Any]] = [
    {"batch": 4, "epochs": 2},
    {"batch": 7, "momentum": 0.9, "weight_decay": 0.01, "rate_decay": 0.7},
    {"batch": 4, "clip": 0.3, "weighting": "uniform"},
    {"batch": 5, "optimiser": "adam", "weight_decay": 0.1, "rate": 0.02, "epochs": 2},
    {"batch": 3, "participation": 0.5, "rounds": 5, "seed": 3},
    {"batch": 4, "last_batch": "drop", "epochs": 2, "momentum": 0.5},
]


@each_network
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting))
def test_fedavg_equals_its_plain_form(name: str, setting: dict[str, Any]) -> None:
    """Clients of 1, 4, 12 and 23 rows: with last_batch "drop" the first is idle."""
    features, labels = rows(40)
    owners = np.repeat(np.arange(4), [1, 4, 12, 23])
    method = fedavg(name, **setting)
    fed = federation(features, labels, owners)
    assert far(method.fit(fed).weights, averaged(method, fed)) < 1e-10


def test_the_rate_decays_from_round_to_round() -> None:
    features, labels = rows(40)
    method = fedavg("linear", rate_decay=0.5, batch=64)
    net, lengths = plain.built(method), []
    before = plain.weights(net)
    for run in plain.run(method, federation(features, labels, np.zeros(40, int))):
        gradient = plain.gradient(net, before, torch.from_numpy(features), torch.from_numpy(labels))
        after = {n: torch.from_numpy(w) for n, w in run.server.weights.items()}
        name = "classifier.weight"
        lengths.append(float(((before[name] - after[name]) / gradient[name]).median()))
        before = after
    assert lengths == pytest.approx([0.3, 0.15, 0.075], rel=1e-10)


# -- what must not matter ---------------------------------------------------------------------------


@each_network
def test_permuted_clients_give_the_same_model(name: str) -> None:
    features, labels = rows(40)
    owners, order = uneven(), np.array([2, 0, 3, 1])
    method = fedavg(name, epochs=3)  # one batch per client: its order is no chance
    left = method.fit(federation(features, labels, owners)).weights
    right = method.fit(federation(features, labels, order[owners])).weights
    assert far(left, right) < 1e-12


@each_network
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_identical_clients_are_one(name: str, weighting: Any) -> None:
    features, labels = rows(15)
    method = fedavg(name, epochs=3, momentum=0.5, weighting=weighting)
    one = method.fit(federation(features, labels, np.zeros(15, int))).weights
    three = federation(np.tile(features, (3, 1)), np.tile(labels, 3), np.repeat(np.arange(3), 15))
    assert far(method.fit(three).weights, one) < 1e-12


@each_network
def test_an_empty_client_changes_nothing(name: str) -> None:
    features, labels = rows(40)
    owners = uneven()
    owners[owners >= 2] += 1
    method = fedavg(name, batch=4)
    run = finished(method, federation(features, labels, owners, clients=5))
    without = federation(features, labels, owners, clients=5)
    without.remove("client-2")
    assert same_bits(run.model().weights, method.fit(without).weights)
    assert run.history[-1].empty == ("client-2",)
    assert run.history[-1].metrics["idle"] == 1


@dataclass(frozen=True, kw_only=True)
class Deaf(FedAvg):
    """FedAvg that gives client-1 no weight."""

    key: ClassVar[str] = "test-deaf"

    def weight(self, group: Any, client: int) -> float:
        return 0.0 if group.clients[client] == "client-1" else super().weight(group, client)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> type[Deaf]:
    info = replace(next(i for i in registry.methods() if i.key == "fedavg"), key=Deaf.key)
    monkeypatch.setitem(registry._METHODS, Deaf.key, (info, Deaf))
    return Deaf


@each_network
def test_a_client_without_weight_changes_nothing(name: str, deaf: type[Deaf]) -> None:
    features, labels = rows(40)
    parameters: dict[str, Any] = {"rounds": 3, "batch": 4, "rate": 0.3, "precision": "float64"}
    found = deaf(network=network(name), **parameters).fit(federation(features, labels, uneven())).weights
    without = federation(features, labels, uneven())
    without.remove("client-1")
    assert far(found, fedavg(name, batch=4).fit(without).weights) < 1e-12


def test_weights_that_sum_to_zero_are_refused(deaf: type[Deaf]) -> None:
    features, labels = rows(40)
    alone = federation(features, labels, uneven())
    for client in ("client-0", "client-2", "client-3"):
        alone.remove(client)
    with pytest.raises(Exception, match="sum to zero"):
        deaf(rounds=1).fit(alone)


@pytest.mark.parametrize("name", plain.NETWORKS)
def test_the_number_of_workers_changes_no_bit(name: str) -> None:
    count = 10 if name == "module" else 60  # heads train in groups of 25: three of them
    features, labels = rows(6 * count, dtype="float32")
    own = plain.module().float() if name == "module" else name
    method = FedAvg(network=own, rounds=2, batch=4, momentum=0.9)
    owners = np.arange(6 * count) % count
    one, two = (method.fit(federation(features, labels, owners, workers=w)).weights for w in (1, 2))
    assert same_bits(one, two)


@pytest.mark.parametrize("name", ["linear", "mlp:5"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting))
def test_heads_that_train_side_by_side_train_as_if_alone(
    name: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = rows(40)
    owners = np.repeat(np.arange(5), [1, 4, 12, 23, 0])
    method = fedavg(name, **setting)
    together = method.fit(federation(features, labels, owners)).weights
    as_module = replace(method, network=plain.built(method))
    assert not as_module.trains_together(plain.WIDTH, plain.CLASSES)
    assert far(as_module.fit(federation(features, labels, owners)).weights, together) < 1e-10
    monkeypatch.setattr(engine, "TOGETHER", 1)
    assert far(method.fit(federation(features, labels, owners)).weights, together) < 1e-12


def test_all_methods_ask_the_same_clients() -> None:
    features, labels = rows(60)
    cohorts = set()
    for kind in (FedAvg, FedProx, FedAvgM, FedACG, FedDyn, Scaffold):
        fed = federation(features, labels, np.arange(60) % 20)
        run = finished(kind(rounds=6, participation=0.25, seed=5), fed)
        cohorts.add(tuple(record.cohort for record in run.history))
    (found,) = cohorts
    assert [len(cohort) for cohort in found] == [5] * 6
    assert len(set(found)) > 1
    other = finished(FedAvg(rounds=6, participation=0.25, seed=6), fed)
    assert tuple(record.cohort for record in other.history) != found


def test_a_small_participation_asks_one_client() -> None:
    features, labels = rows(40)
    run = finished(FedAvg(rounds=2, participation=0.01), federation(features, labels, uneven()))
    assert [len(record.cohort) for record in run.history] == [1, 1]


# -- buffers ----------------------------------------------------------------------------------------


def normalised_round(method: FedAvg, fed: Any, weights: Any, buffers: dict[str, Any], round_: int) -> Any:
    """Every client's network after local training from these weights and its buffers."""
    found = {}
    for client, (features, labels) in plain.clients_of(fed).items():
        net = plain.put(Normalised(), weights)
        for name, value in net.named_buffers():
            if name in buffers[client]:
                value.copy_(buffers[client][name])
        plan = plain.batches(method, len(labels), round_, client, least=2)
        optimiser = torch.optim.SGD(net.parameters(), lr=method.rate)
        for batch in plan:
            optimiser.zero_grad()
            plain.cross_entropy(net, features[batch], labels[batch]).backward()
            optimiser.step()
        if plan:
            found[client] = (net, len(labels))
    return found


def running(net: Any) -> dict[str, Any]:
    return {n: b.clone() for n, b in net.named_buffers() if b.is_floating_point()}


@pytest.mark.parametrize("kept", ["average", "local"])
def test_running_statistics_are_averaged_or_stay_local(kept: Any) -> None:
    """A batch of one is left out: client 0 has a single row and is idle, client 1 ends with 9 = 2 * 4 + 1."""
    features, labels = rows(40)
    fed = federation(features, labels, np.repeat(np.arange(4), [1, 9, 12, 18]))
    method = FedAvg(network=Normalised(), rounds=3, batch=4, rate=0.3, precision="float64", buffers=kept)
    run = finished(method, fed)
    current = plain.weights(Normalised())
    buffers = dict.fromkeys(fed.clients, running(Normalised()))
    for round_ in range(3):
        clients = normalised_round(method, fed, current, buffers, round_)
        assert list(clients) == ["client-1", "client-2", "client-3"]
        shares = [rows for _, rows in clients.values()]
        current = plain.mean([plain.weights(net) for net, _ in clients.values()], shares)
        own = {client: running(net) for client, (net, _) in clients.items()}
        common = plain.mean(list(own.values()), shares)
        buffers = buffers | own if kept == "local" else dict.fromkeys(fed.clients, common)
    assert far(run.model().weights, current) < 1e-10
    assert run.history[-1].metrics["idle"] == 1
    if kept == "average":
        assert far(run.model().buffers, common) < 1e-10
        assert set(run.model().buffers) == {"norm.running_mean", "norm.running_var"}
    else:
        assert same_bits(run.model().buffers, running(Normalised()))
        for client, state in plain.states(fed, run).items():
            held = {n.removeprefix("buffer."): a for n, a in state.items()}
            if client == "client-0":
                assert held == {}
            else:
                assert far(held, buffers[client]) < 1e-10


def test_counters_are_neither_sent_nor_carried_from_client_to_client() -> None:
    """Without momentum BatchNorm weighs a batch by its counter, so one left over from others would show."""
    features, labels = rows(40)
    method = FedAvg(network=Normalised(None), rounds=2, batch=4, rate=0.3, precision="float64")
    runs = [finished(method, federation(features, labels, uneven(), workers=w)) for w in (1, 2, 1)]
    assert all(same_bits(run.server.buffers, runs[0].server.buffers) for run in runs)
    assert int(runs[0].model().network().norm.num_batches_tracked) == 0
    assert sorted(runs[0].server.buffers) == ["norm.running_mean", "norm.running_var"]


# -- local optimisers -------------------------------------------------------------------------------

OPTIMISERS: list[tuple[str, dict[str, float]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("adam", {}),
    ("adam", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMISERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_optimisers_take_the_steps_of_torch_bit_for_bit(kind: str, options: Any, dtype: str) -> None:
    """A single network, and a stack of three clients of which one stops after every second step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (3,)]
    weights = [torch.randn(3, *shape, generator=generator, dtype=getattr(torch, dtype)) for shape in shapes]
    theirs = [[nn.Parameter(w[client].clone()) for w in weights] for client in range(3)]
    make = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
    optimisers = [make(own, lr=0.05, **options) for own in theirs]
    single = [w[0].clone() for w in weights]
    settings = ("momentum", "weight_decay")
    ours, alone = (Optimiser(kind, 0.05, *(options.get(name, 0.0) for name in settings)) for _ in range(2))
    for step in range(6):
        active = 3 - step // 2
        gradients = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]
        for client in range(active):
            for parameter, gradient in zip(theirs[client], gradients, strict=True):
                parameter.grad = gradient[client].clone()
            optimisers[client].step()
        alone.step(single, [gradient[0].clone() for gradient in gradients])
        ours.step(
            [w[:active] for w in weights], [gradient[:active].clone() for gradient in gradients], active
        )
        for client in range(3):
            assert all(torch.equal(w[client], p) for w, p in zip(weights, theirs[client], strict=True))
        assert all(torch.equal(w, p) for w, p in zip(single, theirs[0], strict=True))


@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in [(3, 4), (3,)]]
    scaled = [g * torch.tensor([0.1, 1.0, 10.0]).reshape(-1, *[1] * (g.dim() - 1)) for g in gradients]
    stacked = [g.clone() for g in scaled]
    clip_norms(stacked, limit, stacked=True)
    for client in range(3):
        parameters = [nn.Parameter(torch.zeros_like(g[client])) for g in scaled]
        for parameter, gradient in zip(parameters, scaled, strict=True):
            parameter.grad = gradient[client].clone()
        nn.utils.clip_grad_norm_(parameters, limit)
        single = [g[client].clone() for g in scaled]
        clip_norms(single, limit, stacked=False)
        for parameter, one, many in zip(parameters, single, stacked, strict=True):
            assert torch.equal(parameter.grad, one)
            # The stack sums squares tensor by tensor, torch takes the norm of norms: equal up to rounding.
            assert float((parameter.grad - many[client]).abs().max()) < 1e-14 * limit


# -- unusual data -----------------------------------------------------------------------------------


@each_network
def test_a_loss_that_is_no_number_names_client_round_step_and_rate(name: str) -> None:
    features, labels = rows(40, dtype="float32")
    owners = uneven()
    features[owners == 2] *= 1e20
    own = nn.Sequential(nn.Linear(plain.WIDTH, plain.CLASSES)) if name == "module" else name
    method = FedAvg(network=own, rounds=1, batch=4, rate=10.0, epochs=2)
    told = r"the loss of 'client-2' became (nan|inf) in round 0, step 1\. Lower rate \(now 10\)"
    with pytest.raises(DivergenceError, match=told):
        method.fit(federation(features, labels, owners))
    run = finished(method, federation(features, labels, owners, missing="continue"))
    assert list(run.history[0].missing) == ["client-2"]
    without = federation(features, labels, owners)
    without.remove("client-2")
    assert same_bits(run.model().weights, method.fit(without).weights)


@each_network
def test_a_class_that_nobody_has_is_learnt_as_absent(name: str) -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven(), classes=range(4))
    own: Any = name
    if name == "module":
        own = nn.Sequential(nn.Linear(plain.WIDTH, 4)).double()
    method = FedAvg(network=own, rounds=8, batch=4, rate=0.3, precision="float64")
    model = method.fit(fed)
    assert list(model.classes) == [0, 1, 2, 3]
    assert far(model.weights, averaged(method, fed, outputs=4)) < 1e-10
    scores = model.decision_function(features)
    assert scores.shape == (40, 4)
    assert np.all(scores.argmax(axis=1) != 3)


def test_a_client_with_one_row_trains_where_no_layer_needs_two() -> None:
    features, labels = rows(13)
    owners = np.repeat([0, 1], [12, 1])
    for name in plain.NETWORKS:
        method = fedavg(name, batch=4)
        run = finished(method, federation(features, labels, owners))
        assert run.history[-1].metrics["idle"] == 0
        assert far(run.model().weights, averaged(method, federation(features, labels, owners))) < 1e-10


def test_nobody_with_a_batch_is_refused() -> None:
    features, labels = rows(40)
    with pytest.raises(DataError, match=r"no client had a batch to train on \(batch 32, last_batch 'drop'"):
        FedAvg(batch=32, last_batch="drop").fit(federation(features, labels, uneven()))
    with pytest.raises(DataError, match="BatchNorm needs two rows"):
        FedAvg(network=Normalised(), precision="float64").fit(federation(features, labels, np.arange(40)))


@each_network
def test_nobody_with_rows_is_refused(name: str) -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven(), clients=6)
    for client in range(4):
        fed.remove(f"client-{client}")
    with pytest.raises(DataError, match="every client that answered is empty"):
        fedavg(name).fit(fed)


def test_bytes_are_read_as_images_and_other_types_as_they_are() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, plain.WIDTH)).astype(np.uint8)
    labels = rng.integers(0, 3, 40)
    method = fedavg("linear", batch=8)
    found = method.fit(federation(pixels, labels, uneven())).weights
    same = method.fit(federation(pixels / 127.5 - 1.0, labels, uneven())).weights
    assert far(found, same) < 1e-12
    whole = method.fit(federation(pixels.astype(np.uint16), labels, uneven())).weights
    assert far(whole, method.fit(federation(pixels.astype(float), labels, uneven())).weights) < 1e-12


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"network": "lienar"}, "unknown network 'lienar'.*Did you mean 'linear'"),
        ({"network": "cnn"}, "6 features do not say of which shape"),
        ({"network": "module", "feedback": "2,head"}, "head"),
        ({"network": "module", "feedback": "lowest", "feedback_layers": 3}, "choose 3 layers.*has 1"),
        ({"shape": "1,x,3", "network": "cnn"}, "channels,height,width"),
    ],
)
def test_what_cannot_be_trained_is_refused(parameters: dict[str, Any], told: str) -> None:
    features, labels = rows(40)
    if parameters.get("network") == "module":
        parameters = parameters | {"network": plain.module(), "precision": "float64"}
    with pytest.raises(DataError, match=told):
        FedAvg(**parameters).fit(federation(features, labels, uneven()))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    features, labels = rows(40)
    with pytest.raises(DataError, match="no GPU here"):
        fs.LocalFederation.from_arrays(features, labels, np.zeros(40, int), device="cuda")
    with pytest.raises(DataError, match="device 'abacus' is not one that torch knows"):
        fs.LocalFederation.from_arrays(features, labels, np.zeros(40, int), device="abacus")


def test_regression_is_refused() -> None:
    features, labels = rows(40)
    fed = federation(features, labels.astype(float), uneven(), classes=None, task="regression")
    with pytest.raises(DataError, match="gradient methods classify"):
        FedAvg().fit(fed)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"participation": 0.0}, "participation must be a number in"),
        ({"clip": 0.0}, "clip must be None or a finite number > 0"),
        ({"batch": 0}, "batch must be a whole number, at least 1"),
        ({"rate": float("nan")}, "rate must be a finite number"),
        ({"weighting": "rows"}, "weighting must be 'size' or 'uniform'"),
        ({"optimiser": "lion"}, "optimiser must be 'sgd', 'adam' or 'adamw'"),
        ({"track": "loss"}, "track must be"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        FedAvg(**parameters)


# -- stopping, resuming, asking again ---------------------------------------------------------------


class Stopped(Exception):
    """The process ended here."""


RESUMED = [
    (FedAvg, {}),
    (FedAvg, {"track": "drift"}),
    (FedAvgM, {}),
    (FedACG, {}),
    (FedDyn, {}),
    (Scaffold, {"momentum": 0.5, "rate_decay": 0.9}),
]


@each_network
@pytest.mark.parametrize(("kind", "parameters"), RESUMED, ids=lambda part: getattr(part, "__name__", None))
def test_a_resumed_run_is_the_run_that_never_stopped(
    name: str, kind: Any, parameters: dict[str, Any], tmp_path: Any
) -> None:
    features, labels = rows(40)
    common: dict[str, Any] = {"rounds": 4, "batch": 4, "rate": 0.2, "participation": 0.5}
    method = kind(network=network(name), precision="float64", **common, **parameters)
    check_resume(method, (features, labels, uneven()), tmp_path, after=2 if parameters.get("track") else 1)


def test_local_buffers_are_resumed(tmp_path: Any) -> None:
    features, labels = rows(40)
    method = FedAvg(
        network=Normalised(),
        rounds=4,
        batch=4,
        rate=0.2,
        participation=0.5,
        precision="float64",
        buffers="local",
    )
    check_resume(method, (features, labels, uneven()), tmp_path, after=1)


def check_resume(method: Any, data: tuple[Any, Any, Any], folder: Any, after: int) -> None:
    whole = federation(*data)
    expected = method.fit(whole)

    def stop(record: Any, _: int) -> None:
        if record.exchange == after:
            raise Stopped

    with pytest.raises(Stopped):
        method.fit(federation(*data), checkpoint=folder / "run", follow=stop)
    fresh = federation(*data)
    resumed = method.fit(fresh, checkpoint=folder / "run", resume=True)
    assert same_bits(resumed.weights, expected.weights)
    assert same_bits(resumed.buffers, expected.buffers)
    assert [r.cohort for r in resumed.history] == [r.cohort for r in expected.history]
    for left, right in zip(fresh.participants, whole.participants, strict=True):
        run = method.start(whole.describe()).chain.digests[1]
        assert (newest(left.memory.states, run) is None) == (newest(right.memory.states, run) is None)
        assert same_bits(newest(left.memory.states, run) or {}, newest(right.memory.states, run) or {})
    assert (folder / "run.clients").exists() == method.stateful


def test_drift_is_unknown_where_the_clients_were_lost_before_it_was_measured(tmp_path: Any) -> None:
    features, labels = rows(40)
    method = fedavg("linear", track="drift", batch=4)

    def stop(record: Any, _: int) -> None:
        if record.exchange == 2:
            raise Stopped

    with pytest.raises(Stopped):
        method.fit(federation(features, labels, uneven()), checkpoint=tmp_path / "run", follow=stop)
    model = method.fit(federation(features, labels, uneven()), checkpoint=tmp_path / "run", resume=True)
    found = [record.metrics["drift"] for record in model.history if record.kind == "drift"]
    assert [value is None for value in found] == [False, True, False]
    assert same_bits(model.weights, method.fit(federation(features, labels, uneven())).weights)


def test_drift_is_unknown_where_one_client_was_lost() -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven())
    steps = exchanges(fedavg("linear", track="drift").start(fed.describe()), fed)
    next(steps)
    fed.participants[2].forget()
    assert next(steps).metrics["drift"] is None


def test_a_restored_run_keeps_the_order_of_the_weights() -> None:
    """A file sorts by name; an algorithm that sums over weights would else lose its last digits."""
    features, labels = rows(40)
    fed = federation(features, labels, uneven())
    run = finished(FedDyn(network="mlp:5", rounds=1), fed)
    restored = run.method.start(fed.describe())
    restored.restore(run.to_bytes(), "run")
    for left, right in ((run, restored), (run.method.start(fed.describe()), restored)):
        assert list(left.server.weights) == list(right.server.weights)
    assert list(run.server.aggregated) == list(restored.server.aggregated)


@each_network
@pytest.mark.parametrize("kind", [FedAvg, FedACG, FedDyn])
def test_the_server_knows_what_the_clients_received(name: str, kind: Any) -> None:
    """Rounded to float32: differences to what came back are then those that the clients see."""
    features, labels = rows(40, dtype="float32")
    fed = federation(features, labels, uneven())
    own = plain.module().float() if name == "module" else name
    run = kind(network=own, rounds=3, batch=4).start(fed.describe())
    for _ in range(3):
        request = run.request(fed.clients)
        sent = {n.removeprefix("w."): a for n, a in request.arrays.items() if n.startswith("w.")}
        assert same_bits(run.server.sent(), sent)
        run.absorb(fed.exchange(request, run.chain))
    assert not same_bits(run.server.weights, {n: w.astype("float32") for n, w in run.server.weights.items()})


@pytest.mark.parametrize("kind", [FedDyn, Scaffold])
@each_network
def test_a_lost_state_is_named(name: str, kind: Any) -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven())
    method = kind(network=network(name), rounds=3, precision="float64")
    steps = exchanges(method.start(fed.describe()), fed)
    next(steps)
    fed.participants[1].forget()
    told = "'client-1' failed in exchange 1.*the state that 'client-1' ended exchange 0 with is gone"
    with pytest.raises(CohortError, match=told):
        next(steps)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("kind", [FedAvg, FedDyn, Scaffold])
@each_network
def test_the_same_request_gives_the_same_answer_also_after_encoding(
    name: str, kind: Any, stored: bool, tmp_path: Any
) -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven())
    if stored:
        fed.keep_states(tmp_path)
    run = kind(network=network(name), rounds=3, batch=4, precision="float64").start(fed.describe())
    for _ in range(2):
        request = run.request(fed.clients)
        first = fed.exchange(request, run.chain)
        again = fed.exchange(request, run.chain)
        assert same_bits(first.term.arrays, again.term.arrays)
        sent = decode_request(encode_request(request))
        for participant in fed.participants:
            term = participant.answer(request, Workspace())
            assert same_bits(term.arrays, participant.answer(sent, Workspace()).arrays)
        run.absorb(first)


# -- drift ------------------------------------------------------------------------------------------


@each_network
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_drift_from_sums_is_the_direct_value(name: str, precision: Any) -> None:
    features, labels = rows(40)
    own = plain.module().to(getattr(torch, precision)) if name == "module" else name
    method = FedACG(network=own, rounds=3, batch=4, rate=0.3, epochs=2, track="drift", precision=precision)
    fed = federation(features, labels, uneven(), clients=5)
    run = method.start(fed.describe())
    for round_ in range(3):
        request = run.request(fed.clients)
        terms = [participant.answer(request).arrays for participant in fed.participants if len(participant)]
        moved = np.array(
            [
                np.concatenate([(term[n] - request.arrays[n].astype(float)).ravel() for n in request.arrays])
                for term in terms
            ]
        )
        run.absorb(fed.exchange(request, run.chain))
        away = np.linalg.norm(moved - moved.mean(axis=0), axis=1)
        assert run.history[-1].metrics["mean_squared_drift"] == pytest.approx(np.mean(away**2), rel=1e-12)
        request = run.request(fed.clients)
        fed.exchange(request, run.chain)  # asked twice, answered twice
        run.absorb(fed.exchange(request, run.chain))
        assert run.history[-1].metrics["drift"] == pytest.approx(np.mean(away), rel=1e-12)
        assert run.server.round == round_ + 1
    assert run.request(fed.clients) is None
    assert run.exchanges == len(run.history) == 6


def test_measuring_drift_changes_no_bit_of_the_model() -> None:
    features, labels = rows(40)
    fed = federation(features, labels, uneven())
    assert same_bits(
        fedavg("linear", batch=4, track="drift").fit(fed).weights, fedavg("linear", batch=4).fit(fed).weights
    )


# -- what a run reports -----------------------------------------------------------------------------


@each_network
def test_a_round_reports_loss_and_local_accuracy(name: str) -> None:
    """A rate of 0 leaves the weights alone: both are those of the first weights on all rows."""
    features, labels = rows(40)
    method = fedavg(name, rate=0.0, batch=4, epochs=2, rounds=1)
    fed = federation(features, labels, np.repeat(np.arange(3), [4, 12, 24]))
    metrics = finished(method, fed).history[0].metrics
    net, losses, correct = plain.built(method), [], 0
    for inputs, targets in plain.clients_of(fed).values():
        losses.append(plain.cross_entropy(net, inputs, targets).item())
        correct += int((net(inputs).argmax(dim=1) == targets).sum())
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert metrics["local_accuracy"] == correct / 40


def test_bytes_count_the_weights_both_ways() -> None:
    features, labels = rows(40, dtype="float32")
    record = finished(FedAvg(rounds=1), federation(features, labels, uneven())).history[0]
    weights = 4 * (plain.WIDTH * plain.CLASSES + plain.CLASSES)
    assert record.bytes_down == 4 * weights
    assert record.bytes_up == 4 * (weights + 16)  # weight and loss travel as two numbers


def test_a_saved_model_predicts_the_same(tmp_path: Any) -> None:
    from fedsolve import load_model

    features, labels = rows(40)
    for name in plain.NETWORKS:
        model = fedavg(name, batch=4).fit(federation(features, labels, uneven()))
        model.save(tmp_path / "model")
        loaded = load_model(tmp_path / "model")
        assert np.array_equal(loaded.decision_function(features), model.decision_function(features))
        assert re.match(r"linear|mlp:5|custom:", loaded.parameters["network"])


def test_dropout_does_not_depend_on_workers_or_on_torchs_generator():
    """A network of the user's own may draw; it draws from the client's stream."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((60, 4)), rng.integers(0, 3, 60)
    found = []
    for workers, seed in ((1, 5), (2, 6)):
        torch.manual_seed(seed)
        federation = fs.LocalFederation.from_arrays(rows, labels, np.arange(60) % 4, workers=workers)
        before = torch.get_rng_state()
        found.append(FedAvg(network=network, rounds=3, batch=8).fit(federation).weights)
        assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def test_a_module_registered_again_brings_its_own_forward():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = torch.nn.Linear(4, 3)
            torch.nn.init.zeros_(self.classifier.weight)
            torch.nn.init.zeros_(self.classifier.bias)

        def forward(self, inputs):
            return self.classifier(inputs)

    rng = np.random.default_rng(0)
    federation = fs.LocalFederation.from_arrays(
        rng.standard_normal((20, 4)), rng.integers(0, 3, 20), np.zeros(20, int)
    )
    plain = FedAvg(network=Twice(), rounds=1).fit(federation).weights
    Twice.forward = lambda self, inputs: self.classifier(2 * inputs)
    doubled = FedAvg(network=Twice(), rounds=1).fit(federation).weights
    np.testing.assert_allclose(
        doubled["classifier.weight"], 2 * plain["classifier.weight"], rtol=1e-6, atol=1e-9
    )


def test_sample_weights_are_refused_where_a_method_takes_none():
    federation = fs.LocalFederation.from_arrays(
        np.eye(4), np.arange(4) % 2, np.zeros(4, int), sample_weight=np.ones(4)
    )
    with pytest.raises(DataError, match="'fedfisher' does not take sample weights"):
        FedFisher(rounds=1).fit(federation)


@pytest.mark.parametrize("network", ["mlp:4", "cnn"])
def test_what_a_group_held_goes_with_it(network, monkeypatch) -> None:
    """Memory of a GPU is not what makes Python look for cycles."""
    held = []
    plain_ = ClientGroup.__init__

    def begun(self, *arguments):
        plain_(self, *arguments)
        held.append(weakref.ref(self))

    monkeypatch.setattr(ClientGroup, "__init__", begun)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 64), dtype=np.uint8), np.arange(12) % 3
    federation_ = fs.LocalFederation.from_arrays(images, labels, np.arange(12) % 2)
    gc.collect()
    gc.disable()
    try:
        FedGen(network=network, shape="1,8,8" if network == "cnn" else None, rounds=2, batch=4).fit(
            federation_
        )
        assert held
        assert not [group for group in held if group() is not None]
    finally:
        gc.enable()


def test_draws_with_other_names_in_some_steps_are_refused() -> None:
    class Odd(FedAvg):
        def draw(self, group, number):
            return {"noise": np.ones(2)} if number % 2 else {}

    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(12, 4)), np.arange(12) % 3
    federation_ = fs.LocalFederation.from_arrays(features, labels, np.zeros(12, int))
    with pytest.raises(DataError, match=r"Odd.draw gives \['noise'\] for one step and \[\] for another"):
        Odd(rounds=1, batch=4).fit(federation_)
