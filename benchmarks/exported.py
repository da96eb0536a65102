"""`python -m benchmarks.exported`: models as ONNX files, their size and time per row beside predict_proba.

One thread on both sides, so that onnxruntime and numpy are compared and not their numbers of threads. The
rows are scikit-learn's digits; no setting is chosen by what is measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime
from rich.console import Console
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import fedsolve as fs
from benchmarks.machine import save
from fedsolve.export import PRECISIONS

BATCHES = (1, 1000)
LEAST_SECONDS = 0.3

FAMILIES: dict[str, Callable[[], Any]] = {
    "AFL": lambda: fs.AFL(ridge=1.0),
    "AFL, calibrated": lambda: fs.Recipe(fs.AFL(ridge=1.0), calibrate=True),
    "Softmax": lambda: fs.Softmax(ridge=1.0),
    "DeepAFL, T=5, width 512": lambda: fs.DeepAFL(layers=5, width=512, ridge=1.0),
    "DeepAFL, T=20, width 512, ridge 0.01": lambda: fs.DeepAFL(layers=20, width=512, ridge=0.01),
    "KernelAFL, 1,024 landmarks": lambda: fs.KernelAFL(landmarks=1024),
    "APFL, a client's own": lambda: fs.APFL(layers=1, width=512, refinement_width=512, ridge=1.0),
}


def measure() -> list[dict[str, Any]]:
    """For each family and precision: bytes, the largest difference, and microseconds per row."""
    features, labels = load_digits(return_X_y=True)
    features = features / 16.0
    federation = fs.LocalFederation.from_arrays(
        features, labels, np.arange(len(labels)) % 10, clients=10, workers=1
    )
    found = []
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1):
        for name, method in FAMILIES.items():
            model = method().fit(federation)
            if model.personalises:
                model = model.personal(federation.clients[0])
            model.save(Path(folder) / "model")
            for precision in PRECISIONS:
                written = model.to_onnx(Path(folder) / "model.onnx", precision)
                entry = {
                    "model": name,
                    "precision": precision,
                    "file_bytes": (Path(folder) / "model").stat().st_size,
                    "onnx_bytes": written.size,
                }
                found.append(entry | _run(model, written.path, features, precision))
    return found


def _run(model: Any, path: Path, features: Any, precision: str) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    rows = features.astype(precision)
    told = session.run(["probabilities"], {"features": rows})[0]
    result: dict[str, Any] = {"difference": float(np.abs(told - model.predict_proba(features)).max())}
    for batch in BATCHES:
        some, plain = rows[:batch], features[:batch]
        result[f"onnx_us_{batch}"] = _microseconds(
            lambda some=some: session.run(None, {"features": some}), batch
        )
        result[f"predict_us_{batch}"] = _microseconds(lambda plain=plain: model.predict_proba(plain), batch)
    return result


def _microseconds(call: Callable[[], Any], rows: int) -> float:
    """Per row: the best of the calls that fit in a while."""
    call()
    best, start = np.inf, time.perf_counter()
    while time.perf_counter() - start < LEAST_SECONDS:
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return float(1e6 * best / rows)


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write results here."
)
def main(json_path: Path | None) -> None:
    """Measure every family and print a Markdown table."""
    found = measure()
    console = Console(width=160, highlight=False, markup=False)
    heads = ["model", "precision", "KB file", "KB ONNX", "largest difference"]
    heads += [f"{side}, {batch} at once" for batch in BATCHES for side in ("ONNX", "predict_proba")]
    console.print("| " + " | ".join(heads) + " |", soft_wrap=True)
    console.print("|" + "---|" * len(heads))
    for entry in found:
        cells = [
            entry["model"],
            entry["precision"],
            *(f"{entry[n] / 1e3:,.0f}" for n in ("file_bytes", "onnx_bytes")),
        ]
        cells += [f"{entry['difference']:.0e}"]
        cells += [f"{entry[f'{side}_us_{batch}']:.3g}" for batch in BATCHES for side in ("onnx", "predict")]
        console.print("| " + " | ".join(cells) + " |", soft_wrap=True)
    save(json_path, found)


if __name__ == "__main__":
    main()
