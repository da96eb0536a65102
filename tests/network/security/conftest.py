"""A gate with its server's end in this process, as `fedsolve server` runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsolve.network import security
from fedsolve.network.gate_link import GateLink, serving
from fedsolve.network.keyfolder import Keys
from fedsolve.network.link import Node

from .keyring import keys_for
from .processes import free_ports

SITES = ("north", "south")
STRANGER = "stranger"


@dataclass(frozen=True)
class Deployment:
    """A running gate: its address, keys and folder, and the server's end of it."""

    keys: Keys
    gate: str
    folder: Path
    link: GateLink

    def node(self, name: str) -> Node:
        """The site of this name, as soon as it is there."""
        end = time.monotonic() + 20
        while True:
            for node in self.link.nodes().values():
                if node.name == name:
                    return node
            assert time.monotonic() < end, f"{name} is not there"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """An authority, two registered sites, and a key pair that nobody registered."""
    held = keys_for(tmp_path_factory.mktemp("federation") / "keys", SITES)
    security.create_client(held, STRANGER)
    return held


@pytest.fixture(scope="session")
def deployment(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gate with TLS and authentication, stopped at the end of the session."""
    folder = tmp_path_factory.mktemp("deployment")
    outer = f"127.0.0.1:{free_ports(1)[0]}"
    with serving(folder, outer, keys.folder) as link:
        yield Deployment(keys, outer, folder, link)
