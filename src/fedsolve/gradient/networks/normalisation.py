"""The two normalisations of the image networks, by batch or by groups of channels, with their rectifiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsolve.backends.devices import triton_works

Normalisation = Callable[[int], nn.Module]

RELU, RELU6 = torch.inf, 6.0
"""Ceilings of rectifiers."""


class BatchNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that does not count batches, and rectifies up to a ceiling where one is given.

    The count matters only to a cumulative average (momentum None), and adding one to it is a kernel of
    its own per layer and step: 52 more than the 151 operations of a forward pass of MobileNetV2.
    """

    def forward(self, input: Tensor, ceiling: float | None = None) -> Tensor:
        batch = self.training
        kept = self.track_running_stats or not batch
        momentum = 0.0 if self.momentum is None else self.momentum
        affine = self.weight, self.bias
        statistics = (self.running_mean, self.running_var) if kept else (None, None)
        layers = triton_layers(input) if batch and kept and input.numel() > self.num_features else None
        if layers is not None:
            fused: Tensor = layers.Normalise.apply(input, *affine, *statistics, momentum, self.eps, ceiling)
            return fused
        by_batch = batch or self.running_mean is None
        return rectified(F.batch_norm(input, *statistics, *affine, by_batch, momentum, self.eps), ceiling)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that rectifies up to a ceiling where one is given."""

    def forward(self, input: Tensor, ceiling: float | None = None) -> Tensor:
        return rectified(super().forward(input), ceiling)


def normalisation(grouped: bool, groups: int) -> Normalisation:
    """The maker of a normalisation from its number of channels: GroupNorm of `groups`, or BatchNorm."""
    if grouped:
        return lambda channels: GroupNorm(groups, channels)
    return BatchNorm


def rectified(values: Tensor, ceiling: float | None) -> Tensor:
    """The values between 0 and a ceiling; as they are without one."""
    if ceiling is None:
        return values
    # ReLU6 in place would cost more: torch then copies its input for backward.
    return torch.relu_(values) if ceiling == RELU else F.hardtanh(values, 0.0, ceiling)


def triton_layers(maps: Tensor) -> Any:
    """The module of layers in Triton where these maps can use it, None where they cannot.

    They cannot where gradients are taken row by row (`torch.func`), which sees through torch's layers only.
    """
    fits = maps.is_cuda and maps.dtype is torch.float32 and maps.dim() == 4
    return _triton_layers() if fits and not torch._C._are_functorch_transforms_active() else None


@cache
def _triton_layers() -> Any:
    if not triton_works():
        return None
    from fedsolve.gradient.networks import triton_layers

    return triton_layers
