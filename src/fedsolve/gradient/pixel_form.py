"""In which form images reach a network that reads them as images: channel after channel, in [-1, 1].

Those are the numbers that a gradient method makes of images given as bytes, so that it does not matter
whether they come from a dataset or from an array. Rows that are cut, mirrored or normalised as images have
this form whatever the network: pixels that are read here get it, and another one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsolve.data.backbones import load_backbone
from fedsolve.data.backbones.backbone_address import split_address
from fedsolve.data.backbones.pixels import ORDERS, Pixels
from fedsolve.data.datasets.dataset import Dataset
from fedsolve.errors import DataError
from fedsolve.gradient import networks
from fedsolve.schema import Extractor

DEFAULTS = {"order": "channels", "normalise": "half"}
FORM = "&".join(f"{name}={value}" for name, value in DEFAULTS.items())
TREATING = "crop, flip, pixel_mean and pixel_deviation"
_HALF = {"scale": 255.0, "mean": [0.5], "std": [0.5]}


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
    kind, _, options = split_address(named)
    if kind != "pixels" and takes_images(network, shape):
        raise DataError(
            f"network '{network}' takes images, and backbone '{named}' gives features. Leave out --backbone, "
            "or name pixels:SIZE; on features train a linear network or mlp:256."
        )
    if kind != "pixels":
        raise _no_pixels(named)
    said = {"normalise": ("normalise", "mean", "std")}
    missing = [
        f"{name}={value}"
        for name, value in DEFAULTS.items()
        if not any(map(options.has, said.get(name, (name,))))
    ]
    address = named
    if missing:
        address = f"{named}{'&' if '?' in named else '?'}{'&'.join(missing)}"
    if treated:
        pixels = load_backbone(address)
        assert isinstance(pixels, Pixels)
        check_form(Extractor.of(named, pixels.identity, pixels.width or 0))
    return address


def check_form(source: Extractor) -> None:
    """Refuse rows to be treated as images that are no pixels, or pixels in another form."""
    if source.recipe.get("name") != "pixels":
        raise _no_pixels(source.name)
    order = source.recipe.get("order", ORDERS[0])
    scaled = {name: source.preprocessing.get(name) for name in _HALF}
    phrases = []
    if order != DEFAULTS["order"]:
        phrases.append(f"in the order of {order}")
    # One number for all channels, or the same one for each.
    if any(not value or {*_listed(value)} != {*_listed(_HALF[name])} for name, value in scaled.items()):
        phrases.append("on another scale than [-1, 1]")
    if phrases:
        raise DataError(
            f"backbone '{source.name}' gives pixels {' and '.join(phrases)}, and {TREATING} are for pixels "
            f"channel after channel in [-1, 1]. Give it {FORM} instead, or leave these parameters out."
        )


def _listed(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _no_pixels(named: str) -> DataError:
    return DataError(
        f"{TREATING} are for images, and '{named}' gives features. Let the rows be pixels "
        f"(pixels:SIZE?{FORM}), or leave these parameters out."
    )
