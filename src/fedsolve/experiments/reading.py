"""Experiments from TOML files, strictly.

Every key is known or refused by name, so that a misspelt parameter cannot silently leave a default
in force.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsolve import container
from fedsolve.checks import check_choice
from fedsolve.errors import DataError, ModelFileError, did_you_mean
from fedsolve.experiments.algorithms import algorithms, parameter_names
from fedsolve.experiments.config import (
    AXES,
    ENGINES,
    PARTITIONS,
    SCORES,
    DatasetSpec,
    Experiment,
    Measure,
    MethodSpec,
    PaperRef,
    PartitionSpec,
    TableSpec,
)
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.papers import check_tables

_SHIPPED = Path(__file__).parent
SIZES = ("small",)
"""Folders of experiments that are part of fedsolve itself."""


def shipped(name: str) -> tuple[Path, ...]:
    """The files of experiments under this name: a folder of `SIZES`, or FOLDER/STEM; () for other names."""
    folder, _, stem = name.partition("/")
    if folder not in SIZES:
        return ()
    return tuple(sorted((_SHIPPED / folder).glob(f"{stem or '*'}.toml")))


def read_experiment(path: str | Path, name: str | None = None) -> Experiment:
    """The experiment of a TOML file; `name` overrides the file's own (its stem unless it gives one)."""
    path = Path(path)
    text = container.read(path)
    try:
        document = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise DataError(f"{path} is not valid TOML: {problem}.") from problem
    try:
        experiment = _experiment(_Section(document, "the file"), path.stem, text.decode())
        cells = experiment.cells()
    except ModelFileError:
        raise
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem
    if not cells:
        raise DataError(f"{path}: no cell is left; 'datasets' of partitions and methods exclude each other.")
    return experiment if name is None else dataclasses.replace(experiment, name=name)


# -- reading ---------------------------------------------------------------------------------------


class _Section:
    """A table of the file whose keys are taken one by one; what is left over is refused."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise DataError(f"{where} must be a table of keys; got {values!r}.")
        self.where = where
        self._values = dict(values)
        self._known: list[str] = []

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of `name`, checked for its type; without it the default, or an error if there is none."""
        self._known.append(name)
        if name not in self._values:
            if default is ...:
                others = ", ".join(self._values) or "none"
                raise DataError(f"{self.where} needs the key '{name}'; its other keys are {others}.")
            return default
        value = self._values.pop(name)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            wanted = " or ".join(_KIND_NAMES[k] for k in kinds)
            raise DataError(f"'{name}' in {self.where} must be {wanted}; got {value!r}.")
        return value

    def whole(self, name: str, least: int, default: Any = ...) -> Any:
        """A whole number of at least `least`."""
        value = self.take(name, int, default)
        if value is not default and value < least:
            raise DataError(f"'{name}' in {self.where} must be at least {least}; got {value}.")
        return value

    def words(self, name: str, default: Any = ...) -> Any:
        """One word or a list of words, as a tuple."""
        value = self.take(name, (str, list), default)
        if value is default:
            return value
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not texts or not all(isinstance(word, str) for word in texts):
            raise DataError(f"'{name}' in {self.where} must be text or a list of texts; got {value!r}.")
        return texts

    def tables(self, name: str) -> list[_Section]:
        """[name] or [[name]]: at least one table."""
        value = self.take(name, (dict, list))
        listed = value if isinstance(value, list) else [value]
        if not listed:
            raise DataError(f"{self.where} needs at least one [[{name}]].")
        return [
            _Section(values, f"[[{name}]] {index + 1}" if len(listed) > 1 else f"[{name}]")
            for index, values in enumerate(listed)
        ]

    def done(self) -> None:
        """Refuse every key that nobody took."""
        for name in self._values:
            raise DataError(f"unknown key '{name}' in {self.where}.{_known(name, self._known)}")


