"""`python -m benchmarks.gpu [--device cuda] [--part NAME]... [--json FILE]`: the closed forms on a GPU.

    fit       DeepAFL from the call of `fit` to arrays on the host: projections, checks, report and counts of
              bytes included, rows on the device; 10 and 100 classes
    cpu       the same on the CPU, and how far its weights are from those
    authors   a transcription of the authors' formulation in torch, on the same device and data, with their
              data path (rows in host memory, batches of 512 collated and copied in every pass) and with
              everything resident
    kernel    KernelAFL on random features with --landmarks: seconds from `fit` to a model on the host, beside
              its counted operations; predictions of 10,000 rows on the device. With --data cifar10_lite0.npz
              also on these features, host beside device: accuracy, seconds, scores; and Auto on the device,
              as it is and with eight seconds for its kernel machine
    wide      d = 8192, three layers, beside products at the measured rate plus the factorisations

Features are random, labels those of a noisy teacher: times depend on shapes alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsolve as fs
from benchmarks.machine import progress, save
from benchmarks.operations import lean_operations
from benchmarks.torch_transcription import Authors
from fedsolve.backends import kernels_on
from fedsolve.federation.members import Batch
from fedsolve.tables.table_file import read_npz

CLIENTS, ALPHA, SEEDS = 100, 0.1, (1, 2, 3, 4, 5)


class Place:
    """A device, and clocks that wait for it."""

    def __init__(self, device: str) -> None:
        self.kernels = kernels_on(device)
        self.device = self.kernels.device
        self.torch_device = torch.device(self.device.removeprefix("torch:"))

    def wait(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def seconds(self, work: Callable[[], Any], repeats: int = 5) -> float:
        """The median of some repetitions, after one that does not count."""
        times = []
        for _ in range(repeats + 1):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def describe(self) -> dict[str, Any]:
        cuda = self.torch_device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.torch_device) if cuda else platform.processor(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "fedsolve": fs.__version__,
        }

    def random(self, *shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64, device=self.torch_device)

    def rate(self, rows: int, width: int) -> dict[str, float]:
        """Operations a second of a product (rows, width)(width, width), and of the Gram matrix."""
        left, right, out = self.random(rows, width), self.random(width, width), self.random(rows, width)
        gram = self.random(width, width)
        count = 2.0 * rows * width**2
        return {
            "product": count / self.seconds(lambda: torch.matmul(left, right, out=out)),
            "gram": count / self.seconds(lambda: self.kernels.gram(left, gram)),
        }


def rows_of(rows: int, features: int, classes: int) -> tuple[Any, Any, Any]:
    """Features in float32, labels and owners."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features), dtype=np.float32)
    teacher = rng.standard_normal((features, classes), dtype=np.float32)
    labels = np.argmax(x @ teacher + 8.0 * rng.standard_normal((rows, classes)), axis=1)
    labels[:classes] = np.arange(classes)
    return x, labels, fs.partition.dirichlet(labels, CLIENTS, alpha=ALPHA)


def differences(one: Any, other: Any) -> dict[str, float]:
    """The largest difference of classifiers and blocks, as shares of the largest entry."""

    def apart(left: Any, right: Any) -> float:
        return float(np.max(np.abs(left - right)) / np.max(np.abs(right)))

    return {
        "classifiers": max(map(apart, one.classifiers, other.classifiers)),
        "blocks": max(apart(a.omega, b.omega) for a, b in zip(one.blocks, other.blocks, strict=True)),
        "risk": apart(one.risk, other.risk),
    }


