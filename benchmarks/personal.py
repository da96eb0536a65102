"""What a model of one's own is worth: local accuracy of every client, closed forms and gradient methods.

A cell is a number of clients, a Dirichlet alpha and a seed. Training rows are dealt by the Dirichlet draw,
test rows so that each client's classes have the shares of its training rows. Every entry of `ENTRIES` gives,
for a cell, one predictor for each client; another method is another entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.data import Array, Rows
from benchmarks.machine import progress
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.data.partitions import heterogeneity
from fedsolve.experiments.observations import mean_and_error, mean_error
from fedsolve.experiments.run_figures import gain_plot
from fedsolve.gradient import Ditto, FedALA, FedAS, FedAvgFT, FedDBE, FedPCL, FedProxFT, FedSelect
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.pages import plots
from fedsolve.pages.plots import Axis, Panel, Series
from fedsolve.scoring.client_scores import ClientScores, Predictor, client_rows, client_scores

GRID = tuple(round(0.1 * step, 1) for step in range(11))
"""Balances among which the test rows choose the best, to hold the automatic one against."""

NEAR = 0.5
"""Points by which the automatic balance may stay behind the best of the grid."""


@dataclass(frozen=True)
class Setting:
    """Parameters of all entries."""

    width: int = 1024
    refinement_width: int = 1024
    ridge: float = 0.01
    refinement_ridge: float = 1.0
    layers: int = 5
    rounds: int = 200
    network: str = "linear"
    rate: float = 0.05

    def gradient(self, kind: type[GradientMethod], seed: int, **own: Any) -> GradientMethod:
        """A gradient method with the paper's rounds and local epochs."""
        common = {"network": self.network, "rounds": self.rounds, "epochs": 3, "rate": self.rate}
        return kind(**common | own, seed=seed)

    def apfl(self, seed: int, ridge: float | Literal["auto"] | None = None) -> fs.APFL:
        """APFL whose clients choose their balance and, where asked, their ridge."""
        return fs.APFL(
            width=self.width,
            refinement_width=self.refinement_width,
            ridge=self.ridge,
            refinement_ridge=self.refinement_ridge if ridge is None else ridge,
            balance="auto",
            seed=seed,
        )


