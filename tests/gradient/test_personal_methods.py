"""Fine-tuning, Ditto, FedALA and FedSelect: their oracles, and their formulas in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fedsolve import ClientData, LocalFederation, Participant, client_scores, load_model
from fedsolve.arrays import stream
from fedsolve.errors import DataError
from fedsolve.experiments.cells import LocalParts, run_locally
from fedsolve.federation.encoding import decode_request, decode_term, encode_request, encode_term
from fedsolve.federation.engine import Followers
from fedsolve.federation.messages import Term, Total
from fedsolve.gradient import Ditto, FedALA, FedAvg, FedAvgFT, FedProx, FedProxFT, FedSelect
from fedsolve.gradient.fedala import LOSSES
from fedsolve.gradient.fedselect import select
from fedsolve.scoring.client_scores import client_rows
from tests.command import document, fedsolve, refused
from tests.gradient import plain
from tests.gradient.plain import far, federation, network, rows, same_bits, uneven
from tests.gradient.test_server_methods import pulled

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch

each_network = pytest.mark.parametrize("name", plain.NETWORKS)

COMMON: dict[str, Any] = {"precision": "float64", "rate": 0.2, "rounds": 5, "batch": 4, "epochs": 2}
"""Several local steps a round; clients of 4, 8, 12 and 16 rows have different numbers of them."""

HARD: dict[str, Any] = {
    "participation": 0.5,
    "rounds": 8,
    "momentum": 0.6,
    "weight_decay": 0.01,
    "rate_decay": 0.9,
    "clip": 1.5,
}

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg-ft": (FedAvgFT, {"fine_epochs": 2}),
    "fedprox-ft": (FedProxFT, {"proximal": 0.5}),
    "ditto": (Ditto, {"personal_epochs": 1}),
    "fedala": (FedALA, {"merge_share": 0.6}),
    "fedselect": (FedSelect, {"select_every": 1, "select_share": 0.4}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
STATEFUL = ("ditto", "fedala", "fedselect")


def made(kind: Any, name: str = "mlp:5", **parameters: Any) -> Any:
    return kind(network=network(name), **COMMON | parameters)


def one_of(kind: str, name: str = "mlp:5", **parameters: Any) -> Any:
    method, own = KINDS[kind]
    return made(method, name, **own | parameters)


def small(seed: int = 0, **options: Any) -> Any:
    features, labels = rows(40, seed)
    return federation(features, labels, uneven(), **options)


def stranger(seed: int = 7, count: int = 10) -> Participant:
    """A participant that no run knows."""
    return Participant("stranger", ClientData(*rows(count, seed)))


def by_itself(participant: Participant) -> LocalFederation:
    """A federation of this participant and one without rows: with company, both train on one thread."""
    nobody = ClientData(np.zeros((0, plain.WIDTH)), np.zeros(0, dtype=int))
    members = [Participant(participant.name, participant.data), Participant("nobody", nobody)]
    return LocalFederation(members, classes=range(plain.CLASSES), workers=1)


def own_weights(model: Any, fed: Any) -> dict[str, dict[str, Any]]:
    return {p.name: p.personalise(model).weights for p in fed.participants}


def tensors(weights: Any) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in weights.items()}


def data_of(participant: Participant) -> tuple[Any, Any]:
    data = participant.data
    return torch.as_tensor(data.features(slice(None))), torch.as_tensor(data.own_labels)


# -- fine-tuning ------------------------------------------------------------------------------------


@each_network
@pytest.mark.parametrize("off", [{"fine_epochs": 0}, {"fine_rate": 0.0}])
def test_no_fine_tuning_is_the_host(name: str, off: dict[str, Any]) -> None:
    fed = small()
    for tuned, host, own in ((FedAvgFT, FedAvg, {}), (FedProxFT, FedProx, {"proximal": 0.5})):
        expected = made(host, name, **own).fit(fed).weights
        model = made(tuned, name, **own, **off).fit(fed)
        assert same_bits(model.weights, expected)
        assert all(same_bits(found, expected) for found in own_weights(model, fed).values())


@each_network
def test_fine_tuning_moves_one_client_and_nobody_else(name: str) -> None:
    fed = small()
    model = made(FedAvgFT, name).fit(fed)
    shared = {key: value.copy() for key, value in model.weights.items()}
    before = model.personal("client-2").weights
    assert not same_bits(model.personal("client-1").weights, shared)
    assert same_bits(model.weights, shared)
    assert same_bits(model.personal("client-2").weights, before)


@each_network
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_fine_tuning_equals_its_formulas(name: str, pull: float) -> None:
    fed = small()
    fine = {"fine_epochs": 3, "fine_rate": 0.15}
    method = (
        made(FedProxFT, name, **HARD, proximal=pull, **fine) if pull else made(FedAvgFT, name, **HARD, **fine)
    )
    model = method.fit(fed)
    start = tensors(model.weights)
    plan = replace(method, epochs=3, rate=0.15, rate_decay=1.0)
    for participant in (*fed.participants, stranger()):
        net = plain.put(plain.built(method), start)
        edit = pulled(start, pull) if pull else None
        plain.local(net, plan, data_of(participant), method.rounds, "alone", edit=edit)
        assert far(participant.personalise(model).weights, plain.weights(net)) < 1e-10


def test_fine_tuning_takes_the_rate_of_the_next_round() -> None:
    fed = small()
    found = made(FedAvgFT, rate_decay=0.5, rounds=3).fit(fed)
    told = made(FedAvgFT, rate_decay=0.5, rounds=3, fine_rate=0.2 * 0.5**3).fit(fed)
    assert same_bits(found.personal("client-3").weights, told.personal("client-3").weights)


# -- Ditto ------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_network
@pytest.mark.parametrize("pull", [0.0, 1.0, 7.0])
@pytest.mark.parametrize("hard", [False, True])
def test_dittos_global_model_is_fedavgs(name: str, pull: float, hard: bool) -> None:
    fed, common = small(), HARD if hard else {}
    found = made(Ditto, name, **common, personal_pull=pull, personal_epochs=3, personal_rate=0.1).fit(fed)
    assert same_bits(found.weights, made(FedAvg, name, **common).fit(fed).weights)


@each_network
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_ditto_without_pull_is_training_alone(name: str, precision: Any) -> None:
    fed = small()
    model = made(Ditto, name, personal_pull=0.0, precision=precision).fit(fed)
    for participant in fed.participants:
        lonely = by_itself(participant)
        # A mean of one, without a row count that would round: n w / n is not always w.
        alone = made(FedAvg, name, precision=precision, weighting="uniform").fit(lonely)
        assert same_bits(model.personal(participant.name).weights, alone.weights)


@pytest.mark.parametrize("pull", [0.0, 1.0])
def test_without_pull_others_do_not_matter(pull: float) -> None:
    features, labels = rows(40)
    owners = uneven()
    found = []
    for shift in (0, 1):
        others = np.where(owners == 2, labels, (labels + shift) % plain.CLASSES)
        fed = federation(features, others, owners)
        found.append(made(Ditto, **HARD, personal_pull=pull).fit(fed).personal("client-2").weights)
    assert same_bits(*found) == (pull == 0)


@each_network
def test_ditto_equals_its_formulas(name: str) -> None:
    fed, pull = small(), 0.6
    method = made(Ditto, name, **HARD, personal_pull=pull, personal_rate=0.13, personal_epochs=3)
    own = replace(method, rate=0.13, epochs=3)
    net, data = plain.built(method), plain.clients_of(fed)
    first = plain.weights(net)
    current, personal, late = first, {}, 0
    for round_, run in enumerate(plain.run(method, fed)):
        start = current
        for client in plain.cohort(method, list(data), round_):
            late += round_ > 0 and client not in personal
            plain.put(net, personal.get(client, first))
            plain.local(net, own, data[client], round_, client, edit=pulled(start, pull))
            personal[client] = plain.weights(net)
        clients = plain.trained(method, fed, start, round_).values()
        current = plain.mean([c.weights for c in clients], [c.rows for c in clients])
        assert far(run.server.weights, current) < 1e-10
        model = run.model()
        for client in personal:
            participant = next(p for p in fed.participants if p.name == client)
            assert far(participant.personalise(model).weights, personal[client]) < 1e-10
    assert late  # some client took part for the first time after round 0
    plain.put(net, current)
    new = stranger()
    plain.local(net, own, data_of(new), method.rounds, "alone", edit=pulled(current, pull))
    assert far(new.personalise(model).weights, plain.weights(net)) < 1e-10


# -- FedALA -----------------------------------------------------------------------------------------


@each_network
@pytest.mark.parametrize("off", [{"merge_rate": 0.0}, {"merge_tensors": 0}])
def test_fedala_without_a_mixture_is_fedavg(name: str, off: dict[str, Any]) -> None:
    fed = small()
    model = made(FedALA, name, **HARD, **off).fit(fed)
    expected = made(FedAvg, name, **HARD).fit(fed)
    assert same_bits(model.weights, expected.weights)
    assert all(same_bits(found, expected.weights) for found in own_weights(model, fed).values())
    assert not same_bits(made(FedALA, name, **HARD).fit(fed).weights, expected.weights)


@each_network
def test_a_client_that_gets_its_own_weights_back_is_left_alone(name: str) -> None:
    features, labels = rows(20)
    fed = federation(features, labels, np.zeros(20, dtype=int))
    model = made(FedALA, name, weighting="uniform").fit(fed)
    assert same_bits(model.weights, made(FedAvg, name, weighting="uniform").fit(fed).weights)
    assert same_bits(model.personal("client-0").weights, model.weights)


@each_network
@pytest.mark.parametrize("tensors_", [1, 2, 9])
def test_mixtures_lie_between_0_and_1_and_are_each_clients_own(name: str, tensors_: int) -> None:
    fed = small()
    run = plain.finished(made(FedALA, name, merge_tensors=tensors_, merge_rate=20.0), fed)
    names = list(plain.weights(plain.built(run.method)))[-tensors_:]
    mixtures = [
        np.concatenate([state[f"merge.{key}"].ravel() for key in names])
        for state in plain.states(fed, run).values()
    ]
    for mixture in mixtures:
        assert mixture.min() >= 0
        assert mixture.max() <= 1
        assert mixture.min() < 1
    assert all(not np.array_equal(mixtures[0], other) for other in mixtures[1:])


def merged(
    method: Any, net: Any, data: Any, state: dict[str, Any], start: dict[str, Any], round_: int, client: str
) -> tuple[dict[str, Any], int]:
    """Where a client starts from, after learning its mixture in `state` in place; and the passes it took."""
    features, labels = data
    names = list(start)[-method.merge_tensors :]
    if not state or all(torch.equal(state["own"][n], start[n]) for n in names):
        return start, 0
    chosen = stream(method.seed, "merge", client, round_).permutation(len(labels))
    chosen = chosen[: max(1, round(method.merge_share * len(labels)))]
    own, mixture = state["own"], state["mixture"]
    theta = dict(start)
    losses: list[float] = []
    while True:
        for first in range(0, len(chosen), method.batch):
            batch = torch.as_tensor(chosen[first : first + method.batch])
            theta |= {n: own[n] + (start[n] - own[n]) * mixture[n] for n in names}
            loss = plain.cross_entropy(plain.put(net, theta), features[batch], labels[batch])
            slope = dict(
                zip(theta, torch.autograd.grad(loss, list(net.parameters())), strict=True)
            )  # with respect to theta
            for n in names:
                mixture[n] = (mixture[n] - method.merge_rate * slope[n] * (start[n] - own[n])).clamp(0, 1)
        losses.append(loss.item())
        settled = len(losses) > LOSSES and np.std(losses[-LOSSES:]) < method.merge_threshold
        if state["learnt"] or settled:
            break
    state["learnt"] = True
    return theta | {n: own[n] + (start[n] - own[n]) * mixture[n] for n in names}, len(losses)


@pytest.mark.slow
@each_network
@pytest.mark.parametrize("tensors_", [1, 2, 9])
def test_fedala_equals_its_formulas(name: str, tensors_: int) -> None:
    fed = small()
    method = made(FedALA, name, **HARD, merge_tensors=tensors_, merge_share=0.7, merge_threshold=2e-3)
    net, data = plain.built(method), plain.clients_of(fed)
    current = plain.weights(net)
    kept: dict[str, dict[str, Any]] = {client: {} for client in data}
    passes = []
    for round_, run in enumerate(plain.run(method, fed)):
        sent, sizes = [], []
        for client in plain.cohort(method, list(data), round_):
            start, count = merged(method, net, data[client], kept[client], current, round_, client)
            passes.append(count)
            plain.put(net, start)
            plain.local(net, method, data[client], round_, client)
            mixture = kept[client].get("mixture", {n: torch.ones_like(w) for n, w in current.items()})
            learnt = kept[client].get("learnt", False)
            kept[client] = {"own": plain.weights(net), "mixture": mixture, "learnt": learnt}
            sent.append(plain.weights(net))
            sizes.append(len(data[client][1]))
        current = plain.mean(sent, sizes)
        assert far(run.server.weights, current) < 1e-10
    assert {0, 1} < set(passes)
    # Clients settle after different numbers of passes; one bias alone hardly moves.
    assert tensors_ == 1 or len({count for count in passes if count > 1}) > 1
    model = run.model()
    for participant in fed.participants:
        client = participant.name
        theta, _ = merged(method, net, data[client], kept[client], current, method.rounds, "alone")
        assert far(participant.personalise(model).weights, theta) < 1e-10
    assert same_bits(stranger().personalise(model).weights, model.weights)


# -- FedSelect --------------------------------------------------------------------------------------


@each_network
def test_fedselect_without_a_selection_is_fedavg(name: str) -> None:
    fed = small()
    expected = made(FedAvg, name, weighting="uniform").fit(fed).weights
    assert same_bits(made(FedSelect, name, select_share=0.0).fit(fed).weights, expected)
    assert same_bits(made(FedSelect, name, select_every=5).fit(fed).weights, expected)
    assert not same_bits(made(FedSelect, name, select_every=3).fit(fed).weights, expected)


def unbiased() -> Any:
    """A network whose every entry may become a client's own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Linear(plain.WIDTH, 5, bias=False), nn.Tanh(), nn.Linear(5, plain.CLASSES, bias=False)
        return nn.Sequential(*layers).double()


