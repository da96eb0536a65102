"""A model as one ONNX file: raw rows in, label, probabilities and scores out; whole pipelines by skl2onnx."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.calibration import Calibration, LabelCalibration
from fedsolve.container import canonical_json
from fedsolve.errors import DataError, require
from fedsolve.export.families import estimates, scores
from fedsolve.export.onnx_functions import probabilities, simplex
from fedsolve.export.onnx_graph import OPSET, OnnxGraph
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
    """Write `model` as a checked ONNX file. Only its owner can read the file of a personal model.

    precision: "float64", or "float32" for wide layers of half the size, and probabilities near to 1e-5.
    images: whether the backbone of a model of image features is joined, so that pixels go in; the backbone's
            address if its files have moved.
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
    if model.labels:
        _several(graph, model, found)
    elif model.classes is None:
        told, shape = estimates(graph, model, found), ("rows", model.outputs)
        graph.output("prediction", graph.cast(told), precision, shape, "the predicted targets")
        if model.spread is not None:
            reach = model.spread.reach()
            for name, side in (("low", -reach), ("high", reach)):
                edge = graph.op("Add", graph.cast(told, "float64"), graph.constant(side, "float64"))
                graph.output(name, graph.cast(edge), precision, shape, "an interval of 95 % of the truths")
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
    """The scores of float64 rows, prepared as the model does; the graph fails where the model refuses."""
    if isinstance(model.calibration, Calibration):
        # Of p = softmax(slope * s), dp/ds = slope * p (1 - p): slope / 4 at most, and rarely near it.
        graph.steepness = model.calibration.slope / 8
    return scores(graph, model, finite(graph, prepared(graph, rows, model.preparing)))


def labels_and_shares(graph: OnnxGraph, model: Model, found: str) -> tuple[str, str, str]:
    """Labels, float64 probabilities, and the type of the labels, from scores."""
    classes = model.classes
    assert classes is not None
    kind = _LABELS.get(classes.dtype.kind)
    if kind is None:
        raise DataError(f"classes of type {classes.dtype} cannot be exported; use numbers or text.")
    if isinstance(model.calibration, Calibration):
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


def _several(graph: OnnxGraph, model: Model, found: str) -> None:
    """0 and 1 for each of several labels, and their probabilities."""
    exact = graph.cast(found, "float64")
    if isinstance(model.calibration, LabelCalibration):
        slopes, shift = 2.0 * model.calibration.slope, model.calibration.biases - model.calibration.slope
        logits = graph.op("Mul", exact, graph.constant(slopes, "float64"))
        shares = graph.op("Sigmoid", graph.op("Add", logits, graph.constant(shift, "float64")))
    else:
        ends = (graph.constant(np.array(end), "float64") for end in (0.0, 1.0))
        shares = graph.op("Clip", exact, *ends)
    cuts = graph.constant(np.full(model.outputs, 0.5) if model.cuts is None else model.cuts, "float64")
    shape, told = ("rows", model.outputs), ", ".join(model.labels[:20]) + ", ..." * (len(model.labels) > 20)
    called = graph.cast(graph.op("GreaterOrEqual", shares, cuts), "int64")
    graph.output("label", called, "int64", shape, f"0 or 1 for each of {told}")
    graph.output("probabilities", graph.cast(shares), graph.precision, shape, f"of {told}")
    graph.output("scores", graph.cast(found), graph.precision, shape, "as decision_function gives them")


_LEAST_OPSET = 18
"""The first in which sums and maxima take their axes as we write them."""

_NEEDS = "export", "a scikit-learn pipeline as an ONNX file"
_OPTIONS = {"zipmap": [True, False, "columns"], "nocl": [True, False], "output_class_labels": [False, True]}


def register_converters() -> None:
    """Make fedsolve's estimators known to skl2onnx, so that pipelines with them convert whole.

    Doubles go in where the pipeline's inputs are DoubleTensorType, and probabilities are then those of
    `predict_proba` to 1e-9; with FloatTensorType, to 1e-5 as far as the steps before keep their digits.
    """
    from fedsolve import estimators  # scikit-learn takes longer to import than all the rest

    skl2onnx = require("skl2onnx", *_NEEDS)
    shapes = require("skl2onnx.common.shape_calculator", *_NEEDS)
    known: list[tuple[list[Any], Any, dict[str, Any]]] = [
        (
            [
                estimators.AFLClassifier,
                estimators.AutoClassifier,
                estimators.DeepAFLClassifier,
                estimators.KernelAFLClassifier,
                estimators.SoftmaxClassifier,
            ],
            shapes.calculate_linear_classifier_output_shapes,
            {"convert_fct": _classifier, "options": _OPTIONS},
        ),
        (
            [
                estimators.AFLRegressor,
                estimators.AutoRegressor,
                estimators.DeepAFLRegressor,
                estimators.KernelAFLRegressor,
            ],
            shapes.calculate_linear_regressor_output_shapes,
            {"convert_fct": _regressor},
        ),
    ]
    for kinds, shape, how in known:
        for kind in kinds:
            skl2onnx.update_registered_converter(kind, f"Fedsolve{kind.__name__}", shape, **how)


def _classifier(scope: Any, operator: Any, container: Any) -> None:
    model = operator.raw_operator.model_
    graph, rows = _entered(scope, operator, container)
    label, shares, _ = labels_and_shares(graph, model, scores_of(graph, model, rows))
    if model.classes.dtype.kind != "U":
        label = graph.cast(label, "int64")
    _leave(graph, operator, container, [label, graph.cast(shares)])


def _regressor(scope: Any, operator: Any, container: Any) -> None:
    graph, rows = _entered(scope, operator, container)
    found = scores_of(graph, operator.raw_operator.model_, rows)
    _leave(graph, operator, container, [graph.cast(found)])


def _entered(scope: Any, operator: Any, container: Any) -> tuple[OnnxGraph, str]:
    """A graph for the nodes of an operator, and the rows that come into it, in float64."""
    target = container.target_opset_any_domain("")
    if target < _LEAST_OPSET:
        raise DataError(
            f"fedsolve's estimators need opset {_LEAST_OPSET}; pass target_opset={OPSET} instead of {target}."
        )
    (given,) = operator.inputs
    double = type(given.type).__name__ == "DoubleTensorType"
    graph = OnnxGraph("float64" if double else "float32", scope.get_unique_operator_name("fedsolve"))
    return graph, graph.cast(given.full_name, "float64")


def _leave(graph: OnnxGraph, operator: Any, container: Any, values: list[str]) -> None:
    """Give the values as the operator's outputs, and the nodes to the container."""
    for value, place in zip(values, operator.outputs, strict=True):
        graph.nodes.append(graph.onnx.helper.make_node("Identity", [value], [place.full_name]))
    container.nodes.extend(graph.nodes)
    container.initializers.extend(graph.initialisers)
    container.node_domain_version_pair_sets.add(("", min(OPSET, container.target_opset_any_domain(""))))
