"""Experiments from TOML files, strictly.

Every key is known or refused by name, so that a misspelt parameter cannot silently leave a default
in force.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fedsolve import container
from fedsolve.errors import DataError, naming
from fedsolve.experiments.algorithms import algorithms, parameter_names
from fedsolve.experiments.config import (
    AXES,
    ENGINES,
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
from fedsolve.parameters import from_table, known_are, parse_toml, typed

_SMALL = Path(__file__).parent / "small"


def shipped(name: str) -> tuple[Path, ...]:
    """The files of the experiments that come with fedsolve: "small", or "small/STEM"; () for other names."""
    folder, _, stem = name.partition("/")
    return tuple(sorted(_SMALL.glob(f"{stem or '*'}.toml"))) if folder == _SMALL.name else ()


def read_experiment(path: str | Path, name: str | None = None) -> Experiment:
    """The experiment of a TOML file; `name` overrides the file's own (its stem unless it gives one)."""
    path = Path(path)
    text = container.read(path)
    with naming(path):
        experiment = _experiment(parse_toml(text, "the file"), path.stem, text.decode())
        if not experiment.cells():
            raise DataError("no cell is left; 'datasets' of partitions and methods exclude each other.")
    return experiment if name is None else dataclasses.replace(experiment, name=name)


Keys = dict[str, Any]
Words = tuple[str, ...]
AtLeast1 = Annotated[int, 1]
AtLeast0 = Annotated[int, 0]

_TOP: Keys = {
    **dict.fromkeys(("name", "title", "notes", "device"), str),
    **dict.fromkeys(("paper", "parameters", "grid", "noise", "measure", "table"), dict),
    **dict.fromkeys(("dataset", "method", "partition"), Any),
    "seeds": tuple[AtLeast0, ...],
    "engine": Literal[ENGINES],
}
_DATASET: Keys = {
    **dict.fromkeys(("name", "address", "backbone"), str),
    **dict.fromkeys(("limit_train", "limit_test"), AtLeast1),
    **dict.fromkeys(("random", "parameters"), dict),
}
_METHOD: Keys = {"method": str, "name": str, "parameters": dict, "grid": dict, "datasets": Words}
_PAPER: Keys = {"key": str, "table": Words, "tables": Words}
_KINDS: dict[str, Keys] = {
    "iid": {},
    "dirichlet": {"alpha": float, "capped": bool},
    "shards": {"per_client": AtLeast1},
    "pathological": {"classes_per_client": AtLeast1},
    "column": {"column": str},
}
"""The options of each kind of partition. The natural one is by a column, which says who owns each row."""


def _tables(values: Any, name: str) -> list[tuple[Any, str]]:
    """[name] or [[name]]: the tables, and where each is."""
    listed = values if isinstance(values, list) else [values]
    if not listed:
        raise DataError(f"the file needs at least one [[{name}]].")
    many = len(listed) > 1
    return [(each, f"[[{name}]] {place + 1}" if many else f"[{name}]") for place, each in enumerate(listed)]


