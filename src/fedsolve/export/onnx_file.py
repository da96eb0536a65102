"""A model as one ONNX file: raw rows in, label, probabilities and scores out; whole pipelines by skl2onnx."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from fedsolve import container
from fedsolve.calibration import Calibration, LabelCalibration
from fedsolve.errors import DataError, require
from fedsolve.export.families import estimates, scores
from fedsolve.export.onnx_graph import OPSET, OnnxGraph, Value
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
    if not model.predicts and model.classes is None:
        raise DataError("this model holds a result and predicts nothing, so that nothing can be exported.")
    if not model.predicts:
        raise DataError(
            "this model does not predict by itself: clients make their own models of it. Export one of those "
            "('fedsolve personalise', model.personalised(data))."
        )
    model.check_finite()
    graph = OnnxGraph(precision)
    _answers(graph, model, scores_of(graph, model, raw_rows(graph, model, images)))
    proto = graph.model({CARD: container.canonical_json(card(model))}, repr(model), __version__)
    if proto.ByteSize() > _MOST_BYTES:
        raise DataError(
            f"the model takes {proto.ByteSize() / 1e9:.1f} GB, and an ONNX file at most 2 GB. Export it with "
            "precision float32, or train a narrower one."
        )
    graph.onnx.checker.check_model(proto, full_check=True)
    content = proto.SerializeToString(deterministic=True)
    container.write_atomically(path, content, private=model.private)
    inputs, outputs = (tuple(edge.name for edge in edges) for edges in (graph.inputs, graph.outputs))
    return OnnxFile(Path(path), inputs, outputs, len(content))


def scores_of(graph: OnnxGraph, model: Model, rows: Value) -> Any:
    """The scores of float64 rows, prepared as the model does; the graph fails where the model refuses."""
    if isinstance(model.calibration, Calibration):
        # Of p = softmax(slope * s), dp/ds = slope * p (1 - p): slope / 4 at most, and rarely near it.
        graph.steepness = model.calibration.slope / 8
    return scores(graph, model, finite(graph, prepared(graph, rows, model.preparing)))


def labels_and_shares(graph: OnnxGraph, model: Model, found: Value) -> tuple[Value, Any]:
    """Labels and float64 probabilities, from scores."""
    classes = model.classes
    assert classes is not None
    kind = _LABELS.get(classes.dtype.kind)
    if kind is None:
        raise DataError(f"classes of type {classes.dtype} cannot be exported; use numbers or text.")
    if isinstance(model.calibration, Calibration):
        logits = model.calibration.slope * found
        if model.calibration.biases is not None:
            logits = logits + model.calibration.biases
        shares = graph.op("Softmax", logits, axis=1)
    else:
        shares = simplex(graph, estimates(graph, model, found), model.outputs)
    place = graph.op("ArgMax", found, dtype="int64", axis=1, keepdims=0)
    return graph.op("Gather", graph.constant(classes, kind), place, dtype=kind), shares


def simplex(graph: OnnxGraph, scores: Value, outputs: int) -> Any:
    """`calibration.project_to_simplex`: max(s - tau, 0), with tau from the scores in descending order."""
    shifted = np.maximum(scores - graph.op("ReduceMax", scores, [1], keepdims=1), -1.0)
    descending = graph.op("TopK", shifted, [outputs], results=2, axis=1, largest=1, sorted=1)
    excess = graph.op("CumSum", descending, 1) - 1.0
    support = (descending * np.arange(1.0, outputs + 1) > excess).astype("float64")
    # The support is the first of them, so that their sum is the excess at its end.
    total = graph.op("ReduceSum", descending * support, [1], keepdims=1) - 1.0
    return np.maximum(shifted - total / graph.op("ReduceSum", support, [1], keepdims=1), 0.0)


def _answers(graph: OnnxGraph, model: Model, found: Value) -> None:
    """What follows from scores, as outputs: predicted targets, or labels with probabilities and scores."""
    shape, calibration, precision = ("rows", model.outputs), model.calibration, graph.precision
    if model.classes is None and not model.labels:
        told = estimates(graph, model, found)
        graph.output("prediction", told, precision, shape, "the predicted targets")
        if model.spread is not None:
            reach = model.spread.reach()
            for name, side in (("low", -reach), ("high", reach)):
                graph.output(name, told + side, precision, shape, "an interval of 95 % of the truths")
        return
    known = model.labels or np.asarray(model.classes).tolist()
    told = ", ".join(map(str, known[:20])) + ", ..." * (len(known) > 20)
    if not model.labels:
        label, shares = labels_and_shares(graph, model, found)
        graph.output("label", label, label.dtype, ("rows",), "the class with the largest score")
        told = f"the classes {told}"
    else:
        if isinstance(calibration, LabelCalibration):
            shares = expit(found * (2.0 * calibration.slope) + (calibration.biases - calibration.slope))
        else:
            shares = found.clip(0.0, 1.0)
        cuts = np.full(model.outputs, 0.5) if model.cuts is None else model.cuts
        graph.output("label", shares >= cuts, "int64", shape, f"0 or 1 for each of {told}")
    graph.output("probabilities", shares, precision, shape, f"of {told}")
    graph.output("scores", found, precision, shape, "as decision_function gives them")


_LEAST_OPSET = 18
"""The first in which sums and maxima take their axes as we write them."""

_NEEDS = "export", "a scikit-learn pipeline as an ONNX file"
_OPTIONS = {"zipmap": [True, False, "columns"], "nocl": [True, False], "output_class_labels": [False, True]}


def register_converters() -> None:
    """Make fedsolve's estimators known to skl2onnx, so that pipelines with them convert whole.

    Doubles go in where the pipeline's inputs are DoubleTensorType, and probabilities are then those of
    `predict_proba` to 1e-9; with FloatTensorType, to 1e-5 as far as the steps before keep their digits.
    """
    # scikit-learn takes longer to import than all the rest
    from sklearn.base import ClassifierMixin, RegressorMixin

    from fedsolve import estimators

    skl2onnx = require("skl2onnx", *_NEEDS)
    shapes = require("skl2onnx.common.shape_calculator", *_NEEDS)
    for name, kind in vars(estimators).items():
        if getattr(kind, "__module__", "") != estimators.__name__:
            continue
        entered = kind, f"Fedsolve{name}"
        if issubclass(kind, ClassifierMixin):
            shape = shapes.calculate_linear_classifier_output_shapes
            skl2onnx.update_registered_converter(*entered, shape, _convert, options=_OPTIONS)
        elif issubclass(kind, RegressorMixin):
            shape = shapes.calculate_linear_regressor_output_shapes
            skl2onnx.update_registered_converter(*entered, shape, _convert)


def _convert(scope: Any, operator: Any, container: Any) -> None:
    """Give the container the nodes of an estimator's model: label and shares, or what it predicts."""
    model, target = operator.raw_operator.model_, container.target_opset_any_domain("")
    if target < _LEAST_OPSET:
        raise DataError(
            f"fedsolve's estimators need opset {_LEAST_OPSET}; pass target_opset={OPSET} instead of {target}."
        )
    (given,) = operator.inputs
    double = type(given.type).__name__ == "DoubleTensorType"
    graph = OnnxGraph("float64" if double else "float32", scope.get_unique_operator_name("fedsolve"))
    found = scores_of(graph, model, Value(graph, given.full_name, "as given").astype("float64"))
    values = [found]
    if model.classes is not None:
        label, found = labels_and_shares(graph, model, found)
        values = [label if label.dtype == "string" else label.astype("int64"), found]
    values[-1] = found.astype(graph.precision)
    for value, place in zip(values, operator.outputs, strict=True):
        graph.nodes.append(graph.onnx.helper.make_node("Identity", [value.edge], [place.full_name]))
    container.nodes.extend(graph.nodes)
    container.initializers.extend(graph.initialisers)
    container.node_domain_version_pair_sets.add(("", min(OPSET, target)))
