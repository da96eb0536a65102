"""One engine's turn of `python -m benchmarks.network virtual`, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.network import Memory
from fedsolve.container import to_bytes


def main() -> None:
    clients, width, rows_each, workers = map(int, sys.argv[1:5])
    engine, folder = sys.argv[5:]
    rng = np.random.default_rng(0)
    features = rng.standard_normal((clients * rows_each, width))
    labels = np.arange(len(features)) % 10
    owners = np.repeat(np.arange(clients), rows_each)
    begun = time.perf_counter()
    found: dict[str, Any] = {}

    def work(federation: Any) -> None:
        # Two runs: the first one waits for everything to start.
        fs.AFL(ridge=1.0).fit(federation)
        found["start"] = time.perf_counter() - begun
        with Memory() as memory:
            started = time.perf_counter()
            model = fs.AFL(ridge=1.0).fit(federation)
            found["exchange"] = time.perf_counter() - started
        found["server"] = memory.peak
        found["digest"] = hashlib.sha256(to_bytes(*model.contents())).hexdigest()

    if engine == "local":
        work(fs.LocalFederation.from_arrays(features, labels, owners, clients, workers=workers or None))
    else:
        from fedsolve.network.simulation import simulate

        simulate(features, labels, owners, work, clients=clients, workers=workers or None)
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
