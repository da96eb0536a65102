"""A graph of ONNX nodes under construction: values are names, constants are numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, require

OPSET = 20
"""The version of the operators: the first with RegexFullMatch, which recognises categories."""
IR_VERSION = 9
"""The version of the file format that came with this opset, so that runtimes of the time read the files."""

PRECISIONS = ("float64", "float32")
PREFIX = "fedsolve"


class OnnxGraph:
    """Nodes, constants, inputs and outputs.

    precision: of the matrix `features`, of wide layers and of what comes out. Raw columns, preparation,
               scores and what becomes of them are float64 in any case: centring large numbers, or adding
               large scores of opposite signs, would lose every digit in float32.
    prefix:    of the names of values, where other graphs are to stand beside this one.
    steepness: how much probabilities move with a score.
    """

    def __init__(self, precision: str = "float64", prefix: str = PREFIX) -> None:
        if precision not in PRECISIONS:
            raise DataError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}.")
        self.precision = precision
        self.prefix = prefix
        self.steepness = 1.0
        self.onnx: Any = require("onnx", "export", "an ONNX file")
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.nodes: list[Any] = []
        self.initialisers: list[Any] = []
        self._taken: set[str] = set()

    # -- edges -------------------------------------------------------------------------------------

    def input(self, name: str, dtype: str, *sides: int, about: str = "") -> str:
        """A tensor (rows, *sides) of `dtype` ("string" for text) that is fed to the graph."""
        return self._edge(self.inputs, name, dtype, ("rows", *sides), about)

    def output(self, name: str, value: str, dtype: str, shape: tuple[Any, ...], about: str = "") -> str:
        """Make a value an output of the graph; its name gets longer if an input has the same."""
        while name in self._taken:
            name = f"predicted_{name}"
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))
        return self._edge(self.outputs, name, dtype, shape, about)

    def _edge(self, edges: list[Any], name: str, dtype: str, shape: tuple[Any, ...], about: str) -> str:
        self._taken.add(name)
        kind = (
            self.onnx.TensorProto.STRING
            if dtype == "string"
            else self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        )
        edges.append(self.onnx.helper.make_tensor_value_info(name, kind, shape, about))
        return name

    # -- values ------------------------------------------------------------------------------------

    def op(
        self, kind: str, *inputs: str, name: str | None = None, results: int = 1, **attributes: Any
    ) -> str:
        """What an operator gives, the first of its results.

        name: of the node, which runtimes put into errors. results: how many there are.
        """
        given = [self._new(kind) for _ in range(results)]
        self.nodes.append(
            self.onnx.helper.make_node(kind, inputs, given, name=name or given[0], **attributes)
        )
        return given[0]

    def constant(self, values: Any, dtype: str | None = None) -> str:
        """An array that the graph holds, in the graph's precision unless `dtype` says otherwise."""
        # A copy in the order of rows: what is written must not depend on how an array lies in memory.
        array: Array = np.array(values, dtype=dtype or self.precision, order="C")
        result = self._new("constant")
        if array.dtype.kind in "UO":
            tensor = self.onnx.helper.make_tensor(
                result, self.onnx.TensorProto.STRING, array.shape, [text.encode() for text in array.ravel()]
            )
        else:
            tensor = self.onnx.numpy_helper.from_array(array, result)
        self.initialisers.append(tensor)
        return result

    def cast(self, value: str, dtype: str | None = None) -> str:
        """The value in `dtype`, by default the graph's precision."""
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.precision))
        return self.op("Cast", value, to=kind)

    def affine(self, rows: str, weight: Array, bias: Array | None = None) -> str:
        """rows @ weight + bias in the graph's precision."""
        product = self.op("MatMul", self.cast(rows), self.constant(weight))
        return product if bias is None else self.op("Add", product, self.constant(bias))

    @contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """A block in which the graph's precision is this one."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    def head(self, rows: str, weight: Array, bias: Array | None = None) -> str:
        """The same in float64, where numbers of any size may cancel: scores."""
        product = self.op("MatMul", self.cast(rows, "float64"), self.constant(weight, "float64"))
        return product if bias is None else self.op("Add", product, self.constant(bias, "float64"))

    def standardised(self, rows: str, centre: Array, scale: Array) -> str:
        """(rows - centre) / scale in float64."""
        shifted = self.op("Sub", rows, self.constant(centre, "float64"))
        return self.op("Div", shifted, self.constant(scale, "float64"))

    def refuse(self, value: str, wrong: str, message: str) -> str:
        """The float64 value (rows, ...); running the graph fails where `wrong` (rows, 1) holds in any row.

        ONNX has no assertion. A wrong row picks the second entry of a list with one entry, which onnxruntime
        refuses on a CPU. The node is named by the message, so the error shows it.
        """
        place = self.cast(wrong, "int64")
        named = message if self.prefix == PREFIX else f"{message} ({self.prefix})"
        nothing = self.op("Gather", self.constant([0.0], "float64"), place, name=named)
        return self.op("Add", value, nothing)

    def joined(
        self, model: Any, value: str, prefix: str, replaced: Mapping[str, Callable[[str], str]]
    ) -> str:
        """What another ONNX model of one input and one output gives of this value.

        replaced: operators of one input that are written otherwise, by their kind.
        """
        inside = self.onnx.compose.add_prefix(model, f"{self._new(prefix)}/").graph
        (entrance,), (leaving,) = inside.input, inside.output
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [entrance.name]))
        for node in inside.node:
            if node.op_type in replaced:
                written = replaced[node.op_type](node.input[0])
                node = self.onnx.helper.make_node("Identity", [written], node.output)
            self.nodes.append(node)
        self.initialisers.extend(inside.initializer)
        return str(leaving.name)

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
