"""Flower's own commands: `flower-superlink` and stock `flower-supernode`s under `fedsolve server`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.network.security.processes import QUIET, free_ports, program, running

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedsolve.container import locked
from fedsolve.network import flower
from fedsolve.network.keyfolder import Keys
from fedsolve.privacy import SecureFederation

from .sites import CLASSES, NAMES, Sites

pytestmark = pytest.mark.flower

PATIENCE = 300.0


class Grid:
    """Flower's public grid with a site behind it: what is pushed is answered when it is pulled."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.pushed: list[Any] = []

    def get_node_ids(self):
        return [7]

    def push_messages(self, messages):
        self.pushed += messages
        return [str(len(self.pushed) - 1)]

    def pull_messages(self, names):
        found = self.answer(self.pushed[int(names[0])])
        return [] if found is None else [found]


@pytest.fixture(autouse=True)
def _outside(request, monkeypatch):
    """Flower makes messages inside a run only."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(flower, "Message", lambda content, *_, **__: SimpleNamespace(content=content))


def reply(answer, largest=100):
    link = flower.GridLink(Grid(answer))
    (message,) = link.send([7], {"ask": "describe", "text": "\u00c4"}, b"abc", largest)
    return link.receive(message)


def answering(content=None, error=None):
    return lambda message: SimpleNamespace(has_error=lambda: error is not None, error=error, content=content)


def test_what_is_sent_arrives():
    found = reply(lambda message: answering(message.content)(message))
    assert found.note == {"ask": "describe", "text": "\u00c4"}
    assert found.payload.tobytes() == b"abc"
    assert reply(lambda message: None) is None


def test_what_is_no_answer_is_named():
    assert "at most 2 are taken" in reply(answering(flower.record({}, b"abc")), 2).failure
    for content in (RecordDict(), RecordDict({"fedsolve": ConfigRecord({"note": "[1]"})})):
        found = reply(answering(content))
        assert found.damaged
        assert "not written by fedsolve" in found.failure
    codes = {number for name, number in vars(ErrorCode).items() if name.endswith("UNAVAILABLE")}
    for code in range(9):
        found = reply(answering(error=SimpleNamespace(code=code, reason="why")))
        assert found.absent == (code in codes)
        assert found.failure


def node_config(**settings: object) -> str:
    return " ".join(f'{name}="{value}"' for name, value in settings.items())


def listens(place: str) -> bool:
    host, port = place.split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def offers(command: str, option: str) -> bool:
    """Whether this release of a command has an option."""
    told = subprocess.run([program(command), "--help"], capture_output=True, text=True, check=True)
    return f"{option} " in told.stdout


@pytest.fixture
def superlink(keys, tmp_path, monkeypatch):
    """What starts a SuperLink with TLS and node authentication, and where it is; old releases have an address
    for each API."""
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # The commands it starts are looked for on the path.
    monkeypatch.setenv("PATH", f"{Path(program('python')).parent}{os.pathsep}{os.environ['PATH']}")
    ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
    one_port = offers("flower-superlink", "--port")
    places = {"fleet": ports[0], "control": ports[0] if one_port else ports[1], "serverappio": ports[2]}
    line = [program("flower-superlink"), "--enable-supernode-auth"]
    line += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.server_certificate)]
    line += ["--ssl-keyfile", str(keys.server_key)]
    if one_port:
        line += ["--host", "127.0.0.1", "--port", ports[0].rpartition(":")[2]]
    else:
        line += [word for api, at in places.items() for word in (f"--{api}-api-address", at)]
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{places["control"]}"\n'
        f'root-certificates = "{keys.authority}"\n'
    )
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)

    def start():
        up = lambda: all(map(listens, {places["fleet"], places["control"]}))  # noqa: E731
        return running(line, tmp_path / "superlink.log", up, home=tmp_path)

    return start, ports[0], one_port


def flwr(*words: str) -> str:
    out = subprocess.run(
        [program("flwr"), *words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return out.stdout + out.stderr


@pytest.mark.slow
def test_secure_sums_over_flower_survive_a_killed_node_and_superlink(sites: Sites, keys, superlink, tmp_path):
    """Stock SuperNodes, secure and checked: the bits of secure sums in one process, as over the mailbox."""
    start, fleet, one_port = superlink
    names, nodes = NAMES[:3], {}
    for name in names:
        others = [str(keys.client_public_key(other)) for other in names if other != name]
        own = Keys(tmp_path / f"keys-{name}")
        shutil.copytree(keys.folder, own.folder)
        for other in others:
            own.roster.add(other)
        np.savez(
            tmp_path / f"{name}.npz",
            x=sites.data.features[sites.rows(name)],
            y=sites.data.labels[sites.rows(name)],
        )
        (tmp_path / f"{name}.toml").write_text(
            f'[client]\nname = "{name}"\nkeys = "{own.folder}"\ndata = "{tmp_path / name}.npz"\n'
            f'state = "{tmp_path / name}"\n'
        )

    def node(name: str):
        line = [program("flower-supernode"), "--root-certificates", str(keys.authority)]
        line += ["--auth-supernode-private-key", str(keys.client_key(name)), "--superlink", fleet]
        port = str(free_ports(1)[0])
        line += ["--port", port] if one_port else ["--clientappio-api-address", f"127.0.0.1:{port}"]
        line += ["--node-config", node_config(config=tmp_path / f"{name}.toml")]
        return running(line, tmp_path / f"{name}.log", home=tmp_path / f"home-{name}")

    def register() -> None:
        for name in names:
            told = flwr("supernode", "register", str(keys.client_public_key(name)), "here")
            assert "registered" in told, told

    state = tmp_path / "state"
    words = [program("fedsolve"), "server", "--engine", "flower", "--superlink", "here", "--clients", "3"]
    words += ["--method", "deepafl", "--layers", "2", "--width", "24"]
    words += ["--classes", ",".join(map(str, CLASSES))]
    words += ["--state", str(state), "--out", str(tmp_path / "model")]

    def train(until):
        """Start the server; it is left to itself as soon as `until` holds."""
        with open(tmp_path / "server.log", "ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        ends = time.monotonic() + 2 * PATIENCE
        while process.poll() is None and not until() and time.monotonic() < ends:
            time.sleep(0.5)
        return process

    with ExitStack() as stack:
        with start() as link:
            register()
            for name in names:
                nodes[name] = stack.enter_context(node(name))
            process = train((state / "secure" / "setup.safetensors").exists)
            link.kill()  # the keys are made; a new run goes on from the state folder
            process.wait(PATIENCE)
            assert process.returncode != 0
        stack.enter_context(start())
        register()
        for name in names:  # SuperNodes give up soon after their SuperLink is gone, or are killed
            nodes[name].kill()
            stack.enter_context(node(name))
        process = train(lambda: False)
        logs = "".join((tmp_path / f"{name}.log").read_text()[-3000:] for name in (*names, "server"))
        assert process.returncode == 0, logs
    model = fs.load_model(tmp_path / "model")
    seed = json.loads((state / "report.json").read_text())["seed"]
    method = fs.DeepAFL(layers=2, width=24, seed=seed, exchange="single")
    expected = method.fit(SecureFederation(sites.local(names)))
    for name, array in expected.arrays().items():
        assert np.array_equal(model.arrays()[name], array)
    assert all(record.error_bounds for record in model.history)


def test_one_process_at_a_time_answers_for_a_site(tmp_path, monkeypatch):
    """What a process read of a site's ledger must stay true while it answers."""
    from fedsolve.cli import flower_apps

    monkeypatch.setattr(flower_apps, "WAIT", 0.0)
    monkeypatch.setattr(flower_apps, "answerer", lambda *given, **more: ("answers",))
    (tmp_path / "rows.csv").write_text("a,label\n1,0\n")
    config = tmp_path / "site.toml"
    words = {"name": "north", "state": tmp_path / "state", "data": tmp_path / "rows.csv"}
    config.write_text("[client]\n" + "".join(f'{name} = "{word}"\n' for name, word in words.items()))
    lock, refused = tmp_path / "state" / "lock", "is used by another process"
    with locked(lock, ""), pytest.raises(fs.ModelFileError, match=refused):
        flower_apps.site_of.main(["--config", str(config)], standalone_mode=False)
    assert flower_apps.site_of.main(["--config", str(config)], standalone_mode=False) == "answers"
    with pytest.raises(fs.ModelFileError, match=refused), locked(lock, "it is used"):
        pass
