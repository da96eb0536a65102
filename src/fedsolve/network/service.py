"""Everything a server needs around a run: SuperLink, gate, registered sites; started and stopped together."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsolve import log_lines
from fedsolve.errors import CohortError, DataError, ModelFileError
from fedsolve.log_lines import Style
from fedsolve.network.link import Node, RuntimeLink
from fedsolve.network.superlink import SuperLink, Tls, begin_log, check_running, last_line

_REGISTER_EVERY = 2.0


class SiteLink(RuntimeLink):
    """The nodes of registered sites, by the names under which their keys are registered.

    The list of sites is read again when it changes: a site that is added comes in, one that is removed
    is not asked any more.
    """

    def __init__(
        self,
        grid: Any,
        superlink: SuperLink,
        keys: Path,
        check: Callable[[], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(grid, check=check)
        from fedsolve.network.keyfolder import Keys

        self._superlink = superlink
        self._keys = Keys(keys)
        self._sites: dict[int, str] = {}
        self._tell = tell or _warn
        self._announced = ""
        self._read: float | None = None
        self._looked = 0.0

    def nodes(self) -> dict[int, Node]:
        self.register()
        return {
            number: Node(number, node.activation, self._sites[number])
            for number, node in super().nodes().items()
            if number in self._sites
        }

    def register(self) -> None:
        """Bring the SuperLink's list of sites up to date."""
        from fedsolve.network.security import register_sites

        if self._read is not None and time.monotonic() - self._looked < _REGISTER_EVERY:
            return
        self._looked = time.monotonic()
        try:
            changed = self._keys.registered_file.stat().st_mtime_ns
            if changed != self._read:
                control, secret = self._superlink.address, self._superlink.secret
                sites = register_sites(control, self._keys, secret)
                self._sites = {number: name for name, number in sites.items()}
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

    def registered(self) -> frozenset[str] | None:
        """The names of the sites that may take part."""
        return frozenset(self._sites.values())


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
) -> Iterator[RuntimeLink]:
    """A link to the nodes that connect to `listen` (HOST:PORT); without keys in plain HTTP.

    tell: shows people at the server what is amiss but does not end the run. style: of the logs.
    """
    tls = None
    if keys is not None:
        from fedsolve.network.keyfolder import Keys

        folder = Keys(keys)
        tls = Tls(folder.authority, folder.server_certificate, folder.server_key)
    with SuperLink(state / "superlink", tls=tls, style=style) as superlink, superlink.run() as grid:
        link = (
            RuntimeLink(grid, check=superlink.check)
            if keys is None
            else SiteLink(grid, superlink, keys, superlink.check, tell)
        )
        if isinstance(link, SiteLink):
            link.register()  # before the gate opens, so that a node's first call succeeds
        link.quota = state / "quota"
        link.quota.unlink(missing_ok=True)
        with _gate(state / "gate.log", listen, superlink.address, keys, link.quota, style) as gate:

            def check() -> None:
                superlink.check()
                check_running(gate, "the gate, through which sites connect,", state / "gate.log")

            link.check = check
            yield link


@contextmanager
def _gate(
    log: Path,
    listen: str,
    upstream: str,
    keys: Path | None,
    quota: Path | None = None,
    style: Style = "text",
) -> Iterator[subprocess.Popen[bytes]]:
    from fedsolve.network import gate

    check_free(*gate.address(listen))
    with begin_log(log, style) as stream:
        process = subprocess.Popen(
            gate.command(listen, upstream, keys, quota=quota),
            stdin=subprocess.DEVNULL,
            stdout=stream,
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
