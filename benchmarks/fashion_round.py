"""What feedback alignment changes in one round: every layer in turn, beside reshuffled batches.

    python -m benchmarks.fashion_round DIR --out OUT --seconds 560 --device cuda  # resumes when repeated
    python -m benchmarks.fashion_round --out OUT --table

`docs/experiment-flfa.md` has the protocol. One process trains FedAvg for each seed and leaves its server's
weights after some rounds. Others take those weights and train one round more, again and again: as it is, with
the batches of the same clients in another order, and with feedback alignment in each layer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fashion_mnist import Data, federation_of, load, method_of
from benchmarks.sharing import Job, run_jobs, shared_gpu, tell
from fedsolve import container
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient.run import cohort_of
from fedsolve.gradient.watch import Watch

MODULE = "benchmarks.fashion_round"
ROUNDS = (10, 30, 50)
SEEDS = (0, 1, 2)
RESHUFFLINGS = 20
BASE, RESHUFFLED = "base", "reshuffled"


def weights_file(out: Path, seed: int, rounds: int) -> Path:
    return out / f"weights-{seed}-{rounds}"


def result_file(out: Path, seed: int, rounds: int) -> Path:
    return out / f"round-{seed}-{rounds}.jsonl"


def train(
    data: Data, seed: int, out: Path, device: str, until: float, rounds: Sequence[int], **changed: Any
) -> None:
    """FedAvg from the last weights that were left; the server's weights after some rounds."""
    federation = federation_of(data, seed, device)
    run = method_of("FedAvg", max(rounds), seed, **changed).start(federation.describe())
    checkpoint = out / f"checkpoint-{seed}"
    if checkpoint.exists():
        run.restore(container.read(checkpoint), str(checkpoint))
    for _ in exchanges(run, federation):
        done = run.server.round
        print(f"ROUND {seed} {done} {time.time():.1f}", flush=True)
        if done in rounds:
            arrays = {f"w.{name}": array for name, array in run.server.weights.items()}
            arrays |= {f"b.{name}": array for name, array in run.server.buffers.items()}
            container.write_atomically(weights_file(out, seed, done), container.to_bytes(arrays, {}))
        late = time.time() + 10 > until
        if late or done % 10 == 0:
            container.write_atomically(checkpoint, run.to_bytes())
        if late:
            return


def one_round(
    data: Data, seed: int, rounds: int, start: Any, federation: Any, shuffle: int, **changed: Any
) -> Any:
    """The run after one round from these weights; another `shuffle` draws other batches."""
    method = method_of("FedAvg", rounds + 1, seed, track="drift", **changed)
    cohort = cohort_of(method, federation.clients, rounds)
    if shuffle:
        method = method_of("FedAvg", rounds + 1, 1000 * shuffle + seed, track="drift", **changed)
    run = method.start(federation.describe())
    server = run.server
    server.weights = {name: start[f"w.{name}"] for name in server.weights}
    server.buffers = {name: start[f"b.{name}"] for name in server.buffers}
    # The cohort is that of the round, whatever the seed of the batches.
    server.round, server.clients, server.cohort = rounds, len(federation.clients), cohort
    run._phase = "train"
    next(iter(exchanges(run, federation)))
    return run


def look(data: Data, seed: int, rounds: int, out: Path, device: str, until: float, **changed: Any) -> None:
    """All the rounds from one checkpoint, as soon as it is there; one line of JSON for each."""
    path = weights_file(out, seed, rounds)
    while not path.exists():
        if time.time() + 30 > until:
            return
        time.sleep(1)
    start, _ = container.from_bytes(container.read(path), what=str(path), error=ValueError)
    federation = federation_of(data, seed, device)
    watch = Watch(data.test, data.truth)
    results = result_file(out, seed, rounds)
    before = {line["name"]: line for line in lines_of(results)}
    base: dict[str, Any] = {}
    took = 0.0
    for name, shuffle, feedback in variants(data, federation, seed, **changed):
        began = time.time()
        if began + 1.5 * took + 5 > until:
            return
        if name in before and name != BASE:
            continue
        options = changed | ({"feedback": feedback} if feedback else {})
        run = one_round(data, seed, rounds, start, federation, shuffle, **options)
        after = run.server.weights
        base = base or after
        moved = distance(base, {key: start[f"w.{key}"] for key in base})
        line = {
            "name": name,
            "accuracy": watch_accuracy(run, watch),
            "drift": run.history[-1].metrics["mean_squared_drift"],
            "change": distance(after, base) / moved,
        }
        took = time.time() - began
        if name in before and any(value != before[name][key] for key, value in line.items()):
            # What other code or another machine measured does not mix with this; it is kept beside it.
            results.rename(results.with_suffix(".before"))
            before = {}
        if name not in before:
            with results.open("a") as file:
                file.write(json.dumps(line | {"seconds": round(took, 2)}) + "\n")


def watch_accuracy(run: Any, watch: Watch) -> float:
    """Test accuracy of the mean of the local models."""
    model = run.targets()["aggregated"]
    return float(np.mean(model.predict(watch.features) == watch.labels))


