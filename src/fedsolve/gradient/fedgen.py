"""FedGen: a generator of features, taught by all clients' classifiers, teaches every client.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

Server, after every round, for labels y drawn from those that exist and noise e:

    minimise over G   mean_y sum_i o_iy CE(head_i(G(y, e)), y) + diversity,   o_iy = n_iy / sum_j n_jy
    diversity = exp(mean_ab( -mean|e_a - e_b|² mean|G_a - G_b| ))

Clients, from the second round on:

    L = CE + latent_t KL(softmax(head(G(y))) || softmax(f(x)))  (the first argument without gradient)
           + (GENERATED / batch) teaching_t CE(head(G(y')), y')
    teaching_t, latent_t = max(1e-4, start * 0.98^t), and no term at all where the start is 0

G is one hidden layer with BatchNorm and ReLU on (noise, one-hot label), noise uniform in [0, 1) as in the
authors' code; at the clients it is frozen and in eval mode. It gives what enters the last layer, so on a
linear head it gives features of the frozen backbone. Class counts and classifiers are gathered, the other
weights are summed. The paper's adversarial term is off, as in the authors' settings.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np

from fedsolve.arrays import Array, stream
from fedsolve.backends.devices import find_device, one_thread
from fedsolve.backends.torch_later import F, Tensor, nn, torch
from fedsolve.container import with_prefix
from fedsolve.errors import DataError
from fedsolve.federation.messages import Term, Total
from fedsolve.gradient import networks, server_state
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Step, parameter, register
from fedsolve.gradient.learners import on_host
from fedsolve.gradient.optimisers import Optimiser
from fedsolve.gradient.prototypes import head_names
from fedsolve.gradient.server_state import ServerState, Weights
from fedsolve.gradient.steps import row_losses

GENERATED = 32
"""Generated rows in a step, the server's and a client's."""
LEAST = 1e-4
DECAY = 0.98
WEIGHT_DECAY = 1e-2


@register(
    paper="Zhu, Hong, Zhou, ICML 2021",
    up="rows * weights and rows; classifier and class counts of each client",
    down="weights and generator",
)
class FedGen(GradientMethod):
    """FedGen: knowledge of all classifiers through a generator of features."""

    tensors_only = True
    takes_weights = False
    gathers = True

    teaching: float = parameter(
        10.0, "Weight of the classifier's loss on generated features (alpha of the paper), decaying.", least=0
    )
    latent: float = parameter(
        10.0,
        "Weight of the pull towards the classifier's answer to generated features (beta), decaying.",
        least=0,
    )
    generator_steps: int = parameter(50, "Steps of Adam on the generator after every round.", least=0)
    generator_rate: float = parameter(3e-4, "Learning rate of the generator.", least=0)
    generator_decay: float = parameter(1.0, "Factor on that rate from round to round.", least=0)
    noise_width: int = parameter(32, "Numbers of noise the generator starts from.", least=1)
    generator_width: int = parameter(256, "Width of the generator's hidden layer.", least=1)

    @property
    def _plain(self) -> bool:
        return self.teaching == 0 and self.latent == 0

    def prepare(self, group: ClientGroup) -> None:
        if "labels" not in group.received:  # nobody has taught the generator yet
            return
        scales = {
            "latent": _decayed(self.latent, group.round),
            "teaching": _decayed(self.teaching, group.round) * GENERATED / self.batch,
        }
        # As tensors, for recorded steps.
        group.scratch |= {
            name: torch.tensor(scale, dtype=group.dtype, device=group.device)
            for name, scale in scales.items()
        }
        group.scratch["known"] = torch.nonzero(group.received["labels"] > 0)[:, 0]

    def draw(self, group: ClientGroup, number: int) -> dict[str, Array]:
        """Noise of a step for the rows of its batch and for generated ones, and which of the known labels
        the latter have.
        """
        if "labels" not in group.received:
            return {}
        known = len(group.scratch["known"])
        active = range(int(np.sum(group.steps > number)))

        # One stream a step, row by row: padding behind a client's rows changes none of their numbers.
        def noise(role: str, rows: int) -> Array:
            shape = rows, self.noise_width
            return np.stack([group.generator(k, f"{role} {number}").random(shape) for k in active])

        drawn = {}
        if self.latent != 0:
            drawn["latent"] = noise("latent", group.batches.tall(number))
        if self.teaching != 0:
            places = [group.generator(k, f"labels {number}").integers(known, size=GENERATED) for k in active]
            drawn |= {"places": np.stack(places), "teaching": noise("teaching", GENERATED)}
        return drawn

    def losses(self, step: Step) -> Tensor:
        output = step.forward()
        losses = step.cross_entropy(output.logits)
        drawn, scratch = step.drawn, step.group.scratch
        if "latent" in drawn:
            with_label = self._imagined(step, step.targets, drawn["latent"])
            losses = losses + scratch["latent"] * step.divergence(output.logits, with_label.detach())
        if "teaching" in drawn:
            targets = scratch["known"][drawn["places"]]
            answers = self._imagined(step, targets, drawn["teaching"])
            losses = losses + scratch["teaching"] * row_losses(answers, targets).mean(dim=1)
        return losses

    def _imagined(self, step: Step, labels: Tensor, noise: Tensor) -> Tensor:
        """The classifiers' logits (clients, rows, classes) on features for labels (clients, rows)."""
        with torch.no_grad():
            # What the generator gives, frozen, for inputs (clients, rows, ...).
            inputs = _generator_inputs(noise, labels, step.group.classes)
            own = with_prefix(step.group.received, "generator.")
            hidden = F.linear(inputs.flatten(0, 1), own["hidden.weight"], own["hidden.bias"])
            statistics = own["norm.running_mean"], own["norm.running_var"]
            scaled = F.batch_norm(hidden, *statistics, own["norm.weight"], own["norm.bias"])
            features = F.linear(scaled.relu(), own["output.weight"], own["output.bias"])
            features = features.reshape(*inputs.shape[:2], -1)
        weights, stacked = dict(zip(step.group.names, step.weights, strict=True)), step.group.learners.stacked
        names = _classifier_names(step.group)
        # (clients or 1, classes, width), and where there is a bias (clients or 1, classes)
        weight, *bias = (weights[name] if stacked else weights[name][None] for name in names)
        logits = torch.matmul(features, weight.mT)
        return logits + bias[0].unsqueeze(-2) if bias else logits

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        if self._plain:
            return
        name = group.clients[client]
        server_state.set_apart(term, name, [f"w.{weight}" for weight in _classifier_names(group)])
        term.arrays[f"labels@{name}"] = group.class_counts[client].double().cpu().numpy()

    def opening_state(self, server: ServerState) -> None:
        if self._plain:
            return
        classes = server.spec.outputs
        head = networks.head_of(self.build(server.spec.features, classes))[1]
        server.memory |= _arrays(build_generator(self, classes, head.in_features))

    def extras(self, server: ServerState) -> dict[str, Array]:
        if "labels" not in server.memory:
            return {}
        generator = {name: array for name, array in server.memory.items() if name.startswith("generator.")}
        return generator | {"labels": server.memory["labels"]}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        if self._plain:
            server.weights = mean
            return
        heads = server_state.gathered(total)
        weights = {client: server_state.weight_of(total, client) for client in heads}
        head = server_state.weighted_mean(heads, weights)
        server.aggregated = server.aggregated | with_prefix(head, "w.")
        server.weights = mean | server.aggregated
        counts = np.stack([total[f"labels@{client}"] for client in heads])
        server.memory["labels"] = counts.sum(axis=0)
        with one_thread():
            self._teach(server, list(heads.values()), counts)

    def _teach(self, server: ServerState, heads: list[Weights], counts: Array) -> None:
        """Train the generator against the classifiers of a round; counts (clients, classes)."""
        dtype, device = getattr(torch, self.precision), find_device(server.spec.device)
        clients, classes = counts.shape
        ordered = sorted(heads[0], key=lambda name: not name.endswith("weight"))
        # All classifiers side by side as one layer: a single product with (clients * classes, width).
        joined = [np.concatenate([h[n] for h in heads]) for n in ordered]
        layer = [torch.as_tensor(array, dtype=dtype).to(device) for array in joined]
        sums = counts.sum(axis=0)
        trust = torch.as_tensor(counts / np.where(sums > 0, sums, 1.0), dtype=dtype).to(device)
        known = np.flatnonzero(sums > 0)
        generator = build_generator(self, classes, layer[0].shape[1]).to(dtype)
        weights = with_prefix(server.memory, "generator.")
        generator.load_state_dict({n: torch.as_tensor(a) for n, a in weights.items()}, strict=False)
        parameters: list[Tensor] = list(generator.to(device).parameters())
        # Adam goes on where it was left.
        rate = self.generator_rate * self.generator_decay**server.round
        optimiser = Optimiser("adam", rate, 0.0, WEIGHT_DECAY)
        optimiser.resume(with_prefix(server.memory, "adam."), parameters)
        rng = stream(self.seed, "fedgen", server.round)
        for _ in range(self.generator_steps):
            targets = torch.as_tensor(known[rng.integers(len(known), size=GENERATED)], device=device)
            noise = torch.as_tensor(rng.random((GENERATED, self.noise_width)), dtype=dtype).to(device)
            features = generator(_generator_inputs(noise, targets, classes))
            logits = F.linear(features, *layer).reshape(GENERATED, clients, classes)
            errors = row_losses(logits, targets[:, None].expand(-1, clients))
            loss = (trust[:, targets].mT * errors).sum(dim=1).mean()
            # The diversity, over all pairs: large when the noise changes little.
            distances = (noise[:, None] - noise[None]).square().mean(dim=2)
            differ = torch.cdist(features, features, p=1.0) / features.shape[1]
            loss = loss + (-(distances * differ).mean()).exp()
            gradients = list(torch.autograd.grad(loss, parameters))
            with torch.no_grad():
                optimiser.step(parameters, gradients)
        server.memory |= _arrays(generator)
        server.memory |= {f"adam.{name}": array for name, array in optimiser.state().items()}


