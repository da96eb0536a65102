"""Results as people print them: a table of coefficients with what is known of each, and facts around it."""

from __future__ import annotations

import copy
import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import ConditionWarning, DataError
from fedsolve.model import Model
from fedsolve.pages.plots import FORMATS, Axis, Panel, Series, draw, render
from fedsolve.pages.written_tables import latex_table, latex_text, markdown_table, plain
from fedsolve.tables.encoder import encode, is_table
from fedsolve.tables.formula import INTERCEPT, FormulaPlan, categories_of, described, frame, plan
from fedsolve.tables.preparation import Preparation, far_outside
from fedsolve.tables.schema import Column, Schema

Lines = list[tuple[str, ...]]

_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100)
"""Marks on the axis of a forest plot."""

_COMPARED = re.compile(r"I\(\s*([^\W\d]\w*)\s*==\s*(['\"])([^'\"]*)\2\s*\)")
"""An outcome that is a category, such as I(group == 'case')."""

_SHOWN_ROWS = 5
"""Rows without a prediction that are named."""


def number(value: Any, digits: int = 4) -> str:
    """A number as tables print it; nothing where there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    if float(value).is_integer() or not np.isfinite(value):
        return str(int(value)) if np.isfinite(value) else "" if np.isnan(value) else str(value)
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.{digits}f}"


def told(value: Any) -> str:
    """A fact as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(part)}" for name, part in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)


class StatisticModel(Model):
    """A result that prints itself; known: its other attributes."""

    title: ClassVar[str] = "Result"
    predicts: ClassVar[bool] = False
    caveat: ClassVar[None] = None

    facts: dict[str, Any]  # what is known besides the table, by name
    remarks: list[str]  # sentences that a reader must know
    parameters: dict[str, Any]

    def __init__(self, features: int, facts: Mapping[str, Any], **known: Any) -> None:
        super().__init__(features, None, 1)
        vars(self).update({"remarks": [], "parameters": {}, **known, "facts": plain(dict(facts))})

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The rows of the table, as numbers by name."""

    def printed(self) -> list[tuple[str, Lines]]:
        """What is printed: titles, and lines of cells of which the first are heads."""
        known = self.records()
        heads = tuple(name.replace("_", " ") for name in known[0])
        return [("", [heads, *(tuple(map(number, line.values())) for line in known)])]

    def figure(self) -> Panel:
        """The picture of the result."""
        raise DataError(f"a {type(self).__name__} has no figure.")

    def plot(self, path: str | Path) -> None:
        """Write the picture, as svg, png or pdf: the forest plot of a regression, or survival curves."""
        form = next((each for each in FORMATS if Path(path).suffix.lower() == f".{each}"), None)
        if form is None:
            raise DataError(f"{path}: a figure is written as {', '.join(f'.{each}' for each in FORMATS)}.")
        Path(path).write_bytes(render(draw([self.figure()]), form))

    def scores(self, features: Array) -> Array:
        raise DataError(f"a {self.title} predicts nothing for a row.")

    def to_frame(self) -> Any:
        """The table as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.records())

    def document(self) -> dict[str, Any]:
        """Everything as JSON values."""
        whole = {"title": self.title, **self.facts, "table": self.records(), "remarks": self.remarks}
        return plain(whole)  # type: ignore[no-any-return]

    def to_json(self) -> str:
        return json.dumps(self.document(), indent=2)

    def to_markdown(self) -> str:
        parts = []
        for title, (heads, *lines) in self.printed():
            parts += [f"**{title}**"] * bool(title) + [markdown_table(heads, lines)]
        facts = "; ".join(f"{name}: {value}" for name, value in self.told_facts())
        return "\n\n".join([*parts, facts, *self.remarks])

    def to_latex(self) -> str:
        """The tables for LaTeX with booktabs."""
        parts = []
        for title, (heads, *lines) in self.printed():
            parts += [latex_text(title)] * bool(title) + [latex_table(heads, lines)]
        return "\n\n".join(parts)

    def told_facts(self) -> list[tuple[str, str]]:
        """The facts as text, those that have one."""
        return [(name.replace("_", " "), told(fact)) for name, fact in self.facts.items() if told(fact)]

    def __str__(self) -> str:
        out = [self.title, ""]
        for title, lines in self.printed():
            first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
            head, *rows = ("  ".join([a.ljust(first), *map(str.rjust, line, widths)]) for a, *line in lines)
            out += [title] * bool(title) + [head, "-" * len(head), *rows, ""]
        out += [f"{name:<22} {value}" for name, value in self.told_facts()]
        return "\n".join([*out, *(f"note: {remark}" for remark in self.remarks)])


