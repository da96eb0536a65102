"""Options of training that papers and their code use: each against its formula in plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.experiments.reading import read_experiment
from fedsolve.gradient import (
    MOON,
    FedAvg,
    FedAvgM,
    FedDBE,
    FedDyn,
    FedGen,
    FedProx,
    FedRS,
    FedSelect,
    FedSOL,
    Scaffold,
    fedgen,
)
from fedsolve.gradient.batches import plan_batches
from fedsolve.gradient.networks import register_network
from fedsolve.gradient.optimisers import Optimiser, factor_of
from tests.command import document
from tests.gradient import plain
from tests.gradient.plain import far, federation, finished, rows, same_bits, uneven
from tests.gradient.trials import SHORT, short

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

pytestmark = pytest.mark.torch

COMMON: dict[str, Any] = SHORT | {"rounds": 3}
NAMES = ("mlp:5", "module")


def made(kind: Any, name: str = "mlp:5", **parameters: Any) -> Any:
    return short(kind, name, **COMMON | parameters)


def data(**options: Any) -> Any:
    return federation(*rows(), uneven(), **options)


def averaged(method: Any, fed: Any, update: Any = None, **how: Any) -> dict[str, Any]:
    """All rounds of a method that takes the mean, in plain torch."""
    weights = plain.weights(plain.built(method))
    for round_ in range(method.rounds):
        found = plain.trained(method, fed, weights, round_, **how)
        shares = [one.rows for one in found.values()] if method.weighting == "size" else None
        mean = plain.mean([one.weights for one in found.values()], shares)
        weights = mean if update is None else update(weights, mean)
    return weights


def adding(extra: Any) -> Any:
    """An edit of every client's gradients: `extra(client, name, weight of the moment)` is added."""

    def edit(client: str) -> Any:
        def change(gradients: Any, now: Any) -> None:
            for key, gradient in gradients.items():
                gradient.add_(extra(client, key, now[key]))

        return change

    return edit


