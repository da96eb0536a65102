"""Functions of numpy and scipy as ONNX nodes that onnxruntime has kernels for in both precisions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.special import erfcx

from fedsolve.arrays import Array
from fedsolve.calibration import Calibration
from fedsolve.errors import DataError
from fedsolve.export.onnx_graph import OnnxGraph

_CENTRE, _DEGREE = 3.0, 20
"""Of the series for erf: the error is below 5e-14 everywhere."""


def activation(graph: OnnxGraph, name: str, value: str) -> str:
    """The activation of `backends.activations` of this name."""
    if name not in _ACTIVATIONS:
        raise DataError(
            f"the activation '{name}' cannot be exported; known are {', '.join(_ACTIVATIONS)}. Train with "
            "one of them."
        )
    return _ACTIVATIONS[name](graph, value)


def probabilities(graph: OnnxGraph, scores: str, calibration: Calibration) -> str:
    """softmax(slope * scores + biases), of float64 as all that is made of scores."""
    logits = graph.op("Mul", scores, graph.constant(calibration.slope, "float64"))
    if calibration.biases is not None:
        logits = graph.op("Add", logits, graph.constant(calibration.biases, "float64"))
    return softmax(graph, logits)


def softmax(graph: OnnxGraph, logits: str) -> str:
    return graph.op("Softmax", logits, axis=1)


def simplex(graph: OnnxGraph, scores: str, outputs: int) -> str:
    """`calibration.project_to_simplex`: max(s - tau, 0), with tau from the scores in descending order."""
    axis = graph.constant([1], "int64")
    shifted = graph.op("Sub", scores, graph.op("ReduceMax", scores, axis, keepdims=1))
    shifted = graph.op("Max", shifted, graph.constant(-1.0, "float64"))
    count = graph.constant([outputs], "int64")
    descending = graph.op("TopK", shifted, count, results=2, axis=1, largest=1, sorted=1)
    excess = graph.op("CumSum", descending, graph.constant(1, "int64"))
    excess = graph.op("Sub", excess, graph.constant(1.0, "float64"))
    places = graph.constant(np.arange(1, outputs + 1), "float64")
    support = graph.cast(graph.op("Greater", graph.op("Mul", descending, places), excess), "float64")
    # The support is the first of them, so that their sum is the excess at its end.
    total = graph.op("ReduceSum", graph.op("Mul", descending, support), axis, keepdims=1)
    total = graph.op("Sub", total, graph.constant(1.0, "float64"))
    tau = graph.op("Div", total, graph.op("ReduceSum", support, axis, keepdims=1))
    return graph.op("Max", graph.op("Sub", shifted, tau), graph.constant(0.0, "float64"))


def erf(graph: OnnxGraph, value: str, precision: str) -> str:
    """erf(x); onnxruntime has Erf in float32 alone.

    With z = |x|, erf(z) = 1 - exp(-z²) erfcx(z), and erfcx is a polynomial of (z - 3) / (z + 3) in [-1, 1).
    """
    if precision == "float32":
        return graph.op("Erf", value)
    size, centre = graph.op("Abs", value), graph.constant(_CENTRE, precision)
    place = graph.op("Div", graph.op("Sub", size, centre), graph.op("Add", size, centre))
    *others, last = _erfcx_coefficients()
    series = graph.constant(last, precision)
    for coefficient in reversed(others):
        series = graph.op("Add", graph.op("Mul", series, place), graph.constant(coefficient, precision))
    tail = graph.op("Mul", graph.op("Exp", graph.op("Neg", graph.op("Mul", size, size))), series)
    positive = graph.op("Sub", graph.constant(1.0, precision), tail)
    return graph.op("Mul", graph.op("Sign", value), positive)


@cache
def _erfcx_coefficients() -> tuple[float, ...]:
    """Of erfcx(3 (1 + t) / (1 - t)) as a polynomial of t, the constant first."""
    series = np.polynomial.Chebyshev.interpolate(lambda t: erfcx(_CENTRE * (1 + t) / (1 - t)), _DEGREE)
    return tuple(np.polynomial.chebyshev.cheb2poly(series.coef).tolist())


def _none(graph: OnnxGraph, value: str) -> str:
    return value


def _gelu(graph: OnnxGraph, value: str) -> str:
    slope = float(np.sqrt(2.0 / np.pi))
    square = graph.op("Mul", graph.op("Mul", value, value), graph.constant(0.044715 * slope))
    inner = graph.op("Mul", graph.op("Add", square, graph.constant(slope)), value)
    share = graph.op("Add", graph.op("Tanh", inner), graph.constant(1.0))
    return graph.op("Mul", value, graph.op("Mul", share, graph.constant(0.5)))


def _gelu_erf(graph: OnnxGraph, value: str) -> str:
    inner = erf(graph, graph.op("Mul", value, graph.constant(np.sqrt(0.5))), graph.precision)
    share = graph.op("Add", inner, graph.constant(1.0))
    return graph.op("Mul", value, graph.op("Mul", share, graph.constant(0.5)))


def _leaky_relu(graph: OnnxGraph, value: str) -> str:
    return graph.op("Max", value, graph.op("Mul", value, graph.constant(0.01)))


def _hardswish(graph: OnnxGraph, value: str) -> str:
    share = _clipped(graph, graph.op("Add", value, graph.constant(3.0)), 0.0, 6.0)
    return graph.op("Div", graph.op("Mul", value, share), graph.constant(6.0))


def _softshrink(graph: OnnxGraph, value: str) -> str:
    return graph.op("Sub", value, _clipped(graph, value, -0.5, 0.5))


def _clipped(graph: OnnxGraph, value: str, low: float, high: float) -> str:
    return graph.op("Clip", value, graph.constant(low), graph.constant(high))


def _operator(kind: str) -> Callable[[OnnxGraph, str], str]:
    return lambda graph, value: graph.op(kind, value)


_ACTIVATIONS: dict[str, Callable[[OnnxGraph, str], str]] = {
    "none": _none,
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "relu": _operator("Relu"),
    "leaky_relu": _leaky_relu,
    "tanh": _operator("Tanh"),
    "hardswish": _hardswish,
    "softshrink": _softshrink,
    "sigmoid": _operator("Sigmoid"),
}


def kernel_rows(graph: OnnxGraph, rows: str, points: Array, bandwidth: float) -> str:
    """exp(-|x - z|² / h) of float64 rows (rows, d) and points (points, d): (rows, points)."""
    scale = -1.0 / bandwidth
    cross = graph.op("MatMul", rows, graph.constant(points.T * (-2.0 * scale), "float64"))
    squares = graph.op("ReduceSumSquare", rows, graph.constant([1], "int64"), keepdims=1)
    own = graph.op("Mul", squares, graph.constant(scale, "float64"))
    far = graph.op("Add", cross, graph.constant(np.einsum("ij,ij->i", points, points) * scale, "float64"))
    return graph.op("Exp", graph.op("Add", far, own))
