"""The results of a run, one model at a time: every cell at every depth that its experiment asks for.

Also means and standard errors over seeds, and a paired test of two accuracies on the same test rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import getitem
from typing import Any, TypeVar

import numpy as np

from fedsolve.arrays import Array
from fedsolve.experiments.config import PartitionSpec
from fedsolve.experiments.metrics import METRICS, axis_label
from fedsolve.experiments.outcomes import unpacked
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.gradient.networks.stages import stage_of

T = TypeVar("T", bound=Hashable)

BACKBONES = {
    "torchvision:resnet18": "ResNet-18",
    "torchvision:vgg11": "VGG11",
    "torchvision:vit_b_16": "ViT-B-16",
    "timm:vit_base_patch16_224.augreg_in21k": "ViT-B-16 (21K)",
    "efficientnet-lite0": "EfficientNet-Lite0",
}
"""Names the papers use for backbones."""


def _kept(*keys: str) -> Any:
    """A property: what the cell keeps under this key, and the next one in it."""
    return property(lambda observation: reduce(getitem, keys, observation.cell))


@dataclass(frozen=True)
class Observation:
    """A trained model read at one depth."""

    cell: Mapping[str, Any]  # the line of the run that it comes from
    depth: int | None  # layers it is read after; None where the model has none
    values: Mapping[str, float]  # metrics by name in their units, without those that were not measured
    stage: str | None = None  # of a network, where the value is how often that stage was chosen

    method = _kept("method")
    partition = _kept("partition", "name")
    noise = _kept("noise")
    seed = _kept("seed")

    @property
    def grid(self) -> tuple[tuple[str, Any], ...]:
        """The parameters that the experiment varies for this method, with their values."""
        return tuple(self.cell["grid"].items())

    @property
    def accuracy(self) -> float:
        """Test accuracy in per cent."""
        return self.values["test"]

    @property
    def named_depth(self) -> int | None:
        """The depth, if the experiment asks for depths; None if only the last layer counts."""
        return self.depth if self.cell["depths"] else None

    @property
    def entry(self) -> tuple[Any, ...]:
        """What is compared: the method at a point of its grid and a depth, whatever partition and seed."""
        return self.method, self.named_depth, self.grid, self.noise

    def layers(self, metric: str) -> list[float]:
        """A metric after every layer; its only value where there are no layers; empty where not measured."""
        known = self.cell["seconds_per_layer"]
        depths = [None] if known is None else range(len(known))
        values = [METRICS[metric].of(self.cell, depth) for depth in depths]
        return [value for value in values if value is not None] if None not in values else []

    @property
    def kept_hits(self) -> str | None:
        """Which test rows are right, packed; None where its accuracy is no share of them."""
        return (self.cell.get("hits") or {}).get("" if self.depth is None else str(self.depth))

    @cached_property
    def coordinates(self) -> dict[str, Any]:
        """Where it stands along every axis: dataset, partition, method, depth, parameters and so on."""
        dataset, backbone = self.cell["dataset"], self.cell["dataset"]["backbone"] or "none"
        return dict(self.cell["parameters"]) | {
            "dataset": dataset["name"],
            # Options after the question mark say how images are prepared; the network is the same.
            "backbone": BACKBONES.get(backbone.partition("?")[0], backbone),
            "partition": self.partition,
            "clients": self.cell["partition"]["clients"],
            "method": self.method,
            "algorithm": self.cell["algorithm"],
            "noise": self.cell["noise"],
            "depth": self.depth,
            **({} if self.stage is None else {"stage": self.stage}),
        }

    @property
    def setting(self) -> str:
        """The partition in the papers' signs."""
        dealt = self.cell["partition"]
        return PartitionSpec(dealt["name"], dealt["kind"], dealt["clients"], dealt).setting