def measure_fit(place: Place, data: Any, layers: int, width: int, beside_cpu: bool) -> dict[str, Any]:
    """Seconds of whole fits, of their parts, and what the products reach."""
    x, labels, owners = data
    classes = int(labels.max()) + 1
    federation = fs.LocalFederation.from_arrays(x, labels, owners, CLIENTS, device=place.device)
    started = time.perf_counter()
    federation.place_rows()
    place.wait()
    placed = time.perf_counter() - started
    fs.DeepAFL(layers=2, width=width, seed=99).fit(federation)  # libraries and kernels are loaded
    runs = []
    for seed in SEEDS:
        method = fs.DeepAFL(layers=layers, width=width, seed=seed)
        place.wait()
        started = time.perf_counter()
        model = method.fit(federation)
        runs.append(time.perf_counter() - started)
        if seed == SEEDS[0]:
            first = model
    started = time.perf_counter()
    fs.DeepAFL(layers=layers, width=width, seed=SEEDS[-1]).fit(federation)
    again = time.perf_counter() - started
    seconds: dict[str, float] = defaultdict(float)
    for record in model.history:
        seconds[record.kind] += record.seconds
    counted = lean_operations(len(labels), x.shape[1], width, classes, layers)
    # A GPU computes both triangles of a Gram matrix.
    grams = len(labels) * width**2 * (layers + 1)
    found = {
        "rows": len(labels),
        "features": x.shape[1],
        "classes": classes,
        "width": width,
        "layers": layers,
        "clients": CLIENTS,
        "seconds": statistics.median(runs),
        "all_seconds": runs,
        "seconds_projections_kept": again,
        "seconds_placing_rows": placed,
        "exchange_seconds": dict(seconds),
        "operations": sum(counted.values()) + grams,
        "bytes_up": sum(record.bytes_up for record in model.history),
        "risk_falls": bool(np.all(np.diff(model.risk) <= 1e-9 * model.risk[0])),
    }
    progress(f"fit, {classes} classes: {found['seconds']:.3f} s of {sorted(runs)}")
    if beside_cpu:
        host = fs.LocalFederation.from_arrays(x, labels, owners, CLIENTS)
        started = time.perf_counter()
        there = fs.DeepAFL(layers=layers, width=width, seed=SEEDS[0]).fit(host)
        found["cpu_seconds"] = time.perf_counter() - started
        found["apart_from_cpu"] = differences(first, there)
        progress(f"the CPU: {found['cpu_seconds']:.1f} s, {found['apart_from_cpu']}")
    found["kernels"] = product_kernels(
        place, federation, fs.DeepAFL(layers=layers, width=width, seed=SEEDS[0]), found["operations"]
    )
    found["model"] = first
    return found


def product_kernels(place: Place, federation: Any, method: Any, operations: int) -> dict[str, float] | None:
    """What the participants' matrix products reach by the device's own clock; None without a GPU.

    Kernels of products are counted while participants answer, not those of the server's solutions.
    """
    if place.torch_device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile, record_function

    plain = Batch.ask

    def answer(self: Any, *asked: Any) -> Any:
        with record_function("participants"):
            term = plain(self, *asked)
            place.wait()
        return term

    Batch.ask = answer  # type: ignore[method-assign]
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            method.fit(federation)
    finally:
        Batch.ask = plain  # type: ignore[method-assign]
    events = list(seen.events())
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name == "participants" and "CPU" in str(event.device_type)
    ]
    starts = np.array(sorted(spans))
    kernels: dict[str, float] = defaultdict(float)
    for event in events:
        if "CUDA" in str(event.device_type) and event.name != "participants":
            begun = event.time_range.start
            at = int(np.searchsorted(starts[:, 0], begun, side="right")) - 1
            if at >= 0 and begun <= starts[at, 1]:
                kernels[event.name] += (event.time_range.end - begun) * 1e-6
    products = sum(
        time for name, time in kernels.items() if "gemm" in name.lower() or "splitk" in name.lower()
    )
    return {
        "product_kernel_seconds": products,
        "all_kernel_seconds": sum(kernels.values()),
        "rate": operations / products if products else 0.0,
        "largest": dict(sorted(kernels.items(), key=lambda each: -each[1])[:8]),
    }


