"""Tables of a run: means over seeds, tests against a baseline, the papers' own numbers beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedsolve.experiments.config import TableSpec
from fedsolve.experiments.metrics import METRICS, axis_label, axis_name
from fedsolve.experiments.observations import (
    LEVEL,
    Observation,
    by_stage,
    compare,
    mean_and_error,
    observations,
    with_relative_seconds,
)
from fedsolve.experiments.papers import Printed, papers, printed, same
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.pages.written_tables import latex_table, latex_text, markdown_table, markdown_text

Place = tuple[Any, ...]


@dataclass(frozen=True)
class TableCell:
    """One number of a table."""

    metric: str
    mean: float | None  # None where the models have no such value: a singular system, a part without rows
    error: float | None  # standard error, None for one seed
    seeds: int | None = None  # how many, None in a paper
    p: float | None = None  # against the baseline
    printed: Mapping[str, TableCell] = field(default_factory=dict)  # a paper's, by the number of its table

    @property
    def marked(self) -> bool:
        return self.p is not None and self.p < LEVEL

    @property
    def plain(self) -> str:
        """The number as people read it; a paper's keeps the digits it was printed with."""
        return METRICS[self.metric].number(self.mean, self.error, printed=self.seeds is None)

    @property
    def text(self) -> str:
        return self.plain + ("*" if self.marked else "")


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    label: str
    entries: tuple[TableCell | None, ...]

    def printed(self) -> Iterator[tuple[str, list[TableCell | None]]]:
        """What the paper has for this row, under each of its tables."""
        for table in dict.fromkeys(name for entry in self.entries if entry for name in entry.printed):
            yield table, [None if entry is None else entry.printed.get(table) for entry in self.entries]


@dataclass(frozen=True)
class ResultTable:
    """A table for people."""

    title: str
    corner: str  # the rows' axes
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # how to read it
    remark: str = ""  # what the experiment's file says of all its tables

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON values."""
        return asdict(self)

    def to_markdown(self) -> str:
        """The table under a heading; rows of a paper are in italics."""
        notes = [f"{markdown_text(note)}  " for note in self._all_notes]
        table = markdown_table((self.corner, *self.columns), *self.lines())
        return "\n".join([f"### {markdown_text(self.title)}", "", table, "", *notes]).rstrip() + "\n"

    def to_latex(self) -> str:
        """A table environment, with the rules of the package booktabs."""
        caption = f"{latex_text(self.title)}. {' '.join(map(latex_text, self._all_notes))}".rstrip()
        table = latex_table((self.corner, *self.columns), *self.lines())
        return f"\\begin{{table}}[t]\n\\centering\n\\caption{{{caption}}}\n{table}\n\\end{{table}}\n"

    @property
    def _all_notes(self) -> list[str]:
        return [*self.notes, *([self.remark] if self.remark else [])]

    def to_csv(self) -> str:
        """Comma-separated values: every column as mean, standard error and seeds."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        parts = ("", " standard error", " seeds")
        writer.writerow([self.corner, *(f"{column}{part}" for column in self.columns for part in parts)])
        for label, entries, _ in self._all_rows():
            cells = [(None,) * 3 if one is None else (one.mean, one.error, one.seeds) for one in entries]
            writer.writerow([label, *(value for cell in cells for value in cell)])
        return stream.getvalue()

    @property
    def best(self) -> set[tuple[int, int]]:
        """The places (row, column) of the best values of metrics that rank models.

        Of the methods in a column where rows are methods, else of the settings in a row. Rows of several
        datasets have no best among them, and numbers that are all equal none either.
        """
        axes = self.corner.split(", ")
        if {"method", "dataset"} <= set(axes):
            return set()
        scores: dict[tuple[int, str], dict[tuple[int, int], float]] = {}
        for place, row in enumerate(self.rows):
            for column, entry in enumerate(row.entries):
                if entry is None or entry.mean is None or not METRICS[entry.metric].ranked:
                    continue
                group = column if "method" in axes else place
                sign = -1.0 if METRICS[entry.metric].better == "down" else 1.0
                scores.setdefault((group, entry.metric), {})[place, column] = sign * entry.mean
        return {
            place
            for group in scores.values()
            for place, mean in group.items()
            if mean == max(group.values()) > min(group.values())
        }

    def lines(self) -> tuple[list[list[str]], list[int]]:
        """The rows as text, and which of them are a paper's."""
        rows = [*self._all_rows()]
        texts = [[label, *("" if one is None else one.text for one in cells)] for label, cells, _ in rows]
        return texts, [place for place, (_, _, paper) in enumerate(rows) if paper]

    def _all_rows(self) -> Iterator[tuple[str, Sequence[TableCell | None], bool]]:
        """Every row, and below it one for each table of a paper that has its numbers (True)."""
        for row in self.rows:
            yield row.label, row.entries, False
            for table, entries in row.printed():
                yield f"paper, {table if table.startswith('figure') else f'Table {table}'}", entries, True


