"""What noise costs: accuracy of private AFL and Softmax by epsilon, with a server's noise and in secure sums.

`python -m benchmarks.private --data cifar10_lite0.npz --images FOLDER` prints, over three runs, the test
accuracy of one shot and of the steps at every epsilon; the same in secure sums of 20 sites, of which 15
must be honest; and Fashion-MNIST's pixels at epsilon 1. Noise is never the same: runs differ in it and in
who has which rows. Settings are the defaults, which were picked on a fifth of the training rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.data import Rows, from_file
from benchmarks.machine import progress, save
from fedsolve.data.datasets import load_dataset

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SITES = 20


def runs(rows: Rows, epsilons: Iterable[float], seeds: int, secure: bool) -> list[dict[str, Any]]:
    """Accuracies of one shot and of steps at each epsilon, one number for each run."""
    found = []
    for epsilon in epsilons:
        for of in ("afl", "softmax"):
            scores, started = [], time.perf_counter()
            for seed in range(seeds):
                owners = fs.partition.iid(rows.labels, SITES, seed=seed)
                engine: Any = fs.LocalFederation.from_arrays(rows.features, rows.labels, owners)
                if secure:
                    engine = fs.privacy.SecureFederation(engine)
                model = fs.Private(of, epsilon=epsilon).fit(engine)
                scores.append(100 * model.score(rows.test_features, rows.test_labels))
            about = {"data": rows.name, "noise": "sites" if secure else "server", "epsilon": epsilon}
            seconds = (time.perf_counter() - started) / seeds
            found.append({**about, "method": of, "accuracy": scores, "seconds": seconds})
            progress(f"{found[-1]}")
    return found


def pixels(folder: Path) -> Rows:
    """Fashion-MNIST's pixels from 0 to 1."""
    dataset, parts = load_dataset("fashion-mnist", folder), []
    for split in (dataset.train, dataset.test):
        assert split is not None
        images = np.stack(split.inputs.read(slice(None)))
        parts += [images.reshape(len(images), -1) / 255.0, np.asarray(split.labels)]
    return Rows("Fashion-MNIST pixels", *parts)


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="npz of features.")
@click.option("--images", type=click.Path(exists=True, path_type=Path), help="Folder of Fashion-MNIST.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--secure", default="1,4", show_default=True, help="Epsilons to run in secure sums too.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all results here.")
def main(data: Path | None, images: Path | None, seeds: int, secure: str, json_path: Path | None) -> None:
    """Accuracy by epsilon."""
    found: list[dict[str, Any]] = []
    if images is not None:
        found += runs(pixels(images), (1.0,), seeds, False)
    if data is not None:
        rows = from_file(data)
        found += runs(rows, EPSILONS, seeds, False)
        found += runs(rows, [float(word) for word in secure.split(",") if word], seeds, True)
    save(json_path, found)
    table = Table("data", "noise by", "epsilon", "method", "accuracy %", "lowest", "s")
    for each in found:
        scores = np.array(each["accuracy"])
        spread = f"{scores.mean():.2f} ± {scores.std(ddof=1) if len(scores) > 1 else 0:.2f}"
        told = (each["data"], each["noise"], f"{each['epsilon']:g}", each["method"], spread)
        table.add_row(*told, f"{scores.min():.2f}", f"{each['seconds']:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
