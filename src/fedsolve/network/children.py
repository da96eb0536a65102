"""Processes that a server starts: a port for them, their logs, and whether they still run."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fedsolve import log_lines
from fedsolve.errors import CohortError
from fedsolve.log_lines import Style


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_running(process: subprocess.Popen[bytes] | None, what: str, log: Path) -> None:
    """Raise if a process that the network needs has ended, with the last line of its log."""
    if process is not None and process.poll() is not None:
        raise CohortError(
            f"{what} has ended (exit code {process.returncode}): {last_line(log)} (Log: {log}.) "
            "Start again with the same state folder to go on."
        )


_STARTED = "== the process starts"


def begin_log(path: Path, style: Style = "text") -> BinaryIO:
    """The log of a process that is being started, which says so first: what stands before is another's."""
    with suppress(OSError):
        if path.stat().st_size > log_lines.MOST:
            path.replace(path.with_name(f"{path.name}.1"))
    stream = open(path, "ab")  # noqa: SIM115
    stream.write(f"{log_lines.line(style, path.stem, 'INFO', _STARTED)}\n".encode())
    stream.flush()
    return stream


def last_line(path: Path) -> str:
    """The last line that the newest process wrote to its log."""
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = log_lines.message_of(lines[-1].strip()) if lines else _STARTED
    return "its log is empty." if last.endswith(_STARTED) else last
