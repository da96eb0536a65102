"""Pixels as the input of a graph: a backbone's preprocessing of bytes, and its network, before the model.

Resizing is left to whoever runs the graph: Pillow's filters round to bytes between their passes, and no ONNX
operator gives the same pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.data.backbones.onnx import OnnxBackbone
from fedsolve.data.backbones.pixels import Pixels
from fedsolve.data.backbones.preprocessing import CHANNELS, Preprocessing
from fedsolve.data.image_rows import known_backbone
from fedsolve.errors import DataError
from fedsolve.export.onnx_graph import OPSET, OnnxGraph
from fedsolve.model import Model

PIXELS = "pixels"
"""The input of models that are joined with their backbone."""


def image_rows(graph: OnnxGraph, model: Model, named: str | None) -> str:
    """The features (images, width) that the model's backbone gives of a new input of bytes.

    named: the backbone's address where its files do not lie where the model says.
    """
    extractor = None if model.schema is None else model.schema.extractor
    if extractor is None:
        raise DataError(
            "this model does not take features of images by a backbone, so that there is none to join. Leave "
            "out --images (images=True)."
        )
    address, backbone = known_backbone(extractor, named)
    if isinstance(backbone, OnnxBackbone):
        network = _network(graph, backbone)
        values = _normalised(graph, address, backbone.preprocessing)
        if backbone.layout == "nchw":
            values = graph.op("Transpose", values, perm=[0, 3, 1, 2])
        features = graph.joined(network, graph.cast(values, backbone.input_type), "backbone", {})
    elif isinstance(backbone, Pixels):
        features = _normalised(graph, address, backbone.preprocessing)
        if backbone.order == "channels":
            features = graph.op("Transpose", features, perm=[0, 3, 1, 2])
    else:
        raise DataError(
            f"the backbone {address} is no ONNX file and cannot be joined; onnx:FILE, efficientnet-lite0 and "
            "pixels can. Leave out --images (images=True), and run the backbone before the graph."
        )
    features = graph.op("Reshape", features, graph.constant([-1, model.features], "int64"))
    return graph.cast(graph.cast(features, "float32"), "float64")


def _normalised(graph: OnnxGraph, address: str, preprocessing: Preprocessing) -> str:
    """(pixel / scale - mean) / std in float32, of a new input (images, height, width, channels)."""
    channels = CHANNELS[preprocessing.channels]
    if preprocessing.size is None or channels is None:
        raise DataError(
            f"the backbone {address} takes images of any size or number of channels, and a graph has one "
            "shape. Train with both, such as pixels:32?channels=rgb."
        )
    how = preprocessing.interpolation
    if preprocessing.shorter_side is not None:
        how += f", the shorter side to {preprocessing.shorter_side}, cut out of the middle"
    about = f"images as bytes, {'gray' if channels == 1 else 'red, green, blue'}, resized ({how})"
    pixels = graph.input(PIXELS, "uint8", *preprocessing.size, channels, about=about)
    values = graph.cast(pixels, "float64")
    if preprocessing.channels == "bgr":
        values = graph.op("Gather", values, graph.constant([2, 1, 0], "int64"), axis=3)
    values = graph.op("Div", values, graph.constant(preprocessing.scale, "float64"))
    values = graph.standardised(values, np.array(preprocessing.mean), np.array(preprocessing.std))
    return graph.cast(values, "float32")


def _network(graph: OnnxGraph, backbone: OnnxBackbone) -> Any:
    """The backbone's ONNX model in the graph's opset, with its one output."""
    onnx: Any = graph.onnx
    model = onnx.load(backbone.file)
    strange = sorted({each.domain for each in model.opset_import} - {"", "ai.onnx"})
    if strange or model.functions:
        raise DataError(
            f"{backbone.file.name} uses operators from outside ONNX ({', '.join(strange) or 'functions'}), "
            "and cannot be joined. Export it again without them, or run it before the graph."
        )
    if backbone.fixed is not None:
        raise DataError(
            f"{backbone.file.name} takes {backbone.fixed} images at a time, no more and no fewer, and cannot "
            "be joined. Export it again with a free number of images."
        )
    if any(each.version != OPSET for each in model.opset_import):
        try:
            model = onnx.version_converter.convert_version(model, OPSET)
        except Exception as problem:  # the converter has no error of its own
            raise DataError(
                f"{backbone.file.name} cannot be brought to opset {OPSET} ({problem}). Export it again with "
                "that opset, or run it before the graph."
            ) from problem
    constants = {each.name for each in model.graph.initializer}
    for edges, kept in (
        (model.graph.input, lambda edge: edge.name not in constants),
        (model.graph.output, lambda edge: edge.name == backbone.output),
    ):
        wanted = [edge for edge in edges if kept(edge)]
        del edges[:]
        edges.extend(wanted)
    return model
