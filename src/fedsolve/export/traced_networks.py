"""Networks of gradient methods as nodes, by torch's tracing exporter."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from scipy.special import erf

from fedsolve.data.backbones.onnx import trace
from fedsolve.errors import DataError, first_line, require
from fedsolve.export.families import softmax_estimates, writes, writes_estimates
from fedsolve.export.onnx_graph import OPSET, OnnxGraph, Value
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
def network_scores(graph: OnnxGraph, model: GradientModel, rows: Value) -> Any:
    """The logits; in float32 where the network was trained in it, or the graph is of it."""
    return _through(graph, model, rows, features=False)


writes_estimates(GradientModel, PersonalGradientModel, ShiftedModel, PrototypeModel)(softmax_estimates)


@writes(PrototypeModel)
def prototype_scores(graph: OnnxGraph, model: PrototypeModel, rows: Value) -> Any:
    """Minus the distances between prototypes and the direction of what enters the last layer, in float64."""
    seen: Any = _through(graph, model, rows, features=True)
    prototypes = np.asarray(model.prototypes, dtype=np.float64)
    seen = seen / np.maximum(np.sqrt(graph.op("ReduceSumSquare", seen, [1], keepdims=1)), 1e-12)
    squares = graph.op("ReduceSumSquare", seen, [1], keepdims=1) + np.square(prototypes).sum(axis=1)
    apart = np.maximum(squares - seen @ (2 * prototypes.T), 0.0)
    far = graph.constant(np.full(model.outputs, FAR))
    return -graph.op("Where", np.asarray(model.owned, dtype=bool), np.sqrt(apart), far)


def _through(graph: OnnxGraph, model: GradientModel, rows: Value, features: bool) -> Any:
    """Its logits, or the features that enter its last layer, in float64.

    The network computes in float32 where it was trained in it.
    """
    named = model.parameters["network"]
    precision = "float32" if "float32" in (graph.precision, model.parameters["precision"]) else "float64"
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
        with torch.no_grad():
            trace(Whole().eval(), example, file, "rows", "scores", OPSET)
    except Exception as problem:  # networks of other people may hold anything
        raise DataError(
            f"torch cannot export the network '{named}' ({type(problem).__name__}: {first_line(problem)}). "
            "Train with one of fedsolve's own networks, or predict with fedsolve."
        ) from problem
    proto = graph.onnx.load_model_from_string(file.getvalue())
    kinds = {node.op_type for node in proto.graph.node}
    if precision == "float64" and kinds & SINGLE_ONLY:
        raise DataError(
            f"the network '{named}' computes in float64, for which onnxruntime has no "
            f"{', '.join(sorted(kinds & SINGLE_ONLY))}. Export it with precision float32."
        )
    return graph.joined(proto, rows.astype(precision), "network", {"Erf": erf}).astype("float64")
