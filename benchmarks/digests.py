# ruff: noqa: E402  (numbers of threads are set before numpy and torch are loaded)
"""SHA-256 digests of a fixed set of trained models, to show that a refactoring changed no result.

    python -m benchmarks.digests --out before.json [--network]       train everything, write the digests
    python -m benchmarks.digests --compare before.json [--network]   train again, print a table; 1: differ

    --only TEXT    only models whose name contains TEXT (may be repeated)
    --network      also models of `fedsolve server` and three `fedsolve client` on 127.0.0.1

The file holds {name: {"arrays": {array name: sha256}, "predictions": sha256, "scores": sha256}}. A digest
covers dtype, shape and bytes. It is that of one machine and one set of libraries: compare where it was
written, with nothing but fedsolve exchanged. Only public names and the command line are used.
"""

from __future__ import annotations

import os

THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(THREADS)  # before numpy and torch are loaded

import argparse
import hashlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import fedsolve as fs

Digest = dict[str, Any]
NETWORK = "network/"
PATIENCE = 300.0

DEEP: dict[str, Any] = {"layers": 3, "width": 128}
APFL: dict[str, Any] = {"width": 128, "refinement_width": 96}
NET: dict[str, Any] = {"network": "mlp:32", "rounds": 3, "epochs": 5, "batch": 16, "rate": 0.1}
IMAGES: dict[str, Any] = {
    "network": "cnn",
    "shape": "1,8,8",
    "rounds": 3,
    "epochs": 4,
    "batch": 16,
    "rate": 0.1,
}


# -- data ----------------------------------------------------------------------------------------------------


class Data:
    """scikit-learn's digits: 1,400 rows to train on, the rest to test; 10 clients by Dirichlet 0.1."""

    def __init__(self) -> None:
        features, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        # Fifteenths are rounded. Sums of products of whole numbers or sixteenths are exact, so that a sum
        # in another order would not show.
        features, labels = features[order] / 15.0, labels[order]
        self.x, self.y = features[:1400], labels[:1400]
        self.test = features[1400:]
        self.owners = fs.partition.dirichlet(self.y, clients=10, alpha=0.1, seed=0)
        sizes = np.bincount(self.owners, minlength=10)
        # One that has many rows, and one that has few.
        self.large = f"client-{int(np.argmax(sizes))}"
        self.small = f"client-{int(np.argmin(np.where(sizes > 0, sizes, len(labels))))}"

    def federation(self, **options: Any) -> fs.LocalFederation:
        """A new one every time, so that no run finds what another one left."""
        return fs.LocalFederation.from_arrays(self.x, self.y, self.owners, 10, **options)


@cache
def data() -> Data:
    return Data()


# -- digests -------------------------------------------------------------------------------------------------


def digest(values: Any) -> str:
    array = np.ascontiguousarray(values)
    sha = hashlib.sha256(f"{array.dtype.str}|{array.shape}|".encode())
    sha.update(array.tobytes())
    return sha.hexdigest()


def digests(model: Any, predictor: Any = None) -> Digest:
    """Those of a model; `predictor`: what predicts where that is not the model, such as an estimator."""
    predictor = model if predictor is None else predictor
    # A regressor has no decision function of its own.
    scores = predictor if hasattr(predictor, "decision_function") else model
    return {
        "arrays": {name: digest(array) for name, array in sorted(model.contents()[0].items())},
        "predictions": digest(predictor.predict(data().test)),
        "scores": digest(scores.decision_function(data().test)),
    }


# -- models in one process: each function yields (suffix of the name, digests) -------------------------------

Found = Iterable[tuple[str, Digest]]
Task = Callable[[], Found]


def shared(method: Any, **options: Any) -> Found:
    yield "", digests(method().fit(data().federation(**options)))


def personal(method: Any) -> Found:
    """The shared model, and those of two clients."""
    model = method().fit(data().federation())
    yield "", digests(model)
    for which in ("large", "small"):
        yield f" personal {which}", digests(model.personal(getattr(data(), which)))


def apfl_alone() -> Found:
    model = fs.APFL(**APFL).fit(data().federation()).alone()
    yield "", digests(model)
    yield " personal large", digests(model.personal(data().large))


