"""`fedsolve server` as it starts by itself: the gate is what the network sees, and nothing is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fedsolve.network import security
from fedsolve.network.keyfolder import Keys

from .calls import Caller, intruding_run
from .processes import answers, free_ports, gone, program, running

pytestmark = [pytest.mark.slow, pytest.mark.flower]


@contextmanager
def serving(keys: Keys, folder: Path) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """A server that waits for sites: the address it listens on, that of its SuperLink, its process."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    state = folder / "state"
    words = [program("fedsolve"), "server", "--listen", listen, "--keys", str(keys.folder)]
    words += ["--plain", "--clients", "2", "--classes", "0,1", "--state", str(state)]
    ready = answers(f"https://{listen}/healthz", keys.authority)
    with running(words, folder / "server.log", ready) as process:
        log = (state / "superlink" / "superlink.log").read_text()
        found = re.search(r"Control HTTP API on (127\.0\.0\.1:\d+)", log)
        assert found is not None
        yield listen, found[1], process


def test_a_site_cannot_operate_the_server(keys: Keys, tmp_path: Path) -> None:
    pem = security.create_client(Keys(tmp_path / "other"), "intruder").pem
    with serving(keys, tmp_path) as (listen, control, _):
        assert listen != control
        assert Caller(keys, "north").refusals(listen, pem) == [404, 404, 404]


def test_loopback_alone_does_not_operate_it_either(keys: Keys, tmp_path: Path) -> None:
    """Other accounts of the server's machine reach the SuperLink, but have not read the secret."""
    with (
        serving(keys, tmp_path) as (_, control, _),
        Caller(keys, "north").control(control) as client,
        pytest.raises(httpx.HTTPStatusError) as problem,
    ):
        client.StartRun(intruding_run())
    assert problem.value.response.status_code == 401


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server_that_ends(keys: Keys, tmp_path: Path, how: signal.Signals) -> None:
    with serving(keys, tmp_path) as (listen, control, process):
        process.send_signal(how)
        assert process.wait(60) != 0
        assert gone(answers(f"https://{listen}/healthz", keys.authority))
        assert gone(answers(f"https://{control}/health", keys.authority))
