"""Backbones: frozen networks that turn images or texts into features, by address.

    backbone = load_backbone("efficientnet-lite0")
    features = backbone.extract(images)        # float32 (images, width)

A row's features depend on the row, the weights and the preprocessing. The same rows in the same
batches give the same bits on the same machine; in other batches they agree to rounding (about 1e-5 of
their size), because matrix products add in another order.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import Preprocessing
from fedsolve.errors import DataError, FedsolveError, did_you_mean
from fedsolve.tables.schema import Extractor

__all__ = ["Backbone", "Preprocessing", "load_backbone"]

DEFAULT_BACKBONE = "efficientnet-lite0"


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


_MODULES = {
    "efficientnet-lite0": "efficientnet_lite",
    "pixels[:SIZE]": "preprocessing",
    "onnx:FILE": "onnx",
    "hf:NAME_OR_FOLDER": "transformers",
    "st:NAME_OR_FOLDER": "transformers",
    "torch:MODULE:CALLABLE": "torch_callable",
    "torchvision:NAME": "torch_callable",
    "timm:NAME": "torch_callable",
}
"""Addresses, and the modules whose `load` knows them."""

_KINDS = {form.partition(":")[0].removesuffix("["): module for form, module in _MODULES.items()}


def load_backbone(address: str, cache: str | os.PathLike[str] | None = None) -> Backbone:
    """The backbone that an address `kind:target?option=value&...` names.

    cache: folder for networks that are exported once; FEDSOLVE_CACHE or ~/.cache/fedsolve when None.
    """
    parsed = Address.parse(address, strict=True)
    if parsed.scheme not in _KINDS:
        onnx = parsed.scheme.endswith(".onnx")
        guess = f" Did you mean 'onnx:{address}'?" if onnx else did_you_mean(parsed.scheme, _KINDS)
        raise DataError(f"unknown backbone '{address}'.{guess} Known are {', '.join(_MODULES)}.")
    module = importlib.import_module(f"fedsolve.data.backbones.{_KINDS[parsed.scheme]}")
    backbone: Backbone = module.load(parsed, None if cache is None else Path(cache))
    return backbone


def known_backbone(wanted: Extractor, named: str | None = None) -> tuple[str, Backbone]:
    """The backbone that made a model's features, and its address; `named` if its files have moved.

    A model keeps how its backbone was named, its preprocessing and a digest of its weights. Another backbone,
    another preprocessing or other weights are refused.
    """
    if not wanted.address and named is None:
        raise DataError(
            f"these features came with their dataset ({wanted.recipe.get('name')}), not from a backbone, so "
            "that they cannot be made of other images. Train with a backbone (--backbone)."
        )
    address = named or wanted.address
    try:
        backbone = load_backbone(address)
    except FedsolveError as problem:
        if named is not None:
            raise
        raise type(problem)(
            f"the model's backbone cannot be loaded: {problem} Where it lies elsewhere, name it with "
            "--backbone; its weights and preprocessing are compared."
        ) from problem
    own = Extractor.of(address, backbone.identity, backbone.width or wanted.width)
    check_same(own, wanted, address)
    return address, backbone


def check_same(own: Extractor, wanted: Extractor, what: str) -> None:
    """Refuse another backbone than the model's and say what differs."""
    differences = own.differences(wanted)
    if differences:
        raise DataError(
            f"{what} does not give the features that the model was trained on: {'; '.join(differences)} (the "
            f"model's). Leave out --backbone to use the model's own, or bring back its {wanted.name}."
        )


def portable(address: str) -> str:
    """The address without local folders, to be shown to others."""
    parsed = Address.parse(address)
    if os.path.exists(os.path.expanduser(parsed.rest)):
        parsed = replace(parsed, rest=Path(parsed.rest).name)
    weights = parsed.options.get("weights")
    return parsed.adding(**({} if weights is None else {"weights": Path(weights).name}))
