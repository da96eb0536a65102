"""A formula's columns over all sites: how clients build them, the survey that comes first, and what a result
says of them.

    survey   rows, rows left out by column, and for every column of the model: sum w x, sum w x², rows where
             it is not zero; sum w y, sum w x y, sum w

The means and deviations become a block of the model. From then on columns are (x - centre) / scale, so that
products of large numbers do not cancel; coefficients are told for columns as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.errors import DataError, TermError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.dialogue import Ask, DialogueMethod, DialogueRun, Talk
from fedsolve.federation.engine import schema_of
from fedsolve.federation.method import Block, Chain, Federation, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.statistics.hiding import check_formula
from fedsolve.statistics.results import RegressionModel
from fedsolve.tables.formula import (
    INTERCEPT,
    FormulaPlan,
    categories_of,
    described,
    evaluate,
    frame,
    plan,
    variables,
)
from fedsolve.tables.preparation import mean_and_deviation
from fedsolve.tables.schema import Column

M = TypeVar("M", bound=Model)
R = TypeVar("R", bound=RegressionModel)

FEWEST_ROWS, MOST_BINS = 10, 20
"""Rows in a bin on average, or of which sums are told; and bins that are told."""

SCALES, SURVEY = "statistics-scales", "statistics-survey"
STANDARD = "standard columns"
_ENOUGH_ROWS = 10
_DEPENDENT = 1e-11
_ROWS = 65536


class StatisticMethod(DialogueMethod[M]):
    """A question about rows as they are: not standardised, and filled only where that is asked for."""

    survival: ClassVar[bool] = False

    @property
    def preparation(self) -> Literal["fill", "none"]:  # type: ignore[override]
        return "fill" if getattr(self, "missing", "drop") == "schema" else "none"

    @property
    def asked(self) -> str:
        """The whole formula."""
        return str(getattr(self, "formula", ""))

    def agreement(self) -> dict[str, Any]:
        return {"incomplete": True, "formula": self.asked, "survival": self.survival}

    def fit(self, federation: Federation, *args: Any, **settings: Any) -> M:
        """Ask the federation; the schema of its rows, where they have one, names the columns."""
        return super().fit(federation, *args, **{"schema": schema_of(federation), **settings})


@dataclass(frozen=True)
class FormulaMethod(StatisticMethod[M]):
    """What all regressions take."""

    formula: str = parameter("", "What is explained by what, such as 'outcome ~ age + C(sex)'.")
    _: KW_ONLY
    missing: Literal["drop", "schema"] = parameter(
        "drop", "Rows with missing values: left out, or filled by the schema's rule.", flag="--missing-values"
    )


# -- the rows of a client ----------------------------------------------------------------------------


@dataclass
class DesignRows:
    """The rows of a client that take part."""

    x: Array  # columns of the model (rows, columns)
    outcome: tuple[Array, ...]  # by expression
    offset: Array
    weight: Array
    left_out: Array  # by column that is used, rows that lack it
    standard: bool = False  # whether the columns are


class RowView:
    """What a run says of rows: their schema, the formula's plan, and how they are read.

    filled: whether missing values are filled by the schema's rule.
    """

    def __init__(self, chain: Chain, width: int) -> None:
        self.chain, self.parameters = chain, chain.opening["parameters"]
        self.schema = described(run_schema(chain), width)
        self.filled = bool(self.parameters.get("missing") == "schema")

    @cached_property
    def plan(self) -> FormulaPlan:
        opening = self.chain.opening
        return plan(opening["formula"], self.schema, self.filled, opening["survival"])

    def arrays(self, note: str) -> dict[str, Array] | None:
        """The arrays of the block of this note, once the run has it."""
        return next((dict(block.arrays) for block in self.chain.blocks if note in block.note), None)

    @property
    def scales(self) -> dict[str, Array]:
        """Mean and deviation of the columns that the formula standardises, once they are known."""
        found = self.arrays(SCALES)
        return {} if found is None else dict(zip(self.plan.scaled, found["scales"].T, strict=True))

    @property
    def references(self) -> list[float]:
        """Numbers near those of the columns that the formula standardises."""
        known = {column.name: column.reference for column in self.schema.used}
        return [known.get(name, 0.0) for name in self.plan.scaled]

    def event(self, remarks: list[str]) -> dict[str, str]:
        """The fact which of two categories an outcome counts as 1, and a remark how to choose the other."""
        name, survival = self.plan.outcome[-1], len(self.plan.outcome) > 1
        levels = categories_of(self.schema, self.filled).get(name)
        if levels is None:
            return {}
        other = f"I({name} == {levels[0]!r})"
        left = f"Surv({self.plan.outcome[0]}, {other})" if survival else other
        remarks.append(f"the event is {name} = {levels[1]}; for {levels[0]} write {left} ~ ...")
        return {"event": f"{name} = {levels[1]}"}

    def check(self, data: ClientData) -> None:
        """Hold the formula to what secure sums let it ask of these rows."""
        if data.cells is not None:
            uncounted = {str(self.schema.label)} if self.chain.opening.get("classes") is None else set()
            weights = self.parameters.get("weights")
            check_formula(data, self.whole(data, self.plan.used), self.plan, weights, uncounted)

    def frame(self, data: ClientData, span: slice) -> Any:
        return frame(self.schema, data.features(span), data.own_labels[span], self.filled)

    def whole(self, data: ClientData, used: Sequence[str] = ()) -> Any:
        """All rows as one frame, those with missing values among them; refused where the disclosure rules
        left out a level that the formula needs: by what all sites know, whatever rows this one has.
        """
        if data.schema is not None and run_schema(self.chain) is None:
            raise TermError(
                "under secure sums, statistics name columns as the schema of the rows does; use it."
            )
        few, needed = None if data.cells is None else data.cells.few, categories_of(self.schema, self.filled)
        for place, column in self.schema.places("category"):
            if few is None or column.name not in used:
                continue
            levels = [*column.categories, "(other)", "(missing)"][: len(column.names)]
            rare = [level for level, left in zip(levels, few[place:], strict=False) if left]
            if {*rare} & {*needed[column.name]}:
                raise TermError(_too_rare(column, rare))
        return self.frame(data, slice(None))

    def frames(self, data: ClientData, used: Sequence[str] = ()) -> Iterator[tuple[Any, Array, Array]]:
        """Rows that lack none of the columns `used`, as frames with their weights; and by column, how many
        rows lack it.
        """
        weights = data.own_weights
        for start in range(0, max(1, len(data)), _ROWS):
            span = slice(start, start + _ROWS)
            rows = self.frame(data, span)
            lacking = rows[list(used)].isna().to_numpy()
            there = ~lacking.any(axis=1)
            counted = np.ones(len(rows)) if weights is None else weights[span]
            rows = rows if there.all() else rows[there].reset_index(drop=True)
            yield rows, counted[there], lacking.sum(axis=0).astype(np.float64)


def _too_rare(column: Column, rare: Sequence[str]) -> str:
    """What to do about levels that the disclosure rules left out."""
    listed, ways = [repr(level) for level in rare if level in column.categories], []
    if listed:
        ways.append(
            f"{'the rarest of ' * (len(listed) > 1)}{', '.join(listed)} is no category (then it is another "
            "value: left out as missing ones are, or a level with all others by missing='schema')"
        )
    if "(other)" in rare:
        ways.append("no other value is left but listed ones")
    if "(missing)" in rare or ("(other)" in rare and column.missing == "other"):
        more = ' or as other values do (missing = "other")' * (column.missing != "other")
        ways.append(f'empty cells count as a category (missing = "{column.categories[0]}"){more}')
    return (
        f"under secure sums, '{column.name}' has {', '.join(map(repr, rare))} in too few rows, or at too few "
        "sites, for levels of their own, or shows such rows by them. Leave the column out, or begin anew "
        f"(new ledgers at all sites) with a schema in which {', and '.join(ways)}."
    )


def added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Array]:
    """The sum of parts, array by array."""
    first, *more = parts
    found = {name: np.asarray(value, dtype=np.float64) for name, value in first.items()}
    for part in more:
        found = {name: array + part[name] for name, array in found.items()}
    return found


def level_counts(rows: Any, categories: Mapping[str, Sequence[str]]) -> Array:
    """Rows of every level, one category after the other."""
    codes = [np.bincount(rows[n].cat.codes + 1, minlength=len(c) + 1)[1:] for n, c in categories.items()]
    return np.concatenate([*codes, np.zeros(0)])


def read(data: ClientData, memory: Memory) -> DesignRows:
    """The client's rows under the run's formula; kept in memory where they fit."""
    view = RowView(memory.chain, data.width)
    standard = view.arrays(STANDARD)
    key = memory.chain.digests[1], view.arrays(SCALES) is None
    held, found = memory.cache.pop("statistics", (None, None))
    if held != key or (found.standard and standard is None):
        found = _read(data, view)
    if standard is not None and not found.standard:
        found.x -= standard["centre"]
        found.x /= standard["scale"]
        found.standard = True
    if found.x.nbytes <= memory.budget:
        memory.cache["statistics"] = key, found
    return found  # type: ignore[no-any-return]


def _read(data: ClientData, view: RowView) -> DesignRows:
    view.check(data)
    planned, weights, parts = view.plan, view.parameters.get("weights"), []
    used = [*planned.used]
    if weights in variables(view.schema) and weights not in used:
        used.append(weights)
    left_out = np.zeros(len(used))
    for rows, counted, lacking in view.frames(data, used):
        left_out += lacking
        weight = evaluate(weights, rows) if weights else counted
        with np.errstate(all="ignore"):  # what is no finite number is named below
            x, offset = planned.columns(rows, view.scales or None), planned.offset(rows)
        parts.append((x, offset, weight, *(evaluate(each, rows) for each in planned.outcome)))
    x, offset, weight, *outcome = (np.concatenate(each) for each in zip(*parts, strict=True))
    if len(weight) and not weight.min() >= 0:
        raise DataError(f"weights must be at least 0; '{weights}' has {weight.min():g}.")
    named = [*zip(planned.outcome, outcome, strict=True), ("the offset", offset)]
    for name, values in [*named, *zip(planned.names, x.T, strict=True)]:
        if wrong := int(np.sum(~np.isfinite(values))):
            raise DataError(
                f"'{name}' is not a finite number in {wrong} rows, such as the logarithm of 0. Change the "
                "formula, or leave these rows out."
            )
    return DesignRows(x, tuple(outcome), offset, weight, left_out[: len(planned.used)])


@step(SCALES, over_rows=True)
def answer_scales(data: ClientData, request: Request, memory: Memory) -> Term:
    """n, sum x and sum x² of the columns that the formula centres or scales, from their references."""
    view = RowView(memory.chain, data.width)
    view.check(data)
    used, scaled = view.plan.used, list(view.plan.scaled)
    gaps = (rows[scaled].to_numpy() - view.references for rows, _, _ in view.frames(data, used))
    sums = added({"rows": len(x), "moments": [x.sum(axis=0), (x**2).sum(axis=0)]} for x in gaps)
    return Term({"moments": sums["moments"]}, {"rows": int(sums["rows"])})


@step(SURVEY, over_rows=True)
def answer_survey(data: ClientData, request: Request, memory: Memory) -> Term:
    """What the run must know before the first product: see the head of this file."""
    rows = read(data, memory)
    counted, first = rows.weight * rows.outcome[-1], rows.outcome[0]
    sums = {
        "first": rows.weight @ rows.x,
        "second": rows.weight @ rows.x**2,
        "set": np.count_nonzero(rows.x, axis=0).astype(np.float64),
        "with_outcome": counted @ rows.x,
        "weight": np.array([rows.weight.sum()]),
        "outcome": np.array([counted.sum()]),
        "moments": np.array([first.sum(), (first**2).sum()]),
        "left_out": rows.left_out,
    }
    return Term(sums, {"rows": len(data), "used": len(rows.x)})


# -- what the server knows of the columns ------------------------------------------------------------


def survey(run: DialogueRun[Any]) -> Talk[Design]:
    """Ask first what the columns of the formula are over all sites."""
    view = RowView(run.chain, run.spec.features)
    if view.plan.scaled:
        total = yield Ask(SCALES)
        count = total.count("rows")
        check_rows(count)
        mean, deviation = mean_and_deviation(count, *total["moments"])
        deviation = deviation * np.sqrt(count / max(count - 1, 1))
        run.add(Block({SCALES: True}, {"scales": np.array([mean + view.references, deviation])}))
    design = Design(run, view, (yield Ask(SURVEY)))
    if design.method.survival and not design.seen["outcome"][0]:
        raise DataError("zero events: nobody has the event, so that there is nothing to explain.")
    run.add(Block({STANDARD: True}, {"centre": design.centre, "scale": design.scale}))
    return design


class Design:
    """Columns of a formula over all sites."""

    def __init__(self, run: DialogueRun[Any], view: RowView, total: Total) -> None:
        self.run, self.view, self.plan, self.names = run, view, view.plan, view.plan.names
        self.method = cast(Any, run.method)
        self.seen = total.term.arrays  # totals of the survey
        self.rows, self.used = total.count("rows"), total.count("used")  # that there are, and that take part
        check_rows(self.rows)
        if self.used == 0 or self.seen["weight"][0] <= 0:
            told = ", ".join(f"{name} in {count}" for name, count in self.left_out().items())
            raise DataError(
                f"no row is complete: of {self.rows} rows, values are missing of {told or 'all'}."
            )
        self.fixed = self.plan.intercept or self.method.survival  # then it takes up a shift of columns
        self.intercept = np.array([name == INTERCEPT for name in self.names])
        self.moments = mean_and_deviation(self.seen["weight"][0], self.seen["first"], self.seen["second"])
        self.centre = np.where(~self.intercept & self.fixed, self.moments[0], 0.0)
        self.scale = np.where(self.intercept, 1.0, self.moments[1])
        self.kept = np.ones(len(self.names), dtype=bool)  # columns that count, the others follow from them

    def left_out(self) -> dict[str, int]:
        """Rows that lack a column, by its name."""
        counts = zip(self.plan.used, self.seen["left_out"], strict=True)
        return {name: round(count) for name, count in counts if count}

    def constant(self) -> Array:
        """Which columns never change, the intercept aside."""
        if not self.fixed:
            return np.asarray(self.seen["set"] == 0)
        gap = np.abs(self.seen["second"] - self.moments[0] * self.seen["first"])
        return np.asarray((gap <= 1e-12 * self.seen["second"]) & ~self.intercept)

    def keep_independent(self, curvature: Array) -> None:
        """Name the columns that are constant or follow from those before them; they have no coefficient."""
        if self.used < _ENOUGH_ROWS * len(self.names):
            self.run.remark(
                f"{self.used} rows for {len(self.names)} coefficients: fewer than {_ENOUGH_ROWS} rows for "
                "each, so that standard errors and p-values are doubtful."
            )
        self.kept = independent(curvature) & ~self.constant()
        for place in np.flatnonzero(~self.kept):
            self.run.remark(
                f"the coefficient of '{self.names[place]}' is not defined because of singularities: the "
                "column is constant, or follows from those before it, over all sites."
            )

    def dispersion(self, scatter: float) -> float:
        """A sum of squares for each row that no coefficient takes up."""
        return float(max(scatter / max(self.used - self.kept.sum(), 1.0), 1e-300))

    def whole(self, part: Array) -> Array:
        """Numbers of the columns that count, among zeros for the others."""
        found = np.zeros(part.ndim * self.kept.shape)
        found[np.ix_(*[self.kept] * part.ndim)] = part
        return found

    def result(self, kind: type[R], point: Array, covariance: Array, facts: dict[str, Any], **more: Any) -> R:
        """The model of coefficients of standard columns, told for columns as they are."""
        turn = np.diag(1.0 / self.scale)
        turn[self.intercept] -= self.centre / self.scale
        found = turn @ np.where(self.kept, point, 0.0), turn @ covariance @ turn.T
        known: dict[str, Any] = {"names": self.names, "coefficient": found[0], "covariance": found[1]}
        known |= {"kept": self.kept, "ranges": np.array(self.moments), "degrees": 0.0, "ratio": ""}
        known["scales"] = {name: [*map(float, pair)] for name, pair in self.view.scales.items()}
        known |= {"parameters": self.method.parameters(), "remarks": self.run.remarks, **more}
        return kind(self.run.spec.features, {**self.outline(), **facts}, **known)

    def outline(self) -> dict[str, Any]:
        """What every result says of its rows and its run."""
        facts = {"formula": self.method.asked, "rows": self.used, "rows_left_out": self.rows - self.used}
        facts |= {"left_out": self.left_out(), "sites": len(self.run.history[-1].cohort)}
        dates = (column for _, column in self.view.schema.places("date") if column.name in self.plan.used)
        if units := {column.name: column.counted for column in dates}:
            facts["units"] = units
        return facts | {"exchanges": len(self.run.history)} | self.view.event(self.run.remarks)


def independent(curvature: Array) -> Array:
    """Which columns do not follow from those before them, by Cholesky's factor row by row."""
    size = len(curvature)
    factor, kept = np.zeros((size, size)), np.zeros(size, dtype=bool)
    for place in range(size):
        left = curvature[place, place] - factor[place, :place] @ factor[place, :place]
        if left > _DEPENDENT * max(curvature[place, place], 1e-300):
            kept[place] = True
            rest = curvature[place:, place] - factor[place:, :place] @ factor[place, :place]
            factor[place:, place] = rest / np.sqrt(left)
    return kept
