"""FLFA on Fashion-MNIST in the paper's setting: hosts with and without feedback alignment, paired by seed.

`docs/experiment-flfa.md` has the question, the fixed settings and the rule of decision. Every run continues
from its checkpoint, and the command ends by itself after --seconds, so that a GPU lent for minutes at a time
is enough. Training needs numpy, scipy and torch alone: `python -m benchmarks.fashion_mnist` is the same
command as `python -m benchmarks fashion-mnist`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.paired import ARMS, FIRST, LAST, ROUNDS, draw, report, results
from benchmarks.sharing import Job, run_jobs, shared_gpu, tell
from fedsolve import container
from fedsolve.data.datasets import load_dataset
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg, FedAvgM, FedLC
from fedsolve.gradient.watch import Watch

HOSTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedLC": (FedLC, {"calibration": 1.0}),
    "FedAvgM-classic": (FedAvgM, {"server_momentum": 0.4, "server_form": "classic"}),
    "FedAvgM-damped": (FedAvgM, {"server_momentum": 0.1, "server_form": "damped"}),
    "FedAvg": (FedAvg, {}),
}
CLIENTS, ALPHA = 100, 0.3
CHECKPOINT_EVERY = 10
SETTING: dict[str, Any] = {
    "network": "mobilenet_v2",
    "participation": 0.1,
    "epochs": 5,
    "batch": 64,
    "rate": 0.01,
    "rate_decay": 0.998,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "crop": 2,
    "flip": 0.5,
    "pixel_mean": "0.2860",
    "pixel_deviation": "0.3530",
}
AUTHORS = {"network": "mobilenet_v2:stock", "crop": 4, "last_batch": "drop"}
SETTINGS: dict[str, dict[str, Any]] = {
    "protocol": {},
    # BatchNorm's statistics have momentum too (FedAvgM), the score is exact, and every client fills a batch.
    "authors": AUTHORS | {"server_statistics": True, "feedback_sketch": 0},
    "long": {"epochs": 15},
}
"""What a setting of the page changes."""
WAYS = "processes:1,processes:12,mps:12,mps:16,processes:12/4"
MODULE = "benchmarks.fashion_mnist"


def method_of(arm: str, rounds: int, seed: int, **changed: Any) -> Any:
    """The method of an arm, such as "FedLC+lowest"."""
    host, _, choice = arm.partition("+")
    kind, own = HOSTS[host]
    feedback = {"feedback": choice, "feedback_first": True} if choice else {}
    named = {"rounds": rounds, "seed": seed}
    known = {field.name for field in fields(kind)}
    changed = {name: value for name, value in changed.items() if name in known}
    return kind(**(SETTING | named | own | feedback | changed))


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images as rows of bytes, and labels, of the training and test part."""

    images: Any
    labels: Any
    test: Any
    truth: Any


def load(folder: Path, limit: int | None = None) -> Data:
    """The whole dataset, or only its first images."""
    return Data(*(part[:limit] for part in pixel_rows(folder)))


def pixel_rows(folder: Path) -> tuple[Any, Any, Any, Any]:
    """Training and test images as rows of bytes, with labels."""
    dataset = load_dataset("fashion-mnist", folder)
    parts = []
    for split in (dataset.train, dataset.test):
        images = np.stack(split.inputs.read(slice(None)))
        parts += [images.reshape(len(images), -1), np.asarray(split.labels)]
    return parts[0], parts[1], parts[2], parts[3]


def federation_of(data: Data, seed: int, device: str = "cpu", workers: int = 1, authors: bool = False) -> Any:
    """The paper's clients, so many side by side: the partition follows the seed."""
    more: dict[str, Any] = {"capped": True, "min_size": SETTING["batch"]} if authors else {}
    owners = fs.partition.dirichlet(data.labels, CLIENTS, alpha=ALPHA, seed=seed, **more)
    return fs.LocalFederation.from_arrays(
        data.images, data.labels, owners, CLIENTS, workers=workers, device=device
    )


@dataclass(frozen=True)
class Place:
    """Where runs leave their results, where their checkpoints and logs are, and how they use the machine.

    workers: clients of a run that train side by side.
    """

    out: Path
    work: Path
    workers: int = 1

    def make(self) -> None:
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)