def apfl_over(method: Any) -> Found:
    """Refinements over another method's model, made by the participants."""
    federation = data().federation()
    model = fs.APFL(**APFL, refinement_ridge="auto", balance="auto").over(method().fit(federation))
    yield "", digests(model)
    participants = {participant.name: participant for participant in federation.participants}
    yield " personal large", digests(participants[data().large].personalise(model))


def saved(method: Any) -> Found:
    """A model that was written and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        method().fit(data().federation()).save(path)
        yield "", digests(fs.load_model(path))


class Stopped(Exception):
    """Raised after an exchange, as if the process had been killed."""


def resumed(method: Any) -> Found:
    """A run that was stopped after its second exchange, and finished from the checkpoint by new clients."""

    def stop(record: Any, expected: int) -> None:
        if record.exchange == 1:
            raise Stopped

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        with suppress(Stopped):
            method().fit(data().federation(), checkpoint=path, follow=stop)
            raise RuntimeError("the run was not stopped: it has fewer than two exchanges")
        model = method().fit(data().federation(), checkpoint=path, resume=True)
        yield "", digests(model)
        if model.personalises:
            yield " personal large", digests(model.personal(data().large))


def estimator(kind: str, **parameters: Any) -> Found:
    made = getattr(fs, kind)(**parameters)
    target = data().y if "Classifier" in kind else np.column_stack([data().y, data().y ** 2 / 9.0])
    made.fit(data().x, target)
    yield "", digests(made.model_, made)


def in_batches() -> Found:
    made = fs.AFLClassifier(ridge=1.0)
    for rows in np.array_split(np.arange(len(data().x)), 3):
        made.partial_fit(data().x[rows], data().y[rows], classes=np.arange(10))
    yield "", digests(made.model_, made)


def secured(method: Any) -> Found:
    """Trained from secure sums in this process."""
    federation = fs.privacy.SecureFederation(data().federation())
    yield "", digests(method().fit(federation))


def in_ray(method: Any) -> Found:
    """Trained by two workers of a Ray cluster of its own."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        federation = fs.RayFederation.from_arrays(data().x, data().y, data().owners, 10, workers=2)
        yield "", digests(method().fit(federation))
    finally:
        ray.shutdown()


TABLE_ROWS = 600


def write_table(path: Path) -> None:
    """A table as hospitals have it: numbers with gaps, a category, a date, an owner and an outcome."""
    random = np.random.default_rng(5)
    age = random.integers(18, 91, TABLE_ROWS)
    sugar = np.round(random.normal(5.5, 1.2, TABLE_ROWS), 2)
    ward = random.choice(["medicine", "surgery", "intensive care"], TABLE_ROWS)
    day = random.integers(0, 900, TABLE_ROWS)
    risk = (
        0.05 * (age - 50)
        + 0.8 * (sugar - 5.5)
        + (ward == "intensive care")
        + random.logistic(size=TABLE_ROWS)
    )
    lines = ["age,sugar,ward,admitted,hospital,outcome"]
    for row in range(TABLE_ROWS):
        admitted = np.datetime64("2021-01-01") + int(day[row])
        shown = "" if random.random() < 0.1 else f"{sugar[row]}"
        outcome = "died" if risk[row] > 1 else "alive"
        lines.append(f"{age[row]},{shown},{ward[row]},{admitted},{'nsw'[row % 3]},{outcome}")
    path.write_text("\n".join(lines) + "\n")


def table_command(*words: Any) -> Found:
    """`fedsolve train` on such a table with the schema that `fedsolve schema` proposes."""
    with tempfile.TemporaryDirectory() as folder:
        path, schema, out = (Path(folder, name) for name in ("table.csv", "schema.toml", "model.safetensors"))
        write_table(path)
        for line in (
            ("schema", path, "--label", "outcome", "--client-column", "hospital", "--out", schema),
            ("train", path, "--schema", schema, "--out", out, *words),
        ):
            done = subprocess.run(command(*line), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr}")
        arrays = fs.load_model(out).contents()[0]
        named = {name: digest(array) for name, array in sorted(arrays.items())}
        yield "", {"arrays": named, "predictions": together(named), "scores": together(named)}


