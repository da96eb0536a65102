"""FedLPA and FedFisher: their oracles, and each against its formulas in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.federation.encoding import decode_term, encode_term
from fedsolve.federation.messages import Term, Total
from fedsolve.gradient import fedfisher as fedfisher_module
from fedsolve.gradient import kfac, oneshot
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedfisher import FedFisher, FedFisherKFAC, diagonal_fisher
from fedsolve.gradient.fedlpa import FedLPA
from fedsolve.gradient.networks import build_network
from tests.gradient import plain
from tests.gradient.plain import CLASSES, WIDTH, far, federation, finished, network, rows, same_bits, uneven

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.torch

each_network = pytest.mark.parametrize("name", plain.NETWORKS)
each_method = pytest.mark.parametrize("kind", [FedLPA, FedFisher, FedFisherKFAC])

COMMON: dict[str, Any] = {
    "precision": "float64", "rate": 0.1, "rounds": 1, "batch": 4, "epochs": 3, "momentum": 0.5,
}  # fmt: skip


def made(kind: Any, name: str = "linear", **parameters: Any) -> Any:
    return kind(network=network(name), **COMMON | parameters)


def small() -> Any:
    features, labels = rows(40)
    return federation(features, labels, uneven())


def layers_of(net: Any) -> dict[str, Any]:
    return {name: part for name, part in net.named_modules() if isinstance(part, nn.Linear)}


def row_gradients(net: Any, row: Any, label: int) -> dict[str, Any]:
    found = torch.autograd.grad(
        F.cross_entropy(net(row[None]), torch.tensor([label])), list(net.parameters())
    )
    return dict(zip((name for name, _ in net.named_parameters()), found, strict=True))


def row_factors(net: Any, row: Any, shares: Any) -> dict[str, tuple[Any, Any]]:
    """a aᵀ, and sum over labels of share * g gᵀ, of every linear layer for one row.

    A row's weight gradient is g aᵀ and its bias gradient g, so both can be read off.
    """
    inputs: dict[str, Any] = {}
    hooks = [
        part.register_forward_hook(
            lambda _, given, __, name=name: inputs.__setitem__(name, given[0][0].detach())
        )
        for name, part in layers_of(net).items()
    ]
    net(row[None])
    for hook in hooks:
        hook.remove()
    found = {}
    for name in inputs:
        a = torch.cat([inputs[name], torch.ones(1, dtype=torch.float64)])
        outer = 0.0
        for label, share in enumerate(shares):
            g = row_gradients(net, row, label)[f"{name}.bias"]
            outer = outer + share * torch.outer(g, g)
        found[name] = (torch.outer(a, a).numpy(), outer.numpy())
    return found


def solved(method: Any, parts: Any, *, own_labels: bool, damping: float, floor: float) -> dict[str, Any]:
    """One round in plain torch, each layer's system written out in Kronecker form."""
    start, data = plain.weights(plain.built(method)), plain.clients_of(parts)
    found = plain.trained(method, parts, start, 0)
    sizes = np.array([t.rows for t in found.values()], dtype=float)
    mean = plain.mean([t.weights for t in found.values()], list(sizes))
    net = plain.built(method)
    result = {name: value.numpy().copy() for name, value in mean.items()}
    for layer in layers_of(net):
        weight = mean[f"{layer}.weight"].numpy()
        begin = np.concatenate([weight, mean[f"{layer}.bias"].numpy()[:, None]], axis=1)
        system, target = 0.0, 0.0
        for (client, t), p in zip(found.items(), sizes / sizes.sum(), strict=True):
            plain.put(net, t.weights)
            features, labels = data[client]
            chances = (
                torch.softmax(net(features).detach(), dim=1) if own_labels else F.one_hot(labels, CLASSES)
            )
            each = [
                row_factors(net, row, shares)[layer] for row, shares in zip(features, chances, strict=True)
            ]
            right = sum(a for a, _ in each) / len(each) + damping * np.eye(weight.shape[1] + 1)
            left = sum(b for _, b in each) / len(each) + damping * np.eye(weight.shape[0])
            own = np.concatenate(
                [t.weights[f"{layer}.weight"].numpy(), t.weights[f"{layer}.bias"].numpy()[:, None]], axis=1
            )
            system = system + p * np.kron(left, right)
            target = target + p * (left @ own @ right)
        whole = system + floor * np.eye(len(system))
        joined = np.linalg.solve(whole, (target + floor * begin).ravel()).reshape(begin.shape)
        result |= {f"{layer}.weight": joined[:, :-1], f"{layer}.bias": joined[:, -1]}
    return result


