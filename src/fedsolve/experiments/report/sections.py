"""The section of one experiment: question, answer, table, figures, and what stands behind them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from fedsolve.experiments.config import Experiment
from fedsolve.experiments.figures import plots, slug
from fedsolve.experiments.figures.plots import Plot
from fedsolve.experiments.observations import by_dataset, distinct
from fedsolve.experiments.papers import papers
from fedsolve.experiments.report.findings import findings
from fedsolve.experiments.report.html_tables import everything_table, results_table
from fedsolve.experiments.report.svg import inline_svg
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.wording import counted, listed
from fedsolve.markup import Markup, join, tag, unbroken

MOST_NAMED = 6
"""Methods, datasets and partitions that the setting lists by name."""


class Section:
    """An experiment on the page. `number` counts them; `shown` holds the figures that it already has."""

    def __init__(self, run: RunFolder, number: int, shown: set[str]) -> None:
        self.run = run
        self.number = number
        self.id = f"experiment-{number}-{slug(run.name)}"
        self.title = run.experiment.title
        self.findings = findings(run)
        self._shown = shown

    @property
    def headline(self) -> str:
        """The first thing the numbers say."""
        if not self.findings:
            return "See its table." if self.run.cells else "Nothing has been run yet."
        dataset, sentences = next(iter(self.findings.items()))
        return f"{dataset}: {sentences[0]}" if dataset else sentences[0]

    def html(self) -> Markup:
        body = [self._head(), self._asked(), self._missing()]
        if self.run.cells:
            body += [self._answer(), self._tables(), self._figures()]
        body += [
            tag("h3", "Behind the numbers"),
            self._everything(),
            self._configuration(),
            self._provenance(),
        ]
        return tag("section", *body, id=self.id, class_="experiment", aria_labelledby=f"{self.id}-title")

    def _head(self) -> Markup:
        datasets = ", ".join(distinct(dataset.name for dataset in self.run.experiment.datasets))
        parts = [tag("span", f"Experiment {self.number}"), tag("span", datasets)]
        ref = self.run.experiment.paper
        if ref is not None:
            names = ", ".join(ref.tables)
            word = (
                "" if ref.tables[0].startswith("figure") else "Table " if len(ref.tables) == 1 else "Tables "
            )
            parts.append(tag("span", f"beside {papers()[ref.key]['paper']}, {word}{names}"))
        return join([tag("p", *parts, class_="eyebrow"), tag("h2", self.title, id=f"{self.id}-title")])

    def _asked(self) -> Markup:
        experiment = self.run.experiment
        setting = [
            listed([method.name for method in experiment.methods], MOST_NAMED),
            f"on {listed(_datasets(experiment), MOST_NAMED)}",
            f"under {listed([one.name for one in experiment.partitions], MOST_NAMED)}{_clients(experiment)}",
            f"with {counted(len(experiment.seeds), 'seed')}",
        ]
        notes = [tag("p", experiment.notes, class_="asked")] if experiment.notes else []
        return join([*notes, tag("p", unbroken(f"Setting: {', '.join(setting)}."), class_="asked")])

    def _missing(self) -> Markup:
        missing, finished = self.run.missing, len(self.run.cells)
        if not missing:
            return Markup()
        notice = f"{counted(missing, 'cell')} of {missing + finished} have not been run yet"
        rest = "what follows rests on the others." if finished else "there is nothing to show."
        return tag("p", f"{notice}; {rest}", class_="warning", role="note")

    def _answer(self) -> Markup:
        """A paragraph for each dataset, named where there are several."""
        paragraphs = [
            tag("p", tag("b", f"{dataset}. ") if dataset else "", " ".join(sentences))
            for dataset, sentences in self.findings.items()
        ]
        return tag("div", *paragraphs, class_="answer") if paragraphs else Markup()

    def _tables(self) -> Markup:
        tables = tables_of(self.run)
        names = [f"{self.number}.{place}" for place in range(1, len(tables) + 1)]
        baseline = self.run.experiment.table.baseline
        rendered = [results_table(table, name, baseline) for table, name in zip(tables, names, strict=True)]
        return join([tag("h3", "Results"), *rendered]) if rendered else Markup()

    def _figures(self) -> Markup:
        drawn = {dataset: self._fresh(figures, dataset) for dataset, figures in plots(self.run).items()}
        parts: list[Markup] = []
        count = 0
        for dataset, figures in drawn.items():
            if figures and len(drawn) > 1:
                parts.append(tag("h4", dataset))
            for plot in figures:
                count += 1
                parts.append(self._figure(plot, count))
        return join([tag("h3", "Figures"), *parts]) if parts else Markup()

    def _fresh(self, figures: Iterable[Plot], dataset: str) -> list[Plot]:
        """Without the partitions that the page has shown already."""
        fresh = []
        source = by_dataset(self.run)[dataset][0]["dataset"]["name"]
        name = json.dumps([t["class_counts"] for t in self.run.partitions if t["dataset"] == source])
        for plot in figures:
            if plot.name != "partition" or name not in self._shown:
                fresh.append(plot)
            if plot.name == "partition":
                self._shown.add(name)
        return fresh

    def _figure(self, plot: Plot, count: int) -> Markup:
        name = f"{self.number}.{count}"
        drawing = inline_svg(
            plot.figure, f"figure-{name.replace('.', '-')}", f"{plot.title} {plot.description}"
        )
        caption = [tag("b", f"Figure {name}. {plot.title}"), " ", plot.caption]
        return tag(
            "figure",
            tag("div", drawing, class_="plot"),
            tag("figcaption", *caption),
            id=f"figure-{name.replace('.', '-')}",
        )

    def _everything(self) -> Markup:
        table = everything_table(self.run) if self.run.cells else None
        if table is None:
            return Markup()
        return _folded(
            "Accuracy and cost of every model",
            counted(len(table.rows), "model"),
            results_table(table, f"{self.number}.all", None),
        )

    def _configuration(self) -> Markup:
        experiment = self.run.experiment
        return _folded(
            "Configuration", f"{self.run.name}.toml", tag("pre", tag("code", experiment.text.strip()))
        )

    def _provenance(self) -> Markup:
        cells = self.run.cells
        facts: list[tuple[str, Any]] = [
            ("Cells", f"{len(cells):,} finished, {self.run.missing or 'none'} missing"),
            ("Seeds", ", ".join(map(str, self.run.experiment.seeds))),
        ]
        for name, dataset_cells in by_dataset(self.run).items():
            facts.append(("Data", f"{name}: {_data(dataset_cells[0]['dataset'])}"))
        for versions in distinct(_pairs(cell["versions"]) for cell in cells):
            facts.append(("Versions", versions))
        for machine in distinct(_machine(cell["machine"]) for cell in cells):
            facts.append(("Machine", machine))
        if cells:
            times = sorted(cell["time"] for cell in cells)
            seconds = sum(cell["seconds"] or 0.0 for cell in cells)
            facts.append(("Finished", f"{_when(times[0])} to {_when(times[-1])} UTC"))
            facts.append(("Training", f"{_duration(seconds)} in all"))
        facts.append(("Again", tag("code", f"fedsolve experiment run {self.run.name}.toml")))
        rows = [part for name, value in facts for part in (tag("dt", name), tag("dd", value))]
        return _folded("Provenance", counted(len(cells), "cell"), tag("dl", *rows))


def _datasets(experiment: Experiment) -> list[str]:
    """The datasets by name, each with its backbones where it has several."""
    backbones: dict[str, list[str]] = {}
    for dataset in experiment.datasets:
        backbones.setdefault(dataset.name, []).append(dataset.backbone or "no backbone")
    return [
        f"{name} through {listed(by, MOST_NAMED)}" if len(by) > 1 else name for name, by in backbones.items()
    ]


def _clients(experiment: Experiment) -> str:
    """How many clients, where all partitions have the same number; elsewhere their names say so."""
    counts = {partition.clients for partition in experiment.partitions}
    return f" among {counted(counts.pop(), 'client')}" if len(counts) == 1 and counts != {0} else ""


def _folded(title: str, count: str, *content: Markup) -> Markup:
    summary = tag("summary", title, " ", tag("span", count, class_="count"))
    return tag("details", summary, tag("div", *content, class_="inside"))


def _data(dataset: Mapping[str, Any]) -> str:
    test = f" and {dataset['test_rows']:,} test" if dataset.get("test_rows") else ""
    backbone = f", backbone {dataset['backbone']}" if dataset.get("backbone") else ""
    size = f"{dataset['rows']:,} training{test} rows, {dataset['features']:,} features"
    return f"{size}, {dataset['classes']:,} classes{backbone}; contents {dataset['key'][:16]}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _machine(machine: Mapping[str, Any]) -> str:
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine['cpu']}, {counted(machine['cores'], 'core')}, {machine['system']}{gpu}"


def _when(time: str) -> str:
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
