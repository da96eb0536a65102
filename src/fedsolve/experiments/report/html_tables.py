"""Tables of a run as HTML: sortable, ours above the paper's in the same cell, and as a file to take away."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fedsolve.experiments.config import TableSpec
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.result_tables import ResultTable, Row, TableCell, tables_of
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.markup import Markup, join, tag, unbroken

EVERYTHING = ("test", "train", "exchanges", "megabytes_up", "megabytes_down", "seconds")


@dataclass(frozen=True)
class _Line:
    """A row of ours with what papers print for it; a row that only a paper has comes without ours."""

    row: Row
    printed: tuple[Row, ...]


def results_table(table: ResultTable, name: str, baseline: str | None) -> Markup:
    """The table with its caption and notes; the best accuracy of each column in bold."""
    lines = _lines(table.rows)
    best = _best(table, lines)
    head = [tag("th", _capital(table.corner), scope="col")]
    head += [tag("th", unbroken(column), scope="col", class_="number") for column in table.columns]
    body = [
        tag(
            "tr",
            tag("th", unbroken(line.row.label), scope="row"),
            *(_cell(line, column, (place, column) in best, baseline) for column in range(len(table.columns))),
            class_="printed" if line.row.paper else None,
        )
        for place, line in enumerate(lines)
    ]
    drawn = tag(
        "table",
        tag("caption", tag("span", tag("b", f"Table {name}. "), _unit(table))),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_="results",
        id=f"table-{name.replace('.', '-')}",
    )
    return join(
        [
            tag("div", drawn, class_="scroll", tabindex="0", role="group", aria_label=f"Table {name}"),
            _notes(table, name),
        ]
    )


def everything_table(run: RunFolder) -> ResultTable | None:
    """Accuracy and cost of every model of a run, one row each."""
    spec = TableSpec(rows=("method",), columns=("metric",), values=EVERYTHING)
    experiment = dataclasses.replace(run.experiment, table=spec, paper=None)
    tables = tables_of(dataclasses.replace(run, experiment=experiment))
    return tables[0] if tables else None


def as_csv(table: ResultTable) -> str:
    """The table as comma-separated values: every column as mean and standard error."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    heads = [
        head for column in table.columns for head in (column, f"{column} standard error", f"{column} seeds")
    ]
    writer.writerow([table.corner, *heads])
    for row in table.rows:
        cells: list[str] = []
        for entry in row.entries:
            cells += ["", "", ""] if entry is None else _exact(entry)
        writer.writerow([row.label, *cells])
    return stream.getvalue()


def _lines(rows: Sequence[Row]) -> list[_Line]:
    """Our rows, each with the papers' rows that belong to it; all other rows of papers stay on their own."""
    lines: list[_Line] = []
    for row in rows:
        beside = (
            row.paper is not None and lines and lines[-1].row.paper is None and row.label.startswith("paper")
        )
        if beside:
            lines[-1] = _Line(lines[-1].row, (*lines[-1].printed, row))
        else:
            lines.append(_Line(row, ()))
    return lines


def _cell(line: _Line, column: int, best: bool, baseline: str | None) -> Markup:
    entry = line.row.entries[column]
    printed = [_printed(row.entries[column]) for row in line.printed]
    if entry is None:
        return tag("td", *printed, class_="number")
    parts = [_number(entry)]
    if entry.marked:
        hint = f"differs from {baseline}: p = {entry.p:.2g}"
        parts.append(tag("abbr", "*", class_="star", title=hint))
    return tag(
        "td",
        tag("strong", *parts) if best else join(parts),
        *printed,
        class_="number",
        data_value="" if entry.mean is None else repr(entry.mean),
    )


def _number(entry: TableCell) -> Markup:
    """Mean and standard error, the error in a lighter ink."""
    mean, sign, error = entry.plain.partition(" ± ")
    return join([mean, tag("span", sign, error, class_="error") if sign else ""])


def _printed(entry: TableCell | None) -> Markup:
    if entry is None:
        return Markup()
    return tag("span", f"paper {entry.plain}", class_="paper")


def _best(table: ResultTable, lines: Sequence[_Line]) -> set[tuple[int, int]]:
    """The places (row, column) of our best values of metrics that rank models.

    Of the methods in a column where rows are methods, else of the settings in a row. Rows of several
    datasets have no best among them, and numbers that are all equal none either.
    """
    axes = table.corner.split(", ")
    scores: dict[tuple[int, str], dict[tuple[int, int], float]] = {}
    for place, line in enumerate(lines):
        for column, entry in enumerate(line.row.entries):
            if entry is None or entry.mean is None or line.row.paper is not None:
                continue
            metric = METRICS[entry.metric]
            if metric.ranked:
                group = column if "method" in axes else place
                sign = -1.0 if metric.better == "down" else 1.0
                scores.setdefault((group, entry.metric), {})[place, column] = sign * entry.mean
    if {"method", "dataset"} <= set(axes):
        return set()
    return {
        place
        for group in scores.values()
        for place, mean in group.items()
        if mean == max(group.values()) > min(group.values())
    }


def _unit(table: ResultTable) -> str:
    metrics = {entry.metric for row in table.rows for entry in row.entries if entry is not None}
    title = table.title.removesuffix(".")
    return f"{title}. Test accuracy in per cent." if metrics == {"test"} else f"{title}."


def _notes(table: ResultTable, name: str) -> Markup:
    link = tag(
        "a",
        "Take the numbers along (CSV)",
        href=f"data:text/csv;charset=utf-8,{quote(as_csv(table))}",
        download=f"table-{name}.csv",
        class_="download",
    )
    return tag("p", join([*table.notes, link], " "), class_="notes")


def _exact(entry: TableCell) -> list[str]:
    return ["" if value is None else repr(value) for value in (entry.mean, entry.error, entry.seeds)]


def _capital(text: str) -> str:
    # Signs of the papers (T, λ, d_F) keep their case.
    return text[:1].upper() + text[1:] if text.split(",")[0].isalpha() and len(text) > 2 else text
