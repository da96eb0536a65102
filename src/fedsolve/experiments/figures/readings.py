"""Cells as points to draw: each cell read at each depth that its experiment asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedsolve.experiments.figures.lines import Series
from fedsolve.experiments.observations import counts_at
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.significance import Counts, mean_and_error
from fedsolve.experiments.wording import axis_label

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Reading:
    """One trained model read at one depth (None where it has none, or only its last counts)."""

    method: str
    depth: int | None
    grid: tuple[tuple[str, Any], ...]
    noise: float
    partition: str
    seed: int
    accuracy: float
    """of the test rows, in per cent"""
    cell: Mapping[str, Any]

    @property
    def entry(self) -> tuple[Any, ...]:
        """What is compared: everything but partition and seed."""
        return self.method, self.depth, self.grid, self.noise

    @property
    def counts(self) -> Counts | None:
        """Test rows it reads correctly, and all of them; None where only a mean is known."""
        return counts_at(self.cell, self.depth)


def readings(cells: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """Every finished cell at every depth its method is read at; those without a score are left out."""
    found = []
    for cell in cells:
        layers = cell.get("accuracy_per_layer") or []
        asked = [depth for depth in cell.get("depths", []) if depth < len(layers)]
        depths: list[int | None] = list(asked) if asked else [None]
        for depth in depths:
            share = cell["accuracy"] if depth is None else layers[depth]
            if share is not None:
                found.append(
                    Reading(
                        method=cell["method"],
                        depth=depth,
                        grid=tuple(cell["grid"].items()),
                        noise=cell["noise"],
                        partition=cell["partition"]["name"],
                        seed=cell["seed"],
                        accuracy=100.0 * share,
                        cell=cell,
                    )
                )
    return found


def by_dataset(run: RunFolder) -> dict[str, list[Mapping[str, Any]]]:
    """The finished cells under the names of their datasets, in the experiment's order.

    A dataset that is seen through several backbones is named with each.
    """
    names = [dataset.name for dataset in run.experiment.datasets]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in run.cells:
        name, backbone = cell["dataset"]["name"], cell["dataset"].get("backbone")
        label = f"{name} ({backbone})" if names.count(name) > 1 else name
        found.setdefault(label, []).append(cell)
    return found


def mean_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard error; nan as error of a single value."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    mean, error = mean_and_error(known)
    return mean, math.nan if error is None else error


def distinct(values: Iterable[T]) -> list[T]:
    """The values without repetition, in order of appearance."""
    return list(dict.fromkeys(values))


def groups(items: Iterable[Reading], key: Callable[[Reading], T]) -> dict[T, list[Reading]]:
    """The readings under each value of the key, in order of appearance."""
    found: dict[T, list[Reading]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def series_of(
    name: str,
    items: Iterable[Reading],
    x: Callable[[Reading], float],
    y: Callable[[Reading], float] = lambda item: item.accuracy,
) -> Series:
    """Means over seeds along x, in order of x."""
    places = sorted(groups(items, x).items())
    means = [mean_error(y(item) for item in found) for _, found in places]
    return Series(
        name,
        tuple(place for place, _ in places),
        tuple(mean for mean, _ in means),
        tuple(error for _, error in means),
    )


def names_of(items: Sequence[Reading], without: Sequence[str] = ()) -> Callable[[Reading], str]:
    """A function that tells a reading by what varies among `items`: method, depth, grid, noise.

    without: parameters (and "noise", "depth") that an axis shows already.
    """
    methods = distinct(item.method for item in items)
    varied = {
        name
        for method in methods
        for name, values in _values([item for item in items if item.method == method]).items()
        if len(values) > 1 and name not in without
    }
    noisy = len({item.noise for item in items}) > 1 and "noise" not in without
    deep = "depth" not in without

    def name(item: Reading) -> str:
        depth = item.depth if deep else None
        words = [axis_label("method", (item.method, depth))] if len(methods) > 1 or depth is not None else []
        words += [axis_label(key, value) for key, value in item.grid if key in varied]
        words += [axis_label("noise", item.noise)] if noisy else []
        return ", ".join(words) or item.method

    return name


def _values(items: Iterable[Reading]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in items:
        for name, value in item.grid:
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return found


def varied(items: Sequence[Reading]) -> dict[str, list[Any]]:
    """The parameters of a grid that take more than one value, with those values in order."""
    return {name: values for name, values in _values(items).items() if len(values) > 1}


def spoken(parameter: str) -> str:
    """A parameter's name as an axis shows it: in words, with the papers' sign where there is one."""
    words = parameter.replace("_", " ")
    sign, equals, _ = axis_label(parameter, 0).partition(" = ")
    return f"{words} {sign}" if equals and sign != words else words


def tell(parameter: str, value: Any) -> str:
    """A parameter's value as people write it, without its name."""
    label = axis_label(parameter, value)
    return label.partition(" = ")[2] or label