def observations(cells: Iterable[Mapping[str, Any]]) -> list[Observation]:
    """Every cell at the depths it is read at: those asked for, or the last layer."""
    items = []
    for cell in cells:
        layers = cell["seconds_per_layer"]
        for depth in cell["depths"] or [None if layers is None else len(layers) - 1]:
            values = {key: value for key in METRICS if (value := METRICS[key].of(cell, depth)) is not None}
            items.append(Observation(cell, depth, values))
    return items


def scored(cells: Iterable[Mapping[str, Any]]) -> list[Observation]:
    """The observations that have an accuracy to compare."""
    return [one for one in observations(cells) if "test" in one.values]


def by_stage(items: Iterable[Observation]) -> Iterator[Observation]:
    """Each observation once for every stage of its network, with that stage's share of the choices."""
    for one in items:
        for stage, share in chosen_stages(one.cell).items():
            yield dataclasses.replace(one, stage=stage, values={"selected": 100.0 * share})


def chosen_stages(cell: Mapping[str, Any]) -> dict[str, float]:
    """Shares of one that each stage of a cell's network has in the choices for feedback alignment."""
    feedback: Mapping[str, Any] = cell.get("feedback") or {"layers": [], "rounds": []}
    total = sum(feedback["rounds"])
    shares: dict[str, float] = {}
    for layer, rounds in zip(feedback["layers"], feedback["rounds"], strict=True) if total else ():
        stage = stage_of(cell["parameters"]["network"], layer)
        shares[stage] = shares.get(stage, 0.0) + rounds / total
    return shares


def with_relative_seconds(items: Sequence[Observation], baseline: str | None) -> list[Observation]:
    """The observations with seconds relative to those of the baseline on the same partition."""

    def where(one: Observation) -> tuple[Any, ...]:
        return (*(one.coordinates[name] for name in ("dataset", "backbone", "partition", "noise")), one.seed)

    of_baseline = {where(one): one.values for one in items if one.method == baseline}
    related = []
    for one in items:
        base, own = of_baseline.get(where(one), {}).get("seconds"), one.values.get("seconds")
        more = {"relative_seconds": own / base} if base and own is not None else {}
        related.append(dataclasses.replace(one, values={**one.values, **more}))
    return related


def by_dataset(run: RunFolder) -> dict[str, list[Mapping[str, Any]]]:
    """The finished cells under the names of their datasets, in the experiment's order.

    A dataset that is seen through several backbones is named with each.
    """
    names = [dataset.name for dataset in run.experiment.datasets]
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for cell in run.cells:
        name, backbone = cell["dataset"]["name"], cell["dataset"].get("backbone")
        label = f"{name} ({backbone})" if names.count(name) > 1 else name
        by_label.setdefault(label, []).append(cell)
    return by_label


def distinct(values: Iterable[T]) -> list[T]:
    """The values without repetition, in order of appearance."""
    return list(dict.fromkeys(values))


