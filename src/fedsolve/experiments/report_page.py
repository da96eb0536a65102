"""The report: runs as one HTML file that needs no other files and no network (pages/report.html)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedsolve import container
from fedsolve.errors import DataError
from fedsolve.experiments.config import Experiment, TableSpec
from fedsolve.experiments.findings import findings, overall
from fedsolve.experiments.observations import by_dataset, distinct
from fedsolve.experiments.papers import papers
from fedsolve.experiments.result_tables import ResultTable, tables_of
from fedsolve.experiments.run_figures import plots, slug
from fedsolve.experiments.run_folder import RunFolder, load_run
from fedsolve.pages.svg import inline_svg
from fedsolve.pages.templates import markup, render
from fedsolve.pages.words import capital, counted, duration, listed

EVERYTHING = ("test", "train", "exchanges", "megabytes_up", "megabytes_down", "seconds")
MOST_NAMED = 6
"""Methods, datasets and partitions that the setting lists by name."""


def write_report(runs: Sequence[Path], path: Path, title: str | None = None) -> None:
    """Write the report on these runs to `path`; equal runs give equal bytes."""
    container.write_atomically(path, report([load_run(run) for run in runs], title).encode())


def report(runs: Sequence[RunFolder], title: str | None = None) -> str:
    """The report as the text of an HTML file."""
    if not runs:
        raise DataError("a report needs at least one run. Name folders that 'fedsolve experiment run' made.")
    shown: set[str] = set()
    sections = [_section(run, number, shown) for number, run in enumerate(runs, start=1)]
    return render(
        "report.html",
        kind="report",
        script="report.js",
        title=title or (sections[0]["title"] if len(sections) == 1 else "What the experiments say"),
        period=_period(runs),
        lede=" ".join([_extent(runs), *overall(runs)]),
        sections=sections,
    )


def _extent(runs: Sequence[RunFolder]) -> str:
    cells = [cell for run in runs for cell in run.cells]
    counts = {
        "experiment": len(runs),
        "trained model": len({cell["key"] for cell in cells}),
        "dataset": len({cell["dataset"]["name"] for cell in cells}),
    }
    missing = sum(run.missing for run in runs)
    left = f" {missing:,} cells are still to be run." if missing else ""
    return f"{', '.join(counted(count, noun) for noun, count in counts.items())}.{left}"


def _period(runs: Sequence[RunFolder]) -> str:
    """The days on which cells were finished; the page has no date of its own, so that pages compare."""
    days = sorted(cell["time"][:10] for run in runs for cell in run.cells)
    if not days:
        return "no finished cells"
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _section(run: RunFolder, number: int, shown: set[str]) -> dict[str, Any]:
    """An experiment as the template shows it. shown: the partitions that the page already has."""
    experiment, said = run.experiment, findings(run)
    headline = "See its table." if run.cells else "Nothing has been run yet."
    if said:
        dataset, sentences = next(iter(said.items()))
        headline = f"{dataset}: {sentences[0]}" if dataset else sentences[0]
    everything, missing = _everything(run), ""
    if run.missing:
        rest = "the others are shown here." if run.cells else "there is nothing to show."
        cells = f"{counted(run.missing, 'cell')} of {run.missing + len(run.cells)}"
        missing = f"{cells} have not been run yet; {rest}"
    tables = enumerate(tables_of(run), start=1)
    return {
        "id": f"experiment-{number}-{slug(run.name)}",
        "name": run.name,
        "title": experiment.title,
        "headline": headline,
        "eyebrow": list(_eyebrow(experiment, number)),
        "asked": [*([experiment.notes] if experiment.notes else []), _setting(experiment)],
        "missing": missing,
        "findings": said,
        "tables": [table_html(t, f"{number}.{place}", experiment.table.baseline) for place, t in tables],
        "figures": list(_figures(run, number, shown)),
        "everything": None if everything is None else table_html(everything, f"{number}.all"),
        "models": "" if everything is None else counted(len(everything.rows), "model"),
        "text": experiment.text.strip(),
        "cells": counted(len(run.cells), "cell"),
        "facts": list(_facts(run)),
    }


def _eyebrow(experiment: Experiment, number: int) -> Iterator[str]:
    yield f"Experiment {number}"
    yield ", ".join(distinct(dataset.name for dataset in experiment.datasets))
    if (ref := experiment.paper) is not None:
        word = "" if ref.tables[0].startswith("figure") else "Table " if len(ref.tables) == 1 else "Tables "
        yield f"after {papers()[ref.key]['paper']}, {word}{', '.join(ref.tables)}"


def _setting(experiment: Experiment) -> str:
    backbones: dict[str, list[str]] = {}
    for dataset in experiment.datasets:
        backbones.setdefault(dataset.name, []).append(dataset.backbone or "no backbone")
    datasets = [
        f"{name} through {listed(by, MOST_NAMED)}" if len(by) > 1 else name for name, by in backbones.items()
    ]
    counts = {partition.clients for partition in experiment.partitions}
    clients = f" among {counted(counts.pop(), 'client')}" if len(counts) == 1 and counts != {0} else ""
    return (
        f"Setting: {listed([method.name for method in experiment.methods], MOST_NAMED)}, "
        f"on {listed(datasets, MOST_NAMED)}, "
        f"under {listed([one.name for one in experiment.partitions], MOST_NAMED)}{clients}, "
        f"with {counted(len(experiment.seeds), 'seed')}."
    )


def _figures(run: RunFolder, number: int, shown: set[str]) -> Iterator[dict[str, Any]]:
    """The figures, numbered; partitions that the page has shown already are left out."""
    count, drawn = 0, plots(run)
    for dataset, figures in drawn.items():
        source = by_dataset(run)[dataset][0]["dataset"]["name"]
        dealt = json.dumps([partition["class_counts"] for partition in run.dealt(source)])
        fresh = [plot for plot in figures if plot.name != "partition" or dealt not in shown]
        shown.add(dealt)
        for place, plot in enumerate(fresh):
            count += 1
            name = f"figure-{number}-{count}"
            yield {
                "id": name,
                "name": f"{number}.{count}",
                "heading": dataset if place == 0 and len(drawn) > 1 else "",
                "title": plot.title,
                "caption": plot.caption,
                "svg": inline_svg(plot.figure, name, f"{plot.title} {plot.description}"),
            }


def _facts(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Where the numbers come from: data, seeds, versions, machines."""
    cells = run.cells
    yield "Cells", f"{len(cells):,} finished, {run.missing or 'none'} missing"
    yield "Seeds", ", ".join(map(str, run.experiment.seeds))
    for name, of in by_dataset(run).items():
        data = of[0]["dataset"]
        test = f" and {data['test_rows']:,} test" if data.get("test_rows") else ""
        backbone = f", backbone {data['backbone']}" if data.get("backbone") else ""
        size = f"{data['rows']:,} training{test} rows, {data['features']:,} features"
        size += f", {data['classes']:,} classes"
        yield "Data", f"{name}: {size}{backbone}; contents {data['key'][:16]}"
    for versions in distinct(", ".join(f"{n} {v}" for n, v in cell["versions"].items()) for cell in cells):
        yield "Versions", versions
    for machine in distinct(_machine(cell["machine"]) for cell in cells):
        yield "Machine", machine
    if cells:
        times = sorted(datetime.fromisoformat(cell["time"]).astimezone(UTC) for cell in cells)
        yield "Finished", f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC"
        yield "Training", f"{duration(sum(cell['seconds'] or 0.0 for cell in cells))} in all"


def _machine(machine: Mapping[str, Any]) -> str:
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine['cpu']}, {counted(machine['cores'], 'core')}, {machine['system']}{gpu}"


def _everything(run: RunFolder) -> ResultTable | None:
    """Accuracy and cost of every model of a run, one row each."""
    spec = TableSpec(rows=("method",), columns=("metric",), values=EVERYTHING)
    experiment = dataclasses.replace(run.experiment, table=spec, paper=None)
    tables = tables_of(dataclasses.replace(run, experiment=experiment))
    return tables[0] if tables else None


def table_html(table: ResultTable, name: str, baseline: str | None = None) -> str:
    """The table as part of a page: a paper's numbers in the cells of ours, our best in bold."""
    metrics = {entry.metric for row in table.rows for entry in row.entries if entry is not None}
    unit = " Test accuracy in per cent." if metrics == {"test"} else ""
    page = render(
        "results.html",
        table=table,
        name=name,
        baseline=baseline,
        caption=f"{table.title.removesuffix('.')}.{unit}",
        # Signs of the papers (T, λ, d_F) keep their case.
        corner=capital(table.corner) if table.corner.split(",")[0].isalpha() else table.corner,
        csv=quote(table.to_csv()),
    )
    return markup(page)
