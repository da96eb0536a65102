"""MobileNetV2 for small images.

Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018, width 1.0.
Differences to the network for 224 px, chosen for 28 to 64 px; `mobilenet_v2:stock` has only that of channels:

    strides     stem 1 (was 2); stages 1, 1, 2, 2, 1, 2, 1 (the second was 2): 32 px end as 4 x 4, 28 px too
    stem        as many input channels as the images have: 1 for gray, 3 for colour
    dropout     none (was 0.2 before the classifier)

With colour and 10 classes 2,236,682 parameters, as many as the network for 224 px. Weights start as those of
the original code bases (`initial`: small head).
"""

from __future__ import annotations

from torch import Tensor, nn

from fedsolve.gradient.networks.normalisation import RELU6, Normalisation, normalisation, triton_layers

# Expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),  # stock: 2
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# All widths are multiples of 8.
GROUPS = 8

PLANNED = 32
"""Batches on a GPU whose rows are a multiple of this have their depthwise convolutions planned by cuDNN."""


def unplanned(maps: Tensor) -> Tensor:
    """The maps as a depthwise convolution of torch should read them.

    With channels last, cuDNN plans the depthwise convolutions of this network for 3.7 s for every new number
    of rows, and short last batches have many; its plans for the others take 0.1 s. With channels first,
    torch's own kernels do it, which take no time to plan and twice as long to run.
    """
    return maps.contiguous() if maps.is_cuda and len(maps) % PLANNED else maps


class DepthwiseConvolution(nn.Conv2d):
    """3x3, with a margin of one; on a GPU in float32 by kernels of our own, which need no plan."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__(width, width, 3, stride, 1, groups=width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        fused = self.fused(input, self.weight.detach())
        return super().forward(unplanned(input)) if fused is None else fused

    def fused(self, input: Tensor, matrix: Tensor) -> Tensor | None:
        """By these kernels, with errors going back through `matrix`; None where they cannot be used."""
        layers = triton_layers(input)
        return None if layers is None else layers.Depthwise.apply(input, self.weight, matrix, self.stride[0])


class InvertedResidual(nn.Module):
    """1x1 expansion (none at expansion 1), 3x3 depthwise, 1x1 linear projection; a skip where it fits."""

    def __init__(
        self, inputs: int, outputs: int, expansion: int, stride: int, normalised: Normalisation
    ) -> None:
        super().__init__()
        width = inputs * expansion
        self.skip = stride == 1 and inputs == outputs
        self.expand: nn.Module | None = None
        if expansion != 1:
            self.expand = nn.Conv2d(inputs, width, 1, bias=False)
            self.expand_norm = normalised(width)
        self.depthwise = DepthwiseConvolution(width, stride)
        self.depthwise_norm = normalised(width)
        self.project = nn.Conv2d(width, outputs, 1, bias=False)
        self.project_norm = normalised(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        wide = maps
        if self.expand is not None:
            wide = self.expand_norm(self.expand(wide), RELU6)
        wide = self.depthwise_norm(self.depthwise(wide), RELU6)
        narrow: Tensor = self.project_norm(self.project(wide))
        # Normalisation keeps its input for backward, not its output, which may be overwritten.
        return narrow.add_(maps) if self.skip else narrow


class MobileNetV2(nn.Module):
    """Images (rows, C, H, W) to logits. Layers: stem, blocks.0 to blocks.16, last, classifier."""

    def __init__(self, channels: int, outputs: int, *, grouped: bool = False, stock: bool = False) -> None:
        super().__init__()
        normalised = normalisation(grouped, GROUPS)
        self.stem = nn.Conv2d(channels, 32, 3, 2 if stock else 1, 1, bias=False)
        self.stem_norm = normalised(32)
        blocks = []
        inputs = 32
        for number, (expansion, width, repeats, own) in enumerate(STAGES):
            stride = 2 if stock and number == 1 else own
            for index in range(repeats):
                blocks.append(
                    InvertedResidual(inputs, width, expansion, stride if index == 0 else 1, normalised)
                )
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Conv2d(inputs, 1280, 1, bias=False)
        self.last_norm = normalised(1280)
        self.dropout = nn.Dropout(0.2) if stock else nn.Identity()
        self.classifier = nn.Linear(1280, outputs)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem_norm(self.stem(images), RELU6)
        maps = self.last_norm(self.last(self.blocks(maps)), RELU6)
        logits: Tensor = self.classifier(self.dropout(maps.mean((2, 3))))
        return logits
