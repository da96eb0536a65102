"""FedProx, FedAvgM, FedACG, FedDyn and SCAFFOLD: their oracles, and their formulas in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from fedsolve import ClientData, Participant
from fedsolve.errors import DataError, DivergenceError
from fedsolve.federation.engine import Spec
from fedsolve.gradient import networks
from fedsolve.gradient.fedacg import FedACG
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedavgm import FedAvgM
from fedsolve.gradient.feddyn import FedDyn
from fedsolve.gradient.fedopt import FedOpt
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.flfa import FLFA
from fedsolve.gradient.scaffold import Scaffold, effective_steps
from tests.gradient import plain
from tests.gradient.personal_checks import small
from tests.gradient.plain import far, federation, finished, rows, same_bits, uneven
from tests.gradient.trials import HARD, SHORT, each_host, register, short

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

COMMON: dict[str, Any] = SHORT | {"rounds": 4}


def made(kind: Any, name: str, **parameters: Any) -> Any:
    return short(kind, name, **COMMON | parameters)


def zeros(method: Any) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in plain.weights(plain.built(method)).items()}


def shifted(left: dict[str, Any], right: dict[str, Any], by: float) -> dict[str, Any]:
    """left + by * right"""
    return {name: left[name] + by * right[name] for name in left}


def difference(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return shifted(left, right, -1.0)


def added(extra: Any) -> Any:
    """An edit that adds `extra(weights)` to the gradients."""

    def edit(gradients: dict[str, Any], weights: dict[str, Any]) -> None:
        for name, value in extra(weights).items():
            gradients[name].add_(value)

    return edit


def pulled(start: dict[str, Any], strength: float) -> Any:
    """An edit that adds strength * (w - start)."""
    return added(lambda w: {name: strength * (w[name] - start[name]) for name in w})


# -- FedProx ----------------------------------------------------------------------------------------


@each_host
def test_fedprox_without_pull_is_fedavg(name: str) -> None:
    fed = small()
    assert same_bits(made(FedProx, name, proximal=0.0).fit(fed).weights, made(FedAvg, name).fit(fed).weights)


@each_host
def test_fedprox_of_one_step_is_fedavg(name: str) -> None:
    fed, one = small(), {"batch": 64, "epochs": 1}
    assert same_bits(
        made(FedProx, name, proximal=7.0, **one).fit(fed).weights, made(FedAvg, name, **one).fit(fed).weights
    )
    two = {"batch": 64, "epochs": 2}
    assert not same_bits(
        made(FedProx, name, proximal=7.0, **two).fit(fed).weights, made(FedAvg, name, **two).fit(fed).weights
    )


@each_host
def test_fedprox_equals_its_formulas(name: str) -> None:
    fed, method = small(), made(FedProx, name, **HARD, proximal=0.7)
    current = plain.weights(plain.built(method))
    for round_, run in enumerate(plain.run(method, fed)):
        start = current
        clients = plain.trained(method, fed, start, round_, edit=lambda _, at=start: pulled(at, 0.7))
        current = plain.mean([c.weights for c in clients.values()], [c.rows for c in clients.values()])
        assert far(run.server.weights, current) < 1e-10


# -- FedAvgM ----------------------------------------------------------------------------------------

each_form = pytest.mark.parametrize("form", ["classic", "nesterov", "damped"])


@each_form
@each_host
def test_fedavgm_without_momentum_is_fedavg(name: str, form: Any) -> None:
    fed = small()
    found = made(FedAvgM, name, server_momentum=0.0, server_form=form).fit(fed).weights
    assert same_bits(found, made(FedAvg, name).fit(fed).weights)


@each_form
@each_host
def test_fedavgm_equals_its_formulas(name: str, form: Any) -> None:
    fed, beta = small(), 0.7
    method = made(FedAvgM, name, **HARD, server_momentum=beta, server_form=form)
    current, velocity = plain.weights(plain.built(method)), zeros(method)
    for round_, run in enumerate(plain.run(method, fed)):
        clients = plain.trained(method, fed, current, round_).values()
        step = difference(plain.mean([c.weights for c in clients], [c.rows for c in clients]), current)
        for key, moved in step.items():
            velocity[key] = beta * velocity[key] + (1 - beta if form == "damped" else 1.0) * moved
            current[key] = current[key] + (
                moved + beta * velocity[key] if form == "nesterov" else velocity[key]
            )
        assert far(run.server.weights, current) < 1e-10
        assert far(run.server.kept("velocity"), velocity) < 1e-10


def displacement(form: Any, beta: float, rounds: int) -> float:
    """How far a constant step of 1 takes the weights."""
    method = FedAvgM(server_momentum=beta, server_form=form, precision="float64")
    server = method.start(Spec(4, np.arange(2), 2, "bytes")).server
    for _ in range(rounds):
        method.update(server, {n: w + 1.0 for n, w in server.weights.items()}, None)  # type: ignore[arg-type]
    (found,) = {round(float(value), 9) for w in server.weights.values() for value in w.ravel()}
    return found


@pytest.mark.parametrize("beta", [0.3, 0.9])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_fedavgm_under_a_constant_step_moves_as_far_as_the_geometric_sum(beta: float, rounds: int) -> None:
    classic = sum((1 - beta**s) / (1 - beta) for s in range(1, rounds + 1))
    nesterov = sum((1 - beta ** (s + 1)) / (1 - beta) for s in range(1, rounds + 1))
    assert displacement("classic", beta, rounds) == pytest.approx(classic, rel=1e-8)
    assert displacement("nesterov", beta, rounds) == pytest.approx(nesterov, rel=1e-8)
    assert displacement("damped", beta, rounds) == pytest.approx((1 - beta) * classic, rel=1e-8)


def test_fedavgm_leaves_running_statistics_to_the_mean() -> None:
    from tests.gradient.test_engine import Normalised

    fed = small()
    parameters: dict[str, Any] = COMMON | {"network": Normalised(), "rounds": 1}
    momentum, mean = (finished(kind(**parameters), fed).server for kind in (FedAvgM, FedAvg))
    assert same_bits(momentum.buffers, mean.buffers)
    assert not any("running" in name for name in momentum.memory)


@pytest.mark.parametrize("form", ["classic", "nesterov", "damped"])
def test_fedavgm_with_momentum_on_running_statistics(form: Any) -> None:
    """Running statistics move as weights do, towards the mean of the clients'."""
    from tests.gradient.test_engine import Normalised

    parameters: dict[str, Any] = COMMON | {"network": Normalised(), "rounds": 3, "server_form": form}
    method = FedAvgM(**parameters, server_momentum=0.1, server_statistics=True)
    fed, velocity, now = small(), {}, None
    for run in plain.run(method, fed):
        buffers = {name: array.copy() for name, array in run.server.buffers.items()}
        if now is None:
            first = finished(
                FedAvg(**{n: getattr(method, n) for n in FedAvg().parameters()} | {"rounds": 1}), small()
            )
            now = {n: b.numpy() for n, b in networks.float_buffers(plain.built(method)).items()}
            share = 0.9 if form == "damped" else 1.0
            step = {n: first.server.buffers[n] - now[n] for n in now}
            velocity = {n: share * step[n] for n in now}
            ahead = {
                n: now[n] + (step[n] + 0.1 * velocity[n] if form == "nesterov" else velocity[n]) for n in now
            }
            assert far(buffers, ahead) < 1e-12
        assert set(velocity) == {
            n.removeprefix("statistics.") for n in run.server.memory if n.startswith("stat")
        }
        now = buffers
    plain_mean = finished(FedAvgM(**parameters, server_momentum=0.1), small()).server.buffers
    assert far(now, plain_mean) > 1e-6
    still = FedAvgM(**parameters, server_momentum=0.0, server_statistics=True)
    assert same_bits(
        finished(still, small()).server.buffers,
        finished(FedAvg(**{n: getattr(still, n) for n in FedAvg().parameters()}), small()).server.buffers,
    )


