"""FedAS: its oracles, and the whole algorithm against its formulas in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.gradient import fedas
from fedsolve.gradient.fedas import FedAS
from fedsolve.gradient.personalised import ALONE
from tests.gradient import personal_checks, plain
from tests.gradient.personal_checks import personal, small
from tests.gradient.plain import far, finished, rows, same_bits
from tests.gradient.trials import HARD, PADDED, each_network, padded, register

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch

each_base = pytest.mark.parametrize("name", plain.NETWORKS[1:])


def bases(net: Any) -> list[str]:
    """Names of the weights before the last layer."""
    heads = {id(p) for p in net[-1].parameters()}
    return [name for name, p in net.named_parameters() if id(p) not in heads]


def first_batches(method: FedAS, count: int, round_: int, client: str) -> list[Any]:
    """The batches of a round's first epoch."""
    return plain.batches(replace(method, epochs=1), count, round_, client)


def align(method: FedAS, net: Any, old: Any, data: tuple[Any, Any], plan: list[Any]) -> None:
    """The base of `net` drawn to the class means of the base of `old`, class by class."""
    inputs, targets = data
    prototypes = {
        int(c): old[:-1](inputs[targets == c]).mean(dim=0).detach() for c in targets.unique().tolist()
    }
    parameters = list(net[:-1].parameters())
    optimiser = torch.optim.SGD(parameters, lr=method.alignment_rate)
    for _ in range(method.alignment_epochs):
        for batch in plan:
            features, codes = net[:-1](inputs[batch]), targets[batch]
            loss = sum(
                nn.functional.mse_loss(
                    features[codes == c], prototypes[c].expand(int((codes == c).sum()), -1)
                )
                for c in codes.unique().tolist()
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def trace(net: Any, data: tuple[Any, Any], plan: list[Any]) -> float:
    """T_i, batch by batch."""
    found = 0.0
    for batch in plan:
        loss = nn.functional.cross_entropy(net(data[0][batch]), data[1][batch])
        found += sum(float((g**2).sum()) for g in torch.autograd.grad(loss, list(net.parameters())))
    return found


def received(method: FedAS, base: Any, own: Any, data: Any, round_: int, client: str) -> Any:
    """A client's network at the start of its training: the base aligned, its own head on top."""
    net, old = plain.built(method), plain.built(method)
    plain.put(net, base)
    plain.put(old, base if own is None else own)
    if bases(net) and method.alignment_epochs:
        align(method, net, old, data, first_batches(method, len(data[1]), round_, client))
    return plain.put(net, plain.weights(net) | plain_head(old))


def plain_head(net: Any) -> dict[str, Any]:
    return {name: w for name, w in plain.weights(net).items() if name not in bases(net)}


@each_network
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        pytest.param({"alignment_epochs": 2, "alignment_rate": 0.1}, marks=pytest.mark.slow),
        pytest.param({"fisher": False}, marks=pytest.mark.slow),
        {"fisher": False, "weighting": "uniform", "alignment_epochs": 0},
    ],
)
def test_fedas_equals_its_formulas(name: str, parameters: dict[str, Any]) -> None:
    fed, method = small(), padded(FedAS, name, **HARD | parameters)
    data, current = plain.clients_of(fed), plain.weights(plain.built(method))
    names = bases(plain.built(method))
    own: dict[str, Any] = dict.fromkeys(fed.clients)
    for round_, run in enumerate(plain.run(method, fed)):
        shares = []
        cohort = plain.cohort(method, fed.clients, round_)
        for client in cohort:
            net = received(method, current, own[client], data[client], round_, client)
            plain.local(net, method, data[client], round_, client)
            plan = first_batches(method, len(data[client][1]), round_, client)
            size = len(data[client][1]) if method.weighting == "size" else 1.0
            shares.append(trace(net, data[client], plan) if method.fisher else size)
            own[client] = plain.weights(net)
        mean = plain.mean([own[client] for client in cohort], shares)
        current = current | {n: mean[n] for n in names}
        assert far(run.server.weights, current) < 1e-10
        for client, state in plain.states(fed, run).items():
            kept = {n.removeprefix("previous."): a for n, a in state.items()}
            assert (own[client] is None and not kept) or far(kept, own[client]) < 1e-10
    assert len({record.cohort for record in run.history}) > 1
    model, features = run.model(), rows(10, seed=3)[0]
    for client, mine in personal(fed, model).items():
        net = received(method, current, own[client], data[client], method.rounds, ALONE)
        if own[client] is None:
            plain.local(net, method, data[client], method.rounds, ALONE)
        expected = net(torch.from_numpy(features)).detach().numpy()
        assert np.abs(mine.decision_function(features) - expected).max() < 1e-10


