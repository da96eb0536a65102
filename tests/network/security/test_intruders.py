"""Real sites with the wrong credentials, or of another version, at the gate of a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError
from fedsolve.network import certificates, gate
from fedsolve.network.answering import Answerer
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode

from .conftest import STRANGER, Deployment
from .processes import free_ports, gone, listening, running

pytestmark = [pytest.mark.slow, pytest.mark.network]


def refusal(connection: Connection) -> str:
    """What ends a site with this connection."""
    site = Answerer("north", fs.ClientData(np.zeros((2, 3)), np.array([0, 1])))
    with pytest.raises(CohortError) as problem:
        SiteNode(site, connection).serve(once=True)
    return str(problem.value)


def test_an_unregistered_key_is_refused(deployment: Deployment, keys: Keys) -> None:
    told = refusal(Connection(deployment.gate, keys.authority, keys.client_key(STRANGER)))
    assert "this site's key is not registered" in told
    assert "refused 127.0.0.1" in (deployment.folder / "gate.log").read_text()


def test_a_wrong_authority_is_refused(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    """A site that trusts another authority does not talk to this server, registered or not."""
    other = Keys(tmp_path / "keys")
    certificates.create_authority(other, ["localhost"])
    told = refusal(Connection(deployment.gate, other.authority, keys.client_key("north")))
    assert "does not prove that it is the server" in told


def test_no_certificate_is_refused(deployment: Deployment) -> None:
    assert "cannot be reached" in refusal(Connection(deployment.gate, insecure=True))


def test_the_gate_ends_with_the_server(keys: Keys, tmp_path: Path) -> None:
    """A server killed with -9 leaves no gate behind."""
    outer = f"127.0.0.1:{free_ports(1)[0]}"
    parent = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from fedsolve.network import gate\n"
        f"line = gate.command({outer!r}, Path({str(tmp_path)!r}), {str(keys.folder)!r})\n"
        "subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "time.sleep(600)\n"
    )
    alive = listening(outer, keys.authority)
    log = tmp_path / "gate.log"
    with running([sys.executable, "-c", parent], log, alive) as process:
        process.kill()
        process.wait()
        assert gone(alive)
    assert "the gate closes" in log.read_text()


def test_a_gate_without_its_files_says_which(tmp_path: Path) -> None:
    line = gate.command("127.0.0.1:9", tmp_path, tmp_path / "nothing")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ca.crt is missing" in done.stderr
