"""`fedsolve schema`: what a row is, proposed from one site's table for people to review."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve.cli.features import DatasetOptions
from fedsolve.cli.inputs import READING, DialectOptions
from fedsolve.cli.options import LAST, command, option, required
from fedsolve.cli.output import Output, check_target, table
from fedsolve.data.backbones import DEFAULT_BACKBONE, load_backbone
from fedsolve.data.datasets import load_dataset
from fedsolve.data.row_reader import is_address
from fedsolve.data.text_rows import described
from fedsolve.errors import DataError, did_you_mean
from fedsolve.labels import Task
from fedsolve.tables.proposal import propose
from fedsolve.tables.schema import Column, Extractor, Schema, to_toml, write_schema
from fedsolve.tables.table_file import ColumnLayout


class SchemaOptions(DatasetOptions, DialectOptions):
    title = READING
    file: str = required(argument=True, metavar="DATA")
    out: str | None = option(None, "Where to write the schema (.toml).", "FILE", none="stdout", group=LAST)
    label: str | None = option(None, "Label column.", "NAME", none="label, target, class or y")
    labels: str | None = option(
        None, "Columns of several labels a row, each 0 or 1.", "A,B", none="one label"
    )
    client: str | None = option(
        None, "Column that names each row's owner.", "NAME", flag="--client-column", none="none"
    )
    weight: str | None = option(
        None, "Column with the weight of each row.", "NAME", flag="--weight-column", none="none"
    )
    task: Task | None = option(None, "What the labels are.", none="as they look")
    backbone: str | None = option(
        None, "Turns images or text columns into features.", "B", none=f"{DEFAULT_BACKBONE}, of images"
    )
    text_column: tuple[str, ...] = option((), "Text for the backbone.", "NAME", none="what looks like text")


@command()
def schema(options: SchemaOptions, output: Output) -> None:
    """Propose what the columns of DATA are: numbers, categories, dates, text, or nothing to learn from.

    DATA is a csv (also .csv.gz, or - for standard input) or parquet file of one site. What looks like an
    identifier, never changes, gives the label away or has too many values is proposed as unused, with the
    reason. Of a dataset of images, such as folder:PATH, the schema names the backbone, its preprocessing and
    a digest of its weights; so it does for text columns with --backbone. Review the schema and give it to all
    sites; it becomes part of the model.

    # propose a schema, review it, train with it
    fedsolve schema patients.csv --label diagnosis --client-column hospital --out schema.toml
    fedsolve train patients.csv --schema schema.toml --out model.safetensors
    # which backbone turns images, or the texts of a column, into features, for all sites
    fedsolve schema folder:./images --backbone efficientnet-lite0 --out schema.toml
    fedsolve schema patients.csv --text-column note --backbone st:./minilm --out schema.toml
    """
    file, out = options.file, options.out
    check_target(out, file, root=options.root)
    if is_address(file):
        proposed = _of_images(file, options.backbone or DEFAULT_BACKBONE, options.root)
    else:
        names = ColumnLayout(label=options.label, labels=options.labels).label_names
        own: dict[str, Any] = {"weight": options.weight, "task": options.task, "labels": names}
        proposed = propose(file, options.label, options.client, options.dialect(), **own)
        if options.backbone is not None:
            proposed = _with_text(proposed, options.backbone, options.text_column)
        elif options.text_column:
            raise DataError("--text-column is text for a backbone; name one: --backbone st:NAME.")
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


def _with_text(proposed: Schema, address: str, named: tuple[str, ...]) -> Schema:
    """The schema with this backbone for the columns that are named, or for all that look like text."""
    columns = {column.name: column for column in proposed.columns}
    chosen = named or [name for name, column in columns.items() if column.kind == "text"]
    for name in chosen:
        if name not in columns:
            raise DataError(f"--text-column: no column '{name}'.{did_you_mean(name, columns)}")
    if not chosen:
        raise DataError("no column looks like text. Name the one that is: --text-column NAME.")
    backbone = described(address)
    columns |= {name: Column(name, "text", backbone=backbone) for name in chosen}
    return replace(proposed, columns=tuple(columns.values()))


def _show(page: Console, proposed: Schema) -> None:
    if proposed.extractor is not None:
        size = f"{proposed.width:,} features, {len(proposed.classes)} classes"
        page.print(f"images through {proposed.extractor.name}: {size}", markup=False)
        return
    rows: list[tuple[Any, ...]] = [
        (column.name, column.kind, column.remark or (f"by {column.backbone.name}" if column.backbone else ""))
        for column in proposed.columns
    ]
    if proposed.label is not None:
        classes = f"{len(proposed.classes)} classes" if proposed.classes else "numbers: a regression"
        rows.append((proposed.label, "label", classes))
    rows += [(name, "label", "0 or 1") for name in proposed.labels]
    owners = {proposed.client: "client", proposed.weight: "weight"}
    rows += [(name, role, "") for name, role in owners.items() if name is not None]
    page.print(table(("column", "kind", "remark"), rows, left=(0, 1, 2)))
