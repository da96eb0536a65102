"""FedDBE: its oracles, and the whole algorithm against its formulas in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.errors import DataError, ModelFileError
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.feddbe import FedDBE
from tests.gradient import personal_checks, plain
from tests.gradient.personal_checks import personal, small
from tests.gradient.plain import far, finished, rows, same_bits
from tests.gradient.trials import HARD, PADDED, each_network, padded

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch


def feature_mean(method: FedDBE, fed: Any, found: dict[str, Any]) -> Any:
    """g: the mean over all rows of the features under each client's own trained base."""
    data, net = plain.clients_of(fed), plain.built(method)
    parts = [plain.put(net, t.weights)[:-1](data[client][0]).detach() for client, t in found.items()]
    return torch.cat(parts).mean(dim=0)


def local(
    method: FedDBE, net: Any, data: tuple[Any, Any], shift: Any, common: Any, round_: int, client: str
) -> tuple[int, Any]:
    """A client's round, network and shift each with an optimiser of torch's; its steps and mu at the end.

    In a round that is discarded there is no shift.
    """
    rate = method.rate * method.rate_decay**round_
    shift_rate = rate if method.shift_rate is None else method.shift_rate * method.rate_decay**round_
    ours = torch.optim.SGD(
        net.parameters(), lr=rate, momentum=method.momentum, weight_decay=method.weight_decay
    )
    own = torch.optim.SGD([shift], lr=0.0 if method.discard_first and round_ == 0 else shift_rate)
    base, head = net[:-1], net[-1]
    running = torch.zeros(head.in_features, dtype=torch.float64)
    plan = plain.batches(method, len(data[1]), round_, client)
    for batch in plan:
        features = base(data[0][batch])
        loss = nn.functional.cross_entropy(head(features + shift), data[1][batch])
        running = (1 - method.mean_momentum) * running + method.mean_momentum * features.mean(dim=0)
        if common is not None:
            loss = loss + method.consistency * (0.5 * (running - common) ** 2).mean()
        ours.zero_grad()
        own.zero_grad()
        loss.backward()
        ours.step()
        own.step()
        running = running.detach()
    return len(plan), running


@each_network
@pytest.mark.parametrize(
    "parameters",
    [
        {"consistency": 3.0, "mean_momentum": 1.0},
        {"consistency": 3.0, "mean_momentum": 0.3, "shift_rate": 0.05},
        {"consistency": 0.0, "shift_rate": 0.4},
        {"consistency": 3.0, "shift_rate": 0.0},
        {"consistency": 3.0, "mean_momentum": 1.0, "discard_first": True},
        {"consistency": 3.0, "mean_momentum": 0.3, "shift_rate": 0.05, "discard_first": True},
    ],
)
def test_feddbe_equals_its_formulas(name: str, parameters: dict[str, Any]) -> None:
    fed, method = small(), padded(FedDBE, name, **HARD, **parameters)
    net = plain.built(method)
    data, current, common = plain.clients_of(fed), plain.weights(net), None
    width = net[-1].in_features
    shifts = {client: nn.Parameter(torch.zeros(width, dtype=torch.float64)) for client in fed.clients}
    for round_, run in enumerate(plain.run(method, fed)):
        found, means = {}, []
        for client in plain.cohort(method, fed.clients, round_):
            plain.put(net, current)
            steps, mean = local(method, net, data[client], shifts[client], common, round_, client)
            found[client] = plain.Trained(plain.weights(net), steps, len(data[client][1]))
            means.append({"mean": mean})
        rows = [t.rows for t in found.values()]
        discarded = method.discard_first and round_ == 0
        if not discarded:
            current = plain.mean([t.weights for t in found.values()], rows)
        if round_ == 0 and method.consistency:
            common = plain.mean(means, rows)["mean"] if discarded else feature_mean(method, fed, found)
            assert name == "linear" or np.abs(run.server.memory["anchor"] - common.numpy()).max() < 1e-10
        assert far(run.server.weights, current) < 1e-10
        for client, state in plain.states(fed, run).items():
            mine = state.get("shift", np.zeros(width))
            assert np.abs(mine - shifts[client].detach().numpy()).max() < 1e-10
    assert len({record.cohort for record in run.history}) > 1


