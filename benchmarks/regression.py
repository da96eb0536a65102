"""Auto's regression over ten clients against pooled RidgeCV, SVR and KernelRidge, over seeded splits.

`python -m benchmarks.regression` prints mean R² on test rows, and of Auto what it took, what it sent and how
many test rows its 95 % intervals hold; `--splits` says over how many splits. Tables, splits and grids were
fixed before anything was measured with them: settings, Auto's and those of the searches, are chosen within
the three quarters of the rows that train. Test rows serve for the numbers printed and for nothing else.
The last column is the largest difference of Auto's predictions between two partitions, as a share of the
largest prediction.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn import datasets
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

import fedsolve as fs
from benchmarks.machine import save
from fedsolve.arrays import Array

TABLES: dict[str, Callable[[], tuple[Array, Array]]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(600, noise=1.0, random_state=0),
    "friedman2": lambda: datasets.make_friedman2(600, noise=50.0, random_state=0),
}
WIDTHS = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
SVR_GRID = {"svr__C": [0.1, 1.0, 10.0, 100.0, 1000.0], "svr__gamma": WIDTHS, "svr__epsilon": [0.01, 0.1, 0.3]}
KERNEL_GRID = {"kernelridge__alpha": np.logspace(-4, 2, 7), "kernelridge__gamma": WIDTHS}
POOLED: dict[str, Callable[[], Any]] = {
    "RidgeCV": lambda: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))),
    "SVR, searched": lambda: GridSearchCV(make_pipeline(StandardScaler(), SVR()), SVR_GRID),
    "KernelRidge, searched": lambda: GridSearchCV(
        make_pipeline(StandardScaler(), KernelRidge(kernel="rbf")), KERNEL_GRID
    ),
}


def federated(features: Array, targets: Array, clients: int, seed: int) -> fs.Model:
    """Auto with intervals over so many clients."""
    owners = np.random.default_rng(seed).integers(0, clients, len(targets))
    return fs.Auto().fit(fs.LocalFederation.from_arrays(features, targets, owners, clients), calibrate=True)


def measured(features: Array, targets: Array, split: int) -> dict[str, Any]:
    """R² of everything on one split; targets in units of their deviation, in which epsilon of SVR is."""
    parts = train_test_split(features, targets, test_size=0.25, random_state=split)
    train, test, known, truth = parts
    model, other = federated(train, known, 10, split), federated(train, known, 3, split + 100)
    found = {"Auto, 10 clients": model.score(test, truth)}
    mean, deviation = known.mean(), known.std()
    for name, made in POOLED.items():
        fitted = made().fit(train, (known - mean) / deviation)
        found[name] = fitted.score(test, (truth - mean) / deviation)
    low, high = model.predict_interval(test)
    predicted = model.predict(test)
    return {
        "r2": found,
        "took": next(one.method for one in model.tried if one.chosen),
        "megabytes": sum(record.bytes_up for record in model.history) / 1e6,
        "inside": float(np.mean((low <= truth) & (truth <= high))),
        "apart": float(np.abs(other.predict(test) - predicted).max() / np.abs(predicted).max()),
    }


@click.command(help=__doc__)
@click.option("--splits", default=10, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write every split.")
def main(splits: int, path: Path | None) -> None:
    table = Table()
    document = {}
    names = ["Auto, 10 clients", *POOLED]
    for head in ("table", *names, "Auto took", "MB up", "in 95 %", "partitions apart"):
        table.add_column(head)
    warnings.simplefilter("ignore")
    for name, made in TABLES.items():
        features, targets = made()
        found = document[name] = [measured(features, targets, split) for split in range(splits)]
        scores = [f"{np.mean([one['r2'][each] for one in found]):.4f}" for each in names]
        took = ", ".join(f"{key} {count}" for key, count in Counter(one["took"] for one in found).items())
        table.add_row(
            name,
            *scores,
            took,
            f"{np.mean([one['megabytes'] for one in found]):.1f}",
            f"{100 * np.mean([one['inside'] for one in found]):.1f} %",
            f"{max(one['apart'] for one in found):.1e}",
        )
    Console(width=140).print(table)
    save(path, document)


if __name__ == "__main__":
    main()
