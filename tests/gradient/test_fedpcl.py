"""FedPCL: its oracles, and the whole algorithm against its formulas in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.gradient.fedpcl import FAR, FedPCL, common_prototypes
from tests.gradient import personal_checks, plain
from tests.gradient.personal_checks import personal, small
from tests.gradient.plain import CLASSES, far, federation, finished, network, rows, same_bits, uneven

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch

each_network = pytest.mark.parametrize("name", plain.NETWORKS[1:])

COMMON: dict[str, Any] = {"precision": "float64", "rate": 0.02, "rounds": 4, "batch": 5, "epochs": 2}
"""Last batches are short, so that stacks are padded."""
SGD: dict[str, Any] = {"optimiser": "sgd", "momentum": 0.5, "rate": 0.1, "rate_decay": 0.9}

Prototypes = dict[int, Any]
"""By class; only those that there are."""


def made(name: str = "mlp:5", **parameters: Any) -> FedPCL:
    return FedPCL(network=network(name), **COMMON | parameters)


def directions(net: Any, inputs: Any) -> Any:
    """z; rows that no ReLU lets through have no direction and stay zero."""
    found = net[:-1](inputs)
    return found / found.norm(dim=1, keepdim=True).clamp(min=1e-12)


def prototypes(net: Any, data: tuple[Any, Any]) -> Prototypes:
    """p_i, one class after the other."""
    inputs, targets = data
    with torch.no_grad():
        return {c: directions(net, inputs[targets == c]).mean(dim=0) for c in targets.unique().tolist()}


def contrast(z: Any, targets: Any, held: Prototypes, temperature: float) -> Any:
    """l(q), row by row; `held` may have fewer classes than there are."""
    rows = [
        -torch.log(
            torch.exp(row @ held[y] / temperature)
            / sum(torch.exp(row @ prototype / temperature) for prototype in held.values())
        )
        for row, y in zip(z, targets.tolist(), strict=True)
    ]
    return torch.stack(rows).mean()


def mean_of(sets: dict[str, Prototypes]) -> Prototypes:
    """g: the plain mean over those that have a class."""
    classes = {c for own in sets.values() for c in own}
    return {c: torch.stack([own[c] for own in sets.values() if c in own]).mean(dim=0) for c in classes}


def local(method: FedPCL, net: Any, data: Any, sets: dict[str, Prototypes], round_: int, client: str) -> None:
    """A client's round, with the prototypes of all clients so far."""
    common = prototypes(net, data) | mean_of(sets)

    def loss(net: Any, inputs: Any, targets: Any) -> Any:
        z = directions(net, inputs)
        found = contrast(z, targets, common, method.temperature)
        apart = [contrast(z, targets, common | own, method.temperature) for own in sets.values()]
        # The last layer has no part in it; torch's optimiser needs a gradient, were it zero.
        unused = 0.0 * sum(p.sum() for p in net[-1].parameters())
        return found + (sum(apart) / len(apart) if apart else 0.0) + unused

    plain.local(net, method, data, round_, client, loss)


def lopsided() -> Any:
    """Clients that lack classes: two of the four have one and two classes."""
    features, labels = rows(40)
    owners = uneven()
    owners[(owners == 1) & (labels != 0)] = 3
    owners[(owners == 2) & (labels == 1)] = 3
    return federation(features, labels, owners)


