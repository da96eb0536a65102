"""Networks by name: heads on features, image networks for small images, and the user's own.

    linear                  one linear layer, weights and bias zero
    mlp, mlp:512,128        hidden layers with ReLU (256 when no widths are given), torch's initial weights
    cnn                     two 5x5 convolutions and two linear layers, no normalisation
    mobilenet_v2, resnet18, resnet50, each also with GroupNorm: resnet18:gn
    mobilenet_v2:stock      with the strides and the dropout of the network for 224 px
    package.module:factory  a function of (features, outputs) that returns a module
    custom:DIGEST           a module given to `register_network`

Feature networks take (rows, features), image networks (rows, C, H, W). The layers of a network that
comes with fedsolve (its Conv2d and Linear modules) are registered in the order in which they run, and
its last one is called "classifier".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fedsolve import registry
from fedsolve.arrays import check_choice, check_whole
from fedsolve.backends.torch_later import GENERATOR, Tensor, nn, torch
from fedsolve.errors import DataError, did_you_mean, require
from fedsolve.gradient.networks import custom
from fedsolve.gradient.networks.custom import register_network as register_network
from fedsolve.gradient.networks.heads import hidden_widths, stack
from fedsolve.gradient.networks.initial import made

NORMALISED = ("mobilenet_v2", "resnet18", "resnet50")

STACKED = ("cnn",)
"""Image networks whose clients train side by side on a GPU: small, without statistics of a batch."""

STACKED_FEATURES = 3 * 64 * 64
"""Numbers of an image up to which they do: stacks of larger networks take gigabytes."""
NETWORKS = ("linear", "mlp", "cnn", *NORMALISED)
KNOWN = (*NETWORKS, *(f"{name}:gn" for name in NORMALISED), "mobilenet_v2:stock")
SHAPES = {math.prod(s): s for s in ((1, 28, 28), (1, 32, 32), (3, 28, 28), (3, 32, 32), (3, 64, 64))}
"""Shapes of images that their number of features says."""

_DRAWS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def build_network(
    name: str,
    features: int,
    outputs: int,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shape: Sequence[int] | None = None,
) -> nn.Module:
    """The network of this name in training mode on the processor.

    Initial weights depend on the seed alone and leave torch's global generator as it was. They are drawn in
    float32, so a float64 network starts from the same numbers. `shape` is (C, H, W) for image networks;
    see `input_shape`.
    """
    kind, option = _parsed(name)
    check_whole(1, features=features, outputs=outputs)
    check_whole(0, seed=seed)
    check_choice("dtype", dtype, ("float32", "float64"))
    torch = require("torch", "torch", f"network '{name}'")
    if kind == custom.PREFIX:
        network = custom.registered(name)
    elif kind not in NETWORKS:
        network = custom.made_by(kind, str(option), features, outputs, seed, KNOWN)
    elif widths := stacked_widths(name, features, outputs):
        network = made(partial(stack, widths), "zero" if len(widths) == 2 else "torch", seed)
    else:
        network = _image_network(kind, option, input_shape(name, features, shape), outputs, seed)
    return network.to(device="cpu", dtype=getattr(torch, dtype)).train()


def check_allowed(name: str) -> None:
    """Refuse a function of the user's own that may not make a network here."""
    kind, option = _parsed(name)
    if kind != custom.PREFIX and kind not in NETWORKS:
        registry.check_allowed("network", f"{kind}:{option}")


def input_shape(name: str, features: int, shape: Sequence[int] | None = None) -> tuple[int, int, int] | None:
    """(C, H, W) of the images a network takes; None where it takes rows of features.

    Image networks: `shape`, or what the number of features says (784 is 28 x 28 in gray, 3072 is 32 x 32
    in colour, channels first). Networks of the user's own take images only where `shape` is given.
    """
    kind, _ = _parsed(name)
    if kind in ("linear", "mlp") or (shape is None and kind not in NETWORKS):
        return None
    if shape is None:
        if features not in SHAPES:
            known = ", ".join(f"{size} as {image}" for size, image in SHAPES.items())
            raise DataError(
                f"network '{name}' takes images, and {features} features do not say of which shape (known "
                f"are {known}). Give shape 'channels,height,width', such as '1,8,8', or choose a network on "
                "features: linear or mlp."
            )
        return SHAPES[features]
    return checked_shape(shape, features)


