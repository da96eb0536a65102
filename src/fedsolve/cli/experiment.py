"""`fedsolve experiment` and `fedsolve report`: run experiment files, and show what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console

from fedsolve.cli.features import DatasetOptions, StoreOptions
from fedsolve.cli.options import LAST, ExamplesGroup, Options, command, option, required
from fedsolve.cli.output import Interrupted, Output, check_target, table, write_text
from fedsolve.cli.watched import TrackerOptions, WatchOptions, watched_page
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import EXTRA
from fedsolve.experiments.checks import Check, checks_of
from fedsolve.experiments.config import Experiment
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.reading import read_experiment, shipped
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import TEXT, load_run
from fedsolve.experiments.runner import CellProgress, Summary, run_experiment
from fedsolve.experiments.sources import StoredRows
from fedsolve.pages.words import counted, duration

if TYPE_CHECKING:
    from fedsolve.watching.loopback import StatusPage


@click.group(cls=ExamplesGroup)
def experiment() -> None:
    """Reproduce the papers' tables: run experiment files, resume them, print what came out.

    An experiment file (TOML) names datasets, partitions, methods with parameters and grids, and seeds.
    Every finished cell is one line of RUNS/NAME/cells.jsonl; running a file again runs only what is missing.
    """


class RunFolderOptions(Options):
    title = "Where things are"
    files: tuple[str, ...] = option((), argument=True, metavar="[FILE...]")
    runs: str = option("runs", "Folder of all runs, one each.", "DIR")


class ExperimentOptions(TrackerOptions, WatchOptions, StoreOptions, DatasetOptions, RunFolderOptions):
    title = "What runs"
    files: tuple[str, ...] = required(argument=True, metavar="FILE...")
    dataset: tuple[str, ...] = option((), "Only these datasets of the files.", "NAME")
    backbone: str | None = option(None, "Instead of the backbone that a file names.", "ADDRESS")
    workers: int | None = option(None, "Clients at a time.", least=1, none="all cores")
    check: bool = option(False, "Then compare every cell that ran with the paper's number and its interval.")


class RunsOptions(Options):
    title = LAST
    runs: tuple[str, ...] = required(argument=True, metavar="RUN...")


class TablesOptions(RunsOptions):
    style: Literal["markdown", "latex"] = option("markdown", "How tables are written.", flag="--format")
    out: str | None = option(None, "Write to this file instead of stdout.", "FILE")


@command(group=experiment)
def run(options: ExperimentOptions, output: Output) -> int:
    """Run the missing cells of experiment FILEs; stop and continue at any time.

    'small' stands for the experiments that are part of fedsolve, 'small/afl-table-1' for one of them. Cells
    that need a package which is not installed are left out, and named. The seed of a cell is that of the
    partition, of the label noise and of the method's projections. With --check the exit code is 1 where a
    cell lies outside the paper's interval, or the paper has no number for any of them.

    # every family at a small size, offline, from any folder
    fedsolve experiment run small
    # a table of the paper at full size, on files of your own
    fedsolve experiment run experiments/deepafl/table-03.toml --data-root ~/datasets
    # a table that needs no files, beside the paper's numbers
    fedsolve experiment run experiments/afl/table-a1.toml --check
    """
    experiments = _read(options.files)
    if options.dataset:
        experiments = [one.only(options.dataset) for one in experiments]
    tracked = options.followers()
    source = StoredRows(options.root, options.store)
    summaries: list[Summary] = []
    name = experiments[0].name
    with watched_page(name, output, "experiment") if options.watch else nullcontext() as page:
        for one in experiments:
            summary = Summary(Path(options.runs) / one.name, len(one.cells()))
            summaries.append(summary)
            if page is not None:
                page.entitle(one.name)
            try:
                with _bar(output, one.name, page) as progress:
                    run_experiment(
                        one,
                        options.runs,
                        source,
                        backbone=options.backbone,
                        workers=options.workers,
                        progress=progress,
                        follow=tracked if page is None else [*tracked, page],
                        summary=summary,
                    )
            except KeyboardInterrupt as stop:
                done = f"{summary.found + summary.ran} of {summary.total} cells of {summary.folder}"
                told = f"interrupted; {done} are finished and kept. Run the same command to continue."
                raise Interrupted(told) from stop
            parts = [f"{summary.ran} cells run in {duration(summary.seconds)}"]
            parts += [f"{summary.found} were there"] * bool(summary.found)
            parts += [f"{summary.damaged} unreadable lines set aside"] * bool(summary.damaged)
            output.note(f"{summary.folder}: {', '.join(parts)}.")
        if page is not None:
            page.complete()
    _tell_left_out(output, summaries)
    document: dict[str, Any] = {"runs": [vars(summary) for summary in summaries]}
    if not options.check:
        folders = " ".join(str(summary.folder) for summary in summaries[:3])
        more = " ..." if len(summaries) > 3 else ""
        output.result(document, f"Now: fedsolve experiment table {folders}{more}")
        return 0
    checks = {summary.folder.name: checks_of(load_run(summary.folder)) for summary in summaries}
    document["checks"] = {
        name: [vars(one) | {"inside": one.inside} for one in found] for name, found in checks.items()
    }
    output.result(document, lambda page: _show_checks(page, checks))
    return 0 if all(found and all(one.inside for one in found) for found in checks.values()) else 1


@command("list", group=experiment)
def list_(options: RunFolderOptions, output: Output) -> None:
    """List experiment FILEs, or without FILEs the runs, with their cells and how many are finished.

    # what these files stand for
    fedsolve experiment list experiments/*/*.toml
    # what has been run
    fedsolve experiment list
    """
    files, runs = options.files, options.runs
    entries = [_entry(one, Path(runs) / one.name) for one in _read(files)]
    if not files:
        folders = sorted(path.parent for path in Path(runs).glob(f"*/{TEXT}"))
        entries = [_entry(load_run(folder).experiment, folder) for folder in folders]

    def show(page: Console) -> None:
        if not entries:
            page.print(f"No runs in {runs} yet. 'fedsolve experiment run FILE' makes one.")
            return
        columns = ("experiment", "title", "datasets", "cells", "finished")
        lines = [[str(entry[name]) for name in columns] for entry in entries]
        page.print(table(columns, lines, left=(0, 1, 2)))

    output.result({"experiments": entries}, show)


