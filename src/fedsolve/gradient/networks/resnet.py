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

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsolve.gradient.networks.normalisation import RELU, Normalisation, normalisation

STRIDES = (1, 2, 2, 2)
WIDTHS = (64, 128, 256, 512)
GROUPS = 32


class Residual(nn.Module):
    """A block of convolutions with a shortcut, which is a 1x1 convolution where shapes change.

    convolutions: outputs, kernel and stride of each; they are called conv1, norm1, conv2 and so on.
    """

    def __init__(
        self, inputs: int, convolutions: Sequence[tuple[int, int, int]], normalised: Normalisation
    ) -> None:
        super().__init__()
        self._depth = len(convolutions)
        outputs, whole = inputs, 1
        for number, (width, kernel, stride) in enumerate(convolutions, 1):
            self.add_module(
                f"conv{number}", nn.Conv2d(outputs, width, kernel, stride, kernel // 2, bias=False)
            )
            self.add_module(f"norm{number}", normalised(width))
            outputs, whole = width, whole * stride
        self.shortcut: nn.Module | None = None
        if whole != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, whole, bias=False)
            self.shortcut_norm = normalised(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        # Normalisation keeps its input for backward, not its output, which may be overwritten.
        main = maps
        for number in range(1, self._depth + 1):
            convolution, norm = getattr(self, f"conv{number}"), getattr(self, f"norm{number}")
            main = norm(convolution(main), RELU if number < self._depth else None)
        if self.shortcut is not None:
            maps = self.shortcut_norm(self.shortcut(maps))
        return torch.relu_(main.add_(maps))


KINDS = {
    "resnet18": (((1, 3), (1, 3)), 0, (2, 2, 2, 2)),
    "resnet50": (((1, 1), (1, 3), (4, 1)), 1, (3, 4, 6, 3)),
}
"""By name: factor of the width and kernel of a block's convolutions, which of them carries the stride, and
how many blocks each stage has."""


class ResNet(nn.Module):
    """Images (rows, C, H, W) to logits. Layers: stem, stages.0.0.conv1 and so on, classifier."""

    def __init__(self, kind: str, channels: int, outputs: int, *, grouped: bool = False) -> None:
        super().__init__()
        block, strided, depths = KINDS[kind]
        normalised = normalisation(grouped, GROUPS)
        self.stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.stem_norm = normalised(64)
        stages = []
        inputs = 64
        for depth, width, stride in zip(depths, WIDTHS, STRIDES, strict=True):
            blocks = []
            for index in range(depth):
                convolutions = [
                    (factor * width, kernel, stride if index == 0 and place == strided else 1)
                    for place, (factor, kernel) in enumerate(block)
                ]
                blocks.append(Residual(inputs, convolutions, normalised))
                inputs = convolutions[-1][0]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, outputs)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stages(self.stem_norm(self.stem(images), RELU))
        logits: Tensor = self.classifier(maps.mean((2, 3)))
        return logits
