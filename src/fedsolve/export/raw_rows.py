"""Raw rows as the inputs of a graph: a matrix of features, or one input for each column of a schema.

What `encoder` and `preparation` do to numbers, as nodes. A category comes as text and is recognised by
regular expressions, which is how " 3 ", "3.0" and "3" stay the same value.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fedsolve.data.backbones import known_backbone
from fedsolve.data.backbones.onnx import OnnxBackbone
from fedsolve.data.backbones.preprocessing import CHANNELS, Pixels, Preprocessing
from fedsolve.errors import DataError, explained
from fedsolve.export.onnx_graph import OPSET, OnnxGraph, Value
from fedsolve.model import Model
from fedsolve.tables.encoder import MISSING, category_text
from fedsolve.tables.preparation import Preparation
from fedsolve.tables.schema import Column, Schema

FEATURES = "features"
"""The input of models that know no names of columns."""


def raw_rows(graph: OnnxGraph, model: Model, images: bool | str = False) -> Any:
    """The rows (rows, features) that a model is given, float64, from new inputs.

    images: whether they are images for the model's backbone; its address if its files have moved.
    """
    schema = model.schema
    if images:
        return image_rows(graph, model, images if isinstance(images, str) else None)
    if schema is not None and schema.extractor is None:
        return _columns(graph, schema)
    about = "" if schema is None else f", as the backbone {schema.extractor.name} gives them"  # type: ignore[union-attr]
    rows = graph.input(FEATURES, graph.precision, model.features, about=f"features of each row{about}")
    return rows.astype("float64")


def prepared(graph: OnnxGraph, rows: Value, preparing: Preparation | None) -> Any:
    """`Preparation.apply`: standardised, then what is missing takes the mean's place."""
    if preparing is None:
        return rows
    values = (rows - preparing.origin) / preparing.scale
    return graph.op("Where", np.isnan(values), preparing.fill, values)


def finite(graph: OnnxGraph, rows: Value, what: str = "a feature") -> Any:
    """The same rows; NaN and infinity make the graph fail."""
    # NaN is not within any bounds.
    within = (abs(rows) <= sys.float_info.max).astype("int64")
    wrong = graph.op("Equal", graph.op("ReduceMin", within, [1], keepdims=1), 0)
    return graph.refuse(rows, wrong, f"refused: {what} is NaN or infinite")


def _columns(graph: OnnxGraph, schema: Schema) -> Any:
    """The encoded features, one input (rows, 1) for each column that is used."""
    hashed = [column.name for _, column in schema.places("text") if column.backbone is None]
    if hashed:
        raise DataError(
            f"column{'s' * (len(hashed) > 1)} {', '.join(map(repr, hashed))}: ONNX has no operator that "
            "hashes words, so that text cannot be exported. Train with a backbone for it or without it "
            '(kind = "unused" in the schema), or predict with fedsolve.'
        )
    inputs = {"category": _category, "text": _text}
    parts = [part for column in schema.used for part in inputs.get(column.kind, _number)(graph, column)]
    return parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)


def _number(graph: OnnxGraph, column: Column) -> list[Value]:
    unit = f" in {column.unit}" if column.unit else ""
    about = "days since 1970-01-01, in UTC" if column.kind == "date" else f"a number{unit}"
    value = graph.input(column.name, "float64", 1, about=f"{about}; NaN where it is missing")
    for sentinel in column.sentinels:
        value = graph.op("Where", value == sentinel, np.nan, value)
    missing = np.isnan(value)
    if column.bounds:
        low, high = column.bounds
        value = graph.op("Where", missing, value, value.clip(low, high))
    if column.kind == "date":
        value = (value - column.reference) / column.scale
    if column.missing == "refuse":
        return [graph.refuse(value, missing, _refused(column))]
    return [value, missing.astype("float64")] if column.missing == "flag" else [value]


def _text(graph: OnnxGraph, column: Column) -> list[Value]:
    """Features of a text, which whoever runs the graph makes with the backbone."""
    assert column.backbone is not None
    made = f"{column.backbone.name} (weights {column.backbone.weights[:12]})"
    about = f"features of the text by {made}; zeros where it is missing"
    value = graph.input(column.name, "float32", column.backbone.width, about=about).astype("float64")
    if column.missing == "refuse":
        most = graph.op("ReduceMax", abs(value), [1], keepdims=1)
        value = graph.refuse(value, most == 0.0, _refused(column))
    return [value]


