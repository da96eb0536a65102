"""MOON, FedSOL, FedRS, FedLC and FedNTD: the oracles of each, and each against a plain rewriting.

`plain` trains client after client with explicit formulas in float64: no stack, no padding, no foreach;
feedback alignment in its detached form.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.federation.local import LocalFederation
from fedsolve.gradient.batches import plan_batches
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedlc import FedLC
from fedsolve.gradient.fedntd import FedNTD, not_true
from fedsolve.gradient.fedrs import FedRS
from fedsolve.gradient.fedsol import FedSOL
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.moon import MOON
from fedsolve.gradient.run import cohort_of

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.torch

FEATURES, CLASSES = 6, 4
ALL = (MOON, FedSOL, FedRS, FedLC, FedNTD)


class Tanh(nn.Module):
    """Four linear layers with tanh between them, so that feedback alignment has three to choose among."""

    LAYERS = ("one", "two", "three", "classifier")

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        widths = (FEATURES, 7, 6, 5, CLASSES)
        for name, (inputs, outputs) in zip(self.LAYERS, itertools.pairwise(widths), strict=True):
            self.add_module(name, nn.Linear(inputs, outputs))
        with torch.no_grad():
            rng = np.random.default_rng(seed)
            for value in self.parameters():
                value.copy_(torch.as_tensor(rng.normal(size=tuple(value.shape)) * 0.6))

    def forward(self, inputs):
        for name in self.LAYERS[:-1]:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return self.classifier(inputs)


class Normalised(nn.Module):
    """A network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(5)
        self.one = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.classifier = nn.Linear(7, CLASSES)
        with torch.no_grad():
            for layer in (self.one, self.classifier):
                layer.weight.copy_(torch.as_tensor(rng.normal(size=tuple(layer.weight.shape)) * 0.6))
                layer.bias.zero_()

    def features(self, inputs):
        return torch.relu(self.norm(self.one(inputs)))

    def forward(self, inputs):
        return self.classifier(self.features(inputs))


def network(kind: str):
    return Tanh() if kind == "module" else kind