@each_network
@pytest.mark.parametrize("setting", [PADDED, HARD])
def test_without_pull_and_shift_it_is_fedavg(name: str, setting: dict[str, Any]) -> None:
    fed = small()
    found = padded(FedDBE, name, **setting, consistency=0.0, shift_rate=0.0).fit(fed)
    plainly = padded(FedAvg, name, **setting).fit(fed)
    assert same_bits(found.weights, plainly.weights)
    assert all(not state for state in plain.states(fed, finished(found.method(), fed)).values())
    features, _ = rows(10, seed=3)
    for own in personal(fed, found).values():
        assert np.array_equal(own.decision_function(features), plainly.decision_function(features))


@each_network
def test_the_first_round_has_no_pull(name: str) -> None:
    fed = small()
    with_pull, without = (
        padded(FedDBE, name, rounds=1, consistency=strength).fit(fed).weights for strength in (9.0, 0.0)
    )
    assert same_bits(with_pull, without)


def test_with_mean_momentum_one_the_mean_is_that_of_the_batch() -> None:
    """One step on one batch: the pull's gradient by hand, through that batch's mean alone."""
    features, labels = rows(12)
    method = padded(FedDBE, "module", rounds=2, batch=12, epochs=1, consistency=5.0, shift_rate=0.0)
    fed = plain.federation(features, labels, np.zeros(12, int))
    first, second = (dict(run.server.weights) for run in plain.run(method, fed))
    run = finished(method, fed)
    net = plain.put(plain.built(method), {n: torch.as_tensor(w) for n, w in first.items()})
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    away = net[:-1](inputs).mean(dim=0) - torch.as_tensor(run.server.memory["anchor"])
    loss = nn.functional.cross_entropy(net(inputs), targets) + 5.0 * 0.5 * away.square().mean()
    loss.backward()
    expected = {n: (p - method.rate * p.grad).detach() for n, p in net.named_parameters()}
    assert far(second, expected) < 1e-12


class Frozen(nn.Module):
    """A network of which only the last layer is trained."""

    def __init__(self) -> None:
        super().__init__()
        net = plain.module()
        self.base, self.last = net[0].requires_grad_(False), net[2]

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.base(inputs)))


@pytest.mark.parametrize("own", ["linear", "frozen"])
def test_on_frozen_features_only_the_shift_acts(own: str) -> None:
    fed = small()
    parameters: dict[str, Any] = PADDED | {"network": Frozen() if own == "frozen" else own}
    pulled, free, still = (
        FedDBE(**parameters, consistency=strength, shift_rate=rate).fit(fed)
        for strength, rate in ((50.0, None), (0.0, None), (50.0, 0.0))
    )
    assert same_bits(pulled.weights, free.weights)
    assert same_bits(still.weights, FedAvg(**parameters).fit(fed).weights)
    assert not same_bits(pulled.weights, still.weights)
    head = "last" if own == "frozen" else "classifier"
    features, _ = rows(10, seed=3)
    for model in personal(fed, pulled).values():
        bias = pulled.weights[f"{head}.weight"] @ model.shift
        gap = model.decision_function(features) - pulled.decision_function(features)
        assert np.abs(model.shift).max() > 0
        assert np.abs(gap - bias).max() < 1e-12


@each_network
def test_a_personal_model_is_the_shared_network_with_its_shift(name: str) -> None:
    fed = small()
    method = padded(FedDBE, name, consistency=2.0)
    model, states = method.fit(fed), plain.states(fed, finished(method, fed))
    net = plain.put(plain.built(method), {n: torch.as_tensor(w) for n, w in model.weights.items()})
    inputs, _ = rows(10, seed=3)
    for client, own in personal(fed, model).items():
        shifted = net[:-1](torch.from_numpy(inputs)) + torch.as_tensor(states[client]["shift"])
        seen, scores = own.representation(inputs)
        assert np.abs(seen - shifted.detach().numpy()).max() < 1e-12
        assert np.abs(scores - net[-1](shifted).detach().numpy()).max() < 1e-12
        assert same_bits(own.weights, model.weights)


def test_a_client_that_never_took_part_has_the_shared_model() -> None:
    fed = small()
    model = padded(FedDBE, rounds=1, participation=0.25).fit(fed)
    (asked,) = model.history[0].cohort
    features, _ = rows(10, seed=3)
    for client, own in personal(fed, model).items():
        same = np.array_equal(own.decision_function(features), model.decision_function(features))
        assert same == (client != asked)