def test_fedselect_with_everything_selected_is_training_alone() -> None:
    fed = small()
    method = made(FedSelect, select_share=1.0, select_target=1.0, select_every=1, rounds=5)
    method = replace(method, network=unbiased())
    runs = list(run_copies(method, fed))
    common = tensors(runs[1])  # of rounds 0 and 1, before anything is a client's own
    host = FedAvg(network=unbiased(), **COMMON | {"weighting": "uniform", "rounds": 2}).fit(fed)
    assert same_bits(common, host.weights)
    for later in runs[2:]:
        assert same_bits(later, common)  # nobody shares: nothing changes
    model = method.fit(fed)
    net = plain.built(method)
    for client, data in plain.clients_of(fed).items():
        plain.put(net, common)
        for round_ in range(2, 5):
            plan = plain.batches(method, len(data[1]), round_, client)
            descend(net, method, data, own_passes(plan, method))
        plan = plain.batches(method, len(data[1]), 5, "alone")
        descend(net, method, data, own_passes(plan, method))
        assert far(model.personal(client).weights, plain.weights(net)) < 1e-10


def run_copies(method: Any, fed: Any) -> Any:
    for run in plain.run(method, fed):
        yield {name: value.copy() for name, value in run.server.weights.items()}


def own_passes(plan: list[Any], method: Any) -> list[Any]:
    """The batches of the passes that move a client's own entries."""
    length = len(plan) // (2 * method.epochs)
    return [batch for number, batch in enumerate(plan) if (number // length) % 2 == 0]


def descend(net: Any, method: Any, data: Any, plan: list[Any]) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=method.rate)
    for batch in plan:
        optimiser.zero_grad()
        plain.cross_entropy(net, data[0][batch], data[1][batch]).backward()
        optimiser.step()


@each_network
def test_what_is_a_clients_own_stays_so(name: str) -> None:
    fed = small()
    before: dict[str, Any] = {}
    sizes = []
    for run in plain.run(made(FedSelect, name, rounds=8, select_every=2, select_share=0.3), fed):
        for client, state in plain.states(fed, run).items():
            chosen = {key: value for key, value in state.items() if key.startswith("chosen.")}
            assert all(key.endswith("weight") for key in chosen)
            for key, value in chosen.items():
                assert np.all(value >= before.get((client, key), 0))
                before[client, key] = value
        sizes.append(sum(int(value.sum()) for value in before.values()))
    assert sizes[1] == 0 < sizes[2] == sizes[3] < sizes[4] < sizes[6]


def test_selection_takes_what_moved_farthest() -> None:
    mask = np.zeros((2, 4), dtype=np.uint8)
    moved = np.array([[0.1, -5.0, 0.3, 2.0], [-3.0, 0.2, 1.0, 0.0]])
    first = select(moved, mask, 0.25, 0.8)
    assert first.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert mask.sum() == 0
    second = select(moved, first, 0.5, 0.8)
    assert second.tolist() == [[0, 1, 1, 1], [1, 0, 1, 0]]
    assert np.array_equal(select(moved, second, 0.5, 0.6), second)  # five of eight are enough
    assert np.array_equal(select(moved, mask, 0.0, 0.8), mask)
    assert select(moved, mask, 1.0, 1.0).all()
    assert np.array_equal(select(moved, np.ones_like(mask), 1.0, 1.0), np.ones_like(mask))
    assert select(np.zeros((0, 3)), np.zeros((0, 3), dtype=np.uint8), 0.5, 0.5).shape == (0, 3)


def alternating(
    net: Any, method: Any, data: Any, plan: list[Any], mask: Any, passes: int, rate: float
) -> None:
    """Passes that move a client's own entries and passes that move the shared ones, in turn."""
    length = len(plan) // passes
    for number, batch in enumerate(plan):
        loss = plain.cross_entropy(net, data[0][batch], data[1][batch])
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for (name, weight), slope in zip(net.named_parameters(), slopes, strict=True):
                own = mask.get(name, torch.zeros_like(weight))
                if passes > method.epochs:
                    slope = slope * (own if (number // length) % 2 == 0 else 1 - own)
                weight.sub_(rate * slope)


@each_network
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fedselect_equals_its_formulas(name: str, weighting: Any) -> None:
    fed = small()
    method = made(
        FedSelect,
        name,
        rounds=12,
        participation=0.5,
        rate_decay=0.9,
        weighting=weighting,
        select_every=2,
        select_share=0.4,
        select_target=0.5,
    )
    net, data = plain.built(method), plain.clients_of(fed)
    current = plain.weights(net)
    names = [key for key in current if key.endswith("weight")]
    kept: dict[str, dict[str, Any]] = {}
    overlap = 0
    for round_, run in enumerate(plain.run(method, fed)):
        rate = method.rate * method.rate_decay**round_
        sums = {key: torch.zeros_like(value) for key, value in current.items()}
        counts = {key: torch.zeros_like(value) for key, value in current.items()}
        for client in plain.cohort(method, list(data), round_):
            nothing = {key: torch.zeros_like(current[key]) for key in names}
            first = {"mask": nothing, "chosen": nothing, "anchor": dict(current), "parts": 0}
            state = kept.setdefault(client, first)
            start = dict(current)
            if "own" in state:
                start |= {k: torch.where(state["mask"][k] > 0, state["own"][k], current[k]) for k in names}
            plain.put(net, start)
            plan = plain.batches(method, len(data[client][1]), round_, client)
            passes = method.epochs * (2 if round_ > method.select_every else 1)
            mask = state["chosen"]
            alternating(net, method, data[client], plan, mask, passes, rate)
            after = plain.weights(net)
            weight = len(data[client][1]) if weighting == "size" else 1.0
            for key in current:
                shared = 1 - mask.get(key, torch.zeros_like(current[key]))
                sums[key] += weight * shared * after[key]
                counts[key] += weight * shared
            state |= {"own": after, "mask": mask}
            if state["parts"] and state["parts"] % method.select_every == 0:
                state["chosen"] = {
                    key: torch.as_tensor(
                        select(
                            (after[key] - state["anchor"][key]).numpy(),
                            mask[key].numpy(),
                            method.select_share,
                            method.select_target,
                        )
                    )
                    for key in names
                }
                state["anchor"] = after
            state["parts"] += 1
        overlap += any(bool((count == 0).any()) for count in counts.values())
        current = {
            key: torch.where(counts[key] > 0, sums[key] / counts[key].clamp(min=0.5), current[key])
            for key in current
        }
        assert far(run.server.weights, current) < 1e-10
    assert overlap  # somewhere nobody shared an entry
    model = run.model()
    for client, participant in zip(data, fed.participants, strict=True):
        start, state = dict(current), kept[client]
        start |= {k: torch.where(state["mask"][k] > 0, state["own"][k], current[k]) for k in names}
        plan = plain.batches(method, len(data[client][1]), method.rounds, "alone")
        rate = method.rate * method.rate_decay**method.rounds
        alternating(
            plain.put(net, start), method, data[client], plan, state["chosen"], 2 * method.epochs, rate
        )
        assert far(participant.personalise(model).weights, plain.weights(net)) < 1e-10


@pytest.mark.parametrize("wrong", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"optimiser": "adam"}])
def test_fedselect_refuses_what_moves_masked_entries(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"plain SGD; got .*(0\.9|0\.1|'adam')"):
        made(FedSelect, **wrong)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FedAvgFT, {"fine_epochs": -1}),
        (FedAvgFT, {"fine_rate": -0.1}),
        (Ditto, {"personal_pull": -1.0}),
        (Ditto, {"personal_epochs": 0}),
        (Ditto, {"personal_rate": -1.0}),
        (FedALA, {"merge_share": 0.0}),
        (FedALA, {"merge_share": 1.1}),
        (FedALA, {"merge_tensors": -1}),
        (FedALA, {"merge_rate": -1.0}),
        (FedSelect, {"select_share": 1.5}),
        (FedSelect, {"select_target": -0.1}),
        (FedSelect, {"select_every": 0}),
    ],
)
def test_wrong_parameters_are_named(kind: Any, wrong: dict[str, Any]) -> None:
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(DataError, match=rf"{name}.*{value}"):
        made(kind, **wrong)


