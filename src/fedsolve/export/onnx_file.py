"""A model as one ONNX file: raw rows in, label, probabilities and scores out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve import container
from fedsolve.container import canonical_json
from fedsolve.errors import DataError
from fedsolve.export.families import estimates, scores
from fedsolve.export.onnx_functions import probabilities, simplex
from fedsolve.export.onnx_graph import OnnxGraph
from fedsolve.export.raw_rows import finite, prepared, raw_rows
from fedsolve.federation.card import card
from fedsolve.model import Model
from fedsolve.version import __version__

CARD = "fedsolve.card"
"""Under which name the metadata hold the model's card, as JSON."""

_MOST_BYTES = 2**31 - 1
_LABELS = {"U": "string", "i": "int64", "u": "int64", "f": "float64", "b": "bool"}
"""The type of the output `label`, by the kind of the classes."""


@dataclass(frozen=True)
class OnnxFile:
    """What was written: the names of inputs and outputs in their order, and bytes."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size: int


def write_onnx(
    model: Model, path: str | os.PathLike[str], precision: str = "float64", images: bool | str = False
) -> OnnxFile:
    """Write `model` as an ONNX file that was checked; one client's own is for its owner to read.

    precision: "float64", or "float32" for wide layers of half the size, and probabilities near to 1e-5.
    images: whether the backbone of a model of image features is joined, so that pixels go in; the backbone's
            address where its files do not lie where they were.
    """
    graph, proto = onnx_model(model, precision, images)
    content = proto.SerializeToString(deterministic=True)
    container.write_atomically(path, content, private=model.private)
    return OnnxFile(
        Path(path),
        tuple(edge.name for edge in graph.inputs),
        tuple(edge.name for edge in graph.outputs),
        len(content),
    )


def onnx_model(model: Model, precision: str = "float64", images: bool | str = False) -> tuple[OnnxGraph, Any]:
    """The graph of a model, and the same as a checked ONNX model with the model's card."""
    if not model.predicts:
        raise DataError(
            "this model does not predict by itself: clients make their own models of it. Export one of those "
            "('fedsolve personalise', model.personalised(data))."
        )
    model.check_finite()
    graph = OnnxGraph(precision)
    found = scores_of(graph, model, raw_rows(graph, model, images))
    if model.classes is None:
        graph.output(
            "prediction", graph.cast(found), precision, ("rows", model.outputs), "the predicted targets"
        )
    else:
        _answers(graph, model, found)
    proto = graph.model({CARD: canonical_json(card(model))}, repr(model), __version__)
    if proto.ByteSize() > _MOST_BYTES:
        raise DataError(
            f"the model takes {proto.ByteSize() / 1e9:.1f} GB, and an ONNX file at most 2 GB. Export it with "
            "precision float32, or train a narrower one."
        )
    graph.onnx.checker.check_model(proto, full_check=True)
    return graph, proto


def scores_of(graph: OnnxGraph, model: Model, rows: str) -> str:
    """The scores of float64 rows, prepared as the model does it; those that it would refuse fail."""
    if model.calibration is not None:
        # Of p = softmax(slope * s), dp/ds = slope * p (1 - p): slope / 4 at most, and rarely near it.
        graph.steepness = model.calibration.slope / 8
    return scores(graph, model, finite(graph, prepared(graph, rows, model.preparing)))


def labels_and_shares(graph: OnnxGraph, model: Model, found: str) -> tuple[str, str, str]:
    """Of scores, the labels, the probabilities in float64, and the type of the labels."""
    classes = model.classes
    assert classes is not None
    kind = _LABELS.get(classes.dtype.kind)
    if kind is None:
        raise DataError(f"classes of type {classes.dtype} cannot be exported; use numbers or text.")
    if model.calibration is not None:
        shares = probabilities(graph, found, model.calibration)
    else:
        shares = simplex(graph, estimates(graph, model, found), model.outputs)
    place = graph.op("ArgMax", found, axis=1, keepdims=0)
    names = graph.constant(classes, "object" if kind == "string" else kind)
    return graph.op("Gather", names, place), shares, kind


def _answers(graph: OnnxGraph, model: Model, found: str) -> None:
    label, shares, kind = labels_and_shares(graph, model, found)
    assert model.classes is not None
    shape = ("rows", model.outputs)
    told = ", ".join(map(str, model.classes[:20].tolist())) + ", ..." * (len(model.classes) > 20)
    graph.output("label", label, kind, ("rows",), "the class with the largest score")
    graph.output("probabilities", graph.cast(shares), graph.precision, shape, f"of the classes {told}")
    graph.output("scores", graph.cast(found), graph.precision, shape, "as decision_function gives them")
