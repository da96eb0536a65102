"""The words and tables of `fedsolve demo`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve.cli.output import Output, percent, table
from fedsolve.container import Array
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import Cell, Experiment
from fedsolve.experiments.observations import observations
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.runner import record_of
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.experiments.wording import counted


def introduce(page: Console, rows: ExperimentRows, counts: Array, alpha: float) -> None:
    """Whose data these are. counts: images of each client and digit."""
    sizes = counts.sum(axis=1)
    kinds = float(np.mean((counts > 0).sum(axis=1)[sizes > 0]))
    owners = counted(len(counts), "client")
    assert rows.y_test is not None
    page.print(f"Handwritten digits, divided among {owners}", style="bold")
    page.print(
        f"{len(rows.y_train):,} training images of 8 x 8 pixels belong to {owners}. "
        f"A Dirichlet({alpha:g}) draw decides who owns what: {sizes.min()} to {sizes.max()} images each, "
        f"{kinds:.1f} of the {counts.shape[1]} digits on average. No image may leave its owner. "
        f"{len(rows.y_test):,} further images are kept for testing."
    )


def train(
    output: Output, experiment: Experiment, cells: Collection[Cell], rows: ExperimentRows
) -> tuple[RunFolder, list[Outcome]]:
    """Cells of the experiment with their outcomes, as a run that tables and figures read."""
    outcomes: list[Outcome] = []
    with output.bar("training", "model") as bar:
        for cell in cells:
            bar(len(outcomes), len(cells), str(cell))
            outcomes.append(train_cell(cell, rows))
    records = [
        record_of(experiment, cell, cell.key(rows.key), rows, outcome.values)
        for cell, outcome in zip(cells, outcomes, strict=True)
    ]
    return RunFolder(Path(), experiment, records, 0, []), outcomes


def show_results(page: Console, run: RunFolder, remark: str) -> None:
    """What each method reaches and what it costs."""
    (results,) = tables_of(run)
    lines = [
        (row.label, *("" if entry is None else entry.text for entry in row.entries)) for row in results.rows
    ]
    page.print(table((results.corner, *results.columns), lines))
    page.print(remark, style="dim")
    page.print()


def document(run: RunFolder, counts: Array) -> dict[str, Any]:
    """What came out, as JSON values."""
    first = run.cells[0]
    return {
        "data": first["dataset"],
        "division": first["partition"] | {"rows_per_client": counts.sum(axis=1)},
        "seed": first["seed"],
        "parameters": {cell["method"]: cell["parameters"] for cell in run.cells},
        "methods": [
            {"name": one.method, "depth": one.depth, **one.values} for one in observations(run.cells)
        ],
    }


def show_changes(page: Console, first: str, reached: float, changes: Sequence[Mapping[str, Any]]) -> None:
    """What happens when the same rows are dealt differently.

    first: the name of the division so far. reached: FedAvg's accuracy on it.
    """
    page.print("The same images, dealt differently", style="bold")
    page.print(
        "How much the weights change against the models above (largest relative difference of any weight "
        "matrix), and whether AFL and DeepAFL, at every depth, still read every test image the same way."
    )
    lines = [(f"{first} (above)", "-", "-", "-", "-", percent(reached))]
    lines += [
        (
            change["division"],
            _difference(change["afl"]),
            _difference(change["deepafl"]),
            "yes" if change["same_predictions"] else "NO",
            f"{change['fedavg']:.0%}",
            percent(change["fedavg_accuracy"]),
        )
        for change in changes
    ]
    heads = ("who owns the images", "AFL", "DeepAFL", "same answers", "FedAvg", "FedAvg accuracy")
    page.print(table(heads, lines))
    worst = _difference(max(max(change["afl"], change["deepafl"]) for change in changes))
    accuracies = [reached, *(change["fedavg_accuracy"] for change in changes)]
    spread = 100 * (max(accuracies) - min(accuracies))
    exact = " (AFL has none: sums of products of sixteenths are exact)"
    if all(change["same_predictions"] for change in changes):
        page.print(
            "[bold]The closed-form models are those of the pooled data, whoever owns what[/bold]: clients "
            "send terms of sums, and sums do not care who holds which addend. What remains, "
            f"{worst}, is rounding{'' if any(change['afl'] for change in changes) else exact}. "
            f"FedAvg's accuracy moves by {spread:.1f} points."
        )
    else:
        page.print(
            f"[bold]Some answers differ[/bold] although the weights agree to {worst}: two scores of a test "
            "image are equal up to rounding."
        )
    page.print()


def close(page: Console, folder: Path, files: Sequence[str], seconds: float) -> None:
    """Where the files are and what to try."""
    page.print(f"Wrote {' and '.join(files)} to {folder}/ after {seconds:.0f} seconds.", markup=False)
    page.print("Try next", style="bold")
    for line in (
        "fedsolve train digits --layers 5 --partition shards --out model.safetensors",
        "fedsolve evaluate model.safetensors digits",
        "fedsolve train --help      # your own npz, csv or parquet file",
    ):
        page.print(f"  {line}", markup=False, soft_wrap=True)


def relative_difference(reference: Array, other: Array) -> float:
    """|other - reference| / |reference|, in the Frobenius norm."""
    return float(np.linalg.norm(other - reference) / np.linalg.norm(reference))


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