def test_a_negative_running_variance_ends_the_run() -> None:
    method = FedAvgM(network="mlp:5", server_statistics=True)
    server = finished(FedAvg(**COMMON | {"network": "mlp:5", "rounds": 1}), small()).server
    server.buffers = {"1.running_var": np.array([0.1])}
    server.memory["statistics.1.running_var"] = np.array([-5.0])
    with pytest.raises(DivergenceError, match="made the running variance"):
        method.statistics(server, {"1.running_var": np.array([0.1])})


# -- FedACG -----------------------------------------------------------------------------------------


@each_host
def test_fedacg_without_lookahead_is_fedprox(name: str) -> None:
    fed = small()
    found = made(FedACG, name, lookahead=0.0, proximal=0.7).fit(fed).weights
    assert same_bits(found, made(FedProx, name, proximal=0.7, weighting="uniform").fit(fed).weights)
    plainly = made(FedACG, name, lookahead=0.0, proximal=0.0).fit(fed).weights
    assert same_bits(plainly, made(FedAvg, name, weighting="uniform").fit(fed).weights)


@each_host
def test_the_first_round_of_fedacg_is_one_of_fedprox(name: str) -> None:
    fed = small()
    found = made(FedACG, name, lookahead=0.9, proximal=0.7, rounds=1).fit(fed).weights
    assert same_bits(found, made(FedProx, name, proximal=0.7, weighting="uniform", rounds=1).fit(fed).weights)


