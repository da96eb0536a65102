"""`fedsolve report` and `fedsolve experiment figures`: runs as a page to read and as figures to print."""

from __future__ import annotations

from pathlib import Path

import click

from fedsolve.cli.command import LAST, Choice, Command, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, check_target
from fedsolve.errors import ModelFileError
from fedsolve.experiments.wording import counted


@click.command(
    cls=Command,
    examples=(
        ("all runs on one page", "fedsolve report runs/* --out report.html"),
        ("one run under a title of its own", 'fedsolve report runs/deepafl-table-03 --title "Ridge, again"'),
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option("--out", metavar="FILE", default="report.html", group=LAST, help="The HTML file to write.")
@option("--title", metavar="TEXT", group=LAST, help="Heading of the page.  [default: by its contents]")
@output_options
def report(runs: tuple[str, ...], out: str, title: str | None, as_json: bool, quiet: bool) -> None:
    """Tell RUNs as one HTML page: findings, sortable tables, figures, configuration, provenance.

    The page is a single file that needs no network; it follows the reader's choice of light or dark and
    prints well. A RUN is a folder that 'fedsolve experiment run' made, or a folder of such folders.
    """
    # Drawing is loaded by the commands that draw: it takes a second.
    from fedsolve.experiments.report import write_report

    check_target(out, *runs)
    folders = run_folders(runs)
    write_report(folders, Path(out), title)
    size = Path(out).stat().st_size
    told = f"{counted(len(folders), 'run')} in {out} ({size / 1e6:.1f} MB)"
    document = {"runs": folders, "out": out, "bytes": size}
    Output(as_json, quiet).result(document, lambda page: page.print(told, markup=False, soft_wrap=True))


@click.command(
    cls=Command,
    examples=(
        ("the figures of one run", "fedsolve experiment figures runs/deepafl-table-03"),
        ("all of them for a paper", "fedsolve experiment figures runs/* --format pdf --out figures"),
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option("--out", metavar="DIR", default="figures", group=LAST, help="Folder for the files.")
@option(
    "--format",
    "form",
    type=Choice(["png", "svg", "pdf"]),
    default="png",
    group=LAST,
    help="Kind of files.",
)
@output_options
def figures(runs: tuple[str, ...], out: str, form: str, as_json: bool, quiet: bool) -> None:
    """Draw the figures that RUNs can give, readable in black and white, one file each.

    Who owns which class; accuracy against depth, skew, clients, noise, parameters and cost; separability
    and risk per layer. The same cells give the same bytes.
    """
    from fedsolve.experiments.figures import write_figures
    from fedsolve.experiments.figures.style import FORMATS

    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ModelFileError(f"cannot write figures to {out}: it is a file. Name a folder.")
    chosen = next(known for known in FORMATS if known == form)
    written = write_figures(run_folders(runs), folder, chosen)
    told = f"{counted(len(written), 'figure')} in {folder}"
    document = {"files": written, "out": out}
    Output(as_json, quiet).result(document, lambda page: page.print(told, markup=False, soft_wrap=True))


def run_folders(given: tuple[str, ...]) -> list[Path]:
    """The folders of runs that are meant, each once; a folder of runs stands for all of them."""
    from fedsolve.experiments.run_folder import TEXT

    found: dict[Path, Path] = {}
    for name in given:
        folder = Path(name)
        inside = sorted(path.parent for path in folder.glob(f"*/{TEXT}"))
        for run in [folder] if (folder / TEXT).is_file() or not inside else inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())