class CoefficientTable(StatisticModel):
    """Coefficients of columns, and their covariance."""

    by_noise: Array | None = None  # with noise, its part of the covariance
    names: tuple[str, ...]
    coefficient: Array
    covariance: Array
    kept: Array  # columns that have a coefficient
    degrees: float  # of Student's t; 0 where the normal distribution is used
    ratio: str  # what exp(coefficient) is called, if anything

    @property
    def _spread(self) -> Any:
        from scipy.stats import norm, t  # takes long to import; only a printed table needs it

        return t(self.degrees) if self.degrees else norm

    def interval(
        self, level: float = 0.95, of: Literal["pooled", "population"] = "population"
    ) -> tuple[Array, Array]:
        """Low and high ends of the coefficients' intervals.

        of: with noise, "pooled" is for what the pooled rows would give without it.
        """
        if not 0 < level < 1:
            raise DataError(f"the level of confidence must lie in (0, 1); got {level!r}.")
        if of == "pooled" and self.by_noise is None:
            raise DataError("these are the coefficients of the pooled rows; only noise gives an interval.")
        error = self.standard_error if of == "population" else np.sqrt(np.diag(self.by_noise))  # type: ignore[arg-type]
        reach = float(self._spread.ppf(0.5 + level / 2)) * error
        return self.coefficient - reach, self.coefficient + reach

    @property
    def standard_error(self) -> Array:
        return np.asarray(np.where(self.kept, np.sqrt(np.diag(self.covariance)), np.nan))

    @property
    def statistic(self) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(self.coefficient / self.standard_error)

    @property
    def p(self) -> Array:
        """Two-sided p-values."""
        return np.asarray(2 * self._spread.sf(np.abs(self.statistic)))

    def records(self) -> list[dict[str, Any]]:
        low, high = self.interval()
        columns = {"coefficient": self.coefficient, "se": self.standard_error, "statistic": self.statistic}
        columns |= {"p": self.p, "low": low, "high": high}
        if self.ratio:
            columns |= {"exp": np.exp(self.coefficient), "exp_low": np.exp(low), "exp_high": np.exp(high)}
        if self.by_noise is not None:
            columns |= dict(zip(("pooled_low", "pooled_high"), self.interval(of="pooled"), strict=True))
        shown = {head: np.where(self.kept, values, np.nan) for head, values in columns.items()}
        return [
            {"term": name} | {head: float(values[k]) for head, values in shown.items()}
            for k, name in enumerate(self.names)
        ]

    def printed(self) -> list[tuple[str, Lines]]:
        exp, noisy = "exp_" if self.ratio else "", self.by_noise is not None
        heads = ["term", "coefficient", "se", "t" if self.degrees else "z", "p"]
        heads += [self.ratio] * bool(self.ratio) + ["95% interval"] + ["without noise"] * noisy
        lines: Lines = [tuple(heads)]
        for line in self.records():
            if not line["se"] > 0:
                lines.append((line["term"], "NA", *[""] * (len(heads) - 2)))
                continue
            statistic, p = line["statistic"], line["p"]
            cells = [number(line["coefficient"]), number(line["se"])]
            cells.append(f"{statistic:{'.2f' if abs(statistic) < 1e5 else '.2g'}}")
            cells.append("<0.001" if p < 0.001 else f"{p:.3f}")
            cells += [f"{line['exp']:.3f}"] if self.ratio else []
            for ends in (exp, *["pooled_"] * noisy):
                cells.append(" to ".join(number(line[ends + end], 3) for end in ("low", "high")))
            lines.append((line["term"], *cells))
        return [(f"event: {self.facts['event']}" if "event" in self.facts else "", lines)]

    def figure(self) -> Panel:
        """Estimates with their intervals, without the intercept; ratios at their logarithms."""
        lines = [each for each in self.records() if each["term"] != INTERCEPT and np.isfinite(each["se"])]
        heads, label = ("coefficient", "low", "high"), self.ratio or "coefficient"
        middle, low, high = (np.array([line[head] for line in lines]) for head in heads)
        bars = [tuple(each) for each in (middle, middle - low, high - middle)]
        marks = np.log(_RATIOS) if self.ratio else np.zeros(0)
        inside = (marks > low.min() - 0.2) & (marks < high.max() + 0.2)
        ticks = tuple((float(mark), f"{np.exp(mark):g}") for mark in marks[inside])
        series = Series(label, 0, tuple(map(float, range(len(lines)))), *bars)
        names = Axis.of("", [line["term"] for line in lines])
        return Panel([series], names, Axis(f"{label}, 95% interval", named=ticks), "", "rows", "zero")