class Problem:
    """Clients of different sizes: the first lacks classes 0 and 3, the second has one class only."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        held = [[1, 2, 2, 2, 1, 1, 1], [1] * 5, [0, 1, 2, 3, 3, 3, 0] * 3, [3, 0, 0, 2, 3, 2, 2, 2, 2, 2, 3]]
        self.owners = np.concatenate([[k] * len(codes) for k, codes in enumerate(held)])
        self.labels = np.concatenate(held)
        centres = rng.normal(size=(CLASSES, FEATURES))
        self.features = centres[self.labels] + rng.normal(size=(len(self.labels), FEATURES))

    def federation(self, **options) -> LocalFederation:
        return LocalFederation.from_arrays(
            self.features, self.labels, self.owners, workers=1, classes=list(range(CLASSES)), **options
        )

    def relabelled(self, labels) -> Problem:
        other = Problem()
        other.labels = np.asarray(labels)
        return other

    def subset(self, rows) -> Problem:
        other = Problem()
        other.features, other.labels = self.features[rows], self.labels[rows]
        other.owners = np.unique(self.owners[rows], return_inverse=True)[1]
        return other


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


SHARED = {"rounds": 3, "epochs": 2, "batch": 4, "rate": 0.1, "momentum": 0.5, "weight_decay": 1e-3}


def weights(method: GradientMethod, problem: Problem) -> dict[str, np.ndarray]:
    return method.fit(problem.federation()).weights


def assert_same(left, right) -> None:
    assert list(left) == list(right)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def assert_close(left, right, tolerance: float = 1e-10) -> None:
    assert left.keys() == right.keys()
    size = max(float(np.abs(value).max()) for value in right.values())
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=tolerance * size, err_msg=name)


def differs(left, right) -> bool:
    return any(np.abs(left[name] - right[name]).max() > 1e-4 for name in left)


# -- a plain rewriting ------------------------------------------------------------------------------


def aligned(x, weight, bias, feedback):
    """A linear layer whose input gradient goes through `feedback` instead of `weight`."""
    if feedback is None:
        return x @ weight.T + bias
    carried = x @ feedback.T
    return x.detach() @ weight.T + bias + (carried - carried.detach())


class Plain:
    """One method, written down client by client."""

    def __init__(self, method: GradientMethod, problem: Problem, layers, activation, frozen=()) -> None:
        self.frozen = frozen
        self.method, self.problem = method, problem
        self.layers, self.activation = layers, activation
        self.previous: dict[int, dict] = {}
        self.feedback: dict = {}

    def forward(self, w, x, feedback=None):
        feedback = feedback or {}
        *hidden, last = self.layers
        for name in hidden:
            x = self.activation(aligned(x, w[f"{name}.weight"], w[f"{name}.bias"], feedback.get(name)))
        return x, aligned(x, w[f"{last}.weight"], w[f"{last}.bias"], feedback.get(last))

    def objective(self, w, start, client, x, y, counts, feedback):
        method = self.method
        z, logits = self.forward(w, x, feedback)
        if isinstance(method, FedRS):
            most = counts.max()
            scale = [
                (1.0 if n > 0 else method.restraint)
                if method.restraint_mode == "binary"
                else method.restraint + (1 - method.restraint) * n / most
                for n in counts.tolist()
            ]
            logits = logits * torch.tensor(scale, dtype=torch.float64)
        present = [c for c in range(CLASSES) if counts[c] > 0]
        rows = []
        for row, true in enumerate(y.tolist()):
            f = logits[row]
            if isinstance(method, FedLC):
                f = {c: f[c] - method.calibration / counts[c] ** 0.25 for c in present}
                compared = [c for c in present if method.calibration_form == "softmax" or c != true]
                if compared:
                    rows.append(-f[true] + torch.log(sum(torch.exp(f[c]) for c in compared)))
                else:
                    rows.append(0.0 * f[true])
            else:
                rows.append(-f[true] + torch.log(torch.exp(f).sum()))
        loss = sum(rows) / len(rows)
        with torch.no_grad():
            known_features, known = self.forward(start, x)
        if isinstance(method, MOON):
            with torch.no_grad():
                past, _ = self.forward(self.previous.get(client, start), x)
            for row in range(len(x)):
                near, far = (
                    (z[row] @ other[row]) / (z[row].norm() * other[row].norm())
                    for other in (known_features, past)
                )
                pulls = torch.exp(torch.stack([near, far]) / method.temperature)
                loss = loss - method.contrast * torch.log(pulls[0] / pulls.sum()) / len(x)
        if isinstance(method, FedNTD):
            for row, true in enumerate(y.tolist()):
                others = [c for c in range(CLASSES) if c != true]
                q, p = (
                    torch.exp(f[row][others] / method.temperature)
                    / torch.exp(f[row][others] / method.temperature).sum()
                    for f in (logits, known)
                )
                divergence = (p * torch.log(p / q)).sum()
                loss = loss + method.distillation * method.temperature**2 * divergence / len(x)
        return loss

    def perturbed(self, w, start, x, feedback):
        """w + e of FedSOL."""
        method = self.method
        teacher = torch.softmax(self.forward(start, x)[1] / 3, dim=1).detach()
        student = torch.softmax(self.forward(w, x, feedback)[1] / 3, dim=1)
        distance = (teacher * torch.log(teacher / student)).sum() / len(x)
        g = dict(zip(w, torch.autograd.grad(distance, list(w.values())), strict=True))
        norm = sum(float((v**2).sum()) for v in g.values()) ** 0.5
        moved = any(bool((w[n] != start[n]).any()) for n in w)
        shifted = {}
        for name, value in w.items():
            e = (
                torch.zeros_like(value)
                if norm < 1e-6 or not moved
                else method.radius * g[name] / (norm + 1e-12)
            )
            if method.adaptive:
                away = (value.detach() - start[name]).abs()
                e = e * away / torch.sqrt((away**2).sum(dim=0, keepdim=True)).clamp_min(1e-12)
            shifted[name] = (value.detach() + e).requires_grad_()
        return shifted

    def client(self, start, client, round_):
        method, problem = self.method, self.problem
        mine = problem.owners == client
        x, y = torch.as_tensor(problem.features[mine]), torch.as_tensor(problem.labels[mine])
        counts = torch.bincount(y, minlength=CLASSES).double()
        w = {name: value.clone().requires_grad_() for name, value in start.items()}
        velocity = None
        for batch in plan_batches(method, len(y), round_, f"client-{client}", 1):
            feedback = {
                name: start[f"{name}.weight"]
                * (w[f"{name}.weight"].detach().norm() / start[f"{name}.weight"].norm())
                for name in self.feedback
            }
            at = self.perturbed(w, start, x[batch], feedback) if isinstance(method, FedSOL) else w
            loss = self.objective(at, start, client, x[batch], y[batch], counts, feedback)
            found = torch.autograd.grad(loss, list(at.values()), allow_unused=True)
            g = {
                name: (torch.zeros_like(w[name]) if part is None else part)
                + method.weight_decay * w[name].detach()
                for name, part in zip(w, found, strict=True)
            }
            velocity = g if velocity is None else {n: method.momentum * velocity[n] + g[n] for n in g}
            w = {
                n: w[n] if n in self.frozen else (w[n].detach() - method.rate * velocity[n]).requires_grad_()
                for n in w
            }
        return {name: value.detach() for name, value in w.items()}, len(y)

    def run(self, start):
        method = self.method
        clients = tuple(range(int(self.problem.owners.max()) + 1))
        chosen = []
        for round_ in range(method.rounds):
            answers = {k: self.client(start, k, round_) for k in cohort_of(method, clients, round_)}
            rows = sum(count for _, count in answers.values())
            mean = {name: sum(w[name] * count for w, count in answers.values()) / rows for name in start}
            if method.feedback == "lowest":
                self.feedback = {lowest(answers, start, self.layers[1:]): None}
                chosen.append(next(iter(self.feedback)))
            self.previous |= {k: w for k, (w, _) in answers.items()}
            start = mean
        return {name: value.numpy() for name, value in start.items()}, chosen


def lowest(answers, start, layers):
    """The layer whose updates agree least (Eq. 14 of the FLFA paper)."""
    scores = {}
    for layer in layers:
        name = f"{layer}.weight"
        updates = [(w[name] - start[name]).flatten() for w, _ in answers.values()]
        mean = sum(updates) / len(updates)
        moved = [u for u in updates if u.norm() > 0]
        scores[layer] = sum(float(u @ mean / (u.norm() * mean.norm())) for u in moved) / len(moved)
    return min(scores, key=scores.get)


def initial(method: GradientMethod, problem: Problem):
    run = method.start(problem.federation().describe())
    return {name: torch.as_tensor(value) for name, value in run.server.weights.items()}


VARIANTS = (
    MOON(contrast=2.0, temperature=0.3),
    FedSOL(radius=0.4, adaptive=False),
    FedSOL(radius=2.0, adaptive=True),
    FedRS(restraint=0.3),
    FedRS(restraint=0.3, restraint_mode="soft"),
    FedLC(calibration=0.7),
    FedLC(calibration=0.7, calibration_form="paper"),
    FedNTD(distillation=1.5, temperature=0.5),
)


def label(method: GradientMethod) -> str:
    own = {n: v for n, v in method.parameters().items() if n not in FedAvg().parameters()}
    return "-".join([method.key, *map(str, own.values())])


each = pytest.mark.parametrize("method", VARIANTS, ids=label)


@each
@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
def test_equals_the_plain_rewriting(method, kind, problem):
    method = replace(method, network=network(kind), precision="float64", participation=0.75, **SHARED)
    layers = {"linear": ("classifier",), "mlp:8": ("hidden1", "classifier")}.get(kind, Tanh.LAYERS)
    plain = Plain(method, problem, layers, torch.tanh if kind == "module" else torch.relu)
    expected, _ = plain.run(initial(method, problem))
    found = weights(method, problem)
    assert_close(found, expected)
    fedavg = weights(FedAvg(**{n: getattr(method, n) for n in FedAvg().parameters()}), problem)
    assert differs(found, fedavg) == (method.key != "moon" or kind != "linear")


@each
def test_with_feedback_alignment_equals_the_plain_rewriting(method, problem):
    method = replace(method, network=Tanh(), precision="float64", feedback="lowest", **SHARED)
    plain = Plain(method, problem, Tanh.LAYERS, torch.tanh)
    expected, chosen = plain.run(initial(method, problem))
    model = method.fit(problem.federation())
    assert [record.metrics.get("feedback") for record in model.history] == [None, *([n] for n in chosen[:-1])]
    assert_close(model.weights, expected)
    assert differs(model.weights, weights(replace(method, feedback=None), problem))


@each
def test_the_extra_terms_flow_back_through_the_feedback(method, problem):
    """In the second local step gradients of earlier layers differ, and those of the layer itself do not."""
    shared = SHARED | {"rounds": 1, "epochs": 1, "batch": 12, "momentum": 0.0}
    lone = problem.subset(np.flatnonzero(problem.owners == 2))
    plain = replace(method, network=Tanh(), precision="float64", **shared)
    host, fed = weights(plain, lone), weights(replace(plain, feedback="classifier"), lone)
    for name in host:
        changed = np.abs(host[name] - fed[name]).max() > 1e-8
        # FedSOL's second pass starts elsewhere, so there the layer itself moves differently too.
        assert changed == (not name.startswith("classifier") or method.key == "fedsol"), name


@each
@pytest.mark.parametrize("kind", ["linear", "mlp:8"])
def test_a_stack_equals_one_network_at_a_time(method, kind, problem):
    from fedsolve.gradient.networks import build_network

    method = replace(method, network=kind, precision="float64", **SHARED)
    module = build_network(kind, FEATURES, CLASSES, dtype="float64")
    assert_close(weights(method, problem), weights(replace(method, network=module), problem))


# -- a term that is switched off is not there --------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize(
    "method",
    [
        MOON(contrast=0.0),
        FedSOL(radius=0.0),
        FedSOL(radius=0.0, adaptive=False),
        FedRS(restraint=1.0),
        FedRS(restraint=1.0, restraint_mode="soft"),
        FedLC(calibration=0.0),
        FedNTD(distillation=0.0),
    ],
    ids=label,
)
def test_switched_off_is_fedavg_to_the_last_bit(method, kind, problem):
    shared = SHARED | {"network": network(kind), "clip": 1.0}
    assert_same(weights(replace(method, **shared), problem), weights(FedAvg(**shared), problem))


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize(
    "method", [FedSOL(radius=5.0), FedSOL(radius=5.0, adaptive=False), FedNTD(), MOON()], ids=label
)
def test_the_first_step_of_a_round_is_fedavg(method, kind, problem):
    """Every round has one step: the received model agrees with itself."""
    shared = SHARED | {"network": network(kind), "batch": 64, "epochs": 1, "precision": "float64"}
    shared |= {"rounds": 1} if method.key == "moon" else {}
    found, expected = weights(replace(method, **shared), problem), weights(FedAvg(**shared), problem)
    if method.key == "fedsol":
        assert_same(found, expected)
    assert_close(found, expected)


# -- MOON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp:8", "module"])
def test_moon_in_a_first_participation_is_fedavg_with_log_2(kind, problem):
    shared = SHARED | {"network": network(kind), "rounds": 1, "precision": "float64"}
    moon, fedavg = (m.fit(problem.federation()) for m in (MOON(contrast=5.0, **shared), FedAvg(**shared)))
    assert_close(moon.weights, fedavg.weights)
    extra = moon.history[0].metrics["loss"] - fedavg.history[0].metrics["loss"]
    assert extra == pytest.approx(5.0 * np.log(2), rel=1e-12)


@pytest.mark.parametrize("kind", ["mlp:8", "module"])
def test_moon_has_no_gradient_where_the_previous_model_is_the_global_one(kind, problem):
    """A federation of one: the next global model is the client's own previous one."""
    lone = problem.subset(np.flatnonzero(problem.owners == 2))
    shared = SHARED | {"network": network(kind), "precision": "float64"}
    moon, fedavg = (m.fit(lone.federation()) for m in (MOON(contrast=5.0, **shared), FedAvg(**shared)))
    assert_close(moon.weights, fedavg.weights)
    extra = moon.history[2].metrics["loss"] - fedavg.history[2].metrics["loss"]
    assert extra == pytest.approx(5.0 * np.log(2), rel=1e-9)


