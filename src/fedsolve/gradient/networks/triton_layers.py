"""Two layers of image networks as Triton kernels, for maps in float32 with the channels last.

    normalise     BatchNorm by statistics of the batch, with the rectifier behind it: maps are read twice and
                  written once, in backward two pairs are read and one map is written
    depthwise     3x3 depthwise convolutions of any number of rows without a plan: cuDNN plans MobileNetV2's
                  for 3.7 s for every new number of rows, and short last batches have many

Both give the same bits each time: sums are taken in parts whose number follows from the shape, and parts are
added in their order. Torch's builds for CUDA on Linux bring Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

PROGRAMS = 528
"""Programs that keep a large GPU busy, four for each of its 132 multiprocessors."""

PARTS = 128
"""Into how many parts a sum over all positions is divided at most."""

TALL, WIDE = 64, 32
"""Positions and channels of a tile."""


# -- normalisation -----------------------------------------------------------------------------------


@triton.jit
def _moments(x, first, second, rows, channels, length, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Sums of x - x[0] and of its square, over the rows of a part."""
    part = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    origin = tl.load(x + c, mask=inside, other=0.0)
    one = tl.zeros([TALL, WIDE], tl.float32)
    two = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(part * length, tl.minimum(part * length + length, rows), TALL):
        r = start + tl.arange(0, TALL)
        there = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=there, other=0.0) - origin[None, :]
        value = tl.where(there, value, 0.0)
        one += value
        two += value * value
    tl.store(first + part * channels + c, tl.sum(one, 0), mask=inside)
    tl.store(second + part * channels + c, tl.sum(two, 0), mask=inside)


@triton.jit
def _whole(parts, count, channels, c, inside, PARTS: tl.constexpr):
    """The sum of all parts, for some channels."""
    p = tl.arange(0, PARTS)
    there = (p < count)[:, None] & inside[None, :]
    return tl.sum(tl.load(parts + p[:, None] * channels + c[None, :], mask=there, other=0.0), 0)


