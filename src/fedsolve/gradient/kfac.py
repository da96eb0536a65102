"""Kronecker factors of a network's curvature (K-FAC), of its Linear and Conv2d layers.

For a layer with inputs a (a one appended where there is a bias) and gradients g of a row's loss with
respect to its outputs, at T positions a row (1 for plain linear layers, the pixels of a convolution):

    A = mean over rows and positions of a aᵀ,   B = sum over positions, mean over rows, of g gᵀ

Labels are the true ones (empirical Fisher), or those that the network itself predicts: summed over all
classes with their probability, or drawn. A convolution in groups has one pair of factors a group, on a
leading axis. Layers of other kinds have no factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import F, Tensor, nn, torch

Batch = tuple["Tensor", "Tensor"]
Losses = Callable[["Tensor", "Tensor"], "Iterator[Tensor]"]
"""From logits and targets: losses of every row (rows,) whose squared gradients are summed."""


@dataclass
class Factors:
    """A (in, in) and B (out, out) of a layer, float64; with a leading axis where a layer has groups.

    positions: T of a convolution, 1 of a linear layer.
    """

    right: Array
    left: Array
    positions: int = 1


def factored_layers(network: nn.Module, trained: list[str]) -> dict[str, nn.Module]:
    """Linear and Conv2d layers by name whose weight and bias are among the trained ones."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and {*weight_names(name, module)} <= {*trained}
    }


def weight_names(layer: str, module: Any) -> list[str]:
    """Names of a layer's weight and, where it has one, bias."""
    prefix = f"{layer}." if layer else ""
    return [f"{prefix}weight", *([f"{prefix}bias"] if module.bias is not None else [])]


