"""Real sites with the wrong credentials, or of another version, at the gate of a real server."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import fedsolve as fs
from fedsolve.errors import CohortError
from fedsolve.network import certificates
from fedsolve.network.answering import Answerer
from fedsolve.network.gate_link import gate_command
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode
from fedsolve.network.security import site_key

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
        "from fedsolve.network.gate_link import gate_command\n"
        f"line = gate_command({outer!r}, Path({str(tmp_path)!r}), {str(keys.folder)!r})\n"
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
    line = gate_command("127.0.0.1:9", tmp_path, tmp_path / "nothing")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ca.crt is missing" in done.stderr


def test_a_site_signs_nothing_for_a_server_whose_certificate_it_does_not_know(
    keys: Keys, tmp_path: Path
) -> None:
    """In TLS 1.3 the server proves itself first: whoever cannot, never sees the site's certificate."""
    other, seen = Keys(tmp_path / "keys"), list[object]()
    certificates.create_authority(other, ["127.0.0.1"])

    def call(server: Keys) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(server.server_certificate, server.server_key)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        site = site_key(keys.client_key("north")).public_key()
        pem = site.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        context.load_verify_locations(cadata=certificates.anchors([pem]))
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def accept() -> None:
                try:
                    with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                        seen.append(connection.getpeercert(binary_form=True))
                except OSError as problem:
                    seen.append(problem)

            waiting = threading.Thread(target=accept)
            waiting.start()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            refusal(Connection(address, keys.authority, keys.client_key("north")))
            waiting.join(30)

    call(other)
    assert isinstance(seen[0], ssl.SSLError)
    assert "unknown ca" in str(seen[0])
    call(keys)  # with the authority's own certificate it does show who it is
    assert isinstance(seen[1], bytes)