def _experiment(document: Any, stem: str, text: str) -> Experiment:
    top = typed(document, "the file", _TOP, ("title", "seeds", "dataset", "method", "partition"))
    name = top.get("name", stem)
    if not name or any(sign in name for sign in "/\\:") or name.startswith("."):
        raise DataError(
            f"'name' becomes a folder and may not hold slashes or start with a dot; got {name!r}."
        )
    seeds, shared, grid = top["seeds"], top.get("parameters", {}), top.get("grid", {})
    if not seeds or len(set(seeds)) < len(seeds):
        raise DataError(f"'seeds' must be a list of different whole numbers; got {list(seeds)}.")
    datasets = tuple(_dataset(*each, shared) for each in _tables(top["dataset"], "dataset"))
    # The same dataset may be seen through several backbones; tables tell them apart by these.
    _unique([f"{dataset.name} ({dataset.backbone})" for dataset in datasets], "dataset")
    names = [dataset.name for dataset in datasets]
    methods = tuple(_method(*each, grid) for each in _tables(top["method"], "method"))
    _unique([method.name for method in methods], "method")
    partitions = _partitions(_tables(top["partition"], "partition"))
    chosen: list[PartitionSpec | MethodSpec] = [*partitions, *methods]
    for spec in chosen:
        for each in spec.datasets or ():
            if each not in names:
                raise DataError(f"{spec.name}: unknown dataset '{each}'.{known_are(each, names)}")
    _check_shared(grid, methods, "[grid]")
    _check_shared(shared, methods, "[parameters]")
    for dataset in datasets:
        _check_shared(dataset.parameters, methods, f"'parameters' of dataset {dataset.name}")
    measure = from_table(Measure, top.get("measure", {}), "[measure]")
    engine = top.get("engine", ENGINES[0])
    if measure.local and engine != ENGINES[0]:
        raise DataError(
            f"engine = '{engine}' cannot measure 'local': clients are scored one by one in this process. "
            "Leave out 'engine', or 'local' in [measure]."
        )
    return Experiment(
        name,
        top["title"],
        seeds,
        datasets,
        partitions,
        methods,
        measure,
        _table(top.get("table", {}), methods),
        _noise(top.get("noise", {})),
        top.get("notes", ""),
        _paper(top.get("paper")),
        text,
        engine,
        top.get("device", "cpu"),
    )


def _paper(values: Any) -> PaperRef | None:
    if values is None:
        return None
    given = typed(values, "'paper'", _PAPER, ["key"])
    if ("table" in given) == ("tables" in given):
        raise DataError("'paper' needs either 'table' or 'tables'.")
    tables = given.get("table") or given["tables"]
    check_tables(given["key"], tables)
    return PaperRef(given["key"], tables)


def _dataset(values: Any, where: str, shared: Keys) -> DatasetSpec:
    given = typed(values, where, _DATASET)
    if ("address" in given) == ("random" in given):
        raise DataError(f"{where} needs either 'address' or 'random'.")
    if "random" in given:
        sizes = {"rows": AtLeast1, "width": AtLeast1, "classes": Annotated[int, 2]}
        given["random"] = typed(given["random"], "'random'", sizes, sizes)
    name, address = given.pop("name", None), given.pop("address", None)
    given["parameters"] = {**shared, **given.get("parameters", {})}
    return DatasetSpec(name or address or "random", address, **given)


def _partitions(tables: list[tuple[Any, str]]) -> tuple[PartitionSpec, ...]:
    specs = []
    for values, where in tables:
        kind = str(values.get("kind", "iid")) if isinstance(values, dict) else "iid"
        if kind not in _KINDS:
            raise DataError(f"unknown partition kind '{kind}' in {where}.{known_are(kind, _KINDS)}")
        own, sizes = _KINDS[kind], {"clients": AtLeast1, "min_size": AtLeast0}
        known = {"kind": str, "name": str, "datasets": Words, **({} if kind == "column" else sizes), **own}
        needed = [name for name in known if name in ("kind", "clients", *own) and name != "capped"]
        given = typed(values, where, known, needed)
        if given.get("alpha", 1.0) <= 0:
            raise DataError(f"'alpha' in {where} must be positive; got {given['alpha']}.")
        options: Keys = {} if kind == "column" else {"min_size": given.get("min_size", 0)}
        options |= {name: given[name] for name in own if name in given}
        dealt = kind, given.get("clients", 0), options, given.get("datasets")
        specs.append(PartitionSpec(given.get("name", ""), *dealt))
    # Without a name of its own a partition is called after its setting, and K where that is not enough.
    settings = [spec.setting for spec in specs]
    for index, spec in enumerate(specs):
        if not spec.name:
            alike = settings.count(spec.setting) > 1
            name = f"{spec.setting}, K = {spec.clients}" if alike else spec.setting
            specs[index] = dataclasses.replace(spec, name=name)
    _unique([spec.name for spec in specs], "partition")
    return tuple(specs)