@each_base
def test_without_alignment_and_by_size_bases_are_averaged_and_heads_stay(name: str) -> None:
    """FedAvg of the base alone, written out with nothing of FedAS in it."""
    fed = small()
    method = padded(FedAS, name, alignment_epochs=0, fisher=False)
    net, data = plain.built(method), plain.clients_of(fed)
    names = bases(net)
    start = plain.weights(net)
    heads = {client: plain_head(net) for client in fed.clients}
    base = {n: start[n] for n in names}
    for round_, run in enumerate(plain.run(method, fed)):
        found = []
        for client in fed.clients:
            plain.put(net, base | heads[client])
            plain.local(net, method, data[client], round_, client)
            heads[client] = plain_head(net)
            found.append({n: plain.weights(net)[n] for n in names})
        base = plain.mean(found, [len(data[client][1]) for client in fed.clients])
        assert far(run.server.weights, start | base) < 1e-10
    for client, own in personal(fed, run.model()).items():
        assert far(own.weights, base | heads[client]) < 1e-10


def test_an_alignment_rate_of_zero_is_no_alignment() -> None:
    fed = small()
    still, off = (padded(FedAS, **s).fit(fed) for s in ({"alignment_rate": 0.0}, {"alignment_epochs": 0}))
    assert same_bits(still.weights, off.weights)
    assert not same_bits(padded(FedAS).fit(fed).weights, off.weights)


@dataclass(frozen=True, kw_only=True)
class Alike(FedAS):
    """FedAS whose clients all have the same trace."""

    key: ClassVar[str] = "test-alike"


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> type[Alike]:
    register(monkeypatch, Alike, like="fedas")
    return Alike


