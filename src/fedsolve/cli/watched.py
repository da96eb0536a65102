"""Runs that can be looked at while they go on: --watch of training and experiments, --status of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedsolve.cli.command import F, option
from fedsolve.cli.output import Output
from fedsolve.watching.board import Board

if TYPE_CHECKING:
    from fedsolve.watching.loopback import StatusPage

STATUS = "status.json"


def watch_option(group: str) -> Callable[[F], F]:
    """Decorator: --watch."""
    return option(
        "--watch",
        is_flag=True,
        group=group,
        help="Show how it goes on a page of this machine; its address is printed.",
    )


def status_option(group: str) -> Callable[[F], F]:
    """Decorator: --status PORT."""
    return option(
        "--status",
        more=True,
        type=click.IntRange(0, 65535),
        metavar="PORT",
        group=group,
        help="Page and metrics of the run, on loopback only; 0: any free port.  [default: none]",
    )


@contextmanager
def watched_run(folder: Path, title: str, sites: int, port: int | None, output: Output) -> Iterator[Board]:
    """A board of a server's run, in a file of its folder, and on a page if a port is given."""
    from fedsolve.watching.loopback import StatusServer

    board = Board("server", title, path=folder / STATUS, sites=sites)
    server = None
    try:
        if port is not None:
            server = StatusServer(board.document, port)
            output.note(f"how it goes: {server.address}", address=server.address)
        yield board
    except BaseException as problem:
        board.stopped(problem)
        raise
    finally:
        if server is not None:
            server.close()
        board.close()


@contextmanager
def watched_page(
    wanted: bool, title: str, output: Output, *, experiment: bool = False
) -> Iterator[StatusPage | None]:
    """A page of a run in this process, if it is wanted."""
    if not wanted:
        yield None
        return
    from fedsolve.watching.loopback import StatusPage

    with StatusPage(title, what="experiment" if experiment else "training") as page:
        output.note(f"how it goes: {page.address}")
        try:
            yield page
        except BaseException as problem:
            page.stopped(problem)
            raise
