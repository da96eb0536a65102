"""Federated algorithms written out with plain torch: what the engine's results are compared with.

Small data, one network at a time, torch's own optimisers. The only thing taken from the engine is the
order of the batches and of the clients, which are random and no part of any formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedsolve import LocalFederation
from fedsolve.errors import TermError
from fedsolve.federation.recipe import exchanges
from fedsolve.federation.states import State, StateStore
from fedsolve.gradient.batches import plan_batches
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.networks import build_network
from fedsolve.gradient.run import GradientRun, cohort_of

torch = pytest.importorskip("torch")
nn = torch.nn

WIDTH, CLASSES = 6, 3

Weights = dict[str, Any]
Edit = Callable[[dict[str, Any], Weights], None]
"""Changes gradients in place, given the weights of the moment; both by name."""

Loss = Callable[[Any, Any, Any], Any]


def rows(count: int = 40, seed: int = 0, classes: int = CLASSES, dtype: str = "float64") -> tuple[Any, Any]:
    """Features (count, WIDTH) and labels that follow a noisy linear rule."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((count, WIDTH))
    scores = features @ rng.standard_normal((WIDTH, classes)) + 0.5 * rng.standard_normal((count, classes))
    return features.astype(dtype), np.argmax(scores, axis=1)


def federation(features: Any, labels: Any, owners: Any, **options: Any) -> LocalFederation:
    options = {"workers": 1, "classes": range(CLASSES)} | options
    return LocalFederation.from_arrays(features, labels, np.asarray(owners), **options)


def uneven(count: int = 40, clients: int = 4) -> Any:
    """Owners of the rows: client k has about k + 1 shares of them."""
    bounds = np.cumsum(np.arange(1, clients + 1)) / (clients * (clients + 1) / 2)
    return np.searchsorted(bounds, np.arange(count) / count, side="right")


def module(seed: int = 0) -> Any:
    """A network that trains by itself: no stack, no BatchNorm, float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


NETWORKS = ("linear", "mlp:5", "module")
"""Two that train in stacks and one that trains by itself; see `network`."""


ALIGNED = "aligned"
"""`module()` with feedback alignment in its last layer, LAYER."""

LAYER = "2"


def network(name: str) -> Any:
    """What to pass as `network`: the name itself, or `module()`."""
    return module() if name in ("module", ALIGNED) else name


def built(method: GradientMethod, outputs: int = CLASSES) -> Any:
    """The method's network with its first weights."""
    return build_network(method.network, WIDTH, outputs, seed=method.seed, dtype=method.precision)


def weights(net: Any) -> Weights:
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def put(net: Any, values: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.copy_(values[name])
    return net


def clients_of(federation: LocalFederation) -> dict[str, tuple[Any, Any]]:
    """Every client's features and labels as tensors, in the order of its rows."""
    found = {}
    for participant in federation.participants:
        data = participant.data
        found[participant.name] = (
            torch.as_tensor(data.features(slice(None), data.source.dtype)),
            torch.as_tensor(data.own_labels),
        )
    return found


def cohort(method: GradientMethod, names: Sequence[str], round_: int) -> tuple[str, ...]:
    """The clients of a round."""
    return cohort_of(method, tuple(sorted(names)), round_)


def batches(method: GradientMethod, count: int, round_: int, client: str, least: int = 1) -> list[Any]:
    """A client's batches of a round, as row numbers."""
    return [torch.as_tensor(batch) for batch in plan_batches(method, count, round_, client, least)]


def cross_entropy(net: Any, inputs: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(net(inputs), targets)


def aligned(start: Weights) -> Loss:
    """Cross-entropy of `module()` whose last layer sends its error back through the weights received.

    B = W ||w|| / ||W||, W from `start`. Where inputs are detached, only the weights are differentiated; the
    other product adds zeros, and its gradient by the inputs is that of B.
    """
    received = start[f"{LAYER}.weight"].clone()

    def loss(net: Any, inputs: Any, targets: Any) -> Any:
        seen = torch.tanh(net[0](inputs))
        with torch.no_grad():
            back = received * (net[2].weight.norm() / received.norm())
        logits = net[2](seen.detach()) + (seen - seen.detach()) @ back.T
        return nn.functional.cross_entropy(logits, targets)

    return loss


def local(
    net: Any,
    method: GradientMethod,
    data: tuple[Any, Any],
    round_: int,
    client: str,
    loss: Loss = cross_entropy,
    edit: Edit | None = None,
) -> int:
    """Train `net` in place on a client's batches with torch.optim; the number of steps."""
    features, labels = data
    rate = method.rate_of(round_)
    if method.optimiser == "sgd":
        optimiser = torch.optim.SGD(
            net.parameters(),
            lr=rate,
            momentum=method.momentum,
            weight_decay=method.weight_decay,
            nesterov=method.nesterov,
        )
    else:
        kind = torch.optim.AdamW if method.optimiser == "adamw" else torch.optim.Adam
        optimiser = kind(net.parameters(), lr=rate, weight_decay=method.weight_decay)
    plan = batches(method, len(labels), round_, client)
    for batch in plan:
        optimiser.zero_grad()
        loss(net, features[batch], labels[batch]).backward()
        if edit is not None:
            with torch.no_grad():
                named = dict(net.named_parameters())
                edit({n: p.grad for n, p in named.items()}, {n: p.detach() for n, p in named.items()})
        if method.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), method.clip)
        optimiser.step()
    return len(plan)


