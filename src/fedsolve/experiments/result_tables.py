"""Tables of a run: means over seeds, tests against a baseline, the papers' own numbers beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedsolve.experiments.config import Experiment, TableSpec
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
    """One number of a table.

    mean:  None where the models have no such value: a singular system, or a part without rows.
    error: standard error, None for one seed. seeds: how many, None in a paper. p: against the baseline.
    printed: what a paper has in this place, by the number of its table.
    """

    metric: str
    mean: float | None
    error: float | None
    seeds: int | None = None
    p: float | None = None
    printed: Mapping[str, TableCell] = field(default_factory=dict)

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
    """A table for people: `corner` names the rows' axes, notes say how to read it.

    remark: what the experiment's file says of all its tables.
    """

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    remark: str = ""

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
    if "metric" in layout.rows + layout.columns:
        groups: list[tuple[str, ...]] = [spec.values]
    else:
        groups = [(value,) for value in spec.values]
    tables = []
    for metrics in groups:
        named = f", {METRICS[metrics[0]].label}" if len(groups) > 1 else ""
        tables.append(_Builder(run, items, layout, metrics).table(f"{run.experiment.title}{named}"))
    return [table for table in tables if table.rows]


# -- layout ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.rows + self.columns

    def place(self, axes: Sequence[str], item: Observation, metric: str) -> Place:
        """Where an observation stands; a method goes with its depth unless depth is an axis of its own."""
        values: list[Any] = []
        for axis in axes:
            if axis == "metric":
                values.append(metric)
            elif axis == "method" and "depth" not in self.axes:
                values.append((item.method, item.depth))
            else:
                values.append(item.coordinates.get(axis))
        return tuple(values)


def _layout(spec: TableSpec, items: Sequence[Observation]) -> _Layout:
    """The experiment's axes; what else varies is added to the rows, so that no two models share a place."""
    grid = dict.fromkeys(name for one in items for name, _ in one.grid)
    candidates = ("dataset", "backbone", "partition", "method", *grid, "noise", "depth")

    def varies(axis: str) -> bool:
        return len({_key(one.coordinates.get(axis)) for one in items}) > 1

    rows, columns = spec.rows, spec.columns
    if not columns and "metric" not in rows and len(spec.values) > 1 and rows:
        columns = ("metric",)
    elif not columns:
        free = [axis for axis in ("partition", *grid, "noise", "dataset") if axis not in rows]
        columns = tuple([axis for axis in free if varies(axis)][:1]) or ("metric",)
    if not rows:
        rows = ("method",)
    layout = _Layout(rows, columns)
    for axis in candidates:
        places: dict[Place, set[Any]] = {}
        for one in items:
            places.setdefault(_key(layout.place(layout.axes, one, "")), set()).add(
                _key(one.coordinates.get(axis))
            )
        if axis not in layout.axes and any(len(values) > 1 for values in places.values()):
            layout = _Layout((*layout.rows, axis), layout.columns)
    return layout


def _key(value: Any) -> Any:
    """A coordinate as something to group by: True and 1 are not the same."""
    return tuple(map(_key, value)) if isinstance(value, tuple) else (type(value).__name__, value)


def _ordered(places: dict[Place, Place]) -> dict[Place, Place]:
    """Places sorted axis by axis, values of each axis in the order in which they first came up."""
    ranks: list[dict[Any, int]] = [{} for _ in next(iter(places), ())]
    for key in places:
        for rank, value in zip(ranks, key, strict=True):
            rank.setdefault(value, len(rank))

    def order(key: Place) -> tuple[int, ...]:
        return tuple(rank[value] for rank, value in zip(ranks, key, strict=True))

    return {key: places[key] for key in sorted(places, key=order)}


# -- filling ---------------------------------------------------------------------------------------


