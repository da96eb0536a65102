"""Regressions as nodes: what a formula makes of raw columns, times the coefficients, through the link.

A term is a product of factors. Those that are numbers are written as their expressions; what is left of a
term depends on categories alone, so that it is a table with an entry for each combination of their levels.
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.export.families import writes, writes_estimates
from fedsolve.export.onnx_functions import erf
from fedsolve.export.onnx_graph import OnnxGraph
from fedsolve.export.raw_rows import finite
from fedsolve.statistics.cox import CoxModel
from fedsolve.statistics.glm import GLMModel
from fedsolve.statistics.mixed import MixedFit
from fedsolve.statistics.results import RegressionModel
from fedsolve.tables.formula import categories_of, described, evaluate

_OPERATORS = {"Add": "Add", "Sub": "Sub", "Mult": "Mul", "Div": "Div", "Pow": "Pow", "USub": "Neg"}
_COMPARISONS = {"Lt": "Less", "Gt": "Greater", "LtE": "LessOrEqual", "GtE": "GreaterOrEqual", "Eq": "Equal"}
_FUNCTIONS = {"log": "Log", "exp": "Exp", "sqrt": "Sqrt", "abs": "Abs", "floor": "Floor"}
_FUNCTIONS |= {"minimum": "Min", "maximum": "Max", "I": "Identity"}
_EXAMPLES = (1.5, 60.0, 1000.0, 0.5, -1.0, 0.0)


class _Writer:
    """Columns of a table (rows, 1), and levels of its categories (rows, levels), as values of a graph."""

    def __init__(self, graph: OnnxGraph, model: RegressionModel, rows: str) -> None:
        self.graph, self.model, self.rows = graph, model, rows
        schema = described(model.schema, model.features)
        self.levels = categories_of(schema, model.parameters.get("missing") == "schema")
        self._known: dict[str, str] = {}
        self.weight = np.where(model.kept, model.coefficient, 0.0)
        self.places = {column.name: place for place, column in schema.places("number", "category", "date")}

    def constant(self, value: float) -> str:
        return self.graph.constant(float(value), "float64")

    def column(self, name: str, width: int = 1) -> str:
        ends = ([self.places[name]], [self.places[name] + width], [1])
        return self.graph.op("Slice", self.rows, *(self.graph.constant(end, "int64") for end in ends))

    def level(self, name: str) -> str:
        """1 in the place of a row's category; a row of another fails."""
        if name not in self._known:
            found, axis = self.column(name, len(self.levels[name])), self.graph.constant([1], "int64")
            largest = self.graph.op("ReduceMax", found, axis, keepdims=1)
            message = f"refused: '{name}' has no category that the model knows"
            none = self.graph.op("Equal", largest, self.constant(0.0))
            self._known[name] = self.graph.refuse(found, none, message)
        return self._known[name]

    def number(self, node: Any) -> str:
        """An expression of numbers."""
        graph = self.graph
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return self.constant(node.value)
        if isinstance(node, ast.Name) and node.id not in self.levels:
            return self.column(node.id)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind = _COMPARISONS.get(type(node.ops[0]).__name__)
            if kind:
                sides = self.number(node.left), self.number(node.comparators[0])
                return graph.cast(graph.op(kind, *sides), "float64")
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op).__name__ in _OPERATORS:
            parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            return graph.op(_OPERATORS[type(node.op).__name__], *map(self.number, parts))
        if isinstance(node, ast.Call) and not node.keywords:
            name, values = node.func.id, [*map(self.number, node.args)]  # type: ignore[attr-defined]
            if name in _FUNCTIONS:
                return graph.op(_FUNCTIONS[name], *values)
            if name in ("center", "scale"):
                mean, deviation = self.model.scales[node.args[0].id]  # type: ignore[attr-defined]
                whole = np.array([mean]), np.array([deviation if name == "scale" else 1.0])
                return graph.standardised(values[0], *whole)
            if name in ("log2", "log10"):
                return graph.op("Div", graph.op("Log", *values), self.constant(np.log(float(name[3:]))))
        raise DataError(
            f"'{ast.unparse(node)}' has no form in ONNX. Change the formula, or predict with fedsolve."
        )

    def term(self, expressions: list[str], columns: list[int]) -> str:
        """A term of the formula, with its coefficients."""
        trees: dict[str, Any] = {
            each: ast.Name(each) if each in self.places else ast.parse(each, mode="eval").body
            for each in expressions
        }
        category: dict[str, str] = {}
        for each, tree in trees.items():
            named = tree.args[0] if isinstance(tree, ast.Call) and tree.func.id == "C" else tree  # type: ignore[attr-defined]
            if isinstance(named, ast.Name) and named.id in self.levels:
                category[each] = named.id
        numbers = [each for each in expressions if each not in category]
        value = self.constant(1.0)
        for each in numbers:
            value = self.graph.op("Mul", value, self.number(trees[each]))
        names = list(dict.fromkeys(category.values()))
        if not names and len(columns) == 1:
            return self.graph.op("Mul", value, self.constant(self.weight[columns[0]]))
        table = self.table(names, numbers, columns)
        held = self.level(names[0])
        for name in names[1:]:
            sides = [
                self.graph.op("Unsqueeze", each, self.graph.constant([axis], "int64"))
                for each, axis in ((held, 2), (self.level(name), 1))
            ]
            shape = self.graph.constant([0, -1], "int64")
            held = self.graph.op("Reshape", self.graph.op("Mul", *sides), shape)
        return self.graph.op("Mul", value, self.graph.head(held, table[:, None]))

    def table(self, names: list[str], numbers: list[str], columns: list[int]) -> Array:
        """What the term's columns and coefficients give for each combination of levels, over its numbers."""
        import pandas

        plan, model = self.model.plan(), self.model
        combined = [*itertools.product(*(self.levels[name] for name in names))]
        for example in _EXAMPLES if names else ():
            rows: dict[str, Any] = {name: np.full(len(combined), example) for name in self.places}
            for name, levels in self.levels.items():
                place = names.index(name) if name in names else None
                cells = [levels[0] if place is None else each[place] for each in combined]
                rows[name] = pandas.Categorical(cells, levels)
            frame = pandas.DataFrame(rows)
            product = np.prod([evaluate(each, frame, model.scales) for each in numbers], axis=0)
            if np.all(np.isfinite(product) & (product != 0)):
                found = plan.columns(frame, model.scales or None)[:, columns]
                return np.asarray(found @ self.weight[columns] / product)
        raise DataError(f"'{':'.join([*names, *numbers])}' has no form in ONNX. Predict with fedsolve.")


