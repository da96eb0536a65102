"""Secure sums between real processes: kill -9 of the server and of sites, and the same model all the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsolve as fs
from fedsolve.network.keyfolder import Keys
from fedsolve.privacy import SecureFederation
from tests.network.security.processes import free_port, running

from .conftest import Nodes
from .sites import NAMES, Sites, same_bits
from .test_server import LIST, PATIENCE, fedsolve, wait_until

pytestmark = [pytest.mark.network, pytest.mark.slow]


def stamp(path: Path) -> int:
    """When a file was replaced last; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def changed(path: Path) -> Callable[[], bool]:
    before = stamp(path)
    return lambda: stamp(path) != before


def test_kill_9_of_server_and_sites_gives_the_same_model(
    nodes: Nodes, sites: Sites, keys: Keys, tmp_path: Path
) -> None:
    for name in NAMES:
        keys.roster.add(keys.client_public_key(name))
    address, state, log = f"127.0.0.1:{free_port()}", tmp_path / "state", tmp_path / "server.log"
    line = fedsolve("server", "--listen", address, "--keys", keys.folder, "--clients", 4, "--state", state)
    line += ["--classes", LIST, "--layers", "8", "--width", "56"]
    line += ["--out", str(tmp_path / "model.safetensors")]
    nodes.start(address, *NAMES, secure=True)
    secure = state / "secure"
    # At the end of the setup, and with a masked sum written down that is being opened; all the steps are in
    # tests/privacy/test_network.py.
    for step in ("setup.safetensors", "masked.safetensors"):
        reached = changed(secure / step)
        with running(line, log) as process:
            wait_until(reached, process, log)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with running(line, log) as process:
        for file in ("masked", "ledger.jsonl", "checked"):
            # Who checks follows from the run, so the first who writes is the one.
            wrote = {name: changed(nodes.state(name) / "ledger" / file) for name in NAMES}
            wait_until(lambda wrote=wrote: any(done() for done in wrote.values()), process, log)
            name = next(name for name, done in wrote.items() if done())
            nodes.kill(name)
            nodes.start(address, name, secure=True)
        assert process.wait(PATIENCE) == 0, log.read_text()
    model = fs.load_model(tmp_path / "model.safetensors")
    report = json.loads((state / "report.json").read_text())
    method = fs.DeepAFL(layers=8, width=56, exchange="single", seed=report["seed"])
    assert same_bits(model, method.fit(SecureFederation(sites.local())))
    assert [tuple(record["cohort"]) for record in report["history"]] == [NAMES] * 8
    assert "SECURE SUMS: this server sees totals" in log.read_text()
    assert "CHECKED: 3 of 4 sites check every question" in log.read_text()
    assert sum("its agreement to deepafl, step 2" in nodes.log(name) for name in NAMES) == 3
    for name in NAMES:
        assert "SECURE SUMS: what this site sends is masked" in nodes.log(name)
        assert "it answers questions that 3 of 4 sites have checked" in nodes.log(name)
        sent = [json.loads(text) for text in (nodes.state(name) / "sent.jsonl").read_text().splitlines()]
        slots: dict[str, set[str]] = {}
        for entry in sent:
            if entry["text"].startswith("sent the masked answer"):
                slots.setdefault(entry["about"]["slot"], set()).add(json.dumps(entry["about"]["cohort"]))
        assert slots
        assert all(len(cohorts) == 1 for cohorts in slots.values())
        nodes.stop(name)
