"""Layers whose input gradient goes through another matrix than their weight.

Forward, weight gradient and bias gradient are the ordinary ones; only the gradient passed to the
input uses the feedback matrix B (FLFA, Eq. 11). The weight gradient does not depend on the weight's
values, so one ordinary backward call with B in the weight's place gives all three: no kernel more
than backpropagation needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedsolve.errors import DataError
from fedsolve.gradient.networks.mobilenet import DepthwiseConvolution, unplanned
from fedsolve.gradient.networks.normalisation import triton_layers

_convolution_backward = torch.ops.aten.convolution_backward.default

Aligned = Callable[[Tensor, Tensor, "Tensor | None", Tensor], Tensor]


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
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        matrix: Tensor,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(inputs, matrix)
        ctx.geometry = stride, padding, dilation, False, (0, 0), groups
        return torch.conv2d(inputs, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (error,) = gradients
        inputs, matrix = _saved(ctx, error)
        needs = ctx.needs_input_grad[:3]
        sizes = (matrix.shape[0],) if needs[2] else None
        made = _convolution_backward(error, inputs, matrix, sizes, *ctx.geometry, needs)
        return (*made, None, None, None, None, None)


class DirectFeedback(Function):
    """The identity, whose gradient is a fixed random projection of the network's output error (DFA).

    errors: of one pass through the network, the gradient of the loss by its output once backward has it.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, errors: list[Tensor], matrix: Callable[..., Tensor]) -> Tensor:
        ctx.errors, ctx.matrix = errors, matrix
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (arrived,) = gradients
        if not ctx.errors:
            # The loss does not depend on the output: its error is zero.
            return torch.zeros_like(arrived), None, None
        error = ctx.errors[-1]
        if len(error) != len(arrived):
            raise DataError(
                f"direct feedback needs one output row per input row of the layer; the network gave "
                f"{len(error)} for {len(arrived)}. Choose another layer, or route='layer'."
            )
        error = error.flatten(1)
        matrix = ctx.matrix(error.shape[1], arrived[0].numel(), arrived)
        return error.to(arrived.dtype).mm(matrix).view(arrived.shape), None, None


def _saved(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor]:
    inputs, matrix = ctx.saved_tensors
    if inputs.dtype is not error.dtype or matrix.dtype is not error.dtype:
        # Under autocast the layer computed in the error's lower precision.
        inputs, matrix = inputs.to(error.dtype), matrix.to(error.dtype)
    return inputs, matrix


def aligned(module: nn.Module) -> Aligned:
    """The module's operation as function(inputs, weight, bias, matrix), with B = matrix in backward."""
    if isinstance(module, nn.Linear):
        linear: Aligned = LinearFeedback.apply
        return linear
    assert isinstance(module, nn.Conv2d)
    stride, dilation, groups = module.stride, module.dilation, module.groups
    padding, margins, mode = _padding(module)

    def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, matrix: Tensor) -> Tensor:
        if inputs.dim() == 3:
            return convolve(inputs.unsqueeze(0), weight, bias, matrix).squeeze(0)
        if margins is not None:
            inputs = F.pad(inputs, margins, mode=mode)
        if isinstance(module, DepthwiseConvolution):
            layers = triton_layers(inputs)
            if layers is not None:
                fused: Tensor = layers.Depthwise.apply(inputs, weight, matrix, stride[0])
                return fused
            inputs = unplanned(inputs)
        result: Tensor = ConvolutionFeedback.apply(  # type: ignore[no-untyped-call]
            inputs, weight, bias, matrix, stride, padding, dilation, groups
        )
        return result

    return convolve


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