_KIND_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def _experiment(top: _Section, stem: str, text: str) -> Experiment:
    name = top.take("name", str, stem)
    if not name or any(sign in name for sign in "/\\:") or name.startswith("."):
        raise DataError(
            f"'name' becomes a folder and may not hold slashes or start with a dot; got {name!r}."
        )
    title = top.take("title", str)
    notes = top.take("notes", str, "")
    paper = _paper(top.take("paper", dict, None))
    seeds = _seeds(top.take("seeds", list))
    shared = dict(top.take("parameters", dict, {}))
    device = top.take("device", str, shared.pop("device", "cpu"))  # it was a parameter once
    datasets = tuple(_dataset(section, shared) for section in top.tables("dataset"))
    # The same dataset may be seen through several backbones; tables tell them apart by these.
    _unique([f"{dataset.name} ({dataset.backbone})" for dataset in datasets], "dataset")
    dataset_names = [dataset.name for dataset in datasets]
    grid = top.take("grid", dict, {})
    methods = tuple(_method(section, grid, dataset_names) for section in top.tables("method"))
    _unique([method.name for method in methods], "method")
    _check_shared(grid, methods, "[grid]")
    _check_shared(shared, methods, "[parameters]")
    for dataset in datasets:
        _check_shared(dataset.parameters, methods, f"'parameters' of dataset {dataset.name}")
    partitions = _partitions(top.tables("partition"), dataset_names)
    noise = _noise(_Section(top.take("noise", dict, {}), "[noise]"))
    measure = _measure(_Section(top.take("measure", dict, {}), "[measure]"))
    table = _table(_Section(top.take("table", dict, {}), "[table]"), methods)
    engine = top.take("engine", str, ENGINES[0])
    check_choice("'engine'", engine, ENGINES)
    if measure.local and engine != ENGINES[0]:
        raise DataError(
            f"engine = '{engine}' cannot measure 'local': clients are scored one by one in this process. "
            "Leave out 'engine', or 'local' in [measure]."
        )
    top.done()
    return Experiment(
        name,
        title,
        notes,
        paper,
        seeds,
        datasets,
        partitions,
        methods,
        noise,
        measure,
        table,
        text,
        engine,
        device,
    )


def _paper(values: Any) -> PaperRef | None:
    if values is None:
        return None
    section = _Section(values, "'paper'")
    key = section.take("key", str)
    one, several = section.words("table", None), section.words("tables", None)
    dataset = section.take("dataset", str, None)
    section.done()
    if (one is None) == (several is None):
        raise DataError("'paper' needs either 'table' or 'tables'.")
    check_tables(key, one or several)
    return PaperRef(key, one or several, dataset)


def _seeds(values: list[Any]) -> tuple[int, ...]:
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in values)
    if not values or not whole or len(set(values)) < len(values):
        raise DataError(f"'seeds' must be a list of different whole numbers, at least 0; got {values!r}.")
    return tuple(values)


def _dataset(section: _Section, shared: Mapping[str, Any]) -> DatasetSpec:
    random = section.take("random", dict, None)
    address = section.take("address", str, None)
    if (address is None) == (random is None):
        raise DataError(f"{section.where} needs either 'address' or 'random'.")
    if random is not None:
        inner = _Section(random, "'random'")
        random = {
            name: inner.whole(name, least) for name, least in (("rows", 1), ("width", 1), ("classes", 2))
        }
        inner.done()
    spec = DatasetSpec(
        name=section.take("name", str, address or "random"),
        address=address,
        backbone=section.take("backbone", str, None),
        limit_train=section.whole("limit_train", 1, None),
        limit_test=section.whole("limit_test", 1, None),
        random=random,
        parameters={**shared, **section.take("parameters", dict, {})},
    )
    section.done()
    return spec


def _partitions(sections: list[_Section], datasets: Sequence[str]) -> tuple[PartitionSpec, ...]:
    specs = []
    for section in sections:
        kind = section.take("kind", str)
        if kind not in PARTITIONS:
            raise DataError(f"unknown partition kind '{kind}' in {section.where}.{_known(kind, PARTITIONS)}")
        natural = kind == "column"
        clients = 0 if natural else section.whole("clients", 1)
        options: dict[str, Any] = {} if natural else {"min_size": section.whole("min_size", 0, 0)}
        named = PARTITIONS[kind]
        if natural:
            options["column"] = section.take("column", str)
        elif named is not None:
            option = named[0]
            value = section.take(option, (int, float) if kind == "dirichlet" else int)
            if value <= 0:
                raise DataError(f"'{option}' in {section.where} must be positive; got {value}.")
            options[option] = float(value) if kind == "dirichlet" else value
        name = section.take("name", str, None)
        spec = PartitionSpec(name or "", kind, clients, options, _names(section, datasets))
        section.done()
        specs.append(spec)
    # Without a name of its own a partition is called after its setting, and K where that is not enough.
    settings = [spec.setting for spec in specs]
    for index, spec in enumerate(specs):
        if not spec.name:
            alike = settings.count(spec.setting) > 1
            name = f"{spec.setting}, K = {spec.clients}" if alike else spec.setting
            specs[index] = dataclasses.replace(spec, name=name)
    _unique([spec.name for spec in specs], "partition")
    return tuple(specs)


