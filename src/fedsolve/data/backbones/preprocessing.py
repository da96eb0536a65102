"""From decoded images to what a backbone reads, channels, resize, crop, normalise, and checks of its output.

All of it is part of a backbone's identity: features made with another size or mean are other features.

`pixels[:SIZE]` is no network at all: the pixels themselves, scaled to [0, 1], row after row; with
`order=channels` one channel after the other, as networks that train on images read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
from PIL import Image

from fedsolve.arrays import Array
from fedsolve.data.address import Address, parse_whole
from fedsolve.errors import DataError, naming
from fedsolve.threads import usable_cores

Layout = Literal["nchw", "nhwc"]

FILTERS = {each.name.lower(): each for each in Image.Resampling}
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1, "any": None}
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5,), (0.5,)),
    "none": ((0.0,), (1.0,)),
}
# `normalise` sets mean and std together.
OPTIONS = ("size", "shorter_side", "interpolation", "scale", "mean", "std", "normalise", "channels")


@dataclass(frozen=True)
class Preprocessing:
    """What happens to an image before the backbone: resize, crop, `(pixel / scale - mean) / std`.

    size:          (height, width) in pixels that the backbone reads; None leaves images as they are.
    shorter_side:  the shorter side is first resized to this many pixels and `size` is cut out of the
                   middle; None resizes to `size` whatever the shape of the image.
    middle:        where the middle lies between two pixels: "down" the lower one, as in transformers; "even"
                   the even one, as in torchvision.
    interpolation: Pillow's filter.
    scale:         what a pixel (0 to 255) is divided by.
    mean, std:     one number for all channels or one for each, in units of the scaled pixel.
    channels:      "rgb" or "bgr" (gray images are repeated), "gray" (colours by ITU-R 601 luma), or
                   "any" (as the image has them).
    """

    size: tuple[int, int] | None = (224, 224)
    shorter_side: int | None = None
    interpolation: str = "bilinear"
    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    channels: str = "rgb"
    middle: str = "down"

    def __post_init__(self) -> None:
        if self.interpolation not in FILTERS:
            raise DataError(f"interpolation is one of {', '.join(FILTERS)}; got '{self.interpolation}'.")
        if self.channels not in CHANNELS:
            raise DataError(f"channels is one of {', '.join(CHANNELS)}; got '{self.channels}'.")
        if self.shorter_side is not None and (self.size is None or self.shorter_side < max(self.size)):
            raise DataError(
                f"the shorter side must be resized to at least the size that is cut out of the middle; "
                f"got {self.shorter_side} pixels and size {self.size}."
            )
        count = CHANNELS[self.channels]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if count is None and len(values) != 1:
                raise DataError(
                    f"{name} takes one number where images keep the channels that they have; got {values}. "
                    "Say which channels there are: channels=rgb takes one number for each of 3."
                )
            if len(values) not in (1, count):
                raise DataError(f"{name} takes one number or one for each of {count} channels; got {values}.")
        if self.scale <= 0 or min(self.std) <= 0:
            raise DataError(f"scale and std must be positive; got scale {self.scale} and std {self.std}.")

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        parts = {name: list(part) if isinstance(part, tuple) else part for name, part in vars(self).items()}
        # The usual middle is not mentioned, so that features stored before there was another keep their key.
        return {name: part for name, part in parts.items() if (name, part) != ("middle", "down")}

    def adjusted(self, address: Address) -> Preprocessing:
        """This preprocessing with the changes that an address asks for.

        A new size without a new shorter side keeps the share of the image that is cut out.
        """
        size = address.options.get("size")
        wanted = {
            "size": None if size is None else parse_size(size, f"{address.text}: size"),
            "shorter_side": address.whole("shorter_side"),
            "interpolation": address.word("interpolation", tuple(FILTERS)),
            "scale": address.number("scale"),
            "mean": address.numbers("mean"),
            "std": address.numbers("std"),
            "channels": address.word("channels", ("rgb", "bgr", "gray")),
        }
        changes: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        normalise = address.word("normalise", tuple(NORMALISATIONS))
        if normalise is not None:
            if "mean" in changes or "std" in changes:
                raise DataError(f"{address.text}: give normalise, or mean and std, but not both.")
            changes["mean"], changes["std"] = NORMALISATIONS[normalise]
        if "size" in changes and self.size and self.shorter_side and "shorter_side" not in changes:
            changes["shorter_side"] = self.shorter_side * max(changes["size"]) // max(self.size)
        with naming(address.text):
            return replace(self, **changes)


def parse_size(text: str, what: str) -> tuple[int, int]:
    """(height, width) from `224` or `HEIGHTxWIDTH`; an error opens with `what`."""
    sides = [parse_whole(side, what) for side in text.split("x")]
    if len(sides) > 2:
        raise DataError(f"{what} is 224 or HEIGHTxWIDTH; got '{text}'.")
    return sides[0], sides[-1]


def prepare(
    images: Sequence[Array],
    preprocessing: Preprocessing,
    layout: Layout = "nchw",
    shape: tuple[int, ...] | None = None,
) -> Array:
    """Images (height, width, channels) of bytes as one float32 batch, resized in a pool of threads.

    The result has shape (images, channels, height, width), or (images, height, width, channels) in
    layout "nhwc". Each image is treated by itself, so its numbers do not depend on its neighbours.
    shape: (height, width, channels) that all must come out in; that of the first image when None.
    """
    if len(images) == 0:
        raise DataError("no images to prepare; give at least one.")
    # Resizing releases the interpreter lock, so threads are enough.
    with ThreadPoolExecutor(min(usable_cores(), len(images))) as pool:
        resized = list(pool.map(_resized, range(len(images)), images, [preprocessing] * len(images)))
    first = shape or resized[0].shape
    for number, image in enumerate(resized):
        if image.shape != first:
            sized = image.shape[:2] == first[:2]
            remedy = "choose channels=gray or channels=rgb for all" if sized else "give it a size: pixels:32"
            raise DataError(
                f"images differ in shape: {first} first, but {image.shape} in place {number} of the batch. "
                f"For the backbone, {remedy}."
            )
    height, width, channels = first
    # The 256 values a byte can become, for each channel, rounded once from float64.
    mean, std = (np.broadcast_to(each, channels)[:, None] for each in (preprocessing.mean, preprocessing.std))
    table = ((np.arange(256) / preprocessing.scale - mean) / std).astype(np.float32)
    batch: Array = np.empty((len(images), channels, height, width), dtype=np.float32)
    for target, image in zip(batch, resized, strict=True):
        for channel in range(channels):
            # "clip" lets numpy write into `out` directly; a byte cannot be out of range.
            np.take(table[channel], image[:, :, channel], out=target[channel], mode="clip")
    return np.ascontiguousarray(batch.transpose(0, 2, 3, 1)) if layout == "nhwc" else batch


def _resized(number: int, image: Array, preprocessing: Preprocessing) -> Array:
    """The image as bytes (height, width, channels) in the size and channels of the preprocessing."""
    image = _checked(number, image)
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    if preprocessing.channels == "gray" and picture.mode != "L":
        picture = picture.convert("L")
    if preprocessing.size is not None:
        picture = _cut(picture, preprocessing.size, preprocessing)
    pixels: Array = np.asarray(picture)
    if pixels.ndim == 2:
        # A view with stride 0: one plane in memory stands for all channels.
        pixels = np.broadcast_to(pixels[:, :, None], (*pixels.shape, CHANNELS[preprocessing.channels] or 1))
    return pixels[:, :, ::-1] if preprocessing.channels == "bgr" else pixels


def _cut(picture: Image.Image, size: tuple[int, int], preprocessing: Preprocessing) -> Image.Image:
    height, width = size
    how = FILTERS[preprocessing.interpolation]
    if preprocessing.shorter_side is None:
        return picture.resize((width, height), how)
    side, shorter = preprocessing.shorter_side, min(picture.size)
    # The longer side is cut down to whole pixels, as torchvision and transformers do.
    wide, high = (side if edge == shorter else int(side * edge / shorter) for edge in picture.size)
    halves = (wide - width) / 2, (high - height) / 2
    left, top = (round(half) if preprocessing.middle == "even" else int(half) for half in halves)
    return picture.resize((wide, high), how).crop((left, top, left + width, top + height))


def _checked(number: int, image: Any) -> Array:
    pixels: Array = np.asarray(image)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or pixels.size == 0:
        raise DataError(
            f"image {number} of the batch must be bytes (uint8) of shape (height, width, 1 or 3); "
            f"got {pixels.dtype} of shape {np.shape(image)}."
        )
    return pixels


# Images that go through a network at a time, so that memory is bounded however many there are.
PIECE = 64


def checked_features(output: Any, rows: int, what: str, remedy: str) -> Array:
    """The output of a network as float32 features (rows, width), all finite.

    Trailing dimensions of length 1, as average pooling leaves them, are dropped.
    """
    features: Array = np.asarray(output)
    while features.ndim > 2 and features.shape[-1] == 1:
        features = features[..., 0]
    if features.ndim != 2 or len(features) != rows or features.shape[1] == 0:
        raise DataError(
            f"{what} gives an output of shape {np.shape(output)} for {rows} image(s); features must have "
            f"shape (images, width). {remedy}"
        )
    features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        row, column = (int(place) for place in np.argwhere(~np.isfinite(features))[0])
        raise DataError(
            f"{what} gives {features[row, column]} in feature {column} of image {row} of the batch. "
            "Check scale, mean and std of its preprocessing, and the weights."
        )
    return features


def in_pieces(
    images: Sequence[Array], width: int | None, features: Callable[[Sequence[Array]], Array]
) -> Array:
    """What `features` gives of all images, some at a time; of none, (0, width)."""
    pieces = [features(images[start : start + PIECE]) for start in range(0, len(images), PIECE)]
    return np.concatenate(pieces) if pieces else np.empty((0, width or 0), dtype=np.float32)


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """SHA-256 over parts, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


