"""`timm:NAME`: a model of timm without its classifier, where timm is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.data.backbones.backbone_address import AddressOptions
from fedsolve.data.backbones.preprocessing import FILTERS, Preprocessing
from fedsolve.data.backbones.torch_callable import TorchBackbone, load_weights
from fedsolve.errors import DataError, ModelFileError, explained, require_installed


def load(target: str, options: AddressOptions, cache: Path | None) -> TorchBackbone:
    """`timm:resnet18`, or `timm:resnet18?weights=FILE` with a state dict of your own.

    Without a file the pretrained weights are used, from the hub's cache or the network.
    """
    if not target:
        raise DataError(f"{options.address}: name a model, such as timm:resnet18.")
    timm = require_installed("timm", options.address)
    data = require_installed("timm.data", options.address)
    file = options.text("weights")
    device = options.text("device") or "cpu"
    if not timm.is_model(target.partition(".")[0]):
        raise DataError(f"{options.address}: timm {timm.__version__} has no model '{target}'.")
    remedy = f"Fetch them elsewhere and give the file: timm:{target}?weights=FILE"
    with explained(f"{options.address}: the weights cannot be fetched", remedy, ModelFileError):
        model = timm.create_model(target, pretrained=file is None)
    if file:
        load_weights(model, file, options.address)
    model.reset_classifier(0)
    says = data.resolve_model_data_config(model)
    preprocessing = _translated(says, options.address).adjusted(options)
    options.finish()
    return TorchBackbone(f"timm:{target}", model, preprocessing, {"name": f"timm:{target}"}, device=device)


def _translated(says: dict[str, Any], address: str) -> Preprocessing:
    """timm's evaluation transform: the shorter side to size / crop_pct, then the middle of that."""
    channels, height, width = says["input_size"]
    mode = says.get("crop_mode", "center")
    if channels != 3 or height != width or mode != "center" or says["interpolation"] not in FILTERS:
        raise DataError(
            f"{address}: timm prepares images in a way that fedsolve does not know ({says}). "
            "Make the model in a function of your own and use torch:MODULE:CALLABLE."
        )
    return Preprocessing(
        size=(height, width),
        shorter_side=int(height / says["crop_pct"]),
        interpolation=says["interpolation"],
        mean=tuple(says["mean"]),
        std=tuple(says["std"]),
    )
