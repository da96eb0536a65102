"""`fedsolve methods`: what each method needs and what leaves a client."""

from __future__ import annotations

import click
from rich.console import Console

from fedsolve import registry
from fedsolve.cli.command import Command
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, facts


@click.command(
    cls=Command,
    examples=(
        ("the methods, their papers and their traffic", "fedsolve methods"),
        ("the same for a program", "fedsolve methods --json"),
    ),
)
@output_options
def methods(as_json: bool, quiet: bool) -> None:
    """List the methods: paper, exchanges, what travels up and down, sums or gathers.

    "Sums" means the server needs only the total of all clients' answers, so secure aggregation applies;
    "gathers" means it needs each client's answer by itself.
    """
    known = registry.methods()

    def show(page: Console) -> None:
        for info in known:
            page.print(f"[bold]{info.key}[/bold]  {info.title}")
            facts(
                page,
                [
                    ("  paper", info.paper),
                    ("  exchanges", info.exchanges),
                    ("  a client sends", info.up),
                    ("  a client is sent", info.down),
                    ("  the server sees", "every answer (gathers)" if info.gathers else "only sums"),
                ],
            )
            page.print()
        page.print("T layers, d features per layer, C classes.", style="dim")

    Output(as_json, quiet).result({"methods": [info.as_dict() for info in known]}, show)
