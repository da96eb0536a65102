"""Our estimators in scikit-learn's pipelines, converted whole by skl2onnx."""

from __future__ import annotations

from typing import Any

from fedsolve.data.backbones.common import require
from fedsolve.errors import DataError
from fedsolve.export.onnx_file import labels_and_shares, scores_of
from fedsolve.export.onnx_graph import OPSET, OnnxGraph

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
            [estimators.AFLRegressor, estimators.DeepAFLRegressor],
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
