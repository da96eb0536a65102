"""A figure with its words: what a caption says, and what it shows to somebody who cannot see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fedsolve.experiments.figures.lines import Series
from fedsolve.experiments.figures.readings import Reading, distinct, groups, names_of

MOST_SERIES = 8
"""More lines than this in one figure cannot be told apart."""


@dataclass(frozen=True)
class Plot:
    """name: part of file names. title and caption: sentences under it. description: its data in words."""

    name: str
    title: str
    caption: str
    description: str
    figure: Figure


def described(series: Sequence[Series], unit: str, where: str) -> str:
    """What the lines do: where each begins and ends. `where` names the x axis."""
    return f"{where}: " + "; ".join(_told(line, unit) for line in series if line.x) + "."


def seeds_told(items: Sequence[Reading]) -> str:
    """Over what the means are taken, as part of a sentence."""
    count = len(distinct(item.seed for item in items))
    return "one seed" if count == 1 else f"mean over {count} seeds, with standard errors"


def sentence(text: str) -> str:
    """The words with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def reference(items: Sequence[Reading]) -> str:
    """The partition to show where only one can be: the one most methods were run on, the first of these."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item.partition] = counts.get(item.partition, 0) + 1
    return max(counts, key=lambda name: counts[name])


def shown(items: Sequence[Reading]) -> tuple[Callable[[Reading], str], list[Reading]]:
    """The readings of the reference partition, one for each cell, and how to call them."""
    name = reference(items)
    once = {item.cell["key"]: item for item in items if item.partition == name}
    found = list(once.values())
    return names_of(found, without=("depth",)), found


def variants(items: Sequence[Reading]) -> list[list[Reading]]:
    """The readings of each method at each point of its grid, seeds together."""
    return list(groups(items, lambda item: (item.method, item.grid, item.noise)).values())


def where(items: Sequence[Reading]) -> str:
    """The partition and the seeds, as part of a sentence."""
    return f"partition {items[0].partition}; {seeds_told(items)}"


def _told(line: Series, unit: str) -> str:
    if len(line.x) == 1:
        return f"{line.name} {_number(line.y[0])}{unit}"
    return (
        f"{line.name} from {_number(line.y[0])}{unit} at {line.x[0]:g} "
        f"to {_number(line.y[-1])}{unit} at {line.x[-1]:g}"
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "nothing"
    return f"{value:.1f}" if 1 <= abs(value) < 1000 else f"{value:.3g}"
