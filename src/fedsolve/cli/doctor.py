"""`fedsolve doctor`: check, before a run, whether this machine can take part."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsolve.cli.features import DatasetOptions, StoreOptions
from fedsolve.cli.inputs import READING, TableOptions
from fedsolve.cli.keys import KeyFolderOptions
from fedsolve.cli.options import command, option
from fedsolve.cli.output import Output
from fedsolve.cli.site_side import naming_ways
from fedsolve.data.backbones import known_backbone, load_backbone
from fedsolve.data.datasets import load_dataset
from fedsolve.data.feature_store import FeatureStore
from fedsolve.data.row_reader import dialect_only, is_address, read_site
from fedsolve.network import diagnosis
from fedsolve.network.diagnosis import Finding
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.proposal import alone, propose_for, summary
from fedsolve.tables.schema import read_schema
from fedsolve.tables.table_file import ColumnLayout, parts, read_table

_ROLE = "What this machine is"
_SIGNS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]"}


class DoctorOptions(StoreOptions, DatasetOptions, KeyFolderOptions, TableOptions):
    title = READING
    server: str | None = option(None, "A site: where its server is.", "HOST:PORT", group=_ROLE)
    name: str | None = option(None, "A site: its name, which is its key's.", "NAME", group=_ROLE)
    listen: str | None = option(None, "The server: where it listens.", "HOST:PORT", group=_ROLE)
    hosts: tuple[str, ...] = option((), "The server: a name of it.", "HOST", flag="--host", group=_ROLE)
    insecure: bool = option(False, "A federation without TLS and keys.", group=_ROLE)
    state: str | None = option(None, "The server: its folder of state.", "DIR", group=_ROLE)
    data: str | None = option(None, "File or address to be read, as for 'client'.", "DATA")
    schema: str | None = option(
        None, "What a row of the data must be; all that does not fit is listed.", "FILE"
    )
    propose: bool = option(
        False, "Read the data as a client with --propose does, and say what it would send."
    )
    backbone: str | None = option(None, "Backbone to be loaded.", "B")


@command()
def doctor(options: DoctorOptions, output: Output) -> int:
    """Check ports, certificates, versions, clock, disk and data, and say how to fix what is wrong.

    Changes nothing. The exit code is 0 when nothing failed (warnings are allowed), otherwise that of the
    first failure: 2 usage and data, 3 network, 4 files.

    # at a site: keys, the way to the server, clocks, versions, disk, data
    fedsolve doctor --server fedsolve.hospital.example:9092 --name north --data folder:./images
    # at the server: keys, the port, disk
    fedsolve doctor --listen 0.0.0.0:9092 --host fedsolve.hospital.example
    """
    keys = None if options.insecure else options.key_folder
    findings = list(diagnosis.installed())
    usable = all(finding.state == "ok" for finding in findings)
    if usable and keys is not None:
        if options.listen is not None or keys.authority_key.exists():
            findings += diagnosis.server_keys(keys, options.hosts)
        if options.name is not None:
            findings += [*diagnosis.site_keys(keys, options.name), diagnosis.roster(keys, options.name)]
    if options.listen is not None:
        findings.append(diagnosis.port(options.listen, keys))
    if usable and options.server is not None:
        if keys is not None and options.name is None:
            findings.append(diagnosis.authority(keys))
        if keys is None or keys.authority.exists():
            findings += diagnosis.connection(options.server, keys, options.name)
    findings.append(diagnosis.disk(Path(options.state or FeatureStore(options.store).folder)))
    if options.data is not None:
        how = options.layout(), options.schema, options.propose
        findings.append(look_at_data(options.data, options.root, *how))
    elif (schema := options.schema) is not None:
        findings.append(diagnosis.attempt("schema", partial(_schema_read, schema)))
    if options.backbone is not None:
        findings.append(diagnosis.attempt("backbone", partial(_loaded, options.backbone)))
    _tell(findings, output)
    return next((finding.code for finding in findings if finding.state == "failed"), 0)


def look_at_data(
    source: str,
    root: str | None = None,
    layout: ColumnLayout | None = None,
    schema: str | None = None,
    propose: bool = False,
) -> Finding:
    """Whether a file or dataset can be read: rows, classes, and an image of each class if it has images."""

    def look() -> str:
        known = None if schema is None else read_schema(schema)
        if known is not None and known.extractor is not None:
            known_backbone(known.extractor)
        elif known is not None:
            described = read_site(source, known, dialect_only(layout or ColumnLayout()))
            return f"{source}: {len(described):,} rows, as {schema} describes them"
        if propose:
            from fedsolve.privacy.policy import SitePolicy

            own = layout or ColumnLayout()
            dialect = {one.name: getattr(own, one.name) for one in dataclasses.fields(Dialect)}
            proposal = propose_for([source], own, fewest=SitePolicy().fewest_rows)
            assert proposal is not None
            described = read_site(source, alone(proposal), ColumnLayout(**dialect))
            told = "; ".join(summary(proposal, levels=True))
            return f"{source}: {len(described):,} rows. To be proposed: {told}"
        if not is_address(source):
            with naming_ways(source):
                table = read_table(source, layout=layout, part="train" if parts(source) else None)
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
    for backbone in schema.backbones.values():
        known_backbone(backbone)
    return f"{path}: {len(schema.used)} columns become {schema.width} features"


def _loaded(address: str) -> str:
    load_backbone(address)
    return f"{address} can be loaded"


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
