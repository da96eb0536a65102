"""The experiments of the demo on digits: training, and the effect of another partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.apfl import APFLModel
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import (
    Cell,
    DatasetSpec,
    Experiment,
    Measure,
    MethodSpec,
    PartitionSpec,
    TableSpec,
)
from fedsolve.experiments.observations import Observation
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.runner import record_of
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.federation.local import LocalFederation
from fedsolve.pages.words import counted

if TYPE_CHECKING:
    from fedsolve.pages.plots import Panel

SHARED, AUTO = "APFL, shared stream", "APFL, own balance"
_RIDGE = {"ridge": 0.1}  # some pixels are blank in every image: without a ridge G is singular


def shared_experiment(
    clients: int, alpha: float, seed: int, layers: int, width: int, rounds: int
) -> Experiment:
    """Closed forms, FedAvg and local models, on the demo's partition and three others."""
    many, owners = 5 * clients, counted(clients, "client")
    partitions = (
        PartitionSpec(f"{owners}, Dirichlet {alpha:g}", "dirichlet", clients, {"alpha": alpha}),
        PartitionSpec(f"{owners}, 2 shards each", "shards", clients, {"per_client": 2}),
        PartitionSpec(f"{many} clients, Dirichlet 0.01", "dirichlet", many, {"alpha": 0.01}),
        PartitionSpec("1 client, all rows pooled", "iid", 1, {}),
    )
    methods = (
        MethodSpec("local only, mean client", "local", _RIDGE, {}),
        MethodSpec("local only, best client", "local", _RIDGE | {"statistic": "best"}, {}),
        *(
            MethodSpec(f"FedAvg, {counted(number, 'round')}", "fedavg-numpy", {"rounds": number}, {})
            for number in dict.fromkeys((max(1, rounds // 10), rounds))
        ),
        MethodSpec("AFL", "afl", _RIDGE, {}),
        MethodSpec(
            "DeepAFL",
            "deepafl",
            {"layers": layers, "width": width},
            {},
            tuple(sorted({0, layers // 4, layers // 2, layers})),
        ),
    )
    return _experiment(seed, partitions, methods, Measure(train=False), "exchanges", "megabytes", "seconds")


def personal_experiment(shared: Experiment) -> Experiment:
    """Personal models on the first partition, measured client by client."""
    deepafl = shared.methods[-1]
    width = deepafl.parameters["width"]
    # A few hundred rows need a larger ridge than the paper's tens of thousands.
    apfl = {"width": width, "refinement_width": width, "ridge": 1.0}
    methods = (
        MethodSpec("local only", "local", _RIDGE, {}),
        MethodSpec("AFL", "afl", _RIDGE, {}),
        MethodSpec("DeepAFL", "deepafl", deepafl.parameters, {}),
        MethodSpec(SHARED, "apfl", apfl | {"balance": 0.0}, {}),
        MethodSpec(AUTO, "apfl", apfl | {"balance": "auto"}, {}),
    )
    measure, first = Measure(local=True), shared.partitions[:1]
    return _experiment(shared.seeds[0], first, methods, measure, "worst_decile", "gain_shared")


def _experiment(
    seed: int,
    partitions: tuple[PartitionSpec, ...],
    methods: tuple[MethodSpec, ...],
    measure: Measure,
    *columns: str,
) -> Experiment:
    digits, table = DatasetSpec("digits", "digits"), TableSpec(("method",), ("metric",), ("test", *columns))
    return Experiment("demo", "Handwritten digits", (seed,), (digits,), partitions, methods, measure, table)


def train(
    experiment: Experiment,
    cells: Collection[Cell],
    rows: ExperimentRows,
    progress: Callable[[int, int, str], None],
) -> tuple[RunFolder, list[Outcome]]:
    """The outcomes of these cells, and a run of them that tables and figures read."""
    outcomes: list[Outcome] = []
    records = []
    for cell in cells:
        progress(len(outcomes), len(cells), str(cell))
        outcomes.append(train_cell(cell, rows))
        records.append(record_of(experiment, cell, cell.key(rows.key), rows, outcomes[-1].values))
    return RunFolder(Path(), experiment, records, 0), outcomes


def change(before: Sequence[Outcome], after: Sequence[Outcome], rows: ExperimentRows) -> dict[str, Any]:
    """What another partition of the same rows changes: the largest |W' - W| / |W| of any weight matrix W.

    before, after: of FedAvg, AFL and DeepAFL.
    """
    fedavg, afl, deepafl = zip(*((one.model for one in side) for side in (before, after)), strict=True)
    weights = [[*model.classifiers, *(block.omega for block in model.blocks)] for model in deepafl]
    partition = after[0].values["partition"]
    empty = partition["empty_clients"]
    return {
        "division": partition["name"] + (f", {empty} empty" if empty else ""),
        "clients": partition["clients"],
        "afl": _difference(*(model.weight for model in afl)),
        "deepafl": max(_difference(*pair) for pair in zip(*weights, strict=True)),
        "fedavg": _difference(*fedavg),
        "same_predictions": bool(
            np.array_equal(*(model.predict(rows.x_test) for model in afl))
            and np.array_equal(*(model.staged_predict(rows.x_test) for model in deepafl))
        ),
        "fedavg_accuracy": after[0].values["accuracy"],
    }


def reshuffled(model: APFLModel, rows: ExperimentRows, owners: Array, seed: int) -> dict[str, Any]:
    """How one client's model changes when all other images are redistributed (APFL, Theorem 3)."""
    assert model.federation is not None
    clients = model.federation.clients
    sizes = np.bincount(owners, minlength=len(clients))
    kept = int(np.argmax(sizes))
    others = np.flatnonzero(owners != kept)
    rest = [client for client in range(len(clients)) if client != kept]
    dealt = owners.copy()
    if rest:
        dealt[others] = np.random.default_rng(seed).choice(rest, len(others))
    federation = LocalFederation.from_arrays(rows.x_train, rows.y_train, dealt, clients=len(clients))
    again = model.method.fit(federation)
    before, after = (cast(PersonalModel, each.personal(clients[kept])) for each in (model, again))
    shared = [one.shared.decision_function(rows.x_test) for one in (before, after)]
    return {
        "client": clients[kept],
        "rows": int(sizes[kept]),
        "moved": int(np.sum(dealt != owners)),
        "shared": _difference(*shared),
        "own": _difference(before.weight, after.weight),
        "same_predictions": bool(np.array_equal(before.predict(rows.x_test), after.predict(rows.x_test))),
    }


def panels(counts: Array, found: Sequence[Observation]) -> list[Panel]:
    """Who owns which digit, and accuracy over the number of blocks."""
    from fedsolve.experiments.charts import chart_plots  # drawing takes a second to load
    from fedsolve.experiments.run_charts import curves
    from fedsolve.experiments.run_figures import owners_panel

    charts = [chart for chart in curves(found) if chart.name == "depth"]
    depth = [panel for chart in charts for plot in chart_plots(chart, found) for panel in plot.panels]
    return [owners_panel("Who owns which digit (area: images)", counts), *depth]


def _difference(reference: Array, other: Array) -> float:
    """|other - reference| / |reference|, in the Frobenius norm."""
    return float(np.linalg.norm(other - reference) / np.linalg.norm(reference))
