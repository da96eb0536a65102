"""FedPer, FedRep, FedBN, FedProto, FedBABU, Per-FedAvg, FedNova: their formulas in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.gradient import FedAvg, FedBABU, FedBN, FedNova, FedPer, FedProto, FedRep, PerFedAvg
from tests.gradient import personal_checks as checks
from tests.gradient import plain
from tests.gradient.plain import CLASSES, WIDTH, far, rows

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.torch

COMMON: dict[str, Any] = {
    "network": "mlp:5",
    "precision": "float64",
    "rate": 0.1,
    "rounds": 4,
    "batch": 4,
    "epochs": 2,
    "participation": 0.5,
    "momentum": 0.6,
    "weight_decay": 0.01,
    "clip": 1.5,
}


def heads(method: Any) -> list[str]:
    return list(plain.weights(plain.built(method)))[-2:]


def optimised(method: Any, net: Any, names: Any, data: Any, round_: int, client: str, loss: Any) -> None:
    """SGD on some weights of a network, the others frozen."""
    for name, value in net.named_parameters():
        value.requires_grad_(name in names)
    plain.local(net, method, data, round_, client, loss)
    for value in net.parameters():
        value.requires_grad_(True)


def walked(method: Any, fed: Any, own: Any, train: Any) -> tuple[Any, dict[str, Any]]:
    """Rounds of a method whose weights `own` stay: the shared weights and what each client keeps."""
    net, data, kept = plain.built(method), plain.clients_of(fed), {}
    shared = plain.weights(net)
    for round_ in range(method.rounds):
        found = []
        for client in plain.cohort(method, list(data), round_):
            plain.put(net, shared | kept.get(client, {}))
            train(net, data[client], round_, client)
            ended = plain.weights(net)
            kept[client] = {name: ended[name] for name in own}
            found.append((ended, len(data[client][1])))
        mean = plain.mean([w for w, _ in found], [n for _, n in found])
        shared |= {name: mean[name] for name in mean if name not in own}
    return shared, kept


@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_classifiers_stay_and_bases_are_averaged(kind: Any) -> None:
    extra = {"head_epochs": 3} if kind is FedRep else {}
    method, fed = kind(**COMMON, **extra), checks.small()
    names = heads(method)
    base = [name for name in plain.weights(plain.built(method)) if name not in names]

    def train(net: Any, data: Any, round_: int, client: str) -> None:
        if kind is FedRep:
            first = FedAvg(**COMMON | {"epochs": 3})
            optimised(first, net, names, data, round_, client, plain.cross_entropy)
        moved = base if kind is FedRep else [*base, *names]
        optimised(method, net, moved, data, round_, client, plain.cross_entropy)

    model = method.fit(fed)
    shared, kept = walked(method, fed, names, train)
    assert far({n: model.weights[n] for n in base}, {n: shared[n] for n in base}) < 1e-12
    for client, own in kept.items():
        found = model.personal(client).weights
        assert far({n: found[n] for n in names}, own) < 1e-12
        assert far({n: found[n] for n in base}, {n: shared[n] for n in base}) < 1e-12


def normalised() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES)
        ).double()


def test_batch_norm_stays_with_its_client() -> None:
    method, fed = FedBN(**COMMON | {"network": normalised(), "participation": 1.0}), checks.small()
    own, running = ("1.weight", "1.bias"), {}

    def train(net: Any, data: Any, round_: int, client: str) -> None:
        before = running.get(client, {"mean": torch.zeros(5).double(), "var": torch.ones(5).double()})
        net[1].running_mean.copy_(before["mean"])
        net[1].running_var.copy_(before["var"])
        plain.local(net.train(), method, data, round_, client)
        running[client] = {"mean": net[1].running_mean.clone(), "var": net[1].running_var.clone()}

    model = method.fit(fed)
    shared, kept = walked(method, fed, own, train)
    for client, expected in kept.items():
        found = model.personal(client)
        assert far(found.weights, shared | expected) < 1e-12
        statistics = {n.removeprefix("1.running_"): v for n, v in found.buffers.items()}
        assert far(statistics, running[client]) < 1e-12
    with pytest.raises(DataError, match="has none"):
        FedBN(network="mlp:5", rounds=1).fit(checks.small())


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_prototypes_are_what_travels(weighting: str) -> None:
    method, fed = FedProto(**COMMON, pull=0.7, weighting=weighting), checks.small()
    net, data = plain.built(method), plain.clients_of(fed)
    first, kept, common = plain.weights(net), {}, {}

    def features(inputs: Any) -> Any:
        return torch.relu(net[0](inputs))

    for round_ in range(method.rounds):
        sums: dict[int, list[Any]] = {}
        received = dict(common)

        def loss(net: Any, inputs: Any, targets: Any, received: Any = received) -> Any:
            away = [
                ((seen - received[int(y)]) ** 2).mean() if int(y) in received else torch.zeros(()).double()
                for seen, y in zip(features(inputs), targets, strict=True)
            ]
            return plain.cross_entropy(net, inputs, targets) + 0.7 * torch.stack(away).mean()

        for client in plain.cohort(method, list(data), round_):
            plain.put(net, kept.get(client, first))
            plain.local(net, method, data[client], round_, client, loss)
            kept[client] = plain.weights(net)
            for label in data[client][1].unique().tolist():
                with torch.no_grad():
                    seen = features(data[client][0][data[client][1] == label])
                weight = len(seen) if weighting == "size" else 1
                sums.setdefault(label, []).append((seen.mean(dim=0), weight))
        for label, parts in sums.items():
            common[label] = sum(p * w for p, w in parts) / sum(w for _, w in parts)
    run = plain.finished(method, checks.small())
    for label, expected in common.items():
        assert np.abs(run.server.memory["prototypes"][label] - expected.numpy()).max() < 1e-12
    model = method.fit(fed)
    assert all(far(model.personal(client).weights, own) < 1e-12 for client, own in kept.items())
    assert not any(name.startswith("w.") for name in plain.finished(method, fed).server.memory)


def test_a_body_under_a_classifier_that_nobody_trains() -> None:
    method, fed = FedBABU(**COMMON, fine_epochs=2), checks.small()
    names = heads(method)
    body = [name for name in plain.weights(plain.built(method)) if name not in names]

    def train(net: Any, data: Any, round_: int, client: str) -> None:
        optimised(method, net, body, data, round_, client, plain.cross_entropy)

    shared, _ = walked(method, fed, (), train)
    model = method.fit(fed)
    assert far(model.weights, shared) < 1e-12
    first = plain.weights(plain.built(method))
    assert all(np.array_equal(model.weights[name], first[name]) for name in names)
    for part, moved in (("all", {*body, *names}), ("head", set(names)), ("body", set(body))):
        tuned = replace(method, fine_part=part).fit(checks.small()).personal("client-3").weights
        assert {name for name in tuned if not np.array_equal(tuned[name], model.weights[name])} == moved


@pytest.mark.parametrize("hessian", ["none", "free"])
@pytest.mark.parametrize("name", plain.NETWORKS)
def test_gradients_where_one_step_leads(hessian: str, name: str) -> None:
    network = plain.network(name)
    method = PerFedAvg(**COMMON | {"network": network}, inner_rate=0.05, hessian=hessian, delta=0.01)
    fed = checks.small()
    data, net, other = plain.clients_of(fed), plain.built(method), plain.built(method)
    current = plain.weights(net)
    for round_, run in enumerate(plain.run(method, fed)):
        found = []
        for client in plain.cohort(method, list(data), round_):
            plain.put(net, current)
            optimiser = torch.optim.SGD(
                net.parameters(), lr=method.rate, momentum=method.momentum, weight_decay=method.weight_decay
            )
            features, labels = data[client]
            for batch in plain.batches(method, len(labels), round_, client):
                half = (len(batch) + 1) // 2
                parts = [
                    (features[b], labels[b])
                    for b in (batch[:half], batch[half:] if half < len(batch) else batch)
                ]
                here = plain.weights(net)
                inner = plain.gradient(other, here, *parts[0])
                outer = plain.gradient(other, {n: here[n] - 0.05 * inner[n] for n in here}, *parts[1])
                if hessian == "free":
                    ahead, behind = (
                        plain.gradient(other, {n: here[n] + s * 0.01 * outer[n] for n in here}, *parts[0])
                        for s in (1, -1)
                    )
                    outer = {n: outer[n] - 0.05 * (ahead[n] - behind[n]) / 0.02 for n in here}
                for key, value in net.named_parameters():
                    value.grad = outer[key]
                nn.utils.clip_grad_norm_(net.parameters(), method.clip)
                optimiser.step()
            found.append((plain.weights(net), len(labels)))
        current = plain.mean([w for w, _ in found], [n for _, n in found])
        assert far(run.server.weights, current) < 1e-10
    tuned = method.fit(checks.small()).personal("client-2").weights
    plain.put(net, {key: torch.as_tensor(value) for key, value in run.server.weights.items()})
    by_itself = FedAvg(**COMMON | {"network": network, "epochs": 1, "rate": 0.05})
    plain.local(net, by_itself, data["client-2"], method.rounds, "alone")
    assert far(tuned, plain.weights(net)) < 1e-10


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.6}, {"momentum": 0.6, "nesterov": True}])
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_updates_are_divided_by_local_steps(momentum: dict[str, Any], weighting: str) -> None:
    shape = COMMON | {"momentum": 0.0} | momentum
    method, fed = FedNova(**shape, weighting=weighting), checks.small()
    current = plain.weights(plain.built(method))
    m = shape["momentum"]
    for round_, run in enumerate(plain.run(method, fed)):
        clients = list(plain.trained(method, fed, current, round_).values())
        counts = [c.rows if weighting == "size" else 1 for c in clients]
        shares = [n / sum(counts) for n in counts]
        factors = []
        for client in clients:
            velocity = moved = 0.0
            for _ in range(client.steps):
                velocity = m * velocity + 1.0
                moved += 1.0 + m * velocity if momentum.get("nesterov") else velocity
            factors.append(moved)
        effective = sum(p * a for p, a in zip(shares, factors, strict=True))
        current = {
            name: w
            - effective
            * sum(p * (w - c.weights[name]) / a for p, a, c in zip(shares, factors, clients, strict=True))
            for name, w in current.items()
        }
        assert far(run.server.weights, current) < 1e-11
    with pytest.raises(DataError, match="adam"):
        FedNova(optimiser="adam")


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedper": (FedPer, {}),
    "fedrep": (FedRep, {"head_epochs": 2}),
    "fedproto": (FedProto, {}),
    "fedbabu": (FedBABU, {}),
    "per-fedavg": (PerFedAvg, {"hessian": "free"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_checks_of_every_personal_method(kind: str, tmp_path: Path) -> None:
    method, own = KINDS[kind]
    made = method(**COMMON, **own)
    checks.check_resume(made, tmp_path)
    fed = checks.small()
    checks.check_files(fed, made.fit(fed), tmp_path)
    checks.check_odd_clients(replace(made, participation=1.0, rounds=2))
    checks.check_side_by_side(
        method, **{k: v for k, v in COMMON.items() if k not in ("network", "precision")}, **own
    )


def test_what_has_no_base_is_refused() -> None:
    for kind in (FedProto, FedBABU, FedRep):
        with pytest.raises(DataError, match="linear"):
            kind(network="linear")
    assert (
        FedPer(network="linear", rounds=1).fit(checks.small()).personal("client-1").predict(rows(3)[0]).shape
    )
