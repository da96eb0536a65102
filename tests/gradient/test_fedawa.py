"""FedAWA: its oracles, and the learned weights against autograd and torch's Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedawa import FedAWA
from tests.gradient import plain
from tests.gradient.personal_checks import small
from tests.gradient.plain import CLASSES, WIDTH, far, federation, finished, rows, same_bits, uneven
from tests.gradient.trials import SHORT, each_host, resumed, short

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def objective(logits: Any, origin: Any, local: Any) -> Any:
    """The server's objective as the paper writes it, for torch to differentiate."""
    shares = torch.softmax(logits, dim=0)
    vectors = local - origin
    away = 1 - torch.nn.functional.cosine_similarity(local, origin[None], dim=1, eps=1e-12)
    return (shares * away).sum() + (shares * (vectors - shares @ vectors).norm(dim=1)).sum()


def by_formula(method: FedAWA, parts: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """All rounds in plain torch; the weights and every client's T."""
    start, kept = plain.weights(plain.built(method)), {}
    for round_ in range(method.rounds):
        found = plain.trained(method, parts, start, round_)
        sizes = np.array([t.rows if method.weighting == "size" else 1.0 for t in found.values()])
        for client, size, share in zip(found, sizes, sizes / sizes.sum(), strict=True):
            kept.setdefault(client, np.log(size) if method.server_start == "log" else share)
        logits = torch.tensor([kept[client] for client in found], dtype=torch.float64, requires_grad=True)
        flat = [torch.cat([w.ravel() for w in t.weights.values()]) for t in found.values()]
        origin = torch.cat([w.ravel() for w in start.values()])
        optimiser = torch.optim.Adam([logits], lr=method.server_rate, betas=(0.5, 0.999))
        for _ in range(method.server_steps):
            optimiser.zero_grad()
            objective(logits, origin, torch.stack(flat)).backward()
            optimiser.step()
        kept |= dict(zip(found, logits.tolist(), strict=True))
        shares = torch.softmax(logits.detach(), dim=0).tolist()
        start = plain.mean([t.weights for t in found.values()], shares)
    return start, kept


@each_host
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"participation": 0.5, "rounds": 5},
        {"precision": "float32"},
        {"weighting": "uniform"},
    ],
)
def test_without_server_steps_it_is_fedavg(name: str, parameters: dict[str, Any]) -> None:
    average = finished(short(FedAvg, name, **parameters), small())
    for still in ({"server_rate": 0.0}, {"server_steps": 0}):
        awa = finished(short(FedAWA, name, **parameters, **still), small())
        assert same_bits(awa.server.weights, average.server.weights)
        assert same_bits(awa.server.aggregated, average.server.aggregated)


@each_host
@pytest.mark.parametrize("start", ["log", "raw"])
def test_one_client_is_fedavg(name: str, start: str) -> None:
    features, labels = rows(12)
    parts = [federation(features, labels, np.zeros(12, dtype=int)) for _ in range(2)]
    awa = finished(short(FedAWA, name, server_rate=0.5, server_start=start), parts[0])
    average = finished(short(FedAvg, name), parts[1])
    assert far(awa.server.weights, average.server.weights) < 1e-14
    assert awa.server.memory["T@client-0"] == 0


@each_host
def test_identical_clients_keep_their_shares(name: str) -> None:
    features, labels = rows(12)
    owners = np.repeat(range(3), 12)
    whole = {"batch": 12, "server_rate": 0.5, "server_steps": 5}
    awa = finished(
        short(FedAWA, name, **whole), federation(np.tile(features, (3, 1)), np.tile(labels, 3), owners)
    )
    assert max(abs(float(awa.server.memory[f"T@client-{k}"])) for k in range(3)) < 1e-6
    alone = finished(short(FedAvg, name, batch=12), federation(features, labels, np.zeros(12, dtype=int)))
    assert far(awa.server.weights, alone.server.weights) < 1e-10


@each_host
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"server_start": "raw"},
        {"server_steps": 4, "server_rate": 0.05, "participation": 0.5, "rounds": 6},
        {"server_start": "raw", "weighting": "uniform", "participation": 0.5, "rounds": 6},
    ],
)
def test_weights_follow_the_formula(name: str, parameters: dict[str, Any]) -> None:
    method = short(FedAWA, name, **parameters)
    run = finished(method, small())
    expected, logits = by_formula(method, small())
    assert far(run.server.weights, expected) < 1e-10
    if method.server_start == "log":
        sizes = {client: len(own[1]) for client, own in plain.clients_of(small()).items()}
        base = {client: np.log(sizes[client]) if method.weighting == "size" else 0.0 for client in logits}
    else:
        base = {client: float(run.server.memory[f"start@{client}"]) for client in logits}
    assert {c: base[c] + float(run.server.memory[f"T@{c}"]) for c in logits} == pytest.approx(
        logits, abs=1e-9
    )


def test_the_raw_start_is_nearly_uniform() -> None:
    """p = .5, .3, .1, .05, .05 gives .27, .22, .18, .17, .17."""
    features, labels = rows(40)
    owners = np.repeat(range(5), [20, 12, 4, 2, 2])
    method = short(FedAWA, server_start="raw", server_rate=0.0, rounds=1)
    run = finished(method, federation(features, labels, owners))
    raw = np.exp([float(run.server.memory[f"start@client-{k}"]) for k in range(5)])
    assert raw / raw.sum() == pytest.approx([0.27, 0.22, 0.18, 0.17, 0.17], abs=5e-3)
    found = plain.trained(method, federation(features, labels, owners), plain.weights(plain.built(method)), 0)
    assert far(run.server.weights, plain.mean([t.weights for t in found.values()], list(raw))) < 1e-12


def test_running_statistics_follow_the_same_shares() -> None:
    features, labels = rows(40)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, CLASSES)
    )
    runs = [
        finished(kind(network=net, **SHORT, **more), federation(features, labels, uneven()))
        for kind, more in ((FedAvg, {}), (FedAWA, {"server_rate": 0.0}), (FedAWA, {"server_rate": 0.3}))
    ]
    assert same_bits(runs[0].server.buffers, runs[1].server.buffers)
    assert far(runs[0].server.buffers, runs[2].server.buffers) > 1e-4


def test_it_gathers_and_sends_what_fedavg_sends() -> None:
    assert registry.method_class("fedawa") is FedAWA
    assert FedAWA.gathers
    awa, average = finished(short(FedAWA), small()), finished(short(FedAvg), small())
    assert awa.history[0].bytes_down == average.history[0].bytes_down
    assert awa.history[0].bytes_up == average.history[0].bytes_up + 4 * 8


@pytest.mark.parametrize("stop", [1, 3])
def test_resume_is_exact(stop: int) -> None:
    method = short(FedAWA, "mlp:5", participation=0.5, rounds=5, server_rate=0.1, server_start="raw")
    again, whole = resumed(method, small, stop), finished(method, small())
    assert same_bits(again.server.weights, whole.server.weights)


def test_wrong_parameters_are_refused() -> None:
    for wrong in ({"server_rate": -1.0}, {"server_steps": -1}, {"server_start": "uniform"}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            FedAWA(**wrong)