class RegressionModel(CoefficientTable):
    """Coefficients of a formula's columns, and predictions for new rows."""

    predicts: ClassVar[bool] = True
    scored: ClassVar[str] = "linear_predictor"
    scales: dict[str, Any]  # mean and deviation of columns that the formula standardises
    ranges: Array  # (2, columns) the same of all columns; numbers of new rows that are far off are named

    @property
    def _filled(self) -> bool:
        return self.parameters.get("missing") == "schema"

    def plan(self) -> FormulaPlan:
        """What the right side of the formula makes of rows; an outcome is not needed."""
        left, _, right = self.facts["formula"].partition("~")
        survival, schema = left.startswith("Surv("), described(self.schema, self.features)
        return plan(f"{'Surv(1, 1)' if survival else '1'} ~ {right}", schema, self._filled, survival)

    def describe(self, schema: Schema, preparing: Preparation | None) -> None:
        """Of the columns of a table, take those that the right side of the formula names."""
        super().describe(schema, preparing)
        used, width = self.plan().used, [len(column.names) for column in schema.used]
        there = np.repeat([column.name in used for column in schema.used], width)
        columns = [column for column in schema.used if column.name in used]
        if schema.label in used:
            texts = categories_of(schema).get(schema.label)
            kind: Any = {"kind": "category", "categories": tuple(texts)} if texts else {}
            columns.append(Column(schema.label, missing="refuse", **kind))
        if not columns:
            return
        beside = (column for column in schema.columns if column.name in schema.identifiers)
        self.schema = Schema((*columns, *beside))
        self.features = self.schema.width
        if preparing is not None and preparing.centre is not None:
            more = self.features - int(there.sum())
            parts = zip((preparing.mean, preparing.scale, preparing.centre), (0.0, 1.0, 0.0), strict=True)
            mean, scale, centre = (np.append(each[there], np.full(more, value)) for each, value in parts)
            self.preparing = Preparation(mean, scale, centre=centre)

    def _checked(self, values: Any, prepared: bool = True) -> Array:
        if is_table(values) and self.schema is not None:
            values = encode(self.schema, values, extra="ignore")
        rows = super()._checked(values, prepared=False)
        if not prepared:
            return rows
        for gaps in self._gaps(rows, "these rows"):
            raise DataError(f"{gaps} Fill them in, or leave these rows out.")
        return super()._checked(rows)

    def known_scores(self, features: Any) -> Array:
        rows = self._checked(features, prepared=False)
        there, scores = self.complete(rows), np.full((len(rows), 1), np.nan)
        if there.any():
            scores[there] = self.decision_function(rows[there])
        return scores

    def predict(self, features: Any) -> Array:
        """The mean of the outcome, or what else the model tells; NaN of rows that lack a value it needs."""
        rows = self._checked(features, prepared=False)
        for remark in self.strange(rows, "new rows"):
            warnings.warn(remark, ConditionWarning, stacklevel=2)
        return self.decided(self.known_scores(rows))

    @property
    def middle(self) -> Array:
        typical = self.ranges[0] @ np.where(self.kept, self.coefficient, 0.0)
        told = self.estimated(np.array([[typical]]))[0]
        return np.where(np.isfinite(told), told, 0.0)

    def scored_by(self, label: str | None) -> Self:
        other, (outcome, _, right) = copy.copy(self), self.facts["formula"].partition("~")
        if label is not None and not outcome.startswith("Surv("):  # then numbers are its outcome
            other.facts = {**self.facts, "formula": f"`{label}` ~{right}", "event": None}
        column, event = other._truth
        if self.schema is not None:
            other.schema = replace(self.schema, label=column, task="regression" if event is None else None)
        return other

    def truths(self, labels: Array) -> Array:
        column, event = self._truth
        if event is None:
            return labels
        seen = np.unique(labels.astype(str))
        several = len(seen) > 1 and bool(self.facts.get("event"))  # of two, one is the event
        if event not in seen and (several or labels.dtype.kind not in "US"):
            raise DataError(
                f"the model predicts {column} = {event}, and '{column}' has {', '.join(seen[:5])}. Spell "
                "them alike, or name a column of 0 and 1: --label."
            )
        return np.asarray(labels.astype(str) == event, dtype=np.float64)

    @property
    def _truth(self) -> tuple[str, str | None]:
        """The column that predictions are compared with, and which text in it counts as 1."""
        outcome = self.facts["formula"].partition("~")[0].strip()
        column = outcome.strip("`")
        if outcome.startswith("Surv("):
            raise DataError(
                "a Cox regression predicts hazards against each other, which no column has to compare them "
                "with. Its concordance is in the result: fedsolve info."
            )
        if (compared := _COMPARED.fullmatch(outcome)) is not None:
            return compared[1], compared[3]
        if column == outcome and not column.isidentifier():
            raise DataError(
                f"the model predicts '{outcome}', which is made of columns. Write it to a column of its own, "
                "and name that: --label."
            )
        event = self.facts.get("event")
        return column, None if event is None else event.removeprefix(f"{column} = ")

    def complete(self, features: Array) -> Array:
        return np.asarray(~self._lacking(features).to_numpy().any(axis=1))

    def strange(self, features: Array, source: str) -> list[str]:
        numbers = [place for place, name in enumerate(self.names) if "[" not in name and name != INTERCEPT]
        mean, deviation = self.ranges[:, numbers]
        known = Schema.of_numbers([self.names[place] for place in numbers])
        there, design = self.complete(features), np.full((len(features), len(numbers)), np.nan)
        if there.any():
            found = self.plan().columns(self._frame(features[there]), self.scales or None)
            design[there] = found[:, numbers]
        far = far_outside(known, Preparation(mean, deviation, centre=mean), design, source)
        return [*far, *self._gaps(features, source)]

    def _frame(self, rows: Array) -> Any:
        prepared = rows if self.preparing is None else self.preparing.apply(rows)
        return frame(described(self.schema, self.features), prepared, None, self._filled)

    def _lacking(self, rows: Array) -> Any:
        """Which columns that the formula uses encoded rows lack, as a frame of True and False."""
        found = self._frame(rows)
        return found[[name for name in self.plan().used if name in found]].isna()

    def _gaps(self, rows: Array, source: str) -> list[str]:
        """A sentence about the rows that have no prediction, if there are such."""
        lacking = self._lacking(rows)
        gone = np.flatnonzero(lacking.any(axis=1))
        if not len(gone):
            return []
        first = [f"row {row} ({', '.join(lacking.columns[lacking.iloc[row]])})" for row in gone[:_SHOWN_ROWS]]
        first += ["..."] * (len(gone) > _SHOWN_ROWS)
        return [
            f"{source}: {len(gone)} of {len(rows)} rows have no prediction: a value is missing, or has a "
            f"category that the model does not know, in {', '.join(first)}."
        ]

    def scores(self, features: Array) -> Array:
        """x b + offset of encoded rows (rows, 1)."""
        found, rows = self.plan(), frame(described(self.schema, self.features), features, None, self._filled)
        design = found.columns(rows, self.scales or None)
        scores = design @ np.where(self.kept, self.coefficient, 0.0) + found.offset(rows)
        if not np.isfinite(scores).all():
            raise DataError(f"{int(np.sum(~np.isfinite(scores)))} rows give no finite number in the formula.")
        return np.asarray(scores[:, None])
