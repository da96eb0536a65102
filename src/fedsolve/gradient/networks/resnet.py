"""ResNet-18 and ResNet-50 for small images.

He et al., "Deep residual learning for image recognition", CVPR 2016, with its own change for CIFAR:
the stem is a 3x3 convolution of stride 1 without max pooling, so the stages (strides 1, 2, 2, 2) end
at 4 x 4 for 28 and 32 px. In ResNet-50 the 3x3 convolution of a block carries the stride. The stem takes
as many channels as the images have. With colour and 10 classes 11,173,962 and 23,520,842 parameters.

A block's shortcut convolution is registered after those of the main branch and run after them, so
registration order is forward order; it belongs beside the block's last convolution: both read what
entered the block and end in the same sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fedsolve.gradient.networks.normalisation import RELU, Normalisation, normalisation

STRIDES = (1, 2, 2, 2)
WIDTHS = (64, 128, 256, 512)
GROUPS = 32


class Residual(nn.Module, ABC):
    """A block of convolutions with a shortcut, which is a 1x1 convolution where shapes change."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, normalised: Normalisation) -> None:
        super().__init__()
        self._add_main(inputs, width, stride, normalised)
        outputs = width * self.expansion
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut_norm = normalised(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        # Normalisation keeps its input for backward, not its output, which may be overwritten.
        main = self._main(maps)
        if self.shortcut is not None:
            maps = self.shortcut_norm(self.shortcut(maps))
        return torch.relu_(main.add_(maps))

    @abstractmethod
    def _add_main(self, inputs: int, width: int, stride: int, normalised: Normalisation) -> None:
        """Register the layers of the main branch."""

    @abstractmethod
    def _main(self, maps: Tensor) -> Tensor:
        """The main branch."""


class Basic(Residual):
    """Two 3x3 convolutions; the first carries the stride."""

    def _add_main(self, inputs: int, width: int, stride: int, normalised: Normalisation) -> None:
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = normalised(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = normalised(width)

    def _main(self, maps: Tensor) -> Tensor:
        maps = self.norm1(self.conv1(maps), RELU)
        main: Tensor = self.norm2(self.conv2(maps))
        return main


class Bottleneck(Residual):
    """1x1 down, 3x3 with the stride, 1x1 up to four times the width."""

    expansion = 4

    def _add_main(self, inputs: int, width: int, stride: int, normalised: Normalisation) -> None:
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = normalised(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = normalised(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.norm3 = normalised(width * self.expansion)

    def _main(self, maps: Tensor) -> Tensor:
        maps = self.norm1(self.conv1(maps), RELU)
        maps = self.norm2(self.conv2(maps), RELU)
        main: Tensor = self.norm3(self.conv3(maps))
        return main


class ResNet(nn.Module):
    """Images (rows, C, H, W) to logits. Layers: stem, stages.0.0.conv1 and so on, classifier."""

    def __init__(
        self,
        block: type[Residual],
        depths: tuple[int, int, int, int],
        channels: int,
        outputs: int,
        *,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        normalised = normalisation(grouped, GROUPS)
        self.stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.stem_norm = normalised(64)
        stages = []
        inputs = 64
        for depth, width, stride in zip(depths, WIDTHS, STRIDES, strict=True):
            blocks = []
            for index in range(depth):
                blocks.append(block(inputs, width, stride if index == 0 else 1, normalised))
                inputs = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, outputs)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stages(self.stem_norm(self.stem(images), RELU))
        logits: Tensor = self.classifier(maps.mean((2, 3)))
        return logits


def resnet18(channels: int, outputs: int, *, grouped: bool = False) -> ResNet:
    """ResNet-18: two basic blocks per stage."""
    return ResNet(Basic, (2, 2, 2, 2), channels, outputs, grouped=grouped)


def resnet50(channels: int, outputs: int, *, grouped: bool = False) -> ResNet:
    """ResNet-50: 3, 4, 6 and 3 bottleneck blocks."""
    return ResNet(Bottleneck, (3, 4, 6, 3), channels, outputs, grouped=grouped)
