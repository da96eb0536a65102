"""FLFA: feedback alignment for local training, plugged into any host.

Baek, Kim, Kim, Chung, "Federated Learning with Feedback Alignment". In the chosen layers the error
travels back through the global weights the client received instead of its own, drifting ones:

    delta_{l-1} = (B_lᵀ delta_l) * f'(z_{l-1}),   B_l = W_l^r ||w_l|| / ||W_l^r||   (Eq. 11, Algorithm 1)

At the first step of a round B_l is W_l^r. Forward pass, weight gradients and bias gradients are untouched. On
the first layer, or right after frozen ones, the rule changes nothing, since nobody uses the input gradient.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedsolve.arrays import Array, philox_uniforms, uniform_key
from fedsolve.backends.torch_later import GENERATOR, Tensor, nn, torch
from fedsolve.errors import DataError
from fedsolve.gradient.alignment import CHOICES, weight_of

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

HELD = "held."
"""What stands before the names of weights that were sent in an earlier round and still serve as B."""


def eligible_layers(network: nn.Module) -> list[str]:
    """Names of the Conv2d and Linear modules, in the order of registration.

    Modules with a forward of their own, and the output projection of attention, whose forward is never
    called, are no candidates.
    """
    return [name for name, module in network.named_modules() if _is_eligible(module)]


def trained_layers(network: nn.Module) -> list[str]:
    """Names of the eligible layers whose weight is trained: what the paper's rule chooses among."""
    return [name for name in eligible_layers(network) if network.get_submodule(name).weight.requires_grad]


