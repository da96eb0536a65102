"""An experiment and the cells it stands for.

A cell is one dataset, one partition, one method at one point of its grid, one share of flipped
labels and one seed; an experiment is the product of all of these. `reading` makes one of a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedsolve import container, version
from fedsolve.errors import DataError, naming
from fedsolve.experiments.algorithms import algorithm_class, build, parameter_names
from fedsolve.federation.method import Method
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.pixel_form import is_treated

_SIGNS = {"alpha": "α", "per_client": "s", "classes_per_client": "c"}
"""The papers' signs for the options of partitions."""

AXES = ("dataset", "backbone", "partition", "clients", "method", "depth", "stage", "noise", "metric")
"""What rows and columns of a table can stand for, besides the methods' parameters."""

ENGINES = ("local", "ray")
"""What carries requests to clients: threads of one process, or workers in Ray."""


@dataclass(frozen=True)
class DatasetSpec:
    """Where the rows come from: address and backbone as `fedsolve features build` takes them, or `random`."""

    name: str
    address: str | None
    backbone: str | None = None  # without one a dataset's own features are used
    limit_train: int | None = None  # so many rows are kept, every class in its proportion
    limit_test: int | None = None
    random: Mapping[str, int] | None = None  # rows, width, classes: standard normal features, even labels
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of methods that do not set them
    # Not of the dataset, but of what is asked of it: network and shape of a method that cuts, mirrors or
    # normalises the rows as images, and so takes pixels in one form (`gradient.pixel_form`).
    treated: tuple[str, tuple[int, ...] | None] | None = None

    def identity(self) -> dict[str, Any]:
        """Where the rows come from, without labels for people."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name not in ("name", "parameters", "treated")}


@dataclass(frozen=True)
class PartitionSpec:
    """How rows are dealt."""

    name: str
    kind: str
    clients: int  # 0 of the kind "column", whose data say it
    options: Mapping[str, Any]  # min_size, and what is the kind's own
    datasets: tuple[str, ...] | None = None

    @property
    def setting(self) -> str:
        """The partition in the papers' signs, such as "α = 0.1"."""
        if self.kind == "column":
            return f"by {self.options['column']}"
        signed = (f"{sign} = {self.options[name]:g}" for name, sign in _SIGNS.items() if name in self.options)
        return next(signed, "IID")

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.identity()}

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "clients": self.clients, **self.options}


