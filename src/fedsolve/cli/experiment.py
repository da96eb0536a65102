"""`fedsolve experiment`: run experiment files, list them, and print their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fedsolve.cli.command import LAST, Choice, Command, ExamplesGroup, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Interrupted, Output, check_target, table, write_text
from fedsolve.cli.report import figures
from fedsolve.cli.track_option import track_option, trackers
from fedsolve.cli.watched import watch_option, watched_page
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import EXTRA
from fedsolve.experiments.config import Experiment
from fedsolve.experiments.reading import read_experiment, shipped
from fedsolve.experiments.rendering import latex, markdown
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import TEXT, load_run
from fedsolve.experiments.runner import CellProgress, Summary, run_experiment
from fedsolve.experiments.sources import StoredRows

if TYPE_CHECKING:
    from fedsolve.watching.loopback import StatusPage

EXAMPLES = (
    (
        "every family of experiments at a small size, offline, then the tables",
        "fedsolve experiment run small\nfedsolve experiment table runs/small-*",
    ),
)


@click.group(cls=ExamplesGroup, examples=EXAMPLES)
def experiment() -> None:
    """Reproduce the papers' tables: run experiment files, resume them, print what came out.

    An experiment file (TOML) names datasets, partitions, methods with parameters and grids, and seeds.
    Every finished cell is one line of RUNS/NAME/cells.jsonl; running a file again runs only what is missing.
    """


experiment.add_command(figures)

_runs = option(
    "--runs", metavar="DIR", default="runs", group="Where things are", help="Folder of all runs, one each."
)


@experiment.command(
    cls=Command,
    examples=(
        ("every family at a small size, offline, from any folder", "fedsolve experiment run small"),
        (
            "a table of the paper at full size, on files of your own",
            "fedsolve experiment run experiments/deepafl/table-03.toml --data-root ~/datasets",
        ),
    ),
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@option(
    "--data-root",
    "root",
    metavar="DIR",
    envvar="FEDSOLVE_DATA",
    group="Where things are",
    help="Folder with the files of named datasets (also FEDSOLVE_DATA).",
)
@option(
    "--store",
    metavar="DIR",
    envvar="FEDSOLVE_STORE",
    group="Where things are",
    help="Feature store (also FEDSOLVE_STORE).  [default: in the user's cache]",
)
@_runs
@option(
    "--dataset", multiple=True, metavar="NAME", group="What runs", help="Only these datasets of the files."
)
@option("--backbone", metavar="ADDRESS", group="What runs", help="Instead of the backbone that a file names.")
@option(
    "--workers", type=click.IntRange(1), group="What runs", help="Clients at a time.  [default: all cores]"
)
@track_option("What runs")
@watch_option("What runs")
@output_options
@click.pass_context
def run(
    ctx: click.Context,
    files: tuple[str, ...],
    root: str | None,
    store: str | None,
    runs: str,
    dataset: tuple[str, ...],
    backbone: str | None,
    workers: int | None,
    track: tuple[str, ...],
    watch: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run the missing cells of experiment FILEs; stop and continue at any time.

    'small' stands for the experiments that are part of fedsolve, 'small/afl-table-1' for one of them. Cells
    that need a package which is not installed are left out, and named. The seed of a cell is that of the
    partition, of the label noise and of the method's projections.
    """
    output = Output(as_json, quiet)
    experiments = _read(files)
    if dataset:
        experiments = [one.only(dataset) for one in experiments]
    tracked = ctx.with_resource(trackers(track))
    source = StoredRows(root, store)
    summaries: list[Summary] = []
    with watched_page(watch, experiments[0].name, output, experiment=True) as page:
        for one in experiments:
            summaries.append(Summary(Path(runs) / one.name, len(one.cells())))
            if page is not None:
                page.entitle(one.name)
            try:
                with _bar(output, one.name, page) as progress:
                    run_experiment(
                        one,
                        runs,
                        source,
                        backbone=backbone,
                        workers=workers,
                        progress=progress,
                        follow=[tracked] if page is None else [tracked, page],
                        summary=summaries[-1],
                    )
            except KeyboardInterrupt as stop:
                raise Interrupted(_stopped(summaries)) from stop
            output.note(_told(summaries[-1]))
        if page is not None:
            page.complete()
    _tell_left_out(output, summaries)
    document = {"runs": [vars(summary) for summary in summaries]}
    output.result(document, lambda page: _show_runs(page, summaries))


