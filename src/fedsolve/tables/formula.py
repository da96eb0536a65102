"""Formulas: the same columns at every site, because names and levels come from the schema and not from rows.

    outcome ~ age + C(sex, Treatment('f')) + age:C(sex) + log(dose) + scale(bmi) + offset(log(days))

formulaic parses them and builds columns. A formula comes from whoever asks, and it is run where the rows are:
only arithmetic, comparisons and the functions named here are let through (`check`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from threading import RLock
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, did_you_mean, explained, require
from fedsolve.tables.schema import Column, Schema

INTERCEPT = "Intercept"

_NAMES = "log log2 log10 log1p exp expm1 sqrt abs floor minimum maximum"
_MATHS: dict[str, Any] = {name: getattr(np, name) for name in _NAMES.split()}
_CODING = ("C", "I", "Treatment", "Sum", "center", "scale", "offset")
_NODES = (
    *(ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.keyword, ast.List, ast.operator, ast.unaryop, ast.cmpop),
)
_LONGEST = 4000
_LOCK = RLock()


@contextmanager
def _parsing() -> Iterator[None]:
    """Python 3.11 counts how deep an expression is for all threads together, and fails where two parse."""
    with _LOCK:
        yield


one_parser = _parsing()


@one_parser
def check(expression: str, variables: Iterable[str]) -> ast.Expression:
    """The expression, parsed; refused where it is more than arithmetic on columns."""
    known = [*variables]
    _without_backticks(expression)
    with explained(f"'{expression}' is no expression", kinds=(SyntaxError, ValueError)):
        tree = ast.parse(expression.strip(), mode="eval")
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and getattr(node.func, "id", None) not in (*_MATHS, *_CODING)
        if called or not isinstance(node, _NODES):
            raise DataError(
                f"'{expression}' may use columns, numbers, arithmetic, comparisons and "
                f"{', '.join((*_MATHS, *_CODING))}; "
                f"{ast.unparse(node.func) if isinstance(node, ast.Call) else type(node).__name__.lower()} "
                "is none of these."
            )
        if isinstance(node, ast.Name) and node.id not in (*known, *_MATHS, *_CODING):
            raise unknown(node.id, known)
        if isinstance(node, ast.BinOp):
            sides = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
            power = getattr(getattr(node.right, "operand", node.right), "value", None)
            small = isinstance(power, int | float) and abs(power) <= 10
            if any(isinstance(side, str) for side in sides) or (isinstance(node.op, ast.Pow) and not small):
                raise DataError(f"'{expression}': powers are of numbers from -10 to 10, and text has none.")
    return tree


def _without_backticks(expression: str) -> None:
    if "`" in expression:
        raise DataError(
            f"'{expression}': only a column that stands by itself may have a name in backticks. Rename the "
            "column to use it in a function."
        )


def words_of(text: str) -> list[str]:
    """The words of a formula that must be names of columns."""
    bare = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "", text)
    found = re.findall(r"(?<![\w.])([^\W\d]\w*)(?![\w(.]|\s*=(?!=))", bare)
    return [name for name in found if name not in (*_MATHS, *_CODING) and not iskeyword(name)]


def unknown(name: str, known: Sequence[str]) -> DataError:
    """There is no such column."""
    shown = f"{', '.join(known[:20])}{', ...' * (len(known) > 20)}"
    return DataError(f"no column '{name}'.{did_you_mean(name, known)} The columns are {shown}.")


def evaluate(expression: str, frame: Any, scales: Mapping[str, Any] | None = None) -> Array:
    """The number of every row (rows,); the second of two categories is 1, the first 0.

    scales: (mean, deviation) of the columns that `center` and `scale` are told of.
    """
    values = computed(expression, {str(name): frame[name] for name in frame}, scales)
    if hasattr(values, "cat"):
        levels = list(values.cat.categories)
        if len(levels) != 2:
            raise DataError(
                f"'{expression}' has {len(levels)} categories ({', '.join(map(str, levels[:6]))}); an "
                f"outcome is a number or has two. Compare it: I({expression} == {levels[-1]!r})."
            )
        values = values.cat.codes
    found = np.asarray(values, dtype=np.float64)
    return np.broadcast_to(found, len(frame)) if found.ndim == 0 else found


def computed(expression: str, columns: Mapping[str, Any], scales: Mapping[str, Any] | None = None) -> Any:
    """What an expression makes of columns, which are arrays or compute as arrays do."""
    if expression in columns:
        return columns[expression]
    names = {**_context(scales), "I": lambda x: x, **columns}
    code = compile(check(expression, columns), "<formula>", "eval")
    with np.errstate(all="ignore"):
        return eval(code, {"__builtins__": {}}, names)


# -- what rows are -----------------------------------------------------------------------------------


def described(schema: Schema | None, width: int) -> Schema:
    """What a formula may name: the schema's columns; x0, x1, ... and y of rows that have none."""
    return schema if schema is not None and schema.extractor is None else _plain_rows(width)