def build_generator(method: FedGen, classes: int, width: int) -> nn.Module:
    """The generator, (rows, noise + classes) to (rows, width), with its first weights.

    As torch's own: uniform in ±1 / sqrt(fan in), BatchNorm neutral.
    """
    with torch.device("meta"):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            hidden=nn.Linear(method.noise_width + classes, method.generator_width),
            norm=nn.BatchNorm1d(method.generator_width),
            relu=nn.ReLU(),
            output=nn.Linear(method.generator_width, width),
        )
        generator: Any = nn.Sequential(layers).to_empty(device="cpu")
    generator.norm.reset_parameters()
    rng = stream(method.seed, "fedgen", "start")
    with torch.no_grad():
        for layer in (generator.hidden, generator.output):
            bound = 1.0 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                drawn = rng.uniform(-bound, bound, size=tuple(parameter.shape))
                parameter.copy_(torch.as_tensor(drawn))
    network: nn.Module = generator
    return network


def _generator_inputs(noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Noise (..., width) beside labels (...) in one-hot form."""
    return torch.cat([noise, torch.eye(classes, dtype=noise.dtype, device=noise.device)[labels]], dim=-1)


def _decayed(start: float, round_: int) -> float:
    return max(LEAST, start * DECAY**round_)


def _classifier_names(group: ClientGroup) -> list[str]:
    """Names of the last layer's weight and bias among the trained weights."""
    names = head_names(group)
    if not names or not names[0].endswith("weight"):
        raise DataError("FedGen teaches the classifier, whose weights are frozen. Unfreeze them.")
    return names


def _arrays(generator: nn.Module) -> Weights:
    floats = networks.float_parameters(generator) | networks.float_buffers(generator)
    return {f"generator.{name}": on_host(value.double()) for name, value in floats.items()}
