"""Small rows and small experiment files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.experiments.sources import ExperimentRows

RANDOM = "random = {rows = 400, width = 12, classes = 3}"
"""A dataset that is made up."""


def toy_data(count: int, seed: int, noise: float = 0.0) -> tuple[Any, Any]:
    """Features (count, 6) and labels of three classes by a non-linear rule."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 6))
    scores = np.c_[x[:, 0] * x[:, 1], x[:, 2], np.sin(2 * x[:, 3])]
    return x, np.argmax(scores + noise * rng.standard_normal(scores.shape), axis=1)


def toy_rows(x: Any, y: Any, train: int) -> ExperimentRows:
    """The first rows to train with, the others to test."""
    return ExperimentRows(x[:train], y[:train], x[train:], y[train:], "toy")


def opening(
    title: str,
    alpha: float,
    clients: int,
    dataset: str = 'address = "digits"',
    seeds: tuple[int, ...] = (0, 1),
    engine: str | None = None,
) -> str:
    """An experiment file up to its methods: one dataset, one Dirichlet partition."""
    return f"""
title = "{title}"
seeds = {list(seeds)}
{"" if engine is None else f'engine = "{engine}"'}
[dataset]
{dataset}

[[partition]]
kind = "dirichlet"
alpha = {alpha}
clients = {clients}

"""


def written(folder: Path, text: str, name: str = "toy.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path
