"""The demo's figure: who owns which class, and what depth gains. Readable in black and white."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.cli.comparison import Entry, counted
from fedsolve.container import Array

_INK = "0.15"
_STYLES = ("--", "-", ":", "-.")


def draw(counts: Array, stages: Array, lines: Sequence[tuple[str, Entry]], test_rows: int) -> bytes:
    """A PNG with two panels.

    counts: (clients, classes) rows owned. stages: test accuracy after 0, 1, ..., T blocks.
    lines:  accuracies to compare with, drawn across the right panel.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    _owners(left, counts)
    _depth(right, stages, lines, test_rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(11)
    image = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(image, format="png")
    return image.getvalue()


def _owners(axes: Any, counts: Array) -> None:
    clients, classes = np.nonzero(counts)
    area = counts[clients, classes] / counts.max()
    axes.scatter(clients + 1, classes, s=170 * area, color=_INK, linewidths=0)
    axes.set_title("Who owns which digit (area: number of images)", loc="left")
    axes.set_xlabel("client")
    axes.set_ylabel("digit")
    step = 5 if len(counts) <= 40 else 10 * math.ceil(len(counts) / 60)
    axes.set_xticks([1, *range(step, len(counts) + 1, step)])
    axes.set_yticks(range(counts.shape[1]))
    axes.margins(0.05, 0.08)


def _depth(axes: Any, stages: Array, lines: Sequence[tuple[str, Entry]], test_rows: int) -> None:
    # Errors on a log scale, labelled as accuracies: 94 and 99 per cent are far apart, and so they look.
    least = 0.5 / test_rows
    depth = len(stages) - 1
    axes.plot(np.maximum(1 - stages, least), color=_INK, marker="o", markersize=4, linewidth=1.6)
    above = 0.0
    for (name, entry), style in zip(sorted(lines, key=_accuracy, reverse=True), _STYLES, strict=False):
        error = max(1 - entry.accuracy, least)
        crowded = error < 1.2 * above
        axes.axhline(error, color="0.45", linestyle=style, linewidth=1.2, zorder=0)
        axes.annotate(
            f"{name}  {100 * entry.accuracy:.1f} %",
            (depth, error),
            xytext=(0, -11 if crowded else 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="0.25",
        )
        above = error
    # Under the flat part of the curve, where nothing else is drawn.
    axes.annotate(
        f"DeepAFL, {counted(depth, 'block')}  {100 * stages[-1]:.1f} %",
        (depth, max(1 - float(stages.min(initial=1.0, where=np.arange(len(stages)) > depth // 2)), least)),
        xytext=(0, -16),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        weight="bold",
    )
    axes.set_yscale("log")
    axes.invert_yaxis()
    ticks = [error for error in (0.8, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002) if error >= least]
    axes.set_yticks(ticks, [f"{100 * (1 - error):g} %" for error in ticks])
    axes.minorticks_off()
    worst = max(1 - min(entry.accuracy for _, entry in lines), 1 - float(stages.min()))
    axes.set_ylim(min(1.0, 1.25 * worst), 0.6 * max(1 - float(stages.max()), least))
    axes.set_xticks(range(0, depth + 1, max(1, depth // 4)))
    axes.set_title("Test accuracy (errors on a log scale)", loc="left")
    axes.set_xlabel("residual blocks, each solved in closed form")


def _accuracy(line: tuple[str, Entry]) -> float:
    return line[1].accuracy
