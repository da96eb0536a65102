"""`fedsolve doctor` on healthy machines, and on each thing that can be wrong."""

from __future__ import annotations

import datetime
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsolve import version
from fedsolve.cli.doctor import look_at_data
from fedsolve.errors import CohortError
from fedsolve.network import certificates, diagnosis, gate_client, security
from fedsolve.network.gate_link import serving
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode
from tests.command import fedsolve

from .conftest import STRANGER, Deployment
from .keyring import keys_for
from .processes import free_ports

pytestmark = pytest.mark.network


def examined(*words: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by what was checked."""
    result = fedsolve("doctor", *words, "--json")
    told = json.loads(result.stdout)
    assert told["healthy"] == (result.exit_code == 0)
    return result.exit_code, {finding["check"]: finding for finding in told["findings"]}


@pytest.fixture
def server(tmp_path: Path) -> Keys:
    """Keys of a server with one registered site."""
    return keys_for(tmp_path / "keys", ["north"], "h.example")


def test_a_healthy_server(server: Keys) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    code, found = examined("--keys", server.folder, "--listen", listen, "--host", "h.example")
    assert code == 0
    assert {finding["state"] for finding in found.values()} == {"ok"}
    assert "north" in found["registered sites"]["seen"]
    page = fedsolve("doctor", "--keys", server.folder, "--listen", listen)
    assert page.exit_code == 0
    assert "0 failed" in page.stdout


def test_a_sites_roster(tmp_path: Path) -> None:
    names = ["north", "east", "south", "west"]
    keys = keys_for(tmp_path / "keys", names, "h.example")

    def found() -> tuple[str, str]:
        _, seen = examined("--keys", keys.folder, "--name", "north")
        return seen["roster"]["state"], seen["roster"]["seen"]

    state, seen = found()
    assert state == "warning"
    assert "0 other site(s); secure sums take 2 at least" in seen
    for name in ("east", "south"):
        keys.roster.add(keys.client_public_key(name))
    assert found()[0] == "ok"
    assert "nobody checks" not in found()[1]
    keys.roster.add(keys.client_public_key("west"))
    assert found()[1].endswith("3 other site(s), east, south, west")
    keys.roster.path.write_text("nonsense\n")
    assert found()[0] == "failed"


def test_what_can_be_wrong_with_a_servers_keys(server: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    def states() -> tuple[int, dict[str, str]]:
        code, found = examined("--keys", server.folder)
        return code, {check: finding["state"] for check, finding in found.items() if finding["state"] != "ok"}

    code, found = examined("--keys", server.folder, "--host", "other.example")
    assert code == 4
    assert "--host other.example --host h.example" in found["hosts"]["remedy"]
    server.server_key.chmod(0o644)
    assert states() == (4, {"file modes": "failed"})
    server.server_key.chmod(0o600)
    certificates.renew_server(server, ["localhost"])
    assert states() == (0, {"hosts": "warning"})
    certificates.renew_server(server, ["h.example"], days=5)
    assert states() == (0, {"server certificate": "warning"})
    later = certificates.load_certificate(server.server_certificate).not_valid_after_utc
    monkeypatch.setattr(certificates, "now", lambda: later.replace(year=later.year + 1))
    assert states() == (4, {"server certificate": "failed"})
    monkeypatch.undo()
    server.registered.remove("north")
    assert states()[1]["registered sites"] == "failed"
    server.server_certificate.unlink()
    assert states() == (4, {"server certificate": "failed"})


@pytest.mark.slow
def test_a_port_that_is_taken(server: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, found = examined("--keys", server.folder, "--listen", f"127.0.0.1:{other.getsockname()[1]}")
    assert code == 3
    assert "another port" in found["port"]["remedy"]
    assert examined("--keys", server.folder, "--listen", "9092")[0] == 2


@pytest.mark.slow
def test_a_healthy_site(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = examined("--keys", deployment.keys.folder, "--server", deployment.gate, "--name", "north")
    told = {check: f["state"] for check, f in found.items() if check not in ("hosts", "roster")}
    assert set(told.values()) == {"ok"}
    assert found["roster"]["state"] == "warning"  # these sites do not know each other
    assert code == 0
    assert "north" in found["registration"]["seen"]
    code, found = examined("--keys", deployment.keys.folder, "--listen", deployment.gate)
    assert found["port"]["state"] == "ok"
    assert "is listening" in found["port"]["seen"]
    monkeypatch.setattr(certificates, "WARN_DAYS", 400)  # as if it had fewer days left than are announced
    code, found = examined("--keys", deployment.keys.folder, "--server", deployment.gate)
    assert code == 0
    assert found["server certificate"]["state"] == "warning"
    assert "fedsolve keys renew" in found["server certificate"]["remedy"]


@pytest.mark.slow
def test_a_site_that_the_server_does_not_know(deployment: Deployment, tmp_path: Path) -> None:
    code, found = examined("--keys", deployment.keys.folder, "--server", deployment.gate, "--name", STRANGER)
    assert code == 3
    assert "does not know the certificate of 'stranger'" in found["registration"]["seen"]
    assert "fedsolve keys register stranger.pub" in found["registration"]["remedy"]
    site = Keys(tmp_path / "site")
    security.create_client(site, "elsewhere")
    code, found = examined("--keys", site.folder, "--server", deployment.gate, "--name", "elsewhere")
    assert code == 4
    assert "ca.crt is missing" in found["authority"]["seen"]
    shutil.copy(deployment.keys.authority, site.authority)
    shutil.copy(deployment.keys.client_key("north"), site.client_key("elsewhere"))
    code, found = examined("--keys", site.folder, "--server", deployment.gate, "--name", "elsewhere")
    assert found["site key"]["state"] == "failed"
    assert found["registration"]["state"] == "warning"


@pytest.mark.slow
def test_a_key_that_was_removed(deployment: Deployment) -> None:
    security.create_client(deployment.keys, "leaver")
    words = ("--keys", deployment.keys.folder, "--server", deployment.gate, "--name", "leaver")
    deployment.keys.registered.add(deployment.keys.client_public_key("leaver"))
    assert examined(*words)[0] == 0
    deployment.keys.registered.remove("leaver")
    code, found = examined(*words)
    assert code == 3
    assert "not registered at the server any more" in found["registration"]["seen"]
    assert "fedsolve keys register leaver.pub" in found["registration"]["remedy"]


@pytest.mark.slow
def test_a_server_that_is_not_who_it_should_be(deployment: Deployment, server: Keys) -> None:
    security.create_client(server, "south")
    code, found = examined("--keys", server.folder, "--server", deployment.gate, "--name", "south")
    assert code == 3
    assert "fingerprint" in found["server TLS"]["remedy"]
    port = deployment.gate.split(":")[1]
    code, found = examined("--keys", deployment.keys.folder, "--server", f"127.0.0.2:{port}")
    assert code == 3
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    code, found = examined("--keys", deployment.keys.folder, "--server", nowhere)
    assert code == 3
    assert "firewall" in found["server port"]["remedy"]
    assert examined("--server", deployment.gate, "--insecure")[0] == 3
    assert examined("--keys", deployment.keys.folder, "--server", "no.such.invalid:1")[0] == 3


@pytest.mark.slow
def test_a_server_whose_certificate_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path / "keys")
    then = certificates.now() - datetime.timedelta(days=10)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "now", lambda: then)
        certificates.create_authority(keys, ["localhost"], days=5)
    security.create_client(keys, "north")
    keys.registered.add(keys.client_public_key("north"))
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    with serving(tmp_path / "state", listen, keys.folder):
        code, found = examined("--keys", keys.folder, "--server", listen, "--name", "north")
    assert found["server certificate"]["state"] == found["server TLS"]["state"] == "failed"
    assert found["server TLS"]["seen"] == "certificate has expired"
    assert "fedsolve keys renew" in found["server TLS"]["remedy"]
    assert code == 4


@pytest.mark.slow
def test_a_wrong_clock_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's clock the certificate is valid, here it has expired: a clock is wrong."""
    keys, days = Keys(tmp_path / "keys"), 600
    then = certificates.now() - datetime.timedelta(days=days)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "now", lambda: then)
        certificates.create_authority(keys, ["localhost"], days=5)
    security.create_client(keys, "north")
    keys.registered.add(keys.client_public_key("north"))
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    slow = tmp_path / "slow" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text(f"import time\nreal = time.time\ntime.time = lambda: real() - {days * 86400}\n")
    monkeypatch.setenv("PYTHONPATH", str(slow.parent))
    with serving(tmp_path / "state", listen, keys.folder):
        line = [sys.executable, "-m", "fedsolve", "doctor", "--json", "--keys", str(keys.folder)]
        monkeypatch.delenv("PYTHONPATH")
        done = subprocess.run(
            [*line, "--server", listen, "--name", "north"], capture_output=True, check=False
        )
        node = SiteNode(None, Connection(listen, keys.authority, keys.client_key("north")))  # type: ignore[arg-type]
        with pytest.raises(CohortError, match=r"the server's 20.*Set the wrong one right"):
            node.serve(once=True)
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["server TLS"]["seen"] == "certificate has expired"
    remedy = found["server TLS"]["remedy"]
    assert f"this machine's clock says {certificates.now():%Y-%m-%d}" in remedy
    assert f"the server's {then:%Y-%m-%d}" in remedy