def test_moon_on_frozen_features_is_fedavg(problem):
    """One linear layer, and a network whose body is frozen: the classifier's input has no gradient."""
    assert_same(
        weights(MOON(contrast=5.0, **SHARED), problem),
        weights(FedAvg(**SHARED), problem),
    )
    frozen = Tanh()
    for name in Tanh.LAYERS[:-1]:
        frozen.get_submodule(name).requires_grad_(False)
    shared = SHARED | {"network": frozen, "seed": 4}
    moon, fedavg = (m.fit(problem.federation()) for m in (MOON(contrast=5.0, **shared), FedAvg(**shared)))
    assert_same(moon.weights, fedavg.weights)
    assert [r.metrics["loss"] for r in moon.history] == [r.metrics["loss"] for r in fedavg.history]


def partly_frozen(features: int, outputs: int):
    """A network whose first layer is random and stays as it is."""
    module = Tanh()
    nn.init.normal_(module.one.weight)
    module.one.requires_grad_(False)
    return module


def test_moon_with_a_frozen_layer_equals_the_plain_rewriting(problem):
    """The previous model has the frozen weights that were received, not those of another seed."""
    made_here = f"{__name__}:partly_frozen"
    method = MOON(network=made_here, contrast=2.0, precision="float64", seed=4, **SHARED)
    start = initial(method, problem)
    plain = Plain(method, problem, Tanh.LAYERS, torch.tanh, frozen={"one.weight", "one.bias"})
    expected, _ = plain.run(start)
    found = weights(method, problem)
    np.testing.assert_array_equal(found["one.weight"], start["one.weight"])
    assert_close(found, expected)


