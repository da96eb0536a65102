"""`fedsolve doctor`: what would keep this machine from taking part, before it does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsolve.cli.command import Command, option
from fedsolve.cli.features import data_root_option, store_option
from fedsolve.cli.keys import keys_option
from fedsolve.cli.options import data_options, layout_from, output_options
from fedsolve.cli.output import Output
from fedsolve.cli.site_table import read_site, schema_option
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import is_address, load_dataset
from fedsolve.data.feature_store import FeatureStore
from fedsolve.data.image_rows import known_backbone
from fedsolve.data.schema_file import read_schema
from fedsolve.data.tables import ColumnLayout, parts, read_table
from fedsolve.network import diagnosis
from fedsolve.network.diagnosis import Finding
from fedsolve.network.keyfolder import Keys

_ROLE = "What this machine is"
_SIGNS = {
    "ok": "[green]ok[/green]",
    "warning": "[yellow]warning[/yellow]",
    "failed": "[red]failed[/red]",
}


@click.command(
    cls=Command,
    examples=(
        (
            "at a site: keys, the way to the server, clocks, versions, disk, data",
            "fedsolve doctor --server fedsolve.hospital.example:9092 --name north --data folder:./images",
        ),
        (
            "at the server: keys, the port, disk",
            "fedsolve doctor --listen 0.0.0.0:9092 --host fedsolve.hospital.example",
        ),
    ),
)
@option("--server", metavar="HOST:PORT", group=_ROLE, help="A site: where its server is.")
@option("--name", metavar="NAME", group=_ROLE, help="A site: its name, which is its key's.")
@option("--listen", metavar="HOST:PORT", group=_ROLE, help="The server: where it listens.")
@option(
    "--host",
    "hosts",
    multiple=True,
    show_default=False,
    metavar="HOST",
    group=_ROLE,
    help="The server: a name that sites use for it. May be repeated.",
)
@option("--insecure", is_flag=True, group=_ROLE, help="A federation without TLS and keys.")
@option("--data", metavar="DATA", group="The data", help="File or address to be read, as for 'client'.")
@schema_option("The data", "What a row of the data must be; all that does not fit is listed.")
@option("--backbone", metavar="B", group="The data", help="Backbone to be loaded.")
@data_root_option
@data_options
@store_option
@option("--state", metavar="DIR", group="The store", help="The server: its folder of state.")
@keys_option
@output_options
def doctor(
    server: str | None,
    name: str | None,
    listen: str | None,
    hosts: tuple[str, ...],
    insecure: bool,
    data: str | None,
    schema: str | None,
    backbone: str | None,
    root: str | None,
    store: str | None,
    state: str | None,
    folder: str,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> int:
    """Check ports, certificates, versions, clock, disk and data; say what to do about what is not well.

    Changes nothing. The exit code is 0 when nothing failed (warnings are allowed), otherwise that of the
    first failure: 2 usage and data, 3 network, 4 files.
    """
    keys = None if insecure else Keys(folder)
    findings = list(diagnosis.installed())
    usable = diagnosis.has_flower()
    if usable and keys is not None:
        if listen is not None or keys.authority_key.exists():
            findings += diagnosis.server_keys(keys, hosts)
        if name is not None:
            findings += diagnosis.client_keys(keys, name)
    if listen is not None:
        findings.append(diagnosis.port(listen, keys))
    if usable and server is not None:
        if keys is not None and name is None:
            findings.append(diagnosis.authority(keys))
        if keys is None or keys.authority.exists():
            findings += diagnosis.connection(server, keys, name)
    findings.append(diagnosis.disk(Path(state) if state else Path(FeatureStore(store).folder)))
    if data is not None:
        findings.append(look_at_data(data, root, layout_from(reading), schema))
    elif schema is not None:
        findings.append(diagnosis.attempt("schema", lambda: _schema_read(schema)))
    if backbone is not None:
        findings.append(look_at_backbone(backbone))
    _tell(findings, Output(as_json, quiet))
    return next((finding.code for finding in findings if finding.state == "failed"), 0)


def look_at_data(
    source: str, root: str | None = None, layout: ColumnLayout | None = None, schema: str | None = None
) -> Finding:
    """Whether a file or dataset can be read: rows, classes, and an image of each class if it has images.

    schema: file that says what a row of a table must be.
    """

    def look() -> str:
        known = None if schema is None else read_schema(schema)
        if known is not None and known.extractor is not None:
            known_backbone(known.extractor)
        elif known is not None:
            described = read_site(source, known, layout or ColumnLayout())
            return f"{source}: {len(described):,} rows, as {schema} describes them"
        if not is_address(source):
            table = read_table(source, layout, part="train" if parts(source) else None)
            classes = len(np.unique(table.labels)) if table.labels is not None else 0
            return f"{source}: {len(table):,} rows of {table.features.shape[1]:,} features, {classes} labels"
        dataset = load_dataset(source, root)
        rows = dataset.train
        if not isinstance(rows.inputs, np.ndarray):
            rows.inputs.read(np.unique(rows.labels, return_index=True)[1])
        kind = "images" if dataset.is_images else "rows of features"
        return f"{source}: {len(rows):,} {kind} to train on, {len(dataset.class_names)} classes"

    return diagnosis.attempt("data", look)


def _schema_read(path: str) -> str:
    schema = read_schema(path)
    if schema.extractor is not None:
        known_backbone(schema.extractor)
        return f"{path}: images through {schema.extractor.name} become {schema.width} features"
    return f"{path}: {len(schema.used)} columns become {schema.width} features"


def look_at_backbone(address: str) -> Finding:
    """Whether the backbone can be loaded here."""

    def look() -> str:
        load_backbone(address)
        return f"{address} can be loaded"

    return diagnosis.attempt("backbone", look)


def _tell(findings: list[Finding], output: Output) -> None:
    count = {word: sum(finding.state == word for finding in findings) for word in _SIGNS}
    document = {
        "healthy": count["failed"] == 0,
        "counts": count,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }

    def show(page: Console) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for finding in findings:
            grid.add_row(_SIGNS[finding.state], finding.check, escape(finding.seen))
            if finding.remedy:
                grid.add_row("", "", f"[bold]→ {escape(finding.remedy)}[/bold]")
        page.print(grid)
        page.print(f"\n{count['ok']} ok, {count['warning']} warnings, {count['failed']} failed.")

    output.result(document, show)
    if output.quiet and not output.as_json:
        for finding in findings:
            if finding.state != "ok":
                click.echo(
                    f"{finding.state}: {finding.check}: {finding.seen} {finding.remedy}".rstrip(), err=True
                )