@pytest.mark.slow
def test_a_site_whose_clock_is_behind_is_told_when_it_connects(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = time.time, list[str]()
    monkeypatch.setattr("fedsolve.network.gate_client.time.time", lambda: real() - 3600)
    held = deployment.keys
    connection = Connection(deployment.gate, held.authority, held.client_key("south"))
    node = SiteNode(None, connection, tell=told.append)  # type: ignore[arg-type]
    thread = threading.Thread(target=node.serve)
    thread.start()
    until = time.monotonic() + 30
    while len(told) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    node.stop()
    thread.join(30)
    assert any(text.startswith("warning: this machine's clock says") for text in told), told
    assert "site south is gone" in (deployment.folder / "gate.log").read_text()  # it said that it leaves


@pytest.mark.slow
def test_a_server_of_another_version_is_named(deployment: Deployment, monkeypatch: Any) -> None:
    monkeypatch.setattr(version, "WIRE", 99)
    code, found = examined("--keys", deployment.keys.folder, "--server", deployment.gate, "--name", "north")
    assert code == 3
    assert found["wire"]["state"] == "failed"
    assert "this site speaks wire '99'" in found["wire"]["seen"]


@pytest.mark.parametrize(
    ("offset", "state"),
    [(0, "ok"), (-30, "ok"), (-90, "warning"), (30, "ok"), (90, "warning")],
)
def test_clocks(offset: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """offset: by how many seconds the server's clock is ahead."""
    about = {"site": "north", "wire": version.WIRE, "versions": {}}
    monkeypatch.setattr(gate_client, "look", lambda *asked: (about, offset))
    (found,) = (one for one in diagnosis._known("", None, None, "north") if one.check == "clock")
    assert found.state == state
    assert ("behind the server's" if offset > 0 else "ahead of the server's") in found.seen
    assert bool(found.remedy) == (state == "warning")


def test_a_proxy_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert diagnosis._proxy("fed.example").state == "ok"
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128")
    finding = diagnosis._proxy("fed.example")
    assert finding.state == "warning"
    assert "proxy.example" in finding.seen
    assert "secret" not in finding.seen + finding.remedy
    monkeypatch.setenv("no_proxy", "fed.example")
    assert diagnosis._proxy("fed.example").state == "ok"
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy.example:1080")  # the client's calls go there too
    assert "ALL_PROXY sends calls to proxy.example" in diagnosis._proxy("fed.example").seen
    checks = [finding.check for finding in diagnosis.connection("127.0.0.1:1", None, None)]
    assert checks == ["proxy", "server port"]  # told where the server cannot be reached straight, too


@pytest.mark.parametrize(("free", "state"), [(1e8, "failed"), (1e9, "warning"), (1e11, "ok")])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert diagnosis.disk(tmp_path / "not" / "yet").state == state


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.state for finding in diagnosis.installed()} == {"ok"}
    assert [finding.check for finding in diagnosis.installed()][:3] == ["fedsolve", "python", "numpy"]
    monkeypatch.setattr(diagnosis, "versions", lambda: {"fedsolve": "1", "httpx": None})
    assert [(found.check, found.state) for found in diagnosis.installed()][1] == ("httpx", "failed")


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(3):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "images" / name / f"{number}.png")
    address = f"folder:{tmp_path / 'images'}"
    assert "2 classes" in look_at_data(address).seen
    for path in (tmp_path / "images" / "dog").iterdir():
        path.write_bytes(b"not an image")
    code, found = examined("--keys", tmp_path, "--data", address, "--backbone", "pixels")
    assert code == 2
    assert found["data"]["state"] == "failed"
    assert found["backbone"]["state"] == "ok"
    assert look_at_data("folder:/no/such/folder").code == 2
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b,diagnosis\n1,2,ill\n3,4,well\n")
    code, found = examined("--keys", tmp_path, "--data", rows, "--label", "diagnosis")
    assert code == 0
    assert "2 rows of 2 features, 2 labels" in found["data"]["seen"]
    assert examined("--keys", tmp_path, "--data", rows, "--label", "outcome")[0] == 2
    assert examined("--keys", tmp_path, "--backbone", "no-such-network")[0] == 2
