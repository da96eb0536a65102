"""How rows become images that a network takes: random crops and flips in training, one scale for its pixels.

A training image gets a black margin of `crop` pixels, a window of the image's own size is cut out at a random
place, and with chance `flip` it is mirrored left to right; then every channel is normalised,

    (p - pixel_mean) / pixel_deviation,   p from 0 (black) to 1 (white)

Rows of bytes are scaled to [-1, 1] before; other numbers count as such already, so black is -1. Crops and
flips are drawn for every row of every batch of a round, in that order, from the streams (seed, "crop",
client, round) and (seed, "flip", client, round); where a client trains, and with whom, does not matter. The
pixels are moved where the network is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array, stream
from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.errors import DataError
from fedsolve.gradient import networks

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

BLACK = -1.0
TOP, LEFT, MIRRORED = range(3)
"""What a move says of a row: where the window begins in the image with its margin, whether it is mirrored."""


class ImageInputs:
    """Rows as a network takes them, augmented where moves are given.

    parameters: of a method or a model. precision: theirs when None. moved: whether there are crops or flips.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        features: int,
        device: torch.device | str = "cpu",
        precision: str | None = None,
    ) -> None:
        network, shape = parameters["network"], networks.shape_from(parameters["shape"])
        mean, deviation = parameters["pixel_mean"], parameters["pixel_deviation"]
        crop, flip, precision = parameters["crop"], parameters["flip"], precision or parameters["precision"]
        stored = None if shape is None else networks.checked_shape(shape, features)
        self._dtype: torch.dtype = getattr(torch, precision)
        self._taken = networks.input_shape(network, features, shape)
        self.crop = crop
        self.moved = bool(crop or flip)
        self._image = self._taken
        self._shift: Tensor | None = None
        if not self.moved and mean is None:
            return
        # Heads take images flat, and then their shape must be given.
        self._image = self._taken or stored
        if self._image is None:
            raise DataError(
                "crop, flip, pixel_mean and pixel_deviation are for images. Give shape "
                f"(channels,height,width) where a network takes rows of pixels ({features} of them here), or "
                "leave these parameters out."
            )
        if crop >= min(self._image[1:]):
            raise DataError(
                f"crop must be smaller than the sides of an image, or a window may hold nothing of it; got "
                f"{crop} for images of {self._image[1]} x {self._image[2]}."
            )
        if mean is not None and deviation is not None:
            shift, scale = (
                torch.tensor(_numbers(text, name, self._image[0]), dtype=torch.float64).reshape(-1, 1, 1)
                for text, name in ((mean, "pixel_mean"), (deviation, "pixel_deviation"))
            )
            # Of pixels in [-1, 1], which are 2 p - 1.
            self._shift = (2 * shift - 1).to(device, self._dtype)
            self._scale = (2 * scale).to(device, self._dtype)

    def read(self, rows: Tensor, moves: Tensor | None = None) -> Tensor:
        """Inputs of the network from rows as they are stored; moves (rows, 3) for images in training."""
        inputs = networks.as_inputs(rows, self._image, self._dtype)
        if moves is not None:
            inputs = moved(inputs, moves, self.crop)
        if self._shift is not None:
            inputs = inputs.sub(self._shift).div_(self._scale)
        return inputs if self._taken == self._image else inputs.flatten(1)


def plan_moves(
    method: GradientMethod, lengths: Array, clients: Sequence[str], round_: int, rows: int
) -> Array:
    """The moves of all batches of a round, (clients, steps, rows, 3); a row that is padding stays in place.

    lengths: rows of each client's batches (clients, steps).
    """
    moves = np.zeros((*lengths.shape, rows, 3), dtype=np.int64)
    moves[..., :MIRRORED] = method.crop
    real = np.arange(rows) < lengths[..., None]
    for client, name in enumerate(clients):
        moves[client][real[client]] = draw_moves(method, int(lengths[client].sum()), round_, name)
    return moves


def draw_moves(method: GradientMethod, count: int, round_: int, client: str) -> Array:
    """One client's moves of a round (count, 3), in the order in which its rows are trained on."""
    drawn = np.zeros((count, 3), dtype=np.int64)
    if method.crop:
        places = stream(method.seed, "crop", client, round_)
        drawn[:, :MIRRORED] = places.integers(0, 2 * method.crop + 1, (count, 2))
    if method.flip:
        drawn[:, MIRRORED] = stream(method.seed, "flip", client, round_).random(count) < method.flip
    return drawn


def moved(images: Tensor, moves: Tensor, crop: int) -> Tensor:
    """Images (rows, C, H, W), each with a margin added, cropped and mirrored as its row of `moves` says."""
    rows, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, (crop, crop, crop, crop), value=BLACK) if crop else images
    down, along = torch.arange(height, device=device), torch.arange(width, device=device)
    across = torch.where(moves[:, MIRRORED, None] != 0, width - 1 - along, along)
    cut = padded[
        torch.arange(rows, device=device)[:, None, None],
        :,
        (moves[:, TOP, None] + down)[:, :, None],
        (moves[:, LEFT, None] + across)[:, None, :],
    ].permute(0, 3, 1, 2)
    # On a GPU that is the layout convolutions want already.
    return cut if device.type == "cuda" else cut.contiguous()


def check_parameters(method: GradientMethod) -> None:
    """Refuse image parameters that make no sense for any images."""
    if (method.pixel_mean is None) != (method.pixel_deviation is None):
        raise DataError(
            "pixel_mean and pixel_deviation go together; got "
            f"{method.pixel_mean!r} and {method.pixel_deviation!r}."
        )
    if method.pixel_mean is not None and method.pixel_deviation is not None:
        _numbers(method.pixel_mean, "pixel_mean")
        if min(_numbers(method.pixel_deviation, "pixel_deviation")) <= 0:
            raise DataError(f"pixel_deviation must be positive; got {method.pixel_deviation!r}.")


def _numbers(text: Any, name: str, channels: int | None = None) -> list[float]:
    try:
        numbers = [float(part) for part in str(text).split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise DataError(
            f"{name} is a number, or one for each channel joined by commas, such as 0.49,0.48,0.45; "
            f"got {text!r}."
        )
    if channels is not None and len(numbers) not in (1, channels):
        raise DataError(f"{name} has {len(numbers)} numbers ({text}), and the images {channels} channels.")
    return numbers
