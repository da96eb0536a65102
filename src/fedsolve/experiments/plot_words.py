"""What the figures of a run share: the choice of observations, their names, and captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, distinct, groups, mean_error, names_of
from fedsolve.pages.plots import Axis, Panel, Plot, Series
from fedsolve.pages.words import capital

MOST_SERIES = 8
"""More lines than this in one figure cannot be told apart."""
ACCURACY = Axis(METRICS["test"].label)


@dataclass(frozen=True)
class Variant:
    """A method at a point of its grid as figures show it: its name, its look, its observations (seeds)."""

    name: str
    look: int
    items: list[Observation]

    def series(self, rows: Iterable[Sequence[float]], first: int = 0) -> Series:
        """Means over seeds, place by place from `first` on. rows: values of each seed."""
        means = [mean_error(column) for column in zip(*(row for row in rows if len(row)), strict=False)]
        places = tuple(float(place) for place in range(first, first + len(means)))
        return Series(self.name, self.look, places, *_columns(means))


def variants(items: Sequence[Observation]) -> list[Variant]:
    """Each method at each point of its grid; its look follows from its place among all of them."""
    name = names_of(items, without=("depth",))
    by_variant = groups(items, lambda item: item.variant).values()
    return [Variant(name(of[0]), look, of) for look, of in enumerate(by_variant)]


def reference(items: Sequence[Observation]) -> str:
    """The partition to show where only one fits: the first of those with most observations."""
    counts = {name: len(of) for name, of in groups(items, lambda item: item.partition).items()}
    return max(counts, key=lambda name: counts[name])


def shown(items: Sequence[Observation]) -> list[Observation]:
    """The observations of the reference partition, one for each cell."""
    name = reference(items)
    return list({item.cell["key"]: item for item in items if item.partition == name}.values())


def series_of(
    name: str, look: int, items: Iterable[Observation], x: Callable[[Observation], float]
) -> Series:
    """Mean accuracies over seeds along x, in order of x."""
    places = sorted(groups(items, x).items())
    means = [mean_error(item.accuracy for item in of) for _, of in places]
    return Series(name, look, tuple(float(place) for place, _ in places), *_columns(means))


def described(series: Sequence[Series], over: str) -> str:
    """Where each line begins and ends. over: the axes in words."""
    phrases = []
    for line in series:
        ends = [f"{_number(y)} at {x:g}" for x, y in zip(line.x, line.y, strict=True)]
        if ends:
            phrases.append(f"{line.name} " + (f"from {ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0]))
    return f"{capital(over)}: {'; '.join(phrases)}."


def seeds_told(items: Sequence[Observation]) -> str:
    """Over what the means are taken, as part of a sentence."""
    count = len(distinct(item.seed for item in items))
    return "one seed" if count == 1 else f"mean over {count} seeds, with standard errors"


def where(items: Sequence[Observation]) -> str:
    """The partition and the seeds, as part of a sentence."""
    return f"partition {items[0].partition}; {seeds_told(items)}"


def _columns(means: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(mean for mean, _ in means), tuple(error for _, error in means)


def _number(value: float) -> str:
    if math.isnan(value):
        return "nothing"
    return f"{value:.1f}" if 1 <= abs(value) < 1000 else f"{value:.3g}"


def row_plot(
    name: str,
    title: str,
    where: str,
    rows: Sequence[str],
    series: Sequence[Series],
    items: Sequence[Observation],
    label: str = ACCURACY.label,
) -> Iterator[Plot]:
    """where: the beginning of the caption, before the seeds."""
    if len(series) > MOST_SERIES:
        return
    values = [
        " ".join(word for word in (rows[int(place)], line.name, f"{value:.1f} %") if word)
        for line in series
        for place, value in zip(line.x, line.y, strict=True)
    ]
    words = f"{capital(label.removesuffix(' (%)'))}: {'; '.join(values)}."
    panel = Panel(series, Axis.of("", rows), Axis(label), kind="rows")
    yield Plot(name, title, capital(f"{where}{seeds_told(items)}."), words, [panel])
