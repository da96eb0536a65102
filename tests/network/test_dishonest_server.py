"""A dishonest server against unmodified `fedsolve client` processes: many folds, windows that slide."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.folds import Part
from fedsolve.network.gate_link import serving
from fedsolve.network.keyfolder import Keys
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.privacy import SecureFederation
from tests.network.security.processes import free_port

from .conftest import Nodes
from .sites import CLASSES, NAMES, Sites

pytestmark = [pytest.mark.network, pytest.mark.slow]

RULES_OFF = "fewest_rows = 1\nrows_per_width = 0\ntold = 1e9\nverified = false\n"


def shown(columns: Any, rows: Any) -> set[int]:
    """Which rows stand, to the last digit, in the columns of a matrix."""
    found = set()
    for column in np.asarray(columns).T:
        error = np.abs(rows - column).max(axis=1)
        if error.min() < 1e-9 and np.abs(column).max() > 0:
            found.add(int(error.argmin()))
    return found


def started(nodes: Nodes, address: str, policy: str) -> None:
    """All sites, each with this policy."""
    for name in NAMES:
        nodes.keys.roster.add(nodes.keys.client_public_key(name))
        file = nodes.state(name) / "policy.toml"
        file.write_text(policy)
        words = ["client", "--server", address, "--keys", str(nodes.keys.folder), "--name", name]
        words += ["--policy", str(file), "--data", str(nodes._data(name)), "--state", str(nodes.state(name))]
        nodes._run(name, address, [sys.executable, "-m", "fedsolve", *words])


class Watch(SecureFederation):
    """Keeps what the server sees."""

    def exchange(self, request: Any, chain: Any) -> Any:
        total = super().exchange(request, chain)
        self.seen = [*getattr(self, "seen", []), total["cross"]]
        return total


@pytest.mark.parametrize("policy", ["", "verified = false\n", RULES_OFF], ids=["default", "unchecked", "off"])
def test_folds_and_windows(sites: Sites, keys: Keys, tmp_path: Path, policy: str) -> None:
    """AFL's own question with 768 folds, then runs on windows whose totals are subtracted.

    By default sites agree to no question that the method does not ask; where nobody checks, the rules
    refuse it; without both, rows come out to the last digit.
    """
    address, off = f"127.0.0.1:{free_port()}", policy == RULES_OFF
    rows = np.concatenate([sites.client_data(name).features(slice(None)) for name in NAMES])
    with ExitStack() as stack, serving(tmp_path / "server", address, keys.folder) as link:
        started(Nodes(sites, keys, tmp_path, stack), address, policy)
        federation = NetworkFederation(link, clients=4, classes=CLASSES, secure=True, patience=100)
        secure = Watch(federation, verify=not policy)
        run = fs.AFL(ridge=1.0).start(secure.describe())
        honest = run.request(secure.clients)
        assert honest is not None
        many = dataclasses.replace(honest, note={**honest.note, **Part((0, 1), 768).note()})
        if off:
            assert shown(secure.exchange(many, run.chain)["cross"], rows)
        else:
            why = "some of 768 folds" if policy else "not the one that follows from the totals"
            with pytest.raises(fs.CohortError, match=why):
                secure.exchange(many, run.chain)
        secure, count = Watch(federation, verify=not policy), 384 if off else 48
        for first in range(4):
            part = Part(tuple(range(first, first + count // 2)), count)
            fs.Recipe(fs.AFL(ridge=1.0), part=part).fit(secure)
        between = [b - a for a, b in itertools.pairwise(secure.seen)]
        assert len(between) == 3
        seen = set().union(*(shown(d, rows) | shown(-d, rows) for d in between))
        assert bool(seen) == off