def changing_layers(network: nn.Module, inputs: Tensor) -> list[str]:
    """Names of the trained layers in which feedback alignment changes anything.

    Those are the ones whose input depends on trained weights: not the first, nor one that reads the output
    of frozen layers. Found by running these inputs through a copy of the network.
    """
    tried = copy.deepcopy(network).eval()
    changing: set[str] = set()

    def look(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if any(getattr(value, "requires_grad", False) for value in arguments):
            changing.add(name)

    names = trained_layers(network)
    for name in names:
        tried.get_submodule(name).register_forward_pre_hook(partial(look, name))
    with GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
        tried(inputs)
    return [name for name in names if name in changing]


def _is_eligible(module: nn.Module) -> bool:
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    from fedsolve.gradient.networks.mobilenet import DepthwiseConvolution

    if isinstance(module, nn.Linear):
        own = type(module).forward is not nn.Linear.forward
        return not own and not isinstance(module, NonDynamicallyQuantizableLinear)
    if isinstance(module, DepthwiseConvolution):
        return True
    if isinstance(module, nn.Conv2d):
        kind = type(module)
        return kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
    return False


class Alignment(NamedTuple):
    """How far a layer has moved from its feedback: ||w|| / ||W^r|| and cos(B, w)."""

    ratio: float
    cosine: float


class Feedback:
    """Feedback alignment in the named layers, for the length of a `with` block.

    Enter it with the received weights W^r in the network, or given, and call `rescale` after every optimiser
    step.

    matrix:   "global", B = W^r; "random", a fixed random matrix of this seed with the norm of W^r.
    scaling:  "layer", B follows the norm of the local weight (the paper); "row", the norm of each of
              its output channels; "none".
    route:    "layer", or "direct": direct feedback alignment (Nokland 2016), the ablation of Table 4.
              The gradient by the layer's input is then a fixed random projection of the output error
              (uniform in ±1/sqrt(outputs)); `matrix` and `scaling` do not apply, as it follows no weight.
    received: W^r by weight name; a layer that it lacks takes the network's weight when it is entered.
    held:     W^r may be older than the network's weights, so B gets their norm at once.

    B stays at one address, as captured CUDA graphs need, so torch refuses backward through a graph built
    before the last `rescale`. B is no parameter, no buffer and no entry of the state dict. A copy of the
    network made within the block keeps the feedback for good; make copies that will be trained outside.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Iterable[str],
        *,
        matrix: Literal["global", "random"] = "global",
        scaling: Literal["layer", "row", "none"] = "layer",
        route: Literal["layer", "direct"] = "layer",
        seed: int = 0,
        received: Mapping[str, Tensor] | None = None,
        held: bool = False,
    ) -> None:
        self.network = network
        modules = dict(network.named_modules())
        self._layers = {name: _Layer(_find(network, modules, name)) for name in layers}
        self.chosen = self._layers
        self._matrix, self._scaling, self._route = matrix, scaling, route
        self._seed, self._held = seed, held
        self._received = received or {}
        self._errors: list[Tensor] | None = None
        self._undo: ExitStack | None = None

    def __enter__(self) -> Feedback:
        if self._undo is not None:
            raise DataError("this feedback is already in use; make another Feedback for a nested block.")
        if self._route == "layer":
            self.receive()
            if self._held:
                self.rescale()
        with ExitStack() as undo:
            self._install(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._undo is not None:
            self._undo.close()
        self._undo = self._errors = None

    def choose(self, layers: Iterable[str]) -> None:
        """Align these of the layers alone from the next `receive` on: one recorded step serves any choice.

        In the others B is the weight of the moment, as in back-propagation.
        """
        self.chosen = {name: self._layers[name] for name in layers}
        with torch.no_grad():
            for name, layer in self._layers.items():
                weight = layer.module.weight
                if layer.aligned is None:
                    layer.matrix, layer.aligned = weight.clone(), weight.new_zeros((), dtype=torch.bool)
                layer.aligned.fill_(name in self.chosen)

    def receive(self) -> None:
        """Take B anew from what was received, or the network's present weights, as for the next client."""
        if self._route == "direct":
            return
        with torch.no_grad():
            for name, layer in self.chosen.items():
                weight = layer.module.weight.clone()
                # Copied into the layout of the layer's own weight, so that the same kernels take it.
                weight.copy_(self._received.get(weight_of(name), weight))
                start = self._norm(weight)
                matrix, source, norm = weight, weight, start
                if self._matrix == "random":
                    source = weight.new_tensor(_uniform(self._seed, name, tuple(weight.shape)))
                    norm = self._norm(source)
                    matrix = source * (start / norm)
                # W = 0 stays B = 0: divided by infinity instead of zero, without looking at the value.
                norm = norm.masked_fill(norm == 0, torch.inf)
                for part, new in (("matrix", matrix), ("source", source), ("norm", norm), ("start", start)):
                    kept = getattr(layer, part)
                    setattr(layer, part, new.clone() if kept is None else kept.copy_(new))

    def rescale(self) -> None:
        """B = W^r ||w|| / ||W^r|| for the present local weights; three small kernels a layer, no waiting.

        The ratio comes first, so that B is W^r to the last bit while the norm has not changed.
        """
        if self._scaling == "none" or self._route == "direct":
            return
        with torch.no_grad():
            for layer in self.chosen.values():
                if layer.norm is None:
                    raise DataError("rescale() before the feedback was entered; use `with Feedback(...)`.")
                ratio = self._norm(layer.module.weight).div_(layer.norm)
                torch.mul(layer.source, ratio, out=layer.matrix)

    def agreement(self) -> dict[str, Alignment]:
        """||w|| / ||W^r|| and cos(B, w) of every layer, for the log of a round; waits for the device."""
        alignments = {}
        with torch.no_grad():
            for name, layer in self.chosen.items():
                if layer.matrix is None:
                    continue
                weight, matrix = layer.module.weight.double(), layer.matrix.double()
                start = float(torch.linalg.vector_norm(layer.start))
                size, length = float(weight.norm()), float(matrix.norm()) * float(weight.norm())
                alignments[name] = Alignment(
                    size / start if start else float("nan"),
                    float(torch.sum(weight * matrix)) / length if length else float("nan"),
                )
        return alignments

    def _norm(self, weight: Tensor) -> Tensor:
        by_row = self._scaling == "row"
        axes = tuple(range(1, weight.dim())) if by_row else None
        norm: Tensor = torch.linalg.vector_norm(weight, dim=axes, keepdim=by_row)
        return norm

    def _install(self, undo: ExitStack) -> None:
        if self._route == "direct" and self._layers:
            self._listen(undo)
        for name, layer in self._layers.items():
            own = layer.module.__dict__
            if "forward" in own:
                undo.callback(own.update, forward=own["forward"])
            else:
                undo.callback(own.pop, "forward", None)
            made = self._direct_forward(name) if self._route == "direct" else self._aligned_forward(layer)
            # A bound method, so that a copy of the network made within the block runs its own weights.
            own["forward"] = MethodType(made, layer.module)

    def _aligned_forward(self, layer: _Layer) -> Callable[[Any, Tensor], Tensor]:
        from fedsolve.gradient.feedback_ops import aligned

        def forward(module: Any, inputs: Tensor) -> Tensor:
            matrix = layer.matrix
            if layer.aligned is not None:
                matrix = torch.where(layer.aligned, matrix, module.weight.detach())
            return aligned(module, inputs, matrix)

        return forward

    def _direct_forward(self, name: str) -> Callable[[nn.Module, Tensor], Tensor]:
        made: dict[tuple[int, int], Tensor] = {}

        def projected(errors: list[Tensor], arrived: Tensor) -> Tensor:
            """The gradient by the layer's input: a fixed random projection of the network's output error."""
            if not errors:
                # The loss does not depend on the output: its error is zero.
                return torch.zeros_like(arrived)
            error = errors[-1]
            if len(error) != len(arrived):
                raise DataError(
                    f"direct feedback needs one output row per input row of the layer; the network gave "
                    f"{len(error)} for {len(arrived)}. Choose another layer, or route='layer'."
                )
            error = error.flatten(1)
            size = error.shape[1], arrived[0].numel()
            if size not in made:
                made[size] = arrived.new_tensor(_uniform(self._seed, name, size) * size[0] ** -0.5)
            return error.to(arrived.dtype).mm(made[size]).view(arrived.shape)

        def forward(module: nn.Module, inputs: Tensor) -> Tensor:
            if self._errors is None:
                raise DataError(
                    f"route='direct' sends the output's error to {name!r}, so the whole network must be "
                    "called, not one of its parts."
                )
            turned = inputs.view_as(inputs)
            if turned.requires_grad:
                turned.register_hook(partial(projected, self._errors))  # type: ignore[no-untyped-call]
            result: Tensor = type(module).forward(module, turned)
            return result

        return forward

    def _listen(self, undo: ExitStack) -> None:
        """Make every pass through the network remember the gradient of the loss by its output."""

        def begin(network: nn.Module, inputs: Any) -> None:
            # One per pass: hosts that run two passes before backward get each pass's own error.
            self._errors = []

        def finish(network: nn.Module, inputs: Any, output: Any) -> None:
            errors, self._errors = self._errors, None
            if not hasattr(output, "requires_grad"):
                raise DataError(
                    f"route='direct' needs a network that returns one tensor; got {type(output).__name__}."
                )
            if output.requires_grad and errors is not None:
                output.register_hook(errors.append)

        undo.callback(self.network.register_forward_pre_hook(begin).remove)
        undo.callback(self.network.register_forward_hook(finish).remove)


@dataclass(slots=True)
class _Layer:
    """One chosen layer: B = source * ||w|| / norm."""

    module: nn.Linear | nn.Conv2d
    matrix: Any = None  # tensors, from the first `receive` on
    source: Any = None
    norm: Any = None
    start: Any = None  # ||W^r||
    aligned: Any = None  # whether now, as a tensor, where that changes


def _find(network: nn.Module, modules: dict[str, nn.Module], name: str) -> Any:
    module = modules.get(name)
    if module is not None and _is_eligible(module):
        return module
    known = eligible_layers(network)
    if module is not None:
        what = f"layer {name!r} is a {type(module).__name__}; feedback alignment acts on Conv2d and Linear"
    else:
        what = f"no layer {name!r} in this network"
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:5]
    more = f" ({len(known)} layers are eligible)" if len(known) > len(near) else ""
    raise DataError(f"{what}. Name one of: {', '.join(near) or 'none is eligible'}{more}.")


