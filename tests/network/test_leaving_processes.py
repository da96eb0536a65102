"""Over processes: a site leaves with a certificate, and a private run is paid for."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.command import document, refused
from tests.command import fedsolve as run
from tests.network.security.keyring import keys_for
from tests.network.security.processes import free_port, running

from .test_server import PATIENCE, fedsolve

NAMES = ("east", "north", "south", "west")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with rows and keys of four sites."""
    random = np.random.default_rng(0)
    for name in NAMES:
        labels = np.arange(400) % 2
        rows = random.standard_normal((400, 4)) + labels[:, None]
        np.savez(tmp_path / f"{name}.npz", X=rows, y=labels)
    keys = keys_for(tmp_path / "keys", NAMES)
    for name in NAMES:
        keys.roster.add(keys.client_public_key(name))
    return tmp_path


def trained(place: Path, out: str, names: tuple[str, ...], *asked: object, policy: str = "") -> str:
    """Train over processes; what server and sites printed."""
    address = f"127.0.0.1:{free_port()}"
    common = ("--keys", place / "keys")
    shape = ("--classes", "0,1")
    line = fedsolve("server", "--listen", address, "--clients", len(names), *common, *shape, *asked)
    log = place / f"{out}.log"
    with ExitStack() as stack:
        state = ("--state", place / f"state-{out}", "--out", place / out)
        server = stack.enter_context(running([*line, *map(str, state)], log))
        for name in names:
            words: list[object] = ["client", "--server", address, "--name", name, *common, "--once"]
            words += ["--data", place / f"{name}.npz", "--state", place / f"site-{name}"]
            if policy:
                (place / "policy.toml").write_text(policy)
                words += ["--policy", place / "policy.toml"]
            stack.enter_context(running(fedsolve(*words), place / f"{out}-{name}.log"))
        assert server.wait(PATIENCE) == 0, log.read_text()
    return log.read_text()


@pytest.mark.network
@pytest.mark.slow
def test_a_site_leaves_and_the_certificate_says_so(place: Path) -> None:
    keys, stays = ("--keys", place / "keys"), tuple(name for name in NAMES if name != "north")
    trained(place, "old", NAMES, "--method", "afl", "--ridge", 1)
    words = [word for name in stays for word in ("--cohort", name)]
    paper, certificate = place / "north.withdrawal", place / "certificate"
    document("certificate", "withdraw", "north", *words, "--out", paper, *keys)
    for name in stays:
        document("certificate", "accept", paper, "--ledger", place / f"site-{name}" / "ledger", *keys)
    trained(place, "new", stays, "--method", "afl", "--ridge", 1)
    pooled = [dict(np.load(place / f"{name}.npz")) for name in stays]
    rows = fs.LocalFederation.from_arrays(
        np.concatenate([one["X"] for one in pooled]),
        np.concatenate([one["y"] for one in pooled]),
        np.repeat(stays, 400),
    )
    expected = fs.AFL(ridge=1.0).fit(rows)
    assert np.allclose(fs.load_model(place / "new").weight, expected.weight, rtol=1e-9)
    models = ("--before", place / "old", "--after", place / "new")
    document("certificate", "make", *models, "--withdrawal", paper, "--out", certificate, *keys)
    missing = run("certificate", "verify", certificate, *keys)
    refused(missing, 4, "the signature of 'east' is missing")
    for name in stays:
        document("certificate", "sign", certificate, "--name", name, "--model", place / "new", *keys)
    told = document("certificate", "verify", certificate, "--model", place / "new", *keys)
    assert (told["left"], told["cohort"]) == (["north"], list(stays))
    refused(run("certificate", "verify", certificate, "--model", place / "old", *keys), 4, "of another model")
    note: Any = json.loads(certificate.read_text())
    for side in ("before", "after"):
        assert note["facts"][side]["totals"]
    note["facts"]["after"]["model"] = "0" + note["facts"]["after"]["model"][1:]
    certificate.write_text(json.dumps(note))
    refused(run("certificate", "verify", certificate, *keys), 4, "did not sign this")


@pytest.mark.network
@pytest.mark.slow
def test_a_private_run_over_processes_is_paid_for(place: Path) -> None:
    policy = "epsilon_total = 4.0\ndelta_total = 1e-5\n"
    asked = ("--epsilon", 3, "--method", "softmax", "--steps", 2)
    log = trained(place, "private", NAMES, *asked, policy=policy)
    assert "SECURE SUMS" in log
    model = fs.load_model(place / "private")
    assert model.parameters["noise"] == "sites"
    parts = [dict(np.load(place / f"{name}.npz")) for name in NAMES]
    assert np.mean([model.score(one["X"], one["y"]) for one in parts]) > 0.8
    told = document("status", place / "state-private" / "status.json")
    assert told["scores"]["epsilon"] == pytest.approx(3.0)
    assert "epsilon spent on these rows" in (place / "private-east.log").read_text()
