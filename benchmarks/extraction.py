"""`python -m benchmarks.extraction`: features by onnxruntime against torch eager, one backbone, one run.

Both run EfficientNet-Lite0 with the same weights on the same images, preprocessing included, on all
cores. They take turns so that a busy neighbour disturbs both; the fastest turn of each counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherWork, progress, save
from fedsolve.arrays import Array
from fedsolve.data.backbones import Backbone, efficientnet_lite, load_backbone
from fedsolve.data.backbones.preprocessing import prepare
from fedsolve.data.backbones.torch_callable import TorchBackbone
from fedsolve.threads import usable_cores

TARGET = 1.0
TOLERANCE = efficientnet_lite.TOLERANCE


def measure(
    images: int = 256, batch: int = 64, repeats: int = 3, cache: Path | None = None
) -> dict[str, Any]:
    """Images per second of both, of the preprocessing alone, and how far their features differ."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(images)]
    progress("loading the backbone twice")
    onnx = load_backbone("efficientnet-lite0", cache=cache)
    eager = TorchBackbone("torch eager", efficientnet_lite.network(), onnx.preprocessing, {})
    rates: dict[str, list[float]] = {"preprocessing": [], onnx.runtime: [], eager.runtime: []}
    loads: list[float | None] = []
    difference = 0.0
    for turn in range(repeats):
        others = OtherWork()
        rates["preprocessing"].append(_preparation_rate(pictures, batch, onnx))
        fast, first = _rate(pictures, batch, onnx)
        slow, second = _rate(pictures, batch, eager)
        rates[onnx.runtime].append(fast)
        rates[eager.runtime].append(slow)
        loads.append(others.share())
        difference = max(difference, float(np.abs(first - second).max()))
        progress(f"turn {turn + 1}: {fast:.1f} against {slow:.1f} images per second")
    best = {name: max(found) for name, found in rates.items()}
    return {
        "backbone": onnx.name,
        "images": images,
        "batch": batch,
        "cores": usable_cores(),
        "rates": rates,
        "best": best,
        "ratio": best[onnx.runtime] / best[eager.runtime],
        "ratios": [fast / slow for fast, slow in zip(rates[onnx.runtime], rates[eager.runtime], strict=True)],
        "difference": difference,
        "others": loads,
    }


def _rate(pictures: list[Array], batch: int, backbone: Backbone) -> tuple[float, Array]:
    started = time.perf_counter()
    features = [backbone.extract(pictures[at : at + batch]) for at in range(0, len(pictures), batch)]
    return len(pictures) / (time.perf_counter() - started), np.concatenate(features)


def _preparation_rate(pictures: list[Array], batch: int, backbone: Backbone) -> float:
    started = time.perf_counter()
    for at in range(0, len(pictures), batch):
        prepare(pictures[at : at + batch], backbone.preprocessing)
    return len(pictures) / (time.perf_counter() - started)


def show(console: Console, result: dict[str, Any]) -> None:
    """The result as a table and two sentences."""
    table = Table(
        title=f"{result['backbone']}: {result['images']} images in batches of {result['batch']}, "
        f"{result['cores']} cores",
        title_justify="left",
    )
    table.add_column("step")
    table.add_column("images/s, best", justify="right")
    table.add_column("every turn", justify="right")
    for name, rates in result["rates"].items():
        table.add_row(name, f"{max(rates):.1f}", "  ".join(f"{rate:.1f}" for rate in rates))
    console.print(table)
    loads = [f"{load:.0%}" for load in result["others"] if load is not None]
    console.print(
        f"onnxruntime against torch eager: {result['ratio']:.2f}x (at least {TARGET:.0f}x wanted: "
        f"{'yes' if result['ratio'] >= TARGET else 'NO'}), in every turn "
        + ", ".join(f"{ratio:.2f}x" for ratio in result["ratios"])
        + f".\nLargest difference of a feature: {result['difference']:.1e} (at most {TOLERANCE:.0e} wanted: "
        f"{'yes' if result['difference'] <= TOLERANCE else 'NO'})."
        + (f"\nOther processes took {', '.join(loads)} of the machine." if loads else "")
    )


@click.command()
@click.option("--images", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Cache of exported networks.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all results here."
)
def main(images: int, batch: int, repeats: int, cache: Path | None, json_path: Path | None) -> None:
    """Images per second of onnxruntime and of torch eager on the same backbone."""
    result = measure(images, batch, repeats, cache)
    show(Console(width=120, highlight=False, markup=False), result)
    save(json_path, result)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.extraction")
