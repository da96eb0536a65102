"""How images reach a network on the command line: as pixels in the form that `pixel_form` says.

Of networks that take images, and of all that cut, mirror or normalise their rows as images.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.backbones import load_backbone
from fedsolve.data.backbones.common import require
from fedsolve.data.backbones.pixels import Pixels
from fedsolve.data.datasets import is_address, load_dataset
from fedsolve.data.datasets.dataset_address import Address
from fedsolve.data.datasets.tabular import OPTIONS as TABLES
from fedsolve.data.image_rows import is_images
from fedsolve.data.tables import Table
from fedsolve.gradient import networks
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.pixel_form import (
    backbone_for,
    check_form,
    is_treated,
    pixel_address,
    takes_images,
)
from fedsolve.schema import Schema

_ROWS = 16384
NOTED = "backbone"
"""Under which name of its parameters a model file keeps the address that made its rows."""


def for_training(method: GradientMethod, given: dict[str, Any]) -> tuple[GradientMethod, str | None]:
    """The method with the shape of the dataset's images, and the backbone that gives its rows.

    Both stay as they are where the network takes features that are not treated as images, or the data are no
    images.
    """
    named: str | None = given["backbone"]
    schema: Schema | None = given["schema"]
    shape, treated = method.image_shape, is_treated(method.parameters())
    if not (treated or takes_images(method.network, shape)) or not is_address(given["data"]):
        return method, named
    if Address.parse(given["data"]).scheme in TABLES:
        return method, named
    dataset = load_dataset(given["data"], given["root"])
    if treated and schema is not None and schema.extractor is not None:
        check_form(schema.extractor)
        named = named or schema.extractor.address or None
    address = named
    if treated:
        address = backbone_for(dataset, named, method.network, shape)
    elif dataset.is_images:
        address = pixel_address(named, method.network, shape)
    images = dataset.train.inputs
    if isinstance(images, np.ndarray) or shape is not None:
        return method, address
    assert address is not None
    pixels = load_backbone(address)
    assert isinstance(pixels, Pixels)
    pixels.extract(images.read(slice(0, 1)))
    assert pixels.shape is not None
    return dataclasses.replace(method, shape=",".join(map(str, pixels.shape))), address


def for_model(model: GradientModel, data: str, given: dict[str, Any]) -> str | None:
    """The backbone that gives the rows a model takes; what was named where the model takes features."""
    named: str | None = given["backbone"]
    network, text = model.parameters["network"], model.parameters["shape"]
    shape = None if text is None else [int(size) for size in text.split(",")]
    as_images = takes_images(network, shape) or is_treated(model.parameters)
    if not as_images or not _holds_images(data, given["root"]):
        return named
    noted = model.parameters.get(NOTED)
    if noted is not None and named in (None, noted):
        return str(noted)
    source = None if model.schema is None else model.schema.extractor
    if named is None and source is not None and source.address:
        return None  # the schema knows it
    return pixel_address(named, network, networks.input_shape(network, model.features, shape) or shape)


def _holds_images(data: str, root: str | None) -> bool:
    if not is_address(data):
        return is_images(data)
    return Address.parse(data).scheme == "folder" or load_dataset(data, root).is_images


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
