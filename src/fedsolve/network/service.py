"""What a server needs around a run: its gate, and the list of registered sites."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsolve import log_lines
from fedsolve.errors import CohortError, DataError, ModelFileError
from fedsolve.log_lines import Style
from fedsolve.network.children import begin_log, check_running, last_line
from fedsolve.network.gate_link import GateLink
from fedsolve.network.keyfolder import Keys, private_folder

_REGISTER_EVERY = 2.0


class SiteList:
    """The names of the registered sites. The list is read again when it changes.

    A site that is added comes in, one that is removed is not asked any more.
    """

    def __init__(self, keys: Keys, tell: Callable[[str], None] | None = None) -> None:
        self._keys = keys
        self._names: frozenset[str] = frozenset()
        self._tell = tell or _warn
        self._announced = ""
        self._read: float | None = None
        self._looked = 0.0
        self.names()

    def names(self) -> frozenset[str]:
        """The sites that may take part now."""
        from fedsolve.network.security import registered

        if self._read is not None and time.monotonic() - self._looked < _REGISTER_EVERY:
            return self._names
        self._looked = time.monotonic()
        try:
            changed = self._keys.registered_file.stat().st_mtime_ns
            if changed != self._read:
                self._names = frozenset(registered(self._keys))
                self._read = changed
            self._announced = ""
        except (OSError, ModelFileError, DataError) as problem:
            # Half written, or replaced at this moment: the gate lets nobody in meanwhile. At the start
            # there is no earlier list to go on with.
            if self._read is None:
                raise _unreadable(self._keys.registered_file, problem) from problem
            if str(problem) != self._announced:
                self._announced = str(problem)
                self._tell(
                    f"{_unreadable(self._keys.registered_file, problem)} The last list stays in force."
                )
        return self._names


def _unreadable(path: Path, problem: Exception) -> ModelFileError:
    return ModelFileError(f"the list of registered sites {path} cannot be read ({problem}).")


def _warn(text: str) -> None:
    logging.getLogger("fedsolve").warning("%s", text)


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
    sites = None if keys is None else SiteList(Keys(keys), tell)
    mail = state / "mail"
    shutil.rmtree(mail, ignore_errors=True)  # what a server left that was killed
    private_folder(mail)
    log = state / "gate.log"
    try:
        with _gate(log, listen, mail, keys, style) as gate:
            yield GateLink(
                gate,
                mail,
                (lambda: None) if sites is None else sites.names,
                lambda: check_running(gate, "the gate, through which sites connect,", log),
                tell or _warn,
            )
    finally:
        shutil.rmtree(mail, ignore_errors=True)


@contextmanager
def _gate(
    log: Path, listen: str, mail: Path, keys: Path | None, style: Style = "text"
) -> Iterator[subprocess.Popen[bytes]]:
    from fedsolve.network import gate

    check_free(*gate.address(listen))
    with begin_log(log, style) as stream:
        process = subprocess.Popen(
            gate.command(listen, mail, keys),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, **log_lines.for_child(style, log)},
        )
    try:
        _wait(process, listen, keys, log)
        yield process
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


def check_free(host: str, port: int) -> None:
    """Raise if something listens there already: its answers would be taken for those of the gate."""
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the gate binds: connections of an earlier one that are closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as problem:
        raise CohortError(
            f"cannot listen on {host}:{port} ({problem.strerror or problem}). Is another server running? "
            "Stop it, or choose another --listen."
        ) from problem


def _wait(process: subprocess.Popen[bytes], listen: str, keys: Path | None, log: Path) -> None:
    """Wait until the gate answers."""
    import httpx

    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    # Only asks whether it is up, over loopback; those who connect from outside check the names.
    context = ssl._create_unverified_context() if keys is not None else True
    until = time.monotonic() + 60
    with httpx.Client(verify=context, trust_env=False) as client:
        while True:
            with suppress(httpx.TransportError):
                response = client.get(f"{'http' if keys is None else 'https'}://{host}:{port}/healthz")
                if response.status_code == 200 and process.poll() is None:
                    return
            if process.poll() is not None or time.monotonic() > until:
                raise CohortError(
                    f"the gate does not open on {listen}: {last_line(log)} Is the port taken? (Log: {log})"
                )
            time.sleep(0.1)
