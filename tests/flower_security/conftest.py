"""A SuperLink on loopback with the gate in front of it, as `fedsolve server` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsolve.network import gate, security
from fedsolve.network.keyfolder import Keys

from .keyring import keys_for
from .processes import answers, free_ports, program, running

SITES = ("north", "south")
STRANGER = "stranger"


@dataclass(frozen=True)
class Deployment:
    """Addresses and keys of a running server; `nodes` are the registered sites' node ids."""

    keys: Keys
    gate: str
    control: str
    nodes: dict[str, int]
    folder: Path


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """An authority, two registered sites, and a key pair that nobody registered."""
    held = keys_for(tmp_path_factory.mktemp("federation") / "keys", SITES)
    security.create_client(held, STRANGER)
    return held


@pytest.fixture(scope="session")
def deployment(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """SuperLink and gate with TLS and authentication, stopped at the end of the session."""
    folder = tmp_path_factory.mktemp("deployment")
    inner, outer = (f"127.0.0.1:{port}" for port in free_ports(2))
    host, port = inner.split(":")
    superlink = [program("flower-superlink"), "--host", host, "--port", port, "--isolation", "process"]
    superlink += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.server_certificate)]
    superlink += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
    superlink += ["--disable-runtime-dependency-installation"]
    up = answers(f"https://{inner}/health", keys.authority)
    open_ = answers(f"https://{outer}/healthz", keys.authority)
    with (
        running(superlink, folder / "superlink.log", up, home=folder),
        running(gate.command(outer, inner, keys.folder), folder / "gate.log", open_),
    ):
        yield Deployment(keys, outer, inner, security.register_sites(inner, keys), folder)