# -- all of them ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("name", ["mlp:5", pytest.param("linear", marks=pytest.mark.slow)])
def test_a_stack_is_its_clients_one_by_one(kind: str, name: str) -> None:
    fed = small()
    stacked = one_of(kind, name)
    single = replace(stacked, network=plain.built(stacked))
    one, other = stacked.fit(fed), single.fit(small())
    assert far(one.weights, other.weights) < 1e-10
    for client in fed.clients:
        assert far(one.personal(client).weights, other.personal(client).weights) < 1e-10


@each_kind
@pytest.mark.parametrize("name", ["module", pytest.param("mlp:5", marks=pytest.mark.slow)])
def test_a_resumed_run_personalises_alike(kind: str, name: str, tmp_path: Any) -> None:
    method = one_of(kind, name, participation=0.5, rounds=6)
    expected = method.fit(fed := small())

    class Stopped(Exception): ...

    def stop(record: Any, _: int) -> None:
        if record.exchange == 3:
            raise Stopped

    with pytest.raises(Stopped):
        method.fit(small(), checkpoint=tmp_path / "run", follow=stop)
    again = small()
    resumed = method.fit(again, checkpoint=tmp_path / "run", resume=True)
    assert same_bits(resumed.weights, expected.weights)
    for client in fed.clients:
        assert same_bits(resumed.personal(client).weights, expected.personal(client).weights)


