"""The words and tables of `fedsolve demo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from fedsolve.cli.comparison import Change, Comparison, DemoDivision, Digits, Entry, counted
from fedsolve.cli.output import megabytes, percent, table
from fedsolve.data.partitions import class_counts


def introduce(page: Console, digits: Digits, division: DemoDivision, alpha: float) -> None:
    """Whose data these are."""
    counts = class_counts(digits.y_train, division.owners, division.clients)
    sizes = division.sizes
    held = float(np.mean((counts > 0).sum(axis=1)[sizes > 0]))
    owners = counted(division.clients, "client")
    _heading(page, f"Handwritten digits, divided among {owners}")
    page.print(
        f"{len(digits.y_train):,} training images of 8 x 8 pixels belong to {owners}. "
        f"A Dirichlet({alpha:g}) draw decides who owns what: {sizes.min()} to {sizes.max()} images each, "
        f"{held:.1f} of the {counts.shape[1]} digits on average. No image may leave its owner. "
        f"{len(digits.y_test):,} further images are kept for testing."
    )


def show_entries(page: Console, entries: Sequence[Entry], comparison: Comparison) -> None:
    """What each method reaches and what it costs."""
    rows = [
        (
            entry.name,
            percent(entry.accuracy),
            str(entry.exchanges),
            megabytes(entry.bytes_up + entry.bytes_down),
            f"{entry.seconds:.2f}",
        )
        for entry in entries
    ]
    page.print(table(("method", "test accuracy", "exchanges", "MB", "seconds"), rows))
    fedavg, deepafl = comparison.fedavg, comparison.deepafl
    page.print(
        "MB is payload up and down, all clients together. FedAvg averages a softmax head on the pixels: "
        f"{fedavg.epochs} local epochs a round, batches of {fedavg.batch}, rate {fedavg.rate:g}. "
        f"AFL and the local models solve a ridge of {comparison.afl.ridge:g} on the pixels. DeepAFL has "
        f"width {deepafl.width} and its default ridges; its lines are one run read at several depths, each "
        "with what a run of that depth takes.",
        style="dim",
    )
    page.print()


def show_changes(page: Console, first: DemoDivision, fedavg: Entry, changes: Sequence[Change]) -> None:
    """What happens when the same rows are dealt differently."""
    _heading(page, "The same images, dealt differently")
    page.print(
        "How much the weights change against the models above (largest relative difference of any weight "
        "matrix), and whether AFL and DeepAFL, at every depth, still read every test image the same way."
    )
    rows = [(f"{first.name} (above)", "-", "-", "-", "-", percent(fedavg.accuracy))]
    rows += [
        (
            change.division.name,
            _difference(change.afl),
            _difference(change.deepafl),
            "yes" if change.same_predictions else "NO",
            f"{change.fedavg:.0%}",
            percent(change.fedavg_accuracy),
        )
        for change in changes
    ]
    heads = ("who owns the images", "AFL", "DeepAFL", "same answers", "FedAvg", "FedAvg accuracy")
    page.print(table(heads, rows))
    worst = max(max(change.afl, change.deepafl) for change in changes)
    accuracies = [fedavg.accuracy, *(change.fedavg_accuracy for change in changes)]
    spread = 100 * (max(accuracies) - min(accuracies))
    if all(change.same_predictions for change in changes):
        page.print(
            "[bold]The closed-form models are those of the pooled data, whoever owns what[/bold]: clients "
            "send terms of sums, and sums do not care who holds which addend. What remains, "
            f"{_difference(worst)}, is rounding{_exact(changes)}. "
            f"FedAvg's accuracy moves by {spread:.1f} points."
        )
    else:
        page.print(
            f"[bold]Some answers differ[/bold] although the weights agree to {_difference(worst)}: two "
            "scores of a test image are equal up to rounding."
        )
    page.print()


def close(page: Console, folder: Path, figure: bool, seconds: float) -> None:
    """Where the files are and what to try."""
    written = "demo.png, digits.npz and results.json" if figure else "digits.npz and results.json"
    page.print(f"Wrote {written} to {folder}/ after {seconds:.0f} seconds.", markup=False)
    _heading(page, "Try next")
    data = folder / "digits.npz"
    lines = (
        f"fedsolve train {data} --layers 5 --partition shards --out model.safetensors",
        f"fedsolve evaluate model.safetensors {data}",
        "fedsolve train --help      # your own npz, csv or parquet file",
    )
    for line in lines:
        page.print(f"  {line}", markup=False, soft_wrap=True)


def _heading(page: Console, text: str) -> None:
    page.print(text, style="bold")


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def _exact(changes: Sequence[Change]) -> str:
    if any(change.afl for change in changes):
        return ""
    return " (AFL has none: sums of products of sixteenths are exact)"