@lru_cache(maxsize=8)
def _plain_rows(width: int) -> Schema:
    return Schema(tuple(Column(f"x{place}", missing="refuse") for place in range(width)), label="y")


def variables(schema: Schema) -> list[str]:
    """Names that a formula may use: the columns and the label."""
    found = [column.name for _, column in schema.places("number", "category", "date")]
    return [*found, schema.label] if schema.label else found


def categories_of(schema: Schema, kept: bool = False) -> dict[str, list[str]]:
    """The levels of categories, in the schema's order; kept: with those of unknown and missing values."""
    found = {}
    for _, column in schema.places("category"):
        more = ["(other)"] + ["(missing)"] * (column.missing == "flag")
        found[column.name] = [*column.categories, *(more if kept else ())]
    classes = schema.class_array
    if schema.label and classes is not None and classes.dtype.kind in "US":
        found[schema.label] = classes.tolist()
    return found


def frame(schema: Schema, features: Array, labels: Array | None, kept: bool) -> Any:
    """Encoded rows as a pandas frame: numbers, and categories by name; NaN where a value is missing.

    kept: unknown and missing categories are levels of their own; else they are missing values.
    """
    pandas, known = require("pandas", "statistics", "a table of statistics"), categories_of(schema, kept)
    columns: dict[str, Any] = {}
    for place, column in schema.places("number", "category", "date"):
        columns[column.name] = features[:, place]
        if column.kind == "category":
            part, levels = features[:, place : place + column.width], known[column.name]
            codes = np.argmax(part, axis=1)
            # Where nothing is set, the disclosure rules left the row's category out.
            codes = np.where((codes < len(levels)) & part.any(axis=1), codes, -1)
            columns[column.name] = pandas.Categorical.from_codes(codes, levels)
    if labels is not None and (label := schema.label):
        text = labels.dtype.kind in "US"
        columns[label] = pandas.Categorical(labels, known.get(label)) if text else labels.astype(np.float64)
    return pandas.DataFrame(columns)


# -- what a formula makes of them --------------------------------------------------------------------


@dataclass(frozen=True)
class FormulaPlan:
    """What a formula makes of rows.

    names: of the model's columns. terms: factors of every term on the right. outcome: expressions left of ~
    (two for Surv). offsets: expressions that are added with coefficient 1. used: columns that a row must
    have. scaled: columns whose mean and deviation over all sites `center` and `scale` need.
    """

    names: tuple[str, ...]
    terms: tuple[tuple[str, ...], ...]
    outcome: tuple[str, ...]
    offsets: tuple[str, ...]
    used: tuple[str, ...]
    scaled: tuple[str, ...]
    spec: Any

    @property
    def intercept(self) -> bool:
        return INTERCEPT in self.names

    @one_parser
    def columns(self, rows: Any, scales: Mapping[str, Any] | None = None) -> Array:
        """The model's columns of these rows (rows, columns)."""
        found = self.spec.get_model_matrix(rows, context=_context(scales), na_action="ignore")
        kept = [place for place, name in enumerate(self.spec.column_names) if name in self.names]
        return np.ascontiguousarray(np.asarray(found, dtype=np.float64)[:, kept])

    def offset(self, rows: Any) -> Array:
        return sum((evaluate(each, rows) for each in self.offsets), np.zeros(len(rows)))