@each_kind
@pytest.mark.parametrize("name", ["mlp:5", pytest.param("module", marks=pytest.mark.slow)])
def test_a_request_sent_again_is_answered_alike(kind: str, name: str) -> None:
    method, fed = one_of(kind, name), small()
    run = method.start(fed.describe())
    while (request := run.request(fed.clients)) is not None:
        first, second = (fed.exchange(request, run.chain) for _ in range(2))
        assert same_bits(first.term.arrays, second.term.arrays)
        run.absorb(second)
    once = method.fit(other := small())
    assert same_bits(run.model().weights, once.weights)
    model = run.model()
    for mine, theirs in zip(fed.participants, other.participants, strict=True):
        assert same_bits(mine.personalise(model).weights, theirs.personalise(once).weights)


@each_kind
def test_requests_and_terms_travel_as_bytes(kind: str) -> None:
    method, fed, far_away = one_of(kind), small(), small()
    here, there = method.start(fed.describe()), method.start(far_away.describe())
    while (request := here.request(fed.clients)) is not None:
        here.absorb(fed.exchange(request, here.chain))
        sent = decode_request(encode_request(there.request(far_away.clients)))
        terms = [participant.answer(sent) for participant in far_away.participants]
        total = Term()
        for term in terms:
            assert isinstance(term, Term)
            total.add(decode_term(encode_term(term)))
        there.absorb(Total(total, fed.clients))
    assert far(here.server.weights, there.server.weights) < 1e-10


