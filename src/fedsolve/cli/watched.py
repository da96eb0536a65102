"""Following a run while it goes on: on a page, or in a tracker (--tracker)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from fedsolve.cli.options import Options, option, rare
from fedsolve.cli.output import Output
from fedsolve.federation.engine import Follower
from fedsolve.tracking import ADDRESSES, tracker
from fedsolve.watching.board import Board

if TYPE_CHECKING:
    from fedsolve.watching.loopback import StatusPage

STATUS = "status.json"


class WatchOptions(Options):
    watch: bool = option(False, "Show progress on a page of this machine; its address is printed.")


class TrackerOptions(Options):
    tracker: tuple[str, ...] = rare((), f"Write the run to {ADDRESSES}.", "KIND:PLACE")

    def followers(self) -> list[Follower]:
        """The trackers, closed when the command ends; their stores are open and were tried."""
        context = click.get_current_context()
        return [context.with_resource(tracker(place)) for place in self.tracker]


@contextmanager
def watched_run(folder: Path, title: str, sites: int, port: int | None, output: Output) -> Iterator[Board]:
    """A board of a server's run, in a file of its folder, and on a page if a port is given."""
    from fedsolve.watching.loopback import StatusServer

    with Board("server", title, path=folder / STATUS, sites=sites) as board, ExitStack() as shown:
        try:
            if port is not None:
                server = shown.enter_context(StatusServer(board.document, port))
                output.note(f"progress: {server.address}", address=server.address)
            yield board
        except BaseException as problem:
            board.stopped(problem)
            raise


@contextmanager
def watched_page(
    title: str, output: Output, what: Literal["training", "experiment"] = "training"
) -> Iterator[StatusPage]:
    """A page of a run in this process."""
    from fedsolve.watching.loopback import StatusPage

    with StatusPage(title, what=what) as page:
        output.note(f"progress: {page.address}")
        try:
            yield page
        except BaseException as problem:
            page.stopped(problem)
            raise