def as_matrix(module: Any, weights: list[Array]) -> Array:
    """A layer's weight as (out, in), or (groups, out, in), with its bias as last column."""
    groups = getattr(module, "groups", 1)
    weight = weights[0].reshape(groups, weights[0].shape[0] // groups, -1)
    if len(weights) > 1:
        weight = np.concatenate([weight, weights[1].reshape(groups, -1, 1)], axis=2)
    return weight[0] if groups == 1 else weight


def from_matrix(module: Any, matrix: Array) -> list[Array]:
    """The weight, and bias where there is one, that `as_matrix` joined."""
    shape = tuple(module.weight.shape)
    joined = matrix.reshape(shape[0], -1)
    if module.bias is None:
        return [joined.reshape(shape)]
    return [joined[:, :-1].reshape(shape).copy(), joined[:, -1].copy()]


def factors(
    network: nn.Module, layers: dict[str, nn.Module], batches: Iterator[Batch], losses: Losses
) -> dict[str, Factors]:
    """The factors of these layers over all rows of the batches; the network stays as it is."""
    products = {name: _Products(module) for name, module in layers.items()}
    rows = _pass_over(network, list(products.values()), batches, losses)
    return {name: own.factors(rows) for name, own in products.items()}


def diagonals(
    network: nn.Module, layers: dict[str, nn.Module], batches: Iterator[Batch], losses: Losses
) -> dict[str, Tensor]:
    """The mean over rows of the squared gradients of linear layers, by weight name.

    Only for layers that every row enters once: a row's gradient is g aᵀ there, and its square g² (a²)ᵀ.
    """
    sums = {name: _Squares(module) for name, module in layers.items()}
    rows = max(1, _pass_over(network, list(sums.values()), batches, losses))
    named = [(weight_names(layer, own.module), own.sums) for layer, own in sums.items()]
    return {name: total / rows for names, own in named for name, total in zip(names, own, strict=True)}


def _pass_over(network: nn.Module, sums: Sequence[_Sums], batches: Iterator[Batch], losses: Losses) -> int:
    """Run all batches through the network and their losses back to the layers' outputs; the row count."""
    rows = 0
    with ExitStack() as stack, torch.enable_grad():
        for layer in sums:
            stack.callback(layer.module.register_forward_hook(layer.forward).remove)
        for inputs, targets in batches:
            rows += len(targets)
            parts = list(losses(network(inputs), targets))
            outputs = [output for layer in sums for output in layer.outputs]
            owners = [layer for layer in sums for _ in layer.outputs]
            for number, part in enumerate(parts, 1):
                more = number < len(parts)
                gradients = torch.autograd.grad(part.sum(), outputs, retain_graph=more, allow_unused=True)
                for layer, gradient in zip(owners, gradients, strict=True):
                    if gradient is not None:
                        layer.pass_back(gradient)
            for layer in sums:
                layer.outputs.clear()
    return rows


def true_labels(logits: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Losses of the empirical Fisher matrix."""
    yield F.cross_entropy(logits, targets, reduction="none")


def predicted_labels(draws: int, rng: np.random.Generator) -> Losses:
    """Losses of the Fisher matrix proper: labels follow the network's own prediction.

    draws: labels drawn a row; 0 sums over all classes with their probability.
    """

    def losses(logits: Tensor, targets: Tensor) -> Iterator[Tensor]:
        logs = F.log_softmax(logits, dim=1)
        chances = logs.detach().exp()
        if draws == 0:
            for label in range(logs.shape[1]):
                yield chances[:, label].sqrt() * logs[:, label]
            return
        reach = chances.double().cumsum(dim=1).cpu()
        for _ in range(draws):
            aim = torch.as_tensor(rng.random((len(logs), 1))) * reach[:, -1:]
            labels = torch.searchsorted(reach, aim).clamp_(max=logs.shape[1] - 1).to(logs.device)
            yield logs.gather(1, labels)[:, 0] / draws**0.5

    return losses


class _Sums(ABC):
    """Sums over the rows that pass through one layer, and its outputs of the last pass."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.outputs: list[Tensor] = []

    def forward(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        with torch.no_grad():
            self.pass_forward(arguments[0])
        self.outputs.append(output)
        # What follows may change its input in place; the gradient is wanted for this layer's own output.
        return output.clone()

    @abstractmethod
    def pass_forward(self, inputs: Tensor) -> None: ...

    @abstractmethod
    def pass_back(self, gradient: Tensor) -> None: ...


class _Products(_Sums):
    """Sums of a aᵀ and g gᵀ. In float64: rounding in float32 would give them negative eigenvalues."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.groups: int = getattr(module, "groups", 1)
        self._right: Any = 0.0
        outputs = int(module.weight.shape[0]) // self.groups
        self._left = module.weight.new_zeros((self.groups, outputs, outputs), dtype=torch.float64)
        self._places = 0
        self._positions = 1

    def pass_forward(self, inputs: Tensor) -> None:
        patches = self._patches(inputs).double()
        if self.module.bias is not None:
            patches = torch.cat([patches, torch.ones_like(patches[..., :1])], dim=2)
        self._right = self._right + torch.matmul(patches.mT, patches)
        self._places += patches.shape[1]
        if self._convolves:
            self._positions = patches.shape[1] // len(inputs)

    def pass_back(self, gradient: Tensor) -> None:
        # (rows, channels, height, width) or (..., channels) to (groups, places, channels of a group)
        last = gradient.movedim(1, -1) if self._convolves else gradient
        flat = last.reshape(-1, self.groups, last.shape[-1] // self.groups).transpose(0, 1).double()
        self._left += torch.matmul(flat.mT, flat)

    @property
    def _convolves(self) -> bool:
        return hasattr(self.module, "kernel_size")

    def _patches(self, inputs: Tensor) -> Tensor:
        """(groups, places, width): rows of a linear layer, patches of a convolution."""
        module = self.module
        if not self._convolves:
            return inputs.reshape(1, -1, inputs.shape[-1])
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        patches = F.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride)
        split = patches.reshape(len(patches), self.groups, -1, patches.shape[2])
        return split.permute(1, 0, 3, 2).flatten(1, 2)

    def factors(self, rows: int) -> Factors:
        right = (self._right / max(1, self._places)).cpu().numpy()
        left = (self._left / max(1, rows)).cpu().numpy()
        return Factors(*((right[0], left[0]) if self.groups == 1 else (right, left)), self._positions)


class _Squares(_Sums):
    """Sums of g² (a²)ᵀ and g² of a linear layer."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.sums = [torch.zeros_like(p, dtype=torch.float64).detach() for p in module.parameters()]
        self._inputs: Any = None

    def pass_forward(self, inputs: Tensor) -> None:
        self._inputs = inputs.double().square()

    def pass_back(self, gradient: Tensor) -> None:
        square = gradient.double().square()
        self.sums[0] += torch.matmul(square.mT, self._inputs)
        if len(self.sums) > 1:
            self.sums[1] += square.sum(dim=0)
