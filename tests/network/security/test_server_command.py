"""`fedsolve server` as it starts by itself: the gate is what the network sees, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsolve.network.keyfolder import Keys

from .processes import free_ports, gone, listening, program, running

pytestmark = [pytest.mark.slow, pytest.mark.network]


@contextmanager
def serving(keys: Keys, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that waits for sites: the address it listens on, and its process."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    state = folder / "state"
    words = [program("fedsolve"), "server", "--listen", listen, "--keys", str(keys.folder)]
    words += ["--plain", "--clients", "2", "--classes", "0,1", "--state", str(state)]
    ready = listening(listen, keys.authority)
    with running(words, folder / "server.log", ready) as process:
        yield listen, process


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server_that_ends(keys: Keys, tmp_path: Path, how: signal.Signals) -> None:
    with serving(keys, tmp_path) as (listen, process):
        process.send_signal(how)
        assert process.wait(60) != 0
        assert gone(listening(listen, keys.authority))
