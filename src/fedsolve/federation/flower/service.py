"""Everything a server needs around a run: SuperLink, gate, registered sites; started and stopped together."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsolve.errors import CohortError
from fedsolve.federation.flower.link import Node, RuntimeLink
from fedsolve.federation.flower.superlink import SuperLink, Tls

_REGISTER_EVERY = 2.0


class SiteLink(RuntimeLink):
    """The nodes of registered sites, by the names under which their keys are registered.

    The list of sites is read again when it changes: a site that is added comes in, one that is removed
    is not asked any more.
    """

    def __init__(self, grid: Any, superlink: SuperLink, keys: Path) -> None:
        super().__init__(grid)
        from fedsolve.federation.flower.keyfolder import Keys

        self._superlink = superlink
        self._keys = Keys(keys)
        self._sites: dict[int, str] = {}
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
        from fedsolve.federation.flower.security import register_sites

        if self._read is not None and time.monotonic() - self._looked < _REGISTER_EVERY:
            return
        self._looked = time.monotonic()
        changed = self._keys.registered_file.stat().st_mtime_ns
        if changed != self._read:
            control, secret = self._superlink.address, self._superlink.secret
            sites = register_sites(control, self._keys, secret)
            self._sites = {number: name for name, number in sites.items()}
            self._read = changed


@contextmanager
def serving(state: Path, listen: str, keys: Path | None) -> Iterator[RuntimeLink]:
    """A link to the nodes that connect to `listen` (HOST:PORT); without keys in plain HTTP."""
    tls = None
    if keys is not None:
        from fedsolve.federation.flower.keyfolder import Keys

        held = Keys(keys)
        tls = Tls(held.authority, held.server_certificate, held.server_key)
    with SuperLink(state / "superlink", tls=tls) as superlink, superlink.run() as grid:
        link = RuntimeLink(grid) if keys is None else SiteLink(grid, superlink, keys)
        if isinstance(link, SiteLink):
            link.register()  # before the gate opens: the first call of a node is not in vain
        with _gate(state / "gate.log", listen, superlink.address, keys):
            yield link


@contextmanager
def _gate(log: Path, listen: str, upstream: str, keys: Path | None) -> Iterator[None]:
    from fedsolve.federation.flower import gate

    with open(log, "ab") as stream:
        process = subprocess.Popen(
            gate.command(listen, upstream, keys), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
    try:
        _wait(process, listen, keys, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], listen: str, keys: Path | None, log: Path) -> None:
    """Wait until the gate answers."""
    import httpx

    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    # Only whether it is up is asked, over this machine; names are checked by those who come from outside.
    context = ssl._create_unverified_context() if keys is not None else True
    until = time.monotonic() + 60
    with httpx.Client(verify=context, trust_env=False) as client:
        while True:
            with suppress(httpx.TransportError):
                found = client.get(f"{'http' if keys is None else 'https'}://{host}:{port}/healthz")
                if found.status_code == 200 and process.poll() is None:
                    return
            if process.poll() is not None or time.monotonic() > until:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise CohortError(
                    f"the gate does not open on {listen}: {lines[-1] if lines else 'no word from it'}. "
                    f"Is the port taken? (Log: {log})"
                )
            time.sleep(0.1)
