"""The commands and files of deploy/, on machines that are folders here; only places and ports are others."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.network import security
from fedsolve.network.keyfolder import Keys

from .keyring import keys_for
from .processes import free_ports, listening, running
from .tutorial import ROOT, SITES

pytestmark = [pytest.mark.slow, pytest.mark.network]

DEPLOY = ROOT / "deploy"


def line_of(unit: str, machine: Path) -> list[str]:
    """What the unit starts, with the folders of this machine, and by this interpreter."""
    text = (DEPLOY / "systemd" / unit).read_text()
    found = re.search(r"^ExecStart=/opt/fedsolve/bin/fedsolve (.*)$", text, flags=re.MULTILINE)
    assert found is not None
    return [sys.executable, "-m", "fedsolve", *moved(found[1], machine).split()]


def moved(text: str, machine: Path) -> str:
    for place in ("/etc", "/var/lib", "/srv"):
        text = text.replace(f"{place}/fedsolve", f"{machine}{place}/fedsolve")
    return text


def settings(name: str, machine: Path, *changes: tuple[str, str]) -> None:
    text = moved((DEPLOY / name).read_text(), machine)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (machine / "etc/fedsolve").mkdir(parents=True, exist_ok=True)
    (machine / "etc/fedsolve" / name).write_text(text)


def test_server_and_sites_run_by_the_units_lines(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    server = tmp_path / "server"
    keys = keys_for(server / "etc/fedsolve/keys", ())
    settings("server.toml", server, ("0.0.0.0:9092", f"127.0.0.1:{port}"))
    rng = np.random.default_rng(0)
    for name in SITES:
        machine = tmp_path / name
        own = Keys(machine / "etc/fedsolve/keys")
        security.create_client(own, name)
        shutil.copy(keys.authority, own.authority)
        keys.registered.add(own.client_public_key(name))
        settings(
            "site.toml",
            machine,
            ("fedsolve.hospital.example:9092", f"localhost:{port}"),
            ('"north"', f'"{name}"'),
        )
        (machine / "srv/fedsolve").mkdir(parents=True)
        with open(machine / "srv/fedsolve/patients.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["age", "pressure", "outcome"])
            for row in rng.normal(size=(60, 2)):
                writer.writerow([*row.tolist(), "yes" if row.sum() > 0 else "no"])
    for name in SITES:
        pages = [str(tmp_path / other / f"etc/fedsolve/keys/clients/{other}.pub") for other in SITES]
        words = ["keys", "roster", *pages, "--keys", str(tmp_path / name / "etc/fedsolve/keys")]
        subprocess.run([sys.executable, "-m", "fedsolve", *words], check=True, capture_output=True)
    with ExitStack() as stack:
        ready = listening(f"localhost:{port}", keys.authority)
        line = line_of("fedsolve-server.service", server)
        home = server / "var/lib/fedsolve"
        process = stack.enter_context(running(line, server / "log", ready, home))
        for name in SITES:
            line = line_of("fedsolve-client.service", tmp_path / name)
            stack.enter_context(
                running(line, tmp_path / name / "log", home=tmp_path / name / "var/lib/fedsolve")
            )
        assert process.wait(120) == 0, (server / "log").read_text()
    assert list(fs.load_model(server / "var/lib/fedsolve/model.safetensors").classes) == ["no", "yes"]
    # Nothing was written besides the state folder, which is what the units allow.
    for name in ("server", *SITES):
        found = {path.relative_to(tmp_path / name).parts[0] for path in (tmp_path / name).iterdir()}
        assert found <= {"etc", "var", "srv", "log"}
        written = {path.name for path in (tmp_path / name / "etc/fedsolve").iterdir()}
        assert written == {"keys", "server.toml" if name == "server" else "site.toml"}