class Shared:
    """The shared models of one seed. They do not depend on who owns what, so one deal trains them all."""

    def __init__(self, rows: Rows, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.seed = seed
        owners = fs.partition.iid(rows.labels, 20, seed=seed)
        self._federation = fs.LocalFederation.from_arrays(rows.features, rows.labels, owners)

    @cached_property
    def afl(self) -> Any:
        return fs.AFL(ridge=self.setting.ridge).fit(self._federation)

    @cached_property
    def deepafl(self) -> Any:
        width, layers = self.setting.width, self.setting.layers
        return fs.DeepAFL(layers=layers, width=width, seed=self.seed).fit(self._federation)

    @cached_property
    def apfl(self) -> Any:
        return self.setting.apfl(self.seed).fit(self._federation)

    @property
    def primary(self) -> Any:
        return self.apfl.primary


@dataclass
class Cell:
    """One deal of the rows: each client's training and test rows, and the shared models."""

    rows: Rows
    shared: Shared
    clients: int
    alpha: float
    names: tuple[str, ...] = ()
    train: list[fs.ClientData] = field(default_factory=list)
    test: list[fs.ClientData] = field(default_factory=list)
    _models: dict[type[GradientMethod], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, seed = self.rows, self.shared.seed
        owners = fs.partition.dirichlet(rows.labels, self.clients, self.alpha, seed=seed)
        tested = fs.partition.alike(rows.test_labels, rows.labels, owners, self.clients, seed=seed)
        self.train = client_rows(rows.features, rows.labels, owners, self.clients)
        self.test = client_rows(rows.test_features, rows.test_labels, tested, self.clients)
        self.names = tuple(f"client-{k:03d}" for k in range(self.clients))
        self.heterogeneity = heterogeneity(rows.labels, owners)

    @cached_property
    def personal(self) -> list[PersonalModel]:
        """Each client's own model, with the balance it chooses."""
        return [self.shared.apfl.personalised(data) for data in self.train]

    def trained(self, kind: type[GradientMethod], **own: Any) -> Any:
        """The model of a gradient method on the cell's clients; trained once, whoever asks."""
        if kind not in self._models:
            participants = [fs.Participant(n, data) for n, data in zip(self.names, self.train, strict=True)]
            federation = fs.LocalFederation(participants, classes=np.unique(self.rows.labels).tolist())
            method = self.shared.setting.gradient(kind, self.shared.seed, **own)
            self._models[kind] = method.fit(federation)
        return self._models[kind]

    def score(self, predictors: Predictor | Iterable[Predictor]) -> ClientScores:
        return client_scores(predictors, self.test, self.names)


def _own(over: str, ridge: Literal["auto"] | None = None) -> Entry:
    """Refinements over a shared model, each client with the balance it chooses."""

    def entry(cell: Cell) -> Iterator[Predictor]:
        model = cell.shared.setting.apfl(cell.shared.seed, ridge).over(getattr(cell.shared, over))
        return map(model.personalised, cell.train)

    return entry


def _by_gradient(kind: type[GradientMethod], shared: bool = False, **own: Any) -> Entry:
    """An entry that trains on the cell's clients and gives each its own model, or all the shared one."""

    def entry(cell: Cell) -> Predictor | Iterable[Predictor]:
        model = cell.trained(kind, **own)
        return model if shared else map(model.personal, cell.names)

    return entry


Entry = Callable[[Cell], Predictor | Iterable[Predictor]]
ENTRIES: dict[str, Entry] = {
    "primary only": lambda cell: cell.shared.apfl.primary,
    "local only": lambda cell: map(cell.shared.apfl.alone().personalised, cell.train),
    "AFL": lambda cell: cell.shared.afl,
    "DeepAFL": lambda cell: cell.shared.deepafl,
    "APFL, balance 0.3": lambda cell: (model.with_balance(0.3) for model in cell.personal),
    "APFL, auto": lambda cell: cell.personal,
    "APFL, auto, over DeepAFL": _own("deepafl"),
    "APFL, ridge auto too": _own("primary", "auto"),
    "APFL, ridge auto too, over DeepAFL": _own("deepafl", "auto"),
}
"""What is compared: for a cell, one predictor for all clients or one for each, in client order."""

BY_GRADIENT: dict[str, Entry] = {
    # Fine-tuning begins after the run, so the run's shared model is FedAvg's, or FedProx's, to the bit.
    "FedAvg": _by_gradient(FedAvgFT, shared=True, fine_epochs=3),
    "FedAvg + fine-tuning": _by_gradient(FedAvgFT, fine_epochs=3),
    "FedProx": _by_gradient(FedProxFT, shared=True, fine_epochs=3),
    "FedProx + fine-tuning": _by_gradient(FedProxFT, fine_epochs=3),
    "Ditto": _by_gradient(Ditto),
    "FedALA": _by_gradient(FedALA),
    "FedDBE": _by_gradient(FedDBE),
    "FedAS": _by_gradient(FedAS),
    # Few rounds: 94.2, 94.4 and 93.1 % after 3, 8 and 20 (100 clients, alpha 0.1, seed 0).
    "FedPCL": _by_gradient(FedPCL, network="mlp:256", rate=0.001, rounds=3),
    "FedSelect": _by_gradient(FedSelect),
}
"""What joins them when asked for: the paper's gradient methods, trained in every cell."""


def measure(
    rows: Rows,
    setting: Setting,
    clients: Sequence[int] = (50, 100),
    alphas: Sequence[float] = (0.1, 0.5, 1.0),
    seeds: Sequence[int] = (0, 1, 2),
    entries: Sequence[str] = tuple(ENTRIES),
) -> dict[str, Any]:
    """Local accuracies of every entry in every cell, and of every balance of a grid."""
    cells = []
    for seed in seeds:
        shared = Shared(rows, setting, seed)
        for count, alpha in itertools.product(clients, alphas):
            cell = Cell(rows, shared, count, alpha)
            found: dict[str, Any] = {"clients": count, "alpha": alpha, "seed": seed}
            found["heterogeneity"] = cell.heterogeneity
            known = ENTRIES | BY_GRADIENT
            found["entries"] = {name: cell.score(known[name](cell)).as_dict() for name in entries}
            found["balances"] = [model.balance for model in cell.personal]
            found["grid"] = _grid(cell)
            cells.append(found)
            told = ", ".join(f"{n} {100 * e['mean']:.2f}" for n, e in found["entries"].items())
            progress(f"{count} clients, alpha {alpha:g}, seed {seed}: {told}")
    return {"data": rows.name, "setting": vars(setting), "cells": cells}


def _grid(cell: Cell) -> list[float]:
    """Mean local accuracy at every balance of the grid, from two passes over the test rows."""
    accuracies = []
    for model, data in zip(cell.personal, cell.test, strict=True):
        if not len(data):
            continue
        features, labels = data.features(slice(None)), data.own_labels
        shared = model.shared.estimates(features)
        own = model.with_balance(1.0).decision_function(features) - shared
        assert model.classes is not None
        accuracies.append(
            [np.mean(model.classes[np.argmax(shared + b * own, axis=1)] == labels) for b in GRID]
        )
    return [float(value) for value in np.mean(accuracies, axis=0)]


# -- telling ---------------------------------------------------------------------------------------


def settings_of(result: dict[str, Any]) -> list[tuple[int, float]]:
    """The columns: clients and alpha, in order."""
    return list(dict.fromkeys((cell["clients"], cell["alpha"]) for cell in result["cells"]))


def values(result: dict[str, Any], column: tuple[int, float], entry: str, what: str = "mean") -> list[float]:
    """A measure of an entry in a column, in per cent, one for every seed."""
    at = [cell for cell in result["cells"] if (cell["clients"], cell["alpha"]) == column]
    return [100 * cell["entries"][entry][what] for cell in at]


def show(console: Console, result: dict[str, Any]) -> None:
    """The tables, and whether APFL is at least as good as each of its streams."""
    columns = settings_of(result)
    names = list(result["cells"][0]["entries"])
    for what, title in (
        ("mean", "Local accuracy, mean over clients (%)"),
        ("worst_decile", "Local accuracy, the tenth of the clients that fare worst (%)"),
    ):
        table = _table(f"{title}, {result['data']}", columns)
        for name in names:
            table.add_row(name, *(_told(values(result, column, name, what)) for column in columns))
        console.print(table)
    _show_balances(console, result, columns)


def _show_balances(console: Console, result: dict[str, Any], columns: Sequence[tuple[int, float]]) -> None:
    table = _table("The automatic balance against the best of a grid chosen with the test rows", columns)
    rows: dict[str, list[str]] = {
        "best of the grid, %": [],
        "at balance": [],
        "auto minus best, points": [],
        "auto minus better stream, points": [],
        "clients that lose against the shared stream, %": [],
        "balances chosen, median (10 % to 90 %)": [],
    }
    behind, below = [], []
    for column in columns:
        at = [cell for cell in result["cells"] if (cell["clients"], cell["alpha"]) == column]
        grids = np.array([cell["grid"] for cell in at])
        best = int(np.argmax(grids.mean(axis=0)))
        auto = values(result, column, "APFL, auto")
        rows["best of the grid, %"].append(_told((100 * grids[:, best]).tolist()))
        rows["at balance"].append(f"{GRID[best]:g}")
        gaps = (np.array(auto) - 100 * grids[:, best]).tolist()
        rows["auto minus best, points"].append(_told(gaps, "+"))
        streams = [values(result, column, name) for name in ("primary only", "local only")]
        better = max(streams, key=lambda found: float(np.mean(found)))
        over = (np.array(auto) - better).tolist()
        rows["auto minus better stream, points"].append(_told(over, "+"))
        rows["clients that lose against the shared stream, %"].append(_told([_losing(cell) for cell in at]))
        low, middle, high = np.quantile([b for cell in at for b in cell["balances"]], (0.1, 0.5, 0.9))
        rows["balances chosen, median (10 % to 90 %)"].append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        behind.append(float(np.mean(gaps)))
        below.append(float(np.mean(over)))
    for name, texts in rows.items():
        table.add_row(name, *texts)
    console.print(table)
    seeds = len({cell["seed"] for cell in result["cells"]})
    console.print(
        f"± is the standard error over {seeds} seeds, which also deal the rows. Shared models are trained "
        "once per seed: they do not depend on who owns what."
    )
    met = min(below) >= 0
    console.print(
        f"  APFL is at least as good as the better of its streams in every column: {'yes' if met else 'NO'} "
        f"(least {min(below):+.2f} points)"
    )
    near = min(behind) >= -NEAR
    console.print(
        f"  auto is within {NEAR:g} points of the best balance in every column: {'yes' if near else 'NO'} "
        f"(least {min(behind):+.2f} points)"
    )


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """personal-gains.png and personal-heterogeneity.png, from the last number of clients."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = max(cell["clients"] for cell in result["cells"])
    cells = [cell for cell in result["cells"] if cell["clients"] == clients]
    first = min(cell["seed"] for cell in cells)
    gains: dict[str, Array] = {}
    for cell in cells:
        if cell["seed"] == first and cell["alpha"] in (cells[0]["alpha"], cells[-1]["alpha"]):
            for name, words in (("primary only", "shared"), ("local only", "local only")):
                gains[f"over {words}, α = {cell['alpha']:g}"] = _gains(cell["entries"], name)
    names = list(cells[0]["entries"])
    series = []
    for look, name in enumerate(names):
        points = sorted(
            (float(np.mean([c["heterogeneity"] for c in of])), [100 * c["entries"][name]["mean"] for c in of])
            for of in (
                [c for c in cells if c["alpha"] == alpha]
                for alpha in dict.fromkeys(c["alpha"] for c in cells)
            )
        )
        means = [mean_error(found) for _, found in points]
        series.append(
            Series(
                name,
                look,
                tuple(place for place, _ in points),
                tuple(mean for mean, _ in means),
                tuple(error for _, error in means),
            )
        )
    figures = {
        "personal-gains.png": gain_plot("", "", gains).figure,
        "personal-heterogeneity.png": plots.draw(
            [
                Panel(
                    series,
                    Axis("heterogeneity of the clients' classes (0 even, 1 one class each)"),
                    Axis("local accuracy, mean over clients (%)"),
                )
            ]
        ),
    }
    for name, figure in figures.items():
        (folder / name).write_bytes(plots.render(figure, "png"))
    return [folder / name for name in figures]


def _losing(cell: dict[str, Any]) -> float:
    """Per cent of the clients with test rows that are less accurate with a model of their own."""
    gains = _gains(cell["entries"], "primary only")
    return 100 * float(np.mean(gains[np.isfinite(gains)] < 0))


def _gains(entries: dict[str, Any], reference: str) -> Array:
    own, other = (
        ClientScores(tuple(e["clients"]), np.array(e["correct"]), np.array(e["rows"]))
        for e in (entries["APFL, auto"], entries[reference])
    )
    return 100 * own.gains(other)


def _table(title: str, columns: Sequence[tuple[int, float]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for clients, alpha in columns:
        table.add_column(f"{clients}, α = {alpha:g}", justify="right")
    return table


def _told(found: Sequence[float], sign: str = "") -> str:
    mean, error = mean_and_error(found)
    return f"{mean:{sign}.2f}" + ("" if error is None else f" ± {error:.2f}")