def test_moon_keeps_the_previous_local_model(problem):
    method = MOON(network="mlp:8", **SHARED)
    federation = problem.federation()
    run = method.start(federation.describe())
    request = run.request(federation.clients)
    assert request is not None
    run.absorb(federation.exchange(request, run.chain))
    mean, rows = {}, 0
    for participant in federation.participants:
        state = participant.memory.states.read(run.chain.digests[1], 0)
        assert state.keys() == {f"previous.{name}" for name in run.server.weights}
        for name in run.server.weights:
            mean[name] = mean.get(name, 0) + len(participant) * state[f"previous.{name}"].astype(float)
        rows += len(participant)
    assert_close({n: v / rows for n, v in mean.items()}, run.server.weights)


@pytest.mark.parametrize("kind", ["mlp:8", "module"])
def test_moon_resumes_exactly(kind, problem, tmp_path: Path):
    method = replace(MOON(network=network(kind), contrast=2.0, participation=0.5, **SHARED), rounds=6)
    expected = weights(method, problem)
    path = tmp_path / "run.ckpt"

    class Stop(Exception):
        pass

    def stop(record, exchanges):
        if record.exchange == 2:
            raise Stop

    with pytest.raises(Stop):
        method.fit(problem.federation(), checkpoint=path, follow=stop)
    found = method.fit(problem.federation(), checkpoint=path, resume=True).weights
    assert_same(found, expected)