def measure_authors(place: Place, data: Any, layers: int, width: int, ours: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the transcription, and how far its weights are from ours."""
    x, labels, owners = data
    found: dict[str, Any] = {}
    model = ours["model"]
    for resident in (True, False):
        authors = Authors(x, labels, owners, CLIENTS, layers, width, SEEDS[0], place.torch_device, resident)
        authors.warm_up()
        place.wait()
        started = time.perf_counter()
        weights = authors.fit()
        place.wait()
        name = "resident" if resident else "their_data_path"
        seconds = time.perf_counter() - started
        found[name] = seconds
        found[f"{name}_ratio"] = seconds / ours["seconds"]
        found[f"{name}_apart"] = max(
            float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
            for a, b in zip(weights, model.classifiers, strict=True)
        )
        progress(f"authors, {name}: {seconds:.2f} s, {found[f'{name}_ratio']:.1f} times ours")
    return found


def _factorisations(place: Place, width: int, classes: int) -> tuple[float, float]:
    """Seconds of the Cholesky of a classifier, and of the systems of a block."""
    kernels = place.kernels
    hidden = place.random(2 * width, width)
    gram = hidden.T @ hidden
    kernels.add_diagonal(gram, 1.0)
    scales, target = place.random(classes).square() * 1e-4 + 1e-5, place.random(width, classes)
    return (
        place.seconds(lambda: kernels.cholesky(gram.clone(), least=1.0), 2),
        place.seconds(lambda: kernels.shifted_solve(gram, scales, 0.01, target), 2),
    )


def solves(place: Place, width: int) -> dict[str, float]:
    """Seconds of what a block can be solved by, for 10 and for 100 columns."""
    kernels = place.kernels
    hidden = place.random(4 * width, width)
    gram = hidden.T @ hidden
    found = {"eigh": place.seconds(lambda: kernels.eigh(gram), 3)}
    for columns in (10, 100):
        scales = place.random(columns).square() * 1e-4 + 1e-5
        target, weight = place.random(width, columns), place.random(width, columns)
        systems = gram * scales[:, None, None]
        systems.diagonal(dim1=1, dim2=2).add_(0.01)
        found |= {
            f"svd_{columns}": place.seconds(lambda: kernels.thin_svd(weight), 3),  # noqa: B023
            f"shifted_{columns}": place.seconds(
                lambda: kernels.shifted_solve(gram, scales, 0.01, target),  # noqa: B023
                3,
            ),
            f"library_{columns}": place.seconds(lambda: torch.linalg.cholesky_ex(systems), 3),  # noqa: B023
        }
        progress(f"{columns} columns: {found}")
    return found


def measure_wide(place: Place, data: Any, layers: int, width: int) -> dict[str, Any]:
    """A fit of great width, beside products at the measured rate plus the factorisations."""
    factor, shifted = _factorisations(place, width, int(data[1].max()) + 1)
    rate = place.rate(len(data[1]), width)
    found = measure_fit(place, data, layers, width, beside_cpu=False)
    found.pop("model")
    floor = found["operations"] / rate["product"] + (layers + 1) * factor + layers * shifted
    progress(f"wide: {found['seconds']:.2f} s, floor {floor:.2f} s")
    return found | {
        "rate": rate,
        "cholesky_seconds": factor,
        "block_seconds": shifted,
        "floor_seconds": floor,
        "of_floor": found["seconds"] / floor,
    }


def kernel_operations(rows: int, features: int, landmarks: int, classes: int, steps: int) -> float:
    """Multiplications and additions of KernelAFL: kernels once, factors, and what a step multiplies."""
    kernels = 2.0 * (rows + landmarks) * landmarks * (features + 2)
    factors = float(landmarks) ** 3  # two Cholesky factors and LᵀL, a third each
    exchange = 4.0 * rows * landmarks * classes + 5 * 2.0 * landmarks**2 * classes
    return kernels + factors + (steps + 1) * exchange


def measure_kernel(place: Place, landmarks: int, rows: int = 50_000, features: int = 512) -> dict[str, Any]:
    """One fit after a smaller one that does not count, and predictions on the device."""
    classes = 100
    x, y, owners = rows_of(rows, features, classes)
    fs.KernelAFL(landmarks=2048, solver="steps", steps=2).fit(
        fs.LocalFederation.from_arrays(x, y, owners, CLIENTS, device=place.device)
    )
    federation = fs.LocalFederation.from_arrays(x, y, owners, CLIENTS, device=place.device)
    federation.place_rows()
    cuda = place.torch_device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(place.torch_device)
    place.wait()
    started = time.perf_counter()
    model = fs.KernelAFL(landmarks=landmarks, solver="steps").fit(federation)
    place.wait()
    taken = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(place.torch_device) if cuda else 0
    model.device = place.device
    model.decision_function(x[:100])
    began = time.perf_counter()
    model.decision_function(x[:10_000])
    scoring = time.perf_counter() - began
    rate = max(place.rate(8192, 4096).values())
    floor = kernel_operations(rows, features, landmarks, classes, 12) / rate
    return {
        "landmarks": landmarks,
        "seconds": taken,
        "exchanges": [round(record.seconds, 4) for record in model.history],
        "floor": floor,
        "share": floor / taken,
        "predict_10000": scoring,
        "peak_bytes": peak,
    }


def measure_real(place: Place, path: Path, landmarks: int, most: int | None = None) -> dict[str, Any]:
    """KernelAFL on real features on the host and on the device: accuracy, seconds, how far scores are apart;
    and Auto on the device. most: training rows that are taken, all when None.
    """
    (x, y, _), (x_test, y_test, _) = (read_npz(path, part) for part in ("train", "test"))
    x, y = x[:most], y[:most]
    owners = fs.partition.dirichlet(y, CLIENTS, alpha=0.1, seed=0)
    found: dict[str, Any] = {"rows": len(x), "landmarks": landmarks}
    scores = {}
    runs = {"cpu": fs.KernelAFL(landmarks=landmarks, solver="steps"), place.device: None, "auto": fs.Auto()}
    runs["auto, 8 seconds"] = fs.Auto(seconds=8.0)
    for name, method in runs.items():
        device = "cpu" if name == "cpu" else place.device
        federation = fs.LocalFederation.from_arrays(x, y, owners, CLIENTS, device=device)
        started = time.perf_counter()
        model = (method or runs["cpu"]).fit(federation)
        place.wait()
        seconds = time.perf_counter() - started
        scores[name] = model.placed(device).decision_function(x_test)
        right = float(np.mean(model.classes[scores[name].argmax(axis=1)] == y_test))
        found[name] = {"seconds": seconds, "accuracy": right}
        found[name] |= {"chosen": model.parameters} if isinstance(method, fs.Auto) else {}
        progress(f"{name}: {seconds:.1f} s, {right:.2%}")
    found["scores_apart"] = float(np.abs(scores[place.device] - scores["cpu"]).max())
    progress(f"scores of host and device are at most {found['scores_apart']:.1e} apart")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", action="append", choices=("fit", "cpu", "authors", "wide", "kernel"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--wide", type=int, default=8192)
    parser.add_argument("--classes", type=int, action="append")
    parser.add_argument("--landmarks", type=int, action="append", help="of part kernel; 16384 and 32768")
    parser.add_argument(
        "--data", type=Path, help="of part kernel: features and classes (npz), as cifar10_lite0"
    )
    parser.add_argument("--free", type=float, help="GB of the device that another process leaves")
    given = parser.parse_args()
    if given.free is not None:
        taken = torch.cuda.mem_get_info()[0] - int(1e9 * given.free)
        code = f"import torch; x = torch.empty({taken}, dtype=torch.uint8, device='cuda'); print(); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
        child.stdout.readline()  # type: ignore[union-attr]
    parts = given.part or ["fit", "cpu", "authors", "wide", "kernel"]
    place = Place(given.device)
    results: dict[str, Any] = {"machine": place.describe()}

    def store() -> None:
        save(given.json, results)

    results["rate"] = rate = place.rate(given.rows, given.width)
    results["solves"] = solves(place, given.width)
    progress(f"product {rate['product'] / 1e12:.1f}, Gram {rate['gram'] / 1e12:.1f} TFLOP/s")
    for landmarks in (given.landmarks or (16_384, 32_768)) if "kernel" in parts else ():
        found = results[f"kernel_{landmarks}"] = measure_kernel(place, landmarks, given.rows)
        progress(f"{landmarks} landmarks: {found['seconds']:.2f} s, {found['share']:.0%} of the rate")
        store()
    if "kernel" in parts and given.data is not None:
        count = min(given.landmarks or (16_384,))
        results["real"] = measure_real(place, given.data, count, given.rows)
        store()
    for classes in () if parts == ["kernel"] else (given.classes or (10, 100)):
        data = rows_of(given.rows, given.features, classes)
        ours = measure_fit(place, data, given.layers, given.width, beside_cpu="cpu" in parts)
        inside = sum(ours["exchange_seconds"].values())
        ours["product_share"] = ours["operations"] / inside / rate["product"]
        progress(f"counted operations over whole exchanges: {ours['product_share']:.0%} of the measured rate")
        if ours["kernels"]:
            ours["product_kernel_share"] = ours["kernels"]["rate"] / rate["product"]
            progress(f"products by themselves: {ours['product_kernel_share']:.0%} of the measured rate")
        results[f"fit_{classes}"] = ours
        if "authors" in parts:
            store()
            results[f"authors_{classes}"] = measure_authors(place, data, given.layers, given.width, ours)
        ours.pop("model")
        store()
        if "wide" in parts and classes == 10:
            results["wide"] = measure_wide(place, data, 3, given.wide)
            store()
    print(json.dumps(results, indent=1, default=lambda value: None))


if __name__ == "__main__":
    main()
