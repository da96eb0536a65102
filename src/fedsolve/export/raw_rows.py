"""Raw rows as the inputs of a graph: a matrix of features, or one input for each column of a schema.

What `encoder` and `preparation` do to numbers, as nodes. A category comes as text and is recognised by
regular expressions, which is how " 3 ", "3.0" and "3" stay the same value.
"""

from __future__ import annotations

import sys

import numpy as np

from fedsolve.encoder import MISSING, category_text
from fedsolve.errors import DataError
from fedsolve.export.image_pixels import image_rows
from fedsolve.export.onnx_graph import OnnxGraph
from fedsolve.model import Model
from fedsolve.preparation import TablePreparation
from fedsolve.schema import Column, Schema

FEATURES = "features"
"""The input of models that know no names of columns."""

_LARGEST = sys.float_info.max


def raw_rows(graph: OnnxGraph, model: Model, images: bool | str = False) -> str:
    """The rows (rows, features) that a model is given, float64, from new inputs.

    images: whether they are images for the model's backbone; its address where its files lie elsewhere.
    """
    schema = model.schema
    if images:
        return image_rows(graph, model, images if isinstance(images, str) else None)
    if schema is not None and schema.extractor is None:
        return _columns(graph, schema)
    about = "" if schema is None else f", as the backbone {schema.extractor.name} gives them"  # type: ignore[union-attr]
    rows = graph.input(FEATURES, graph.precision, model.features, about=f"features of each row{about}")
    return graph.cast(rows, "float64")


def prepared(graph: OnnxGraph, rows: str, preparing: TablePreparation | None) -> str:
    """`TablePreparation.apply`: standardised, then what is missing takes the mean's place."""
    if preparing is None:
        return rows
    values = graph.standardised(rows, preparing.centre, preparing.scale)
    fill = graph.constant((preparing.mean - preparing.centre) / preparing.scale, "float64")
    return graph.op("Where", graph.op("IsNaN", values), fill, values)


def finite(graph: OnnxGraph, rows: str) -> str:
    """The same rows; a row with NaN or infinity fails."""
    within = graph.op("LessOrEqual", graph.op("Abs", rows), graph.constant(_LARGEST, "float64"))
    wrong = graph.cast(graph.op("Not", within), "int64")
    any_ = graph.op("ReduceMax", wrong, graph.constant([1], "int64"), keepdims=1)
    return graph.refuse(rows, any_, "refused: a feature is NaN or infinite")


def _columns(graph: OnnxGraph, schema: Schema) -> str:
    """The encoded features, one input (rows, 1) for each column that is used."""
    hashed = [column.name for column in schema.used if column.kind == "text"]
    if hashed:
        raise DataError(
            f"column{'s' * (len(hashed) > 1)} {', '.join(map(repr, hashed))}: ONNX has no operator that "
            'hashes words, so that text cannot be exported. Train without it (kind = "unused" in the '
            "schema), or predict with fedsolve."
        )
    parts = [
        part
        for column in schema.used
        for part in (_category if column.kind == "category" else _number)(graph, column)
    ]
    return parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=1)


def _number(graph: OnnxGraph, column: Column) -> list[str]:
    unit = f" in {column.unit}" if column.unit else ""
    about = "days since 1970-01-01, in UTC" if column.kind == "date" else f"a number{unit}"
    value = graph.input(column.name, "float64", 1, about=f"{about}; NaN where it is missing")
    missing = graph.op("IsNaN", value)
    if column.kind == "date":
        value = graph.standardised(value, np.array([column.reference]), np.array([column.scale]))
    if column.missing == "refuse":
        return [graph.refuse(value, missing, _refused(column))]
    return [value, graph.cast(missing, "float64")] if column.missing == "flag" else [value]


def _category(graph: OnnxGraph, column: Column) -> list[str]:
    """Columns of 0 and 1: the categories, all others, and what is missing where that has a column."""
    about = f"one of {', '.join(map(repr, column.categories[:20]))}{', ...' * (len(column.categories) > 20)}"
    cell = graph.input(column.name, "string", 1, about=f"{about}; empty where it is missing")
    places = [_matches(graph, cell, _spellings(category)) for category in column.categories]
    absent = _matches(graph, cell, _listed(sorted(MISSING - {*column.categories})))
    known = graph.op("Sum", *places, absent) if column.missing != "other" else graph.op("Sum", *places)
    other = graph.op("Sub", graph.constant(1.0, "float64"), known)
    if column.missing == "flag":
        return [*places, other, absent]
    if column.missing == "refuse":
        wrong = graph.op("Greater", absent, graph.constant(0.0, "float64"))
        other = graph.refuse(other, wrong, _refused(column))
    return [*places, other]


def _refused(column: Column) -> str:
    return f"refused: '{column.name}' is missing"


def _matches(graph: OnnxGraph, cell: str, pattern: str | None) -> str:
    """1.0 where the cell, without spaces around it, is of this pattern; 0.0 elsewhere."""
    # A pattern that nothing matches keeps the columns in their places.
    spaced = r"[^\x{0}-\x{10ffff}]" if pattern is None else f"{_SPACE}*(?:{pattern}){_SPACE}*"
    return graph.cast(graph.op("RegexFullMatch", cell, pattern=spaced), "float64")


def _spellings(category: str) -> str | None:
    """Every text that `category_text` turns into this category; None where there is none."""
    if category_text(category) != category:
        return None
    whole = category_text(f"{category}.0") == category
    return f"{_literal(category)}(?:\\.0*)?" if whole else _literal(category)


def _listed(texts: list[str]) -> str:
    return "|".join(map(_literal, texts))


def _literal(text: str) -> str:
    """A regular expression for this very text: ASCII letters and digits as they are, the rest by number."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


_SPACE = "[" + "".join(f"\\x{{{code:x}}}" for code in range(0x3001) if chr(code).isspace()) + "]"
"""What `str.strip` takes away."""
