"""Estimators without a setting on twelve tables that scikit-learn ships or generates, over 20 seeded splits.

`python -m benchmarks.tables` prints mean accuracies; `--only`, `--table` and `--splits` restrict it. The
tables, splits and grids below were fixed before anything was measured with them. A split is three quarters
for training, by class, seeded by its number; test rows serve for the numbers printed and for nothing else.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn import datasets
from sklearn.linear_model import LogisticRegressionCV, RidgeClassifierCV
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import fedsolve as fs
from benchmarks.machine import progress
from fedsolve.container import Array

SPLITS = 20
TEST_SHARE = 0.25

TABLES: dict[str, Callable[[], tuple[Array, Array]]] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "moons": lambda: datasets.make_moons(1000, noise=0.2, random_state=0),
    "circles": lambda: datasets.make_circles(1000, noise=0.1, factor=0.5, random_state=0),
    "classification 20 x 4": lambda: datasets.make_classification(
        1000, 20, n_informative=10, n_classes=4, random_state=0
    ),
    "classification 50 x 2": lambda: datasets.make_classification(1000, 50, n_informative=10, random_state=0),
    "gaussian quantiles": lambda: datasets.make_gaussian_quantiles(
        n_samples=1000, n_features=10, n_classes=3, random_state=0
    ),
    "hastie": lambda: datasets.make_hastie_10_2(1500, random_state=0),
    "blobs": lambda: datasets.make_blobs(1000, 10, centers=6, cluster_std=5.0, random_state=0),
    "imbalanced": lambda: datasets.make_classification(
        1500, 20, n_informative=6, weights=[0.93], random_state=0
    ),
}

RIDGES = np.logspace(-3, 3, 13)
LOGISTIC = {"Cs": np.logspace(-4, 4, 9), "cv": 5, "max_iter": 2000}
SVC_GRID = {
    "svc__C": [0.1, 1.0, 10.0, 100.0, 1000.0],
    "svc__gamma": ["scale", 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
}


class OneSilo:
    """A method as an estimator: all rows are one client's."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def fit(self, features: Array, labels: Array) -> OneSilo:
        owners = np.zeros(len(labels), dtype=np.intp)
        self.model = self.method.fit(fs.LocalFederation.from_arrays(features, labels, owners))
        return self

    def score(self, features: Array, labels: Array) -> float:
        return float(self.model.score(features, labels))


METHODS: dict[str, Callable[[], Any]] = {
    "RidgeClassifierCV": lambda: make_pipeline(StandardScaler(), RidgeClassifierCV(RIDGES)),
    "LogisticRegressionCV": lambda: make_pipeline(StandardScaler(), LogisticRegressionCV(**LOGISTIC)),
    "SVC": lambda: GridSearchCV(make_pipeline(StandardScaler(), SVC()), SVC_GRID, cv=5),
    "AFLClassifier": lambda: fs.AFLClassifier(),
    "DeepAFLClassifier": lambda: fs.DeepAFLClassifier(),
    "Auto": lambda: OneSilo(fs.Auto()),
}
"""What is compared, each as a user gets it without a setting; scikit-learn's with the grids above."""


def accuracies(table: str, method: str, splits: int) -> tuple[list[float], float]:
    """Test accuracy of every split, and the seconds that all fits took."""
    features, labels = TABLES[table]()
    scores, seconds = [], 0.0
    for seed in range(splits):
        parts = train_test_split(features, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed)
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator = METHODS[method]().fit(parts[0], parts[2])
        seconds += time.perf_counter() - started
        scores.append(float(estimator.score(parts[1], parts[3])))
    return scores, seconds


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(METHODS)), help="Estimators; all without it.")
@click.option(
    "--table", "tables", multiple=True, type=click.Choice(list(TABLES)), help="Tables; all without."
)
@click.option("--splits", default=SPLITS, show_default=True, type=click.IntRange(1, SPLITS))
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the accuracies here, and take from there those that are in it.",
)
def main(only: tuple[str, ...], tables: tuple[str, ...], splits: int, path: Path | None) -> None:
    """Mean test accuracy of estimators without a setting, table by table."""
    found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    methods, rows = only or tuple(METHODS), tables or tuple(TABLES)
    for table in rows:
        for method in methods:
            known = found.setdefault(table, {}).get(method)
            if known is not None and len(known["accuracies"]) >= splits:
                continue
            progress(f"{table}: {method}")
            scores, seconds = accuracies(table, method, splits)
            found[table][method] = {"accuracies": scores, "seconds": seconds}
            if path is not None:
                path.write_text(json.dumps(found, indent=1) + "\n")
    show(found, rows, methods, splits)


def show(found: dict[str, Any], tables: tuple[str, ...], methods: tuple[str, ...], splits: int) -> None:
    """The table of means, in percent, with the standard error of the mean and seconds per fit."""
    page = Table("test accuracy, %", *methods, title=f"mean of {splits} splits (± standard error; s per fit)")
    means: dict[str, list[float]] = {method: [] for method in methods}
    for table in tables:
        cells = []
        for method in methods:
            entry = found[table][method]
            scores = 100 * np.array(entry["accuracies"][:splits])
            means[method].append(float(scores.mean()))
            error = scores.std(ddof=1) / np.sqrt(splits) if splits > 1 else 0.0
            seconds = entry["seconds"] / len(entry["accuracies"])
            cells.append(f"{scores.mean():.1f} ± {error:.1f} ({seconds:.2f})")
        page.add_row(table, *cells)
    page.add_section()
    page.add_row("mean", *(f"{np.mean(means[method]):.2f}" for method in methods))
    Console(width=160).print(page)


if __name__ == "__main__":
    main()
