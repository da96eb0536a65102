"""Feedback alignment within runs: every host, the scores of the layers, the ablations, and going on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.gradient import FedACG, FedALA, FedAS, FedAvg, FedAvgM, FedProx, FedSelect, FedSOL
from fedsolve.gradient.alignment import choose_layers
from fedsolve.gradient.feedback import Feedback
from fedsolve.gradient.group import ClientGroup
from tests.gradient import plain
from tests.gradient.personal_checks import small
from tests.gradient.plain import CLASSES, LAYER, WIDTH, far, federation, rows, same_bits
from tests.gradient.trials import HOSTS, ONE_SHOT, SHORT, resumed, short

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch

each = pytest.mark.parametrize("kind", HOSTS, ids=lambda kind: kind.key)


def deep() -> Any:
    """Five linear layers: 0, 2, 4, 6 and 8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        widths = [WIDTH, 5, 6, 4, 5, CLASSES]
        layers: list[Any] = []
        for width, after in pairwise(widths):
            layers += [nn.Linear(width, after), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()


def hosted(kind: Any, feedback: str | None, **parameters: Any) -> Any:
    rounds = 1 if kind in ONE_SHOT else 3
    return kind(network=deep(), feedback=feedback, **SHORT | {"rounds": rounds} | parameters)


# -- every host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in HOSTS if kind is not FedSOL], ids=lambda kind: kind.key)
def test_one_local_step_is_the_hosts_to_the_bit(kind: Any) -> None:
    """w = W^r until the first step, and B is W^r. FedSOL's step has a second pass, from other weights."""
    one = {"batch": 64, "epochs": 1, "momentum": 0.0}
    found = hosted(kind, "4,8", **one).fit(small()).weights
    assert same_bits(found, hosted(kind, None, **one).fit(small()).weights)


@each
def test_in_the_first_layer_it_changes_nothing(kind: Any) -> None:
    found = hosted(kind, "0").fit(small()).weights
    assert same_bits(found, hosted(kind, None).fit(small()).weights)


@pytest.mark.slow
@each
def test_in_a_later_layer_it_changes_the_layers_before(kind: Any) -> None:
    """The layer itself and those behind it see it only from the next step on."""
    found = hosted(kind, "4", batch=64).fit(small()).weights
    assert far(found, hosted(kind, None, batch=64).fit(small()).weights) > 1e-6


@pytest.mark.parametrize("kind", [FedALA, FedAS, FedSelect], ids=lambda kind: kind.key)
def test_feedback_is_what_was_received_not_what_a_client_made_of_it(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local training of the last round once more in plain torch: B = W^r, rescaled after every step."""
    prepare, terms = kind.prepare, ClientGroup.terms
    prepared: dict[tuple[int, str], Any] = {}
    ended: dict[tuple[int, str], Any] = {}

    def watched_prepare(method: Any, group: Any) -> None:
        prepare(method, group)
        weights = {name: value.clone() for name, value in group.weights_of(0).items()}
        prepared[group.round, group.clients[0]] = (weights, group.start, group.scratch.get("mask"))

    def watched_terms(group: Any) -> Any:
        ended[group.round, group.clients[0]] = {n: v.clone() for n, v in group.weights_of(0).items()}
        return terms(group)

    monkeypatch.setattr(kind, "prepare", watched_prepare)
    monkeypatch.setattr(ClientGroup, "terms", watched_terms)
    own = {"select_every": 1} if kind is FedSelect else {}
    method, fed = short(kind, plain.ALIGNED, rounds=4, **own), small()
    method.fit(fed)
    moved = []
    for client, data in plain.clients_of(fed).items():
        weights, received, mask = prepared[3, client]
        net = plain.put(plain.module(), weights)
        moved.append(float((weights[f"{LAYER}.weight"] - received[f"{LAYER}.weight"]).norm()))
        plan = plain.batches(method, len(data[1]), 3, client)
        back = received[f"{LAYER}.weight"].clone()
        for number, batch in enumerate(plan):
            seen = torch.tanh(net[0](data[0][batch]))
            logits = net[2](seen.detach()) + (seen - seen.detach()) @ back.T
            loss = nn.functional.cross_entropy(logits, data[1][batch])
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                shared = number // (len(plan) // method.passes_of(client, 3)) % 2
                for (name, value), gradient in zip(net.named_parameters(), gradients, strict=True):
                    moves = 1.0 if mask is None else (mask[name] - shared).abs()
                    value.sub_(method.rate * gradient * moves)
                norms = [w.norm() for w in (net[2].weight, received[f"{LAYER}.weight"])]
                back = received[f"{LAYER}.weight"] * (norms[0] / norms[1])
        assert far(ended[3, client], plain.weights(net)) < 1e-12
    assert max(moved) > 1e-2


# -- which layers ----------------------------------------------------------------------------------


class Branched(nn.Module):
    """A frozen stem, two layers that read it side by side, and two behind them."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.stem = nn.Linear(WIDTH, 5).requires_grad_(False)
            self.norm = nn.BatchNorm1d(5) if normalised else nn.Identity()
            self.main, self.shortcut = nn.Linear(5, 4), nn.Linear(5, 4)
            self.after, self.classifier = nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.double()

    def forward(self, inputs: Any) -> Any:
        seen = torch.tanh(self.norm(self.stem(inputs)))
        return self.classifier(torch.tanh(self.after(torch.tanh(self.main(seen) + self.shortcut(seen)))))


def chosen_among(net: Any, **parameters: Any) -> list[str]:
    return FedAvg(network=net, feedback="lowest", **SHORT | parameters).start(small().describe()).layers


def test_layers_right_after_frozen_ones_are_not_chosen() -> None:
    """Nobody uses the gradient by their input; there the rounds are the host's to the bit."""
    assert chosen_among(Branched()) == ["after", "classifier"]
    for layer in ("main", "shortcut"):
        found = FedAvg(network=Branched(), feedback=layer, **SHORT).fit(small()).weights
        assert same_bits(found, FedAvg(network=Branched(), **SHORT).fit(small()).weights)


def test_the_papers_rule_chooses_among_all_trained_layers() -> None:
    wanted = ["main", "shortcut", "after", "classifier"]
    assert chosen_among(Branched(), feedback_first=True) == wanted


def test_trained_statistics_after_a_frozen_layer_make_the_next_one_count() -> None:
    assert chosen_among(Branched(normalised=True)) == ["main", "shortcut", "after", "classifier"]


# -- the scores ------------------------------------------------------------------------------------


def direct_scores(before: dict[str, Any], clients: dict[str, plain.Trained], layers: Any) -> dict[str, float]:
    """Eq. 14 from the clients' own updates."""
    found = {}
    for layer in layers:
        name = f"{layer}.weight"
        updates = [(c.weights[name] - before[name]).flatten() for c in clients.values()]
        mean = torch.stack(updates).mean(dim=0)
        cosines = [float(u @ mean / (u.norm() * mean.norm())) for u in updates]
        found[layer] = float(np.mean(cosines))
    return found


@pytest.mark.parametrize("sketch", [0, 4096])
@pytest.mark.parametrize("choice", ["lowest", "highest"])
def test_scores_are_those_of_the_clients_updates(choice: str, sketch: int) -> None:
    """Without a sketch, and with one that every layer fits into."""
    fed = small()
    method = hosted(FedAvg, choice, feedback_sketch=sketch, rounds=1)
    (run,) = plain.run(method, fed)
    start = plain.weights(plain.built(method))
    clients = plain.trained(hosted(FedAvg, None, rounds=1), fed, start, 0)
    wanted = direct_scores(start, clients, ["2", "4", "6", "8"])
    found = run.history[0].metrics["alignment"]
    assert found.keys() == wanted.keys()
    assert max(abs(found[layer] - wanted[layer]) for layer in wanted) <= 1e-12
    assert max(wanted.values()) - min(wanted.values()) > 0.01


def test_clients_that_move_alike_agree_in_any_sketch() -> None:
    """Equal clients have equal updates, so z is 1: they fold and sign their entries alike."""
    features, labels = rows(12)
    many = federation(np.tile(features, (3, 1)), np.tile(labels, 3), np.repeat(np.arange(3), 12))
    # One batch in the order of the rows: nothing is drawn.
    method = hosted(FedAvg, "lowest", feedback_sketch=7, rounds=2, batch=64, epochs=2)
    for record in method.fit(many).history:
        assert all(abs(z - 1) <= 1e-12 for z in record.metrics["alignment"].values())


@pytest.fixture(scope="module")
def mobile() -> dict[str, Any]:
    """The record of one round of MobileNetV2 for each way to send the layers' updates; None: FedAvg alone."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 36)
    images = np.clip(rng.normal(60 * labels[:, None], 40, (36, 784)), 0, 255).astype(np.uint8)
    fed = federation(images, labels, np.arange(36) % 3, classes=range(4))
    setting: dict[str, Any] = {"network": "mobilenet_v2", "rounds": 1, "batch": 6, "rate": 0.05}
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "whole": {"feedback": "lowest", "feedback_sketch": 0},
        "default": {"feedback": "lowest"},
    }
    return {name: FedAvg(**setting | way).fit(fed).history[0] for name, way in ways.items()}


@pytest.mark.slow
def test_the_default_sketch_chooses_as_whole_updates_do_within_its_error(mobile: dict[str, Any]) -> None:
    """z of unit vectors errs by at most a few times 1 / sqrt(length); so do the two extremes it finds."""
    exact, short = (mobile[name].metrics["alignment"] for name in ("whole", "default"))
    assert list(exact) == list(short)
    assert len(exact) == 52
    errors = {layer: abs(exact[layer] - short[layer]) for layer in exact}
    assert 1e-4 < max(errors.values()) < 4 * 2047**-0.5
    for choice, extreme in (("lowest", min), ("highest", max)):
        (found,) = choose_layers(short, choice)
        assert abs(exact[found] - extreme(exact.values())) <= 2 * max(errors.values())
    # Layers of at most 2,048 weights are not sketched, and are exact to the rounding of float32.
    assert errors["blocks.0.depthwise"] < 1e-6


@pytest.mark.slow
def test_the_choice_of_layers_adds_less_than_a_tenth_to_the_upload(mobile: dict[str, Any]) -> None:
    plain_, whole, short = (mobile[name].bytes_up for name in ("none", "whole", "default"))
    assert whole / plain_ > 2.9
    assert short / plain_ <= 1.10


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("choice", ["lowest", "highest", "skewness"])
def test_a_round_uses_the_scores_of_the_round_before(choice: str, count: int) -> None:
    history = hosted(FedAvg, choice, feedback_layers=count, rounds=4).fit(small()).history
    scores = history[0].metrics["alignment"]
    if choice == "skewness":
        values = np.array(list(scores.values()))
        third = np.mean((values - values.mean()) ** 3)
        choice = "lowest" if third > 0 else "highest"
    sign = 1 if choice == "lowest" else -1
    assert "feedback" not in history[0].metrics
    for before, after in pairwise(history):
        scores = before.metrics["alignment"]
        wanted = sorted(scores, key=lambda layer: sign * scores[layer])[:count]
        assert sorted(after.metrics["feedback"]) == sorted(wanted)


# -- the ablations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"feedback_scaling": "row"},
        {"feedback_scaling": "none"},
        {"feedback_matrix": "random", "seed": 0},
        {"feedback_matrix": "random", "seed": 5},
        {"feedback_route": "direct", "seed": 5},
    ],
    ids=lambda how: "-".join(map(str, how.values())) or "paper",
)
def test_a_run_uses_the_feedback_it_was_asked_for(how: dict[str, Any]) -> None:
    """Against the part itself, which has its own oracles, around plain torch."""
    fed = federation(*rows(), np.zeros(40, dtype=int))
    method = hosted(FedAvg, "2,6", **how, rounds=1)
    (run,) = plain.run(method, fed)
    net, (features, labels) = plain.built(method), plain.clients_of(fed)["client-0"]
    optimiser = torch.optim.SGD(net.parameters(), lr=method.rate)
    part = {name.removeprefix("feedback_"): value for name, value in how.items()}
    with Feedback(net, ["2", "6"], **part) as feedback:
        for batch in plain.batches(method, 40, 0, "client-0"):
            optimiser.zero_grad()
            plain.cross_entropy(net, features[batch], labels[batch]).backward()
            optimiser.step()
            feedback.rescale()
    assert far(run.server.weights, plain.weights(net)) < 1e-10


def test_the_ablations_differ() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"feedback_scaling": "row"},
        {"feedback_scaling": "none"},
        {"feedback_matrix": "random"},
        {"feedback_matrix": "random", "seed": 5},
        {"feedback_route": "direct"},
    ]
    found = [hosted(FedAvg, "2,6", **how).fit(small()).weights for how in settings]
    for left in range(len(found)):
        for right in range(left):
            assert far(found[left], found[right]) > 1e-6, (settings[left], settings[right])


def test_without_scaling_a_rate_of_zero_changes_nothing() -> None:
    method = hosted(FedAvg, "4", feedback_scaling="none", rate=0.0)
    assert same_bits(
        method.fit(small()).weights, {n: w.numpy() for n, w in plain.weights(plain.built(method)).items()}
    )


# -- going on, and the log ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["lowest", "skewness"])
@pytest.mark.parametrize("kind", [FedAvg, FedACG, FedAvgM, FedProx], ids=lambda kind: kind.key)
def test_a_run_goes_on_with_the_layer_it_had_chosen(kind: Any, choice: str) -> None:
    method = hosted(kind, choice, rounds=4, feedback_layers=2)
    whole = plain.finished(method, small())
    for stop in (1, 2, 3):
        again = resumed(method, small, stop)
        assert same_bits(again.server.weights, whole.server.weights)
        assert [r.metrics.get("feedback") for r in again.history] == [
            r.metrics.get("feedback") for r in whole.history
        ]


def test_a_layer_that_starts_at_zero_has_no_agreement_yet() -> None:
    method = FedAvg(network="linear", feedback="classifier", track="drift", rounds=2, rate=0.1)
    first, second = [r.metrics for r in method.fit(small()).history if r.kind == "train"]
    assert first["feedback_ratio"] == first["feedback_cosine"] == {"classifier": None}
    assert second["feedback_ratio"]["classifier"] > 0
    assert -1 <= second["feedback_cosine"]["classifier"] <= 1


def test_the_agreement_of_a_round_is_that_of_the_clients() -> None:
    fed = small()
    method = short(FedAvg, plain.ALIGNED, track="drift", rounds=1)
    *_, run = plain.run(method, fed)
    start = plain.weights(plain.built(method))[f"{LAYER}.weight"]
    clients = plain.trained(method, fed, plain.weights(plain.built(method)), 0).values()
    ends = [c.weights[f"{LAYER}.weight"] for c in clients]
    ratios = [float(end.norm() / start.norm()) for end in ends]
    cosines = [float((end * start).sum() / (end.norm() * start.norm())) for end in ends]
    metrics = run.history[0].metrics
    assert metrics["feedback_ratio"][LAYER] == pytest.approx(np.mean(ratios), abs=1e-12)
    assert metrics["feedback_cosine"][LAYER] == pytest.approx(np.mean(cosines), abs=1e-12)


def test_a_layer_named_twice_is_one_layer() -> None:
    history = hosted(FedAvg, "4, 4", track="drift", rounds=1).fit(small()).history
    assert history[0].metrics["feedback"] == ["4"]


@pytest.mark.parametrize("kind", ONE_SHOT, ids=lambda kind: kind.key)
def test_one_round_has_no_round_before_it(kind: Any) -> None:
    with pytest.raises(DataError, match=r"feedback='lowest' chooses layers by the round before.*Name the"):
        hosted(kind, "lowest")