@each_kind
def test_models_and_states_are_kept_in_files(kind: str, tmp_path: Any) -> None:
    fed = small()
    method = one_of(kind)
    model = method.fit(fed, checkpoint=tmp_path / "run")
    model.save(tmp_path / "shared")
    shared = load_model(tmp_path / "shared")
    features = rows(9, 4)[0]
    for participant in fed.participants:
        own = model.personal(participant.name)
        own.save(tmp_path / "own")
        loaded = load_model(tmp_path / "own")
        assert type(loaded) is type(own)
        assert loaded.private
        assert not shared.private
        assert np.array_equal(loaded.decision_function(features), own.decision_function(features))
        # The participant of a later process: its data, its states, and the shared model's file.
        later = Participant(participant.name, participant.data, states=tmp_path / "run.clients")
        assert np.array_equal(
            later.personalise(shared).decision_function(features), own.decision_function(features)
        )
        with pytest.raises(DataError, match="one client's own already"):
            loaded.personalised(participant.data)
        if shared.kept:  # type: ignore[attr-defined]
            with pytest.raises(DataError, match=f"what '{participant.name}' kept of the run is gone"):
                Participant(participant.name, participant.data).personalise(shared)
        weighted = ClientData(features, np.zeros(9, dtype=int), weights=np.ones(9))
        with pytest.raises(DataError, match="do not take sample weights"):
            Participant("new", weighted).personalise(shared)
        with pytest.raises(DataError, match="label 7 in row 0 is not one of"):
            Participant("new", ClientData(features, np.full(9, 7))).personalise(shared)
    with pytest.raises(DataError, match="loaded from a file"):
        shared.personal("client-0")  # type: ignore[attr-defined]
    with pytest.raises(
        DataError,
        match=r"no participant is called 'nobody'; there are client-0, client-1, client-2, client-3\.",
    ):
        model.personal("nobody")