OPTIONS = [
    (FedAvg, {"schedule": "cosine", "warmup": "1", "nesterov": True, "momentum": "0.9", "local_steps": "2"}),
    (FedAvg, {"optimiser": "adamw", "server_step": "0.5", "feedback": "lowest", "feedback_sync": "2"}),
    (FedDyn, {"dynamic_by_rows": True}),
    (Scaffold, {"control": "gradient"}),
    (FedProx, {"stragglers": "0.5", "epochs": "2"}),
    (MOON, {"previous_models": "2", "newcomer": "first"}),
    (FedRS, {"classifier_bias": False}),
    (FedSOL, {"perturbed": "head"}),
    (FedGen, {"generator_decay": "0.98"}),
    (FedDBE, {"discard_first": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_every_option_is_reached_from_the_command_line_and_from_a_file(
    kind: Any, options: dict[str, Any], tmp_path: Any
) -> None:
    words, lines = [], []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option if value else f"--no-{option[2:]}"] if isinstance(value, bool) else [option, value]
        plain_value = str(value).lower() if isinstance(value, bool) or value[0].isdigit() else f'"{value}"'
        lines.append(f"{name} = {plain_value}")
    common = ["--method", kind.key, "--network", "mlp:4", "--rounds", "2", "--clients", "3"]
    asked = document("train", "digits", *common, *words)["parameters"]
    head = ["[dataset]", 'address = "digits"', "[[partition]]", 'kind = "iid"', "clients = 3"]
    own = ["[[method]]", 'name = "one"', f'method = "{kind.key}"', f"parameters = {{{', '.join(lines)}}}"]
    (tmp_path / "own.toml").write_text("\n".join(['title = "own"', "seeds = [0]", *head, *own]))
    (spec,) = read_experiment(tmp_path / "own.toml").methods
    for name in options:
        assert asked[name] == kind(**spec.parameters).parameters()[name] != kind().parameters()[name]


# -- the rate ----------------------------------------------------------------------------------------------


def torch_rates(make: Any, rounds: int) -> list[float]:
    weight = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=1.0)
    scheduler, found = make(optimiser), []
    for _ in range(rounds):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return found


def test_schedules_are_those_of_torch() -> None:
    schedulers = torch.optim.lr_scheduler
    step = FedAvg(rounds=9, schedule="step", schedule_rounds="3, 7", schedule_factor=0.2)
    wanted = torch_rates(lambda o: schedulers.MultiStepLR(o, [3, 7], 0.2), 9)
    np.testing.assert_allclose([factor_of(step, r) for r in range(9)], wanted, rtol=1e-14)
    cosine = FedAvg(rounds=9, schedule="cosine")
    wanted = torch_rates(lambda o: schedulers.CosineAnnealingLR(o, 9), 9)
    np.testing.assert_allclose([factor_of(cosine, r) for r in range(9)], wanted, rtol=1e-14)
    assert factor_of(cosine, 9) == factor_of(cosine, 8)  # a client's own model after the last round
    warm = FedAvg(rounds=9, warmup=4, rate_decay=0.5)
    wanted = torch_rates(lambda o: schedulers.LinearLR(o, 1 / 4, 1.0, 3), 9)
    np.testing.assert_allclose([factor_of(warm, r) / 0.5**r for r in range(9)], wanted, rtol=1e-14)
    both = FedAvg(rounds=10, warmup=2, schedule="cosine")
    np.testing.assert_allclose(
        [factor_of(both, r) for r in range(10)],
        [0.5, 1.0, *[(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]],
        rtol=1e-14,
    )


@pytest.mark.parametrize("how", [{"schedule": "cosine"}, {"warmup": 3}], ids=str)
def test_rounds_train_with_the_rate_of_their_schedule(how: Any) -> None:
    fed = data()
    method = made(FedAvg, **how)
    rates = [method.rate * factor_of(method, r) for r in range(3)]
    assert len(set(rates)) == 3
    assert far(finished(method, fed).server.weights, averaged(method, fed)) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "step"},
        {"schedule_rounds": "3"},
        {"schedule": "step", "schedule_rounds": "a"},
        {"warmup": 200},
        {"nesterov": True},
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        FedAvg(**wrong)


# -- local steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "how",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"optimiser": "adamw", "weight_decay": 0.1, "rate": 0.01},
    ],
    ids=["nesterov", "adamw"],
)
def test_optimisers_are_those_of_torch(name: str, how: dict[str, Any]) -> None:
    fed = data()
    method = made(FedAvg, name, **how)
    assert far(finished(method, fed).server.weights, averaged(method, fed)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_fixed_number_of_local_steps(name: str) -> None:
    fed = data()
    method = made(FedAvg, name, local_steps=7)
    run = finished(method, fed)
    assert far(run.server.weights, averaged(method, fed)) < 1e-12
    for record in run.history:
        assert 0 <= record.metrics["local_accuracy"] <= 1
    for count in (1, 3, 50):
        plan = plan_batches(method, count, 0, "a", 1)
        assert len(plan) == 7
        full = plan_batches(made(FedAvg, name, epochs=7), count, 0, "a", 1)
        assert all(map(np.array_equal, plan, full))
    # As many steps as the epochs take are those of the epochs.
    one = federation(*rows(), [0] * 40)
    a_pass = len(plan_batches(method, 40, 0, "client-0", 1)) and math.ceil(40 / method.batch)
    by_epochs = finished(made(FedAvg, name, epochs=2), one).server.weights
    assert same_bits(finished(made(FedAvg, name, local_steps=2 * a_pass), one).server.weights, by_epochs)


def test_a_fixed_number_of_steps_is_no_matter_for_masks() -> None:
    with pytest.raises(DataError, match="local_steps"):
        FedSelect(local_steps=3)


@pytest.mark.parametrize("name", NAMES)
def test_stragglers_make_fewer_passes(name: str) -> None:
    fed = data()
    method = made(FedProx, name, epochs=4, stragglers=1.0, proximal=0.3)
    passes = {method.passes_of(f"client-{k}", r) for k in range(4) for r in range(10)}
    assert passes == {1, 2, 3, 4}
    some = made(FedProx, name, epochs=4, stragglers=0.5)
    drawn = [some.passes_of(str(k), 0) for k in range(400)]
    assert 0.55 < np.mean([one == 4 for one in drawn]) < 0.7  # a half, and a quarter of the others
    weights = plain.weights(plain.built(method))
    for round_ in range(method.rounds):
        edit = adding(lambda client, key, now, start=weights: 0.3 * (now - start[key]))
        found = plain.trained(method, fed, weights, round_, edit=edit)
        weights = plain.mean([one.weights for one in found.values()], [one.rows for one in found.values()])
    assert far(finished(method, fed).server.weights, weights) < 1e-12


# -- the server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM])
def test_the_server_goes_a_part_of_the_way(kind: Any) -> None:
    fed = data()
    own = {"server_momentum": 0.5} if kind is FedAvgM else {}
    method = made(kind, server_step=0.4, **own)
    velocity: dict[str, Any] = {}

    def update(before: Any, mean: Any) -> Any:
        for key in before:
            velocity[key] = (0.5 if own else 0.0) * velocity.get(key, 0.0) + 0.4 * (mean[key] - before[key])
        return {key: before[key] + velocity[key] for key in before}

    assert far(finished(method, fed).server.weights, averaged(method, fed, update)) < 1e-12


@pytest.mark.parametrize("kind", [FedDyn, FedGen, Scaffold])
def test_a_server_with_an_update_of_its_own_takes_no_step(kind: Any) -> None:
    with pytest.raises(DataError, match="server_step"):
        kind(server_step=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_feddyn_by_rows_is_the_authors_code(name: str) -> None:
    """Written as there: lambda_i = -g_i / alpha_i, and a cloud model of the mean and all lambdas."""
    fed = data()
    method = made(FedDyn, name, dynamic=0.2, dynamic_by_rows=True)
    sizes = {client: len(labels) for client, (_, labels) in plain.clients_of(fed).items()}
    alpha = {client: 0.2 / (size / np.mean(list(sizes.values()))) for client, size in sizes.items()}
    weights = plain.weights(plain.built(method))
    lambdas = {c: {k: torch.zeros_like(v) for k, v in weights.items()} for c in sizes}
    for round_ in range(method.rounds):
        start = weights
        edit = adding(lambda c, key, now, start=start: alpha[c] * (now - start[key] + lambdas[c][key]))
        found = plain.trained(method, fed, start, round_, edit=edit)
        for client, one in found.items():
            lambdas[client] = {k: v + one.weights[k] - start[k] for k, v in lambdas[client].items()}
        mean, shift = plain.mean([one.weights for one in found.values()]), plain.mean(list(lambdas.values()))
        weights = {key: mean[key] + shift[key] for key in mean}
    run = finished(method, fed)
    assert far(run.server.weights, weights) < 1e-11
    assert [record.kind for record in run.history] == ["prelude", "train", "train", "train"]


@pytest.mark.parametrize("name", NAMES)
def test_scaffold_with_option_one(name: str) -> None:
    fed = data()
    method = made(Scaffold, name, control="gradient", momentum=0.5, nesterov=True)
    clients, net = plain.clients_of(fed), plain.built(method)
    weights = plain.weights(net)
    zeros = {key: torch.zeros_like(value) for key, value in weights.items()}
    own, common = dict.fromkeys(clients, zeros), zeros
    for round_ in range(method.rounds):
        start = weights
        edit = adding(lambda client, key, now, known=common: known[key] - own[client][key])
        found = plain.trained(method, fed, start, round_, edit=edit)
        for client in found:
            fresh = plain.gradient(net, start, *clients[client])
            common = {k: v + (fresh[k] - own[client][k]) / len(clients) for k, v in common.items()}
            own[client] = fresh
        weights = plain.mean([one.weights for one in found.values()])
    run = finished(method, fed)
    assert far(run.server.weights, weights) < 1e-11
    for client, state in plain.states(fed, run).items():
        assert far({k.removeprefix("control."): v for k, v in state.items()}, own[client]) < 1e-12


def test_option_two_with_nesterovs_momentum_divides_by_what_a_constant_gradient_adds() -> None:
    from fedsolve.gradient.scaffold import effective_steps

    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=1.0, momentum=0.7, nesterov=True)
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    assert effective_steps(5, 0.7, nesterov=True) == pytest.approx(-weight.item(), rel=1e-14)


# -- MOON --------------------------------------------------------------------------------------------------


def features(net: Any, inputs: Any) -> Any:
    return torch.tanh(net[0](inputs)) if len(net) == 3 else None


@pytest.mark.parametrize("newcomer", ["received", "first"])
def test_moon_with_a_pool_and_newcomers(newcomer: str) -> None:
    fed = data()
    method = made(
        MOON,
        "module",
        rounds=5,
        participation=0.5,
        previous_models=2,
        newcomer=newcomer,
        contrast=2.0,
        temperature=0.7,
    )
    clients, net, other = plain.clients_of(fed), plain.built(method), plain.built(method)
    first = weights = plain.weights(net)
    pools: dict[str, list[Any]] = {client: [] for client in clients}
    joined = set()
    for round_ in range(method.rounds):
        start, found = weights, []
        for client in plain.cohort(method, list(clients), round_):
            pool = pools[client][:2] or ([first] if newcomer == "first" else [start])

            def loss(net: Any, inputs: Any, targets: Any, pool: Any = pool, start: Any = start) -> Any:
                seen = features(net, inputs)
                with torch.no_grad():
                    anchors = [features(plain.put(other, w), inputs).clone() for w in [start, *pool]]
                logits = torch.stack([F.cosine_similarity(seen, a, dim=-1) / 0.7 for a in anchors], dim=1)
                contrastive = F.cross_entropy(logits, torch.zeros(len(targets), dtype=torch.int64))
                return F.cross_entropy(net(inputs), targets) + 2.0 * contrastive

            plain.local(plain.put(net, start), method, clients[client], round_, client, loss)
            found.append((plain.weights(net), len(clients[client][1])))
            pools[client].insert(0, found[-1][0])
            if round_ > 0 and len(pools[client]) == 1:
                joined.add(client)
        weights = plain.mean([w for w, _ in found], [n for _, n in found])
    assert joined
    assert max(map(len, pools.values())) > 2
    assert far(finished(method, fed).server.weights, weights) < 1e-11


# -- losses ------------------------------------------------------------------------------------------------


def test_fedrs_without_a_bias_is_a_network_without_one() -> None:
    fed = data()
    bare = nn.Sequential(
        nn.Linear(plain.WIDTH, 5), nn.Tanh(), nn.Linear(5, plain.CLASSES, bias=False)
    ).double()
    biased = plain.module()
    with torch.no_grad():
        for key, value in bare.named_parameters():
            value.copy_(dict(biased.named_parameters())[key])
    parameters = {"restraint": 0.3, "momentum": 0.9, "weight_decay": 0.01}
    parameters |= COMMON
    wanted = finished(FedRS(network=register_network(bare), **parameters), fed).server.weights
    method = FedRS(network=register_network(biased), classifier_bias=False, **parameters)
    found = finished(method, fed).server.weights
    assert np.all(found.pop("2.bias") == 0)
    assert far(found, wanted) < 1e-13
    stacked = finished(made(FedRS, "mlp:5", classifier_bias=False), fed).server.weights
    assert np.all(stacked[list(stacked)[-1]] == 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["head", "body"])
def test_fedsol_perturbs_the_head_or_the_body(name: str, part: str) -> None:
    fed = data()
    method = made(FedSOL, name, radius=0.7, adaptive=False, perturbed=part, rounds=2)
    clients, net, other = plain.clients_of(fed), plain.built(method), plain.built(method)
    weights = plain.weights(net)
    head = list(weights)[-2:]
    chosen = [key for key in weights if (key in head) == (part == "head")]
    for round_ in range(method.rounds):
        start, found = weights, []
        for client in clients:
            plain.put(net, start)
            xs, ys = clients[client]
            for number, batch in enumerate(plain.batches(method, len(ys), round_, client)):
                now = plain.weights(net)
                moved = dict(now)
                if number:
                    with torch.no_grad():
                        known = F.log_softmax(plain.put(other, start)(xs[batch]) / 3, dim=1)
                    told = F.log_softmax(net(xs[batch]) / 3, dim=1)
                    distance = (known.exp() * (known - told)).sum(dim=1).mean()
                    slopes = dict(
                        zip(now, torch.autograd.grad(distance, list(net.parameters())), strict=True)
                    )
                    norm = math.sqrt(sum(float(slopes[key].square().sum()) for key in chosen))
                    moved |= {key: now[key] + 0.7 * slopes[key] / (norm + 1e-12) for key in chosen}
                slopes = plain.gradient(net, moved, xs[batch], ys[batch])
                plain.put(net, {key: now[key] - method.rate * slopes[key] for key in now})
            found.append((plain.weights(net), len(ys)))
        weights = plain.mean([w for w, _ in found], [n for _, n in found])
    assert far(finished(method, fed).server.weights, weights) < 1e-11


def test_the_generators_rate_decays(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    class Seen(Optimiser):
        def __init__(self, name: str, rate: Any, *rest: Any) -> None:
            rates.append(rate)
            super().__init__(name, rate, *rest)

    monkeypatch.setattr(fedgen, "Optimiser", Seen)
    finished(made(FedGen, generator_rate=0.01, generator_decay=0.5, generator_steps=2), data())
    assert rates == [0.01, 0.005, 0.0025]


def test_feddbe_keeps_of_a_discarded_round_the_mean_feature_alone() -> None:
    fed = data()
    method = made(FedDBE, consistency=2.0, discard_first=True)
    runs = plain.run(method, fed)
    run = next(runs)
    first = plain.weights(plain.built(method))
    assert same_bits(run.server.weights, first)
    assert all(np.all(state["shift"] == 0) for state in plain.states(fed, run).values())
    # From there on it is FedDBE with this mean feature: m_i and the pull act in the next round.
    next(runs)
    assert far(run.server.weights, first) > 1e-3
    assert all(np.any(state["shift"] != 0) for state in plain.states(fed, run).values())


# -- feedback alignment ------------------------------------------------------------------------------------


def test_backward_weights_may_be_those_of_an_earlier_round() -> None:
    fed = data()
    method = made(FedAvg, plain.ALIGNED, rounds=5, feedback_sync=2, momentum=0.9)
    weights = plain.weights(plain.built(method))
    for round_ in range(method.rounds):
        if round_ % 2 == 0:
            held = weights
        found = plain.trained(method, fed, weights, round_, loss=plain.aligned(held))
        weights = plain.mean([one.weights for one in found.values()], [one.rows for one in found.values()])
    run = finished(method, fed)
    assert far(run.server.weights, weights) < 1e-11
    every = finished(made(FedAvg, plain.ALIGNED, rounds=5, momentum=0.9), fed)
    assert far(run.server.weights, every.server.weights) > 1e-6