# -- oracles of all three --------------------------------------------------------------------------


@each_method
@each_network
def test_one_client_keeps_its_model(kind: Any, name: str) -> None:
    features, labels = rows(14)
    parts = [federation(features, labels, np.zeros(14, dtype=int)) for _ in range(2)]
    assert (
        far(
            finished(made(kind, name), parts[0]).server.weights,
            finished(made(FedAvg, name), parts[1]).server.weights,
        )
        < 1e-12
    )


@each_network
@pytest.mark.parametrize("kind", [FedLPA, FedFisherKFAC])
def test_equal_factors_are_fedavg(kind: Any, name: str, monkeypatch: Any) -> None:
    def equal(net: Any, layers: dict[str, Any], *_: Any) -> dict[str, kfac.Factors]:
        found = {}
        for layer, part in layers.items():
            rng = np.random.default_rng(part.in_features)
            right, left = rng.standard_normal((2, 9, 9))
            size = part.in_features + 1, part.out_features
            found[layer] = kfac.Factors(
                (right @ right.T)[: size[0], : size[0]], (left @ left.T)[: size[1], : size[1]]
            )
        return found

    monkeypatch.setattr(kfac, "factors", equal)
    average = finished(made(FedAvg, name), small())
    assert far(finished(made(kind, name), small()).server.weights, average.server.weights) < 1e-10


@each_network
@pytest.mark.parametrize("value", [1.0, 0.02])
def test_an_equal_diagonal_is_fedavg(name: str, value: float, monkeypatch: Any) -> None:
    def equal(net: Any, names: list[str], *_: Any) -> dict[str, Any]:
        return {n: torch.full_like(p, value).detach() for n, p in net.named_parameters() if n in names}

    monkeypatch.setattr(fedfisher_module, "diagonal_fisher", equal)
    monkeypatch.setattr(kfac, "diagonals", lambda net, layers, *_: equal(net, list(plain.weights(net))))
    average = finished(made(FedAvg, name), small())
    assert far(finished(made(FedFisher, name), small()).server.weights, average.server.weights) < 1e-12


@each_method
def test_a_stack_equals_networks_one_by_one(kind: Any) -> None:
    alone = kind(network=build_network("mlp:5", WIDTH, CLASSES, dtype="float64"), **COMMON)
    stack = finished(made(kind, "mlp:5"), small())
    assert far(stack.server.weights, finished(alone, small()).server.weights) < 1e-10


@each_method
def test_the_order_of_clients_does_not_matter(kind: Any) -> None:
    features, labels = rows(40)
    owners = uneven()
    # Batches follow a client's name, so a single batch makes them independent of it.
    method = made(kind, "mlp:5", batch=64)
    one = finished(method, federation(features, labels, owners))
    other = finished(method, federation(features, labels, 3 - owners))
    assert far(one.server.weights, other.server.weights) < 1e-9


@each_method
def test_several_rounds_are_refused(kind: Any) -> None:
    assert kind().rounds == 1
    with pytest.raises(DataError, match="rounds=2"):
        kind(rounds=2)


@each_method
def test_a_finished_checkpoint_gives_the_same_model(kind: Any, tmp_path: Any) -> None:
    method, path = made(kind, "mlp:5"), tmp_path / "run.ckpt"
    first = method.fit(small(), checkpoint=path)
    again = method.fit(small(), checkpoint=path, resume=True)
    assert same_bits(first.weights, again.weights)
    assert len(again.history) == 1


