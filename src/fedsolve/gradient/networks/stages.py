"""Stages of networks: where in a network a layer lies, as papers speak of it (FLFA, Table 13)."""

from __future__ import annotations

from itertools import accumulate

MOBILENET_BLOCKS = (1, 2, 3, 4, 3, 3, 1)
"""Blocks of MobileNetV2's seven stages."""

MOBILENET_STAGES = ("stem", *(f"stage {number}" for number in range(1, 8)), "last convolution", "classifier")
"""All stages of MobileNetV2, in the order in which they run."""


def stage_of(network: str, layer: str) -> str:
    """The stage that a layer of a network belongs to; the layer itself where a network has no stages.

    network: its name, such as "mobilenet_v2:gn". layer: a module's name, such as "blocks.3.project".
    """
    kind = network.partition(":")[0]
    parts = layer.split(".")
    if kind == "mobilenet_v2" and parts[0] == "blocks":
        ends = accumulate(MOBILENET_BLOCKS)
        return f"stage {1 + sum(int(parts[1]) >= end for end in ends)}"
    if kind == "mobilenet_v2" and parts[0] == "last":
        return "last convolution"
    if kind in ("resnet18", "resnet50") and parts[0] == "stages":
        return f"stage {1 + int(parts[1])}"
    return layer
