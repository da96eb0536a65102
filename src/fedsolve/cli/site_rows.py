"""What a site answers with: its rows as it was told to read them, and a diary of what it sent."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedsolve.cli.inputs import Reader
from fedsolve.cli.options import layout_from
from fedsolve.cli.output import Output, megabytes
from fedsolve.cli.site_table import read_site
from fedsolve.data.image_rows import portable
from fedsolve.data.schema_file import read_schema
from fedsolve.data.table_files import DescribedRows
from fedsolve.data.tables import Part, Table
from fedsolve.federation.participant import ClientData
from fedsolve.schema import Schema

if TYPE_CHECKING:
    from fedsolve.network.answering import Event
    from fedsolve.privacy.secure_client import Sent


def site_rows(given: dict[str, Any], output: Output) -> tuple[ClientData, Schema | None]:
    """The rows that a site takes part with, and the columns of its table where no schema describes them."""
    schema = None if given["schema"] is None else read_schema(given["schema"])
    table: Table | DescribedRows
    parts: tuple[Part, ...] = ()
    reader = Reader(given, output)
    if schema is not None and schema.extractor is None:
        if given["backbone"] is not None:
            raise click.UsageError("this --schema is of tables; leave out one of --schema and --backbone")
        table, columns = read_site(given["data"], schema, layout_from(given)), None
    elif schema is not None:
        table, columns = reader.described(given["data"], schema, owned=False), None
        parts = reader.parts(given["data"])
    else:
        parts = reader.parts(given["data"])
        table = reader.rows(given["data"], "train" if parts else None)
        columns = _shown(table.schema)
    _introduce(output, given["name"], table, "test" in parts)
    return ClientData(table.features, table.labels, weights=table.weights, schema=schema), columns


def _shown(columns: Schema | None) -> Schema | None:
    """What is sent about rows: not where this site keeps the files of a backbone."""
    if columns is None or columns.extractor is None:
        return columns
    named = dataclasses.replace(columns.extractor, address=portable(columns.extractor.address))
    return dataclasses.replace(columns, extractor=named)


def _introduce(output: Output, name: str, table: Table | DescribedRows, held_out: bool) -> None:
    assert table.labels is not None
    classes = len(set(table.labels.tolist()))
    output.note(
        f"'{name}': {len(table):,} rows of {table.features.shape[1]:,} features, {classes} classes"
        + (" (the test part stays out)" if held_out else "")
    )


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Diary:
    """Shows what this site is asked and sends, and keeps it in a file, one line of JSON each."""

    def __init__(self, output: Output, path: Path) -> None:
        self.on_over: Any = None
        self.on_barred: Any = None
        self.barred: str | None = None
        self._output = output
        self._path = path
        self._answers = self._sent = self._received = 0
        self._arrays: set[str] = set()

    def enter(self, event: Event) -> None:
        traffic = ""
        if event.what == "answered":
            self._answers += 1
            self._sent += event.bytes_up
            self._received += event.bytes_down
            self._arrays.update(event.arrays)
            traffic = f": {megabytes(event.bytes_down)} MB down, {megabytes(event.bytes_up)} MB up"
            traffic += f" ({', '.join(event.arrays)})" if event.arrays else ""
        where = "" if event.exchange is None else f"exchange {event.exchange + 1}: "
        clock = "" if self._output.log == "json" else f"{time.strftime('%H:%M:%S')} "
        fields = {name: value for name, value in vars(event).items() if name not in ("text", "about")}
        self._output.note(f"{clock}{where}{event.text}{traffic}", **fields)
        if event.over and self.on_over is not None:
            self.on_over()
        if event.barred:
            self.barred = event.text.removeprefix("DataError: ").removeprefix("refused: ")
            if self.on_barred is not None:
                self.on_barred()
        # Last: on a full disk a site must hear all the same that the run is over.
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **vars(event)}
        with open(self._path, "a", encoding="utf-8", opener=_for_owner) as stream:
            stream.write(json.dumps(line) + "\n")

    def sent(self, sent: Sent) -> None:
        """Enter what a secure sum sends."""
        from fedsolve.network.answering import Event

        request = sent.request
        fields = sent.about.get("layout", {}).get("fields", [])
        self.enter(
            Event(
                "answered",
                f"sent {sent.text}",
                None if request is None else request.exchange,
                None if request is None else request.kind,
                0 if request is None else request.nbytes,
                sent.bytes_up,
                arrays=tuple(field[0] for field in fields) if sent.what == "masked" else (),
                about=dict(sent.about),
            )
        )

    def summary(self) -> dict[str, Any]:
        return {
            "answers": self._answers,
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "sent": sorted(self._arrays),
            "log": str(self._path),
        }