@command("table", group=experiment)
def table_(options: TablesOptions, output: Output) -> None:
    """Print the tables of RUNs: mean and standard error over seeds, the papers' numbers beside ours.

    With a baseline in the experiment file, accuracies that differ from it by a paired test are marked.

    # the tables of one run
    fedsolve experiment table runs/deepafl-table-03
    # all of them for a paper
    fedsolve experiment table runs/* --format latex --out tables.tex
    """
    out = options.out
    check_target(out, *options.runs)
    tables = []
    for folder in options.runs:
        if not (made := tables_of(load_run(folder))):
            output.note(f"{folder} has no finished cells yet.")
        tables += made
    text = "\n".join(each.to_latex() if options.style == "latex" else each.to_markdown() for each in tables)
    if out is not None:
        write_text(out, text)
    document = {"tables": [each.as_dict() for each in tables], "out": out}
    in_file = f"{len(tables)} tables in {out}"
    output.result(document, (lambda page: click.echo(text, nl=False)) if out is None else in_file)


def _read(files: Sequence[str]) -> list[Experiment]:
    """The experiments of these files; two of the same name would share a folder."""
    paths: list[Path] = []
    for word in files:
        paths += [Path(word)] if Path(word).is_file() else shipped(word) or [Path(word)]
    found = [read_experiment(path) for path in paths]
    names: dict[str, Path] = {}
    for one, path in zip(found, paths, strict=True):
        if one.name in names:
            raise DataError(f"{names[one.name]} and {path} are both called '{one.name}'; rename one of them.")
        names[one.name] = path
    return found


def _entry(one: Experiment, folder: Path) -> dict[str, Any]:
    total = len(one.cells())
    finished = 0
    if (folder / TEXT).is_file():
        kept = load_run(folder)
        if kept.backbone is not None and len(one.backbones) == 1:
            one = one.with_backbone(kept.backbone)
        ids = {record["cell"] for record in kept.cells}
        finished = sum(cell.id in ids for cell in one.cells())
    return {
        "experiment": one.name,
        "title": one.title,
        "datasets": ", ".join(dict.fromkeys(dataset.name for dataset in one.datasets)),
        "cells": total,
        "finished": finished,
    }