@each_host
def test_fedacg_equals_its_formulas(name: str) -> None:
    """With the momentum of the paper's recursion, which must be the newest step of the weights."""
    fed, ahead, strength = small(), 0.8, 0.5
    method = made(FedACG, name, **HARD, lookahead=ahead, proximal=strength)
    current, momentum = plain.weights(plain.built(method)), zeros(method)
    for round_, run in enumerate(plain.run(method, fed)):
        sent = shifted(current, momentum, ahead)
        clients = plain.trained(method, fed, sent, round_, edit=lambda _, at=sent: pulled(at, strength))
        moved = difference(plain.mean([c.weights for c in clients.values()]), sent)
        momentum = {key: ahead * momentum[key] + moved[key] for key in momentum}
        before, current = current, shifted(current, momentum, 1.0)
        assert far(difference(current, before), run.server.kept("momentum")) < 1e-10
        assert far(run.server.kept("momentum"), momentum) < 1e-10
        assert far(run.server.weights, current) < 1e-10
    assert far(run.model().weights, current) < 1e-10


# -- FedDyn -----------------------------------------------------------------------------------------


def duals(fed: Any, run: Any) -> Iterator[dict[str, Any]]:
    """Every client's dual, zero for those that never took part."""
    for state in plain.states(fed, run).values():
        yield {
            name: state.get(f"dual.{name}", np.zeros(value.shape))
            for name, value in run.server.weights.items()
        }


def dual_mean(run: Any) -> dict[str, Any]:
    """The server's h."""
    return {name: value / run.server.clients for name, value in run.server.kept("duals").items()}


@each_host
def test_feddyn_equals_its_formulas(name: str) -> None:
    fed, alpha, count = small(), 0.3, 4
    method = made(FedDyn, name, **HARD, dynamic=alpha)
    current, mean_dual = plain.weights(plain.built(method)), zeros(method)
    dual = {client: zeros(method) for client in fed.clients}
    for round_, run in enumerate(plain.run(method, fed)):
        start = current

        def loss(client: str, at: Any = start) -> Any:
            own = dual[client]
            return added(lambda w: {k: alpha * (w[k] - at[k]) - own[k] for k in w})

        clients = plain.trained(method, fed, start, round_, edit=loss)
        moved = {client: difference(c.weights, start) for client, c in clients.items()}
        for client, step in moved.items():
            dual[client] = shifted(dual[client], step, -alpha)
        mean_dual = {
            k: h - alpha / count * sum(step[k] for step in moved.values()) for k, h in mean_dual.items()
        }
        middle = plain.mean([c.weights for c in clients.values()])
        current = shifted(middle, mean_dual, -1 / alpha)
        assert far(run.server.weights, current) < 1e-10
        assert far(run.server.aggregated, middle) < 1e-10
        assert far(dual_mean(run), mean_dual) < 1e-10
        for mine, theirs in zip(duals(fed, run), dual.values(), strict=True):
            assert far(mine, theirs) < 1e-10
    assert len({record.cohort for record in run.history}) > 1


@each_host
@pytest.mark.parametrize("participation", [0.3, 0.5, 1.0])
def test_the_servers_dual_is_the_mean_of_the_clients(name: str, participation: float) -> None:
    fed = small()
    for run in plain.run(made(FedDyn, name, participation=participation, rounds=6), fed):
        assert far(dual_mean(run), plain.mean(list(duals(fed, run)))) < 1e-12


def test_the_servers_dual_is_that_mean_after_a_client_joined() -> None:
    features, labels = rows(50)
    fed = federation(features[:40], labels[:40], uneven())
    for round_, run in enumerate(plain.run(made(FedDyn, "linear", rounds=5), fed)):
        assert far(dual_mean(run), plain.mean(list(duals(fed, run)))) < 1e-12
        if round_ == 1:
            fed.add(Participant("late", ClientData(features[40:], labels[40:])))
    assert run.server.clients == 5


