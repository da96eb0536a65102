"""`pixels[:SIZE]`: no network at all; the pixels themselves, scaled to [0, 1], row after row.

`order=channels` gives one channel after the other instead, as networks that train on images read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import CHANNELS, Preprocessing, in_pieces, parse_size, prepare

VERSION = 1
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
        about = {"name": self.name, "version": VERSION, "preprocessing": self.preprocessing.as_dict()}
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