@lru_cache(maxsize=32)
@one_parser
def plan(formula: str, schema: Schema, kept: bool, survival: bool = False) -> FormulaPlan:
    """The plan of a formula for rows of this schema; survival: the outcome is Surv(time, event)."""
    names, categories = variables(schema), categories_of(schema)
    sides, terms, offsets = _parsed(formula, survival)
    used: list[str] = []
    scaled: set[str] = set()
    for expression in [*sides, *offsets, *(factor.expr for term in terms for factor in term.factors)]:
        walked = [ast.Name(expression)] if expression in names else [*ast.walk(check(expression, names))]
        used += [each.id for each in walked if isinstance(each, ast.Name) and each.id in names]
        for call in (each for each in walked if isinstance(each, ast.Call)):
            name, inside = call.func.id, call.args[0] if call.args else None  # type: ignore[attr-defined]
            column = inside.id if isinstance(inside, ast.Name) else ""
            if name in _CODING and name != "I" and expression in (*sides, *offsets):
                raise DataError(
                    f"'{expression}': {name} is for columns on the right of ~; an outcome or an offset is a "
                    "column, or arithmetic of columns."
                )
            if name in ("center", "scale"):
                if not column or len(call.args) > 1 or call.keywords:
                    raise DataError(f"'{expression}': center and scale take one column, as in scale(age).")
                scaled.add(column)
            if name == "C" and column not in categories:
                raise DataError(
                    f"'{expression}': C() takes a column that the schema calls a category, so that all sites "
                    'know its levels. Give it kind = "category" and its categories there.'
                )
        for compared in (each for each in walked if isinstance(each, ast.Compare)):
            sides_of = [compared.left, *compared.comparators]
            levels = [level for side in sides_of for level in categories.get(getattr(side, "id", ""), ())]
            for level in (getattr(side, "value", None) for side in sides_of):
                if levels and isinstance(level, str) and level not in levels:
                    raise DataError(
                        f"'{expression}': no category is called '{level}'.{did_you_mean(level, levels)} "
                        f"There are {', '.join(levels[:20])}."
                    )
    spec = _spec(formula, terms, schema, kept)
    columns = tuple(name for name in spec.column_names if not survival or name != INTERCEPT)
    columns = columns or tuple(spec.column_names)
    if not columns:
        raise DataError(f"the formula '{formula}' has no column on its right.")
    factors = tuple(tuple(factor.expr for factor in term.factors) for term in terms)
    return FormulaPlan(
        columns, factors, sides, offsets, tuple(dict.fromkeys(used)), tuple(sorted(scaled)), spec
    )


def _parsed(formula: str, survival: bool) -> tuple[tuple[str, ...], list[Any], tuple[str, ...]]:
    """Expressions of the outcome, terms of the right side, and expressions of offsets."""
    left, _, right = (part.strip() for part in formula.partition("~"))
    if not formula.strip() or len(formula) > _LONGEST:
        told = f"the formula has {len(formula)} characters; {_LONGEST} are allowed."
        raise DataError(told if formula.strip() else "a formula is needed, such as 'outcome ~ age + C(sex)'.")
    if not left or not right:
        raise DataError(f"the formula '{formula}' needs an outcome, ~ and columns: 'outcome ~ age + C(sex)'.")
    if re.search(r"(?<![\w.)`])\.(?![\w.])", re.sub(r"`[^`]*`", "", right)):
        raise DataError(f"the formula '{formula}' needs its columns by name; '.' stands for none.")
    sides: tuple[str, ...] = (left.strip("`"),)
    with explained(f"the formula '{formula}' cannot be read"):
        if survival:
            _without_backticks(left)
            call = ast.parse(left, mode="eval").body if left.startswith("Surv(") else None
            if not isinstance(call, ast.Call) or len(call.args) != 2:
                raise DataError(f"the outcome of '{formula}' must be Surv(time, event), as Surv(days, died).")
            sides = tuple(ast.unparse(argument) for argument in call.args)
        parsed = [*require("formulaic", "statistics", "a formula").Formula(right)]
    if any(not hasattr(term, "factors") for term in parsed):
        raise DataError(f"the formula '{formula}' has more than one part on its right.")
    offsets = [str(term) for term in parsed if str(term).startswith("offset(") and len(term.factors) == 1]
    terms = [term for term in parsed if str(term) not in offsets]
    return sides, terms, tuple(text.removeprefix("offset(").removesuffix(")") for text in offsets)


def _spec(formula: str, terms: list[Any], schema: Schema, kept: bool) -> Any:
    """The columns as formulaic plans them, by a few rows that have every level."""
    levels, pandas = categories_of(schema, kept), require("pandas", "statistics", "a table of statistics")
    places = np.arange(max([8, *map(len, levels.values())]))
    columns: dict[str, Any] = dict.fromkeys(variables(schema), places + 1.0)
    for name, known in levels.items():
        columns[name] = pandas.Categorical.from_codes(places % len(known), known)
    with explained(f"the formula '{formula}' cannot be used"):
        made = require("formulaic", "statistics", "a formula").Formula(terms)
        found = made.get_model_matrix(
            pandas.DataFrame(columns), context=_context(None), na_action="ignore", output="numpy"
        ).model_spec
    if found.transform_state:
        raise DataError(
            f"{next(iter(found.transform_state))} depends on the rows of one site. Use center, scale, log, "
            "or powers such as I(age**2), which are the same at every site."
        )
    return found


def _context(scales: Mapping[str, Any] | None) -> dict[str, Any]:
    """What expressions may call, besides what formulaic brings; scales: (mean, deviation) by column."""
    coding = require("formulaic.transforms.contrasts", "statistics", "a formula")

    def center(column: Any) -> Any:
        return column if scales is None else column - scales[column.name][0]

    def scale(column: Any) -> Any:
        return column if scales is None else center(column) / scales[column.name][1]

    own = {"Treatment": coding.TreatmentContrasts, "Sum": coding.SumContrasts}
    return {**_MATHS, **own, "center": center, "scale": scale}