@dataclass(frozen=True)
class MethodSpec:
    """A method under a label, with the parameters that are fixed and the grid that is not."""

    name: str
    algorithm: str
    parameters: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]]
    depths: tuple[int, ...] = ()  # the layers to read a staged model at; only the last one when empty
    datasets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TableSpec:
    """How results are laid out: axes of rows and columns (chosen by what varies when empty)."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    values: tuple[str, ...] = ("test",)  # metrics, one table each unless "metric" is an axis
    baseline: str | None = None  # method to test against, whose seconds are 1 in `relative_seconds`

    @property
    def axes(self) -> tuple[str, ...]:
        return self.rows + self.columns

    @property
    def by_stage(self) -> bool:
        """Whether it tells how often each stage of a network was chosen for feedback alignment."""
        return "stage" in self.axes


@dataclass(frozen=True)
class PaperRef:
    """Tables of a paper; their numbers stand beside ours where they are about the same dataset."""

    key: str
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Measure:
    """What is measured besides test accuracy."""

    train: bool = True
    separability: bool = False
    # Of a gradient method: the accuracy of its last round, of its best one on the test rows (as AFL reports
    # its baselines), or the mean over the last tenth of the rounds (FLFA).
    score: Literal["last", "best", "tail"] = "last"
    local: bool = False  # accuracy is the mean over clients, each on test rows of its own distribution
    representation: bool = False  # how a gradient method's features separate classes (FLFA, Eqs. 56-58)


@dataclass(frozen=True)
class Cell:
    """One entry of an experiment: everything that its result depends on, and its labels.

    The seed is that of the partition, of the label noise and of the method.
    """

    dataset: DatasetSpec
    partition: PartitionSpec
    method: MethodSpec
    parameters: Mapping[str, Any]
    grid: Mapping[str, Any]
    noise: float
    seed: int
    measure: Measure
    engine: str = ENGINES[0]
    device: str = "cpu"

    @property
    def source(self) -> DatasetSpec:
        """The dataset, in the form in which the method takes its rows."""
        algorithm = self.method.algorithm
        if not issubclass(algorithm_class(algorithm), GradientMethod) or not is_treated(self.parameters):
            return self.dataset
        method = build(algorithm, self.parameters)
        return dataclasses.replace(self.dataset, treated=(method.network, method.image_shape))

    @property
    def id(self) -> str:
        """Digest of the description, with the dataset by its address."""
        return self._digest(self.dataset.identity())

    def key(self, dataset_key: str) -> str:
        """Digest of the description, with the dataset by its contents."""
        return self._digest({"key": dataset_key})

    def labels(self) -> dict[str, Any]:
        """What names this cell for people: labels, and the parameters that the file varies."""
        return {
            "method": self.method.name,
            "algorithm": self.method.algorithm,
            "depths": list(self.method.depths),
            "grid": dict(self.grid),
        }

    def __str__(self) -> str:
        grid = "".join(f", {name} {value}" for name, value in self.grid.items())
        noise = f", noise {self.noise:g}" if self.noise else ""
        return f"{self.method.name}{grid}, {self.partition.name}{noise}, seed {self.seed}"

    def _digest(self, dataset: Mapping[str, Any]) -> str:
        description = {
            "scheme": version.CELLS,
            "dataset": dataset,
            "partition": self.partition.identity(),
            "algorithm": self.method.algorithm,
            "parameters": dict(self.parameters),
            "noise": self.noise,
            "seed": self.seed,
            "measure": dataclasses.asdict(self.measure),
            "engine": self.engine,
            "device": self.device,
        }
        return hashlib.sha256(container.canonical_json(description).encode()).hexdigest()


@dataclass(frozen=True)
class Experiment:
    """A whole experiment file."""

    name: str
    title: str
    seeds: tuple[int, ...]
    datasets: tuple[DatasetSpec, ...]
    partitions: tuple[PartitionSpec, ...]
    methods: tuple[MethodSpec, ...]
    measure: Measure
    table: TableSpec
    noise: tuple[float, ...] = (0.0,)
    notes: str = ""
    paper: PaperRef | None = None
    text: str = ""
    engine: str = ENGINES[0]
    device: str = "cpu"

    def cells(self) -> list[Cell]:
        """All cells, the first seed of everything before the second."""
        cells = []
        for dataset, seed, noise in itertools.product(self.datasets, self.seeds, self.noise):
            for partition, method in itertools.product(self.partitions, self.methods):
                if _applies(partition, dataset) and _applies(method, dataset):
                    for values in itertools.product(*method.grid.values()):
                        grid = dict(zip(method.grid, values, strict=True))
                        parameters = _parameters(dataset, method, grid)
                        point = (dataset, partition, method, parameters, grid, noise, seed)
                        cells.append(Cell(*point, self.measure, self.engine, self.device))
        return cells

    @property
    def backbones(self) -> set[str]:
        """The backbones that the datasets name."""
        return {dataset.backbone for dataset in self.datasets if dataset.backbone is not None}

    def with_backbone(self, backbone: str) -> Experiment:
        """The same experiment with every image dataset seen through this backbone."""
        if len(self.backbones) != 1:
            raise DataError(
                f"{self.name} names {len(self.backbones)} backbones; only a single one can be replaced."
            )
        datasets = (
            dataset if dataset.backbone is None else dataclasses.replace(dataset, backbone=backbone)
            for dataset in self.datasets
        )
        return dataclasses.replace(self, datasets=tuple(datasets))

    def only(self, datasets: Sequence[str]) -> Experiment:
        """The same experiment on some of its datasets, by name."""
        for name in datasets:
            known = [dataset.name for dataset in self.datasets]
            if name not in known:
                raise DataError(f"{self.name} has no dataset '{name}'; it has {', '.join(known)}.")
        return dataclasses.replace(self, datasets=tuple(d for d in self.datasets if d.name in datasets))


def _parameters(dataset: DatasetSpec, method: MethodSpec, grid: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters but the seed: grid before method before dataset before default."""
    known = parameter_names(method.algorithm)
    shared = {name: value for name, value in dataset.parameters.items() if name in known}
    with naming(method.name):
        built = build(method.algorithm, shared | dict(method.parameters) | dict(grid))
    own = isinstance(built, Method)  # comparisons are plain dataclasses
    parameters: dict[str, Any] = built.parameters() if own else dataclasses.asdict(built)
    parameters.pop("seed", None)
    layers = parameters.get("layers")
    for depth in method.depths:
        if layers is not None and depth > layers:
            raise DataError(f"{method.name} has {layers} layers; depth {depth} of its 'depths' lies beyond.")
    return parameters


def _applies(spec: PartitionSpec | MethodSpec, dataset: DatasetSpec) -> bool:
    return spec.datasets is None or dataset.name in spec.datasets