def tables_of(run: RunFolder) -> list[ResultTable]:
    """The tables of a run: one for each metric its experiment asks for, or one over all of them."""
    spec = run.experiment.table
    items = observations(run.cells)
    if spec.by_stage:
        items = list(by_stage(items))
    elif "relative_seconds" in spec.values:
        items = with_relative_seconds(items, spec.baseline)
    if not items:
        return []
    layout = _layout(spec, items)
    groups = [spec.values] if "metric" in layout.axes else [(value,) for value in spec.values]
    named = [f", {METRICS[metrics[0]].label}" if len(groups) > 1 else "" for metrics in groups]
    tables = [_table(run, items, layout, *each) for each in zip(groups, named, strict=True)]
    return [table for table in tables if table.rows]


def _place(layout: TableSpec, axes: Sequence[str], item: Observation, metric: str) -> Place:
    """Where an observation stands; a method goes with its depth unless depth is an axis of its own."""
    values: list[Any] = []
    for axis in axes:
        if axis == "metric":
            values.append(metric)
        elif axis == "method" and "depth" not in layout.axes:
            values.append((item.method, item.depth))
        else:
            values.append(item.coordinates.get(axis))
    return tuple(values)


def _layout(spec: TableSpec, items: Sequence[Observation]) -> TableSpec:
    """The experiment's axes; what else varies is added to the rows, so that no two models share a place."""
    grid = dict.fromkeys(name for one in items for name, _ in one.grid)
    rows, columns = spec.rows, spec.columns
    if not columns and "metric" not in rows and len(spec.values) > 1 and rows:
        columns = ("metric",)
    elif not columns:
        free = [axis for axis in ("partition", *grid, "noise", "dataset") if axis not in rows]
        varied = [axis for axis in free if len({_key(one.coordinates.get(axis)) for one in items}) > 1]
        columns = tuple(varied[:1]) or ("metric",)
    layout = replace(spec, rows=rows or ("method",), columns=columns)
    for axis in ("dataset", "backbone", "partition", "method", *grid, "noise", "depth"):
        found = {
            (_key(_place(layout, layout.axes, one, "")), _key(one.coordinates.get(axis))) for one in items
        }
        if axis not in layout.axes and len(found) > len({place for place, _ in found}):
            layout = replace(layout, rows=(*layout.rows, axis))
    return layout


def _key(value: Any) -> Any:
    """A coordinate as something to group by: True and 1 are not the same."""
    return tuple(map(_key, value)) if isinstance(value, tuple) else (type(value).__name__, value)


def _ordered(places: dict[Place, Place]) -> dict[Place, Place]:
    """Places sorted axis by axis, values of each axis in the order in which they first came up."""
    known = [list(dict.fromkeys(values)) for values in zip(*places, strict=True)]

    def order(key: Place) -> list[int]:
        return [values.index(value) for values, value in zip(known, key, strict=True)]

    return {key: places[key] for key in sorted(places, key=order)}