@each_kind
def test_clients_without_rows_or_of_another_width(kind: str) -> None:
    features, labels = rows(41)
    owners = np.append(np.minimum(uneven(), 2), 4)  # client 3 has nothing, client 4 one row
    fed = federation(features, labels, owners)
    model = one_of(kind).fit(fed)
    for client in fed.clients:
        own = model.personal(client)
        assert all(np.isfinite(value).all() for value in own.weights.values())
        if client == "client-3":
            assert same_bits(own.weights, model.weights)
    with pytest.raises(DataError, match="has 2 features per row, the model uses 6"):
        model.personalised(ClientData(np.zeros((3, 2)), np.zeros(3, dtype=int)))


def normalised() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Linear(plain.WIDTH, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, plain.CLASSES)
        return nn.Sequential(*layers).double()


@each_kind
@pytest.mark.parametrize("buffers", ["average", pytest.param("local", marks=pytest.mark.slow)])
def test_networks_with_running_statistics(kind: str, buffers: Any) -> None:
    fed = small()
    method = replace(one_of(kind, buffers=buffers), network=normalised())
    model = method.fit(fed)
    features = rows(12, 4)[0]
    for client in fed.clients:
        own = model.personal(client)
        assert own.buffers.keys() == model.buffers.keys()
        assert np.isfinite(own.decision_function(features)).all()
        if kind == "ditto" or buffers == "local":
            assert not same_bits(own.buffers, model.buffers)


