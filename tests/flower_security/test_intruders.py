"""Real nodes with the wrong credentials, at the gate of a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedsolve.network import certificates
from fedsolve.network.keyfolder import Keys

from .conftest import STRANGER, Deployment
from .processes import answers, free_ports, gone, program, running

pytestmark = [pytest.mark.slow, pytest.mark.flower]


def supernode(address: str, *words: str) -> list[str]:
    line = [program("flower-supernode"), "--superlink", address, "--host", "127.0.0.1", "--max-retries", "1"]
    return [*line, "--port", str(free_ports(1)[0]), "--isolation", "process", *words]


def outcome(line: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and log of a node that is expected to give up."""
    log = folder / "supernode.log"
    with running(line, log, home=folder) as process:
        code = process.wait(60)
    return code, log.read_text()


def test_a_registered_node_is_let_in(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    line = supernode(deployment.gate, "--root-certificates", str(keys.authority))
    line += ["--auth-supernode-private-key", str(keys.client_key("south"))]
    log = tmp_path / "supernode.log"
    with running(line, log, lambda: "SuperNode ID" in log.read_text(), home=tmp_path):
        assert str(deployment.nodes["south"]) in log.read_text()


def test_an_unregistered_key_is_refused(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    line = supernode(deployment.gate, "--root-certificates", str(keys.authority))
    code, log = outcome([*line, "--auth-supernode-private-key", str(keys.client_key(STRANGER))], tmp_path)
    assert code != 0
    assert "not registered" in log
    assert "refused 127.0.0.1" in (deployment.folder / "gate.log").read_text()


def test_a_wrong_authority_is_refused(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    """A site that trusts another authority does not talk to this server, registered or not."""
    other = Keys(tmp_path / "keys")
    certificates.create_authority(other, ["localhost"])
    line = supernode(deployment.gate, "--root-certificates", str(other.authority))
    code, log = outcome([*line, "--auth-supernode-private-key", str(keys.client_key("north"))], tmp_path)
    assert code != 0
    assert "certificate verify failed" in log.lower()


def test_no_certificate_is_refused(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    """Neither the public authorities nor plain HTTP lead anywhere."""
    line = supernode(deployment.gate, "--auth-supernode-private-key", str(keys.client_key("north")))
    code, log = outcome(line, tmp_path)
    assert code != 0
    assert "certificate verify failed" in log.lower()
    code, log = outcome(supernode(deployment.gate, "--insecure"), tmp_path)
    assert code != 0
    assert "SuperNode ID" not in log


def test_no_key_is_refused(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    code, log = outcome(supernode(deployment.gate, "--root-certificates", str(keys.authority)), tmp_path)
    assert code != 0
    assert "not for the network" in log


def test_the_gate_ends_with_the_server(keys: Keys, tmp_path: Path) -> None:
    """A server killed with -9 leaves no gate behind."""
    inner, outer = (f"127.0.0.1:{port}" for port in free_ports(2))
    parent = (
        "import subprocess, sys, time\n"
        "from fedsolve.network import gate\n"
        f"subprocess.Popen(gate.command({outer!r}, {inner!r}, {str(keys.folder)!r}))\n"
        "time.sleep(600)\n"
    )
    alive = answers(f"https://{outer}/healthz", keys.authority)
    log = tmp_path / "gate.log"
    with running([sys.executable, "-c", parent], log, alive) as process:
        process.kill()
        process.wait()
        assert gone(alive)
    assert "the gate closes" in log.read_text()


def test_a_gate_without_its_files_says_which(tmp_path: Path) -> None:
    from fedsolve.network import gate

    line = gate.command("127.0.0.1:9", "127.0.0.1:10", tmp_path / "nothing")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ca.crt is missing" in done.stderr
