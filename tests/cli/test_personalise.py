"""`fedsolve personalise`: the model that `Participant.personalise` gives, from files."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.cli.test_gradient_options import document, fedsolve

METHODS = {
    "apfl": ("--width", "64", "--refinement-width", "64", "--balance", "auto"),
    "ditto": ("--rounds", "3", "--rate", "0.5"),
    "fedpcl": ("--rounds", "2", "--network", "mlp:16"),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    labels = np.array(["cat", "dog", "owl"])[rng.integers(0, 3, 300)]
    features = rng.standard_normal((300, 6)) + (labels == "dog")[:, None] - 2.0 * (labels == "owl")[:, None]
    np.savez(tmp_path / "all.npz", x=features, y=labels)
    np.savez(tmp_path / "north.npz", x=features[:40], y=labels[:40])
    np.savez(tmp_path / "strange.npz", x=features[:40], y=np.full(40, "cow"))
    np.savez(tmp_path / "wide.npz", x=np.ones((40, 7)), y=labels[:40])
    return tmp_path


def train(site: Path, method: str, *more: str) -> str:
    shared = str(site / "shared.safetensors")
    words = ("--method", method, *METHODS[method], "--clients", "4", "--out", shared, *more)
    done = fedsolve("train", str(site / "all.npz"), *words)
    assert done.exit_code == 0, done.output
    return shared


@pytest.mark.torch
@pytest.mark.parametrize("method", METHODS)
def test_a_site_that_joins(site: Path, method: str) -> None:
    shared, own = train(site, method), str(site / "own.safetensors")
    told = document("personalise", shared, str(site / "north.npz"), "--out", own)
    rows = np.load(site / "north.npz")
    expected = fs.Participant("late", fs.ClientData(rows["x"], rows["y"])).personalise(fs.load_model(shared))
    found: Any = fs.load_model(own)
    assert np.array_equal(found.decision_function(rows["x"]), expected.decision_function(rows["x"]))
    assert stat.S_IMODE(Path(own).stat().st_mode) == 0o600
    assert told["rows"] == 40
    assert told["accuracy"]["personal"] == found.score(rows["x"], rows["y"])
    assert (told["accuracy"]["shared"] is None) == (method == "fedpcl")
    page = fedsolve("personalise", shared, str(site / "north.npz"), "--out", own)
    assert "for this site only" in " ".join(page.output.split())


@pytest.mark.torch
def test_a_site_that_took_part(site: Path) -> None:
    """With the states beside a checkpoint, as a site's state folder has them."""
    checkpoint = site / "run.ckpt"
    shared = train(site, "ditto", "--personal", str(site / "clients"), "--checkpoint", str(checkpoint))
    Path(f"{checkpoint}.clients").rename(site / "states")
    dealt = fs.partition.iid(np.load(site / "all.npz")["y"], 4, seed=0)
    rows = np.load(site / "all.npz")
    np.savez(site / "one.npz", x=rows["x"][dealt == 1], y=rows["y"][dealt == 1])
    own = str(site / "own.safetensors")
    words = (shared, str(site / "one.npz"), "--out", own, "--name", "client-1")
    told = fedsolve("personalise", *words)
    assert told.exit_code == 2
    assert "what 'client-1' kept of the run is gone" in told.output
    assert not Path(own).exists()
    document("personalise", *words, "--state", str(site))
    wanted = fs.load_model(site / "clients" / "client-1.safetensors")
    found = fs.load_model(own)
    assert np.array_equal(found.decision_function(rows["x"]), wanted.decision_function(rows["x"]))


@pytest.mark.parametrize(
    ("data", "more", "told"),
    [
        ("strange.npz", (), "'cow' in row 0 is not one of"),
        ("wide.npz", (), "rows of 6 features are expected; these have 7"),
        ("north.npz", ("--state", "."), "give --name too"),
        ("north.npz", ("--name", "north", "--state", "."), "no state folder"),
        ("missing.npz", (), "missing.npz"),
    ],
)
def test_what_cannot_be_done_is_said(site: Path, data: str, more: tuple[str, ...], told: str) -> None:
    shared = train(site, "apfl")
    done = fedsolve("personalise", shared, str(site / data), "--out", str(site / "own"), *more)
    assert done.exit_code in (2, 4)
    assert told in " ".join(done.output.split())
    assert not (site / "own").exists()


def test_a_model_for_everybody_is_refused(site: Path) -> None:
    shared = str(site / "shared")
    assert fedsolve("train", str(site / "all.npz"), "--method", "afl", "--out", shared).exit_code == 0
    done = fedsolve("personalise", shared, str(site / "north.npz"), "--out", str(site / "own"))
    assert done.exit_code == 2
    assert "the same for everybody" in " ".join(done.output.split())


def test_sums_for_further_rows_are_kept_on_request(site: Path) -> None:
    shared, own = train(site, "apfl"), str(site / "own")
    document("personalise", shared, str(site / "north.npz"), "--out", own, "--growing")
    rows = np.load(site / "all.npz")
    grown = fs.load_model(own).updated(fs.ClientData(rows["x"][40:60], rows["y"][40:60]))  # type: ignore[attr-defined]
    whole = fs.Participant("late", fs.ClientData(rows["x"][:60], rows["y"][:60]))
    assert np.abs(grown.weight - whole.personalise(fs.load_model(shared)).weight).max() <= 1e-9  # type: ignore[attr-defined]
