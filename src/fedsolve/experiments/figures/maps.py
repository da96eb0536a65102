"""Figures over two categories: who owns which class, and accuracy over two parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedsolve.container import Array
from fedsolve.experiments.figures.style import INK, blank, styled

SHOWN_CLIENTS = 40
SHOWN_CLASSES = 40
# Cells of a heat map keep their own ink, light or dark, whatever the page around them looks like.
ON_LIGHT, ON_DARK = "#101114", "#fcfcfa"
LIGHT, DARK = 0.94, 0.30


@dataclass(frozen=True)
class Ownership:
    """Rows owned: counts (clients, classes)."""

    name: str
    counts: Array
    class_names: tuple[str, ...] = ()


def partition(owners: Sequence[Ownership]) -> Figure:
    """Who owns which class: a panel per partition, a dot per client and class, its area the rows."""

    def draw() -> Figure:
        shown = [_sample(owner) for owner in owners]
        columns = min(2, len(shown))
        rows = -(-len(shown) // columns)
        classes = max(one.counts.shape[1] for one in shown)
        figure = blank(7.2 if columns == 2 else 5.2, 0.5 + rows * (1.5 + 0.12 * max(6, classes)))
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for place, (axes, one) in enumerate(zip(grid.flat, shown, strict=False)):
            draw_owners(axes, one)
            if place % columns == 0:
                axes.set_ylabel("class")
            if place + columns >= len(shown):
                axes.set_xlabel("client")
        return figure

    return styled(draw)


def heat_map(
    values: Array, rows: Sequence[str], columns: Sequence[str], row_label: str, column_label: str
) -> Figure:
    """Accuracies in per cent as numbers on grey, darker for higher; the best is framed, nan stays empty.

    values: (rows, columns).
    """

    def draw() -> Figure:
        figure = blank(1.8 + 0.85 * len(columns), 1.2 + 0.45 * len(rows))
        axes = figure.subplots()
        axes.grid(False)
        low, high = np.nanmin(values), np.nanmax(values)
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                axes.text(column, row, "–", ha="center", va="center")
                continue
            share = (value - low) / (high - low) if high > low else 0.0
            grey = LIGHT + (DARK - LIGHT) * share
            best = value == high
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=str(grey), linewidth=0))
            if best:
                frame = Rectangle((column - 0.46, row - 0.45), 0.92, 0.9, fill=False, linewidth=2.0)
                frame.set_edgecolor(ON_DARK if grey < 0.46 else ON_LIGHT)
                axes.add_patch(frame)
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                color=ON_DARK if grey < 0.46 else ON_LIGHT,
                weight="bold" if best else "normal",
            )
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xticks(range(len(columns)), list(columns))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(column_label)
        axes.set_ylabel(row_label)
        return figure

    return styled(draw)


def _sample(owner: Ownership) -> Ownership:
    """At most as many clients and classes as can be told apart, evenly spaced, and a name that says so."""
    clients, classes = owner.counts.shape
    keep_clients = _evenly(clients, SHOWN_CLIENTS)
    keep_classes = _evenly(classes, SHOWN_CLASSES)
    remarks = []
    if len(keep_clients) < clients:
        remarks.append(f"{len(keep_clients)} of {clients:,} clients")
    if len(keep_classes) < classes:
        remarks.append(f"{len(keep_classes)} of {classes:,} classes")
    name = owner.name + (f" ({', '.join(remarks)})" if remarks else "")
    names = tuple(owner.class_names[place] for place in keep_classes) if owner.class_names else ()
    return Ownership(name, owner.counts[np.ix_(keep_clients, keep_classes)], names)


def _evenly(count: int, most: int) -> Array:
    return (
        np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(int))
    )


def draw_owners(axes: Axes, owner: Ownership) -> None:
    """A dot for every client and class, its area the number of rows."""
    counts = owner.counts
    clients, classes = np.nonzero(counts)
    area = counts[clients, classes] / max(1, counts.max())
    axes.scatter(clients + 1, classes, s=95 * area, color=INK, linewidths=0)
    axes.set_title(owner.name)
    axes.grid(False)
    axes.set_xlim(0, len(counts) + 1)
    axes.set_ylim(-1, counts.shape[1])
    step = 5 if len(counts) > 10 else 1
    axes.set_xticks([1, *range(step, len(counts) + 1, step)])
    if owner.class_names and counts.shape[1] <= 12:
        axes.set_yticks(range(counts.shape[1]), [_short(name) for name in owner.class_names])
    else:
        axes.set_yticks(range(0, counts.shape[1], max(1, counts.shape[1] // 10)))


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:13]}…"