@each_network
@pytest.mark.parametrize(
    "parameters",
    [{}, {"participation": 0.5, "rounds": 6, "temperature": 0.4}, SGD | {"participation": 0.5}],
)
def test_fedpcl_equals_its_formulas(name: str, parameters: dict[str, Any]) -> None:
    fed, method = lopsided(), made(name, **parameters)
    data, net = plain.clients_of(fed), plain.built(method)
    start = plain.weights(net)
    own: dict[str, Any] = {}
    sets: dict[str, Prototypes] = {}
    for round_, run in enumerate(plain.run(method, fed)):
        sent = {}
        for client in plain.cohort(method, fed.clients, round_):
            plain.put(net, own.get(client, start))
            local(method, net, data[client], sets, round_, client)
            own[client], sent[client] = plain.weights(net), prototypes(net, data[client])
        sets = dict(sorted((sets | sent).items()))
        for client, state in plain.states(fed, run).items():
            kept = {n.removeprefix("own."): array for n, array in state.items()}
            assert (client in own) == bool(kept)
            assert not kept or far(kept, {n: own[client][n] for n in kept}) < 1e-10
        extras = method.extras(run.server)
        for number, held in enumerate(sets.values()):
            assert set(np.flatnonzero(extras["owned"][number])) == set(held)
            assert far({c: extras["sets"][number, c] for c in held}, held) < 1e-10
        common = mean_of(sets)
        assert far({c: extras["common"][c] for c in common}, common) < 1e-10
        assert same_bits(run.server.weights, {n: w.numpy() for n, w in start.items()})
    features = rows(20, seed=3)[0]
    for client, model in personal(fed, run.model()).items():
        plain.put(net, own.get(client, start))
        z, held = directions(net, torch.from_numpy(features)).detach(), prototypes(net, data[client])
        expected = np.full((20, CLASSES), -FAR)
        for c, prototype in held.items():
            expected[:, c] = -(z - prototype).norm(dim=1).numpy()
        assert np.abs(model.decision_function(features) - expected).max() < 1e-7
        assert set(model.predict(features)) <= set(held)


@pytest.mark.parametrize("name", ["mlp:16", "module"])  # wide enough that every row has a direction
@pytest.mark.parametrize("permutation", [[1, 2, 0], [2, 1, 0]])
def test_relabelled_classes_are_the_same_run(name: str, permutation: list[int]) -> None:
    """Prototypes and predictions follow the classes; projections and losses stay as they are."""
    new = np.array(permutation)
    features, labels = rows(40)
    owners = lopsided_owners(labels)
    before, after = (federation(features, codes, owners) for codes in (labels, new[labels]))
    method = made(name, participation=0.5, rounds=5)
    first, second = (finished(method, fed) for fed in (before, after))
    mine, theirs = (method.extras(run.server) for run in (first, second))
    for part in ("sets", "owned"):
        assert np.abs(mine[part] - theirs[part][:, new]).max() < 1e-10
    for part in ("common", "known"):
        assert np.abs(mine[part] - theirs[part][new]).max() < 1e-10
    for one, other in zip(first.history, second.history, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-10)
        assert one.metrics["local_accuracy"] == other.metrics["local_accuracy"]
    queries = rows(20, seed=3)[0]
    own, others = personal(before, first.model()), personal(after, second.model())
    for client, model in own.items():
        shared = {n: w for n, w in model.weights.items() if "classifier" not in n}
        assert far(shared, {n: others[client].weights[n] for n in shared}) < 1e-10
        assert np.array_equal(new[model.predict(queries)], others[client].predict(queries))


def lopsided_owners(labels: Any) -> Any:
    owners = uneven()
    owners[(owners == 1) & (labels != 0)] = 3
    return owners


def test_one_client_with_all_classes_has_the_global_prototypes() -> None:
    features, labels = rows(40)
    fed = federation(features, labels, np.zeros(40, int))
    method = made()
    run = finished(method, fed)
    extras = method.extras(run.server)
    own = fed.participants[0].personalise(run.model())
    assert np.array_equal(extras["common"], extras["sets"][0])
    assert np.abs(own.prototypes - extras["common"]).max() < 1e-14
    assert extras["known"].all()


def test_the_mean_of_prototypes_is_over_those_that_have_the_class() -> None:
    sets = np.array([[[1.0, 2.0], [9.0, 9.0]], [[3.0, 0.0], [0.5, 0.5]]])
    found = common_prototypes(sets, np.array([[1.0, 0.0], [1.0, 0.0]]))
    assert found["common"].tolist() == [[2.0, 1.0], [0.0, 0.0]]
    assert found["known"].tolist() == [1.0, 0.0]


def test_training_lowers_the_contrast() -> None:
    run = finished(made(rounds=12, temperature=0.5), small())
    losses = [record.metrics["loss"] for record in run.history]
    assert losses[-1] < 0.8 * losses[1]


