"""`fedsolve status`: how a run stands, on the terminal, while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedsolve.cli.command import Command, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, console, harmless, table
from fedsolve.cli.watched import STATUS
from fedsolve.errors import CohortError, ModelFileError
from fedsolve.watching import phrases
from fedsolve.watching.status_document import read_document, silent

_ENDED = ("complete", "stopped")
_LAST = 8
_LARGEST = 1 << 24
_AWAY = 30.0
"""Seconds for which a page that does not answer is waited for."""


@click.command(
    cls=Command,
    examples=(
        ("the server whose state folder is fedsolve-server, until it ends", "fedsolve status"),
        ("once, for a script", "fedsolve status /srv/fedsolve/state --once --json"),
        ("a training started with --watch, by the port of its page", "fedsolve status 9093"),
    ),
)
@click.argument("where", default="fedsolve-server", metavar="[FOLDER|PORT]")
@option("--once", is_flag=True, help="Show it once instead of following it.")
@option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    metavar="SECONDS",
    help="How often to look.",
)
@output_options
def status(where: str, once: bool, every: float, as_json: bool, quiet: bool) -> int:
    """Show how a run stands: who is connected and waited for, exchanges, bytes, risk and accuracy, time left.

    FOLDER is the state folder of a server ('fedsolve server --state') on this machine, PORT that of a page on
    loopback. The exit code is 3 where a run that has not ended shows no sign of life.
    """
    output = Output(as_json, quiet)
    document = _look(where)
    following = not (once or as_json or quiet) and sys.stdout.isatty()
    if following:
        document = _follow(where, document, every)
    output.result(document, lambda page: None if following else page.print(drawn(document)))
    return 3 if silent(document) is not None else 0


def _follow(where: str, document: dict[str, Any], every: float) -> dict[str, Any]:
    """Show it until it ends, or somebody has seen enough; a run that is started again is back soon."""
    answered = time.monotonic()
    try:
        with Live(drawn(document), console=console(), auto_refresh=False) as live:
            while document["phase"] not in _ENDED:
                time.sleep(every)
                try:
                    document = _look(where)
                    answered = time.monotonic()
                except (CohortError, ModelFileError) as problem:
                    if time.monotonic() - answered > _AWAY:
                        raise
                    live.update(Group(drawn(document), Text(str(problem), style="yellow")), refresh=True)
                    continue
                live.update(drawn(document), refresh=True)
    except KeyboardInterrupt:
        pass
    return document


def _look(where: str) -> dict[str, Any]:
    """How the run stands now, from its folder or its page."""
    return _from_page(int(where)) if where.isdecimal() else _from_folder(Path(where))


def _from_folder(folder: Path) -> dict[str, Any]:
    path = folder / STATUS if folder.is_dir() else folder
    try:
        return read_document(path.read_bytes())
    except OSError as problem:
        raise ModelFileError(
            f"{path} tells of no run ({problem.strerror or problem}). Name the state folder of a server on "
            "this machine, or the port of a page."
        ) from problem
    except ValueError as problem:
        raise ModelFileError(f"{path} cannot be read: {problem}.") from problem


def _from_page(port: int) -> dict[str, Any]:
    import http.client

    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)  # never through a proxy
    try:
        link.request("GET", "/status.json")
        answer = link.getresponse()
        data = answer.read(_LARGEST)
        if answer.status != 200:
            raise ValueError(f"it answered {answer.status}")
        return read_document(data)
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as problem:
        raise CohortError(
            f"127.0.0.1:{port} shows no run ({problem}). Is it started with --status {port} or --watch?"
        ) from problem
    finally:
        link.close()


def drawn(document: Mapping[str, Any]) -> RenderableType:
    """How the run stands, for a terminal."""
    return Group(*_parts(document))


def _parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    phase = document["phase"]
    style = {"complete": "green", "stopped": "red"}.get(phase, "cyan")
    first = Text(harmless(document["title"]), style="bold")
    first.append("  ").append(phrases.PHASES[phase], style=style)
    if (headline := phrases.headline(document)) != phrases.PHASES[phase]:
        first.append(f", {headline}")
    if doing := phrases.doing(document):
        first.append(f" ({harmless(doing)})", style="dim")
    yield first
    cells = document["cells"]
    done, total = (
        (document["done"], document["exchanges"]) if cells is None else (cells["done"], cells["total"])
    )
    if total:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=done, width=40))
        yield bar
    for text in phrases.warnings(document):
        yield Text(harmless(text), style="yellow")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in phrases.tiles(document):
        grid.add_row(escape(name), escape(harmless(value)))
    if cells is not None and phase == "running":
        grid.add_row("now", escape(harmless(f"{cells['now']} {cells['remark']}")))
    yield grid
    if document["sites"]:
        rows = [
            (harmless(site["name"]), "yes" if site["connected"] else "no", harmless(phrases.site_words(site)))
            for site in document["sites"]
        ]
        yield table(("site", "connected", "what it is at"), rows, left=(0, 1, 2))
    if records := document["recent"][-_LAST:]:
        names = [name for name in phrases.CURVES if any(name in record["measures"] for record in records)]
        rows = []
        for record in records:
            values = [record["measures"].get(name) for name in names]
            shown = [
                "" if v is None else phrases.measure_words(n, v) for n, v in zip(names, values, strict=True)
            ]
            sizes = [phrases.size(record["bytes_up"]), phrases.size(record["bytes_down"])]
            rows.append(
                (
                    str(record["exchange"]),
                    record["kind"],
                    str(record["step"]),
                    *sizes,
                    f"{record['seconds']:.2f} s",
                    *shown,
                )
            )
        heads = ("exchange", "kind", "step", "up", "down", "time", *map(phrases.spoken, names))
        yield table(heads, rows, left=(0, 1))
