"""Rows to measure on: synthetic features, or a feature file given by path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedsolve as fs

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Training rows, and test rows (possibly none) to see that what was trained is worth having."""

    name: str
    features: Array
    labels: Array
    test_features: Array
    test_labels: Array


def synthetic(rows: int, features: int, classes: int = 10, seed: int = 0) -> Rows:
    """Gaussian features with labels from a mildly non-linear teacher, and a quarter more for testing."""
    rng = np.random.default_rng(seed)
    count = rows + max(classes, rows // 4)
    x = rng.standard_normal((count, features))
    linear = x @ rng.standard_normal((features, classes)) / np.sqrt(features)
    bent = np.tanh(x @ rng.standard_normal((features, 64)) * (3.0 / np.sqrt(features)))
    scores = linear + bent @ rng.standard_normal((64, classes)) / 16.0
    labels = np.argmax(scores + 0.2 * rng.standard_normal(scores.shape), axis=1)
    # Every class occurs among the training rows, however few there are.
    labels[:classes] = np.arange(classes)
    return Rows(f"synthetic {rows} x {features}", x[:rows], labels[:rows], x[rows:], labels[rows:])


def from_file(path: Path, limit: int | None = None) -> Rows:
    """Rows of an npz file: x_train, y_train and, where present, x_test, y_test, scale, offset.

    With scale and offset (one number per column) features are `offset + scale * x`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError) as problem:
        raise fs.DataError(
            f"cannot read {path} as npz: {problem}. Give a file written by np.savez."
        ) from None
    lacking = sorted({"x_train", "y_train"} - found.keys())
    if lacking:
        raise fs.DataError(f"{path} lacks {', '.join(lacking)}; it has {', '.join(sorted(found))}.")

    def decoded(name: str) -> Array:
        values = np.asarray(found[name], dtype=np.float64)
        if "scale" in found:
            values *= found["scale"]
        if "offset" in found:
            values += found["offset"]
        return values

    x, y = decoded("x_train")[:limit], found["y_train"][:limit]
    name = f"{path.name} {x.shape[0]} x {x.shape[1]}"
    if {"x_test", "y_test"} <= found.keys():
        return Rows(name, x, y, decoded("x_test"), found["y_test"])
    return Rows(name, x, y, x[:0], y[:0])


def owners_of(labels: Array, clients: int, alpha: float | None) -> Array:
    """Which client owns each row: Dirichlet(alpha), or IID when alpha is None."""
    if alpha is None:
        return fs.partition.iid(labels, clients)
    return fs.partition.dirichlet(labels, clients, alpha)
