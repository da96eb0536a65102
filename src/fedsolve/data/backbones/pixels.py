"""`pixels[:SIZE]`: no network at all; the pixels themselves, scaled to [0, 1], row after row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fedsolve.container import Array
from fedsolve.data.backbones.address import Options
from fedsolve.data.backbones.common import PIECE
from fedsolve.data.backbones.preprocessing import CHANNELS, Preprocessing, parse_size, prepare
from fedsolve.errors import DataError

VERSION = 1


def load(target: str, options: Options, cache: Path | None) -> Pixels:
    """`pixels` for images of one size; `pixels:32` or `pixels:28x20` (height x width) resizes them."""
    size = parse_size(target, f"{options.address}: the size") if target else None
    base = Preprocessing(size=size, channels="any")
    preprocessing = base.adjusted(options, ("interpolation", "channels", "shorter_side"))
    options.finish()
    return Pixels(preprocessing)


class Pixels:
    """Pixels / 255 as features (images, height * width * channels); gray images keep one channel."""

    name = "pixels"
    runtime = f"Pillow {PIL.__version__}"

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing
        self._shape: tuple[int, ...] | None = None
        count = CHANNELS[preprocessing.channels]
        if preprocessing.size is not None and count is not None:
            self._shape = (*preprocessing.size, count)

    @property
    def width(self) -> int | None:
        """Features of an image; None until size and channels are known from the first images."""
        return None if self._shape is None else int(np.prod(self._shape))

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "version": VERSION, "preprocessing": self.preprocessing.as_dict()}

    def extract(self, images: Sequence[Array]) -> Array:
        """Features of images (height, width, channels) of bytes; all must come out in one shape."""
        pieces = []
        for start in range(0, len(images), PIECE):
            batch = prepare(images[start : start + PIECE], self.preprocessing, "nhwc")
            self._shape = self._shape or batch.shape[1:]
            if batch.shape[1:] != self._shape:
                raise DataError(
                    f"images differ in shape: {batch.shape[1:]} after {self._shape}. Give a size, such as "
                    "pixels:32, and channels=gray or channels=rgb when both kinds occur."
                )
            pieces.append(batch.reshape(len(batch), -1))
        return np.concatenate(pieces) if pieces else np.empty((0, self.width or 0), dtype=np.float32)
