"""`fedsolve server` and `fedsolve client` as a user starts them: kill -9, configuration, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, ModelFileError
from fedsolve.network.answering import Answerer
from fedsolve.network.gate_link import begin_log, last_line, serving, site_names
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode
from tests import command
from tests.command import refused
from tests.network.security.processes import QUIET, free_port, running

from .conftest import Nodes
from .sites import CLASSES, NAMES, Sites, same_bits

pytestmark = [pytest.mark.network, pytest.mark.slow]

LIST = ",".join(map(str, CLASSES))
PATIENCE = 150.0
"""Seconds before a test gives up; nothing is measured by it."""


def fedsolve(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedsolve", *map(str, words)]


def wait_until(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def exchanges_done(state: Path) -> int:
    """Exchanges in the report, which is written before the checkpoint of the same exchange."""
    try:
        return len(json.loads((state / "report.json").read_text())["history"])
    except (OSError, ValueError, KeyError):
        return 0


def scalar(folder: Path, name: str) -> float:
    """The last value that TensorBoard has of a name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = EventAccumulator(str(folder))
    store.Reload()
    return float(store.Scalars(name)[-1].value)


def gate_of(process: subprocess.Popen[bytes]) -> int:
    """The process id of a server's gate."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if "fedsolve.network.gate" in Path(f"/proc/{pid}/cmdline").read_text()
    )


def test_a_server_and_a_gate_that_are_killed_change_no_bit(nodes: Nodes, sites: Sites, keys, tmp_path):
    address, state, log = f"127.0.0.1:{free_port()}", tmp_path / "state", tmp_path / "server.log"
    nodes.start(address, *NAMES[:3])
    nodes.start_slow(address, NAMES[3], exchange=1, seconds=1.0)
    line = fedsolve("server", "--listen", address, "--keys", keys.folder, "--clients", 4, "--state", state)
    line += [
        "--plain",
        "--classes",
        LIST,
        "--layers",
        "4",
        "--width",
        "64",
        "--out",
        str(tmp_path / "model.safetensors"),
    ]
    for done, gate_only in ((0, False), (1, True)):
        with running(line, log) as process:
            # In the middle of an exchange: the slow site has begun to answer the next one.
            nodes.answering(NAMES[3]).unlink(missing_ok=True)
            wait_until(
                lambda done=done: exchanges_done(state) > done and nodes.answering(NAMES[3]).exists(),
                process,
                log,
            )
            os.kill(gate_of(process) if gate_only else process.pid, signal.SIGKILL)
            assert process.wait(PATIENCE) == (3 if gate_only else -signal.SIGKILL)
    assert "the gate, through which sites connect, has ended" in log.read_text()
    with running(line, log) as process:
        assert process.wait(PATIENCE) == 0, log.read_text()
    model = fs.load_model(tmp_path / "model.safetensors")
    assert same_bits(model, fs.DeepAFL(layers=4, width=64, exchange="single").fit(sites.local()))
    report = json.loads((state / "report.json").read_text())
    assert report["status"] == "complete"
    assert [record["exchange"] for record in report["history"]] == [0, 1, 2, 3]
    assert "going on from" in log.read_text()
    # Once complete, the same command gives the same model without a network.
    (tmp_path / "model.safetensors").unlink()
    assert subprocess.run(line, check=False, capture_output=True).returncode == 0
    assert same_bits(fs.load_model(tmp_path / "model.safetensors"), model)
    for name in NAMES:
        nodes.stop(name)


def test_a_client_waits_for_a_server_that_was_killed_and_ends_with_a_run_that_failed(
    sites: Sites, tmp_path: Path
):
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "server.log"
    trial = ("--insecure", "--plain")
    server = fedsolve("server", "--listen", address, *trial, "--clients", 2, "--classes", LIST)
    server += ["--method", "afl", "--state", str(tmp_path / "state")]
    (tmp_path / "policy.toml").write_text('methods = ["deepafl"]\n')
    with ExitStack() as stack:
        clients = {}
        for name in NAMES[:2]:
            where = ("--server", address, "--data", sites.save(name, tmp_path), "--state", tmp_path / name)
            asked = ("--policy", tmp_path / "policy.toml") if name == NAMES[0] else ()
            words = fedsolve("client", "--name", name, "--once", *trial, *where, *asked)
            clients[name] = stack.enter_context(running(words, tmp_path / f"{name}.log"))
            if name == NAMES[0]:
                with running(server, log) as process:
                    wait_until(lambda: f"'{NAMES[0]}' is there" in log.read_text(), process, log)
                    os.kill(process.pid, signal.SIGKILL)
        with running(server, log) as process:
            assert process.wait(PATIENCE) == 3, log.read_text()
        for name, client in clients.items():
            assert client.wait(PATIENCE) == 3, (tmp_path / f"{name}.log").read_text()
            assert (
                "error: the run stopped: participant 'east' failed" in (tmp_path / f"{name}.log").read_text()
            )
        words = fedsolve("client", "--name", "east", "--once", *trial, *where)
        alone = stack.enter_context(running(words, tmp_path / "alone.log"))
        wait_until(lambda: "Trying again" in (tmp_path / "alone.log").read_text(), alone, log)
        alone.send_signal(signal.SIGINT)
        assert alone.wait(PATIENCE) == 130


def test_a_trial_without_keys_from_a_configuration(sites: Sites, tmp_path):
    pytest.importorskip("tensorboard")
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "federation.toml").write_text(
        f'[server]\nlisten = "{address}"\ninsecure = true\nplain = true\nclients = 2\nmethod = "afl"\n'
        f'ridge = 0.1\nclasses = {CLASSES}\nstate = "{tmp_path / "state"}"\nevaluate = true\n'
        f'tracker = ["tensorboard:{tmp_path / "board"}"]\n'
        f'[client]\nserver = "{address}"\ninsecure = true\nplain = true\nonce = true\n'
    )
    pair, config = NAMES[:2], ("--config", tmp_path / "federation.toml")
    sitting = []
    for name in pair:
        data = sites.save(name, tmp_path)
        words = fedsolve(
            "client", *config, "--name", name, "--data", data, "--state", tmp_path / name, "--json"
        )
        sitting.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | QUIET)
        )
    try:
        server = subprocess.run(
            fedsolve("server", *config, "--json"),
            capture_output=True,
            env=os.environ | QUIET,
            timeout=PATIENCE,
            check=False,
        )
        assert server.returncode == 0, server.stderr.decode()
        told = json.loads(server.stdout)
        model = fs.load_model(told["model"])
        assert same_bits(model, fs.AFL(ridge=0.1).fit(sites.local(pair)))
        assert told["sites"] == list(pair)
        assert told["accuracy"] == sites.local(pair).evaluate(model)
        report = json.loads((tmp_path / "state" / "report.json").read_text())
        assert (report["status"], report["measured"]) == ("complete", {"accuracy": told["accuracy"]})
        (board,) = (tmp_path / "board").iterdir()
        assert scalar(board, "final_accuracy") == pytest.approx(told["accuracy"])
        for name, process in zip(pair, sitting, strict=True):
            summary = json.loads(process.communicate(timeout=PATIENCE)[0])
            assert process.returncode == 0
            assert (summary["name"], summary["answers"]) == (name, 2)
            assert summary["sent"] == ["cross", "gram", "label_square"]
    finally:
        for process in sitting:
            process.kill()
            process.wait()


def test_a_site_without_a_server_says_so_and_stops_when_told(sites: Sites, tmp_path):
    log = tmp_path / "log"
    words = (
        "--insecure",
        "--plain",
        "--server",
        f"127.0.0.1:{free_port()}",
        "--name",
        "north",
        "--state",
        tmp_path / "s",
    )
    line = fedsolve("client", *words, "--data", sites.save("north", tmp_path))
    with running(line, log) as process:
        wait_until(lambda: "cannot be reached" in log.read_text(), process, log)
        process.terminate()
        assert process.wait(30) == 0
    assert "Trying again" in log.read_text()


def test_a_proxy_for_the_outside_is_not_asked_for_this_machine(sites: Sites, tmp_path, monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.setenv("no_proxy", "intranet.example")
    address, told = f"127.0.0.1:{free_port()}", []
    with serving(tmp_path, address, None) as link:
        site = Answerer("north", sites.client_data("north"))
        node = SiteNode(site, Connection(address, insecure=True), tell=told.append)
        thread = threading.Thread(target=node.serve)
        thread.start()
        end = time.monotonic() + PATIENCE
        while not link.nodes():
            assert time.monotonic() < end, told
            time.sleep(0.02)
        node.stop()
        thread.join(PATIENCE)
    assert os.environ["NO_PROXY"].startswith("intranet.example,127.0.0.1")


def test_a_gate_that_dies_is_noticed(tmp_path):
    with serving(tmp_path, f"127.0.0.1:{free_port()}", None) as link:
        assert link.nodes() == {}
        link.process.kill()
        link.process.wait()
        calls = (
            link.nodes,
            lambda: link.receive("message"),
            lambda: link.send([1], {"ask": "tell"}, b""),
        )
        for call in calls:
            with pytest.raises(CohortError, match=r"the gate, .* has ended .* same state folder"):
                call()


def test_another_server_on_the_same_port_is_not_taken_for_this_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with (
        serving(tmp_path / "first", address, None),
        pytest.raises(CohortError, match=r"on \S+: it cannot listen there: .* Is another server running"),
        serving(tmp_path / "second", address, None),
    ):
        pass
    with serving(tmp_path / "third", address, None) as link:
        assert link.nodes() == {}


def test_a_list_of_sites_that_is_being_replaced_stays_in_force(tmp_path, monkeypatch):
    told, listed = [], ["north"]
    monkeypatch.setattr("fedsolve.network.keyfolder.SiteList.sites", lambda self: dict.fromkeys(listed))
    with pytest.raises(ModelFileError, match="registered sites"):
        site_names(Keys(tmp_path), told.append)
    (tmp_path / "registered").write_text("first")
    sites = site_names(Keys(tmp_path), told.append)
    (tmp_path / "registered").unlink()
    for _ in range(3):
        assert sites() == {"north"}
    assert len(told) == 1
    assert "stays in force" in told[0]
    listed.append("south")
    (tmp_path / "registered").write_text("second")
    assert sites() == {"north", "south"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("server", "--clients", 2, "--insecure", "--keys", "k"), 2, "--insecure uses no keys"),
        (("server", "--clients", 3, "--keys", "nowhere"), 4, "fedsolve keys"),
        (("server", "--clients", 2, "--insecure", "--plain", "--classes", "a"), 2, "Give two"),
        (("server", "--clients", 3, "--insecure"), 2, "with --insecure give --plain too"),
        (("server", "--clients", 2), 2, "a secure sum takes 3 sites at least"),
        (("server", "--clients", 3, "--seed", 7), 2, "the sites draw the seed together"),
        (("server", "--clients", 3, "--method", "fedgen"), 2, "method 'fedgen' gathers"),
        (("client", "--server", "h:1", "--name", "n", "--data", "x", "--insecure"), 2, "give --plain too"),
        (("client", "--server", "h:1", "--name", "n", "--data", "x.npz"), 4, "ca.crt"),
        (("server", "--config", "absent.toml"), 4, "cannot read absent.toml"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(command.fedsolve(*words), code, message)


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        ("[server]\nclinets = 2\n", "unknown entry 'clinets'. Did you mean 'clients'?"),
        ("[server]\nclients = 3\nmethod = 5\n", "unknown method '5'"),
        ("clients = 3\n", "has no table [server] with entries; it has clients."),
        ("server = 3\n[client]\n", "has no table [server] with entries; it has server, [client]."),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(contents, told, tmp_path):
    (tmp_path / "f.toml").write_text(contents)
    refused(command.fedsolve("server", "--config", tmp_path / "f.toml"), 2, told)


def test_a_log_of_an_earlier_process_is_not_quoted(tmp_path):
    log = tmp_path / "gate.log"
    log.write_text("ERROR the port is taken\n")
    assert last_line(log) == "ERROR the port is taken"
    with begin_log(log):
        assert last_line(log) == "its log is empty."
    with begin_log(log) as stream:
        stream.write(b"the disk is full\n\n")
    assert last_line(log) == "the disk is full"
    log.write_bytes(b"x" * (17 << 20))
    begin_log(log).close()
    assert log.stat().st_size < 100
    assert (tmp_path / "gate.log.1").stat().st_size == 17 << 20
