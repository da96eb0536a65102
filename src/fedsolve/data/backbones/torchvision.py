"""`torchvision:NAME`: a classifier of torchvision without its last linear layer, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.data.backbones.backbone_address import AddressOptions
from fedsolve.data.backbones.preprocessing import FILTERS, Preprocessing
from fedsolve.data.backbones.torch_callable import TorchBackbone, load_weights
from fedsolve.errors import DataError, ModelFileError, explained, require_installed

# Where torchvision's classifiers keep their last layers.
_HEADS = ("fc", "classifier", "heads", "head")


def load(target: str, options: AddressOptions, cache: Path | None) -> TorchBackbone:
    """`torchvision:resnet18`, or `torchvision:resnet18?weights=FILE` with a state dict of your own.

    Without a file the default weights are used, from torchvision's cache or the network.
    """
    if not target:
        raise DataError(f"{options.address}: name a model, such as torchvision:resnet18.")
    torch = require_installed("torch", options.address)
    models = require_installed("torchvision", options.address).models
    file = options.text("weights")
    device = options.text("device") or "cpu"
    remedy = f"Fetch them elsewhere and give the file: torchvision:{target}?weights=FILE"
    unknown = f"{options.address}: torchvision has no classifier '{target}'"
    with (
        explained(f"{options.address}: the weights cannot be fetched", remedy, ModelFileError, OSError),
        explained(unknown, kinds=(ValueError, AttributeError, KeyError)),
    ):
        weights = models.get_model_weights(target).DEFAULT
        model = models.get_model(target, weights=None if file else weights)
    if file:
        load_weights(model, file, options.address)
    _remove_head(model, torch, options.address)
    preprocessing = _translated(weights.transforms(), options.address).adjusted(options)
    options.finish()
    return TorchBackbone(
        f"torchvision:{target}", model, preprocessing, {"name": f"torchvision:{target}"}, device=device
    )


def _remove_head(model: Any, torch: Any, address: str) -> None:
    """Replace the last linear layer by the identity."""
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear):
            setattr(model, name, torch.nn.Identity())
            return
        if isinstance(head, torch.nn.Sequential) and isinstance(head[-1], torch.nn.Linear):
            head[-1] = torch.nn.Identity()
            return
    raise DataError(
        f"{address}: {type(model).__name__} does not end in a linear layer. Take the features you want in "
        "a function of your own and use torch:MODULE:CALLABLE."
    )


def _translated(transforms: Any, address: str) -> Preprocessing:
    """The preset that comes with the weights: resize the shorter side, cut the middle, normalise."""
    size, shorter = transforms.crop_size, transforms.resize_size
    interpolation = str(getattr(transforms.interpolation, "value", transforms.interpolation))
    if len(size) != 1 or len(shorter) != 1 or interpolation not in FILTERS:
        raise DataError(f"{address}: torchvision's preprocessing is of an unknown form: {transforms}.")
    return Preprocessing(
        size=(size[0], size[0]),
        shorter_side=shorter[0],
        interpolation=interpolation,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )
