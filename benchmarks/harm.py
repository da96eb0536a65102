"""Whether a calibration does harm: 400 fits without signal, with weak and strong signal, and of rare classes.

`python -m benchmarks.harm` trains AFL with a calibration on 120 to 600 rows and looks at 20,000 fresh rows:
how far the mean probability of the second class lies from its share, and by how much the log loss exceeds
that of telling everybody the share of the training rows. `--method auto` takes what `fedsolve train` takes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import expit

import fedsolve as fs
from benchmarks.machine import save, saved
from fedsolve.arrays import Array

FRESH = 20_000
KINDS = {"no signal": (0.0, 0.4), "weak": (0.4, 0.4), "strong": (4.0, 0.4), "rare": (1.0, 0.07)}
"""Length of the true weights, and share of the second class."""


def drawn(
    rng: np.random.Generator, rows: int, width: int, signal: float, share: float
) -> tuple[Array, Array]:
    """Rows and classes of a logistic model."""
    features = rng.standard_normal((rows, width))
    level = np.log(share / (1 - share)) * np.sqrt(1 + signal**2 / 3)
    chance = expit(level + signal * features[:, 0])
    return features, (rng.random(rows) < chance).astype(int)


def one(kind: str, seed: int, name: str) -> dict[str, Any] | None:
    """Errors of one fit on fresh rows; None where the rows held one class only."""
    signal, share = KINDS[kind]
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    rows, width = int(rng.integers(120, 600)), int(rng.integers(3, 30))
    features, labels = drawn(rng, rows, width, signal, share)
    if labels.sum() < 3:
        return None
    test, truth = drawn(rng, FRESH, width, signal, share)
    federation = fs.LocalFederation.from_arrays(features, labels, np.arange(rows) % 3)
    method: Any = fs.Auto() if name == "auto" else fs.AFL(ridge="auto", intercept=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = method.fit(federation, calibrate=True)
        told = model.predict_proba(test)[:, 1]
    base = labels.mean()
    own, naive = (_log_loss(p, truth) for p in (told, np.full(FRESH, base)))
    off = abs(float(told.mean() - truth.mean()))
    # How far the share of so few training rows lies from that of the fresh rows by chance.
    error = float(np.sqrt(base * (1 - base) / rows))
    return {"off": off, "errors": off / error, "excess": own - naive, "most": float(told.max())}


def _log_loss(told: Array, truth: Array) -> float:
    clipped = np.clip(told, 1e-15, 1 - 1e-15)
    return float(-np.mean(np.where(truth == 1, np.log(clipped), np.log1p(-clipped))))


def largest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of each error over fits of one kind, and how many are off by more than 0.1."""
    most = {key: max(entry[key] for entry in found) for key in ("off", "errors", "excess", "most")}
    return {"fits": len(found), **most, "far off": sum(entry["off"] > 0.1 for entry in found)}


@click.command()
@click.option("--fits", default=100, show_default=True, type=click.IntRange(1), help="Of each kind.")
@click.option("--method", "name", default="afl", show_default=True, type=click.Choice(["afl", "auto"]))
@click.option("--json", "path", type=click.Path(path_type=Path), help="Adds the numbers to this file.")
@click.option("--under", default="now", show_default=True, help="Their name in it.")
def main(fits: int, name: str, path: Path | None, under: str) -> None:
    """What calibrated probabilities do on fresh rows, fit by fit."""
    heads = ("mean probability off by", "in standard errors", "off by > 0.1", "log loss over the base rate's")
    page = Table("", "fits", *heads, title="largest of all fits")
    document: dict[str, Any] = {}
    for kind in KINDS:
        found = [entry for seed in range(fits) if (entry := one(kind, seed, name)) is not None]
        worst = document[kind] = largest(found)
        told = (f"{worst['off']:.3f}", f"{worst['errors']:.1f}", worst["far off"], f"{worst['excess']:+.4f}")
        page.add_row(kind, *map(str, (worst["fits"], *told)))
    Console(width=120).print(page)
    save(path, {**saved(path, {}), f"{under}, {name}": document})


if __name__ == "__main__":
    main()
