"""`fedsolve schema`: what a row is, proposed from one site's table for people to review."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from fedsolve.cli.command import LAST, Command, option
from fedsolve.cli.options import READING, output_options
from fedsolve.cli.output import Output, check_target, table
from fedsolve.data.datasets import is_address
from fedsolve.data.proposal import propose
from fedsolve.data.schema_file import to_toml, write_schema
from fedsolve.data.text_tables import Dialect
from fedsolve.errors import DataError
from fedsolve.schema import Schema


@click.command(
    name="schema",
    cls=Command,
    examples=(
        (
            "propose a schema, review it, train with it",
            "fedsolve schema patients.csv --label diagnosis --client-column hospital --out schema.toml\n"
            "fedsolve train patients.csv --schema schema.toml --out model.safetensors",
        ),
    ),
)
@click.argument("file")
@option("--out", metavar="FILE", group=LAST, help="Where to write the schema (.toml).  [default: stdout]")
@option(
    "--label",
    metavar="NAME",
    group=READING,
    help="Label column.  [default: label, target, class or y]",
)
@option(
    "--client-column",
    "client",
    metavar="NAME",
    group=READING,
    help="Column that names each row's owner.  [default: none]",
)
@option(
    "--weight-column",
    "weight",
    metavar="NAME",
    group=READING,
    help="Column that says how much a row counts in training.  [default: none]",
)
@option(
    "--delimiter",
    default="auto",
    metavar="CHAR",
    group=READING,
    help="csv: what separates cells; 'tab', or 'auto' to guess.",
)
@output_options
def schema(
    file: str,
    out: str | None,
    label: str | None,
    client: str | None,
    weight: str | None,
    delimiter: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Propose what the columns of FILE are: numbers, categories, dates, text, or nothing to learn from.

    FILE is a csv (also .csv.gz, or - for standard input) or parquet file of one site. What looks like an
    identifier, never changes, gives the label away or has too many values is proposed as unused, with the
    reason. Review the schema and give it to all sites; it becomes part of the model.
    """
    output = Output(as_json, quiet)
    check_target(out, file)
    if is_address(file):
        raise DataError(f"'{file}' is an address of a dataset; a schema is of a csv or parquet file.")
    proposed = propose(file, label, client, Dialect(delimiter), weight=weight)
    if out is not None:
        write_schema(proposed, out)
    document: dict[str, Any] = {
        "file": file,
        "schema": proposed.to_note(),
        "remarks": {column.name: column.remark for column in proposed.columns if column.remark},
        "out": out,
    }

    def show(page: Console) -> None:
        if out is None:
            click.echo(to_toml(proposed), nl=False)
        else:
            _show(page, proposed)
            page.print(f"{out}: review it, then: fedsolve train {file} --schema {out}", markup=False)

    output.result(document, show)
    if out is None:
        for name, remark in document["remarks"].items():
            output.note(f"'{name}': {remark}")


def _show(page: Console, proposed: Schema) -> None:
    rows: list[tuple[Any, ...]] = [(column.name, column.kind, column.remark) for column in proposed.columns]
    if proposed.label is not None:
        classes = f"{len(proposed.classes)} classes" if proposed.classes else "measurements"
        rows.append((proposed.label, "label", classes))
    if proposed.client is not None:
        rows.append((proposed.client, "client", ""))
    if proposed.weight is not None:
        rows.append((proposed.weight, "weight", ""))
    page.print(table(("column", "kind", "remark"), rows, left=(0, 1, 2)))