@each_host
def test_the_first_round_of_feddyn_trains_like_fedprox(name: str) -> None:
    fed = small()
    run = finished(made(FedDyn, name, dynamic=0.7, rounds=1), fed)
    prox = finished(made(FedProx, name, proximal=0.7, weighting="uniform", rounds=1), fed)
    assert same_bits(run.server.aggregated, prox.server.weights)
    assert same_bits(run.model().weights, prox.model().weights)
    start = {n: w.numpy() for n, w in plain.weights(plain.built(run.method)).items()}
    reflected = {n: 2 * w - start[n] for n, w in run.server.aggregated.items()}
    assert far(run.server.weights, reflected) < 1e-12


def test_feddyn_reports_the_mean_of_the_local_models() -> None:
    fed = small()
    run = finished(made(FedDyn, "linear"), fed)
    targets = run.targets()
    assert same_bits(run.model().weights, targets["aggregated"].weights)
    assert not same_bits(run.model().weights, targets["global"].weights)


# -- SCAFFOLD ---------------------------------------------------------------------------------------


def controls(fed: Any, run: Any) -> dict[str, dict[str, Any]]:
    """Every client's control, zero for those that never took part."""
    return {
        client: {
            name: state.get(f"control.{name}", np.zeros(value.shape))
            for name, value in run.server.weights.items()
        }
        for client, state in plain.states(fed, run).items()
    }


def common_control(run: Any) -> dict[str, Any]:
    """The server's c, as it is sent."""
    return {n.removeprefix("control."): a for n, a in run.method.extras(run.server).items()}


@each_host
@pytest.mark.parametrize("server_rate", [1.0, 0.7])
def test_scaffold_equals_its_formulas(name: str, server_rate: float) -> None:
    fed, count, rho = small(), 4, HARD["momentum"]
    method = made(Scaffold, name, **HARD, server_rate=server_rate)
    current, common = plain.weights(plain.built(method)), zeros(method)
    own = {client: zeros(method) for client in fed.clients}
    for round_, run in enumerate(plain.run(method, fed)):
        start, rate = current, method.rate * method.rate_decay**round_

        def corrected(client: str, c: Any = common) -> Any:
            mine = own[client]
            return added(lambda w: {k: c[k] - mine[k] for k in w})

        clients = plain.trained(method, fed, start, round_, edit=corrected)
        changes = []
        for client, (weights, steps, _) in clients.items():
            divisor = rate * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
            after = {k: own[client][k] - common[k] + (start[k] - weights[k]) / divisor for k in start}
            changes.append(difference(after, own[client]))
            own[client] = after
        moved = difference(plain.mean([c.weights for c in clients.values()]), start)
        current = shifted(start, moved, server_rate)
        common = {k: c + sum(change[k] for change in changes) / count for k, c in common.items()}
        assert far(run.server.weights, current) < 1e-10
        assert far(common_control(run), common) < 1e-10
        for client, found in controls(fed, run).items():
            assert far(found, own[client]) < 1e-10
    assert len({record.cohort for record in run.history}) > 1


@each_host
def test_the_first_round_of_scaffold_is_one_of_fedavg(name: str) -> None:
    fed, parameters = small(), {"rounds": 1, "momentum": 0.6, "weight_decay": 0.01}
    found = made(Scaffold, name, **parameters).fit(fed).weights
    assert same_bits(found, made(FedAvg, name, weighting="uniform", **parameters).fit(fed).weights)


@dataclass(frozen=True, kw_only=True)
class Pinned(Scaffold):
    """SCAFFOLD whose controls stay at 0."""

    key: ClassVar[str] = "test-pinned"

    def _changes(self, group: Any, client: int) -> dict[str, Any]:
        return {name: torch.zeros_like(group.start[name]) for name in group.names}


@each_host
def test_scaffold_with_its_controls_pinned_to_zero_is_fedavg(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, Pinned, like="scaffold")
    fed = small()
    found = made(Pinned, name).fit(fed).weights
    assert same_bits(found, made(FedAvg, name, weighting="uniform").fit(fed).weights)


@each_host
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_the_servers_control_is_the_mean_of_the_clients(name: str, participation: float) -> None:
    fed = small()
    for run in plain.run(made(Scaffold, name, participation=participation, momentum=0.3, rounds=5), fed):
        assert far(common_control(run), plain.mean(list(controls(fed, run).values()))) < 1e-12


