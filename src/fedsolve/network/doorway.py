"""The listening socket of the gate: few strangers, and not for long.

A connection is a stranger's until its TLS handshake has shown a registered site (without keys: until a site
has called on it). Strangers have `SECONDS` for that, and there may be `PER_ADDRESS` of them from one address
and `IN_ALL` together, besides one for each known connection (from that address): where many sites come, many
come at once. One more closes the oldest, not itself: a site that comes while somebody fills the place needs a
moment only.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SECONDS = 10.0
PER_ADDRESS = 48
IN_ALL = 192
"""A stranger in the middle of a TLS handshake costs a quarter of a megabyte."""

_QUEUE = 1024
_COLLECT = 64

Peer = tuple[str, int]


class Doorway(socket.socket):
    """A listening socket that limits strangers; `keep_time` closes those whose time is up.

    turned_away: how many were closed, by reason. refused: is told from where a stranger came who left as one.
    """

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        super().__init__(family, socket.SOCK_STREAM)
        self.turned_away: Counter[str] = Counter()
        self.refused: Callable[[str], object] = lambda host: None
        self._strangers: dict[Peer, tuple[float, _Visitor]] = {}
        self._known: Counter[str] = Counter()
        # Connections of an earlier one that are closing do not count.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind(place)
        except OSError:
            self.close()
            raise
        self.setblocking(False)

    def listen(self, backlog: int = 0) -> None:
        """Let callers queue in the kernel, where they cost nothing, however few are accepted at a time."""
        super().listen(_QUEUE)

    def accept(self) -> tuple[socket.socket, Any]:
        number, place = self._accept()  # type: ignore[attr-defined]
        visitor = _Visitor(self, place[:2], fileno=number)
        visitor.setblocking(False)
        host = visitor.peer[0]
        alike = [peer for peer in self._strangers if peer[0] == host]
        if len(alike) >= PER_ADDRESS + self._known[host]:
            self._turn_away(alike[0], "too many of one address")
        elif len(self._strangers) >= IN_ALL + self._known.total():
            self._turn_away(next(iter(self._strangers)), "too many")
        self._strangers[visitor.peer] = time.monotonic(), visitor
        return visitor, place

    def known(self, peer: Peer) -> None:
        """Somebody has vouched for this connection."""
        if (entry := self._strangers.pop(peer, None)) is not None:
            entry[1].known = True
            self._known[peer[0]] += 1

    def gone(self, visitor: _Visitor) -> None:
        if visitor.known:
            visitor.known = False
            self._known[visitor.peer[0]] -= 1
        elif self._strangers.get(visitor.peer, (0.0, None))[1] is visitor:
            del self._strangers[visitor.peer]
            self.refused(visitor.peer[0])

    async def keep_time(self) -> None:
        """Close strangers whose time is up, for ever."""
        while True:
            await asyncio.sleep(SECONDS / 10)
            late = time.monotonic() - SECONDS
            for peer in [peer for peer, (came, _) in self._strangers.items() if came < late]:
                self._turn_away(peer, "too slow")

    def _turn_away(self, peer: Peer, reason: str) -> None:
        _, visitor = self._strangers.pop(peer)
        self.turned_away[reason] += 1
        with suppress(OSError):
            # Whoever reads from it sees the end, and closes it.
            visitor.shutdown(socket.SHUT_RDWR)
        if self.turned_away.total() % _COLLECT == 0:
            # What asyncio made for a handshake refers to itself, and would wait for the collector.
            gc.collect()


class _Visitor(socket.socket):
    """A connection that tells the door when it is closed."""

    def __init__(self, door: Doorway, peer: Peer, fileno: int) -> None:
        super().__init__(door.family, door.type, door.proto, fileno=fileno)
        self._door = door
        self.peer, self.known = peer, False

    def close(self) -> None:
        self._door.gone(self)
        super().close()
