"""FedGen: its oracles, and the whole algorithm against its formulas in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsolve import registry
from fedsolve.arrays import stream
from fedsolve.errors import DataError
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedgen import GENERATED, WEIGHT_DECAY, FedGen
from fedsolve.gradient.networks import build_network, head_of
from tests.gradient import plain
from tests.gradient.plain import CLASSES, WIDTH, far, federation, finished, network, rows, same_bits, uneven

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.torch

each_network = pytest.mark.parametrize("name", plain.NETWORKS)

COMMON: dict[str, Any] = {"precision": "float64", "rate": 0.2, "rounds": 3, "batch": 4, "epochs": 2}
SMALL: dict[str, Any] = {
    "teaching": 0.7,
    "latent": 0.4,
    "generator_steps": 3,
    "generator_rate": 0.01,
    "noise_width": 3,
    "generator_width": 7,
}


def made(kind: Any, name: str = "linear", **parameters: Any) -> Any:
    return kind(network=network(name), **COMMON | (SMALL if kind is FedGen else {}) | parameters)


def small() -> Any:
    features, labels = rows(40)
    return federation(features, labels, uneven())


class Generator(nn.Module):
    """G(y, e), written out."""

    def __init__(self, method: FedGen, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(method.noise_width + CLASSES, method.generator_width)
        self.norm = nn.BatchNorm1d(method.generator_width)
        self.output = nn.Linear(method.generator_width, width)
        self.double()

    def forward(self, labels: Any, noise: Any) -> Any:
        inputs = torch.cat([torch.as_tensor(noise), F.one_hot(torch.as_tensor(labels), CLASSES)], dim=1)
        return self.output(torch.relu(self.norm(self.hidden(inputs))))


def local_loss(method: FedGen, generator: Any, known: Any, round_: int, client: str) -> Any:
    """A client's loss; the step is counted by the calls."""
    count = iter(range(10**6))
    teaching, latent = (max(1e-4, start * 0.98**round_) for start in (method.teaching, method.latent))

    def draw(role: str, number: int) -> Any:
        return stream(method.seed, f"{role} {number}", client, round_)

    def loss(net: Any, inputs: Any, targets: Any) -> Any:
        number, head = next(count), head_of(net)[1]
        logits = net(inputs)
        total = F.cross_entropy(logits, targets)
        if method.latent:
            imagined = generator(targets, draw("latent", number).random((len(targets), method.noise_width)))
            answer = torch.softmax(head(imagined.detach()).detach(), dim=1)
            divergence = answer * (answer.log() - torch.log_softmax(logits, dim=1))
            total = total + latent * divergence.sum(dim=1).mean()
        if method.teaching:
            labels = known[draw("labels", number).integers(len(known), size=GENERATED)]
            imagined = generator(labels, draw("teaching", number).random((GENERATED, method.noise_width)))
            lesson = F.cross_entropy(head(imagined.detach()), torch.as_tensor(labels))
            total = total + teaching * GENERATED / method.batch * lesson
        return total

    return loss


