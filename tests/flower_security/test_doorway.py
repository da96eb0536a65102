"""What strangers can do to the gate: take a little of its memory, for ten seconds."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fedsolve.network import doorway, gate
from fedsolve.network.admission import MOST_BYTES, Quota, Refusal
from fedsolve.network.doorway import Doorway
from fedsolve.network.keyfolder import Keys

from .calls import Caller
from .conftest import SITES
from .processes import answers, free_ports, running

pytestmark = pytest.mark.flower

MEGABYTE = 1 << 20


def test_the_oldest_stranger_goes_and_known_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "PER_ADDRESS", 3)
    port = free_ports(1)[0]
    with Doorway.at("127.0.0.1", port) as door:
        door.listen()

        def visit() -> tuple[socket.socket, socket.socket]:
            caller = socket.create_connection(("127.0.0.1", port))
            caller.settimeout(2)
            return caller, door.accept()[0]

        known, inside = visit()
        door.known(known.getsockname())
        strangers = [visit() for _ in range(4)]
        assert strangers[0][0].recv(1) == b""
        assert door.turned_away == {"too many of one address": 1}
        for caller, _ in [*strangers[1:], (known, inside)]:
            caller.settimeout(0.05)
            with pytest.raises(TimeoutError):
                caller.recv(1)
        strangers[1][1].close()  # one that left makes room
        more = visit()
        assert door.turned_away.total() == 1
        for pair in [*strangers, more, (known, inside)]:
            for end in pair:
                end.close()


def test_a_site_pushes_what_an_answer_takes_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "quota"
    quota = Quota(path)
    quota.count("north", 1 << 40)  # nothing was asked yet: the size of a call is all that is limited
    Quota.write(path, 1, 100)
    most = 4 * (100 + MOST_BYTES // 8)
    quota.count("north", most)
    quota.count("south", most)
    with pytest.raises(Refusal, match="'north' has pushed more than 4 times what an answer"):
        quota.count("north", 1)
    Quota.write(path, 2, 100)
    quota.count("north", most)


@pytest.mark.slow
def test_crowds_of_strangers_cost_little_and_keep_no_site_out(keys: Keys, tmp_path: Path) -> None:
    """3,000 connections without a handshake took 883 MB, and 150 unfinished headers stayed open for ever."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limit[1]), limit[1]))
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    place = (listen.split(":")[0], int(listen.split(":")[1]))
    line = gate.command(listen, "127.0.0.1:1", keys.folder)
    sockets: list[socket.socket] = []
    north = Caller(keys, SITES[0])
    try:
        with running(
            line, tmp_path / "gate.log", answers(f"https://{listen}/healthz", keys.authority)
        ) as process:

            def memory() -> float:
                status = Path(f"/proc/{process.pid}/status").read_text()
                return int(status.split("VmHWM:")[1].split()[0]) * 1024 / MEGABYTE

            def passes() -> bool:
                """Whether a site gets through to where the SuperLink would be."""
                return north.post(listen, "/v1/fleet/pull-messages", north.headers()).status_code == 503

            assert passes()
            for _ in range(3000):
                sockets.append(socket.create_connection(place, 30))
            assert passes()
            context = ssl._create_unverified_context()
            slow = []
            for _ in range(300):
                slow.append(context.wrap_socket(socket.create_connection(place, 30)))
                slow[-1].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx-slow: ")
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