def test_moon_with_a_low_temperature_stays_finite(problem):
    found = weights(MOON(network=Tanh(), temperature=1e-3, contrast=1e-3, **SHARED), problem)
    assert all(np.isfinite(value).all() for value in found.values())


# -- FedSOL -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rate"),
    [*itertools.product(["linear", "mlp:8", "module"], [0.0, 1e-9]), ("normalised", 0.0)],
)
@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fedsol_does_not_perturb_by_rounding_noise(kind, rate, adaptive, problem):
    """Where nothing moves, or hardly, every step is FedAvg's and weights are back after the second pass.

    With BatchNorm the frozen model answers otherwise than the local one even where w = W, so there only
    the comparison of the weights can tell.
    """
    module = Normalised() if kind == "normalised" else network(kind)
    shared = SHARED | {"network": module, "rate": rate, "weight_decay": 0.0, "precision": "float64"}
    fedavg = FedAvg(**shared).fit(problem.federation())
    found = FedSOL(radius=5.0, adaptive=adaptive, **shared).fit(problem.federation())
    assert_same(found.weights, fedavg.weights)
    assert_same(found.buffers, fedavg.buffers)
    for name in ("loss", "local_accuracy"):
        assert [r.metrics[name] for r in found.history] == [r.metrics[name] for r in fedavg.history]


