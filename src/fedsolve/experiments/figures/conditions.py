"""How accuracy follows the setting: skew, number of clients, label noise, method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsolve.experiments.figures.lines import Axis, Series, compared, lines
from fedsolve.experiments.figures.plots import (
    MOST_SERIES,
    Plot,
    described,
    reference,
    seeds_told,
    sentence,
    series_of,
)
from fedsolve.experiments.observations import Observation, distinct, groups, names_of, varied
from fedsolve.experiments.significance import mean_error


@dataclass(frozen=True)
class Skew:
    """How one kind of partition is skewed: its option, the figure's name and words, the axis."""

    option: str
    name: str
    title: str
    sign: str
    axis: Axis


SKEWS = {
    "dirichlet": Skew(
        "alpha",
        "alpha",
        "Accuracy against the skew of the partition.",
        "α",
        Axis("Dirichlet α (smaller is more skewed)", log=True, tried=True),
    ),
    "shards": Skew(
        "per_client",
        "shards",
        "Accuracy against shards per client.",
        "shards per client",
        Axis("shards per client (fewer is more skewed)", whole=True),
    ),
    "pathological": Skew(
        "classes_per_client",
        "classes",
        "Accuracy against classes per client.",
        "classes per client",
        Axis("classes per client (fewer is more skewed)", whole=True),
    ),
}


def skew_plots(items: Sequence[Observation]) -> list[Plot]:
    """Accuracy against alpha, shards or classes per client, for the number of clients most often used."""
    plots = []
    for kind, skew in SKEWS.items():
        of_kind = [item for item in items if _partition(item)["kind"] == kind]
        clients = _fullest(of_kind, lambda item: _partition(item)["clients"])
        drawn = [item for item in of_kind if _partition(item)["clients"] == clients]
        places = {item.partition: float(_partition(item)[skew.option]) for item in drawn}
        if len(set(places.values())) < 2:
            continue
        axis = skew.axis
        if kind == "dirichlet":
            # Even shares are what large alpha tends to: they stand at the end of the axis.
            end = 10.0 * max(places.values())
            even = [item for item in items if _setting(item) == ("iid", None)]
            even = [item for item in even if _partition(item)["clients"] == clients]
            places |= {item.partition: end for item in even}
            axis = replace(axis, named=((end, "IID"),)) if even else axis
            drawn += even
        plots += lines_over(skew.name, skew.title, f"{clients} clients", drawn, _looked_up(places), axis)
    return plots


def clients_plots(items: Sequence[Observation]) -> list[Plot]:
    """Accuracy against the number of clients, for the setting with most of them."""
    setting = _fullest(items, _setting)
    drawn = [item for item in items if _setting(item) == setting]
    if len(distinct(_partition(item)["clients"] for item in drawn)) < 2:
        return []
    return lines_over(
        "clients",
        "Accuracy against the number of clients.",
        _told_setting(setting),
        drawn,
        lambda item: float(_partition(item)["clients"]),
        Axis("number of clients", log=True, tried=True),
    )


def noise_plots(items: Sequence[Observation]) -> list[Plot]:
    """Accuracy against the share of flipped training labels."""
    drawn = [item for item in items if item.partition == reference(items)]
    if len(distinct(item.noise for item in drawn)) < 2:
        return []
    axis = Axis("flipped training labels (%)")
    where = f"partition {drawn[0].partition}"
    return lines_over(
        "noise",
        "Accuracy against label noise.",
        where,
        drawn,
        lambda item: 100.0 * item.noise,
        axis,
        ("noise",),
    )


def method_plots(items: Sequence[Observation]) -> list[Plot]:
    """A row of points per method: one marker per depth, or per partition where nothing else shows those."""
    if varied(items) or len(distinct(item.noise for item in items)) > 1:
        return []
    depths = len(distinct(item.named_depth for item in items if item.named_depth is not None)) > 1
    drawn = [item for item in items if item.partition == reference(items)] if depths else list(items)
    methods = distinct(item.method for item in drawn)
    if len(methods) < 3:
        return []
    naming = (lambda item: _depth_name(item)) if depths else (lambda item: item.partition)
    series = [
        series_of(name, look, of, lambda item: float(methods.index(item.method)))
        for look, (name, of) in enumerate(groups(drawn, naming).items())
    ]
    if len(series) > MOST_SERIES:
        return []
    where = f"partition {drawn[0].partition}; " if depths else ""
    return [
        Plot(
            "methods",
            "The methods side by side.",
            sentence(f"{where}{seeds_told(drawn)}"),
            listed(methods, series),
            compared(methods, series),
        )
    ]


def lines_over(
    name: str,
    title: str,
    where: str,
    items: Sequence[Observation],
    x: Callable[[Observation], float],
    axis: Axis,
    without: Sequence[str] = (),
    level: Sequence[Observation] = (),
) -> list[Plot]:
    """A line for every entry that has at least two places on the axis.

    without: what the axis shows, so that the lines' names can leave it out.
    level:   methods that have no place on the axis and are level lines from end to end of it.
    """
    entries = groups(items, names_of(items, without))
    every = [series_of(label, look, of, x) for look, (label, of) in enumerate(entries.items())]
    series = [line for line in every if len(line.x) > 1]
    if not series or len(series) > MOST_SERIES:
        return []
    ends = min(line.x[0] for line in series), max(line.x[-1] for line in series)
    for look, (label, of) in enumerate(groups(level, names_of(level)).items(), start=len(every)):
        mean, error = mean_error(item.accuracy for item in of)
        series.append(Series(label, look, ends, (mean, mean), (error, error)))
    caption = sentence(f"{where}; {seeds_told(items)}")
    words = described(series, " %", f"Test accuracy over {axis.label}")
    return [Plot(name, title, caption, words, lines(series, axis))]


def _fullest(items: Sequence[Observation], key: Callable[[Observation], Any]) -> Any:
    """The value of `key` that most partitions have; None without items."""
    partitions: dict[Any, set[str]] = {}
    for item in items:
        partitions.setdefault(key(item), set()).add(item.partition)
    return max(partitions, key=lambda value: len(partitions[value]), default=None)


def _looked_up(places: Mapping[str, float]) -> Callable[[Observation], float]:
    return lambda item: places[item.partition]


def _partition(item: Observation) -> Mapping[str, Any]:
    partition: Mapping[str, Any] = item.cell["partition"]
    return partition


def _setting(item: Observation) -> tuple[str, Any]:
    """Kind and option of the partition, whatever its number of clients."""
    kind = _partition(item)["kind"]
    return kind, _partition(item)[SKEWS[kind].option] if kind in SKEWS else None


def _told_setting(setting: tuple[str, Any]) -> str:
    kind, value = setting
    return f"partition {SKEWS[kind].sign} = {value:g}" if kind in SKEWS else "partition IID"


def _depth_name(item: Observation) -> str:
    return "no layers" if item.named_depth is None else f"T = {item.named_depth}"


def listed(rows: Sequence[str], series: Sequence[Series]) -> str:
    """The values of rows of points, one after the other."""
    phrases = []
    for line in series:
        for place, value in zip(line.x, line.y, strict=True):
            phrases.append(" ".join(word for word in (rows[int(place)], line.name, f"{value:.1f} %") if word))
    return "Test accuracy: " + "; ".join(phrases) + "."