@dataclass
class _Builder:
    run: RunFolder
    items: Sequence[Observation]
    layout: _Layout
    metrics: tuple[str, ...]

    def table(self, title: str) -> ResultTable:
        cells: dict[tuple[Place, Place], list[tuple[Observation, str]]] = {}
        rows: dict[Place, Place] = {}
        columns: dict[Place, Place] = {}
        for metric in self.metrics:
            for one in self.items:
                row, column = (
                    self.layout.place(axes, one, metric) for axes in (self.layout.rows, self.layout.columns)
                )
                columns.setdefault(_key(column), column)
                rows.setdefault(_key(row), row)
                cells.setdefault((_key(row), _key(column)), []).append((one, metric))
        rows, columns = _ordered(rows), _ordered(columns)
        ref = self._experiment.paper
        numbers = [] if ref is None else printed(ref.key, ref.tables)
        lines: list[Row] = []
        for row_key, row in rows.items():
            groups = [cells.get((row_key, column_key)) for column_key in columns]
            entries = [None if group is None else self._entry(group, numbers) for group in groups]
            lines.append(Row(self._label(self.layout.rows, row), tuple(entries)))
        return ResultTable(
            title,
            ", ".join(axis_name(axis) for axis in self.layout.rows),
            tuple(self._label(self.layout.columns, column) for column in columns.values()),
            tuple(lines),
            tuple(self._notes(lines)),
            self._experiment.notes,
        )

    @property
    def _experiment(self) -> Experiment:
        return self.run.experiment

    def _label(self, axes: Sequence[str], place: Place) -> str:
        labels = [axis_label(axis, value) for axis, value in zip(axes, place, strict=True)]
        return ", ".join(label for label in labels if label) or "–"

    def _entry(self, group: list[tuple[Observation, str]], numbers: Sequence[Printed]) -> TableCell:
        one, metric = group[0]
        coordinates = {**one.coordinates, "partition": one.setting, "metric": metric}  # as papers spell them
        theirs = {
            each.table: TableCell(metric, each.mean, each.spread)
            for each in numbers
            if each.about(coordinates)
        }
        values = [one.values[metric] for one, _ in group if metric in one.values]
        if not values:
            return TableCell(metric, None, None, printed=theirs)
        mean, error = mean_and_error(values)
        p = self._p([one for one, _ in group]) if metric == "test" else None
        return TableCell(metric, mean, error, len(values), p, theirs)

    def _p(self, group: list[Observation]) -> float | None:
        """The p-value against the baseline under the same conditions."""
        baseline = self._experiment.table.baseline
        first = group[0]
        if baseline is None or first.method == baseline:
            return None
        rivals = [one for one in self.items if one.method == baseline and _alike(one, first)]
        return compare(group, rivals)

    def _notes(self, lines: Sequence[Row]) -> Iterator[str]:
        experiment = self._experiment
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
            sign = (
                f"; ± there is the {paper['spread']}"
                if any(each.error is not None for each in theirs)
                else ""
            )
            yield f"paper: {paper['paper']}, printed numbers{sign}."
        scored = {"best": "in its best round on the test rows", "tail": "over the last tenth of its rounds"}
        rounds = any(cell.get("accuracy_per_round") for cell in self.run.cells)
        if rounds and "test" in self.metrics and experiment.measure.score in scored:
            yield f"Accuracy of a gradient method: {scored[experiment.measure.score]}."
        if any(entry.mean is None for entry in entries):
            yield "–: not measured, or no model came out of a singular system."
        if self.run.missing:
            yield f"{self.run.missing} cells of this experiment have not been run yet."


def _alike(baseline: Observation, one: Observation) -> bool:
    """Whether the baseline's model was trained under the same conditions, as far as they apply to it."""
    names = ["dataset", "backbone", "partition", "noise", *dict(baseline.grid)]
    if baseline.depth is not None:
        names.append("depth")
    here = [name for name in names if name in one.coordinates]
    return all(same(baseline.coordinates[name], one.coordinates[name]) for name in here)
