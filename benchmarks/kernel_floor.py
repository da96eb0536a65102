"""`python -m benchmarks.kernel_floor FILE`: the default KernelAFL beside its counted operations.

FILE is an npz of features such as cifar10_lite0.npz. Seconds of the clock and of the processor (`system`: the
system's share, for memory that is touched for the first time), those of the operations at the rates of a core
that are measured before, the most memory, and the load of the machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fedsolve as fs
from fedsolve.tables.table_file import read_npz
from fedsolve.threads import blas_threads

CLIENTS, KEPT = 100, 9 * 10**9


def rate(operations: float, work: Callable[[], Any]) -> float:
    """Operations a second of one core, the best of four."""
    best = 0.0
    for _ in range(4):
        began = time.process_time()
        work()
        best = max(best, operations / (time.process_time() - began))
    return best


def main() -> None:
    (x, y, _), (x_test, y_test, _) = (read_npz(sys.argv[1], part) for part in ("train", "test"))
    square = np.random.default_rng(0).standard_normal((3072, 3072))
    room = np.empty_like(square)
    with blas_threads(1):
        products = rate(2.0 * 3072**3, lambda: square @ square)
        powers = rate(square.size, lambda: np.exp(square, out=room))
    owners = fs.partition.dirichlet(y, CLIENTS, alpha=0.1, seed=0)
    federation = fs.LocalFederation.from_arrays(x, y, owners, CLIENTS, memory_budget=KEPT)
    load, system = os.getloadavg(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
    clock, processor = time.perf_counter(), time.process_time()
    model = fs.KernelAFL().fit(federation)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime - system
    rows, width, count, outputs = *x.shape, model.landmarks.count, model.outputs
    exchanges = (len(model.history) - 1) * (4 * rows * count * outputs + 4 * count**2 * outputs)
    counted = 2 * (rows + count / 2) * count * (width + 2) + count**3 + exchanges
    floor = counted / products + (rows * count + count**2 / 2) / powers
    found = {"seconds": clock, "processor": processor, "floor": floor, "times_the_floor": processor / floor}
    found |= {"system": system, "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    found |= {"accuracy": model.score(x_test, y_test), "load": [load, os.getloadavg()]}
    print(json.dumps(found | {"products": products, "powers": powers}, indent=1))


if __name__ == "__main__":
    main()
