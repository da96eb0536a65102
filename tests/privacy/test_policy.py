"""What a site's policy refuses, before anything is computed."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.messages import Block, Chain, Request, Term
from fedsolve.federation.participant import Participant
from fedsolve.privacy.ledger import Ledger
from fedsolve.privacy.policy import PolicyGuard, SitePolicy
from tests.command import fedsolve

from .sites import Sites

ROWS, WIDTH = 60, 8


def participant(policy: SitePolicy) -> Participant:
    rng = np.random.default_rng(0)
    made = Participant("north", fs.ClientData(rng.standard_normal((ROWS, WIDTH)), np.arange(ROWS) % 3))
    made.guard = PolicyGuard(policy).check
    return made


def asked(method: Any, *blocks: Block) -> Request:
    federation = fs.LocalFederation.from_arrays(np.eye(WIDTH)[:3], np.arange(3), np.zeros(3, int))
    run = method.start(federation.describe())
    chain = Chain([*run.chain.blocks, *blocks])
    request = run.request(("north",))
    return dataclasses.replace(request, position=len(chain), digest=chain.digest).starting_at(0, chain)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "method": ({"methods": ("deepafl",)}, fs.AFL(), "allows the methods .'deepafl'., not 'afl'"),
    "parameter": ({"parameters": {"ridge": (0.1, 10)}}, fs.AFL(ridge=0.0), "allows 'ridge' from 0.1 to 10"),
    "width": ({}, fs.DeepAFL(layers=1, width=12000), "matrices of width 12,000; .* allows 4,096"),
    "memory": ({"width": 10**6}, fs.DeepAFL(layers=1, width=12000), "about 4.6 GB of memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_before_anything_is_computed(name: str) -> None:
    limits, method, words = REFUSED[name]
    site, request = participant(SitePolicy(**limits)), asked(method)
    tracemalloc.start()
    try:
        with pytest.raises((fs.TermError, fs.DataError), match=words):
            site.answer(request)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(participant(SitePolicy()).answer(asked(fs.AFL())), Term)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.full((4, 4), 1e10), r"block 1 of the model: 'left' has numbers up to 1e\+10"),
        (np.full((4, 4), np.nan), "block 1 of the model: 'left' has numbers up to nan"),
        (np.zeros((5000, 1)), r"'left' has shape \(5000, 1\)"),
    ],
)
def test_blocks_are_looked_at(array: Any, words: str) -> None:
    with pytest.raises(fs.TermError, match=words):
        participant(SitePolicy()).answer(asked(fs.AFL(), Block({"layer": 1}, {"left": array})))


def test_limits_of_a_run_and_the_pinned_opening(tmp_path: Path) -> None:
    policy = SitePolicy(exchanges=2, changing=True)
    sites = Sites(policy=policy, ledgers=[Ledger(tmp_path / str(n)) for n in range(9)])
    for slot in range(2):
        sites.open(sites.ask(slot, sites.names, step=slot))
    with pytest.raises(fs.TermError, match=r"has had 2 answers.*exchanges"):
        sites.masked("client-0", 2, sites.names, step=2)
    few = Sites(policy=dataclasses.replace(policy, bytes_up=200, exchanges=9))
    with pytest.raises(fs.TermError, match="bytes_up"):
        few.masked("client-0", 0, few.names)
    some = Sites(policy=dataclasses.replace(policy, statistics=("gram",), exchanges=9))
    with pytest.raises(fs.TermError, match=r"asked for are \['cross'"):
        some.masked("client-0", 0, some.names)
    other = Sites(policy=dataclasses.replace(policy, exchanges=9))
    other.masked("client-0", 0, other.names)
    other.run = fs.AFL(ridge=3.0).start(other.federation.describe())
    with pytest.raises(fs.TermError, match="opening of this run"):
        other.masked("client-0", 1, other.names)


def test_a_policy_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('methods = ["afl"]\nwidth = 64\nchanging = true\n[parameters]\nridge = [0.1, 2]\n')
    policy = SitePolicy.from_file(path)
    assert (policy.methods, policy.width, policy.changing) == (("afl",), 64, True)
    assert policy.parameters == {"ridge": (0.1, 2)}
    assert policy.memory == SitePolicy().memory
    for text, words in (
        ("widht = 3", "unknown key 'widht' in the policy .* Did you mean 'width'"),
        ("width = 'x'", "'width' in the policy .* must be a whole number; got 'x'"),
        ("width = -1", "'width' in the policy .* must be at least 0; got -1"),
        ("methods = 3", "'methods' in the policy .* must be a list, each text; got 3"),
        ("changing = 1", "'changing' in the policy .* must be true or false; got 1"),
        ("width", "not valid TOML"),
    ):
        path.write_text(text)
        with pytest.raises(fs.DataError, match=words):
            SitePolicy.from_file(path)


@pytest.mark.network
def test_a_client_reads_it_before_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.eye(6), y=np.arange(6) % 2)
    Path("policy.toml").write_text("widht = 3")
    line = ["client", "--server", "h:1", "--name", "n", "--data", "data.npz", "--insecure", "--plain"]
    found = fedsolve(*line, "--policy", "policy.toml")
    assert (found.exit_code, "Did you mean 'width'?" in found.stderr) == (2, True)
