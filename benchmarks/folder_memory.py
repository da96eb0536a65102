"""`python -m benchmarks.folder_memory`: memory while a large folder of images becomes features.

The folder holds links to a few files, so that its size costs no disk; the backbone is `pixels:32`, so
that decoding and storing are all there is. Memory must not grow with the number of images.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import load_dataset
from fedsolve.data.feature_store import ExtractionProgress, FeatureStore

CLASSES, FILES = 4, 8


def make_folder(folder: Path, images: int) -> None:
    """`images` links to a few random pictures, in class folders."""
    rng = np.random.default_rng(0)
    sources = []
    for number in range(FILES):
        source = folder.parent / f"source-{number}.png"
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(source)
        sources.append(source)
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir(parents=True)
    for number in range(images):
        link = folder / f"class-{number % CLASSES}" / f"{number:07d}.png"
        link.hardlink_to(sources[number % FILES])


def own_memory() -> float:
    """Megabytes of anonymous memory: what is not mapped from files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise OSError("this system does not tell anonymous memory")


@click.command(help=__doc__)
@click.option("--images", default=100_000, show_default=True, help="Images in the folder.")
def main(images: int) -> None:
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name:
        folder = Path(name) / "images"
        make_folder(folder, images)
        dataset = load_dataset(f"folder:{folder}?test=0")
        readings: list[tuple[int, float]] = []

        def note(progress: ExtractionProgress) -> None:
            if not readings or progress.done - readings[-1][0] >= images // 10 or progress.done == images:
                readings.append((progress.done, own_memory()))

        store, backbone = FeatureStore(Path(name) / "store"), load_backbone("pixels:32")
        started = time.perf_counter()
        found = store.build(dataset, backbone, progress=note)
        seconds = time.perf_counter() - started
        again = time.perf_counter()
        store.build(load_dataset(f"folder:{folder}?test=0"), backbone)
        again = time.perf_counter() - again
        table = Table(
            "images done",
            "own memory, MB",
            title=f"{images:,} images, {found.x_train.nbytes / 1e6:.0f} MB of features",
        )
        for done, memory in readings:
            table.add_row(f"{done:,}", f"{memory:.0f}")
        console = Console()
        console.print(table)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        console.print(
            f"{images / seconds:,.0f} images per second; peak {peak:.0f} MB resident, mapped pages included; "
            f"the second build took {again:.1f} s and extracted nothing."
        )


if __name__ == "__main__":
    main()