def run_arm(
    data: Data, arm: str, seed: int, place: Place, rounds: int, device: str, until: float, **changed: Any
) -> bool:
    """Train one arm, from its checkpoint if there is one, until `time.time()`; whether it is finished."""
    federation = federation_of(data, seed, device, place.workers, authors="last_batch" in changed)
    method = method_of(arm, rounds, seed, **changed)
    run = method.start(federation.describe())
    checkpoint = place.work / f"{stem(arm, seed)}.checkpoint"
    if checkpoint.exists():
        run.restore(container.read(checkpoint), str(checkpoint))
    watch = Watch(data.test, data.truth)
    before = time.time()
    for record in exchanges(run, federation):
        record.metrics.update(watch.measured(run))
        now = time.time()
        accuracy = record.metrics["test_accuracy"]
        print(f"ROUND {arm} {seed} {run.server.round} {now:.2f} {accuracy:.4f}", flush=True)
        # The next round takes about as long as this one, and a checkpoint has to be written after it.
        late = now + 1.3 * (now - before) + 2 > until
        finished = run.server.round >= rounds
        if finished or late or run.server.round % CHECKPOINT_EVERY == 0:
            container.write_atomically(checkpoint, run.to_bytes())
        if late:
            break
        before = now
    result = result_of(arm, seed, method.parameters(), run.history)
    (place.out / f"{stem(arm, seed)}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    return bool(run.server.round >= rounds)


def result_of(arm: str, seed: int, parameters: dict[str, Any], history: Sequence[Any]) -> dict[str, Any]:
    """What is kept of a run: parameters, traffic of its last round, and a line for every round."""
    rounds = []
    for record in history:
        metrics = record.metrics
        line: dict[str, Any] = {name: _short(metrics[name]) for name in KEPT if name in metrics}
        scores = metrics.get("alignment")
        if scores:
            ends = [min(scores, key=scores.get), max(scores, key=scores.get)]
            line["alignment"] = {layer: _short(scores[layer]) for layer in ends}
        rounds.append(line | {"seconds": round(record.seconds, 2)})
    last = history[-1]
    traffic = {"bytes_up": last.bytes_up, "bytes_down": last.bytes_down}
    return {"arm": arm, "seed": seed, "parameters": parameters} | traffic | {"rounds": rounds}


KEPT = ("round", "test_accuracy", "test_loss", "loss", "local_accuracy", "feedback")


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def stem(arm: str, seed: int) -> str:
    return f"{arm.lower().replace('+', '-')}-{seed}"


def run_here(
    data: Data,
    runs: Sequence[tuple[str, int]],
    place: Place,
    rounds: int,
    device: str,
    until: float,
    **changed: Any,
) -> None:
    """Runs in this process: several as threads, whose clients train side by side on a GPU."""
    place.make()
    if len(runs) == 1:
        ((arm, seed),) = runs
        run_arm(data, arm, seed, place, rounds, device, until, **changed)
        return

    def one(arm: str, seed: int) -> bool:
        return run_arm(data, arm, seed, place, rounds, device, until, **changed)

    with ThreadPoolExecutor(len(runs)) as pool:
        for done in [pool.submit(one, arm, seed) for arm, seed in runs]:
            done.result()


def run_all(
    given: argparse.Namespace, runs: Sequence[tuple[str, int]], place: Place, until: float, way: Way
) -> tuple[bool, bool]:
    """All runs in processes that share the GPU in this way; whether none failed, and whether MPS was used.

    given: the command's arguments, of which data, rounds, device, setting, network and limit count.
    """
    place.make()
    jobs = []
    for first in range(0, len(runs), way.threads):
        together = runs[first : first + way.threads]
        words = [str(given.data), "--out", str(place.out), "--work", str(place.work)]
        words += ["--until", f"{until:.1f}", "--workers", str(place.workers)]
        for name in ("rounds", "device", "setting", "network", "limit"):
            if getattr(given, name) is not None:
                words += [f"--{name}", str(getattr(given, name))]
        words += ["--runs", ",".join(f"{arm}:{seed}" for arm, seed in together)]
        jobs.append(Job(words, place.work / f"{stem(*together[0])}.log"))
    for job in jobs:
        job.log.unlink(missing_ok=True)
    with shared_gpu(way.kind) as sharing:
        return run_jobs(MODULE, jobs, max(1, way.runs // way.threads), sharing, until), bool(sharing)


def unfinished(out: Path, arms: Sequence[str], seeds: Sequence[int], rounds: int) -> list[tuple[str, int]]:
    """Runs that have not all their rounds yet, seed after seed."""

    def done(arm: str, seed: int) -> bool:
        path = out / f"{stem(arm, seed)}.json"
        return path.exists() and len(json.loads(path.read_text())["rounds"]) >= rounds

    return [(arm, seed) for seed in seeds for arm in arms if not done(arm, seed)]


# -- ways to share a GPU ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How runs share a GPU: by MPS or as processes that take turns, how many at once, threads of each."""

    kind: str
    runs: int
    threads: int = 1

    @classmethod
    def parse(cls, text: str) -> Way:
        """`mps:12`, or `processes:12/4` for three processes of four threads."""
        kind, _, sizes = text.partition(":")
        runs, _, threads = sizes.partition("/")
        if kind not in ("mps", "processes", "auto"):
            raise SystemExit(f"unknown way to share a GPU: {text!r}. Say mps:12, processes:12 or mps:12/4.")
        return cls(kind, int(runs or 12), int(threads or 1))

    def __str__(self) -> str:
        return f"{self.kind}:{self.runs}" + (f"/{self.threads}" if self.threads > 1 else "")


def trial(given: argparse.Namespace, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Seconds per run and round of each way to share the GPU, within the seconds given for all."""
    shares = [0.4 if way.runs == 1 else 1.0 for way in ways]
    found = []
    for number, (way, share) in enumerate(zip(ways, shares, strict=True)):
        until = time.time() + given.seconds * share / sum(shares)
        place = Place(given.out / f"way-{number}", given.out / f"way-{number}", given.workers)
        runs = [(ARMS[index % 2], index // 2) for index in range(way.runs)]
        whole, mps = run_all(given, runs, place, until, way)
        ends = _round_ends("\n".join(path.read_text() for path in place.work.glob("*.log")))
        each = seconds_per_round(ends)
        found.append(
            {
                "way": str(way),
                "mps": mps,
                "rounds": sum(map(len, ends.values())),
                "seconds": each,
                "digest": _digest(place.out),
                "failed": not whole,
            }
        )
        told = "too few rounds" if each is None else f"{each:.3f} s per run and round"
        tell(f"{way}: {told}; {found[-1]['rounds']} rounds{'' if whole else ', with failures'}")
        for checkpoint in place.work.glob("*.checkpoint"):
            checkpoint.unlink()
    return found


def _round_ends(text: str) -> dict[str, list[float]]:
    """When each run's rounds ended, from what the runs print."""
    ends: dict[str, list[float]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 6 and words[0] == "ROUND":
            ends.setdefault(f"{words[1]}:{words[2]}", []).append(float(words[4]))
    return ends


def seconds_per_round(ends: dict[str, list[float]]) -> float | None:
    """One over the rounds that all runs make in a second, the first of each, with all start-up, left out."""
    rates = [(len(times) - 1) / (times[-1] - times[0]) for times in ends.values() if len(times) > 1]
    return 1 / sum(rates) if rates and len(rates) == len(ends) else None


def _digest(out: Path) -> str:
    """The first run's accuracies, to see that all ways train alike."""
    path = out / f"{stem(ARMS[0], 0)}.json"
    if not path.exists():
        return ""
    return " ".join(f"{line['test_accuracy']:.4f}" for line in json.loads(path.read_text())["rounds"][:3])


def profile(data: Data, device: str, **changed: Any) -> str:
    """The kernels that a round of FedLC+lowest spends its time on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    federation = federation_of(data, 0, device)
    run = method_of("FedLC+lowest", 3, 0, **changed).start(federation.describe())
    rounds = exchanges(run, federation)
    next(rounds)
    started = time.time()
    next(rounds)
    plain = time.time() - started
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        next(rounds)
    order = "self_cuda_time_total" if device != "cpu" else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)
    return f"{table}\na round by itself: {plain:.2f} s"


# -- the command -----------------------------------------------------------------------------------


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="folder with Fashion-MNIST's idx files")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--work", type=Path, help="folder for checkpoints and logs; that for results")
    parser.add_argument("--arm", action="append", choices=[*ARMS], help="only these; all of the protocol")
    parser.add_argument("--setting", choices=[*SETTINGS], default="protocol", help="of the page")
    parser.add_argument("--seeds", default="0,1,2,3,4,5")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="end by then; the same command goes on")
    parser.add_argument(
        "--share", default="auto:12", help="mps:12, processes:12, mps:12/4 (threads), auto:12"
    )
    parser.add_argument("--workers", type=int, default=1, help="clients of a run that train side by side")
    parser.add_argument("--trial", action="store_true", help="time each of --ways to share the GPU")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--profile", action="store_true", help="show the kernels of a round")
    parser.add_argument("--table", action="store_true", help="train nothing: tell what OUT holds")
    parser.add_argument("--score", default=f"{FIRST}-{LAST}", help="rounds of the score, counted from 1")
    parser.add_argument("--figure", type=Path, help="draw the curves (PNG)")
    parser.add_argument("--network", help="another network, to try the command on a processor")
    parser.add_argument("--limit", type=int, help="only the first images, likewise")
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.data is None and not given.table:
        parser.error("name the folder with Fashion-MNIST (DATA), or tell results with --table.")
    return given


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    # What is started here, such as the daemon of MPS, is stopped when the command is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = time.time()
    given = arguments(words)
    place = Place(given.out, given.work or given.out, given.workers)
    changed = SETTINGS[given.setting] | ({} if given.network is None else {"network": given.network})
    if given.runs is not None:
        runs = [(arm, int(seed)) for arm, _, seed in (run.rpartition(":") for run in given.runs.split(","))]
        data = load(given.data, given.limit)
        run_here(data, runs, place, given.rounds, given.device, given.until, **changed)
        return
    if given.profile:
        print(profile(load(given.data, given.limit), given.device, **changed))
        return
    if given.trial:
        ways = [Way.parse(text) for text in given.ways.split(",")]
        told = trial(given, ways)
        (given.out / "trial.txt").write_text(json.dumps(told, indent=1) + "\n")
        print(json.dumps(told, indent=1))
        return
    if not given.table:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        runs = unfinished(given.out, given.arm or ARMS, seeds, given.rounds)
        tell(f"{len(runs)} runs to do")
        run_all(given, runs, place, started + given.seconds, Way.parse(given.share))
    told = results(given.out)
    first, last = (int(number) for number in given.score.split("-"))
    print(report(told, first, last))
    if given.figure is not None:
        from fedsolve.pages.plots import render

        given.figure.write_bytes(render(draw(told), "png"))


if __name__ == "__main__":
    main()