def variants(data: Data, federation: Any, seed: int, **changed: Any) -> Iterator[tuple[str, int, str]]:
    """Name, number of the reshuffling and layer of every round; shuffled ones and layers by turns."""
    yield BASE, 0, ""
    chosen = method_of("FedAvg", 1, seed, feedback="lowest", **changed).start(federation.describe()).layers
    for place in range(max(RESHUFFLINGS, len(chosen))):
        if place < RESHUFFLINGS:
            yield f"{RESHUFFLED} {place}", place + 1, ""
        if place < len(chosen):
            yield chosen[place], 0, chosen[place]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.sum((one[name] - other[name]) ** 2)) for name in one))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- what came out -----------------------------------------------------------------------------------


def table(out: Path) -> str:
    """For each seed and checkpoint: layers beside reshufflings; then the mean over all of them."""
    rows = [
        "| seed | round | layers | accuracy, base | layers - base | reshuffled - base | layers outside "
        "| drift / base | the same, reshuffled | change | the same, reshuffled |",
        "|" + "---:|" * 11,
    ]
    means: dict[str, list[float]] = defaultdict(list)
    for path in sorted(out.glob("round-*.jsonl")):
        _, seed, rounds = path.stem.split("-")
        lines = lines_of(path)
        (base,) = [line for line in lines if line["name"] == BASE]
        shuffled = [line for line in lines if line["name"].startswith(RESHUFFLED)]
        layers = [line for line in lines if line is not base and line not in shuffled]
        if not shuffled or not layers:
            continue

        def differences(some: list[dict[str, Any]], base: Any = base) -> Any:
            return 100 * np.array([line["accuracy"] - base["accuracy"] for line in some])

        mine, theirs = differences(layers), differences(shuffled)
        # A band of two deviations around the mean of the reshufflings, for one more draw.
        middle, width = theirs.mean(), 2.093 * theirs.std(ddof=1) * math.sqrt(1 + 1 / len(theirs))
        outside = float(np.mean(np.abs(mine - middle) > width))
        drift = [np.mean([line["drift"] / base["drift"] for line in some]) for some in (layers, shuffled)]
        change = [np.median([line["change"] for line in some]) for some in (layers, shuffled)]
        for name, value in (
            ("accuracy", mine.mean() - theirs.mean()),
            ("drift", drift[0] - drift[1]),
            ("outside", outside),
            ("change", change[0] / change[1]),
        ):
            means[name].append(float(value))
        rows.append(
            f"| {seed} | {rounds} | {len(layers)} | {100 * base['accuracy']:.2f} | {mine.mean():+.2f} | "
            f"{theirs.mean():+.2f} ± {theirs.std(ddof=1):.2f} | {100 * outside:.0f} % | {drift[0]:.4f} | "
            f"{drift[1]:.4f} | {change[0]:.3f} | {change[1]:.3f} |"
        )
    rows.append("")
    for name, values in means.items():
        half = 2.306 * np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        rows.append(
            f"{name}: {np.mean(values):+.4f} ({np.mean(values) - half:+.4f} to {np.mean(values) + half:+.4f})"
        )
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", default="auto")
    parser.add_argument("--at-once", type=int, default=12, help="processes")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--network", help="another network, to try the command on a processor")
    parser.add_argument("--limit", type=int, help="only the first images, likewise")
    parser.add_argument("--rounds", default=",".join(map(str, ROUNDS)))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    rounds, seeds = ([int(number) for number in text.split(",")] for text in (given.rounds, given.seeds))
    changed = {} if given.network is None else {"network": given.network}
    if given.job:
        seed, until = (int(number) for number in given.job.split(","))
        data = load(given.data, given.limit)
        if until:
            look(data, seed, until, given.out, given.device, given.until, **changed)
        else:
            train(data, seed, given.out, given.device, given.until, rounds, **changed)
        return
    if not given.table:
        given.out.mkdir(parents=True, exist_ok=True)
        end = time.time() + given.seconds
        trained = {seed: all(weights_file(given.out, seed, n).exists() for n in rounds) for seed in seeds}
        # Those that train come first: the others wait for their weights.
        pairs = [(seed, 0) for seed in seeds if not trained[seed]]
        pairs += [(seed, number) for number in rounds for seed in seeds]
        jobs = []
        for seed, after in pairs:
            own = ["--job", f"{seed},{after}", "--until", f"{end:.1f}", "--out", str(given.out)]
            for name in ("device", "network", "limit", "rounds"):
                if getattr(given, name) is not None:
                    own += [f"--{name}", str(getattr(given, name))]
            jobs.append(Job([str(given.data), *own], given.out / f"job-{seed}-{after}.log"))
        tell(f"{len(jobs)} processes")
        with shared_gpu(given.share) as sharing:
            run_jobs(MODULE, jobs, given.at_once, sharing, end)
    print(table(given.out))


if __name__ == "__main__":
    main()
