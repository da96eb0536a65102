"""--track: where a run is written besides, for the tools that people compare runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedsolve.cli.command import F, option
from fedsolve.errors import DataError
from fedsolve.federation.followers import Followers
from fedsolve.tracking import ADDRESSES, tracker

_FORMERLY = ("drift", "accuracy", "none")


def track_option(group: str, more: bool = False) -> Callable[[F], F]:
    """Decorator: --track, which `trackers` takes."""
    return option(
        "--track",
        multiple=True,
        metavar="KIND:PLACE",
        show_default=False,
        more=more,
        group=group,
        help=f"Write the run to {ADDRESSES}. May be repeated.",
    )


def trackers(addresses: Sequence[str]) -> Followers:
    """The trackers of a command line as one follower; their stores are open and were tried."""
    for address in addresses:
        if address in _FORMERLY:
            raise DataError(f"--track {address} is now --measure {address}; --track takes {ADDRESSES}.")
    return Followers(*map(tracker, addresses))