class Trained(NamedTuple):
    """A client after local training."""

    weights: Weights
    steps: int
    rows: int


def trained(
    method: GradientMethod,
    federation: LocalFederation,
    start: Weights,
    round_: int,
    loss: Loss | None = None,
    edit: Callable[[str], Edit] | None = None,
    outputs: int = CLASSES,
) -> dict[str, Trained]:
    """Local training of a round's cohort from `start`, one client after the other; idle ones are left out.

    loss: cross-entropy when None, through feedback where the method has it. edit: gives each client's change
    of its gradients.
    """
    if loss is None:
        loss = cross_entropy if method.feedback is None else aligned(start)
    data, net, found = clients_of(federation), built(method, outputs), {}
    for client in cohort(method, list(data), round_):
        put(net, start)
        own = None if edit is None else edit(client)
        steps = local(net, method, data[client], round_, client, loss, own)
        if steps:
            found[client] = Trained(weights(net), steps, len(data[client][1]))
    return found


def gradient(net: Any, values: Mapping[str, Any], inputs: Any, targets: Any) -> Weights:
    """The gradient of the mean cross-entropy at `values`."""
    found = torch.autograd.grad(cross_entropy(put(net, values), inputs, targets), list(net.parameters()))
    return dict(zip((name for name, _ in net.named_parameters()), found, strict=True))


def mean(parts: Sequence[Weights], shares: Sequence[float] | None = None) -> Weights:
    """The weighted mean of weights by name; all alike without shares."""
    shares = [1.0] * len(parts) if shares is None else shares
    return {
        name: sum(share * part[name] for share, part in zip(shares, parts, strict=True)) / sum(shares)
        for name in parts[0]
    }


def run(method: GradientMethod, federation: LocalFederation) -> Iterator[GradientRun]:
    """The engine's run after every exchange."""
    found = method.start(federation.describe())
    for _ in exchanges(found, federation):
        yield found


def finished(method: GradientMethod, federation: LocalFederation) -> GradientRun:
    """The engine's run after its last exchange."""
    return list(run(method, federation))[-1]


def states(federation: LocalFederation, run: GradientRun) -> dict[str, dict[str, Any]]:
    """What every client keeps, by client; nothing for those that never took part."""
    return {p.name: newest(p.memory.states, run.chain.digests[1]) or {} for p in federation.participants}


def newest(store: StateStore, run: str) -> State | None:
    """What a client ended its last exchange of a run with, of at most a hundred; None when there is none."""
    for exchange in reversed(range(100)):
        try:
            return store.read(run, exchange)
        except TermError:
            continue
    return None


def far(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """The largest difference of two sets of arrays or tensors by name."""
    assert left.keys() == right.keys()
    return max(float(np.abs(np.asarray(left[name]) - np.asarray(right[name])).max()) for name in left)


def same_bits(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two sets of arrays or tensors are equal number by number."""
    return left.keys() == right.keys() and all(
        np.array_equal(np.asarray(left[name]), np.asarray(right[name])) for name in left
    )