# -- a backbone that is nothing but preprocessing ----------------------------------------------------

PIXELS_VERSION = 1
ORDERS = ("rows", "channels")


def load(address: Address, cache: Path | None) -> Pixels:
    """`pixels` for images of one size; `pixels:32` or `pixels:28x20` (height x width) resizes them."""
    address.allow("order", "interpolation", "channels", "shorter_side", "normalise", "mean", "std")
    size = parse_size(address.rest, f"{address.text}: the size") if address.rest else None
    preprocessing = Preprocessing(size=size, channels="any").adjusted(address)
    return Pixels(preprocessing, address.word("order", ORDERS) or ORDERS[0])


class Pixels:
    """Pixels / 255 as features (images, height * width * channels); gray images keep one channel.

    order: "rows", pixel after pixel with its channels together, or "channels", channel after channel.
    shape: (channels, height, width) of the images; None until they are known from the first ones.
    """

    name = "pixels"
    runtime = f"Pillow {PIL.__version__}"

    def __init__(self, preprocessing: Preprocessing, order: str = ORDERS[0]) -> None:
        self.preprocessing = preprocessing
        self.order = order
        self.shape: tuple[int, ...] | None = None
        count = CHANNELS[preprocessing.channels]
        if preprocessing.size is not None and count is not None:
            self.shape = (count, *preprocessing.size)

    @property
    def width(self) -> int | None:
        """Features of an image; None until size and channels are known from the first images."""
        return None if self.shape is None else int(np.prod(self.shape))

    @property
    def identity(self) -> dict[str, Any]:
        # The usual order is not mentioned, so that features stored before there was another keep their key.
        order = {} if self.order == ORDERS[0] else {"order": self.order}
        about = {"name": self.name, "version": PIXELS_VERSION, "preprocessing": self.preprocessing.as_dict()}
        return about | order

    def extract(self, images: Sequence[Array]) -> Array:
        """Features of images (height, width, channels) of bytes; all must come out in one shape."""

        def features(some: Sequence[Array]) -> Array:
            known = None if self.shape is None else (*self.shape[1:], self.shape[0])
            batch = prepare(some, self.preprocessing, shape=known)
            self.shape = batch.shape[1:]
            batch = batch.transpose(0, 2, 3, 1) if self.order == "rows" else batch
            return batch.reshape(len(batch), -1)

        return in_pieces(images, self.width, features)