@experiment.command(
    name="list",
    cls=Command,
    examples=(
        ("what these files stand for", "fedsolve experiment list experiments/*/*.toml"),
        ("what has been run", "fedsolve experiment list"),
    ),
)
@click.argument("files", nargs=-1, metavar="[FILE...]")
@_runs
@output_options
def list_(files: tuple[str, ...], runs: str, as_json: bool, quiet: bool) -> None:
    """List experiment FILEs, or without FILEs the runs, with their cells and how many are finished."""
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

    Output(as_json, quiet).result({"experiments": entries}, show)


@experiment.command(
    name="table",
    cls=Command,
    examples=(
        ("the tables of one run", "fedsolve experiment table runs/deepafl-table-03"),
        ("all of them for a paper", "fedsolve experiment table runs/* --format latex --out tables.tex"),
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option(
    "--format",
    "style",
    type=Choice(["markdown", "latex"]),
    default="markdown",
    group=LAST,
    help="How tables are written.",
)
@option("--out", metavar="FILE", group=LAST, help="Write to this file instead of stdout.")
@output_options
def table_(runs: tuple[str, ...], style: str, out: str | None, as_json: bool, quiet: bool) -> None:
    """Print the tables of RUNs: mean and standard error over seeds, the papers' numbers beside ours.

    With a baseline in the experiment file, accuracies that differ from it by a chi-squared test are marked.
    """
    output = Output(as_json, quiet)
    check_target(out, *runs)
    found = [(load_run(folder), Path(folder)) for folder in runs]
    tables = []
    for one, folder in found:
        made = tables_of(one)
        if not made:
            output.note(f"{folder} has no finished cells yet.")
        tables += made
    text = "\n".join((latex if style == "latex" else markdown)(each) for each in tables)
    if out is not None:
        write_text(out, text)
    document = {"tables": [each.as_dict() for each in tables], "out": out}

    def show(page: Console) -> None:
        if out is None:
            click.echo(text, nl=False)
        else:
            page.print(f"{len(tables)} tables in {out}")

    output.result(document, show)


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
def _bar(
    output: Output, title: str, page: StatusPage | None = None
) -> Iterator[Callable[[CellProgress], None]]:
    with output.bar(title, "cell") as advance:

        def tell(progress: CellProgress) -> None:
            if page is not None:
                where = progress.done, progress.total, progress.cell, progress.remark
                page.cells(*where, progress.seconds_left)
            left = "" if progress.seconds_left is None else f"{_duration(progress.seconds_left)} left; "
            remark = f", {progress.remark}" if progress.remark else ""
            advance(progress.done, progress.total, f"{left}{progress.cell}{remark}")

        yield tell


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _told(summary: Summary) -> str:
    parts = [f"{summary.ran} cells run in {_duration(summary.seconds)}"]
    if summary.found:
        parts.append(f"{summary.found} were there")
    if summary.damaged:
        parts.append(f"{summary.damaged} unreadable lines set aside")
    return f"{summary.folder}: {', '.join(parts)}."


def _tell_left_out(output: Output, summaries: Sequence[Summary]) -> None:
    """Name the methods that a missing package kept from running; with nothing left, that is an error."""
    counts: dict[str, int] = {}
    for summary in summaries:
        for method, cells in summary.left_out.items():
            counts[method] = counts.get(method, 0) + cells
    if not counts:
        return
    methods = ", ".join(sorted(counts))
    told = (
        f"{sum(counts.values())} cells were left out, since torch is not installed here: those of {methods}."
    )
    remedy = f"pip install '{EXTRA}' and run the same command: it runs what is missing."
    if not any(summary.ran + summary.found for summary in summaries):
        raise DataError(f"nothing was run. {told} {remedy}")
    output.warn(f"{told} {remedy}")


def _stopped(summaries: Sequence[Summary]) -> str:
    last = summaries[-1]
    done = last.found + last.ran
    return (
        f"interrupted; {done} of {last.total} cells of {last.folder} are finished and kept. "
        "Run the same command to go on."
    )


def _show_runs(page: Console, summaries: Sequence[Summary]) -> None:
    folders = " ".join(str(summary.folder) for summary in summaries[:3])
    more = " ..." if len(summaries) > 3 else ""
    page.print(f"Now: fedsolve experiment table {folders}{more}", soft_wrap=True)