@triton.jit
def _normalised(
    x, y, first, second, weight, bias, means, scales, running_mean, running_var, momentum, eps, ceiling,
    rows, channels, count, length,
    RECTIFIED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y from x and the parts of its moments; the first program also keeps the statistics."""
    block = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    shift = _whole(first, count, channels, c, inside, PARTS) / rows
    square = _whole(second, count, channels, c, inside, PARTS) / rows
    mean = tl.load(x + c, mask=inside, other=0.0) + shift
    spread = square - shift * shift
    spread = tl.where(spread < 0.0, 0.0, spread)
    scale = 1.0 / tl.sqrt(spread + eps)
    if block == 0:
        tl.store(means + c, mean, mask=inside)
        tl.store(scales + c, scale, mask=inside)
        old = tl.load(running_mean + c, mask=inside, other=0.0)
        tl.store(running_mean + c, old * (1.0 - momentum) + mean * momentum, mask=inside)
        old = tl.load(running_var + c, mask=inside, other=0.0)
        fair = spread * (rows / (rows - 1.0))
        tl.store(running_var + c, old * (1.0 - momentum) + fair * momentum, mask=inside)
    w = tl.load(weight + c, mask=inside, other=0.0)
    b = tl.load(bias + c, mask=inside, other=0.0)
    for start in range(block * length, tl.minimum(block * length + length, rows), TALL):
        r = start + tl.arange(0, TALL)
        there = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=there, other=0.0)
        value = (value - mean[None, :]) * scale[None, :] * w[None, :] + b[None, :]
        if RECTIFIED:
            # Comparisons, not a minimum and a maximum: what is not a number stays so.
            value = tl.where(value < 0.0, 0.0, value)
            value = tl.where(value > ceiling, ceiling, value)
        tl.store(y + at, value, mask=there)


@triton.jit
def _passed(value, error, w, b, ceiling, RECTIFIED: tl.constexpr):
    """The error in front of the rectifier, from normalised values."""
    if RECTIFIED:
        output = value * w[None, :] + b[None, :]
        error = tl.where((output <= 0.0) | (output >= ceiling), 0.0, error)
    return error


@triton.jit
def _error_moments(
    x, error, first, second, weight, bias, means, scales, ceiling, rows, channels, length,
    RECTIFIED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of the error, and of the error times the normalised values, over the rows of a part."""
    part = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    mean = tl.load(means + c, mask=inside, other=0.0)
    scale = tl.load(scales + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0)
    b = tl.load(bias + c, mask=inside, other=0.0)
    one = tl.zeros([TALL, WIDE], tl.float32)
    two = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(part * length, tl.minimum(part * length + length, rows), TALL):
        r = start + tl.arange(0, TALL)
        there = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        value = (tl.load(x + at, mask=there, other=0.0) - mean[None, :]) * scale[None, :]
        given = tl.load(error + at, mask=there, other=0.0)
        given = _passed(value, given, w, b, ceiling, RECTIFIED)
        one += given
        two += tl.where(there, given * value, 0.0)
    tl.store(first + part * channels + c, tl.sum(one, 0), mask=inside)
    tl.store(second + part * channels + c, tl.sum(two, 0), mask=inside)


@triton.jit
def _error_back(
    x, error, back, first, second, weight, bias, means, scales, to_weight, to_bias, ceiling,
    rows, channels, count, length,
    RECTIFIED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The error in front of the normalisation; the first program also keeps those of weight and bias."""
    block = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    total = _whole(first, count, channels, c, inside, PARTS)
    along = _whole(second, count, channels, c, inside, PARTS)
    if block == 0:
        tl.store(to_bias + c, total, mask=inside)
        tl.store(to_weight + c, along, mask=inside)
    mean = tl.load(means + c, mask=inside, other=0.0)
    scale = tl.load(scales + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0)
    b = tl.load(bias + c, mask=inside, other=0.0)
    total /= rows
    along /= rows
    for start in range(block * length, tl.minimum(block * length + length, rows), TALL):
        r = start + tl.arange(0, TALL)
        there = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        value = (tl.load(x + at, mask=there, other=0.0) - mean[None, :]) * scale[None, :]
        given = tl.load(error + at, mask=there, other=0.0)
        given = _passed(value, given, w, b, ceiling, RECTIFIED)
        given = (given - total[None, :] - value * along[None, :]) * (scale * w)[None, :]
        tl.store(back + at, given, mask=there)


class Normalise(Function):
    """BatchNorm by statistics of the batch and, where a ceiling is given, a rectifier from 0 to it."""

    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        ceiling: float | None,
    ) -> Tensor:
        maps = maps.contiguous(memory_format=torch.channels_last)
        rows, channels = _positions(maps), maps.shape[1]
        ctx.rectified, ctx.ceiling = ceiling is not None, 0.0 if ceiling is None else ceiling
        result = torch.empty_like(maps)
        count, length, across = _parts(rows, channels, PARTS)
        first, second = maps.new_empty(2, count, channels)
        means, scales = maps.new_empty(2, channels)
        blocks, tall, _ = _parts(rows, channels, rows)
        with torch.cuda.device_of(maps):
            _moments[count, across](maps, first, second, rows, channels, length, TALL, WIDE)
            _normalised[blocks, across](
                maps, result, first, second, weight, bias, means, scales, running_mean, running_var,
                momentum, eps, ctx.ceiling, rows, channels, count, tall, ctx.rectified, TALL, WIDE, PARTS,
            )  # fmt: skip
        ctx.save_for_backward(maps, weight, bias, means, scales)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        maps, weight, bias, means, scales = ctx.saved_tensors
        error = gradients[0].contiguous(memory_format=torch.channels_last)
        rows, channels = _positions(maps), maps.shape[1]
        back, to_weight, to_bias = torch.empty_like(maps), torch.empty_like(weight), torch.empty_like(bias)
        count, length, across = _parts(rows, channels, PARTS)
        first, second = maps.new_empty(2, count, channels)
        blocks, tall, _ = _parts(rows, channels, rows)
        with torch.cuda.device_of(maps):
            _error_moments[count, across](
                maps, error, first, second, weight, bias, means, scales, ctx.ceiling, rows, channels, length,
                ctx.rectified, TALL, WIDE,
            )  # fmt: skip
            _error_back[blocks, across](
                maps, error, back, first, second, weight, bias, means, scales, to_weight, to_bias,
                ctx.ceiling, rows, channels, count, tall, ctx.rectified, TALL, WIDE, PARTS,
            )  # fmt: skip
        return back, to_weight, to_bias, None, None, None, None, None


def _positions(maps: Tensor) -> int:
    """Rows times pixels."""
    return maps.shape[0] * maps.shape[2] * maps.shape[3]


def _parts(rows: int, channels: int, most: int, layers: int = 1) -> tuple[int, int, int]:
    """How the rows are divided: parts, rows of each, and tiles of channels across; layers: of programs."""
    across = triton.cdiv(channels, WIDE)
    tiles = max(1, triton.cdiv(rows, TALL))
    length = triton.cdiv(tiles, max(1, min(most, tiles, PROGRAMS // (across * layers)))) * TALL
    return triton.cdiv(rows, length), length, across


# -- depthwise convolution -----------------------------------------------------------------------------


@triton.jit
def _shifted(x, image, h, v, here, height, width, channels, c, inside):
    """Values of x at these positions, zero outside."""
    there = here & (h >= 0) & (h < height) & (v >= 0) & (v < width)
    at = ((image * height + h) * width + v).to(tl.int64)[:, None] * channels + c[None, :]
    return tl.load(x + at, mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit
def _convolved(
    x, weight, y, rows, channels, height, width, tall, wide,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y (tall x wide maps) from x (height x width maps), zeros around them."""
    r = tl.program_id(0) * TALL + tl.arange(0, TALL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    image, down, along = r // (tall * wide), (r // wide) % tall, r % wide
    total = tl.zeros([TALL, WIDE], tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            h = down * STRIDE + i - 1
            v = along * STRIDE + j - 1
            value = _shifted(x, image, h, v, r < rows, height, width, channels, c, inside)
            w = tl.load(weight + c * 9 + (i * 3 + j), mask=inside, other=0.0)
            total += value * w[None, :]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(y + at, total, mask=(r < rows)[:, None] & inside[None, :])


@triton.jit
def _convolved_back(
    error, weight, back, rows, channels, height, width, tall, wide,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The error of x (height x width maps) from that of y (tall x wide maps)."""
    r = tl.program_id(0) * TALL + tl.arange(0, TALL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    image, down, along = r // (height * width), (r // width) % height, r % width
    total = tl.zeros([TALL, WIDE], tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            h = down + 1 - i
            v = along + 1 - j
            here = (r < rows) & (h >= 0) & (v >= 0) & (h % STRIDE == 0) & (v % STRIDE == 0)
            h, v = h // STRIDE, v // STRIDE
            value = _shifted(error, image, h, v, here, tall, wide, channels, c, inside)
            w = tl.load(weight + c * 9 + (i * 3 + j), mask=inside, other=0.0)
            total += value * w[None, :]
    at = r.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(back + at, total, mask=(r < rows)[:, None] & inside[None, :])


@triton.jit
def _weight_parts(
    x, error, parts, rows, channels, length, height, width, tall, wide,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The error of one row of the kernel's weights, summed over the rows of a part."""
    part, i = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = c < channels
    left = tl.zeros([TALL, WIDE], tl.float32)
    middle = tl.zeros([TALL, WIDE], tl.float32)
    right = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(part * length, tl.minimum(part * length + length, rows), TALL):
        r = start + tl.arange(0, TALL)
        here = r < rows
        image, down, along = r // (tall * wide), (r // wide) % tall, r % wide
        h, v = down * STRIDE + i - 1, along * STRIDE
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        given = tl.load(error + at, mask=here[:, None] & inside[None, :], other=0.0)
        left += given * _shifted(x, image, h, v - 1, here, height, width, channels, c, inside)
        middle += given * _shifted(x, image, h, v, here, height, width, channels, c, inside)
        right += given * _shifted(x, image, h, v + 1, here, height, width, channels, c, inside)
    at = parts + (part * channels + c) * 9 + i * 3
    tl.store(at, tl.sum(left, 0), mask=inside)
    tl.store(at + 1, tl.sum(middle, 0), mask=inside)
    tl.store(at + 2, tl.sum(right, 0), mask=inside)


class Depthwise(Function):
    """3x3 depthwise convolution with a margin of one; errors go back through `matrix` (weight or B)."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, matrix: Tensor, stride: int) -> Tensor:
        maps = maps.contiguous(memory_format=torch.channels_last)
        images, channels, height, width = maps.shape
        tall, wide = (triton.cdiv(size, stride) for size in (height, width))
        result = torch.empty(
            (images, channels, tall, wide),
            dtype=maps.dtype,
            device=maps.device,
            memory_format=torch.channels_last,
        )
        rows = images * tall * wide
        with torch.cuda.device_of(maps):
            _convolved[triton.cdiv(rows, TALL), triton.cdiv(channels, WIDE)](
                maps, weight.contiguous(), result, rows, channels, height, width, tall, wide,
                stride, TALL, WIDE,
            )  # fmt: skip
        ctx.save_for_backward(maps, matrix)
        ctx.stride = stride
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        maps, matrix = ctx.saved_tensors
        error = gradients[0].contiguous(memory_format=torch.channels_last)
        images, channels, height, width = maps.shape
        tall, wide = error.shape[2:]
        to_maps = to_weight = None
        with torch.cuda.device_of(maps):
            if ctx.needs_input_grad[0]:
                to_maps = torch.empty_like(maps)
                rows = images * height * width
                _convolved_back[triton.cdiv(rows, TALL), triton.cdiv(channels, WIDE)](
                    error, matrix.contiguous(), to_maps, rows, channels, height, width, tall, wide,
                    ctx.stride, TALL, WIDE,
                )  # fmt: skip
            if ctx.needs_input_grad[1]:
                rows = images * tall * wide
                count, length, across = _parts(rows, channels, PARTS, 3)
                parts = maps.new_empty(count, *matrix.shape)
                _weight_parts[count, across, 3](
                    maps, error, parts, rows, channels, length, height, width, tall, wide,
                    ctx.stride, TALL, WIDE,
                )  # fmt: skip
                to_weight = parts.sum(0)
        return to_maps, to_weight, None, None
