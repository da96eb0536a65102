"""What the numbers were measured on, and the yardstick: the machine's own matrix-multiply rate."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy.linalg.blas import dsyrk
from threadpoolctl import threadpool_info

import fedsolve
from fedsolve.threads import blas_threads, usable_cores

SIDE = 2048


def progress(text: str) -> None:
    """A line on stderr, so that a person sees what is going on."""
    print(f"  {text}", file=sys.stderr, flush=True)


def matmul_rate(threads: int | None = None, side: int = SIDE, repeats: int = 5) -> float:
    """Operations per second of the best of `repeats` float64 products; all threads when None."""
    rng = np.random.default_rng(0)
    left, right, out = rng.random((side, side)), rng.random((side, side)), np.empty((side, side))
    best = np.inf
    with blas_threads(threads):
        for _ in range(repeats):
            started = time.perf_counter()
            np.matmul(left, right, out=out)
            best = min(best, time.perf_counter() - started)
    return 2.0 * side**3 / best


def sustained_rates(seconds: float = 3.0, side: int = SIDE) -> dict[str, float]:
    """Operations per second of float64 products and of symmetric rank-n updates, all threads, for a while."""
    rows = np.asfortranarray(np.random.default_rng(0).random((side, side)))
    out = np.zeros((side, side), order="F")
    return {
        "dgemm": _sustained(lambda: np.matmul(rows, rows, out=out), 2.0 * side**3, seconds),
        "dsyrk": _sustained(lambda: dsyrk(1.0, rows, c=out, overwrite_c=1), 1.0 * side**3, seconds),
    }


def _sustained(work: Callable[[], object], operations: float, seconds: float) -> float:
    work()
    started, turns = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        work()
        turns += 1
    return turns * operations / elapsed


def describe(side: int = SIDE) -> dict[str, Any]:
    """Processor, libraries and matrix-multiply rates, as JSON values."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": _memory(),
        "python": platform.python_version(),
        "fedsolve": fedsolve.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "blas": [
            {name: library.get(name) for name in ("internal_api", "version", "architecture", "num_threads")}
            for library in threadpool_info()
            if library["user_api"] == "blas"
        ],
        "matmul_one_thread": matmul_rate(1, side),
        "matmul_all_threads": matmul_rate(None, side),
    }


def save(path: Path | str | None, results: Any) -> None:
    """Write results with the day, the command and the machine, for the gallery; nothing without a path."""
    if path is None:
        return
    module = f"benchmarks.{Path(sys.argv[0]).stem}".removesuffix(".__main__")
    command = " ".join(["python -m", module, *sys.argv[1:]])
    about = {"processor": _processor(), "cores": usable_cores(), "fedsolve": fedsolve.__version__}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    document = {"date": f"{date.today()}", "command": command, "machine": about, "results": results}
    Path(path).write_text(json.dumps(document, indent=1, default=lambda value: None) + "\n")


def saved(path: Path | None, empty: Any) -> Any:
    """The results that `save` wrote to a file, or what stands for none."""
    return json.loads(path.read_text())["results"] if path is not None and path.exists() else empty


class OtherWork:
    """Share of the machine that other processes took since this was made; None where unknown.

    A run beside a busy neighbour says little, so every measurement is printed with this number.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        busy, elapsed = _busy_seconds(), time.perf_counter() - self._started
        if busy is None or self._busy is None or elapsed <= 0:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / elapsed / (os.cpu_count() or 1))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """Processor seconds of everything on this machine since it started, stolen ones included."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, interrupt, soft, steal = (int(field) for field in fields)
    return float(user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes; None where the system does not tell."""
    # ru_maxrss survives an exec and would show the parent's peak, so the kernel's own mark comes first.
    found = _status("VmHWM")
    if found is not None:
        return found
    try:
        import resource
    except ImportError:  # not on every platform
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_memory() -> int | None:
    """Resident size of this process now, in bytes; None where the system does not tell."""
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(values[0]) * 1024 if values else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        first = Path("/proc/meminfo").read_text().split()
    except OSError:
        return None
    return int(first[1]) * 1024


ANONYMOUS = ("RssAnon",)
"""Memory that a process alone has."""

MAPPED = ("RssFile", "RssShmem")
"""Resident pages of files, which the system takes back when it needs them."""


class Memory:
    """Memory of a process, sampled beside the work: megabytes at the start, and the peak."""

    def __init__(self, kinds: tuple[str, ...] = ANONYMOUS) -> None:
        self._kinds = kinds
        self._stop = threading.Event()
        self.start = self.peak = 0.0

    def __enter__(self) -> Memory:
        self.start = self.peak = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> float:
        return self.peak - self.start

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._now())

    def _now(self) -> float:
        return sum(_status(kind) or 0 for kind in self._kinds) / 1e6
