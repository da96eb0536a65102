"""Layers whose input gradient goes through another matrix than their weight.

Forward, weight gradient and bias gradient are the ordinary ones; only the gradient passed to the
input uses the feedback matrix B (FLFA, Eq. 11). The weight gradient does not depend on the weight's
values, so one ordinary backward call with B in the weight's place gives all three: no kernel more
than backpropagation needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedsolve.gradient.networks.mobilenet import DepthwiseConvolution, unplanned

_convolution_backward = torch.ops.aten.convolution_backward.default


class LinearFeedback(Function):
    """y = x wᵀ + bias; gradients gx = gy B, gw = gyᵀ x, gbias = sum of gy."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, matrix)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (error,) = gradients
        inputs, matrix = _saved(ctx, error)
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        rows = error if error.dim() == 2 else error.reshape(-1, error.shape[-1])
        to_input = to_weight = to_bias = None
        if need_input:
            to_input = rows.mm(matrix).view(inputs.shape)
        if need_weight:
            to_weight = rows.t().mm(inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1]))
        if need_bias:
            to_bias = rows.sum(0)
        return to_input, to_weight, to_bias, None


class ConvolutionFeedback(Function):
    """y = conv2d(x; w) + bias; gx is the transposed convolution of gy with B, gw and gbias are ordinary."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, matrix: Tensor, geometry: Any
    ) -> Tensor:
        ctx.save_for_backward(inputs, matrix)
        ctx.geometry = geometry
        stride, padding, dilation, _, _, groups = geometry
        return torch.conv2d(inputs, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (error,) = gradients
        inputs, matrix = _saved(ctx, error)
        needs = ctx.needs_input_grad[:3]
        sizes = (matrix.shape[0],) if needs[2] else None
        made = _convolution_backward(error, inputs, matrix, sizes, *ctx.geometry, needs)
        return (*made, None, None)


def _saved(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor]:
    inputs, matrix = ctx.saved_tensors
    if inputs.dtype is not error.dtype or matrix.dtype is not error.dtype:
        # Under autocast the layer computed in the error's lower precision.
        inputs, matrix = inputs.to(error.dtype), matrix.to(error.dtype)
    return inputs, matrix


def aligned(module: nn.Linear | nn.Conv2d, inputs: Tensor, matrix: Tensor) -> Tensor:
    """What the module gives for these inputs, with B = matrix in backward."""
    result: Tensor
    if isinstance(module, nn.Linear):
        result = LinearFeedback.apply(inputs, module.weight, module.bias, matrix)  # type: ignore[no-untyped-call]
        return result
    if inputs.dim() == 3:
        return aligned(module, inputs.unsqueeze(0), matrix).squeeze(0)
    padding, margins, mode = _padding(module)
    if margins is not None:
        inputs = F.pad(inputs, margins, mode=mode)
    if isinstance(module, DepthwiseConvolution):
        fused = module.fused(inputs, matrix)
        if fused is not None:
            return fused
        inputs = unplanned(inputs)
    geometry = module.stride, padding, module.dilation, False, (0, 0), module.groups
    result = ConvolutionFeedback.apply(inputs, module.weight, module.bias, matrix, geometry)  # type: ignore[no-untyped-call]
    return result


def _padding(module: nn.Conv2d) -> tuple[tuple[int, ...], list[int] | None, str]:
    """Padding of the convolution itself, and what is padded before it: (left, right, top, bottom) and how."""
    before = list(module._reversed_padding_repeated_twice)
    if module.padding_mode != "zeros":
        return (0, 0), before, module.padding_mode
    if not isinstance(module.padding, str):
        return tuple(module.padding), None, "constant"
    left, right, top, bottom = before
    # Even kernels need one zero more on the right or below than a symmetric padding gives.
    uneven = [0, right - left, 0, bottom - top]
    return (top, left), uneven if any(uneven) else None, "constant"