def groups(items: Iterable[Observation], key: Callable[[Observation], T]) -> dict[T, list[Observation]]:
    """The observations under each value of the key, in order of appearance."""
    grouped: dict[T, list[Observation]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def varied(items: Iterable[Observation]) -> dict[str, list[Any]]:
    """The parameters of a grid that take more than one value, with those values in order."""
    choices: dict[str, list[Any]] = {}
    for item in items:
        for name, value in item.grid:
            if value not in choices.setdefault(name, []):
                choices[name].append(value)
    return {name: values for name, values in choices.items() if len(values) > 1}


def names_of(items: Sequence[Observation], without: Sequence[str] = ()) -> Callable[[Observation], str]:
    """A function that names an observation by what varies in `items`: method, depth, grid, noise.

    without: parameters (and "noise", "depth") that an axis shows already.
    """
    by_method = groups(items, lambda item: item.method)
    parameters = {name for of in by_method.values() for name in varied(of)} - set(without)
    noisy = len({item.noise for item in items}) > 1 and "noise" not in without
    deep = "depth" not in without

    def name(item: Observation) -> str:
        depth = item.named_depth if deep else None
        several = len(by_method) > 1 or depth is not None
        words = [axis_label("method", (item.method, depth))] if several else []
        words += [axis_label(key, value) for key, value in item.grid if key in parameters]
        words += [axis_label("noise", item.noise)] if noisy else []
        return ", ".join(words) or item.method

    return name


def pairs(items: Sequence[Observation]) -> list[tuple[list[Observation], list[Observation]]]:
    """Pairs of observations without and with feedback alignment; settings and seeds are the same."""
    plain: dict[Any, list[Observation]] = {}
    aligned: dict[Any, list[Observation]] = {}
    for item in items:
        parameters = item.cell["parameters"]
        if "feedback" not in parameters:
            continue
        settings = [(name, str(value)) for name, value in sorted(parameters.items())]
        others = tuple(pair for pair in settings if not pair[0].startswith("feedback"))
        host = (item.cell["algorithm"], item.noise, item.partition, others)
        if parameters["feedback"] is None:
            plain.setdefault(host, []).append(item)
        else:
            own = tuple(pair for pair in settings if pair[0].startswith("feedback"))
            aligned.setdefault((host, own), []).append(item)
    matches = []
    for (host, _), of in aligned.items():
        # An unfinished run may have a seed for one and not for the other.
        seeds = {item.seed for item in of} & {item.seed for item in plain.get(host, [])}
        if seeds:
            sides = [[item for item in side if item.seed in seeds] for side in (plain[host], of)]
            matches.append((sides[0], sides[1]))
    return matches


def compare(first: Iterable[Observation], second: Iterable[Observation]) -> float | None:
    """p-value for equal accuracy of two methods, paired by run: same rows, same partition.

    None if no runs can be paired, or their hits were not kept.
    """

    def run(one: Observation) -> tuple[str, int, str, int]:
        return one.cell["dataset"]["name"], one.cell["test_rows"], one.partition, one.seed

    rivals = {run(one): one.kept_hits for one in second}
    both = [(one.kept_hits, rivals.get(run(one)), one.cell["test_rows"]) for one in first]
    sides = [(unpacked(a, rows), unpacked(b, rows)) for a, b, rows in both if a is not None and b is not None]
    return paired(*zip(*sides, strict=True)) if sides else None


LEVEL = 0.05
"""Below this p-value a difference is marked."""
MANY = 20_000


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error s / sqrt(n), with s from n - 1; no error for a single value."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array)))


def mean_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard error for figures: NaN values are skipped, and missing results are NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    mean, error = mean_and_error(known)
    return mean, math.nan if error is None else error


def paired(first: Sequence[Array], second: Sequence[Array]) -> float:
    """p-value for equal accuracy of two methods on the same test rows.

    first, second: which rows are right, (rows,) of each run; runs at the same place belong together. With
    d_i the difference of a row's hits over all runs, the statistic is |sum d_i|. If both are right equally
    often, every d_i could have the other sign: an exact sign-flip test, and McNemar's for one run each (by
    its normal limit where differences are more than `MANY`). The sample is the test rows. Further seeds see
    the same rows and so add no evidence.
    """
    from scipy.stats import binom  # takes a second to import; most commands need no test

    differences = np.sum(first, axis=0, dtype=np.int64) - np.sum(second, axis=0, dtype=np.int64)
    if np.abs(differences).sum() > MANY:
        return math.erfc(abs(int(differences.sum())) / math.sqrt(2.0 * float(np.sum(differences**2))))
    counts = np.bincount(np.abs(differences))
    # The number of positive signs among m rows of |d| = k is binomial; all k together add up.
    chances = np.ones(1)
    for size, rows in enumerate(counts[1:].tolist(), start=1):
        own = np.zeros(size * rows + 1)
        own[::size] = binom.pmf(np.arange(rows + 1), rows, 0.5)
        chances = np.convolve(chances, own)
    reach = len(chances) - 1
    sums = 2 * np.arange(reach + 1) - reach
    return min(1.0, float(chances[np.abs(sums) >= abs(int(differences.sum()))].sum()))