@each_host
def test_a_control_after_one_full_step_is_the_local_gradient(name: str) -> None:
    """Also when the rate decays: the divisor is the round's rate, not the first one."""
    fed = small()
    method = made(Scaffold, name, batch=64, epochs=1, rate_decay=0.5)
    net = plain.built(method)
    current = plain.weights(net)
    for run in plain.run(method, fed):
        found = controls(fed, run)
        for client, (inputs, targets) in plain.clients_of(fed).items():
            assert far(found[client], plain.gradient(net, current, inputs, targets)) < 1e-12
        current = {n: torch.from_numpy(w) for n, w in run.server.weights.items()}


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.9), (37, 0.9), (5, 0.3), (12, 0.0)])
def test_the_divisor_is_how_far_a_constant_gradient_takes_torch(steps: int, momentum: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimiser.step()
    assert effective_steps(steps, momentum) == pytest.approx(-weight.item() / 0.1, rel=1e-12)
    if momentum == 0:
        assert effective_steps(steps, momentum) == steps
    if steps == 37:
        assert effective_steps(steps, momentum) == pytest.approx(281.8, abs=0.05)


def test_a_rate_of_zero_leaves_controls_alone() -> None:
    fed = small()
    first, *later = (
        (controls(fed, run), run.model().weights)
        for run in plain.run(made(Scaffold, "linear", rate_decay=0.0, rounds=3), fed)
    )
    for own, weights in later:
        assert same_bits(weights, first[1])
        assert all(same_bits(own[client], first[0][client]) for client in own)


def test_scaffold_sends_controls_both_ways() -> None:
    fed = small()
    ours, theirs = (finished(made(kind, "linear"), fed).history[0] for kind in (Scaffold, FedAvg))
    weights = 8 * 4 * (plain.WIDTH * plain.CLASSES + plain.CLASSES)
    assert ours.bytes_down == theirs.bytes_down + weights
    assert ours.bytes_up == theirs.bytes_up + weights


# -- parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parameters", "told"),
    [
        (FedProx, {"proximal": -1.0}, "proximal must be a finite number >= 0"),
        (FedAvgM, {"server_momentum": 1.0}, "server_momentum must be a number in"),
        (FedAvgM, {"server_form": "heavy"}, "server_form must be 'classic', 'nesterov' or 'damped'"),
        (FedACG, {"lookahead": 1.0}, "lookahead must be a number in"),
        (FedDyn, {"dynamic": 0.0}, "dynamic must be a finite number > 0"),
        (FedDyn, {"weighting": "size"}, "weighting must be 'uniform'"),
        (Scaffold, {"weighting": "size"}, "weighting must be 'uniform'"),
        (Scaffold, {"optimiser": "adam"}, "optimiser must be 'sgd'; got 'adam'"),
    ],
)
def test_parameters_are_checked(kind: Any, parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        kind(**parameters)


# -- FedOpt and FLFA --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_fedopt_equals_its_formulas(optimiser: Any) -> None:
    fed = small()
    method = made(FedOpt, "linear", **HARD, server_optimiser=optimiser, server_rate=0.05)
    current, first = plain.weights(plain.built(method)), zeros(method)
    squares = {key: value + 1e-6 for key, value in zeros(method).items()}
    for round_, run in enumerate(plain.run(method, fed)):
        clients = plain.trained(method, fed, current, round_).values()
        step = difference(plain.mean([c.weights for c in clients], [c.rows for c in clients]), current)
        for key, moved in step.items():
            first[key] = 0.9 * first[key] + 0.1 * moved
            if optimiser == "adagrad":
                squares[key] = squares[key] + moved**2
            elif optimiser == "adam":
                squares[key] = 0.99 * squares[key] + 0.01 * moved**2
            else:
                squares[key] = squares[key] - 0.01 * moved**2 * torch.sign(squares[key] - moved**2)
            current[key] = current[key] + 0.05 * first[key] / (squares[key].sqrt() + 1e-3)
        assert far(run.server.weights, current) < 1e-10


def test_flfa_is_fedavg_with_the_exact_score() -> None:
    network = {"network": "mlp:8,6", "rounds": 3, "seed": 4}
    found = FLFA(**network).fit(small())
    expected = FedAvg(**network, feedback="lowest", feedback_sketch=0).fit(small())
    assert same_bits(found.weights, expected.weights)
    assert [r.metrics.get("feedback") for r in found.history] == [
        r.metrics.get("feedback") for r in expected.history
    ]
    assert any(r.metrics.get("feedback") for r in found.history)
    assert FLFA(feedback="hidden1").feedback_sketch == 0