def _category(graph: OnnxGraph, column: Column) -> list[Value]:
    """Columns of 0 and 1: the categories, all others, and what is missing where that has a column."""
    about = f"one of {', '.join(map(repr, column.categories[:20]))}{', ...' * (len(column.categories) > 20)}"
    cell = graph.input(column.name, "string", 1, about=f"{about}; empty where it is missing")
    places = [_matches(graph, cell, _spellings(category)) for category in column.categories]
    absent = _matches(graph, cell, "|".join(map(_literal, sorted(MISSING - {*column.categories}))))
    if column.missing in ("flag", "other", "refuse"):
        known = graph.op("Sum", *places, *([] if column.missing == "other" else [absent]))
    else:
        places[column.categories.index(column.missing)] += absent
        known = graph.op("Sum", *places)
    other = 1.0 - known
    if column.missing == "flag":
        return [*places, other, absent]
    if column.missing == "refuse":
        other = graph.refuse(other, absent, _refused(column))
    return [*places, other]


def _refused(column: Column) -> str:
    return f"refused: '{column.name}' is missing"


def _matches(graph: OnnxGraph, cell: Value, pattern: str | None) -> Any:
    """1.0 where the cell, without spaces around it, is of this pattern; 0.0 elsewhere."""
    # A pattern that nothing matches keeps the columns in their places.
    spaced = r"[^\x{0}-\x{10ffff}]" if pattern is None else f"{_SPACE}*(?:{pattern}){_SPACE}*"
    return graph.op("RegexFullMatch", cell, pattern=spaced).astype("float64")


def _spellings(category: str) -> str | None:
    """Every text that `category_text` turns into this category; None where there is none."""
    if category_text(category) != category:
        return None
    whole = category_text(f"{category}.0") == category
    return f"{_literal(category)}(?:\\.0*)?" if whole else _literal(category)


def _literal(text: str) -> str:
    """A regular expression for this very text: ASCII letters and digits as they are, the rest by number."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


_SPACE = "[" + "".join(f"\\x{{{code:x}}}" for code in range(0x3001) if chr(code).isspace()) + "]"
"""What `str.strip` takes away."""


PIXELS = "pixels"
"""The input of models that are joined with their backbone."""


def image_rows(graph: OnnxGraph, model: Model, named: str | None) -> Any:
    """The features (images, width) that the model's backbone gives of a new input of bytes.

    Resizing is left to whoever runs the graph: Pillow's filters round to bytes between their passes, and no
    ONNX operator gives the same pixels.

    named: the backbone's address if its files have moved.
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
        features = graph.joined(network, values.astype(backbone.input_type), "backbone", {})
    elif isinstance(backbone, Pixels):
        features = _normalised(graph, address, backbone.preprocessing)
        if backbone.order == "channels":
            features = graph.op("Transpose", features, perm=[0, 3, 1, 2])
    else:
        raise DataError(
            f"the backbone {address} is no ONNX file and cannot be joined; onnx:FILE, efficientnet-lite0 and "
            "pixels can. Leave out --images (images=True), and run the backbone before the graph."
        )
    features = graph.op("Reshape", features, [-1, model.features])
    return features.astype("float32").astype("float64")


def _normalised(graph: OnnxGraph, address: str, preprocessing: Preprocessing) -> Any:
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
    values = pixels.astype("float64")
    if preprocessing.channels == "bgr":
        values = graph.op("Gather", values, [2, 1, 0], axis=3)
    values = (values / preprocessing.scale - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    return values.astype("float32")


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
        remedy = "Export it again with that opset, or run it before the graph."
        with explained(f"{backbone.file.name} cannot be brought to opset {OPSET}", remedy):
            model = onnx.version_converter.convert_version(model, OPSET)
    constants = {each.name for each in model.graph.initializer}
    for edges, kept in (
        (model.graph.input, lambda edge: edge.name not in constants),
        (model.graph.output, lambda edge: edge.name == backbone.output),
    ):
        wanted = [edge for edge in edges if kept(edge)]
        del edges[:]
        edges.extend(wanted)
    return model
