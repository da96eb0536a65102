"""`fedsolve status`: the state of a run on the terminal, updated while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedsolve.cli.options import Options, command, option
from fedsolve.cli.output import Output, console, fact_grid, table
from fedsolve.cli.watched import STATUS
from fedsolve.errors import CohortError, ModelFileError, explained
from fedsolve.pages.words import harmless
from fedsolve.watching import phrases

_ENDED = ("complete", "stopped")
_LAST = 8
_LARGEST = 1 << 24
_AWAY = 30.0
"""Seconds to wait for a page that does not answer."""


class StatusOptions(Options):
    where: str = option("fedsolve-server", argument=True, metavar="[FOLDER|PORT]")
    once: bool = option(False, "Show the state once and exit.")
    every: float = option(1.0, "Time between two updates.", "SECONDS", least=0.2, most=3600)


@command()
def status(options: StatusOptions, output: Output) -> int:
    """Show the state of a run: sites, exchanges, bytes, risk and accuracy, time left.

    FOLDER is the state folder of a server ('fedsolve server --state') on this machine, PORT that of a page on
    loopback. The exit code is 3 where a run that has not ended shows no sign of life.

    # the server whose state folder is fedsolve-server, until it ends
    fedsolve status
    # once, for a script
    fedsolve status /srv/fedsolve/state --once --json
    # a training started with --watch, by the port of its page
    fedsolve status 9093
    """
    document = _look(options.where)
    following = not (options.once or output.as_json or output.quiet) and sys.stdout.isatty()
    if following:
        document = _follow(options.where, document, options.every)
    output.result(document, lambda page: None if following else page.print(drawn(document)))
    return 3 if phrases.silent(document) is not None else 0


def _follow(where: str, document: dict[str, Any], every: float) -> dict[str, Any]:
    """Show the run until it ends or Ctrl-C; wait a while for a run that was started again."""
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
    """The document in a folder, or on the page at a port."""
    if not where.isdecimal():
        path = Path(where) / STATUS if Path(where).is_dir() else Path(where)
        remedy = "Name the state folder of a server on this machine, or the port of a page."
        with explained(f"{path} has no status of a run", remedy, ModelFileError, (OSError, ValueError)):
            return phrases.read_document(path.read_bytes())
    import http.client

    port = int(where)
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)  # never through a proxy
    what, remedy = f"127.0.0.1:{port} shows no run", f"Is it started with --status {port} or --watch?"
    kinds = (OSError, ValueError, OverflowError, http.client.HTTPException)
    with closing(link), explained(what, remedy, CohortError, kinds):
        link.request("GET", "/status.json")
        answer = link.getresponse()
        data = answer.read(_LARGEST)
        if answer.status != 200:
            raise ValueError(f"it answered {answer.status}")
        return phrases.read_document(data)


def drawn(document: Mapping[str, Any]) -> RenderableType:
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
    done, total = phrases.extent(document)
    if total:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=done, width=40))
        yield bar
    for text in phrases.warnings(document):
        yield Text(harmless(text), style="yellow")
    cells = document["cells"]
    running = cells is not None and phase == "running"
    now = [("now", f"{cells['now']} {cells['remark']}")] if running else []
    yield fact_grid([*phrases.tiles(document), *now])
    if document["sites"]:
        rows = [
            (harmless(site["name"]), "yes" if site["connected"] else "no", harmless(phrases.site_words(site)))
            for site in document["sites"]
        ]
        yield table(("site", "connected", "state"), rows, left=(0, 1, 2))
    if records := document["recent"][-_LAST:]:
        yield table(*phrases.exchanges(records), left=(0, 1))
