"""What calibration does: error and log loss on test rows before and after, and AUC beside scikit-learn's.

Models are trained over 20 clients (Dirichlet 0.3); the rows held out for the calibration are training rows.
Before: the probability vectors nearest to the scores, of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

import fedsolve as fs
from benchmarks.data import Rows, from_file, owners_of
from benchmarks.machine import progress
from fedsolve.scoring.evaluation import evaluation_of

CLIENTS, ALPHA = 20, 0.3
TABLE = (
    *("data", "method", "splits", "accuracy", "ECE before", "after"),
    *("log loss before", "after", "AUC", "bound", "off"),
)
_SCALED: dict[str, Any] = {"scale": "standard", "intercept": True}

METHODS: dict[str, dict[str, fs.AFL | fs.DeepAFL]] = {
    "small": {
        "AFL": fs.AFL(ridge=1.0, **_SCALED),
        "DeepAFL": fs.DeepAFL(layers=5, width=256, ridge=10.0, residual_ridge=1.0, **_SCALED),
    },
    "features": {
        "AFL": fs.AFL(),
        "DeepAFL": fs.DeepAFL(layers=5, width=1024, ridge=10.0, residual_ridge=0.1),
    },
}


def splits(path: Path | None) -> Iterator[tuple[str, str, Rows]]:
    """Name, which methods, and rows of every split."""
    digits, cancer = load_digits(), load_breast_cancer()
    for name, features, labels, count in (
        ("digits", digits.data, digits.target, 5),
        ("breast cancer", cancer.data, cancer.target, 20),
    ):
        for seed in range(count):
            x, x_test, y, y_test = train_test_split(features, labels, test_size=0.3, random_state=seed)
            yield name, "small", Rows(name, x, y, x_test, y_test)
    if path is not None:
        yield path.stem, "features", from_file(path)


def measure(path: Path | None = None) -> list[dict[str, Any]]:
    """One entry for every data set and method: means over splits, and the largest miss of the AUC."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for name, kind, rows in splits(path):
        owners = owners_of(rows.labels, CLIENTS, ALPHA)
        federation = fs.LocalFederation.from_arrays(rows.features, rows.labels, owners, CLIENTS)
        for title, method in METHODS[kind].items():
            progress(f"calibration: {name}, {title}")
            model = fs.Recipe(method, calibrate=True).fit(federation)
            after = evaluation_of(model, rows.test_features, rows.test_labels)
            told = model.predict_proba(rows.test_features)
            told = told[:, 1] if told.shape[1] == 2 else told
            exact = float(roc_auc_score(rows.test_labels, told, multi_class="ovr"))
            model.calibration = None
            before = evaluation_of(model, rows.test_features, rows.test_labels)
            entry = {f"before_{n}": v for n, v in before.measures().items()} | after.measures()
            entry["auc_off"] = abs(after.auc - exact)
            assert entry["auc_off"] <= after.auc_bound + 1e-12
            found.setdefault((name, title), []).append(entry)
    return [
        {"data": name, "method": title, "splits": len(entries)}
        | {key: float(np.mean([entry[key] for entry in entries])) for key in entries[0]}
        | {key: max(entry[key] for entry in entries) for key in ("auc_off", "auc_bound")}
        for (name, title), entries in found.items()
    ]


def show(page: Console, found: list[dict[str, Any]]) -> None:
    """The table, also as it stands in the documentation."""
    page.print(f"| {' | '.join(TABLE)} |")
    page.print(f"|{'---|' * len(TABLE)}")
    for entry in found:
        shares = [f"{100 * entry[key]:.2f} %" for key in ("accuracy", "before_ece", "ece")]
        losses = [f"{entry[key]:.4f}" for key in ("before_log_loss", "log_loss", "auc")]
        misses = [f"{entry[key]:.1e}" for key in ("auc_bound", "auc_off")]
        cells = [entry["data"], entry["method"], str(entry["splits"]), *shares, *losses, *misses]
        page.print(f"| {' | '.join(cells)} |")