def test_a_class_that_joins_late_is_learnt() -> None:
    """Its owner brings a prototype of its own into a round in which nobody has sent one."""
    features, labels = rows(40)
    rest = labels != 2
    fed = federation(features[rest], labels[rest], uneven(40)[rest])
    method = made(rounds=4)
    for round_, run in enumerate(plain.run(method, fed)):
        assert method.extras(run.server)["known"].tolist() == [1.0, 1.0, float(round_ > 1)]
        if round_ == 1:
            fed.add(fs.Participant("late", fs.ClientData(features, labels)))
    late = next(p for p in fed.participants if p.name == "late").personalise(run.model())
    assert late.owned.all()


def test_only_prototypes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gradient.test_engine import Normalised

    fed, found = small(), []
    exchange = fed.exchange

    def listening(request: Any, chain: Any) -> Any:
        total = exchange(request, chain)
        found.append(set(total.term.arrays))
        return total

    monkeypatch.setattr(fed, "exchange", listening)
    model = FedPCL(**COMMON | {"network": Normalised()}).fit(fed)
    named = {f"{part}@{client}" for part in ("prototypes", "owned") for client in fed.clients}
    assert found == [{"loss", "weight"} | named] * 4
    first = Normalised()
    assert same_bits(model.buffers, {n: b for n, b in first.named_buffers() if b.is_floating_point()})


def test_running_statistics_stay_with_their_client() -> None:
    from tests.gradient.test_engine import Normalised

    fed = small()
    run = finished(FedPCL(**COMMON | {"network": Normalised()}), fed)
    states, seen = plain.states(fed, run), set()
    for client, own in personal(fed, run.model()).items():
        kept = states[client]["statistics.norm.running_mean"]
        assert np.array_equal(own.buffers["norm.running_mean"], kept)
        seen.add(kept.tobytes())
    assert len(seen) == 4


def test_it_gathers_and_says_so() -> None:
    info = next(info for info in registry.methods() if info.key == "fedpcl")
    assert info.gathers
    assert fs.gradient.FedPCL is FedPCL


@each_network
def test_fedpcl_resumes_exactly(name: str, tmp_path: Path) -> None:
    personal_checks.check_resume(made(name, participation=0.5, rounds=6), tmp_path)


@each_network
def test_personal_models_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    fed = small()
    personal_checks.check_files(fed, made(name).fit(fed), tmp_path)


@each_network
def test_odd_clients(name: str) -> None:
    personal_checks.check_odd_clients(made(name))


def test_a_client_knows_the_classes_it_has_and_no_others() -> None:
    fed = personal_checks.odd()
    model = made().fit(fed)
    queries = rows(30, seed=3)[0]
    for participant in fed.participants:
        own, has = participant.personalise(model), np.unique(participant.data.own_labels)
        assert np.array_equal(np.flatnonzero(own.owned), has)
        assert len(has) == 0 or set(own.predict(queries)) <= set(has)


def test_a_client_that_never_took_part_has_the_first_projection() -> None:
    fed = small()
    model = made(rounds=1, participation=0.25).fit(fed)
    (asked,) = model.history[0].cohort
    for client, own in personal(fed, model).items():
        assert same_bits(own.weights, model.weights) == (client != asked)


def test_heads_side_by_side_train_as_if_alone() -> None:
    setting = {k: v for k, v in COMMON.items() if k != "precision"}
    personal_checks.check_side_by_side(FedPCL, **setting, participation=0.5)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"network": "linear"}, "mlp:256"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"track": "drift"}, "never leaves"),
        ({"network": "mlp:9,5", "feedback": "lowest"}, "never leaves"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        FedPCL(**parameters)


def test_a_network_of_which_only_the_last_layer_is_trained_is_refused() -> None:
    net = plain.module()
    net[0].requires_grad_(False)
    with pytest.raises(DataError, match=r"moves no weight.*Take a network with a hidden layer"):
        FedPCL(**COMMON | {"network": net}).fit(small())
