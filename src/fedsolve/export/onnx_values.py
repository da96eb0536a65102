"""Values of an ONNX graph that compute as arrays do: numpy's operators and functions become nodes.

So a formula that is written for arrays, such as an activation or the mean of a link, writes its own nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import special

from fedsolve.errors import DataError

if TYPE_CHECKING:
    from fedsolve.export.onnx_graph import OnnxGraph

_CENTRE, _DEGREE = 3.0, 20
"""Of the series for erf: the error is below 5e-14 everywhere."""


class Value(NDArrayOperatorsMixin):
    """What an edge of a graph carries. Numbers and arrays that meet it become constants of its type.

    edge: its name in the graph. dtype: numpy's name of its type, or "string".
    name: of the column it is, where it is one; formulas look columns up by it.
    """

    def __init__(self, graph: OnnxGraph, edge: str, dtype: str, name: str = "") -> None:
        self.graph, self.edge, self.dtype, self.name = graph, edge, dtype, name

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **how: Any) -> Any:
        if method != "__call__" or how or ufunc not in _OPERATORS | _COMPOSED:
            raise DataError(f"numpy's {ufunc.__name__} has no form in ONNX.")
        dtype = float_type(inputs)
        given = [
            each.astype(dtype) if isinstance(each, Value) else self.graph.constant(each, dtype)
            for each in inputs
        ]
        operator = _OPERATORS.get(ufunc)
        found = _COMPOSED[ufunc](*given) if operator is None else self.graph.op(operator, *given)
        return found if out is None else out[0].become(found)

    def astype(self, dtype: str) -> Any:
        """The value in another type."""
        if dtype == self.dtype:
            return self
        kind = self.graph.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.graph.op("Cast", self, dtype=dtype, to=kind)

    def clip(self, low: float, high: float, out: Value | None = None) -> Any:
        """What `numpy.clip` gives."""
        found = self.graph.op("Clip", self, float(low), float(high))
        return found if out is None else out.become(found)

    def become(self, other: Value) -> Value:
        """What an operation in place does: from here on this is the other value."""
        self.edge, self.dtype = other.edge, other.dtype
        return self


def float_type(inputs: tuple[Any, ...]) -> str:
    """The type of the first number with digits after the point; float64 where there is none."""
    types = [each.dtype for each in inputs if isinstance(each, Value) and each.dtype.startswith("float")]
    return types[0] if types else "float64"


def _erf(value: Any) -> Any:
    """erf(x); onnxruntime has Erf in float32 alone.

    With z = |x|, erf(z) = 1 - exp(-z²) erfcx(z), and erfcx is a polynomial of (z - 3) / (z + 3) in [-1, 1).
    """
    if value.dtype == "float32":
        return value.graph.op("Erf", value)
    size = abs(value)
    place = (size - _CENTRE) / (size + _CENTRE)
    *others, series = _erfcx_coefficients()
    for coefficient in reversed(others):
        series = place * series + coefficient
    return np.sign(value) * (1.0 - np.exp(-(size * size)) * series)


@cache
def _erfcx_coefficients() -> tuple[float, ...]:
    """Of erfcx(3 (1 + t) / (1 - t)) as a polynomial of t, the constant first."""
    series = np.polynomial.Chebyshev.interpolate(
        lambda t: special.erfcx(_CENTRE * (1 + t) / (1 - t)), _DEGREE
    )
    return tuple(np.polynomial.chebyshev.cheb2poly(series.coef).tolist())


_OPERATORS: dict[Any, str] = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.divide: "Div",
    np.power: "Pow",
    np.matmul: "MatMul",
    np.negative: "Neg",
    np.absolute: "Abs",
    np.sign: "Sign",
    np.floor: "Floor",
    np.sqrt: "Sqrt",
    np.exp: "Exp",
    np.log: "Log",
    np.tanh: "Tanh",
    np.maximum: "Max",
    np.minimum: "Min",
    np.less: "Less",
    np.less_equal: "LessOrEqual",
    np.greater: "Greater",
    np.greater_equal: "GreaterOrEqual",
    np.equal: "Equal",
    np.isnan: "IsNaN",
    special.expit: "Sigmoid",
}
_COMPOSED: dict[Any, Callable[..., Any]] = {
    np.square: lambda x: x * x,
    np.expm1: lambda x: np.exp(x) - 1.0,
    np.log1p: lambda x: np.log(x + 1.0),
    np.log2: lambda x: np.log(x) / np.log(2.0),
    np.log10: lambda x: np.log(x) / np.log(10.0),
    np.not_equal: lambda x, y: 1.0 - (x == y).astype("float64"),
    special.erf: _erf,
    special.ndtr: lambda x: (special.erf(x * np.sqrt(0.5)) + 1.0) * 0.5,
}