def check_parameters(method: GradientMethod) -> None:
    """Refuse parameters of feedback alignment that would change nothing."""
    fields = type(method).__dataclass_fields__
    for applies, unused, why in (
        (
            method.feedback is None,
            [name for name in fields if name.startswith("feedback_")],
            "without feedback, which says in which layers",
        ),
        (
            method.feedback not in CHOICES,
            ["feedback_layers", "feedback_first", "feedback_sketch"],
            "with layers that are named, not chosen",
        ),
        (
            method.feedback_route == "direct",
            ["feedback_matrix", "feedback_scaling", "feedback_sync"],
            "with feedback_route 'direct', which follows no weight",
        ),
        (
            method.feedback_matrix == "random",
            ["feedback_sync"],
            "with feedback_matrix 'random', which is the same in all rounds",
        ),
    ):
        for name in unused if applies else ():
            if (value := getattr(method, name)) != fields[name].default:
                raise DataError(f"{name}={value!r} would change nothing {why}. Leave it out.")


@lru_cache(maxsize=4)
def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Uniforms in [-1, 1) that every client gets from the seed, on every platform."""
    size = math.prod(shape)
    values: Array = philox_uniforms(uniform_key(seed, f"feedback {name}", 0, 0, size), size).reshape(shape)
    values *= 2.0
    values -= 1.0
    values.setflags(write=False)
    return values
