"""`fedsolve schema`: what a row is, proposed from one site's table for people to review."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve.cli.command import LAST, Command, option
from fedsolve.cli.features import BACKBONE, data_root_option
from fedsolve.cli.options import READING, output_options, spelling_options
from fedsolve.cli.output import Output, check_target, table
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import is_address, load_dataset
from fedsolve.data.proposal import propose
from fedsolve.data.schema_file import to_toml, write_schema
from fedsolve.data.text_tables import Dialect
from fedsolve.errors import DataError
from fedsolve.schema import Extractor, Schema


@click.command(
    name="schema",
    cls=Command,
    examples=(
        (
            "propose a schema, review it, train with it",
            "fedsolve schema patients.csv --label diagnosis --client-column hospital --out schema.toml\n"
            "fedsolve train patients.csv --schema schema.toml --out model.safetensors",
        ),
        (
            "which backbone turns images into features, for all sites",
            "fedsolve schema folder:./images --backbone efficientnet-lite0 --out schema.toml",
        ),
    ),
)
@click.argument("file", metavar="DATA")
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
@spelling_options
@option(
    "--backbone",
    metavar="B",
    group=READING,
    help=f"Images: what turns them into features.  [default: {BACKBONE}]",
)
@data_root_option
@output_options
def schema(
    file: str,
    out: str | None,
    label: str | None,
    client: str | None,
    weight: str | None,
    backbone: str | None,
    root: str | None,
    as_json: bool,
    quiet: bool,
    **dialect: Any,
) -> None:
    """Propose what the columns of DATA are: numbers, categories, dates, text, or nothing to learn from.

    DATA is a csv (also .csv.gz, or - for standard input) or parquet file of one site. What looks like an
    identifier, never changes, gives the label away or has too many values is proposed as unused, with the
    reason. Of a dataset of images, such as folder:PATH, the schema names the backbone, its preprocessing and
    a digest of its weights. Review the schema and give it to all sites; it becomes part of the model.
    """
    output = Output(as_json, quiet)
    check_target(out, file, root=root)
    if is_address(file):
        proposed = _of_images(file, backbone or BACKBONE, root)
    elif backbone is not None:
        raise DataError(f"{file}: --backbone is for images, such as folder:PATH.")
    else:
        proposed = propose(file, label, client, Dialect(**dialect), weight=weight)
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


def _of_images(address: str, backbone: str, root: str | None) -> Schema:
    """What the images of a dataset become by this backbone, and their classes."""
    dataset = load_dataset(address, root)
    images = dataset.train.inputs
    if isinstance(images, np.ndarray):
        raise DataError(f"'{address}' holds no images; a schema is of images or of a csv or parquet file.")
    network = load_backbone(backbone)
    width = network.extract(images.read(slice(0, 1))).shape[1]
    extractor = Extractor.of(backbone, network.identity, width)
    return Schema(classes=tuple(dataset.classes.tolist()), extractor=extractor)


def _show(page: Console, proposed: Schema) -> None:
    if proposed.extractor is not None:
        size = f"{proposed.width:,} features, {len(proposed.classes)} classes"
        page.print(f"images through {proposed.extractor.name}: {size}", markup=False)
        return
    rows: list[tuple[Any, ...]] = [(column.name, column.kind, column.remark) for column in proposed.columns]
    if proposed.label is not None:
        classes = f"{len(proposed.classes)} classes" if proposed.classes else "measurements"
        rows.append((proposed.label, "label", classes))
    if proposed.client is not None:
        rows.append((proposed.client, "client", ""))
    if proposed.weight is not None:
        rows.append((proposed.weight, "weight", ""))
    page.print(table(("column", "kind", "remark"), rows, left=(0, 1, 2)))