def test_fedsol_counts_predictions_of_the_unperturbed_weights(problem):
    """One client, one batch a round in two steps: the second sees what FedAvg's first of two rounds gave."""
    lone = problem.subset(np.flatnonzero(problem.owners == 2))
    shared = SHARED | {"network": Tanh(), "batch": 64, "momentum": 0.0, "rounds": 1}
    steps = FedAvg(**(shared | {"epochs": 1, "rounds": 2})).fit(lone.federation())
    found = FedSOL(radius=50.0, adaptive=False, **(shared | {"epochs": 2})).fit(lone.federation())
    assert found.history[0].metrics["local_accuracy"] == steps.history[1].metrics["local_accuracy"]


def test_fedsol_perturbs_each_client_of_a_stack_by_its_own_norm(problem):
    """A client's part of a round does not depend on whom it trains with."""
    shared = SHARED | {"network": "mlp:8", "precision": "float64", "rounds": 1}
    for adaptive in (False, True):
        method = FedSOL(radius=1.0, adaptive=adaptive, **shared)
        together = weights(method, problem)
        alone = {}
        for client in range(4):
            mine = problem.owners == client
            federation = problem.federation()
            for other in federation.clients:
                if other != f"client-{client}":
                    federation.remove(other)
            for name, value in method.fit(federation).weights.items():
                alone[name] = alone.get(name, 0) + value * mine.sum() / len(mine)
        assert_close(together, alone)


# -- BatchNorm: modes of frozen models, running statistics -------------------------------------------


def normalised_run(method: GradientMethod, problem: Problem, module):
    """MOON, FedSOL and FedNTD on modules: frozen copies in eval mode, statistics of the first pass only."""
    import copy

    import torch.nn.functional as F

    server, previous = copy.deepcopy(module).double(), {}
    held: dict[int, dict] = {}
    for round_ in range(method.rounds):
        answers = []
        for client in range(4):
            mine = problem.owners == client
            x, y = torch.as_tensor(problem.features[mine]), torch.as_tensor(problem.labels[mine])
            local = copy.deepcopy(server)
            if method.buffers == "local" and client in held:
                local.load_state_dict(held[client], strict=False)
            local.train()
            start = copy.deepcopy(local).eval()
            past = previous.get(client, start)
            optimiser = torch.optim.SGD(
                local.parameters(), method.rate, method.momentum, weight_decay=method.weight_decay
            )
            for number, batch in enumerate(plan_batches(method, len(y), round_, f"client-{client}", 2)):
                xb, yb = x[batch], y[batch]
                optimiser.zero_grad()
                if isinstance(method, FedSOL) and number > 0:
                    out = F.log_softmax(local(xb) / 3, dim=1)
                    F.kl_div(out, F.softmax(start(xb) / 3, dim=1).detach(), reduction="batchmean").backward()
                    now = copy.deepcopy(local.state_dict())
                    norm = torch.cat([p.grad.flatten() for p in local.parameters()]).norm()
                    with torch.no_grad():
                        for p, w in zip(local.parameters(), start.parameters(), strict=True):
                            e = method.radius * p.grad / (norm + 1e-12)
                            p += e * F.normalize((p - w).abs(), dim=0) if method.adaptive else e
                    optimiser.zero_grad()
                    F.cross_entropy(local(xb), yb).backward()
                    local.load_state_dict(now)
                else:
                    z = local.features(xb)
                    logits = local.classifier(z)
                    loss = F.cross_entropy(logits, yb)
                    if isinstance(method, MOON):
                        with torch.no_grad():
                            known, before = start.features(xb), past.features(xb)
                        pair = torch.stack([F.cosine_similarity(z, known), F.cosine_similarity(z, before)], 1)
                        true = torch.zeros(len(yb), dtype=torch.int64)
                        loss = loss + method.contrast * F.cross_entropy(pair / method.temperature, true)
                    if isinstance(method, FedNTD):
                        other = F.one_hot(yb, CLASSES) == 0
                        q, p = (
                            F.log_softmax(f[other].reshape(len(yb), -1) / method.temperature, dim=1)
                            for f in (logits, start(xb).detach())
                        )
                        divergence = F.kl_div(q, p, log_target=True, reduction="batchmean")
                        loss = loss + method.distillation * method.temperature**2 * divergence
                    loss.backward()
                optimiser.step()
            held[client] = {n: b.clone() for n, b in local.named_buffers()}
            previous[client] = copy.deepcopy(local).eval()
            answers.append((local.state_dict(), int(mine.sum())))
        rows = sum(count for _, count in answers)
        kept = {n for n, _ in server.named_buffers()} if method.buffers == "local" else set()
        server.load_state_dict(
            {
                name: value
                if name in kept or not value.is_floating_point()
                else sum(w[name] * count for w, count in answers) / rows
                for name, value in server.state_dict().items()
            }
        )
    return server


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "method",
    [
        MOON(contrast=2.0),
        FedSOL(radius=0.5, adaptive=False),
        FedSOL(radius=2.0),
        FedNTD(distillation=2.0, temperature=2.0),
    ],
    ids=label,
)
def test_batchnorm_statistics_and_frozen_models(method, buffers, problem):
    module = Normalised()
    method = replace(method, network=module, precision="float64", buffers=buffers, **SHARED)
    expected = normalised_run(method, problem, module)
    model = method.fit(problem.federation())
    assert_close(model.weights, {n: p.detach().numpy() for n, p in expected.named_parameters()})
    assert_close(model.buffers, {n: b.numpy() for n, b in expected.named_buffers() if b.is_floating_point()})


