"""The experiment on feedback alignment: its rule of decision, runs that go on, and the sharing of a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import fashion_mnist, paired, sharing
from benchmarks.fashion_mnist import (
    Data,
    Place,
    Way,
    method_of,
    run_arm,
    run_here,
    seconds_per_round,
    unfinished,
)
from benchmarks.paired import ARMS, compare, paired_interval, report, scores
from scipy.stats import ttest_rel

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FOREVER = 4e9


# -- the rule --------------------------------------------------------------------------------------


def told(arm: str, seed: int, level: float, rounds: int = 60) -> dict[str, Any]:
    """A result whose accuracy is 0 before round 41 and `level` % from then on."""
    lines = [
        {"test_accuracy": level / 100 if number > 40 else 0.0, "seconds": 2.0}
        for number in range(1, rounds + 1)
    ]
    return {"arm": arm, "seed": seed, "rounds": lines}


def verdict(differences: list[float], host: str = "FedLC", choice: str = "lowest") -> str:
    found = [told(host, seed, 80.0) for seed in range(len(differences))]
    found += [told(f"{host}+{choice}", seed, 80.0 + more) for seed, more in enumerate(differences)]
    (one,) = compare(scores(found))
    return one.verdict


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    with_, without = rng.normal(1, 2, (2, 6))
    mean, low, high = paired_interval(list(with_ - without))
    wanted = ttest_rel(with_, without).confidence_interval(0.95)
    assert (low, high) == pytest.approx((wanted.low, wanted.high))
    assert mean == pytest.approx((with_ - without).mean())
    assert paired_interval([0.3]) == (0.3, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("differences", "wanted"),
    [
        ([1.0, 1.2, 0.9, 1.1, 1.0, 0.8], "an effect: the interval lies wholly above 0"),
        ([0.1, -0.2, 0.0, 0.2, -0.1, 0.1], r"the paper's claim (+0.67) does not hold here"),
        ([0.3, 0.31, 0.29, 0.3, 0.32, 0.3], "an effect"),
        ([0.3, 0.31, 0.29, 0.3, 0.32, 0.3], "and the paper's claim (+0.67) does not hold here"),
        ([2.0, -1.5, 0.9, -0.4, 1.3, 0.2], "undecided with 6 seeds: add two seeds"),
        ([2.0, -1.5, 0.9, -0.4, 1.3, 0.2] + [1.5, -1.0] * 2, "undecided with 10 seeds: and no more"),
    ],
)
def test_the_rule_of_decision(differences: list[float], wanted: str) -> None:
    assert wanted in verdict(differences)


def test_the_rule_is_about_the_lowest_score_and_each_hosts_own_claim() -> None:
    assert "exploratory" in verdict([1.0, 1.1, 0.9], choice="highest")
    assert "(+6.45) does not hold" in verdict([1.0, 1.1, 0.9], host="FedAvgM-damped")


def test_a_score_is_the_mean_of_rounds_41_to_60_of_finished_runs() -> None:
    found = scores([told("FedLC", 0, 83.0), told("FedLC", 1, 85.0, rounds=59)])
    assert found == {"FedLC": {0: pytest.approx(83.0)}}
    page = report([told("FedLC", 0, 83.0), told("FedLC+lowest", 0, 84.0), told("FedLC", 1, 85.0, rounds=59)])
    assert "| FedLC | 1 | 83.00 | 0: 83.00 |" in page
    assert "| FedLC+lowest | 1 | +1.00 | -inf to +inf | +1.00 | undecided with 1 seeds" in page
    assert "Not finished, with their rounds: FedLC:1 (59)." in page


# -- runs ------------------------------------------------------------------------------------------


def test_arms_differ_in_host_and_feedback_alone() -> None:
    plain, chosen = (method_of(arm, 60, 3).parameters() for arm in ("FedLC", "FedLC+lowest"))
    differs = {name: (plain[name], chosen[name]) for name in plain if plain[name] != chosen[name]}
    assert differs == {"feedback": (None, "lowest"), "feedback_first": (False, True)}
    assert (plain["crop"], plain["flip"], plain["pixel_mean"]) == (2, 0.5, "0.2860")
    assert [method_of(arm, 60, 0).key for arm in ARMS] == ["fedlc"] * 3 + ["fedavgm"] * 5
    authors = method_of("FedAvgM-damped+highest", 100, 0, **fashion_mnist.SETTINGS["authors"])
    assert (authors.network, authors.crop, authors.last_batch) == ("mobilenet_v2:stock", 4, "drop")
    assert (authors.server_statistics, authors.server_momentum, authors.feedback) == (True, 0.1, "highest")
    assert method_of("FedAvgM-damped", 60, 0, **fashion_mnist.SETTINGS["long"]).epochs == 15
    labels = np.random.default_rng(0).integers(0, 10, 20_000)
    data = Data(np.zeros((20_000, 4), np.uint8), labels, None, None)
    sizes = [len(each.data) for each in fashion_mnist.federation_of(data, 0, authors=True).participants]
    assert min(sizes) >= 64


@pytest.fixture(scope="module")
def data() -> Data:
    rng = np.random.default_rng(0)
    labels = np.arange(500) % 10
    images = np.clip(rng.normal(20 * labels[:, None], 20, (500, 784)), 0, 255).astype(np.uint8)
    return Data(images[:400], labels[:400], images[400:], labels[400:])


SMALL: dict[str, Any] = {"network": "cnn", "epochs": 1, "batch": 2}


@pytest.mark.slow
def test_a_run_that_ran_out_of_time_goes_on(data: Data, tmp_path: Path) -> None:
    whole, parts = (Place(tmp_path / name, tmp_path / f"{name}-work") for name in ("whole", "parts"))
    whole.make()
    parts.make()
    assert run_arm(data, "FedLC+lowest", 1, whole, 3, "cpu", FOREVER, **SMALL)
    calls = 1
    while not run_arm(data, "FedLC+lowest", 1, parts, 3, "cpu", time.time() - 1, **SMALL):
        calls += 1
    assert calls == 3
    both = [json.loads((tmp_path / part / "fedlc-lowest-1.json").read_text()) for part in ("whole", "parts")]
    for one in both:
        assert one["arm"] == "FedLC+lowest"
        for line in one["rounds"]:
            del line["seconds"]
    assert both[0] == both[1]
    assert len(both[0]["rounds"]) == 3
    assert len(both[0]["rounds"][1]["alignment"]) == 2
    assert unfinished(tmp_path / "parts", ["FedLC+lowest", "FedLC"], [1, 2], 3) == [
        ("FedLC", 1), ("FedLC+lowest", 2), ("FedLC", 2)
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_in_threads_are_those_of_processes(data: Data, tmp_path: Path) -> None:
    runs = [("FedLC", 0), ("FedLC+highest", 0)]
    for name, parts in (("threads", [runs]), ("alone", [[run] for run in runs])):
        for part in parts:
            run_here(data, part, Place(tmp_path / name, tmp_path / name), 2, "cpu", FOREVER, **SMALL)
    for arm, seed in runs:
        files = [tmp_path / name / f"{fashion_mnist.stem(arm, seed)}.json" for name in ("threads", "alone")]
        threads, alone = (json.loads(file.read_text())["rounds"] for file in files)
        assert [line["test_loss"] for line in threads] == [line["test_loss"] for line in alone]


def test_figures_are_drawn_of_what_there_is() -> None:
    figure = paired.draw([told(arm, seed, 80.0) for arm in ARMS for seed in (0, 1)])
    assert len(figure.axes) == 3


# -- sharing a GPU ---------------------------------------------------------------------------------


def test_ways_to_share_are_read_and_written() -> None:
    assert Way.parse("mps:12") == Way("mps", 12, 1)
    assert str(Way.parse("processes:12/4")) == "processes:12/4"
    with pytest.raises(SystemExit, match="unknown way"):
        Way.parse("magic:3")


def test_the_time_of_a_round_counts_all_runs() -> None:
    ends = {"a": [10.0, 12.0, 14.0], "b": [11.0, 15.0]}
    assert seconds_per_round(ends) == pytest.approx(1 / (0.5 + 0.25))
    assert seconds_per_round({"a": [10.0, 12.0], "b": [11.0]}) is None


def test_without_mps_processes_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sharing, "_control", lambda: None)
    with sharing.shared_gpu("mps") as environment:
        assert environment == {}
    assert "take turns" in capsys.readouterr().err


@pytest.mark.parametrize("works", [True, False])
def test_the_daemon_is_stopped_whether_it_works_or_not(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A stand-in that writes down how it is called."""
    calls, daemon = tmp_path / "calls", tmp_path / "control"
    daemon.write_text(
        f'#!/bin/sh\necho "$@ $(test -t 0 || cat)" >> {calls}\n'
        f'test -d "$CUDA_MPS_PIPE_DIRECTORY" && exit {0 if works else 1}\n'
    )
    daemon.chmod(0o755)
    monkeypatch.setattr(sharing, "_control", lambda: str(daemon))
    monkeypatch.setattr(sharing, "TRY", "pass")
    with sharing.shared_gpu("auto") as environment:
        assert set(environment) == ({"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"} if works else set())
    assert calls.read_text().split() == ["-d", "quit"]
    assert ("cannot be used here" in capsys.readouterr().err) is not works


def test_a_process_that_fails_is_tried_again_without_sharing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "halting.py").write_text(
        "import os, sys\nprint(sys.argv[1], os.environ.get('SHARED'))\n"
        "sys.exit(int(sys.argv[1] == 'always' or 'SHARED' in os.environ))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = [sharing.Job([name], tmp_path / f"{name}.log") for name in ("once", "always")]
    assert not sharing.run_jobs("halting", jobs, 2, {"SHARED": "1"}, FOREVER)
    assert (tmp_path / "once.log").read_text() == "once 1\nonce None\n"
    assert (tmp_path / "always.log").read_text() == "always 1\nalways None\n"
    late = [sharing.Job(["once"], tmp_path / "late.log")]
    assert sharing.run_jobs("halting", late, 1, {}, time.time())
    assert not (tmp_path / "late.log").exists()


def test_training_needs_none_of_the_commands_libraries() -> None:
    """A machine with a GPU may have torch and little else."""
    unwanted = {"click", "rich", "matplotlib", "sklearn"}
    code = f"import sys, benchmarks.fashion_mnist; print({unwanted} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "set()"
