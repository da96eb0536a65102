"""A schema proposed from one site's table, with what was noticed in every column, for people to review.

Left out: what looks like an identifier, what never changes, what is the label under another name,
and text with many different values. Everything else is proposed as what it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.columns import LABEL_NAMES
from fedsolve.data.layout import damaged
from fedsolve.data.table_files import NEEDS_PYARROW, table_kind
from fedsolve.data.text_tables import Dialect, TextSource, read_names, read_texts
from fedsolve.encoder import MISSING, NUMBER, category_text, column_names
from fedsolve.errors import DataError, ModelFileError, did_you_mean
from fedsolve.labels import spelled_labels
from fedsolve.schema import DAYS_A_YEAR, LEFT_OUT, Column, Schema

ROWS = 100_000
"""Rows that a proposal looks at."""

FORMATS = (None, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d", "%d.%m.%y")
"""Formats of dates that are tried; None is ISO 8601."""

_FEW = 20
_NEARLY = 0.95
_MANY_LABELS = 50


def propose(
    table: Any,
    label: str | None = None,
    client: str | None = None,
    dialect: Dialect | None = None,
    rows: int = ROWS,
    weight: str | None = None,
) -> Schema:
    """A schema for a file (csv, gz, parquet, "-") or a table, from its first rows.

    label: the column of the labels; found by its usual names when None. client: the column of owners.
    weight: the column that says how much a row counts.
    """
    if isinstance(table, str | Path):
        try:
            return _of_texts(_texts(table, dialect or Dialect(), rows), label, client, weight)
        except DataError as problem:
            raise DataError(f"{'standard input' if str(table) == '-' else table}: {problem}") from problem
    return _of_texts(_texts(table, dialect or Dialect(), rows), label, client, weight)


def _of_texts(texts: dict[str, Array], label: str | None, client: str | None, weight: str | None) -> Schema:
    names = list(texts)
    if label is None:
        lowered = {name.lower(): name for name in reversed(names)}
        label = next((lowered[name] for name in LABEL_NAMES if name in lowered), None)
        if label is None:
            raise DataError(
                f"which column is the label? None is called {' or '.join(LABEL_NAMES)}; there are "
                f"{', '.join(names[:12])}{', ...' * (len(names) > 12)}. Name it (label)."
            )
    for wanted, what in ((label, "label"), (client, "client"), (weight, "weight")):
        if wanted is not None and wanted not in names:
            raise DataError(f"no {what} column '{wanted}'.{did_you_mean(wanted, names)}")
    if not names or not len(texts[label]):
        raise DataError("no rows at all. Check the file or the query that made it.")
    labels = texts[label]
    columns = [_proposed(name, texts[name], labels) for name in names if name not in (label, client, weight)]
    if not any(column.kind not in LEFT_OUT for column in columns):
        told = "; ".join(f"'{column.name}': {column.remark}" for column in columns)
        raise DataError(f"no column looks like one to learn from: {told or 'there is none but the label'}.")
    return Schema(tuple(columns), label, _classes(labels, label), client, weight=weight)


def _texts(table: Any, dialect: Dialect, rows: int) -> dict[str, Array]:
    """The first cells of every column, as text; missing ones as nothing."""
    if isinstance(table, str | Path):
        if table_kind(table) == "csv":
            source = TextSource(table)
            names, _ = read_names(source, dialect)
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise DataError(f"more than one column is called {', '.join(map(repr, twice))}; rename them.")
            cells = read_texts(source, dialect, {name: Column(name, "text") for name in names}, rows)
            return {name: _plain(column, dialect) for name, column in cells.items()}
        table = _parquet(table)
    if hasattr(table, "to_pandas"):
        table = {name: table.column(name).slice(0, rows).to_pylist() for name in table.column_names}
    return {name: _plain(list(table[name][:rows]), Dialect()) for name in column_names(table)}


def _parquet(path: str | Path) -> Any:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as problem:
        raise DataError(NEEDS_PYARROW) from problem
    try:
        with open(path, "rb") as stream:
            return parquet.read_table(stream)
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    except arrow.ArrowException as problem:
        raise damaged(path, "a parquet file", problem) from problem


def _plain(cells: Iterable[Any], dialect: Dialect) -> Array:
    spelled: dict[Any, str] = {}
    plain = []
    for cell in cells:
        key = (type(cell), str(cell))
        if key not in spelled:
            text = cell.isoformat() if hasattr(cell, "isoformat") else category_text(cell)
            text = "" if text in MISSING or text == "NaT" else text
            if dialect.differs and NUMBER.fullmatch(dialect.plain(text)):
                text = dialect.plain(text)
            spelled[key] = text
        plain.append(spelled[key])
    return np.array(plain, dtype=object)


def _classes(labels: Array, name: str) -> tuple[Any, ...]:
    """The classes, or none where the labels are measurements."""
    known = spelled_labels([text for text in labels if text])
    distinct = np.unique(known)
    if distinct.dtype.kind == "f" and len(distinct) > max(_FEW, len(labels) // 20):
        return ()
    if len(distinct) < 2:
        raise DataError(f"the label column '{name}' has one value only ({distinct.tolist()}).")
    return tuple(distinct.tolist())


@dataclass
class _Look:
    """What a column holds: its cells that are there, and the different ones among them."""

    name: str
    cells: list[str]
    distinct: list[str]
    rows: int

    @property
    def rule(self) -> str | None:
        """The rule for missing values: where some are missing here, a flag may say something."""
        return "flag" if len(self.cells) < self.rows else None

    @property
    def nearly_unique(self) -> bool:
        return len(self.cells) >= _FEW and len(self.distinct) >= _NEARLY * len(self.cells)

    def with_missing(self, remark: str) -> str:
        absent = self.rows - len(self.cells)
        parts = [remark] if remark else []
        if absent:
            parts.append(f"{absent} of {self.rows} missing")
        return "; ".join(parts)


def _proposed(name: str, texts: Array, labels: Array) -> Column:
    cells = [text for text in texts.tolist() if text]
    look = _Look(name, cells, sorted(set(cells)), len(texts))
    unused = _reason_to_leave_out(look, texts, labels)
    if unused:
        return Column(name, "unused", remark=f"unused: {unused}")
    if _is_identifier(look):
        seen = f"{len(look.distinct)} different values in {len(look.cells)} rows"
        return Column(name, "identifier", remark=f"unused: looks like an identifier ({seen})")
    numbers = _numbers(look.distinct)
    if numbers is not None:
        return _number_column(look)
    dates = _date_format(look.distinct)
    if dates is not None:
        return _date_column(look, *dates)
    words = sum(len(cell.split()) for cell in look.distinct) / len(look.distinct)
    if words >= 4:
        return Column(
            name, "text", remark=look.with_missing(f"looks like text, {words:.0f} words on average; hashed")
        )
    if len(look.distinct) > max(_FEW, min(_MANY_LABELS, len(cells) // 20)):
        return Column(
            name,
            "unused",
            remark=f"unused: many values ({len(look.distinct)} different ones in {len(cells)} rows); "
            "list the frequent ones as categories, or make it a text",
        )
    return Column(
        name,
        "category",
        categories=tuple(look.distinct),
        missing=look.rule or "",
        remark=look.with_missing(""),
    )


def _reason_to_leave_out(look: _Look, texts: Array, labels: Array) -> str:
    if not look.cells:
        return "no values at all"
    if len(look.distinct) == 1:
        return f"constant, always {look.distinct[0]!r}"
    if _is_the_label(texts, labels):
        return "leak: one value for each label and one label for each value, so it is the label"
    return ""


def _is_identifier(look: _Look) -> bool:
    numbers = _numbers(look.distinct)
    whole = numbers is not None and all(value.is_integer() for value in numbers)
    single = numbers is None and all(len(text.split()) <= 2 for text in look.distinct)
    return look.nearly_unique and (whole or (single and _date_format(look.distinct) is None))


def whole_and_nearly_unique(values: Array) -> bool:
    """Whether a column of numbers looks like an identifier."""
    if len(values) < _FEW or not np.all(values == np.rint(values)):
        return False
    return len(np.unique(values)) >= _NEARLY * len(values)


def _is_the_label(texts: Array, labels: Array) -> bool:
    pairs = {(text, label) for text, label in zip(texts, labels, strict=True) if text and label}
    values, classes = ({pair[side] for pair in pairs} for side in (0, 1))
    return len(pairs) == len(values) == len(classes) > 1


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """The numbers that these texts spell, if all do; 007 is a code and not a number."""
    if not all(NUMBER.fullmatch(text) for text in texts):
        return None
    if any(len(text) > 1 and text[0] == "0" and text[1].isdigit() for text in texts):
        return None
    return [float(text) for text in texts]


def _number_column(look: _Look) -> Column:
    values = np.array([float(cell) for cell in look.cells])
    reference, scale = rounded_place(values)
    few = 2 < len(look.distinct) <= 10 and bool(np.all(values == np.rint(values)))
    remark = f"only {len(look.distinct)} different whole numbers; a category if they are codes" if few else ""
    return Column(
        look.name,
        "number",
        missing=look.rule or "",
        reference=reference,
        scale=scale,
        remark=look.with_missing(remark),
    )


def rounded_place(values: Array) -> tuple[float, float]:
    """About where values lie and how far they spread: two significant digits and one.

    Where they lie far from zero compared with their spread, more digits of the place are kept: as many as
    bring it within some ten spreads of the values.
    """
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    spread = float(high - low) / 2.56 or float(np.std(values)) or 1.0
    scale = float(f"{spread:.0e}")
    step = 10.0 ** (math.floor(math.log10(abs(middle))) - 1) if middle else 1.0
    step = min(step, 10.0 ** (math.floor(math.log10(scale)) + 1))
    return float(f"{round(float(middle) / step) * step:.12g}"), scale


def _date_format(texts: Sequence[str]) -> tuple[str | None, bool] | None:
    """The format that all these texts have, and whether another one fits as well."""
    fitting = [format_ for format_ in FORMATS if all(_day(text, format_) is not None for text in texts)]
    return (fitting[0], len(fitting) > 1) if fitting else None


def _day(text: str, format_: str | None) -> date | None:
    try:
        return (datetime.fromisoformat(text) if format_ is None else datetime.strptime(text, format_)).date()
    except ValueError:
        return None


def _date_column(look: _Look, format_: str | None, ambiguous: bool) -> Column:
    days = sorted(day for text in look.distinct if (day := _day(text, format_)) is not None)
    start = date(days[len(days) // 2].year, 1, 1)
    remark = f"looks like a date, {format_ or 'ISO 8601'}"
    if ambiguous:
        remark += "; another format fits as well (day and month?): check it"
    return Column(
        look.name,
        "date",
        missing=look.rule or "",
        reference=float((start - date(1970, 1, 1)).days),
        scale=DAYS_A_YEAR,
        format=format_,
        remark=look.with_missing(remark),
    )
