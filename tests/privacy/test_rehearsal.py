"""A dry run says what a real run sends, tells and lets wait, and leaves no trace."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.participant import ClientData
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import Limits
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.policy import SitePolicy
from fedsolve.privacy.rehearsal import Rehearsal
from tests.command import fedsolve

SITES = 3


def rows(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Two classes of as many rows, and a third of three."""
    labels = np.r_[np.arange(count) % 2, [2, 2, 2]]
    return np.random.default_rng(seed).standard_normal((count + 3, 5)), labels


def traces(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_told_is_what_a_real_run_tells(tmp_path: Path) -> None:
    parts = [rows(seed) for seed in range(SITES)]
    x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
    owners = np.repeat([f"s{site}" for site in range(SITES)], len(parts[0][1]))
    federation = fs.LocalFederation.from_arrays(x, y, owners)
    name, ledger = "s0", tmp_path / "s0"
    data = ClientData(*parts[0])

    def trial() -> Rehearsal:
        return Rehearsal(name, data, SitePolicy(), ledger, SITES, classes=[0, 1, 2])

    before = trial().tried(fs.AFL())
    assert not ledger.exists()
    assert "60 of 63 rows take part; 3 wait (class 2)" in trial().count()
    secure = SecureFederation(federation, ledgers=tmp_path)
    fs.AFL().fit(secure)
    told = Disclosure(Limits(), (ledger / "row-key").read_bytes(), ledger).told
    assert before.told == pytest.approx(told, rel=1e-12)
    assert before.arrays == ("cross", "gram", "label_square")
    assert (before.exchanges, before.refused) == (1, "")
    # Once more: what was told counts, and the trial itself leaves no trace.
    kept = traces(tmp_path)
    again = trial().tried(fs.Softmax())
    assert again.told is not None
    assert again.told > told
    assert traces(tmp_path) == kept


def test_what_would_be_refused_is_said() -> None:
    data = ClientData(*rows(0))
    wide = Rehearsal("s0", data, SitePolicy(), Path("nowhere"), SITES).tried(fs.DeepAFL(layers=2, width=512))
    assert "rows_per_width" in wide.refused
    assert wide.exchanges == 0
    forbidden = Rehearsal("s0", data, SitePolicy(methods=("softmax",)), Path("nowhere"), SITES)
    assert "allows the methods ['softmax']" in forbidden.tried(fs.AFL()).refused


@pytest.mark.slow
def test_the_command_sends_nothing_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = rows(0)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    words = ["client", "--server", "127.0.0.1:1", "--name", "north", "--data", "rows.npz", "--dry-run"]
    said = fedsolve(*words, "--json")
    document = json.loads(said.stdout)
    assert document["sites"] == SITES
    assert "3 wait (class 2)" in document["census"]
    by_method = {each["method"]: each for each in document["methods"]}
    assert 0 < by_method["afl"]["told"] < 0.5
    assert "rows_per_width" in by_method["deepafl"]["refused"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npz"]
    assert "Nothing was sent" in fedsolve(*words, "--plain").stdout
