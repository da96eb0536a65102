"""A figure with its words: what a caption says, and what it shows to somebody who cannot see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fedsolve.experiments.figures.lines import Series
from fedsolve.experiments.observations import Observation, distinct, groups, names_of
from fedsolve.experiments.significance import mean_error

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
    return f"{where}: " + "; ".join(_summary(line, unit) for line in series if line.x) + "."


def seeds_told(items: Sequence[Observation]) -> str:
    """Over what the means are taken, as part of a sentence."""
    count = len(distinct(item.seed for item in items))
    return "one seed" if count == 1 else f"mean over {count} seeds, with standard errors"


def sentence(text: str) -> str:
    """The words with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def reference(items: Sequence[Observation]) -> str:
    """The partition to show where only one fits: the first of those that most methods were run on."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item.partition] = counts.get(item.partition, 0) + 1
    return max(counts, key=lambda name: counts[name])


@dataclass(frozen=True)
class Variant:
    """A method at a point of its grid as figures show it: its name, its look, its observations (seeds)."""

    name: str
    look: int
    items: list[Observation]

    def series(
        self, rows: Iterable[Sequence[float]], first: int = 0, words: str = "", look: int = 0
    ) -> Series:
        """Means over seeds, place by place from `first` on.

        rows: values of each seed. words: what the name says besides, and look: what the look is raised by,
            where a variant has several lines.
        """
        means = [mean_error(column) for column in zip(*(row for row in rows if row), strict=False)]
        places = tuple(float(place) for place in range(first, first + len(means)))
        return Series(f"{self.name}{words}", self.look + look, places, *_columns(means))


def shown(items: Sequence[Observation]) -> list[Observation]:
    """The observations of the reference partition, one for each cell."""
    name = reference(items)
    return list({item.cell["key"]: item for item in items if item.partition == name}.values())


def variants(items: Sequence[Observation]) -> list[Variant]:
    """Each method at each point of its grid; its look follows from its place among all of them."""
    name = names_of(items, without=("depth",))
    by_variant = groups(items, lambda item: item.variant).values()
    return [Variant(name(of[0]), look, of) for look, of in enumerate(by_variant)]


def series_of(
    name: str, look: int, items: Iterable[Observation], x: Callable[[Observation], float]
) -> Series:
    """Mean accuracies over seeds along x, in order of x."""
    places = sorted(groups(items, x).items())
    means = [mean_error(item.accuracy for item in of) for _, of in places]
    return Series(name, look, tuple(place for place, _ in places), *_columns(means))


def _columns(means: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(mean for mean, _ in means), tuple(error for _, error in means)


def where(items: Sequence[Observation]) -> str:
    """The partition and the seeds, as part of a sentence."""
    return f"partition {items[0].partition}; {seeds_told(items)}"


def _summary(line: Series, unit: str) -> str:
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
