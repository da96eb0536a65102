"""Networks of gradient methods as nodes, by torch's tracing exporter."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from fedsolve.errors import DataError, first_line, require
from fedsolve.export.families import softmax_estimates, writes, writes_estimates
from fedsolve.export.onnx_functions import erf
from fedsolve.export.onnx_graph import OPSET, OnnxGraph
from fedsolve.gradient.feddbe import ShiftedModel
from fedsolve.gradient.fedpcl import FAR, PrototypeModel
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.networks import features_of

_EXAMPLE_ROWS = 3
"""Rows that are traced: more than one, so that no operation looks like one of a single row."""

_LAYERS = "AveragePool Conv ConvTranspose GlobalAveragePool GlobalLpPool GlobalMaxPool InstanceNormalization"
_CURVES = "Celu Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Softplus Softsign ThresholdedRelu"
SINGLE_ONLY = frozenset(f"MeanVarianceNormalization {_LAYERS} {_CURVES}".split())
"""Operators of networks that onnxruntime's CPU kernels compute in float32 alone."""


@writes(GradientModel, PersonalGradientModel, ShiftedModel)
def network_scores(graph: OnnxGraph, model: GradientModel, rows: str) -> str:
    """The logits; in float32 where the network was trained in it, or the graph is of it."""
    return graph.cast(_through(graph, model, rows, features=False), "float64")


writes_estimates(GradientModel, PersonalGradientModel, ShiftedModel, PrototypeModel)(softmax_estimates)


@writes(PrototypeModel)
def prototype_scores(graph: OnnxGraph, model: PrototypeModel, rows: str) -> str:
    """Minus the distances between prototypes and the direction of what enters the last layer, in float64."""
    seen = graph.cast(_through(graph, model, rows, features=True), "float64")
    axis, prototypes = graph.constant([1], "int64"), np.asarray(model.prototypes, dtype=np.float64)
    length = graph.op("Sqrt", graph.op("ReduceSumSquare", seen, axis, keepdims=1))
    seen = graph.op("Div", seen, graph.op("Max", length, graph.constant(1e-12, "float64")))
    squares = graph.op("ReduceSumSquare", seen, axis, keepdims=1)
    squares = graph.op("Add", squares, graph.constant(np.square(prototypes).sum(axis=1), "float64"))
    cross = graph.op("MatMul", seen, graph.constant(2 * prototypes.T, "float64"))
    apart = graph.op("Max", graph.op("Sub", squares, cross), graph.constant(0.0, "float64"))
    far = graph.constant(np.full(model.outputs, FAR), "float64")
    near = graph.op("Where", graph.constant(model.owned, "bool"), graph.op("Sqrt", apart), far)
    return graph.op("Neg", near)


def _through(graph: OnnxGraph, model: GradientModel, rows: str, features: bool) -> str:
    named = model.parameters["network"]
    precision = "float32" if "float32" in (graph.precision, model.parameters["precision"]) else "float64"
    proto = traced(graph, model, features, precision)
    kinds = {node.op_type for node in proto.graph.node}
    if precision == "float64" and kinds & SINGLE_ONLY:
        raise DataError(
            f"the network '{named}' computes in float64, for which onnxruntime has no "
            f"{', '.join(sorted(kinds & SINGLE_ONLY))}. Export it with precision float32."
        )
    replaced = {"Erf": lambda value: erf(graph, value, precision)}
    return graph.joined(proto, graph.cast(rows, precision), "network", replaced)


def traced(graph: OnnxGraph, model: GradientModel, features: bool, precision: str) -> Any:
    """The network as an ONNX model of rows: its logits, or the features that enter its last layer."""
    torch = require("torch", "torch", "exporting a network")
    kind = getattr(torch, precision)
    network, images = model.network().to("cpu", kind), model.images("cpu", precision)

    class Whole(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, rows: Any) -> Any:
            return features_of(self.network, images.read(rows))[0 if features else 1]

    example = torch.zeros(_EXAMPLE_ROWS, model.features, dtype=kind)
    file = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # The tracing exporter is announced as legacy; the other one needs further packages.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Whole().eval(),
                (example,),
                file,
                input_names=["rows"],
                output_names=["scores"],
                dynamic_axes={"rows": {0: "rows"}, "scores": {0: "rows"}},
                opset_version=OPSET,
                dynamo=False,
            )
    except Exception as problem:  # networks of other people may hold anything
        raise DataError(
            f"torch cannot export the network '{model.parameters['network']}' ({type(problem).__name__}: "
            f"{first_line(problem)}). Train with one of fedsolve's own networks, or predict with fedsolve."
        ) from problem
    return graph.onnx.load_model_from_string(file.getvalue())