def teach(method: FedGen, generator: Any, optimiser: Any, found: Any, counts: Any, round_: int) -> None:
    """The server's steps on the generator, client by client and row by row."""
    rng = stream(method.seed, "fedgen", round_)
    sums = sum(counts.values())
    known = np.flatnonzero(sums)
    net = plain.built(method)
    generator.train()
    for _ in range(method.generator_steps):
        labels = known[rng.integers(len(known), size=GENERATED)]
        noise = rng.random((GENERATED, method.noise_width))
        features = generator(labels, noise)
        loss = torch.zeros((), dtype=torch.float64)
        for client, t in found.items():
            head = head_of(plain.put(net, t.weights))[1]
            weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
            for row, label in enumerate(labels):
                error = -torch.log_softmax(weight @ features[row] + bias, dim=0)[label]
                loss = loss + counts[client][label] / sums[label] * error / GENERATED
        noise = torch.as_tensor(noise)
        pairs = [
            -((noise[a] - noise[b]) ** 2).mean() * (features[a] - features[b]).abs().mean()
            for a in range(GENERATED)
            for b in range(GENERATED)
        ]
        loss = loss + torch.stack(pairs).mean().exp()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def by_formula(method: FedGen, parts: Any, first: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """All rounds in plain torch, from the generator's first weights."""
    start, data = plain.weights(plain.built(method)), plain.clients_of(parts)
    generator = Generator(method, head_of(plain.built(method))[1].in_features)
    plain.put(generator, {name: torch.as_tensor(array) for name, array in first.items()})
    optimiser = torch.optim.Adam(generator.parameters(), lr=method.generator_rate, weight_decay=WEIGHT_DECAY)
    known: Any = None
    for round_ in range(method.rounds):
        net, found = plain.built(method), {}
        for client in plain.cohort(method, list(data), round_):
            generator.eval()
            loss = local_loss(method, generator, known, round_, client) if round_ else plain.cross_entropy
            steps = plain.local(plain.put(net, start), method, data[client], round_, client, loss)
            found[client] = plain.Trained(plain.weights(net), steps, len(data[client][1]))
        counts = {client: np.bincount(data[client][1], minlength=CLASSES) for client in found}
        known = np.flatnonzero(sum(counts.values()))
        start = plain.mean([t.weights for t in found.values()], [t.rows for t in found.values()])
        teach(method, generator, optimiser, found, counts, round_)
    return start, generator


def first_generator(method: FedGen) -> dict[str, Any]:
    memory = method.start(small().describe()).server.memory
    return {
        name.removeprefix("generator."): array.copy()
        for name, array in memory.items()
        if name.startswith("generator.") and "running" not in name
    }


@each_network
@pytest.mark.parametrize("parameters", [{}, {"participation": 0.5, "precision": "float32"}])
def test_without_its_terms_it_is_fedavg(name: str, parameters: dict[str, Any]) -> None:
    plain_run = finished(made(FedGen, name, teaching=0.0, latent=0.0, **parameters), small())
    average = finished(made(FedAvg, name, **parameters), small())
    assert same_bits(plain_run.server.weights, average.server.weights)
    assert plain_run.server.memory == {}
    assert plain_run.history[1].bytes_up == average.history[1].bytes_up


@each_network
def test_the_first_round_is_fedavgs(name: str) -> None:
    gen, average = (finished(made(kind, name, rounds=1), small()) for kind in (FedGen, FedAvg))
    assert same_bits(gen.server.weights, average.server.weights)
    assert same_bits(gen.server.aggregated, average.server.aggregated)
    assert gen.history[0].bytes_down == average.history[0].bytes_down


@each_network
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        pytest.param({"teaching": 0.0}, marks=pytest.mark.slow),
        pytest.param({"latent": 0.0, "participation": 0.5, "momentum": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_it_follows_the_formulas(name: str, parameters: dict[str, Any]) -> None:
    method = made(FedGen, name, **parameters)
    run = finished(method, small())
    expected, generator = by_formula(method, small(), first_generator(method))
    assert far(run.server.weights, expected) < 1e-10
    arrays = {
        name.removeprefix("generator."): array
        for name, array in run.server.memory.items()
        if name.startswith("generator.")
    }
    state = {n: v.numpy() for n, v in generator.state_dict().items() if "tracked" not in n}
    assert far(arrays, state) < 1e-10
    assert (
        far(run.server.weights, finished(made(FedAvg, name, **_shared(parameters)), small()).server.weights)
        > 1e-3
    )


def _shared(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in SMALL}


def test_a_stack_equals_networks_one_by_one() -> None:
    """Clients of a stack are padded to one batch size and train side by side; a module trains alone."""
    stack = made(FedGen, "mlp:5", rounds=4)
    alone = FedGen(
        network=build_network("mlp:5", WIDTH, CLASSES, dtype="float64"), **COMMON | SMALL | {"rounds": 4}
    )
    assert far(finished(stack, small()).server.weights, finished(alone, small()).server.weights) < 1e-10


def test_labels_that_nobody_has_are_never_generated() -> None:
    features, labels = rows(40)
    method = made(FedGen, rounds=3)
    run = finished(method, federation(features, labels % 2, uneven()))
    assert run.server.memory["labels"][2] == 0
    assert run.server.memory["labels"].sum() == 40
    column = run.server.memory["generator.hidden.weight"][:, method.noise_width + 2]
    first = first_generator(method)["hidden.weight"][:, method.noise_width + 2]
    # Weight decay through Adam moves it a little; the loss never does.
    assert np.abs(column - first).max() <= method.generator_steps * 3 * method.generator_rate * 1.01
    assert np.isfinite(column).all()


def test_the_generator_learns_what_the_classifiers_know() -> None:
    """On separable data generated features come to be classified as the label they were made for."""
    features, labels = rows(120, seed=3)
    parts = federation(features, labels, np.arange(120) % 4)
    method = made(FedGen, rounds=10, generator_steps=50, noise_width=8, generator_width=32)
    run = finished(method, parts)
    generator = Generator(method, WIDTH)
    held = {
        n.removeprefix("generator."): torch.as_tensor(a)
        for n, a in run.server.memory.items()
        if "generator." in n
    }
    generator.load_state_dict(held, strict=False)
    wanted = np.arange(300) % CLASSES
    made_up = generator.eval()(wanted, np.random.default_rng(0).random((300, 8))).detach().numpy()
    assert run.model().score(made_up, wanted) > 0.9


@pytest.mark.parametrize("name", ["mlp:5", "module"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_resume_is_exact(name: str, precision: str) -> None:
    method = made(FedGen, name, participation=0.5, rounds=4, precision=precision)
    whole = finished(method, small())
    run = method.start(small().describe())
    for number, _ in enumerate(exchanges(run, small()), 1):
        if number == 2:
            break
    again = method.start(small().describe())
    again.restore(run.to_bytes(), "checkpoint")
    list(exchanges(again, small()))
    assert same_bits(again.server.weights, whole.server.weights)
    assert same_bits(again.server.memory, whole.server.memory)


def test_a_classifier_without_bias() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False))
    run = finished(FedGen(network=net, **COMMON | SMALL), small())
    assert run.server.weights["2.weight"].shape == (CLASSES, 5)
    assert all(np.isfinite(array).all() for array in run.server.weights.values())


def test_a_frozen_classifier_is_refused() -> None:
    net = plain.module()
    net[2].requires_grad_(False)
    with pytest.raises(DataError, match="frozen"):
        finished(FedGen(network=net, **COMMON | SMALL), small())


def test_it_gathers_classifiers_and_counts_only() -> None:
    assert registry.method_class("fedgen") is FedGen
    assert FedGen.gathers
    gen, average = finished(made(FedGen, "mlp:5"), small()), finished(made(FedAvg, "mlp:5"), small())
    # Every weight travels once, as in FedAvg; then the client's weight and its class counts.
    assert gen.history[0].bytes_up == average.history[0].bytes_up + 4 * 8 * (1 + CLASSES)
    for wrong in ({"teaching": -1.0}, {"latent": -1.0}, {"generator_steps": -1}, {"noise_width": 0}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            FedGen(**wrong)
