"""Estimators without a setting on twelve tables that scikit-learn ships or generates, over 20 seeded splits.

`python -m benchmarks.tables` prints mean accuracies; `--only`, `--table` and `--splits` restrict it, `--jobs`
takes as many processes, and with `--json` a run that was stopped goes on. The tables, splits and grids below
were fixed before anything was measured with them. A split is three quarters for training, by class, seeded
by its number; test rows serve for the numbers printed and for nothing else.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import date
from itertools import islice
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
from fedsolve.arrays import Array

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

METHODS_BY_COST = (
    "SVC",
    "LogisticRegressionCV",
    "Auto",
    "DeepAFLClassifier",
    "AFLClassifier",
    "RidgeClassifierCV",
)

COMPARED = (
    ("Auto", "LogisticRegressionCV"),
    ("Auto", "SVC"),
    ("DeepAFLClassifier", "RidgeClassifierCV"),
)
"""What is said in a sentence: the first less the second."""


Task = tuple[str, int, str]
"""A table, the number of a split, and a method."""


def measured(task: Task) -> dict[str, Any]:
    """Test accuracy of one fit, the seconds of processor time it took, and the bytes that a client sent and
    was sent."""
    table, split, method = task
    features, labels = TABLES[table]()
    parts = train_test_split(features, labels, test_size=TEST_SHARE, stratify=labels, random_state=split)
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator = METHODS[method]().fit(parts[0], parts[2])
    seconds = time.process_time() - started
    found = {"table": table, "split": split, "method": method}
    model = getattr(estimator, "model", getattr(estimator, "model_", None))
    history = () if model is None else model.history
    travelled = sum(record.bytes_up + record.bytes_down for record in history)
    score = float(estimator.score(parts[1], parts[3]))
    return {**found, "accuracy": score, "seconds": round(seconds, 3), "bytes": travelled}


def all_measured(tasks: list[Task], jobs: int, limit: float | None) -> Iterator[dict[str, Any]]:
    """Every task's numbers as they come; after `limit` seconds no further task is begun."""
    started = time.monotonic()

    def begun() -> Iterator[Task]:
        for task in tasks:
            if limit is not None and time.monotonic() - started > limit:
                progress(f"{limit:g} s are over: run it again for the rest")
                return
            yield task

    if jobs == 1:
        yield from map(measured, begun())
        return
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # for the processes that are started now
    waiting = begun()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(measured, task) for task in islice(waiting, jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(measured, task) for task in islice(waiting, len(done))}
            yield from (each.result() for each in done)


def read(path: Path | None) -> dict[Task, dict[str, Any]]:
    """What a file of lines has already; a last line that was cut off does not count."""
    found: dict[Task, dict[str, Any]] = {}
    text = path.read_text() if path is not None and path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            one = json.loads(line)
            found[one["table"], one["split"], one["method"]] = one
    if path is not None and text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    return found


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(METHODS)), help="Estimators; all without it.")
@click.option(
    "--table", "tables", multiple=True, type=click.Choice(list(TABLES)), help="Tables; all without."
)
@click.option("--splits", default=SPLITS, show_default=True, type=click.IntRange(1, SPLITS))
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes, a core each.")
@click.option("--seconds", type=click.FloatRange(0), help="Begin no fit after so many seconds.")
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add a line for every fit to this file, and take from there those that are in it.",
)
def main(
    only: tuple[str, ...],
    tables: tuple[str, ...],
    splits: int,
    jobs: int,
    seconds: float | None,
    path: Path | None,
) -> None:
    """Mean test accuracy of estimators without a setting, table by table."""
    methods, rows = only or tuple(METHODS), tables or tuple(TABLES)
    found = read(path)
    wanted = [(table, split, method) for split in range(splits) for table in rows for method in methods]
    # What takes longest first, so that no process is left with a long one at the end of a split.
    open_ = [task for task in wanted if task not in found]
    open_.sort(key=lambda task: (task[1], METHODS_BY_COST.index(task[2])))
    progress(f"{len(open_)} fits to do, {len(wanted) - len(open_)} known")
    with contextlib.ExitStack() as stack:
        lines = None if path is None else stack.enter_context(path.open("a"))
        for number, one in enumerate(all_measured(open_, jobs, seconds), 1):
            found[one["table"], one["split"], one["method"]] = one
            if lines is not None:
                lines.write(json.dumps(one | {"date": f"{date.today()}"}) + "\n")
                lines.flush()
            if number % 20 == 0:
                progress(f"{number} of {len(open_)}")
    complete = [
        split for split in range(splits) if all((t, split, m) in found for t in rows for m in methods)
    ]
    if complete:
        show(found, rows, methods, complete)
    if len(complete) < splits:
        raise click.ClickException(
            f"{splits - len(complete)} of {splits} splits are not complete; run again."
        )


def show(
    found: dict[Task, dict[str, Any]], tables: tuple[str, ...], methods: tuple[str, ...], splits: list[int]
) -> None:
    """The table of means, in percent, with the standard error of the mean and seconds per fit."""
    title = f"mean of {len(splits)} splits (± standard error; s of processor time, bytes up and down per fit)"
    page = Table("test accuracy, %", *methods, title=title)
    scores = np.array(
        [[[100 * found[t, split, m]["accuracy"] for split in splits] for m in methods] for t in tables]
    )
    for table, row in zip(tables, scores, strict=True):
        cells = []
        for method, own in zip(methods, row, strict=True):
            seconds = np.mean([found[table, split, method]["seconds"] for split in splits])
            megabytes = np.mean([found[table, split, method].get("bytes", 0) for split in splits]) / 1e6
            told = f"{seconds:.2f}, {megabytes:.2f} MB" if megabytes else f"{seconds:.2f}"
            cells.append(f"{own.mean():.2f} ± {_error(own):.2f} ({told})")
        page.add_row(table, *cells)
    page.add_section()
    # Of the mean over tables of one split, since the splits are what was drawn.
    page.add_row("mean", *(f"{own.mean():.2f} ± {_error(own):.2f}" for own in scores.mean(axis=0)))
    console = Console(width=180)
    console.print(page)
    for sentence in sentences(scores, tables, methods):
        console.print(sentence)


def sentences(scores: Array, tables: tuple[str, ...], methods: tuple[str, ...]) -> list[str]:
    """Pairs of methods over all tables, split by split; scores: (tables, methods, splits)."""
    told = []
    for mine, theirs in COMPARED:
        if mine not in methods or theirs not in methods:
            continue
        apart = scores[:, methods.index(mine)] - scores[:, methods.index(theirs)]
        means, error = apart.mean(axis=1), _error(apart.mean(axis=0))
        worst, best = int(np.argmin(means)), int(np.argmax(means))
        told.append(
            f"{mine} - {theirs}: {apart.mean():+.2f} ± {error:.2f} points; least {means[worst]:+.2f} ± "
            f"{_error(apart[worst]):.2f} ({tables[worst]}), most {means[best]:+.2f} ({tables[best]})"
        )
    return told


def _error(values: Array) -> float:
    """The standard error of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
