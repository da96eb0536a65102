"""A graph of ONNX nodes under construction, and its values, which compute as arrays do.

numpy's operators and functions of values become nodes. So a formula that is written for arrays, such as an
activation or the mean of a link, writes its own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import special

from fedsolve.arrays import Array
from fedsolve.errors import DataError, require

OPSET = 20
"""The version of the operators: the first with RegexFullMatch, which recognises categories."""
IR_VERSION = 9
"""The version of the file format that came with this opset, so that runtimes of the time read the files."""

PRECISIONS = ("float64", "float32")
PREFIX = "fedsolve"
_TESTS = ("Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "RegexFullMatch")


_CENTRE, _DEGREE = 3.0, 20
"""Of the series for erf: the error is below 5e-14 everywhere."""


class OnnxGraph:
    """Nodes, constants, inputs and outputs.

    precision: of the matrix `features`, of wide layers and of what comes out. Raw columns, preparation,
               scores and what becomes of them are float64 in any case: centring large numbers, or adding
               large scores of opposite signs, would lose every digit in float32.
    """

    def __init__(self, precision: str = "float64", prefix: str = PREFIX) -> None:
        if precision not in PRECISIONS:
            raise DataError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}.")
        self.precision = precision
        self.prefix = prefix  # of the names of values, where other graphs are to stand beside this one
        self.steepness = 1.0  # how much probabilities move with a score
        self.onnx: Any = require("onnx", "export", "an ONNX file")
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.nodes: list[Any] = []
        self.initialisers: list[Any] = []
        self._taken: set[str] = set()

    def input(self, name: str, dtype: str, *sides: int, about: str = "") -> Value:
        """A tensor (rows, *sides) of `dtype` ("string" for text) that is fed to the graph."""
        return Value(self, self._edge(self.inputs, name, dtype, ("rows", *sides), about), dtype)

    def output(self, name: str, value: Value, dtype: str, shape: tuple[Any, ...], about: str = "") -> None:
        """Make a value an output of the graph; its name gets longer if an input has the same."""
        while name in self._taken:
            name = f"predicted_{name}"
        self.nodes.append(self.onnx.helper.make_node("Identity", [value.astype(dtype).edge], [name]))
        self._edge(self.outputs, name, dtype, shape, about)

    def _edge(self, edges: list[Any], name: str, dtype: str, shape: tuple[Any, ...], about: str) -> str:
        self._taken.add(name)
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype("O" if dtype == "string" else dtype))
        edges.append(self.onnx.helper.make_tensor_value_info(name, kind, shape, about))
        return name

    def op(
        self,
        kind: str,
        *inputs: Any,
        dtype: str | None = None,
        name: str | None = None,
        results: int = 1,
        **attributes: Any,
    ) -> Any:
        """What an operator gives, the first of its results.

        inputs: values, or numbers and arrays: whole numbers are places and axes, others are constants.
        dtype: of the result; that of the last value among the inputs unless given.
        name: of the node, which runtimes put into errors. results: how many there are.
        """
        values = [each if isinstance(each, Value) else self._literal(each, inputs) for each in inputs]
        given = [self._new(kind) for _ in range(results)]
        edges = [value.edge for value in values]
        self.nodes.append(self.onnx.helper.make_node(kind, edges, given, name=name or given[0], **attributes))
        last = [each for each in inputs if isinstance(each, Value)][-1]
        return Value(self, given[0], dtype or ("bool" if kind in _TESTS else last.dtype))

    def _literal(self, values: Any, beside: tuple[Any, ...]) -> Value:
        array = np.asarray(values)
        return self.constant(array, float_type(beside) if array.dtype.kind == "f" else array.dtype.name)

    def constant(self, values: Any, dtype: str = "float64") -> Value:
        """An array that the graph holds."""
        # A copy in the order of rows: what is written must not depend on how an array lies in memory.
        text = np.asarray(values).dtype.kind in "UO"
        array: Array = np.array(values, dtype="object" if text else dtype, order="C")
        result = self._new("constant")
        self.initialisers.append(self.onnx.numpy_helper.from_array(array, result))
        return Value(self, result, "string" if text else dtype)

    @contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """A block in which the graph's precision is this one."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    def affine(self, rows: Value, weight: Array, bias: Array | None = None) -> Any:
        """rows @ weight + bias in the graph's precision."""
        product = rows.astype(self.precision) @ weight
        return product if bias is None else product + bias

    def head(self, rows: Value, weight: Array, bias: Array | None = None) -> Any:
        """The same in float64, where numbers of any size may cancel: scores."""
        with self.computing("float64"):
            return self.affine(rows, weight, bias)

    def refuse(self, value: Value, wrong: Value, message: str) -> Any:
        """The float64 value (rows, ...); running the graph fails where `wrong` (rows, 1) holds in any row.

        ONNX has no assertion. A wrong row picks the second entry of a list with one entry, which onnxruntime
        refuses on a CPU. The node is named by the message, so the error shows it.
        """
        named = message if self.prefix == PREFIX else f"{message} ({self.prefix})"
        return value + self.op("Gather", [0.0], wrong.astype("int64"), dtype="float64", name=named)

    def joined(
        self, model: Any, value: Value, prefix: str, replaced: Mapping[str, Callable[[Value], Any]]
    ) -> Value:
        """What another ONNX model of one input and one output gives of this value.

        replaced: operators of one input that are written otherwise, by their kind.
        """
        inside = self.onnx.compose.add_prefix(model, f"{self._new(prefix)}/").graph
        (entrance,), (leaving,) = inside.input, inside.output
        self.nodes.append(self.onnx.helper.make_node("Identity", [value.edge], [entrance.name]))
        for node in inside.node:
            if node.op_type in replaced:
                written = replaced[node.op_type](Value(self, node.input[0], value.dtype))
                node = self.onnx.helper.make_node("Identity", [written.edge], node.output)
            self.nodes.append(node)
        self.initialisers.extend(inside.initializer)
        kind = self.onnx.helper.tensor_dtype_to_np_dtype(leaving.type.tensor_type.elem_type)
        return Value(self, leaving.name, kind.name)

    def _new(self, kind: str) -> str:
        name = f"{self.prefix}/{kind}_{len(self.nodes)}_{len(self.initialisers)}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def model(self, metadata: dict[str, str], about: str, version: str) -> Any:
        """The whole as a checked ONNX model."""
        helper = self.onnx.helper
        graph = helper.make_graph(
            self.nodes, "fedsolve", self.inputs, self.outputs, self.initialisers, doc_string=about
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="fedsolve",
            producer_version=version,
        )
        helper.set_model_props(model, metadata)
        return model


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
