"""The networks that clients train: one torch module, or a stack of heads or small ones trained side by side.

Everything an algorithm needs looks the same for both. A batch has shape (clients, rows, ...); a single
network is a stack of one whose weights carry no client axis, so that elementwise formulas read as in the
papers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import Tensor, nn, torch
from fedsolve.gradient import networks


@dataclass
class NetworkOutput:
    """What a network gives for a batch: logits (clients, rows, classes) and the input of its last layer."""

    features: Tensor
    logits: Tensor


Forward = Callable[["Tensor"], NetworkOutput]


class Learners(ABC):
    """The networks of a group of clients in mid-training."""

    stacked: bool
    names: list[str]
    weights: list[Tensor]

    @abstractmethod
    def forward(self, inputs: Tensor, weights: list[Tensor]) -> NetworkOutput:
        """The output for a batch, with gradients; `weights` are those of the clients still training."""

    @abstractmethod
    def reference(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Forward:
        """A frozen network with these weights, in eval mode and without gradients.

        Weights without a client axis are shared by all clients of a stack; with one, the leading clients'
        are used.
        """

    def per_client(self, values: Tensor) -> Tensor:
        """`values` of all weights of one tensor as (clients, numbers)."""
        return values.flatten(1) if self.stacked else values.reshape(1, -1)

    def spread(self, numbers: Tensor, like: Tensor) -> Tensor:
        """A number of each client in a shape that multiplies its weights, such as `like`."""
        return numbers.reshape(-1, *[1] * (like.dim() - 1)) if self.stacked else numbers[0]


class SingleNetwork(Learners):
    """One torch module."""

    stacked = False

    def __init__(self, network: nn.Module, spare: Callable[[], nn.Module]) -> None:
        self.network = network
        trainable = {n: p for n, p in networks.float_parameters(network).items() if p.requires_grad}
        self.names = list(trainable)
        self.weights = list(trainable.values())
        self._spare = spare

    def forward(self, inputs: Tensor, weights: list[Tensor]) -> NetworkOutput:
        features, logits = networks.features_of(self.network, inputs[0])
        return NetworkOutput(features[None], logits[None])

    def reference(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Forward:
        network = self._spare()
        load(network, weights, buffers)
        network.eval()

        frozen = SingleNetwork(network, self._spare)
        return torch.no_grad()(lambda inputs: frozen.forward(inputs, frozen.weights))


@dataclass
class Stack(Learners):
    """Networks of one kind, once per client: weights (clients, ...)."""

    stacked = True
    names: list[str]
    weights: list[Tensor]

    def reference(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Forward:
        def forward(inputs: Tensor) -> NetworkOutput:
            with torch.no_grad():
                values = []
                for name, place in zip(self.names, self.weights, strict=True):
                    value, is_shared = weights[name], weights[name].dim() == place.dim() - 1
                    values.append(self._shared(value, len(inputs)) if is_shared else value[: len(inputs)])
                return self.forward(inputs, values)

        return forward

    def _shared(self, value: Tensor, clients: int) -> Tensor:
        """One tensor for all clients, as `forward` takes it."""
        return value.expand(clients, *value.shape)


class StackedHeads(Stack):
    """Linear layers with ReLU between them, a set for each client: weights (clients, out, in)."""

    def forward(self, inputs: Tensor, weights: list[Tensor]) -> NetworkOutput:
        features = inputs
        for layer in range(0, len(weights) - 2, 2):
            features = torch.relu(
                torch.matmul(features, weights[layer].mT) + weights[layer + 1].unsqueeze(-2)
            )
        return NetworkOutput(features, torch.matmul(features, weights[-2].mT) + weights[-1].unsqueeze(-2))

    def _shared(self, value: Tensor, clients: int) -> Tensor:
        return value


@dataclass
class StackedNetworks(Stack):
    """A torch module, with the weights of many clients: every kernel works for all of them.

    network: the module; what it has besides the weights that are trained is the same for all.
    """

    network: nn.Module

    def forward(self, inputs: Tensor, weights: list[Tensor]) -> NetworkOutput:
        from torch.func import vmap

        def one(rows: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            return networks.features_of(self.network, rows, dict(zip(self.names, own, strict=True)))

        return NetworkOutput(*vmap(one)(inputs, tuple(weights)))


def laid_out(tensor: Tensor) -> Tensor:
    """The tensor as the device wants it: a GPU's convolutions are faster with the channels last."""
    if tensor.device.type != "cuda" or tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def on_host(tensor: Tensor) -> Array:
    """The tensor's values as an array of its own, in C order."""
    array: Array = tensor.detach().cpu().numpy()
    return np.asarray(array, order="C") if tensor.is_cuda else array.copy()


def handed_over(tensor: Tensor) -> Tensor:
    """A copy of the tensor where it lies, for others to read, whatever stream it is made in."""
    copied = tensor.detach().clone()
    if copied.is_cuda:
        # Its memory is used again only after what they have in line.
        copied.record_stream(torch.cuda.default_stream(copied.device))
    return copied


def load(network: nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Give a module these float parameters and buffers, in place."""
    with torch.no_grad():
        for mine, theirs in (
            (networks.float_parameters(network), weights),
            (networks.float_buffers(network), buffers),
        ):
            for name, tensor in mine.items():
                if name in theirs:
                    tensor.copy_(theirs[name])
