"""`fedsolve datasets`: what can be loaded by name or address, and where to get the files."""

from __future__ import annotations

import click
from rich.console import Console

from fedsolve.cli.command import Command
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, facts
from fedsolve.data.datasets import datasets as known_datasets


@click.command(
    cls=Command,
    examples=(
        ("what there is, and where to get the files", "fedsolve datasets"),
        ("the same for a program", "fedsolve datasets --json"),
    ),
)
@output_options
def datasets(as_json: bool, quiet: bool) -> None:
    """List the datasets: address, contents, expected files, where to get them.

    An address names a dataset wherever a command takes one: 'digits', 'cifar10', 'folder:./images'. Files
    are looked for in the folder of --data-root, or of the variable FEDSOLVE_DATA; only hf: downloads
    anything. Options follow a question mark: 'folder:./images?test=0.3&seed=1'.
    """
    known = known_datasets()

    def show(page: Console) -> None:
        for dataset in known:
            page.print(f"[bold]{dataset.name}[/bold]")
            lines = (("  what", dataset.title), ("  files", dataset.files), ("  from", dataset.source))
            facts(page, lines)
            page.print()

    told = [
        {name: getattr(dataset, name) for name in ("name", "title", "files", "source")} for dataset in known
    ]
    Output(as_json, quiet).result({"datasets": told}, show)
