"""What strangers can do to the gate: take a little of its memory, for ten seconds."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fedsolve.network import doorway
from fedsolve.network.doorway import Doorway
from fedsolve.network.gate_link import serving
from fedsolve.network.keyfolder import Keys

from .calls import Caller
from .conftest import SITES
from .processes import free_ports

pytestmark = pytest.mark.network

MEGABYTE = 1 << 20


def test_the_oldest_stranger_goes_and_known_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "PER_ADDRESS", 3)
    port = free_ports(1)[0]
    with Doorway("127.0.0.1", port) as door:
        door.listen()

        def visit() -> tuple[socket.socket, socket.socket]:
            caller = socket.create_connection(("127.0.0.1", port))
            caller.settimeout(2)
            return caller, door.accept()[0]

        strangers = [visit() for _ in range(4)]
        assert strangers[0][0].recv(1) == b""
        assert door.turned_away == {"too many of one address": 1}
        known, inside = strangers.pop()
        door.known(known.getsockname())
        strangers += [visit(), visit()]  # in its place, and one more for it
        assert door.turned_away.total() == 1
        for caller, _ in [*strangers[1:], (known, inside)]:
            caller.settimeout(0.05)
            with pytest.raises(TimeoutError):
                caller.recv(1)
        strangers[1][1].close()  # one that left makes room
        more = visit()
        assert door.turned_away.total() == 1
        inside.close()  # what was allowed for it goes with it
        last = visit()
        assert strangers[2][0].recv(1) == b""
        assert door.turned_away.total() == 2
        for pair in [*strangers, more, last, (known, inside)]:
            for end in pair:
                end.close()


@pytest.mark.slow
def test_crowds_of_strangers_cost_little_and_keep_no_site_out(keys: Keys, tmp_path: Path) -> None:
    """3,000 connections without a handshake took 883 MB, and 150 unfinished headers stayed open for ever."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limit[1]), limit[1]))
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    place = (listen.split(":")[0], int(listen.split(":")[1]))
    sockets: list[socket.socket] = []
    north = Caller(keys, SITES[0])
    try:
        with serving(tmp_path, listen, keys.folder) as link:

            def memory() -> float:
                status = Path(f"/proc/{link.process.pid}/status").read_text()
                return int(status.split("VmHWM:")[1].split()[0]) * 1024 / MEGABYTE

            def passes() -> bool:
                """Whether a site is let in."""
                client = north.client(listen)
                client.hello()
                client.leave()
                client.close()
                return True

            assert passes()
            for _ in range(3000):
                sockets.append(socket.create_connection(place, 30))
            assert passes()
            context = ssl._create_unverified_context()
            slow = []
            for _ in range(300):
                slow.append(context.wrap_socket(socket.create_connection(place, 30)))
                slow[-1].sendall(b"POST /v1/fedsolve/pull HTTP/1.1\r\nx-slow: ")
            sockets += slow
            assert passes()
            assert memory() < 300
            time.sleep(doorway.SECONDS + 2)
            for each in slow:
                each.settimeout(5)
                with suppress(ConnectionError, ssl.SSLError):  # closed all the same
                    assert each.recv(1) == b""
            assert passes()
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
