"""README's federation over a network, on three sites that are folders here; only host and port are others."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import fedsolve as fs
from tests.docs.test_readme import README, blocks, make_tables

from .processes import QUIET, free_ports
from .tutorial import READY, ROOT, SITES, Machine

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_the_network_of_readme_works_as_written(tmp_path: Path) -> None:
    _first, text = blocks(README, "sh")
    port = str(free_ports(1)[0])
    lines = re.findall(r"^(fedsolve .*?) +# (server|each site)", text, flags=re.MULTILINE)
    assert [where for _, where in lines] == ["server", "each site"] * 3
    assert len(lines) == len(text.splitlines())
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        **QUIET,
    }
    with ExitStack() as stack:
        machines = {name: Machine(name, tmp_path / name, environment) for name in ("server", *SITES)}
        for machine in machines.values():
            stack.callback(machine.close)
        for line, where in lines:
            here = line.replace("fed.example.org", "localhost").replace("9092", port)
            if line.startswith("fedsolve server"):
                machines["server"].begin(f"{here} --listen 127.0.0.1:{port}")
                machines["server"].wait(lambda: READY in machines["server"].said())
                continue
            if where == "server":
                machines["server"].begin(here)
                machines["server"].finish()
                continue
            for site in SITES:
                if "--data" in line:
                    numbers_alone(machines[site].folder, site)
                machines[site].begin(re.sub(r"(client|--name) north\b", rf"\1 {site}", here))
            for site in SITES:
                machines[site].finish()
            if line.startswith("fedsolve keys client"):
                carry(machines)
        machines["server"].finish()
    model = fs.load_model(tmp_path / "server" / "model.safetensors")
    assert list(model.classes) == ["no", "yes"]
    assert "SECURE SUMS" in machines["north"].said()


def numbers_alone(folder: Path, site: str) -> None:
    """The site's patients, without the column that says whose they are."""
    make_tables(folder)
    head, *rows = (line.split(",") for line in (folder / "patients.csv").read_text().splitlines())
    mine = [head, *(row for row in rows if row[0] == site)]
    (folder / "patients.csv").write_text("".join(",".join(row[1:]) + "\n" for row in mine))


def carry(machines: dict[str, Machine]) -> None:
    """The authority's certificate to the sites, everybody's public keys to everybody."""
    server = machines["server"].folder
    for site in SITES:
        shutil.copy(server / "keys" / "ca.crt", machines[site].folder / "keys")
        for machine in machines.values():
            shutil.copy(machines[site].folder / "keys" / "clients" / f"{site}.pub", machine.folder)