# -- FedRS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
def test_fedrs_without_a_missing_class_is_fedavg_to_the_last_bit(kind, problem):
    full = problem.relabelled(np.arange(len(problem.labels)) % CLASSES)
    shared = SHARED | {"network": network(kind)}
    fedavg = weights(FedAvg(**shared), full)
    assert_same(weights(FedRS(restraint=0.2, **shared), full), fedavg)
    assert differs(weights(FedRS(restraint=0.2, restraint_mode="soft", **shared), problem), fedavg)


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize("mode", ["binary", "soft"])
def test_fedrs_at_zero_gives_missing_classes_no_gradient(kind, mode, problem):
    lacking = problem.subset(np.flatnonzero(problem.owners == 0))
    shared = SHARED | {"network": network(kind), "weight_decay": 0.0}
    method = FedRS(restraint=0.0, restraint_mode=mode, **shared)
    start = initial(method, lacking)
    found = weights(method, lacking)
    for name in ("classifier.weight", "classifier.bias"):
        moved = np.abs(found[name] - start[name].numpy().astype(np.float32)).reshape(CLASSES, -1).max(axis=1)
        assert (moved[[0, 3]] == 0).all()
        assert (moved[[1, 2]] > 0).all()


# -- FedLC ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
def test_fedlc_with_balanced_classes_is_fedavg(kind, problem):
    owners = np.array([0] * 4 + [1] * 20 + [2] * 8)
    balanced = problem.subset(np.arange(len(owners)))
    balanced.owners, balanced.labels = owners, np.arange(len(owners)) % CLASSES
    shared = SHARED | {"network": network(kind), "precision": "float64"}
    assert_close(weights(FedLC(calibration=3.0, **shared), balanced), weights(FedAvg(**shared), balanced))


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize("form", ["softmax", "paper"])
def test_fedlc_masks_missing_classes_exactly(kind, form, problem):
    """Their rows of the classifier do not move; nothing becomes infinite, with short batches too."""
    lacking = problem.subset(np.flatnonzero(problem.owners == 0))
    shared = SHARED | {"network": network(kind), "weight_decay": 0.0}
    method = FedLC(calibration_form=form, **shared)
    start = initial(method, lacking)
    model = method.fit(lacking.federation())
    assert all(np.isfinite(record.metrics["loss"]) for record in model.history)
    for name in ("classifier.weight", "classifier.bias"):
        moved = np.abs(model.weights[name] - start[name].numpy().astype(np.float32)).reshape(CLASSES, -1)
        assert (moved.max(axis=1)[[0, 3]] == 0).all()
        assert (moved.max(axis=1)[[1, 2]] > 0).all()


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize("form", ["softmax", "paper"])
def test_fedlc_has_nothing_to_learn_from_a_single_class(kind, form, problem):
    lone = problem.subset(np.flatnonzero(problem.owners == 1))
    method = FedLC(calibration_form=form, **(SHARED | {"network": network(kind), "weight_decay": 0.0}))
    model = method.fit(lone.federation())
    assert_same(model.weights, {n: v.numpy().astype(np.float32) for n, v in initial(method, lone).items()})
    assert [record.metrics["loss"] for record in model.history] == [0.0] * method.rounds


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
def test_fedlc_in_the_papers_form_is_not_fedavg_at_zero(kind, problem):
    """Without the true class in the denominator the loss of a row is log(e^CE - 1): 2.183 for 2.290."""
    assert np.log(np.expm1(2.290)) == pytest.approx(2.183, abs=5e-4)
    row = problem.subset(np.array([20]))
    shared = SHARED | {"network": network(kind), "precision": "float64", "epochs": 1, "rounds": 1}
    paper, fedavg = (
        m.fit(row.federation())
        for m in (FedLC(calibration=0.0, calibration_form="paper", **shared), FedAvg(**shared))
    )
    losses = [model.history[0].metrics["loss"] for model in (paper, fedavg)]
    assert losses[0] == pytest.approx(np.log(np.expm1(losses[1])), rel=1e-12)
    assert differs(paper.weights, fedavg.weights)


