"""Figures of a run: the ones its cells can give, each readable in black and white.

style       one look, equal bytes for equal data
lines       values over a number; maps: over two categories. Pure functions of their data
plots       a figure with its caption and its data in words; what is compared, under what name and look
depth       what depth does; conditions: what partition, noise and method do; sensitivity: what parameters do
round_curves what gradient methods do round by round, and what feedback alignment changes
gains       what a model of its own gains each client
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsolve import container
from fedsolve.experiments.figures.conditions import clients_plots, method_plots, noise_plots, skew_plots
from fedsolve.experiments.figures.depth import cost_plots, depth_plots, risk_plots, separability_plots
from fedsolve.experiments.figures.gains import gain_plots
from fedsolve.experiments.figures.maps import Ownership, partition
from fedsolve.experiments.figures.plots import Plot
from fedsolve.experiments.figures.round_curves import (
    alignment_plots,
    gained_plots,
    representation_plots,
    round_plots,
    selection_plots,
)
from fedsolve.experiments.figures.sensitivity import sensitivity_plots
from fedsolve.experiments.figures.style import Format, render
from fedsolve.experiments.observations import by_dataset, scored
from fedsolve.experiments.run_folder import RunFolder, load_run

MOST_PARTITIONS = 6

_KINDS = (
    noise_plots,
    sensitivity_plots,
    depth_plots,
    cost_plots,
    separability_plots,
    risk_plots,
    round_plots,
    gained_plots,
    representation_plots,
    alignment_plots,
    selection_plots,
)


def write_figures(runs: Sequence[Path], folder: Path, form: Format = "png") -> list[Path]:
    """Draw every figure of these runs into `folder` and give the files, RUN-DATASET-FIGURE.FORM."""
    written = []
    for run in map(load_run, runs):
        for dataset, drawn in plots(run).items():
            for plot in drawn:
                path = folder / f"{slug(f'{run.name}-{dataset}-{plot.name}')}.{form}"
                container.write_atomically(path, render(plot.figure, form))
                written.append(path)
    return written


def plots(run: RunFolder) -> dict[str, list[Plot]]:
    """The figures that each dataset of a run can have."""
    figures = {}
    for dataset, cells in by_dataset(run).items():
        items = scored(cells)
        drawn = _partition_plots(run, cells[0]["dataset"]["name"])
        if items:
            over_partitions = skew_plots(items) + clients_plots(items)
            # Where partitions differ, lines over them show the methods already.
            drawn += over_partitions or method_plots(items)
            drawn += [plot for kind in _KINDS for plot in kind(items)]
            drawn += gain_plots(cells)
        figures[dataset] = drawn
    return figures


def slug(text: str) -> str:
    """The text as a name for files and addresses."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"


def _partition_plots(run: RunFolder, dataset: str) -> list[Plot]:
    """Who owns which class, unless all shares are even."""
    owners = [
        Ownership(table["name"], np.asarray(table["class_counts"]), tuple(map(str, table["classes"])))
        for table in run.partitions
        if table["dataset"] == dataset and len(table["class_counts"]) > 1
    ][:MOST_PARTITIONS]
    even = all(t["kind"] == "iid" for t in run.partitions if t["dataset"] == dataset)
    if not owners or even:
        return []
    averages = [(one.name, float((one.counts > 0).sum(axis=1).mean())) for one in owners]
    summary = "; ".join(
        f"{name}: {count:.1f} of {owners[0].counts.shape[1]} classes" for name, count in averages
    )
    return [
        Plot(
            "partition",
            "Who owns which class.",
            "A dot for every client and class, its area the number of rows; one seed shown.",
            f"Classes that a client holds on average: {summary}.",
            partition(owners),
        )
    ]