@writes(GLMModel, CoxModel, MixedFit)
def linear_predictor(graph: OnnxGraph, model: RegressionModel, rows: str) -> str:
    writer, plan = _Writer(graph, model, rows), model.plan()
    # Zero for every row, so that a constant has as many.
    first = graph.op("Slice", rows, *(graph.constant(end, "int64") for end in ([0], [1], [1])))
    total = graph.op("Mul", first, writer.constant(0.0))
    names = plan.spec.column_names
    for term, places in plan.spec.term_indices.items():
        columns = [plan.names.index(names[place]) for place in places if names[place] in plan.names]
        if columns:
            written = writer.term([factor.expr for factor in term.factors], columns)
            total = graph.op("Add", total, written)
    for offset in plan.offsets:
        total = graph.op("Add", total, writer.number(ast.parse(offset.strip(), mode="eval").body))
    return finite(graph, total, "what the formula makes of a row")


@writes_estimates(GLMModel)
def mean(graph: OnnxGraph, model: GLMModel, found: str) -> str:
    def constant(value: float) -> str:
        return graph.constant(value, "float64")

    match model.facts["link"]:
        case "log":
            return graph.op("Exp", found)
        case "logit":
            return graph.op("Sigmoid", found)
        case "probit":
            share = erf(graph, graph.op("Mul", found, constant(np.sqrt(0.5))), "float64")
            return graph.op("Mul", graph.op("Add", share, constant(1.0)), constant(0.5))
        case "cloglog":
            return graph.op("Sub", constant(1.0), graph.op("Exp", graph.op("Neg", graph.op("Exp", found))))
        case "inverse":
            return graph.op("Div", constant(1.0), found)
        case "inverse-squared":
            return graph.op("Div", constant(1.0), graph.op("Sqrt", found))
        case "sqrt":
            return graph.op("Mul", found, found)
    return found


@writes_estimates(CoxModel)
def hazard(graph: OnnxGraph, model: CoxModel, found: str) -> str:
    return graph.op("Exp", found)