# -- FedNTD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp:8"])
def test_fedntd_with_two_classes_is_fedavg(kind, problem):
    labels = problem.labels % 2
    federations = [
        LocalFederation.from_arrays(problem.features, labels, problem.owners, workers=1) for _ in range(2)
    ]
    shared = SHARED | {"network": kind, "precision": "float64"}
    methods = (FedNTD(distillation=3.0, **shared), FedAvg(**shared))
    found, expected = (
        method.fit(federation).weights for method, federation in zip(methods, federations, strict=True)
    )
    assert_close(found, expected)


def test_the_logits_that_are_not_true_keep_their_order():
    logits = torch.arange(24.0).reshape(1, 6, 4)
    targets = torch.tensor([[0, 1, 2, 3, 3, 0]])
    expected = [[c for c in range(4) if c != y] for y in targets[0].tolist()]
    found = not_true(logits, targets)[0] - 4 * torch.arange(6)[:, None]
    assert found.tolist() == expected


# -- parameters that make no sense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "wrong", "seen"),
    [
        (MOON, {"contrast": -1.0}, "contrast"),
        (MOON, {"temperature": 0.0}, "temperature"),
        (FedSOL, {"radius": float("nan")}, "radius"),
        (FedRS, {"restraint": 1.5}, "1.5"),
        (FedRS, {"restraint_mode": "hard"}, "'hard'"),
        (FedLC, {"calibration": -0.1}, "-0.1"),
        (FedLC, {"calibration_form": "sigmoid"}, "'sigmoid'"),
        (FedNTD, {"distillation": float("inf")}, "inf"),
        (FedNTD, {"temperature": 0.0}, "temperature"),
    ],
)
def test_parameters_are_refused_by_name(method, wrong, seen):
    with pytest.raises(DataError, match=seen):
        method(**wrong)


@pytest.mark.parametrize("kind", ["linear", "mlp:8", "module"])
@pytest.mark.parametrize("method", ALL)
def test_a_client_with_one_row_and_an_empty_client(method, kind, problem):
    few = problem.subset(np.flatnonzero(problem.owners == 2)[:6])
    few.owners = np.array([0, 0, 0, 0, 0, 1])
    model = method(network=network(kind), **SHARED).fit(few.federation(clients=3))
    assert all(np.isfinite(value).all() for value in model.weights.values())
    assert np.isfinite(model.history[-1].metrics["loss"])
