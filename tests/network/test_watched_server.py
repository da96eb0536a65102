"""A real server is watched while it runs, is killed and goes on; all that it and its children log is JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command import document
from tests.network.security.processes import QUIET, free_port, stop

from .conftest import Nodes
from .sites import CLASSES, NAMES, Sites

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE = 150.0


@contextmanager
def started(log: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose stderr goes to a file."""
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedsolve", *map(str, words), "--log", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env=os.environ | QUIET,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def seen(port: int, process: subprocess.Popen[bytes], log: Path, wanted: Any) -> dict[str, Any]:
    """What the page tells once it is as wanted."""
    end = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10) as answer:
                told = json.load(answer)
            if wanted(told):
                return told
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.05)


def lines_of(path: Path, process: str) -> list[dict[str, Any]]:
    text = path.read_text()
    assert "\x1b" not in text
    told = [json.loads(line) for line in text.splitlines()]
    assert told
    assert all({"time", "level", "process", "message", "fields"} == set(one) for one in told)
    assert {one["process"] for one in told} == {process}
    return told


def test_a_server_is_watched_killed_and_goes_on(nodes: Nodes, sites: Sites, keys, tmp_path):
    address, port, state = f"127.0.0.1:{free_port()}", free_port(), tmp_path / "state"
    slow, quick = NAMES[:2]  # answers are taken by name, and told of as they come
    log, at_site = tmp_path / "stderr", tmp_path / "site"
    nodes.start_slow(address, slow, exchange=1, seconds=3.0)
    client = ("client", "--server", address, "--keys", keys.folder, "--name", quick, "--plain", "--once")
    server = ("server", "--listen", address, "--keys", keys.folder, "--plain", "--clients", 2)
    server += ("--classes", ",".join(map(str, CLASSES)), "--layers", 3, "--width", 32, "--state", state)
    server += ("--status", port, "--evaluate")
    data = sites.save(quick, tmp_path)
    with started(at_site, *client, "--data", data, "--state", tmp_path / "client"):
        with started(log, *server) as process:

            def waits_for_one(told: dict[str, Any]) -> bool:
                states = [site["state"] for site in told["sites"]]
                return told["exchange"] == 2 and told["under_way"] and states == ["asked", "answered"]

            told = seen(port, process, log, waits_for_one)
            assert (told["phase"], told["done"], told["exchanges"], told["secure"]) == (
                "running",
                1,
                3,
                False,
            )
            standing = {site["name"]: site for site in told["sites"]}
            assert all(site["connected"] for site in standing.values())
            assert (standing[slow]["state"], standing[quick]["state"]) == ("asked", "answered")
            assert told["bytes"]["up"] == sum(record["bytes_up"] for record in told["records"]) > 0
            assert [one["days"] > 300 for one in told["certificates"]] == [True, True]
            assert told["records"][0]["measures"]["risk"] > 0
            time.sleep(1.0)  # the file follows within the second
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert document("status", state)["done"] == 1
        with started(log, *server) as process:
            told = seen(port, process, log, lambda told: told["exchange"] == 3)
            assert (told["done"], told["starts"]) == (2, 2)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
            assert "fedsolve_restarts_total 1.0\n" in text
            assert "fedsolve_exchanges_total 2.0\n" in text
            assert not any(name in text for name in NAMES)
            assert process.wait(PATIENCE) == 0, log.read_text()
    last = document("status", state)
    assert (last["phase"], last["done"]) == ("complete", 3)
    assert 0.5 < last["scores"]["accuracy"] <= 1.0
    said = lines_of(log, "server")
    exchanges = [
        one["fields"] for one in said if one["message"].startswith("exchange ") and "of" in one["fields"]
    ]
    assert [(one["exchange"], one["of"], one["sites"]) for one in exchanges] == [
        (number, 3, sorted((quick, slow))) for number in (1, 2, 3)
    ]
    kept = lines_of(state / "server.log", "server")
    assert [one["message"] for one in kept if one["fields"].get("kind")] == [
        one["message"] for one in said if one["fields"].get("kind")
    ]
    gate = lines_of(state / "gate.log", "gate")
    assert {one["fields"]["site"] for one in gate if "site" in one["fields"]} == {quick, slow}
    answered = [
        one["fields"] for one in lines_of(at_site, "client") if one["fields"].get("what") == "answered"
    ]
    assert sum(one["bytes_up"] for one in answered) > 0
    assert lines_of(tmp_path / "client" / "client.log", "client")
    nodes.stop(slow)
