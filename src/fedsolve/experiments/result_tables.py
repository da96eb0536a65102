"""Tables of a run: means over seeds, tests against a baseline, the papers' own numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
    """

    metric: str
    mean: float | None
    error: float | None
    seeds: int | None = None
    p: float | None = None

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
    """A line of a table; `paper` names the table it was printed in, None for our own."""

    label: str
    entries: tuple[TableCell | None, ...]
    paper: str | None = None


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
        table = markdown_table((self.corner, *self.columns), *self._lines)
        return "\n".join([f"### {markdown_text(self.title)}", "", table, "", *notes]).rstrip() + "\n"

    def to_latex(self) -> str:
        """A table environment, with the rules of the package booktabs."""
        caption = f"{latex_text(self.title)}. {' '.join(map(latex_text, self._all_notes))}".rstrip()
        table = latex_table((self.corner, *self.columns), *self._lines)
        return f"\\begin{{table}}[t]\n\\centering\n\\caption{{{caption}}}\n{table}\n\\end{{table}}\n"

    @property
    def _all_notes(self) -> list[str]:
        return [*self.notes, *([self.remark] if self.remark else [])]

    @property
    def _lines(self) -> tuple[list[list[str]], list[int]]:
        """The rows as text, and which of them are a paper's."""
        texts = [[row.label, *("" if one is None else one.text for one in row.entries)] for row in self.rows]
        return texts, [place for place, row in enumerate(self.rows) if row.paper]


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
            label = self._label(self.layout.rows, row)
            lines.append(Row(label, tuple(None if group is None else self._entry(group) for group in groups)))
            lines += self._paper_rows(groups, numbers)
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

    def _entry(self, group: list[tuple[Observation, str]]) -> TableCell:
        metric = group[0][1]
        values = [one.values[metric] for one, _ in group if metric in one.values]
        if not values:
            return TableCell(metric, None, None)
        mean, error = mean_and_error(values)
        p = self._p([one for one, _ in group]) if metric == "test" else None
        return TableCell(metric, mean, error, len(values), p)

    def _p(self, group: list[Observation]) -> float | None:
        """The p-value against the baseline under the same conditions."""
        baseline = self._experiment.table.baseline
        first = group[0]
        if baseline is None or first.method == baseline:
            return None
        rivals = [one for one in self.items if one.method == baseline and _alike(one, first)]
        return compare(group, rivals)

    def _paper_rows(
        self, groups: Sequence[list[tuple[Observation, str]] | None], numbers: Sequence[Printed]
    ) -> Iterator[Row]:
        """What the paper printed for the models of a row, table by table."""
        by_table: dict[str, list[TableCell | None]] = {}
        for column, group in enumerate(groups):
            if group is None:
                continue
            one, metric = group[0]
            coordinates = _spelled(one) | {"metric": metric}
            for value in numbers:
                if value.about(coordinates):
                    entries = by_table.setdefault(value.table, [None] * len(groups))
                    entries[column] = TableCell(metric, value.mean, value.spread)
        for table, entries in by_table.items():
            named = table if table.startswith("figure") else f"Table {table}"
            yield Row(f"paper, {named}", tuple(entries), table)

    def _notes(self, lines: Sequence[Row]) -> Iterator[str]:
        experiment = self._experiment
        seeds = sorted({e.seeds for row in lines for e in row.entries if e is not None and e.seeds})
        if seeds:
            count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
            spread = "; ± is the standard error" if seeds[-1] > 1 else ""
            yield f"Mean over {count} seed{'s' if count != '1' else ''}{spread}."
        if any(entry is not None and entry.marked for row in lines for entry in row.entries):
            test = f"paired test on the test rows, p < {LEVEL}"
            yield f"* differs from {experiment.table.baseline} ({test})."
        if any(row.paper is not None for row in lines) and experiment.paper is not None:
            paper = papers()[experiment.paper.key]
            spreads = any(e is not None and e.error is not None for r in lines if r.paper for e in r.entries)
            sign = f"; ± there is the {paper['spread']}" if spreads else ""
            yield f"paper: {paper['paper']}, printed numbers{sign}."
        scored = {"best": "in its best round on the test rows", "tail": "over the last tenth of its rounds"}
        rounds = any(cell.get("accuracy_per_round") for cell in self.run.cells)
        if rounds and "test" in self.metrics and experiment.measure.score in scored:
            yield f"Accuracy of a gradient method: {scored[experiment.measure.score]}."
        if any(entry is not None and entry.mean is None for row in lines for entry in row.entries):
            yield "–: not measured, or no model came out of a singular system."
        if self.run.missing:
            yield f"{self.run.missing} cells of this experiment have not been run yet."


def _spelled(one: Observation) -> dict[str, Any]:
    """Coordinates as the papers spell them."""
    return {**one.coordinates, "partition": one.setting}


def _alike(baseline: Observation, one: Observation) -> bool:
    """Whether the baseline's model was trained under the same conditions, as far as they apply to it."""
    names = ["dataset", "backbone", "partition", "noise", *dict(baseline.grid)]
    if baseline.depth is not None:
        names.append("depth")
    here = [name for name in names if name in one.coordinates]
    return all(same(baseline.coordinates[name], one.coordinates[name]) for name in here)
