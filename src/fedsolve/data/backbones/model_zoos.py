"""`timm:NAME` and `torchvision:NAME`: their networks without the classifier, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import FILTERS, OPTIONS, Preprocessing
from fedsolve.data.backbones.torch_callable import TorchBackbone, load_weights
from fedsolve.errors import DataError, ModelFileError, explained, require_installed

# Where torchvision's classifiers keep their last layers.
_HEADS = ("fc", "classifier", "heads", "head")


def load(address: Address, cache: Path | None) -> TorchBackbone:
    """`timm:resnet18`, or `timm:resnet18?weights=FILE` with a state dict of your own; torchvision likewise.

    Without a file the pretrained weights are used, from the package's cache or the network.
    """
    zoo, target, file = address.scheme, address.rest, address.word("weights")
    address.allow("weights", "device", *OPTIONS)
    name = f"{zoo}:{target}"
    if not target:
        raise DataError(f"{address.text}: name a model, such as {zoo}:resnet18.")
    make = _timm if zoo == "timm" else _torchvision
    remedy = f"Fetch them elsewhere and give the file: {name}?weights=FILE"
    with explained(f"{address.text}: the weights cannot be fetched", remedy, ModelFileError):
        model, says, licence = make(target, file is None, address.text)
    if file:
        load_weights(model, file, address.text)
    if zoo == "timm":
        model.reset_classifier(0)
    else:
        _remove_head(model, address.text)
    device = address.options.get("device", "cpu")
    identity = {"name": name}
    return TorchBackbone(name, model, says.adjusted(address), identity, device=device, licence=licence)


def _timm(target: str, pretrained: bool, address: str) -> tuple[Any, Preprocessing, str | None]:
    timm, data = (require_installed(module, address) for module in ("timm", "timm.data"))
    if not timm.is_model(target.partition(".")[0]):
        raise DataError(f"{address}: timm {timm.__version__} has no model '{target}'.")
    model = timm.create_model(target, pretrained=pretrained)
    says = data.resolve_model_data_config(model)
    channels, height, width = says["input_size"]
    # The shorter side to size / crop_pct and the middle of that; or the whole image, squeezed.
    squeezed = says.get("crop_mode") == "squash" and says["crop_pct"] == 1.0
    known = squeezed or says.get("crop_mode", "center") == "center"
    if channels != 3 or height != width or not known or says["interpolation"] not in FILTERS:
        raise DataError(
            f"{address}: timm prepares images in a way that fedsolve does not know ({says}). "
            "Make the model in a function of your own and use torch:MODULE:CALLABLE."
        )
    preprocessing = Preprocessing(
        size=(height, width),
        shorter_side=None if squeezed else int(height / says["crop_pct"]),
        interpolation=says["interpolation"],
        mean=tuple(says["mean"]),
        std=tuple(says["std"]),
        middle="even",
    )
    return model, preprocessing, getattr(model, "pretrained_cfg", {}).get("license")


def _torchvision(target: str, pretrained: bool, address: str) -> tuple[Any, Preprocessing, str | None]:
    models = require_installed("torchvision", address).models
    unknown = f"{address}: torchvision has no classifier '{target}'"
    with explained(unknown, kinds=(ValueError, AttributeError, KeyError)):
        weights = models.get_model_weights(target).DEFAULT
        model = models.get_model(target, weights=weights if pretrained else None)
    # The preset of the weights: resize the shorter side, cut the middle, normalise.
    says = weights.transforms()
    size, shorter = says.crop_size, says.resize_size
    interpolation = str(getattr(says.interpolation, "value", says.interpolation))
    if len(size) != 1 or len(shorter) != 1 or interpolation not in FILTERS:
        raise DataError(f"{address}: torchvision's preprocessing is of an unknown form: {says}.")
    preprocessing = Preprocessing(
        size=(size[0], size[0]),
        shorter_side=shorter[0],
        interpolation=interpolation,
        mean=tuple(says.mean),
        std=tuple(says.std),
        middle="even",
    )
    return model, preprocessing, None


def _remove_head(model: Any, address: str) -> None:
    """Replace the last linear layer by the identity."""
    layers = require_installed("torch", address).nn
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, layers.Linear):
            setattr(model, name, layers.Identity())
            return
        if isinstance(head, layers.Sequential) and isinstance(head[-1], layers.Linear):
            head[-1] = layers.Identity()
            return
    raise DataError(
        f"{address}: {type(model).__name__} does not end in a linear layer. Take the features you want in "
        "a function of your own and use torch:MODULE:CALLABLE."
    )