def test_dittos_running_statistics_are_its_own() -> None:
    fed = small()
    method = replace(made(Ditto, personal_pull=0.0, weighting="uniform"), network=normalised())
    model = method.fit(fed)
    host = replace(made(FedAvg, weighting="uniform"), network=normalised())
    assert same_bits(model.buffers, host.fit(fed).buffers)
    for participant in fed.participants:
        lonely = by_itself(participant)
        alone, own = host.fit(lonely), model.personal(participant.name)
        assert same_bits(own.weights, alone.weights)
        assert same_bits(own.buffers, alone.buffers)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_that_is_gone_is_missed(kind: str) -> None:
    fed = small()
    model = one_of(kind, participation=0.5, rounds=2).fit(fed)
    took_part = {client for record in model.history for client in record.cohort}
    assert 0 < len(took_part) < 4
    for participant in fed.participants:
        participant.forget()
        if participant.name in took_part:
            with pytest.raises(DataError, match=f"what '{participant.name}' kept of the run is gone"):
                participant.personalise(model)
        else:
            participant.personalise(model)


def test_a_model_for_everybody_has_no_personal_ones() -> None:
    fed = small()
    model = made(FedAvg).fit(fed)
    assert not model.personalises
    with pytest.raises(DataError, match="the same for everybody"):
        fed.participants[0].personalise(model)


