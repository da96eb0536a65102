"""The control interface behind the gate asks for a secret: other accounts of the machine do not have it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsolve.errors import CohortError
from fedsolve.network import guarded, security
from fedsolve.network.keyfolder import Keys

from .calls import Caller
from .conftest import SITES
from .processes import answers, free_ports, gone, running

pytestmark = [pytest.mark.slow, pytest.mark.flower]

SECRET = b"0123456789abcdef" * 4


def line(folder: Path, keys: Keys, address: str) -> list[str]:
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    host, port = address.split(":")
    words = [sys.executable, "-m", "fedsolve.network.guarded", str(os.getpid()), str(secret)]
    words += ["--host", host, "--port", port, "--isolation", "process", "--enable-supernode-auth"]
    words += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.server_certificate)]
    return [*words, "--ssl-keyfile", str(keys.server_key), "--disable-runtime-dependency-installation"]


@pytest.fixture(scope="module")
def address(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("guarded")
    here = f"127.0.0.1:{free_ports(1)[0]}"
    up = answers(f"https://{here}/health", keys.authority)
    with running(line(folder, keys, here), folder / "superlink.log", up, home=folder):
        yield here


def test_without_the_secret_the_control_interface_is_closed(address: str, keys: Keys) -> None:
    north = Caller(keys, "north")
    pem = security.registered(keys)["north"].pem
    assert north.refusals(address, pem) == [401, 401, 401]
    wrong = north.headers() | {"authorization": f"Bearer {SECRET[:-1].decode()}x"}
    assert north.post(address, "/v1/control/list-nodes", wrong).status_code == 401
    right = north.headers() | {"authorization": f"Bearer {SECRET.decode()}"}
    assert north.post(address, "/v1/control/list-nodes", right).status_code == 200
    with pytest.raises(CohortError, match="401"):
        security.register_sites(address, keys)


def test_with_the_secret_sites_are_registered(address: str, keys: Keys) -> None:
    nodes = security.register_sites(address, keys, SECRET)
    assert set(nodes) == set(SITES)
    assert security.register_sites(address, keys, SECRET) == nodes


def test_a_short_secret_or_a_strange_flower_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    words = [
        sys.executable,
        "-m",
        "fedsolve.network.guarded",
        str(os.getpid()),
        str(tmp_path / "secret"),
    ]
    done = subprocess.run([*words, "--insecure"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "cannot be guarded" in done.stderr
    (tmp_path / "secret").write_bytes(SECRET)
    monkeypatch.setattr(guarded, "_HOOK", "no_such_hook")
    monkeypatch.setattr(sys, "argv", ["guarded", str(os.getpid()), str(tmp_path / "secret"), "--insecure"])
    with pytest.raises(SystemExit, match="cannot be guarded"):
        guarded.main()


def test_it_ends_with_the_process_that_started_it(keys: Keys, tmp_path: Path) -> None:
    here = f"127.0.0.1:{free_ports(1)[0]}"
    words = line(tmp_path, keys, here)
    parent = (
        "import os, subprocess, sys, time\n"
        f"words = {words!r}\n"
        "words[3] = str(os.getpid())\n"
        "subprocess.Popen(words)\n"
        "time.sleep(600)\n"
    )
    alive = answers(f"https://{here}/health", keys.authority)
    with running([sys.executable, "-c", parent], tmp_path / "log", alive, home=tmp_path) as process:
        process.kill()
        process.wait()
        assert gone(alive)