@each_base
@pytest.mark.parametrize("value", [3.7, 0.0])
def test_equal_traces_are_a_uniform_mean(
    name: str, value: float, alike: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of them are zero: one-class clients that are certain have no gradient left."""
    fed = small()
    monkeypatch.setattr(fedas, "fisher_traces", lambda group: np.full(len(group.clients), value))
    found = padded(alike, name).fit(fed).weights
    uniform = padded(FedAS, name, fisher=False, weighting="uniform").fit(fed).weights
    assert far(found, uniform) < 1e-12


@each_base
def test_at_the_first_time_alignment_pulls_features_to_their_own_class_means(name: str) -> None:
    """The alignment loss is then the variance within classes, not 0: the base moves."""
    fed = small()
    one = {"rounds": 1, "rate": 0.0, "fisher": False}
    start = plain.weights(plain.built(padded(FedAS, name)))
    moved = padded(FedAS, name, **one, alignment_rate=0.2, alignment_epochs=20).fit(fed).weights
    assert far(moved, start) > 1e-3
    features, labels = rows(40)

    def spread(values: Any) -> float:
        net = plain.put(plain.built(padded(FedAS, name)), {n: torch.as_tensor(w) for n, w in values.items()})
        found = net[:-1](torch.from_numpy(features)).detach().numpy()
        return float(sum(found[labels == c].var(axis=0).sum() for c in range(3)))

    assert spread(moved) < 0.9 * spread(start)


def test_on_frozen_features_clients_train_by_themselves() -> None:
    fed = small()
    method = padded(FedAS, "linear", alignment_epochs=3)
    model = method.fit(fed)
    assert all(not array.any() for array in model.weights.values())
    for client, (inputs, targets) in plain.clients_of(fed).items():
        net = plain.built(method)
        for round_ in range(method.rounds):
            plain.local(net, method, (inputs, targets), round_, client)
        assert far(model.personal(client).weights, plain.weights(net)) < 1e-10


class Apart(nn.Module):
    """A network whose trained part before the last layer has no share in the features."""

    def __init__(self) -> None:
        super().__init__()
        net = plain.module()
        self.base, self.unused, self.last = net[0].requires_grad_(False), net[1], net[2]
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: Any) -> Any:
        return self.scale * self.last(torch.tanh(self.base(inputs)))


def test_a_base_without_trained_features_has_nothing_to_align() -> None:
    fed = small()
    found, off = (
        FedAS(**PADDED, network=Apart(), alignment_epochs=epochs).fit(fed).weights for epochs in (1, 0)
    )
    assert same_bits(found, off)
    assert "scale" in found


def sent(method: FedAS, fed: Any, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Names of the arrays that clients send, exchange by exchange."""
    found, exchange = [], fed.exchange

    def listening(request: Any, chain: Any) -> Any:
        total = exchange(request, chain)
        found.append(set(total.term.arrays))
        return total

    monkeypatch.setattr(fed, "exchange", listening)
    method.fit(fed)
    return found


@each_network
def test_heads_are_never_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = padded(FedAS, name)
    expected = {"loss", "weight", *(f"w.{n}" for n in bases(plain.built(method)))}
    assert sent(method, small(), monkeypatch) == [expected] * method.rounds


@pytest.mark.parametrize("setting", [{"track": "drift"}, {"feedback": "lowest"}])
def test_measures_that_would_send_heads_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="never leaves"):
        padded(FedAS, **setting)


def test_the_shared_base_is_not_changed_by_a_clients_alignment() -> None:
    fed = small()
    model = padded(FedAS, alignment_rate=0.5).fit(fed)
    before = {name: array.copy() for name, array in model.weights.items()}
    personal(fed, model)
    assert same_bits(model.weights, before)


@pytest.mark.parametrize("kept", ["average", "local"])
def test_alignment_leaves_running_statistics_alone(kept: Any) -> None:
    from tests.gradient.test_engine import Normalised

    fed = small()
    run = finished(FedAS(**PADDED | {"network": Normalised(), "buffers": kept}), fed)
    model, states = run.model(), plain.states(fed, run)
    for client, own in personal(fed, model).items():
        local = fs.container.with_prefix(states[client], "buffer.")
        assert same_bits(own.buffers, model.buffers if kept == "average" else local)


@each_network
def test_fedas_resumes_exactly(name: str, tmp_path: Path) -> None:
    personal_checks.check_resume(padded(FedAS, name, **HARD), tmp_path)


@each_network
def test_personal_models_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    fed = small()
    personal_checks.check_files(fed, padded(FedAS, name).fit(fed), tmp_path)


@each_network
def test_odd_clients(name: str) -> None:
    personal_checks.check_odd_clients(padded(FedAS, name))


def test_clients_without_a_batch_keep_the_shared_base() -> None:
    fed = personal_checks.odd()
    model = padded(FedAS, last_batch="drop").fit(fed)
    name = fed.clients[0]
    assert same_bits(model.personal(name).weights, model.weights)


def test_heads_side_by_side_train_as_if_alone() -> None:
    setting = {k: v for k, v in (PADDED | HARD).items() if k != "precision"}
    personal_checks.check_side_by_side(FedAS, **setting, alignment_rate=0.1)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"alignment_epochs": -1}, "alignment_epochs"),
        ({"alignment_rate": -0.1}, "alignment_rate"),
        ({"fisher": 2}, "fisher"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        FedAS(**parameters)


def test_fedas_is_a_method_of_sums() -> None:
    info = next(info for info in registry.methods() if info.key == "fedas")
    assert not info.gathers
    assert fs.gradient.FedAS is FedAS
