"""One training run in a process of its own, so that its peak memory is its own.

`python -m benchmarks.worker TASK.json` trains the variant the task names and writes its weights
beside it; the measurements go to standard output as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedsolve as fs
from benchmarks import transcription
from benchmarks.machine import OtherWork, peak_memory, resident_memory
from fedsolve.federation.card import totals
from fedsolve.threads import usable_cores

Array = NDArray[Any]
Outcome = tuple[dict[str, Any], dict[str, Array]]

PLANS = ("lean", "single", "textbook")
TRANSCRIPTIONS: dict[str, dict[str, bool]] = {
    "transcription": {"shared": True, "left_to_right": True},
    "transcription-cheap-order": {"shared": True, "left_to_right": False},
    "transcription-default-threads": {"shared": False, "left_to_right": True},
}
VARIANTS = (*PLANS, *TRANSCRIPTIONS)


def train(variant: str, setting: transcription.Setting, data: dict[str, Array], clients: int) -> Outcome:
    """Measurements and weights of one run; data holds x, y (class positions), owners, x_test, y_test.

    Seconds are those of training alone: the rows are in memory before and scored after.
    """
    workers = usable_cores()
    measured: dict[str, Any] = {"before_bytes": resident_memory()}
    others = OtherWork()
    started = time.perf_counter()
    if variant in TRANSCRIPTIONS:
        how = TRANSCRIPTIONS[variant]
        fitted = transcription.fit(
            setting,
            data["x"],
            data["y"],
            data["owners"],
            clients,
            workers=workers if how["shared"] else None,
            left_to_right=how["left_to_right"],
        )
        seconds = time.perf_counter() - started
        measured |= {
            "exchanges": 2 * setting.layers + 1,
            "bytes_up": fitted.bytes_up,
            "bytes_down": fitted.bytes_down,
        }
        classifiers, omegas = fitted.classifiers, fitted.omegas
    else:
        federation = fs.LocalFederation.from_arrays(data["x"], data["y"], data["owners"], clients, workers)
        model = fs.DeepAFL(
            layers=setting.layers,
            width=setting.width,
            ridge=setting.ridge,
            residual_ridge=setting.residual_ridge,
            seed=setting.seed,
            exchange=variant,
        ).fit(federation)
        seconds = time.perf_counter() - started
        measured |= {
            **totals(model.history),
            "exchange_seconds": sum(record.seconds for record in model.history),
        }
        classifiers, omegas = list(model.classifiers), [block.omega for block in model.blocks if block]
    measured |= {"seconds": seconds, "peak_bytes": peak_memory(), "others": others.share()}
    if len(data["y_test"]):
        result = transcription.Fitted(classifiers, omegas)
        measured["accuracy"] = float(np.mean(result.predict(setting, data["x_test"]) == data["y_test"]))
    weights = {f"W{t}": weight for t, weight in enumerate(classifiers)}
    return measured, weights | {f"Omega{t + 1}": omega for t, omega in enumerate(omegas)}


def main(path: Path) -> None:
    task = json.loads(path.read_text())
    names = ("x", "y", "owners", "x_test", "y_test")
    data = {name: np.load(Path(task["data"]) / f"{name}.npy") for name in names}
    # Libraries are loaded and their threads awake before the clock starts.
    few = {name: array[:64] for name, array in data.items()} | {"owners": np.arange(len(data["y"][:64])) % 2}
    train(task["variant"], transcription.Setting(1, 8), few | {"y": few["owners"], "y_test": few["y"][:0]}, 2)
    measured, weights = train(
        task["variant"], transcription.Setting(**task["setting"]), data, task["clients"]
    )
    np.savez(path.with_suffix(".npz"), **weights)  # type: ignore[arg-type]
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