@contextmanager
def _bar(output: Output, title: str, page: StatusPage | None) -> Iterator[Callable[[CellProgress], None]]:
    with output.bar(title, "cell") as advance:

        def tell(progress: CellProgress) -> None:
            if page is not None:
                where = progress.done, progress.total, progress.cell, progress.remark
                page.cells(*where, progress.seconds_left)
            left = "" if progress.seconds_left is None else f"{duration(progress.seconds_left)} left; "
            remark = f", {progress.remark}" if progress.remark else ""
            advance(progress.done, progress.total, f"{left}{progress.cell}{remark}")

        yield tell


def _tell_left_out(output: Output, summaries: Sequence[Summary]) -> None:
    """Warn about methods that lack a package. An error if nothing at all could run."""
    counts = sum((Counter(summary.left_out) for summary in summaries), Counter[str]())
    if not counts:
        return
    methods = ", ".join(sorted(counts))
    told = f"{counts.total()} cells were left out, since torch is not installed here: those of {methods}."
    remedy = f"pip install '{EXTRA}' and run the same command: it runs what is missing."
    if not any(summary.ran + summary.found for summary in summaries):
        raise DataError(f"nothing was run. {told} {remedy}")
    output.warn(f"{told} {remedy}")


def _show_checks(page: Console, checks: Mapping[str, Sequence[Check]]) -> None:
    """Every comparison in a line, and what they come to."""
    for name, found in checks.items():
        lines = []
        for one in found:
            number = METRICS[one.metric].number
            verdict = (
                "inside" if one.inside else "outside by " + number(one.excess) if one.seeds else "no model"
            )
            place = f"{one.row}; {one.column}"
            lines.append([place, number(one.ours), number(one.paper), number(one.allowed), verdict])
        if lines:
            page.print(table((name, "ours", "paper", "may differ by", ""), lines, left=(0, 4)))
            inside = sum(one.inside for one in found)
            page.print(
                f"{name}: {inside} of {len(found)} inside. Intervals are of 95 %: of right cells that vary "
                "with the seed, one in twenty lies outside by chance.",
                soft_wrap=True,
            )
        else:
            page.print(f"{name}: the paper has no number for any cell that ran.", soft_wrap=True)


class ReportOptions(RunsOptions):
    out: str = option("report.html", "The HTML file to write.", "FILE")
    heading: str | None = option(None, "Heading of the page.", "TEXT", flag="--title", none="by its contents")


class FigureOptions(RunsOptions):
    out: str = option("figures", "Folder for the files.", "DIR")
    form: Literal["png", "svg", "pdf"] = option("png", "Kind of files.", flag="--format")


@command()
def report(options: ReportOptions, output: Output) -> None:
    """Show RUNs as one HTML page: findings, sortable tables, figures, configuration, provenance.

    The page is a single file that needs no network; it follows the reader's choice of light or dark and
    prints well. A RUN is a folder that 'fedsolve experiment run' made, or a folder of such folders.

    # all runs on one page
    fedsolve report runs/* --out report.html
    # one run under a title of its own
    fedsolve report runs/deepafl-table-03 --title "Ridge, again"
    """
    # Drawing is loaded by the commands that draw: it takes a second.
    from fedsolve.experiments.report_page import write_report

    out = options.out
    check_target(out, *options.runs)
    folders = run_folders(options.runs)
    write_report(folders, Path(out), options.heading)
    size = Path(out).stat().st_size
    told = f"{counted(len(folders), 'run')} in {out} ({size / 1e6:.1f} MB)"
    output.result({"runs": folders, "out": out, "bytes": size}, told)


@command(group=experiment)
def figures(options: FigureOptions, output: Output) -> None:
    """Draw the figures that RUNs can give, readable in black and white, one file each.

    Who owns which class; accuracy against depth, skew, clients, noise, parameters and cost; separability
    and risk per layer. The same cells give the same bytes.

    # the figures of one run
    fedsolve experiment figures runs/deepafl-table-03
    # all of them for a paper
    fedsolve experiment figures runs/* --format pdf --out figures
    """
    from fedsolve.experiments.run_figures import write_figures

    check_target(f"{options.out}/figure")
    written = write_figures(run_folders(options.runs), Path(options.out), options.form)
    told = f"{counted(len(written), 'figure')} in {options.out}"
    output.result({"files": written, "out": options.out}, told)


def run_folders(named: tuple[str, ...]) -> list[Path]:
    """The named run folders, each once; a folder of runs stands for all of them."""
    found: dict[Path, Path] = {}
    for name in named:
        folder = Path(name)
        inside = sorted(path.parent for path in folder.glob(f"*/{TEXT}"))
        for run in [folder] if (folder / TEXT).is_file() or not inside else inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())
