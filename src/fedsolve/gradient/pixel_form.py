"""In which form images reach a network that reads them as images: channel after channel, in [-1, 1].

Those are the numbers that a gradient method makes of images given as bytes, so that it does not matter
whether they come from a dataset or from an array. Rows that are cut, mirrored or normalised as images have
this form whatever the network: pixels that are read here get it, and another one is refused.

`for_training` and `for_model` say on the command line which backbone gives such rows.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.data.address import Address
from fedsolve.data.backbones import load_backbone
from fedsolve.data.backbones.preprocessing import ORDERS, Pixels
from fedsolve.data.datasets import load_dataset
from fedsolve.data.datasets.dataset import Dataset
from fedsolve.data.datasets.tabular import OPTIONS as TABLES
from fedsolve.data.images import is_images
from fedsolve.data.row_reader import is_address
from fedsolve.errors import DataError, require
from fedsolve.gradient import networks
from fedsolve.tables.schema import Extractor, Schema

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod
    from fedsolve.gradient.network_model import GradientModel

ORDER, SCALE = "order=channels", "normalise=half"
FORM = f"{ORDER}&{SCALE}"
TREATING = "crop, flip, pixel_mean and pixel_deviation"
_HALF = {"scale": 255.0, "mean": 0.5, "std": 0.5}


def is_treated(parameters: Mapping[str, Any]) -> bool:
    """Whether a gradient method with these parameters cuts, mirrors or normalises its rows as images."""
    return bool(parameters.get("crop") or parameters.get("flip")) or parameters.get("pixel_mean") is not None


def takes_images(network: str, shape: Sequence[int] | None) -> bool:
    """Whether a network takes (rows, channels, height, width) rather than rows of features."""
    features = next(iter(networks.SHAPES)) if shape is None else math.prod(shape)
    return networks.input_shape(network, features, shape) is not None


def backbone_for(
    dataset: Dataset, named: str | None, network: str, shape: Sequence[int] | None
) -> str | None:
    """The backbone by which the rows of a dataset are treated as images; features of another are refused.

    named: the one that was asked for, if any; it stays where the dataset has features alone.
    """
    if not dataset.is_images:
        source = None if dataset.schema is None else dataset.schema.extractor
        if source is not None:
            check_form(source)
        return named
    if shape is None and not takes_images(network, shape):
        raise DataError(
            f"{TREATING} are for images. Give shape (channels,height,width) where network '{network}' takes "
            "rows of pixels, or leave these parameters out."
        )
    return pixel_address(named, network, shape, treated=True)


def pixel_address(
    named: str | None, network: str, shape: Sequence[int] | None, *, treated: bool = False
) -> str:
    """The address of a `pixels` backbone whose rows a network takes, from the one that was named, if any.

    Order and normalisation are filled in where the address does not say them; without an address, images
    get the given shape. treated: another order and normalisation are refused.
    """
    if named is None:
        named = "pixels"
        if shape is not None:
            channels = {1: "channels=gray", 3: "channels=rgb"}.get(shape[0])
            named = f"pixels:{shape[1]}x{shape[2]}" + (f"?{channels}" if channels else "")
    address = Address.parse(named, strict=True)
    if address.scheme != "pixels":
        if not takes_images(network, shape):
            raise _no_pixels(named)
        raise DataError(
            f"network '{network}' takes images, and backbone '{named}' gives features. Leave out --backbone, "
            "or name pixels:SIZE; on features train a linear network or mlp:256."
        )
    filled = named
    for default, said in ((ORDER, {"order"}), (SCALE, {"normalise", "mean", "std"})):
        if not said & {*address.options}:
            filled += f"{'&' if '?' in filled else '?'}{default}"
    if treated:
        pixels = load_backbone(filled)
        assert isinstance(pixels, Pixels)
        check_form(Extractor.of(named, pixels.identity, pixels.width or 0))
    return filled


def check_form(source: Extractor) -> None:
    """Refuse rows to be treated as images that are no pixels, or pixels in another form."""
    if source.recipe.get("name") != "pixels":
        raise _no_pixels(source.name)
    order = source.recipe.get("order", ORDERS[0])
    phrases = [] if order == "channels" else [f"in the order of {order}"]
    # One number for all channels, or the same one for each.
    if not all(np.all(source.preprocessing.get(name) == np.array(value)) for name, value in _HALF.items()):
        phrases.append("on another scale than [-1, 1]")
    if phrases:
        raise DataError(
            f"backbone '{source.name}' gives pixels {' and '.join(phrases)}, and {TREATING} are for pixels "
            f"channel after channel in [-1, 1]. Give it {FORM} instead, or leave these parameters out."
        )


def _no_pixels(named: str) -> DataError:
    return DataError(
        f"{TREATING} are for images, and '{named}' gives features. Let the rows be pixels "
        f"(pixels:SIZE?{FORM}), or leave these parameters out."
    )


NOTED = "backbone"
"""Under which name of its parameters a model file keeps the address that made its rows."""


def for_training(
    method: GradientMethod, data: str, schema: Schema | None, named: str | None, root: str | None
) -> tuple[GradientMethod, str | None]:
    """The method with the shape of the dataset's images, and the backbone that gives its rows.

    named: the backbone that a person names. root: where datasets are.

    Both stay as they are where the network takes features that are not treated as images, or the data are no
    images.
    """
    shape, treated = method.image_shape, is_treated(method.parameters())
    is_table = not is_address(data) or Address.parse(data).scheme in TABLES
    if is_table or not (treated or takes_images(method.network, shape)):
        return method, named
    dataset = load_dataset(data, root)
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


def for_model(model: GradientModel, data: str, named: str | None, root: str | None) -> str | None:
    """The backbone for the rows of a model; the given one if the model takes features."""
    network, shape = model.parameters["network"], networks.shape_from(model.parameters["shape"])
    as_images = takes_images(network, shape) or is_treated(model.parameters)
    if not as_images or not _holds_images(data, root):
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
