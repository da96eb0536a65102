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
from fedsolve.export.onnx_graph import OnnxGraph, Value
from fedsolve.export.raw_rows import finite
from fedsolve.statistics.cox import CoxModel
from fedsolve.statistics.exponential import LINKS
from fedsolve.statistics.glm import GLMModel
from fedsolve.statistics.mixed import MixedFit
from fedsolve.statistics.results import RegressionModel
from fedsolve.tables.formula import categories_of, computed, described, evaluate

_EXAMPLES = (1.5, 60.0, 1000.0, 0.5, -1.0, 0.0)


class _Writer:
    """Columns of a table (rows, 1), and levels of its categories (rows, levels), as values of a graph."""

    def __init__(self, graph: OnnxGraph, model: RegressionModel, rows: Value) -> None:
        self.graph, self.model, self.rows = graph, model, rows
        schema = described(model.schema, model.features)
        self.levels = categories_of(schema, model.parameters.get("missing") == "schema")
        self._known: dict[str, Any] = {}
        self.weight = np.where(model.kept, model.coefficient, 0.0)
        self.places = {column.name: place for place, column in schema.places("number", "category", "date")}
        self.columns = {name: self.column(name) for name in self.places if name not in self.levels}

    def column(self, name: str, width: int = 1) -> Any:
        place = self.places[name]
        found = self.graph.op("Slice", self.rows, [place], [place + width], [1])
        found.name = name
        return found

    def level(self, name: str) -> Any:
        """1 in the place of a row's category; a row of another fails."""
        if name not in self._known:
            found = self.column(name, len(self.levels[name]))
            largest = self.graph.op("ReduceMax", found, [1], keepdims=1)
            message = f"refused: '{name}' has no category that the model knows"
            self._known[name] = self.graph.refuse(found, largest == 0.0, message)
        return self._known[name]

    def number(self, expression: str) -> Any:
        """What an expression of numbers gives."""
        try:
            return computed(expression, self.columns, self.model.scales or None)
        except (DataError, TypeError) as problem:
            raise DataError(
                f"'{expression}' has no form in ONNX. Change the formula, or predict with fedsolve."
            ) from problem

    def category(self, expression: str) -> str | None:
        """The category that a factor stands for, as it is or in C(...); None of a number."""
        if expression not in self.places:
            call: Any = ast.parse(expression, mode="eval").body
            if getattr(getattr(call, "func", None), "id", "") != "C":
                return None
            expression = call.args[0].id
        return expression if expression in self.levels else None

    def term(self, expressions: list[str], columns: list[int]) -> Any:
        """A term of the formula, with its coefficients."""
        category = {each: name for each in expressions if (name := self.category(each)) is not None}
        numbers = [each for each in expressions if each not in category]
        value: Any = self.graph.constant(1.0)
        for each in numbers:
            value = value * self.number(each)
        names = list(dict.fromkeys(category.values()))
        if not names and len(columns) == 1:
            return value * self.weight[columns[0]]
        table = self.table(names, numbers, columns)
        held = self.level(names[0])
        for name in names[1:]:
            pairs = self.graph.op("Unsqueeze", held, [2]) * self.graph.op("Unsqueeze", self.level(name), [1])
            held = self.graph.op("Reshape", pairs, [0, -1])
        return value * self.graph.head(held, table[:, None])

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
def linear_predictor(graph: OnnxGraph, model: RegressionModel, rows: Value) -> Any:
    writer, plan = _Writer(graph, model, rows), model.plan()
    # Zero for every row, so that a constant has as many.
    total = graph.op("Slice", rows, [0], [1], [1]) * 0.0
    names = plan.spec.column_names
    for term, places in plan.spec.term_indices.items():
        columns = [plan.names.index(names[place]) for place in places if names[place] in plan.names]
        if columns:
            total = total + writer.term([factor.expr for factor in term.factors], columns)
    for offset in plan.offsets:
        total = total + writer.number(offset)
    return finite(graph, total, "what the formula makes of a row")


@writes_estimates(GLMModel)
def mean(graph: OnnxGraph, model: GLMModel, found: Any) -> Any:
    return LINKS[model.facts["link"]].mean(found)


@writes_estimates(CoxModel)
def hazard(graph: OnnxGraph, model: CoxModel, found: Any) -> Any:
    return np.exp(found)
