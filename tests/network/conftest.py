"""A server of this process with TLS and authentication, and sites as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedsolve.network.gate_link import GateLink, serving
from fedsolve.network.keyfolder import Keys
from tests.conftest import Dataset
from tests.network.security.keyring import keys_for
from tests.network.security.processes import free_port, running, stop

from .sites import NAMES, Sites

SLOW_NODE = Path(__file__).with_name("slow_node.py")


@pytest.fixture(scope="session")
def sites(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return Sites.of(digits)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """An authority and four registered sites."""
    return keys_for(tmp_path_factory.mktemp("federation") / "keys", NAMES)


@dataclass
class Nodes:
    """Site processes by name; all of them end with the fixture."""

    sites: Sites
    keys: Keys
    folder: Path
    stack: ExitStack
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    servers: dict[str, str] = field(default_factory=dict)

    def start(self, server: str, *names: str, secure: bool = False) -> None:
        """`fedsolve client` for each of these sites, unless it runs already."""
        for name in names:
            if name in self.processes and self.servers[name] != server:
                self.stop(name)
            if name not in self.processes or self.processes[name].poll() is not None:
                words = ["client", "--server", server, "--keys", str(self.keys.folder), "--name", name]
                words += [] if secure else ["--plain"]
                words += ["--data", str(self._data(name)), "--state", str(self.state(name))]
                self._run(name, server, [sys.executable, "-m", "fedsolve", *words])

    def start_slow(self, server: str, name: str, exchange: int, seconds: float) -> None:
        """A site that takes so many seconds from this exchange on; see `answering`."""
        if name in self.processes:
            self.stop(name)
        self.answering(name).unlink(missing_ok=True)
        words = [name, self._data(name), server, self.keys.folder, self.state(name), exchange, seconds]
        self._run(name, server, [sys.executable, str(SLOW_NODE), *map(str, words)])

    def answering(self, name: str) -> Path:
        """The file that a slow site leaves when it begins to answer."""
        return self.state(name) / "answering"

    def state(self, name: str) -> Path:
        folder = self.folder / f"state-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        stop(self.processes.pop(name))

    def _data(self, name: str) -> Path:
        path = self.folder / f"{name}.npz"
        return path if path.exists() else self.sites.save(name, self.folder)

    def _run(self, name: str, server: str, line: list[str]) -> None:
        self.servers[name] = server
        context = running(line, self.folder / f"{name}.log")
        self.processes[name] = self.stack.enter_context(context)


@pytest.fixture(scope="session")
def nodes(sites: Sites, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(sites, keys, tmp_path_factory.mktemp("nodes"), stack)


@dataclass(frozen=True)
class Service:
    """A server that runs in this process: where sites connect, and the link to them."""

    address: str
    link: GateLink


@pytest.fixture(scope="session")
def service(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    address = f"127.0.0.1:{free_port()}"
    with serving(tmp_path_factory.mktemp("server"), address, keys.folder) as link:
        yield Service(address, link)
