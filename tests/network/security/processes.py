"""Real processes for tests: started on 127.0.0.1, waited for, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsolve.network import gate_client

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
PATIENCE = 60.0
"""Seconds before a test gives a process up; nothing is measured by it."""


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_port() -> int:
    return free_ports(1)[0]


def program(name: str) -> str:
    """The path of a command installed beside the interpreter that runs the tests."""
    return str(Path(sys.executable).with_name(name))


@contextmanager
def running(
    line: Sequence[str], log: Path, ready: Callable[[], bool] | None = None, home: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process while the block runs; its whole group is gone afterwards, whatever happened."""
    environment = os.environ | QUIET | ({} if home is None else {"FLWR_HOME": str(home), "HOME": str(home)})
    with open(log, "ab") as out:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        if ready is not None:
            wait_for(ready, process, log)
        yield process
    finally:
        stop(process)


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `ready` says so; fail with the process's log when it ends before."""
    end = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"{process.args} did not become ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def gone(alive: Callable[[], bool]) -> bool:
    """Wait until nothing answers any more; whether that came to pass."""
    end = time.monotonic() + PATIENCE
    while alive() and time.monotonic() < end:
        time.sleep(0.1)
    return not alive()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then kill what is left of the group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def listening(address: str, authority: Path) -> Callable[[], bool]:
    """Whether a server listens there that proves itself by this authority."""
    host, port = address.split(":")

    def look() -> bool:
        with suppress(OSError):
            return gate_client.shown(host, int(port), authority) is not None
        return False

    return look
