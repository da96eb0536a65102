"""How images reach a network that trains on them: as pixels, channel after channel, in [-1, 1].

Those are the numbers that a gradient method makes of images given as bytes, so that it does not matter
whether they come from a dataset or from an array.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.backbones import load_backbone
from fedsolve.data.backbones.backbone_address import split_address
from fedsolve.data.backbones.common import require
from fedsolve.data.backbones.pixels import Pixels
from fedsolve.data.datasets import is_address, load_dataset
from fedsolve.data.datasets.dataset_address import Address
from fedsolve.data.image_rows import is_images
from fedsolve.data.tables import Table
from fedsolve.errors import DataError
from fedsolve.gradient import networks
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel

_ROWS = 16384
DEFAULTS = {"order": "channels", "normalise": "half"}
NOTED = "backbone"
"""Under which name of its parameters a model file keeps the address that made its rows."""


def for_training(method: GradientMethod, given: dict[str, Any]) -> tuple[GradientMethod, str | None]:
    """The method with the shape of the dataset's images, and the backbone that gives its rows.

    Both stay as they are where the network takes features, or the data are no images.
    """
    named: str | None = given["backbone"]
    shape = method.image_shape
    if not takes_images(method.network, shape) or not is_address(given["data"]):
        return method, named
    images = load_dataset(given["data"], given["root"]).train.inputs
    if isinstance(images, np.ndarray):
        return method, named
    address = pixel_address(named, method.network, shape)
    if shape is None:
        pixels = load_backbone(address)
        assert isinstance(pixels, Pixels)
        pixels.extract(images.read(slice(0, 1)))
        assert pixels.shape is not None
        method = dataclasses.replace(method, shape=",".join(map(str, pixels.shape)))
    return method, address


def for_model(model: GradientModel, data: str, given: dict[str, Any]) -> str | None:
    """The backbone that gives the rows a model takes; what was named where the model takes features."""
    named: str | None = given["backbone"]
    network, text = model.parameters["network"], model.parameters["shape"]
    shape = None if text is None else [int(size) for size in text.split(",")]
    if not takes_images(network, shape) or not _holds_images(data, given["root"]):
        return named
    if named is None and NOTED in model.parameters:
        return str(model.parameters[NOTED])
    return pixel_address(named, network, networks.input_shape(network, model.features, shape))


def _holds_images(data: str, root: str | None) -> bool:
    if not is_address(data):
        return is_images(data)
    return Address.parse(data).scheme == "folder" or load_dataset(data, root).is_images


def takes_images(network: str, shape: Sequence[int] | None) -> bool:
    """Whether a network takes (rows, channels, height, width) rather than rows of features."""
    features = next(iter(networks.SHAPES)) if shape is None else math.prod(shape)
    return networks.input_shape(network, features, shape) is not None


def pixel_address(named: str | None, network: str, shape: Sequence[int] | None) -> str:
    """The address of a `pixels` backbone whose rows a network takes, from the one that was named, if any.

    Order and normalisation are filled in where the address does not say them; without an address, images
    get the given shape.
    """
    if named is None:
        named = "pixels"
        if shape is not None:
            channels = {1: "channels=gray", 3: "channels=rgb"}.get(shape[0])
            named = f"pixels:{shape[1]}x{shape[2]}" + (f"?{channels}" if channels else "")
    kind, _, options = split_address(named)
    if kind != "pixels":
        raise DataError(
            f"network '{network}' takes images, and backbone '{named}' gives features. Leave out --backbone, "
            "or name pixels:SIZE; on features train a linear network or mlp:256."
        )
    said = {"normalise": ("normalise", "mean", "std")}
    missing = [
        f"{name}={value}"
        for name, value in DEFAULTS.items()
        if not any(map(options.has, said.get(name, (name,))))
    ]
    if not missing:
        return named
    return f"{named}{'&' if '?' in named else '?'}{'&'.join(missing)}"


def check_torch(network: str, what: str) -> None:
    """Refuse, before any data are read, what torch or a network's name stand in the way of.

    Functions of the user's own (package.module:function) are also looked for in the folder of the shell.
    """
    require("torch", "torch", what)
    networks.stacked_widths(network, 1, 1)
    if ":" in network and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def scores(model: GradientModel, rows: Array) -> Array:
    """The model's scores, a part of the rows at a time so that what its layers give is never held whole."""
    # A copy of each part: torch warns of rows that it may not write to, as those of a store are.
    found = [
        model.decision_function(np.array(rows[start : start + _ROWS])) for start in range(0, len(rows), _ROWS)
    ]
    return np.concatenate(found) if found else np.zeros((0, model.outputs))


def accuracy(model: GradientModel, rows: Table) -> float:
    """Share of labelled rows that the model reads correctly."""
    assert model.classes is not None
    return float(np.mean(model.classes[np.argmax(scores(model, rows.features), axis=1)] == rows.labels))