def own_network() -> Found:
    """A torch module of the user's own, with BatchNorm: buffers are averaged."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    yield from shared(partial(fs.gradient.FedAvg, **NET | {"network": module}))


def local_tasks() -> dict[str, Task]:
    tasks: dict[str, Task] = {}

    def add(name: str, how: Callable[..., Found], make: Any, **parameters: Any) -> None:
        tasks[name] = partial(how, partial(make, **parameters))

    add("afl ridge 0", shared, fs.AFL)
    add("afl ridge 1", shared, fs.AFL, ridge=1.0)
    add("afl scale standard", shared, fs.AFL, ridge=1.0, scale="standard")
    add("afl intercept", shared, fs.AFL, ridge=1.0, intercept=True)
    add("afl scale standard intercept", shared, fs.AFL, ridge=1.0, scale="standard", intercept=True)
    add("afl read from file", saved, fs.AFL, ridge=1.0)

    for plan in ("textbook", "lean", "single"):
        add(f"deepafl {plan}", shared, fs.DeepAFL, **DEEP, exchange=plan)
        add(f"deepafl {plan} participation 0.5", shared, fs.DeepAFL, **DEEP, exchange=plan, participation=0.5)
        add(f"deepafl {plan} float32", shared, fs.DeepAFL, **DEEP, exchange=plan, precision="float32")
    variants: dict[str, dict[str, Any]] = {
        "auto": {},
        "block_input initial": {"block_input": "initial"},
        "no skip": {"skip": False},
        "projection identity": {"projection": "identity"},
        "transformation identity": {"transformation": "identity"},
        "reconstruction 0.3": {"reconstruction": 0.3},
        "activation none": {"activation": "none"},
        "hidden_width 80": {"hidden_width": 80},
        "inconsistent participation 0.5": {"participation": 0.5, "consistent": False},
        "scale standard": {"scale": "standard"},
        "intercept": {"intercept": True},
        "track accuracy": {"track": "accuracy"},
        "seed 7 gain 0.5": {"seed": 7, "gain": 0.5},
    }
    for name, parameters in variants.items():
        add(f"deepafl {name}", shared, fs.DeepAFL, **DEEP, **parameters)
    add("deepafl read from file", saved, fs.DeepAFL, **DEEP)
    for plan in ("textbook", "lean", "single"):
        add(f"deepafl {plan} resumed", resumed, fs.DeepAFL, **DEEP, exchange=plan)
    # Clients may keep nothing in memory: features are mapped from files.
    tasks["deepafl memory_budget 0"] = partial(shared, partial(fs.DeepAFL, **DEEP), memory_budget=0)
    for strategy in (1, 2, 3, 4):
        add(f"cascade strategy {strategy}", shared, fs.Cascade, **DEEP, strategy=strategy)

    add("apfl", personal, fs.APFL, **APFL)
    add("apfl refinement_ridge auto", personal, fs.APFL, **APFL, refinement_ridge="auto")
    add("apfl all auto", personal, fs.APFL, **APFL, refinement_ridge="auto", balance="auto")
    add("apfl scale standard intercept", personal, fs.APFL, **APFL, scale="standard", intercept=True)
    add("apfl layers 2", personal, fs.APFL, **APFL, layers=2)
    add("apfl layers 2 resumed", resumed, fs.APFL, **APFL, layers=2)
    add("apfl read from file", saved, fs.APFL, **APFL)
    tasks["apfl alone"] = apfl_alone
    tasks["apfl over deepafl"] = partial(apfl_over, partial(fs.DeepAFL, **DEEP))
    tasks["apfl over fedavg"] = partial(apfl_over, partial(fs.gradient.FedAvg, **NET))

    for name in ("AFLClassifier", "AFLRegressor"):
        tasks[name] = partial(estimator, name, ridge=1.0)
        tasks[f"{name} no intercept"] = partial(estimator, name, ridge=1.0, fit_intercept=False)
    # What was the default before settings were chosen.
    given = {"layers": 2, "width": 64, "ridge": 10.0, "residual_ridge": 1.0, "gain": 1.0, "scale": "standard"}
    for name in ("DeepAFLClassifier", "DeepAFLRegressor"):
        tasks[name] = partial(estimator, name, **given)
    tasks["AFLClassifier partial_fit"] = in_batches

    add("softmax", shared, fs.Softmax)
    add("softmax ridge 3", shared, fs.Softmax, ridge=3.0)
    add("softmax ridge 3 resumed", resumed, fs.Softmax, ridge=3.0)
    for solver in ("direct", "steps"):
        add(f"kernelafl {solver}", shared, fs.KernelAFL, landmarks=200, solver=solver)
    add("kernelafl steps resumed", resumed, fs.KernelAFL, landmarks=200, solver="steps")
    add("kernelsoftmax", shared, fs.KernelSoftmax, landmarks=120)
    add("auto", shared, fs.Auto, methods="afl,softmax,kernelafl")
    tasks["AutoClassifier"] = partial(estimator, "AutoClassifier")
    for name in ("afl", "softmax", "deepafl", "auto"):
        words = ("--layers", 2, "--width", 64) if name == "deepafl" else ()
        tasks[f"table {name} uncalibrated"] = partial(
            table_command, "--method", name, *words, "--no-calibrate"
        )
    tasks["table afl calibrated"] = partial(table_command, "--method", "afl")
    tasks["table default"] = table_command
    add("secure afl", secured, fs.AFL, ridge=1.0)
    add("secure deepafl", secured, fs.DeepAFL, **DEEP)
    add("ray afl", in_ray, fs.AFL, ridge=1.0)
    add("ray deepafl", in_ray, fs.DeepAFL, **DEEP)

    g = fs.gradient
    one_shot = {"rounds": 1, "epochs": 3, "rate": 0.05}
    for kind in (
        g.FedAvg,
        g.FedProx,
        g.Scaffold,
        g.FedDyn,
        g.FedAvgM,
        g.MOON,
        g.FedGen,
        g.FedACG,
        g.FedAWA,
        g.FedDisco,
        g.FedLC,
        g.FedNTD,
        g.FedRS,
        g.FedSOL,
    ):
        add(f"gradient {kind.__name__}", shared, kind, **NET)
    for kind in (g.FedLPA, g.FedFisher, g.FedFisherKFAC):
        add(f"gradient {kind.__name__}", shared, kind, **NET | one_shot)
    for kind in (g.Ditto, g.FedAS, g.FedALA, g.FedDBE, g.FedAvgFT, g.FedProxFT):
        add(f"gradient {kind.__name__}", personal, kind, **NET)
    add("gradient FedPCL", personal, g.FedPCL, network="mlp:32", rounds=3, epochs=5)
    # By default the first selection comes in the third round.
    add("gradient FedSelect", personal, g.FedSelect, **NET, select_every=1)

    add("gradient FedAvg linear", shared, g.FedAvg, **NET | {"network": "linear"})
    add("gradient FedAvg float64", shared, g.FedAvg, **NET, precision="float64")
    add("gradient FedAvg participation 0.5", shared, g.FedAvg, **NET, participation=0.5)
    add("gradient FedAvg adam", shared, g.FedAvg, **NET | {"optimiser": "adam", "rate": 0.003})
    add(
        "gradient FedAvg momentum clip decay",
        shared,
        g.FedAvg,
        **NET,
        momentum=0.9,
        clip=1.0,
        weight_decay=1e-3,
        rate_decay=0.9,
        last_batch="drop",
        weighting="uniform",
    )
    add("gradient FedAvg track drift", shared, g.FedAvg, **NET, track="drift")
    add("gradient FedAvg cnn", shared, g.FedAvg, **IMAGES)
    tasks["gradient FedAvg own network"] = own_network
    add("gradient FedAvg read from file", saved, g.FedAvg, **NET)
    add("gradient Scaffold participation 0.5", shared, g.Scaffold, **NET, participation=0.5)

    for kind in (g.FedAvg, g.Scaffold, g.FedDyn, g.FedGen, g.Ditto, g.FedAS):
        add(f"gradient {kind.__name__} resumed", resumed, kind, **NET)

    deep = NET | {"network": "mlp:32,24,16"}
    add("feedback FedAvg named layer", shared, g.FedAvg, **deep, feedback="hidden2")
    add("feedback FedProx lowest", shared, g.FedProx, **deep, feedback="lowest")
    add("feedback FedProx lowest cnn", shared, g.FedProx, **IMAGES, feedback="lowest")
    add("feedback FedAvg highest row", shared, g.FedAvg, **deep, feedback="highest", feedback_scaling="row")
    add(
        "feedback FedAvg skewness",
        shared,
        g.FedAvg,
        **deep,
        feedback="skewness",
        feedback_first=True,
        feedback_layers=2,
    )
    add("feedback FedAvg random", shared, g.FedAvg, **deep, feedback="lowest", feedback_matrix="random")
    add("feedback FedAvg direct", shared, g.FedAvg, **deep, feedback="lowest", feedback_route="direct")
    add("feedback FedAvg sketch", shared, g.FedAvg, **deep, feedback="lowest", feedback_sketch=8)
    add("feedback Scaffold lowest", shared, g.Scaffold, **deep, feedback="lowest")
    add("feedback Ditto lowest", personal, g.Ditto, **deep, feedback="lowest")
    return tasks


# -- models over a network: real processes -------------------------------------------------------------------

SITES = ("north", "south", "west")


class Sites:
    """Three sites with a file each, keys for all of them, and a home of their own; gone when closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="digests-")
        self.folder = Path(self._folder.name)
        own = {name: str(self.folder) for name in ("HOME", "FEDSOLVE_STORE")}
        quiet = {
            # The fedsolve of this process, also where the path was given relative to its folder.
            "PYTHONPATH": os.pathsep.join(
                [str(Path(fs.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self.environment = os.environ | own | quiet
        owners = fs.partition.dirichlet(data().y, clients=3, alpha=0.3, seed=0)
        self.files = {}
        for number, name in enumerate(SITES):
            rows, labels = data().x[owners == number], data().y[owners == number]
            if name == "west":
                self.files[name] = self.folder / f"{name}.csv"
                names = [f"pixel{column}" for column in range(64)]
                table = np.column_stack([rows, labels])
                # 17 digits give back the same bits.
                np.savetxt(
                    self.files[name],
                    table,
                    "%.17g," * 64 + "%d",
                    header=",".join([*names, "label"]),
                    comments="",
                )
            else:
                self.files[name] = self.folder / f"{name}.npz"
                np.savez(self.files[name], x=rows, y=labels)
        self._keys: Path | None = None

    def close(self) -> None:
        self._folder.cleanup()

    def keys(self) -> Path:
        """The folder of keys, made when first asked for: all machines are this one."""
        if self._keys is None:
            keys = self.folder / "keys"
            self._command("keys", "init", "--host", "127.0.0.1", "--keys", keys)
            for name in SITES:
                self._command("keys", "client", name, "--keys", keys)
            public = [keys / "clients" / f"{name}.pub" for name in SITES]
            self._command("keys", "register", *public, "--keys", keys)
            self._command("keys", "roster", *public, "--keys", keys)
            self._keys = keys
        return self._keys

    def train(self, title: str, secure: bool, *words: Any) -> Found:
        """One run with processes of its own; the model that the server leaves."""
        folder = self.folder / title
        folder.mkdir()
        address = f"127.0.0.1:{free_port()}"
        safety = ("--plain", "--keys", self.keys()) if secure else ("--plain", "--insecure")
        if "secure" in title:
            safety = ("--keys", self.keys())
        out = folder / "model.safetensors"
        with ExitStack() as stack:
            start = partial(self._started, stack, folder)
            server = start(
                "server",
                "server",
                "--listen",
                address,
                *safety,
                "--clients",
                3,
                "--classes",
                ",".join(map(str, range(10))),
                "--patience",
                PATIENCE,
                "--state",
                folder / "server",
                "--out",
                out,
                *words,
            )
            clients = [
                start(
                    name,
                    "client",
                    "--server",
                    address,
                    *safety,
                    "--name",
                    name,
                    "--data",
                    self.files[name],
                    "--state",
                    folder / f"state-{name}",
                    "--once",
                )
                for name in SITES
            ]
            end = time.monotonic() + PATIENCE
            while server.poll() is None:
                gone = [n for n, p in zip(SITES, clients, strict=True) if p.poll() not in (None, 0)]
                if gone or time.monotonic() > end:
                    raise RuntimeError(f"{title}: {gone or 'out of time'}\n{logs(folder)}")
                time.sleep(0.1)
            if server.returncode != 0:
                raise RuntimeError(f"{title}: the server ended with {server.returncode}\n{logs(folder)}")
            with suppress(subprocess.TimeoutExpired):  # they end by themselves when told that the run is over
                for client in clients:
                    client.wait(20)
        yield "", digests(fs.load_model(out))

    def _started(self, stack: ExitStack, folder: Path, log: str, *words: Any) -> subprocess.Popen[bytes]:
        return stack.enter_context(running(command(*words), folder, folder / f"{log}.log", self.environment))

    def _command(self, *words: Any) -> None:
        done = subprocess.run(
            command(*words),
            cwd=self.folder,
            env=self.environment,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "fedsolve", *map(str, words)]


@contextmanager
def running(
    line: list[str], folder: Path, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process while the block runs; it and all it started are gone afterwards."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            line,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def logs(folder: Path) -> str:
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(folder.glob("*.log"))
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def network_tasks(sites: Callable[[], Sites]) -> dict[str, Task]:
    network = ("--network", "mlp:32", "--rounds", 3, "--epochs", 5, "--batch", 16, "--rate", 0.1)
    runs: dict[str, tuple[bool, tuple[Any, ...]]] = {
        "afl": (False, ("--method", "afl", "--ridge", 1.0)),
        "deepafl": (True, ("--method", "deepafl", "--layers", 2, "--width", 128)),
        "afl secure sums": (True, ("--method", "afl", "--ridge", 1.0)),
        "fedavg": (False, ("--method", "fedavg", *network)),
        "scaffold": (True, ("--method", "scaffold", *network)),
    }

    def task(name: str) -> Found:
        secure, words = runs[name]
        return sites().train(name, secure, *words)

    return {f"{NETWORK}{name}": partial(task, name) for name in runs}


# -- the commands --------------------------------------------------------------------------------------------


def computed(tasks: dict[str, Task]) -> tuple[dict[str, Digest], list[str]]:
    """Digests by name, and the tasks that failed."""
    found: dict[str, Digest] = {}
    failed = []
    for name, task in tasks.items():
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for suffix, told in task():
                    found[name + suffix] = told
        except Exception:
            failed.append(name)
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
        print(f"{time.perf_counter() - started:6.1f} s  {name}", file=sys.stderr, flush=True)
    return found, failed


def together(arrays: dict[str, str]) -> str:
    """One short digest of all arrays, with how many there are."""
    whole = hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()
    return f"{len(arrays)}: {whole[:12]}"


def difference(before: Digest | None, now: Digest | None) -> list[str]:
    """What differs, in words; nothing where all is the same."""
    if before is None:
        return ["not in the file"]
    if now is None:
        return ["missing now"]
    old, new = before["arrays"], now["arrays"]
    other = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    words = [f"arrays {', '.join(other[:4])}{', ...' * (len(other) > 4)}"] if other else []
    return words + [part for part in ("predictions", "scores") if before[part] != now[part]]


def table(before: dict[str, Digest], now: dict[str, Digest]) -> tuple[str, int]:
    """A Markdown table, and how many rows differ."""
    lines = ["| name | arrays | predictions | same? |", "|---|---|---|---|"]
    wrong = 0
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        shown = new or old
        assert shown is not None
        differs = difference(old, new)
        wrong += bool(differs)
        same = f"**NO**: {'; '.join(differs)}" if differs else "yes"
        lines.append(f"| {name} | {together(shown['arrays'])} | {shown['predictions'][:12]} | {same} |")
    return "\n".join(lines), wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE")
    what.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--only", action="append", metavar="TEXT", default=[])
    given = parser.parse_args()

    before: dict[str, Digest] = json.loads(given.compare.read_text()) if given.compare else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are stopped then, too
    started = time.perf_counter()
    print(f"fedsolve {fs.__version__} of {Path(fs.__file__).parent}", file=sys.stderr)
    with ExitStack() as stack:

        @cache
        def sites() -> Sites:
            made = Sites()
            stack.callback(made.close)
            return made

        def wanted(name: str) -> bool:
            return not given.only or any(text in name for text in given.only)

        tasks = local_tasks() | (network_tasks(sites) if given.network else {})
        now, failed = computed({name: task for name, task in tasks.items() if wanted(name)})
    print(f"{len(now)} models in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)

    if given.out:
        written = given.out.with_name(f"{given.out.name}.part")
        written.write_text(json.dumps(now, indent=1) + "\n")
        written.replace(given.out)
        return 1 if failed else 0
    left_out = [
        name for name in before if not wanted(name) or (name.startswith(NETWORK) and not given.network)
    ]
    text, wrong = table({name: told for name, told in before.items() if name not in left_out}, now)
    print(text)
    print(f"\n{len(now)} models, {wrong} of the rows differ or are missing.")
    if left_out:
        print(
            f"Not compared, because not asked for: {len(left_out)} of the file ({', '.join(left_out[:8])}"
            f"{', ...' * (len(left_out) > 8)})."
        )
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
