"""FLFA on Fashion-MNIST in the paper's setting: every host with and without feedback alignment.

100 clients, 10 % of them a round, Dirichlet 0.3, MobileNetV2, 5 local epochs of SGD with momentum 0.9, rate
0.01 (x 0.998 a round), weight decay 1e-3, batches of 64; scored by the mean test accuracy over the last
tenth of the rounds (paper, Sec. 10). Each run is a process of its own that continues from its checkpoint,
so that a GPU lent for minutes at a time is enough.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.machine import progress
from fedsolve import container
from fedsolve.data.datasets import load_dataset
from fedsolve.experiments.figures.lines import ACCURACY, Axis, Series, panels
from fedsolve.experiments.significance import mean_error
from fedsolve.federation.method import exchanges
from fedsolve.gradient import FedAvg, FedAvgM, FedLC
from fedsolve.gradient.watch import Watch

HOSTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (FedAvg, {}),
    "FedAvgM": (FedAvgM, {"server_momentum": 0.4, "server_form": "classic"}),
    "FedLC": (FedLC, {"calibration": 1.0}),
}
FEEDBACK: dict[str, dict[str, Any]] = {"": {}, "+FLFA": {"feedback": "lowest", "feedback_sketch": 4096}}
ARMS = [f"{host}{plus}" for host in HOSTS for plus in FEEDBACK]
CLIENTS, ALPHA = 100, 0.3
CHECKPOINT_EVERY = 5


def method_of(arm: str, rounds: int, seed: int, device: str, **changed: Any) -> Any:
    """The method of an arm, such as "FedLC+FLFA"."""
    host, plus, _ = arm.partition("+")
    kind, own = HOSTS[host]
    setting: dict[str, Any] = {
        "network": "mobilenet_v2",
        "rounds": rounds,
        "participation": 0.1,
        "epochs": 5,
        "batch": 64,
        "rate": 0.01,
        "rate_decay": 0.998,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "track": "drift",
        "device": device,
        "seed": seed,
    }
    return kind(**(setting | own | FEEDBACK["+FLFA" if plus else ""] | changed))


def run_arm(arm: str, seed: int, folder: Path, out: Path, rounds: int, device: str, seconds: float) -> bool:
    """Train one arm, from its checkpoint if there is one, for at most `seconds`; whether it is finished."""
    images, labels, test, truth = pixel_rows(folder)
    owners = fs.partition.dirichlet(labels, CLIENTS, alpha=ALPHA, seed=seed)
    federation = fs.LocalFederation.from_arrays(images, labels, owners, clients=CLIENTS, workers=1)
    method = method_of(arm, rounds, seed, device)
    run = method.start(federation.describe())
    checkpoint = out / f"{_stem(arm)}-{seed}.checkpoint"
    if checkpoint.exists():
        run.restore(container.read(checkpoint), str(checkpoint))
    watch = Watch(test, truth, representation=True)
    started = time.monotonic()
    for record in exchanges(run, federation):
        record.metrics.update(watch(run))
        finished = run.server.round >= rounds and record.kind == "drift"
        due = record.kind == "drift" and run.server.round % CHECKPOINT_EVERY == 0
        late = time.monotonic() - started > seconds and record.kind == "drift"
        if due or late or finished:
            container.write_atomically(checkpoint, run.to_bytes())
        if late:
            break
    (out / f"{_stem(arm)}-{seed}.json").write_text(
        json.dumps(
            {"arm": arm, "seed": seed, "parameters": method.parameters(), "rounds": _rounds(run.history)}
        )
        + "\n"
    )
    return bool(run.server.round >= rounds)


def run_all(
    folder: Path, out: Path, rounds: int, seeds: list[int], device: str, seconds: float, arms: list[str]
) -> list[dict[str, Any]]:
    """All arms and seeds at once, each in a process; the results so far."""
    out.mkdir(parents=True, exist_ok=True)
    processes = {}
    for seed in seeds:
        for arm in arms:
            command = [sys.executable, "-m", "benchmarks", "fashion-mnist", str(folder), "--out", str(out)]
            command += ["--arm", arm, "--seed", str(seed), "--rounds", str(rounds), "--device", device]
            with (out / f"{_stem(arm)}-{seed}.log").open("w") as log:
                started = subprocess.Popen([*command, "--seconds", str(seconds)], stdout=log, stderr=log)
            processes[arm, seed] = started
    for (arm, seed), process in processes.items():
        if process.wait() != 0:
            tail = (out / f"{_stem(arm)}-{seed}.log").read_text()[-2000:]
            progress(f"{arm}, seed {seed}: exit status {process.returncode}\n{tail}")
    return summary(out)


def summary(out: Path) -> list[dict[str, Any]]:
    """One entry per arm: accuracy over the last tenth of the rounds and drift, seed by seed."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*.json")):
        told = json.loads(path.read_text())
        rounds = told["rounds"]
        last = rounds[-max(1, round(0.1 * len(rounds))) :]
        entry = found.setdefault(told["arm"], {"arm": told["arm"], "seeds": []})
        entry["seeds"].append(
            {
                "seed": told["seed"],
                "rounds": len(rounds),
                "accuracy": float(np.mean([r["test_accuracy"] for r in last])),
                "best": max(r["test_accuracy"] for r in rounds),
                "drift": float(np.mean([r["drift"] for r in rounds])),
                "seconds_per_round": float(np.median([r["seconds"] for r in rounds])),
            }
        )
    return [found[arm] for arm in ARMS if arm in found]


def draw(out: Path) -> Any:
    """Test accuracy round by round, with and without feedback alignment; a panel for each host."""
    curves: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for path in sorted(out.glob("*.json")):
        told = json.loads(path.read_text())
        curves[told["arm"]].append([100 * entry["test_accuracy"] for entry in told["rounds"]])
    groups = []
    for host in HOSTS:
        series = []
        for look, (plus, words) in enumerate((("", "without"), ("+FLFA", "with feedback alignment"))):
            found = [mean_error(values) for values in zip(*curves[host + plus], strict=False)]
            means, errors = tuple(mean for mean, _ in found), tuple(error for _, error in found)
            series.append(Series(words, look, tuple(range(1, len(found) + 1)), means, errors))
        groups.append((host, series))
    return panels(groups, Axis("round", whole=True), Axis(ACCURACY))


def _rounds(history: Any) -> list[dict[str, Any]]:
    """One flat entry per round, without the cohorts."""
    rounds: list[dict[str, Any]] = []
    for record in history:
        if record.kind == "train":
            rounds.append(
                {
                    "seconds": round(record.seconds, 3),
                    "bytes_up": record.bytes_up,
                    "bytes_down": record.bytes_down,
                }
                | {name: _short(value) for name, value in record.metrics.items()}
            )
        elif record.kind == "drift":
            rounds[-1]["drift"] = _short(record.metrics["drift"])
    return rounds


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return {name: _short(v) for name, v in value.items()} if isinstance(value, dict) else value


def pixel_rows(folder: Path) -> tuple[Any, Any, Any, Any]:
    """Training and test images as rows of bytes, with labels."""
    dataset = load_dataset("fashion-mnist", folder)
    parts = []
    for split in (dataset.train, dataset.test):
        images = np.stack(split.inputs.read(slice(None)))
        parts += [images.reshape(len(images), -1), np.asarray(split.labels)]
    return parts[0], parts[1], parts[2], parts[3]


def _stem(arm: str) -> str:
    return arm.lower().replace("+", "-")