@each_method
def test_normalisation_layers_and_images(kind: Any) -> None:
    """Convolutions, one in groups, BatchNorm and a linear layer: finite, and no worse than a guess."""
    rng = np.random.default_rng(0)
    labels = np.arange(48) % CLASSES
    features = 0.3 * rng.standard_normal((48, 2, 5, 5)) + labels[:, None, None, None]
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip
    method = kind(network=net, shape="2,5,5", **COMMON | {"batch": 8, "epochs": 10})
    parts = federation(features.reshape(48, -1), labels, np.arange(48) // 16)
    run = finished(method, parts)
    model = run.model()
    assert all(np.isfinite(array).all() for array in model.weights.values())
    assert model.score(features.reshape(48, -1), labels) > 0.6
    average = finished(
        FedAvg(network=net, shape="2,5,5", **COMMON | {"batch": 8, "epochs": 10}),
        federation(features.reshape(48, -1), labels, np.arange(48) // 16),
    )
    assert same_bits(run.server.buffers, average.server.buffers)
    normed = ("1.weight", "1.bias")
    differs = any((run.server.weights[n] != average.server.weights[n]).any() for n in normed)
    assert differs == (kind is FedFisher)


# -- FedLPA and Kronecker FedFisher ----------------------------------------------------------------


@each_network
def test_fedlpa_solves_the_kronecker_system(name: str) -> None:
    method = made(FedLPA, name)
    run = finished(method, small())
    expected = solved(method, small(), own_labels=False, damping=method.damping, floor=0.0)
    assert far(run.server.weights, expected) < 1e-10
    assert max(run.server.note["residuals"].values()) < 1e-11
    assert far(run.server.weights, run.server.aggregated) > 1e-3


def convolved() -> tuple[Any, Any]:
    """A convolution of nine positions and a linear layer, and images of two clients for it."""
    rng = np.random.default_rng(0)
    labels = np.arange(24) % CLASSES
    features = 0.5 * rng.standard_normal((24, 2 * 5 * 5)) + labels[:, None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES)).double()
    return net, federation(features, labels, np.arange(24) // 12)


def authors_factors(net: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """A and B of the convolution `net[0]` as the authors' ComputeCovA and ComputeCovG form them."""
    patches = F.unfold(inputs, 3).transpose(1, 2)
    rows, positions, _ = patches.shape
    flat = patches.reshape(rows * positions, -1)
    flat = torch.cat([flat, torch.ones(len(flat), 1, dtype=flat.dtype)], dim=1) / positions
    maps = net[0](inputs)
    maps.retain_grad()
    F.cross_entropy(net[1:](maps), targets, reduction="sum").backward()
    slopes = maps.grad.permute(0, 2, 3, 1).reshape(rows * positions, -1) * positions
    return flat.T @ flat / rows, slopes.T @ slopes / (rows * positions)


def test_damping_of_convolutions_means_what_it_does_in_the_authors_code() -> None:
    net, parts = convolved()
    method = FedLPA(network=net, shape="2,5,5", **COMMON)
    total = _gathered(method, parts)
    left_side, right_side = 0.0, np.zeros((4, 19))
    for client, (features, labels) in plain.clients_of(parts).items():
        images, trained = features.reshape(-1, 2, 5, 5), convolved()[0]
        plain.local(trained, method, (images, labels), 0, client)
        right, left = (
            factor.numpy() + method.damping * np.eye(len(factor))
            for factor in authors_factors(trained, images, labels)
        )
        np.testing.assert_allclose(total[f"right.0@{client}"], right, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(total[f"left.0@{client}"], left, rtol=1e-10, atol=1e-13)
        weights = plain.weights(trained)
        matrix = torch.cat([weights["0.weight"].flatten(1), weights["0.bias"][:, None]], dim=1).numpy()
        right_side = right_side + 0.5 * left @ matrix @ right
        left_side = left_side + 0.5 * np.kron(left, right)
    wanted = np.linalg.solve(left_side, right_side.reshape(-1)).reshape(4, 19)
    found = finished(method, convolved()[1]).server.weights
    np.testing.assert_allclose(found["0.weight"].reshape(4, -1), wanted[:, :-1], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found["0.bias"], wanted[:, -1], rtol=1e-8, atol=1e-9)


@each_network
def test_kronecker_fedfisher_solves_the_same_system_without_damping(name: str) -> None:
    method = made(FedFisherKFAC, name, floor=1e-4)
    run = finished(method, small())
    expected = solved(method, small(), own_labels=True, damping=0.0, floor=1e-4)
    assert far(run.server.weights, expected) < 1e-9
    assert max(run.server.note["residuals"].values()) < 1e-11


@each_network
def test_the_default_floor_leaves_the_undamped_system_solved(name: str) -> None:
    run = finished(made(FedFisherKFAC, name), small())
    total = _gathered(made(FedFisherKFAC, name), small())
    names = [n.removeprefix("target.") for n in total.term.arrays if n.startswith("target.")]
    weight = float(total["weight"][0])
    for layer in names:
        held = [run.server.weights[f"{layer}.{part}"] for part in ("weight", "bias")]
        matrix = np.concatenate([held[0], held[1][:, None]], axis=1)
        left = sum(
            float(total[f"weight@{c}"][0]) * total[f"left.{layer}@{c}"] @ matrix @ total[f"right.{layer}@{c}"]
            for c in total.cohort
        )
        gap = np.linalg.norm(left - total[f"target.{layer}"]) / weight
        assert gap < 1e-5 * max(1.0, np.linalg.norm(matrix))


def _gathered(method: Any, parts: Any) -> Total:
    run = method.start(parts.describe())
    request = run.request(parts.clients)
    assert request is not None
    return parts.exchange(request, run.chain)


def test_shifts_of_all_logits_stay_at_the_mean() -> None:
    """Softmax ignores them, so the Fisher information knows nothing of them."""
    run = finished(made(FedFisherKFAC), small())
    for name, array in run.server.weights.items():
        shift = (array - run.server.aggregated[name]).sum(axis=0)
        assert np.abs(shift).max() < 1e-8


def test_only_factors_are_gathered() -> None:
    total = _gathered(made(FedLPA, "mlp:5"), small())
    apart = {name.partition("@")[0] for name in total.term.arrays if "@" in name}
    assert apart == {
        "weight",
        *(f"{side}.{layer}" for side in ("left", "right") for layer in ("hidden1", "classifier")),
    }
    assert FedLPA.gathers
    assert FedFisherKFAC.gathers
    assert not FedFisher.gathers
    assert not any("@" in name for name in _gathered(made(FedFisher), small()).term.arrays)
    for key, kind in (("fedlpa", FedLPA), ("fedfisher", FedFisher), ("fedfisher-kfac", FedFisherKFAC)):
        assert registry.method_class(key) is kind


def test_factors_survive_the_wire() -> None:
    parts = small()
    method = made(FedLPA, "mlp:5")
    run = method.start(parts.describe())
    request = run.request(parts.clients)
    assert request is not None
    total = Term()
    for participant in parts.participants:
        answer = decode_term(encode_term(participant.answer(request)))
        assert isinstance(answer, Term)
        total.add(answer)
    total.mirror()
    run.absorb(Total(total, parts.clients))
    assert far(run.server.weights, finished(method, small()).server.weights) < 1e-12


def test_an_unsolved_system_is_reported(monkeypatch: Any) -> None:
    monkeypatch.setattr(oneshot, "ACCEPTED", -1.0)
    with pytest.warns(UserWarning, match="'classifier'.*damping"):
        finished(made(FedLPA), small())


# -- FedFisher's diagonal --------------------------------------------------------------------------


@each_network
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_diagonal_solution_follows_the_formula(name: str, weighting: str) -> None:
    method = made(FedFisher, name, weighting=weighting)
    data, net = plain.clients_of(small()), plain.built(method)
    found = plain.trained(method, small(), plain.weights(net), 0)
    sums = {n: [0.0, 0.0] for n in plain.weights(net)}
    count = sum(t.rows if weighting == "size" else 1 for t in found.values())
    for client, t in found.items():
        plain.put(net, t.weights)
        features, _ = data[client]
        chances = torch.softmax(net(features).detach(), dim=1)
        fisher = {n: torch.zeros_like(w) for n, w in t.weights.items()}
        for row, shares in zip(features, chances, strict=True):
            for label, share in enumerate(shares):
                for n, gradient in row_gradients(net, row, label).items():
                    fisher[n] += share * gradient**2 / len(features)
        p = (t.rows if weighting == "size" else 1) / count
        for n, value in fisher.items():
            sums[n][0] = sums[n][0] + p * value * t.weights[n]
            sums[n][1] = sums[n][1] + p * value
    assert all(float(below.min()) > 1e-6 for _, below in sums.values())
    expected = {n: above / below for n, (above, below) in sums.items()}
    run = finished(method, small())
    assert far(run.server.weights, expected) < 1e-10
    assert far(run.server.weights, run.server.aggregated) > 1e-3


@pytest.mark.parametrize("route", ["layers", "rows"])
def test_the_diagonal_of_softmax_regression_in_closed_form(route: str) -> None:
    """mean of p (1 - p) x², and of p (1 - p) for the bias."""
    features, codes = rows(20)
    net = build_network("linear", WIDTH, CLASSES, dtype="float64")
    with torch.no_grad():
        net.classifier.weight.copy_(
            torch.as_tensor(np.random.default_rng(1).standard_normal((CLASSES, WIDTH)))
        )
    x = torch.as_tensor(features)
    batches = iter([(x[:13], torch.as_tensor(codes[:13])), (x[13:], torch.as_tensor(codes[13:]))])
    labels = kfac.predicted_labels(0, np.random.default_rng(0))
    if route == "layers":
        found = kfac.diagonals(net, {"classifier": net.classifier}, batches, labels)
    else:
        found = diagonal_fisher(net, list(plain.weights(net)), batches, labels)
    p = torch.softmax(net(x), dim=1).detach()
    spread = p * (1 - p)
    assert torch.allclose(found["classifier.weight"], spread.T @ x**2 / 20, rtol=0, atol=1e-14)
    assert torch.allclose(found["classifier.bias"], spread.mean(dim=0), rtol=0, atol=1e-14)


def test_rows_are_taken_in_parts_where_gradients_are_large(monkeypatch: Any) -> None:
    whole = finished(made(FedFisher, "module"), small())
    monkeypatch.setattr(fedfisher_module, "_NUMBERS", 1)
    parts = finished(made(FedFisher, "module"), small())
    assert far(whole.server.weights, parts.server.weights) < 1e-12


def test_below_the_floor_the_mean_stays() -> None:
    features, labels = rows(40)
    features[:, 2] = 0  # a feature that nobody has
    run = finished(made(FedFisher), federation(features, labels, uneven()))
    mean = run.server.aggregated["classifier.weight"]
    assert np.array_equal(run.server.weights["classifier.weight"][:, 2], mean[:, 2])
    assert (run.server.weights["classifier.weight"][:, 1] != mean[:, 1]).all()
    everything = finished(made(FedFisher, floor=1e9), federation(features, labels, uneven()))
    average = finished(made(FedAvg), federation(features, labels, uneven()))
    assert same_bits(everything.server.weights, average.server.weights)
    nothing = finished(made(FedFisher, floor=0.0), federation(features, labels, uneven()))
    assert np.isfinite(nothing.server.weights["classifier.weight"]).all()


@pytest.mark.parametrize("kind", [FedFisher, FedFisherKFAC])
def test_drawn_labels_are_repeatable_and_of_their_own(kind: Any) -> None:
    method = made(kind, draws=3)
    one, other = finished(method, small()), finished(method, small())
    assert same_bits(one.server.weights, other.server.weights)
    exact = finished(made(kind), small())
    assert same_bits(one.server.aggregated, exact.server.aggregated)
    assert far(one.server.weights, exact.server.weights) > 1e-6


def test_wrong_parameters_are_refused() -> None:
    for kind, wrong in (
        (FedLPA, {"damping": -1.0}),
        (FedFisher, {"draws": -1}),
        (FedFisherKFAC, {"floor": -1.0}),
    ):
        with pytest.raises(DataError, match=next(iter(wrong))):
            replace(kind(), **wrong)