def _method(values: Any, where: str, shared: Keys) -> MethodSpec:
    given = typed(values, where, {**_METHOD, "depths": tuple[AtLeast0, ...]}, ["method"])
    algorithm = given["method"]
    if ":" not in algorithm and algorithm not in algorithms():
        raise DataError(f"unknown method '{algorithm}' in {where}.{known_are(algorithm, algorithms())}")
    name, parameters = given.get("name", algorithm), given.get("parameters", {})
    known = parameter_names(algorithm)
    for source in ("parameters", "grid"):
        for parameter in given.get(source, {}):
            if parameter == "seed":
                raise DataError(f"'seed' of {name} comes from 'seeds'; remove it from its {source}.")
            if parameter not in known:
                place = f"the {source} of {name} ({algorithm})"
                raise DataError(f"unknown parameter '{parameter}' in {place}.{known_are(parameter, known)}")
    grid = given.get("grid", {n: v for n, v in shared.items() if n in known})
    for parameter, points in grid.items():
        if not isinstance(points, list) or not points:
            raise DataError(f"grid of '{parameter}' must be a list of values; got {points!r}.")
        if parameter in parameters:
            raise DataError(f"'{parameter}' of {name} is both fixed and in the grid; remove one.")
    depths = given.get("depths", ())
    if depths and "layers" not in known:
        raise DataError(f"{name} ({algorithm}) has no layers, so it takes no 'depths'.")
    points = {parameter: tuple(listed) for parameter, listed in grid.items()}
    return MethodSpec(name, algorithm, parameters, points, depths, given.get("datasets"))


def _noise(values: Any) -> tuple[float, ...]:
    rates: tuple[float, ...] = typed(values, "[noise]", {"rates": tuple[float, ...]}).get("rates", (0.0,))
    if not rates or len(set(rates)) < len(rates) or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise DataError(f"'rates' in [noise] must be different shares in [0, 1]; got {list(rates)}.")
    return rates


def _table(values: Any, methods: Sequence[MethodSpec]) -> TableSpec:
    table = from_table(TableSpec, values, "[table]")
    parameters = {name for method in methods for name in parameter_names(method.algorithm)}
    rows, columns = ([word.removeprefix("grid:") for word in side] for side in (table.rows, table.columns))
    table = dataclasses.replace(table, rows=tuple(rows), columns=tuple(columns))
    labels = [method.name for method in methods]
    for what, side, given, known in (
        ("axis", "rows", table.rows, [*AXES, *sorted(parameters)]),
        ("axis", "columns", table.columns, [*AXES, *sorted(parameters)]),
        ("metric", "values", table.values, list(METRICS)),
        ("method", "baseline", [table.baseline] if table.baseline is not None else [], labels),
    ):
        for word in given:
            if word not in known:
                raise DataError(f"unknown {what} '{word}' in '{side}' of [table].{known_are(word, known)}")
    if set(table.rows) & set(table.columns):
        raise DataError("an axis of [table] is both in 'rows' and in 'columns'.")
    if table.by_stage != ("selected" in table.values) or (table.by_stage and len(table.values) > 1):
        raise DataError(
            "the axis 'stage' of [table] and the metric 'selected' only go with each other: how often each "
            f"stage of a network was chosen; got values {', '.join(table.values)}."
        )
    if "relative_seconds" in table.values and table.baseline is None:
        raise DataError("'relative_seconds' of [table] are those of the 'baseline'; name one.")
    return table


def _check_shared(parameters: Mapping[str, Any], methods: Sequence[MethodSpec], where: str) -> None:
    known = sorted({name for method in methods for name in parameter_names(method.algorithm)})
    for name in parameters:
        if name not in known or name == "seed":
            raise DataError(f"no method has the parameter '{name}' of {where}.{known_are(name, known)}")


def _unique(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two {what}s are called '{name}'; give each a 'name' of its own.")