def _method(section: _Section, shared: Mapping[str, Any], datasets: Sequence[str]) -> MethodSpec:
    algorithm = section.take("method", str)
    if ":" not in algorithm and algorithm not in algorithms():
        raise DataError(f"unknown method '{algorithm}' in {section.where}.{_known(algorithm, algorithms())}")
    name = section.take("name", str, algorithm)
    parameters = section.take("parameters", dict, {})
    own = section.take("grid", dict, None)
    known = parameter_names(algorithm)
    for source, where in ((parameters, "parameters"), (own or {}, "grid")):
        for parameter in source:
            if parameter == "seed":
                raise DataError(f"'seed' of {name} comes from 'seeds'; remove it from its {where}.")
            if parameter not in known:
                place = f"the {where} of {name} ({algorithm})"
                raise DataError(f"unknown parameter '{parameter}' in {place}.{_known(parameter, known)}")
    grid = own if own is not None else {n: v for n, v in shared.items() if n in known}
    for parameter, values in grid.items():
        if not isinstance(values, list) or not values:
            raise DataError(f"grid of '{parameter}' must be a list of values; got {values!r}.")
        if parameter in parameters:
            raise DataError(f"'{parameter}' of {name} is both fixed and in the grid; remove one.")
    depths = section.take("depths", list, [])
    if not all(isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0 for depth in depths):
        raise DataError(f"'depths' of {name} must be whole numbers, at least 0; got {depths!r}.")
    if depths and "layers" not in known:
        raise DataError(f"{name} ({algorithm}) has no layers, so it takes no 'depths'.")
    spec = MethodSpec(
        name,
        algorithm,
        parameters,
        {parameter: tuple(values) for parameter, values in grid.items()},
        tuple(depths),
        _names(section, datasets),
    )
    section.done()
    return spec


def _noise(section: _Section) -> tuple[float, ...]:
    rates = section.take("rates", list, [0.0])
    section.done()
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate <= 1.0:
            raise DataError(f"'rates' in [noise] must lie in [0, 1]; got {rate!r}.")
    if not rates or len(set(rates)) < len(rates):
        raise DataError(f"'rates' in [noise] must be a list of different shares; got {rates!r}.")
    return tuple(float(rate) for rate in rates)


def _measure(section: _Section) -> Measure:
    score = section.take("score", str, Measure.score)
    if score not in SCORES:
        raise DataError(f"'score' in {section.where} must be {' or '.join(SCORES)}; got {score!r}.")
    measure = Measure(
        section.take("train", bool, True),
        section.take("separability", bool, False),
        score,
        section.take("local", bool, False),
        section.take("representation", bool, False),
    )
    section.done()
    return measure


def _table(section: _Section, methods: Sequence[MethodSpec]) -> TableSpec:
    parameters = {name for method in methods for name in parameter_names(method.algorithm)}
    axes: dict[str, tuple[str, ...]] = {}
    for side in ("rows", "columns"):
        axes[side] = tuple(word.removeprefix("grid:") for word in section.words(side, ()))
        for axis in axes[side]:
            if axis not in AXES and axis not in parameters:
                known = [*AXES, *sorted(parameters)]
                raise DataError(f"unknown axis '{axis}' in '{side}' of [table].{_known(axis, known)}")
    if set(axes["rows"]) & set(axes["columns"]):
        raise DataError("an axis of [table] is both in 'rows' and in 'columns'.")
    values = section.words("values", ("test",))
    for value in values:
        if value not in METRICS:
            raise DataError(f"unknown metric '{value}' in 'values' of [table].{_known(value, METRICS)}")
    baseline = section.take("baseline", str, None)
    labels = [method.name for method in methods]
    if baseline is not None and baseline not in labels:
        raise DataError(f"'baseline' of [table] is no method's name: '{baseline}'.{_known(baseline, labels)}")
    others = section.take("others", bool, False)
    section.done()
    table = TableSpec(axes["rows"], axes["columns"], values, baseline, others)
    if table.by_stage != ("selected" in values) or (table.by_stage and len(values) > 1):
        raise DataError(
            "the axis 'stage' of [table] and the metric 'selected' only go with each other: how often each "
            f"stage of a network was chosen; got values {', '.join(values)}."
        )
    if "relative_seconds" in values and baseline is None:
        raise DataError("'relative_seconds' of [table] are those of the 'baseline'; name one.")
    return table


def _names(section: _Section, known: Sequence[str]) -> tuple[str, ...] | None:
    names: tuple[str, ...] | None = section.words("datasets", None)
    for name in names or ():
        if name not in known:
            raise DataError(f"unknown dataset '{name}' in {section.where}.{_known(name, known)}")
    return names


def _check_shared(parameters: Mapping[str, Any], methods: Sequence[MethodSpec], where: str) -> None:
    known = {name for method in methods for name in parameter_names(method.algorithm)}
    for name in parameters:
        if name not in known or name == "seed":
            raise DataError(f"no method has the parameter '{name}' of {where}.{_known(name, known)}")


def _unique(names: Sequence[str], what: str) -> Sequence[str]:
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two {what}s are called '{name}'; give each a 'name' of its own.")
    return names


def _known(name: str, names: Iterable[str]) -> str:
    """ " Did you mean X? Known are ..." as the end of a message."""
    listed = sorted(names)
    return f"{did_you_mean(name, listed)} Known are {', '.join(listed)}."
