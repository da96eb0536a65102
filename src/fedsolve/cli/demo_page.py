"""The words and tables of `fedsolve demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve.cli.output import counted, percent, table
from fedsolve.container import Array
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.sources import ExperimentRows


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


def show_methods(page: Console, run: RunFolder) -> None:
    """What each method reaches and what it costs."""
    (results,) = tables_of(run)
    lines = [(row.label, *(entry.text for entry in row.entries if entry is not None)) for row in results.rows]
    page.print(table((results.corner, *results.columns), lines))
    of = {cell["algorithm"]: cell["parameters"] for cell in run.cells}
    fedavg = of["fedavg-numpy"]
    page.print(
        "MB is payload up and down, all clients together. FedAvg averages a softmax head on the pixels: "
        f"{fedavg['epochs']} local epochs a round, batches of {fedavg['batch']}, rate {fedavg['rate']:g}. "
        f"AFL and the local models solve a ridge of {of['afl']['ridge']:g} on the pixels. DeepAFL has "
        f"width {of['deepafl']['width']} and its default ridges; its lines are one run read after T residual "
        "blocks, each with what a run of that depth takes.",
        style="dim",
    )
    page.print()


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