def _table(
    run: RunFolder, items: Sequence[Observation], layout: TableSpec, metrics: tuple[str, ...], named: str
) -> ResultTable:
    cells: dict[tuple[Place, Place], list[Observation]] = {}
    rows: dict[Place, Place] = {}
    columns: dict[Place, Place] = {}
    shown: dict[tuple[Place, Place], str] = {}
    for metric in metrics:
        for one in items:
            row, column = (_place(layout, axes, one, metric) for axes in (layout.rows, layout.columns))
            key = _key(row), _key(column)
            rows.setdefault(key[0], row)
            columns.setdefault(key[1], column)
            shown.setdefault(key, metric)
            cells.setdefault(key, []).append(one)
    rows, columns = _ordered(rows), _ordered(columns)
    ref, lines = run.experiment.paper, []
    numbers = [] if ref is None else printed(ref.key, ref.tables)
    for row_key, row in rows.items():
        keys = [(row_key, column_key) for column_key in columns]
        entries = [_entry(run, items, cells[k], shown[k], numbers) if k in cells else None for k in keys]
        lines.append(Row(_label(layout.rows, row), tuple(entries)))
    return ResultTable(
        run.experiment.title + named,
        ", ".join(axis_name(axis) for axis in layout.rows),
        tuple(_label(layout.columns, column) for column in columns.values()),
        tuple(lines),
        tuple(_notes(run, metrics, lines)),
        run.experiment.notes,
    )


def _label(axes: Sequence[str], place: Place) -> str:
    labels = [axis_label(axis, value) for axis, value in zip(axes, place, strict=True)]
    return ", ".join(label for label in labels if label) or "–"


def _entry(
    run: RunFolder,
    items: Sequence[Observation],
    group: Sequence[Observation],
    metric: str,
    numbers: Sequence[Printed],
) -> TableCell:
    """What the observations of one place give: with a p-value against the baseline of the same conditions."""
    one, baseline, p = group[0], run.experiment.table.baseline, None
    coordinates = {**one.coordinates, "partition": one.setting, "metric": metric}  # as papers spell them
    about = [each for each in numbers if each.about(coordinates)]
    theirs = {each.table: TableCell(metric, each.mean, each.spread) for each in about}
    values = [each.values[metric] for each in group if metric in each.values]
    if not values:
        return TableCell(metric, None, None, printed=theirs)
    if metric == "test" and baseline not in (None, one.method):
        p = compare(group, [each for each in items if each.method == baseline and _alike(each, one)])
    return TableCell(metric, *mean_and_error(values), len(values), p, theirs)


def _notes(run: RunFolder, metrics: Sequence[str], lines: Sequence[Row]) -> Iterator[str]:
    experiment = run.experiment
    entries = [entry for row in lines for entry in row.entries if entry is not None]
    theirs = [each for entry in entries for each in entry.printed.values()]
    seeds = sorted({entry.seeds for entry in entries if entry.seeds})
    if seeds:
        count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        spread = "; ± is the standard error" if seeds[-1] > 1 else ""
        yield f"Mean over {count} seed{'s' if count != '1' else ''}{spread}."
    if any(entry.marked for entry in entries):
        test = f"paired test on the test rows, p < {LEVEL}"
        yield f"* differs from {experiment.table.baseline} ({test})."
    if theirs and experiment.paper is not None:
        paper = papers()[experiment.paper.key]
        spreads = any(each.error is not None for each in theirs)
        sign = f"; ± there is the {paper['spread']}" if spreads else ""
        yield f"paper: {paper['paper']}, printed numbers{sign}."
    scored = {"best": "in its best round on the test rows", "tail": "over the last tenth of its rounds"}
    rounds = any(cell.get("accuracy_per_round") for cell in run.cells)
    if rounds and "test" in metrics and experiment.measure.score in scored:
        yield f"Accuracy of a gradient method: {scored[experiment.measure.score]}."
    if any(entry.mean is None for entry in entries):
        yield "–: not measured, or no model came out of a singular system."
    if run.missing:
        yield f"{run.missing} cells of this experiment have not been run yet."


def _alike(baseline: Observation, one: Observation) -> bool:
    """Whether the baseline's model was trained under the same conditions, as far as they apply to it."""
    names = ["dataset", "backbone", "partition", "noise", *dict(baseline.grid)]
    if baseline.depth is not None:
        names.append("depth")
    here = [name for name in names if name in one.coordinates]
    return all(same(baseline.coordinates[name], one.coordinates[name]) for name in here)
