"""The two normalisations of the image networks: by batch, or by groups of channels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Normalisation = Callable[[int], nn.Module]


class BatchNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that does not count batches.

    The count matters only to a cumulative average (momentum None), and adding one to it is a kernel of
    its own per layer and step: 52 more than the 151 operations of a forward pass of MobileNetV2.
    """

    def forward(self, input: Tensor) -> Tensor:
        batch = self.training
        kept = self.track_running_stats or not batch
        return F.batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            batch or self.running_mean is None,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )


def normalisation(grouped: bool, groups: int) -> Normalisation:
    """The maker of a normalisation from its number of channels: GroupNorm of `groups`, or BatchNorm."""
    if grouped:
        return lambda channels: nn.GroupNorm(groups, channels)
    return BatchNorm
