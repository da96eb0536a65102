"""What a server needs around a run: its gate, and the list of registered sites."""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fedsolve.errors import CohortError, ModelFileError
from fedsolve.network.calls import address
from fedsolve.network.gate_link import GateLink
from fedsolve.network.keyfolder import Keys, private_folder
from fedsolve.network.security import WatchedFile
from fedsolve.watching import log_lines
from fedsolve.watching.log_lines import Style


def site_names(keys: Keys, tell: Callable[[str], None]) -> Callable[[], frozenset[str]]:
    """The names of the registered sites, read again when the list changes."""

    def failed(problem: Exception, names: frozenset[str] | None) -> frozenset[str]:
        # Half written, or replaced at this moment: the gate lets nobody in meanwhile.
        told = f"the list of registered sites {keys.registered.path} cannot be read ({problem})."
        if names is None:
            raise ModelFileError(told) from problem
        tell(f"{told} The last list stays in force.")
        return names

    found = WatchedFile(keys.registered.path, lambda: frozenset(keys.registered.sites()), failed)
    found()
    return found


@contextmanager
def serving(
    state: Path,
    listen: str,
    keys: Path | None,
    tell: Callable[[str], None] | None = None,
    style: Style = "text",
) -> Iterator[GateLink]:
    """A link to the sites that connect to `listen` (HOST:PORT); without keys in plain HTTP.

    tell: shows people at the server what is amiss but does not end the run. style: of the gate's log.
    """
    tell = tell or partial(logging.getLogger("fedsolve").warning, "%s")
    sites = (lambda: None) if keys is None else site_names(Keys(keys), tell)
    mail, log = state / "mail", state / "gate.log"
    address(listen)  # refused, if it is none
    shutil.rmtree(mail, ignore_errors=True)  # what a server left that was killed
    private_folder(mail)
    with begin_log(log, style) as stream:
        process = subprocess.Popen(
            gate_command(listen, mail, keys),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, **log_lines.for_child(style, log)},
        )

    def check() -> None:
        if process.poll() is not None:
            raise CohortError(
                f"the gate, through which sites connect, has ended (exit code {process.returncode}): "
                f"{last_line(log)} (Log: {log}.) Start again with the same state folder to go on."
            )

    try:
        assert process.stdout is not None
        opened = select.select([process.stdout], [], [], 60.0)[0] and process.stdout.readline()
        if not opened:  # its first line says so
            raise CohortError(f"the gate does not open on {listen}: {last_line(log)} (Log: {log})")
        yield GateLink(process, mail, sites, check, tell)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        with suppress(OSError):  # what was not said yet is of no use any more
            process.stdin.close()
        shutil.rmtree(mail, ignore_errors=True)


def gate_command(listen: str, mail: Path, keys: str | os.PathLike[str] | None) -> list[str]:
    """The command line of a gate that ends when the calling process does; its log goes to stderr.

    mail: the folder of messages and answers. The gate is told on its standard input what to do, and says on
          its standard output what happens (`mailbox`).
    """
    held = [] if keys is None else [str(Path(keys).absolute())]
    place = [listen, str(mail.absolute()), str(os.getpid()), *held]
    return [sys.executable, "-m", "fedsolve.network.gate", *place]


_STARTED = "== the process starts"


def begin_log(path: Path, style: Style = "text") -> BinaryIO:
    """The log of a process that is being started, which says so first: what stands before is another's."""
    with closing(log_lines.LogFile(path, style, path.stem)) as log:
        log.emit(logging.makeLogRecord({"name": "fedsolve", "levelname": "INFO", "msg": _STARTED}))
    return open(path, "ab")


def last_line(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = log_lines.message_of(lines[-1].strip()) if lines else _STARTED
    return "its log is empty." if last.endswith(_STARTED) else last