def shape_from(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a shape that is written as "channels,height,width"."""
    try:
        return None if text is None else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise DataError(f"shape must be 'channels,height,width'; got {text!r}.") from None


def checked_shape(shape: Sequence[int], features: int) -> tuple[int, int, int]:
    """(C, H, W) of images that rows of so many features hold; refused where they cannot."""
    try:
        channels, height, width = sizes = tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise DataError(f"shape must be three positive numbers (channels, height, width); got {shape!r}.")
    if math.prod(sizes) != features:
        raise DataError(
            f"shape {sizes} holds {math.prod(sizes)} numbers, but rows have {features} features. Give the "
            "shape of one image as it is stored, channels first."
        )
    return channels, height, width


def as_inputs(rows: Tensor, shape: Sequence[int] | None, dtype: torch.dtype | str) -> Tensor:
    """Rows as a network takes them: (rows, C, H, W) where there is a shape, in `dtype`.

    Bytes become (x / 255 - 0.5) / 0.5, so 0 is -1 and 255 is 1; everything else is only cast.
    """
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    rows = rows.to(kind).div_(127.5).sub_(1.0) if rows.dtype == torch.uint8 else rows.to(kind)
    if shape is None:
        return rows
    if math.prod(rows.shape[1:]) != math.prod(shape):
        raise DataError(
            f"rows of shape {tuple(rows.shape[1:])} cannot be read as images of shape {tuple(shape)} "
            "(channels, height, width)."
        )
    return rows.reshape(rows.shape[0], *shape)  # not len(rows), which a trace would take for a constant


def scaled(rows: Any) -> Any:
    """An array of rows as `as_inputs` reads its values: bytes from -1 to 1, everything else as it is."""
    return (rows / 127.5 - 1.0).astype("float32") if rows.dtype == "uint8" else rows


def head_of(network: nn.Module) -> tuple[str, nn.Linear]:
    """Name and module of the classifier: the last `nn.Linear` that was registered."""
    layers = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise DataError(
            f"the {type(network).__name__} has no nn.Linear, and the last one is taken as the classifier. "
            "End the network with nn.Linear(width, classes)."
        )
    return layers[-1]


def features_of(
    network: nn.Module, inputs: Tensor, weights: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Features and logits of one forward pass; features are what enters the classifier (`head_of`).

    weights: used in place of the network's own, by name.
    """
    name, head = head_of(network)
    entered: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, arguments: entered.extend(arguments[:1]))
    try:
        if weights is None:
            logits: Tensor = network(inputs)
        else:
            from torch.func import functional_call

            logits = functional_call(network, weights, (inputs,))
    finally:
        handle.remove()
    if not entered:
        raise DataError(
            f"the classifier '{name}' of the {type(network).__name__} was not called as a module with its "
            "input as the first argument, so there are no features. The last nn.Linear that is registered "
            "must be the one that gives the logits."
        )
    return entered[-1], logits


def batch_norms(network: nn.Module) -> list[str]:
    """Names of the layers that normalise by the statistics of the batch; a batch of one has none."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [name for name, part in network.named_modules() if isinstance(part, _BatchNorm)]


def draws(network: nn.Module, inputs: Tensor) -> set[str]:
    """Which of torch's generators ("cpu", "cuda") the network draws from while training on these inputs.

    Found by a trial run, once for every module: its layers do not show what a forward function calls.
    """
    if network in _DRAWS:
        return _DRAWS[network]
    devices = [inputs.device] if inputs.is_cuda else []
    states: dict[str, Callable[[], Tensor]] = {"cpu": torch.get_rng_state}
    states |= {one.type: partial(torch.cuda.get_rng_state, one) for one in devices}
    kept = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with GENERATOR, torch.random.fork_rng(devices), torch.no_grad():
        before = {name: state() for name, state in states.items()}
        network(inputs)
        _DRAWS[network] = {name for name, state in states.items() if not torch.equal(before[name], state())}
        for name, buffer in network.named_buffers():
            buffer.copy_(kept[name])
    return _DRAWS[network]


def stacked_widths(name: str, features: int, outputs: int) -> list[int] | None:
    """[features, hidden widths..., outputs] of a network of linear layers with ReLU; None for others."""
    kind, option = _parsed(name)
    if kind == "linear":
        return [features, outputs]
    return [features, *hidden_widths(option), outputs] if kind == "mlp" else None


def float_parameters(network: nn.Module) -> dict[str, Tensor]:
    """The parameters themselves by name, frozen ones included; shared ones once."""
    return {name: value for name, value in network.named_parameters() if value.is_floating_point()}


def float_buffers(network: nn.Module) -> dict[str, Tensor]:
    """The buffers of floating type by name, such as running means and variances; counters are left out."""
    return {name: value for name, value in network.named_buffers() if value.is_floating_point()}


def _parsed(name: str) -> tuple[str, str | None]:
    """What stands before and after the colon of a network's name."""
    if not isinstance(name, str):
        raise DataError(
            f"network must be a name; got a {type(name).__name__}. A module of your own gets one by "
            "register_network(module)."
        )
    kind, colon, rest = name.partition(":")
    option = rest if colon else None
    if kind == "mlp":
        hidden_widths(option)
        return kind, option
    if kind in NETWORKS:
        if option is not None and name not in KNOWN:
            offered = " or ".join(known for known in KNOWN if known.partition(":")[0] == kind)
            raise DataError(f"network '{name}': '{rest}' is no option of {kind}; there is {offered}.")
        return kind, option
    named = kind == custom.PREFIX or all(part.isidentifier() for part in [*kind.split("."), rest])
    if colon and rest and named:
        return kind, option
    raise DataError(
        f"unknown network '{name}'.{did_you_mean(name, KNOWN)} Known are {', '.join(KNOWN)}, "
        "mlp:W1,W2,..., package.module:factory and what register_network(module) returns."
    )


def _image_network(
    kind: str, option: str | None, shape: tuple[int, int, int] | None, outputs: int, seed: int
) -> nn.Module:
    from fedsolve.gradient.networks import cnn, mobilenet, resnet

    assert shape is not None
    if kind == "cnn":
        return made(lambda: cnn.SmallCNN(shape, outputs), "torch", seed)
    grouped, stock = option == "gn", option == "stock"
    if kind == "mobilenet_v2":
        make = partial(mobilenet.MobileNetV2, shape[0], outputs, grouped=grouped, stock=stock)
        return made(make, "small head", seed)
    return made(partial(resnet.ResNet, kind, shape[0], outputs, grouped=grouped), "he", seed)