def test_local_accuracy_is_that_of_the_shifted_network() -> None:
    """Only the shift moves, one step a round: what a round reports is what the round before left behind."""
    features, labels = rows(40)
    fed = plain.federation(features, labels, np.zeros(40, int))
    setting = PADDED | {"rate": 0.0, "batch": 64, "epochs": 1, "rounds": 6}
    method = FedDBE(**setting, network=plain.module(1), consistency=0.0, shift_rate=3.0)
    reported, scores = [], []
    for run in plain.run(method, fed):
        reported.append(run.history[-1].metrics["local_accuracy"])
        scores.append(fed.participants[0].personalise(run.model()).score(features, labels))
    assert reported[1:] == scores[:-1]
    assert len(set(scores)) > 2


def test_the_shift_is_never_sent_and_features_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, sent = small(), []
    exchange = fed.exchange

    def listening(request: Any, chain: Any) -> Any:
        total = exchange(request, chain)
        sent.append((sorted(request.arrays), sorted(total.term.arrays)))
        return total

    monkeypatch.setattr(fed, "exchange", listening)
    padded(FedDBE).fit(fed)
    common = {"loss", "weight", *(f"w.{n}" for n in plain.weights(plain.built(padded(FedDBE))))}
    assert [set(up) - common for _, up in sent] == [{"features", "feature_rows"}, set(), set(), set()]
    assert [("anchor" in down) for down, _ in sent] == [False, True, True, True]


def test_running_statistics_that_stay_local_are_part_of_the_personal_model() -> None:
    from tests.gradient.test_engine import Normalised

    fed = small()
    method = FedDBE(**PADDED | {"network": Normalised(), "buffers": "local"})
    model = method.fit(fed)
    states = plain.states(fed, finished(method, fed))
    for client, own in personal(fed, model).items():
        assert np.array_equal(own.buffers["norm.running_mean"], states[client]["buffer.norm.running_mean"])


@each_network
def test_feddbe_resumes_exactly(name: str, tmp_path: Path) -> None:
    personal_checks.check_resume(padded(FedDBE, name, **HARD, mean_momentum=0.4), tmp_path)


@each_network
def test_personal_models_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    fed = small()
    personal_checks.check_files(fed, padded(FedDBE, name).fit(fed), tmp_path)


def test_a_file_without_its_shift_is_refused(tmp_path: Path) -> None:
    fed = small()
    own = padded(FedDBE).fit(fed).personal(fed.clients[0])
    arrays, note = own.contents()
    del arrays["shift"]
    fs.container.write_atomically(tmp_path / "own", fs.container.to_bytes(arrays, note))
    with pytest.raises(ModelFileError, match="shift"):
        fs.load_model(tmp_path / "own")


@each_network
def test_odd_clients(name: str) -> None:
    personal_checks.check_odd_clients(padded(FedDBE, name, consistency=1.0))


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_heads_side_by_side_train_as_if_alone(momentum: float) -> None:
    setting = {k: v for k, v in (PADDED | HARD).items() if k != "precision"}
    personal_checks.check_side_by_side(FedDBE, **setting, consistency=3.0, mean_momentum=momentum)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"consistency": -1.0}, "consistency"),
        ({"mean_momentum": 0.0}, "mean_momentum"),
        ({"mean_momentum": 1.5}, "mean_momentum"),
        ({"shift_rate": -0.1}, "shift_rate"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        FedDBE(**parameters)


def test_a_network_that_changes_its_last_layers_output_is_refused() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(plain.WIDTH, 4), torch.nn.Linear(4, plain.CLASSES)

        def forward(self, inputs: Any) -> Any:
            return 2 * self.last(torch.tanh(self.first(inputs)))

    with pytest.raises(DataError, match=r"changes what comes out of it\. End the network with that layer"):
        FedDBE(network=Doubled(), rounds=1).fit(small())
    FedDBE(network=Doubled(), rounds=1, shift_rate=0.0).fit(small())


def test_feddbe_is_a_method_of_sums() -> None:
    info = next(info for info in registry.methods() if info.key == "feddbe")
    assert not info.gathers
    assert fs.gradient.FedDBE is FedDBE