@pytest.mark.parametrize("kind", STATEFUL)
def test_what_clients_keep_does_not_depend_on_workers_or_order(kind: str) -> None:
    features, labels = rows(40)
    one = one_of(kind).fit(federation(features, labels, uneven()))
    other = one_of(kind).fit(federation(features, labels, uneven(), workers=3))
    for client in one.federation.clients:
        assert same_bits(one.personal(client).weights, other.personal(client).weights)


# -- where they are used ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Any:
    """Rows to train with and to test with, as npz."""
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    features, labels = rows(120, 2)
    np.savez(path, x_train=features[:80], y_train=labels[:80], x_test=features[80:], y_test=labels[80:])
    return path


@each_kind
def test_the_command_writes_every_clients_model(kind: str, file: Any, tmp_path: Any) -> None:
    words = ("--method", kind, "--clients", 3, "--workers", 1, "--rounds", 4, "--rate", 0.5)
    told = document("train", file, *words, "--out", tmp_path / "shared", "--personal", tmp_path / "own")
    scores = told["personal"]["local_accuracy"]
    assert told["personal"]["balances"] is None
    assert set(scores) == {"shared", "personal"}
    models = [load_model(tmp_path / "own" / f"client-{k}.safetensors") for k in range(3)]
    assert all(type(model).private for model in models)
    kept = [b"".join(w.tobytes() for w in m.weights.values()) for m in models]  # type: ignore[attr-defined]
    assert len(set(kept)) == 3
    page = fedsolve("train", file, *words, "--personal", tmp_path / "own").stdout
    assert "mean local accuracy, shared model" in page
    assert "balance" not in page


def test_the_command_names_the_methods_with_personal_models(file: Any, tmp_path: Any) -> None:
    result = fedsolve("train", file, "--method", "fedavg", "--personal", tmp_path / "own")
    refused(result, 2, "apfl", "ditto", "fedala", "fedavg-ft", "fedprox-ft", "fedselect", "not fedavg")


def test_a_model_that_knows_its_backbone_personalises() -> None:
    fed = small()
    model = made(FedAvgFT).fit(fed)
    expected = model.personal("client-1").weights
    model.parameters["backbone"] = "pixels"
    assert same_bits(model.personal("client-1").weights, expected)


@each_kind
def test_experiments_score_clients_own_models(kind: str) -> None:
    features, labels = rows(80, 2)
    owners, fed = uneven(40), federation(features[:40], labels[:40], uneven(40))
    parts = LocalParts(
        client_rows(features[:40], labels[:40], owners, 4),
        client_rows(features[40:], labels[40:], owners, 4),
        fed.clients,
    )
    method = one_of(kind)
    trial = SimpleNamespace(
        parts=parts,
        classes=np.arange(plain.CLASSES),
        workers=1,
        tick=lambda _: None,
        follow=Followers(),
        cell=SimpleNamespace(device="cpu"),
    )
    found = run_locally(method, trial).values
    model = method.fit(fed)
    expected = client_scores((model.personal(client) for client in fed.clients), parts.test, fed.clients)
    shared = client_scores(model, parts.test, fed.clients)
    assert found["local"]["correct"] == expected.correct.tolist()
    assert found["local"]["shared"] == shared.correct.tolist()
    assert found["accuracy"] == expected.mean


@pytest.mark.slow
def test_the_benchmark_takes_gradient_methods_when_asked(file: Any, tmp_path: Any) -> None:
    from benchmarks import personal
    from benchmarks.__main__ import main

    words = ["personal", "--data", file, "--clients", 3, "--alpha", 0.5, "--seeds", 1, "--width", 8]
    words += ["--layers", 1, "--rounds", 2, "--json", tmp_path / "found"]
    done = CliRunner().invoke(main, [*map(str, words), "--gradient"])
    assert done.exit_code == 0, done.output
    (cell,) = json.loads((tmp_path / "found").read_text())["results"]["cells"]
    assert list(cell["entries"]) == [*personal.ENTRIES, *personal.BY_GRADIENT]
    done = CliRunner().invoke(main, [*map(str, words), "--only", "Ditto"])
    (cell,) = json.loads((tmp_path / "found").read_text())["results"]["cells"]
    assert set(cell["entries"]) == {"primary only", "local only", "APFL, auto", "Ditto"}
