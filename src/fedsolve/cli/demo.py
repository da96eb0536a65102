"""`fedsolve demo`: closed forms against FedAvg on embedded data, and a proof of invariance on the spot."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from fedsolve import container
from fedsolve.cli import demo_page, personal_demo
from fedsolve.cli.command import LAST, Command, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, check_target, plain
from fedsolve.container import Array
from fedsolve.data.partitions import class_counts
from fedsolve.experiments.config import (
    DatasetSpec,
    Experiment,
    Measure,
    MethodSpec,
    PartitionSpec,
    TableSpec,
)
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import Observation, observations
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.sources import ExperimentRows, digits
from fedsolve.experiments.trials import deal
from fedsolve.experiments.wording import counted

_GROUP = "The federation"
_MODEL = "The methods"


@click.command(
    cls=Command,
    examples=(
        ("the whole story in about a minute", "fedsolve demo"),
        ("milder division, more clients", "fedsolve demo --clients 50 --alpha 1"),
        ("a model of its own for every client", "fedsolve demo --personal"),
    ),
)
@option("--personal", is_flag=True, group=_GROUP, help="Show personalised models (APFL) instead.")
@option("--clients", type=click.IntRange(1), default=20, group=_GROUP, help="How many clients.")
@option("--alpha", type=float, default=0.1, group=_GROUP, help="Dirichlet parameter: small is uneven.")
@option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    group=_GROUP,
    help="Of the division, projections and shuffles.",
)
@option("--layers", type=click.IntRange(0), default=20, group=_MODEL, help="DeepAFL: residual blocks.")
@option("--width", type=click.IntRange(1), default=256, group=_MODEL, help="DeepAFL: features per layer.")
@option("--rounds", type=click.IntRange(1), default=100, group=_MODEL, help="FedAvg: rounds of averaging.")
@option("--out", metavar="DIR", default="fedsolve-demo", group=LAST, help="Folder for figure and results.")
@option("--figure/--no-figure", default=True, group=LAST, help="Whether to draw the figure.")
@output_options
def demo(
    personal: bool,
    clients: int,
    alpha: float,
    seed: int,
    layers: int,
    width: int,
    rounds: int,
    out: str,
    figure: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train AFL, DeepAFL and FedAvg on handwritten digits divided among clients, and prove invariance.

    Compares them, and clients on their own, by test accuracy, exchanges, megabytes and seconds;
    then deals the same rows differently and shows that the closed-form models do not change. Everything it
    needs is embedded. Writes demo.png and results.json to the folder --out.

    With --personal: what a model of its own gains each client, on test images like those it owns. Writes
    personal.png and personal.json.
    """
    started = time.perf_counter()
    output, folder = Output(as_json, quiet), Path(out)
    check_target(str(folder / "demo.png"))
    experiment = _experiment(clients, alpha, seed, layers, width, rounds)
    document, files = (personal_demo.show if personal else _show)(output, experiment, figure)
    document |= {"folder": out, "seconds": time.perf_counter() - started}
    results = "personal.json" if personal else "results.json"
    files[results] = (json.dumps(plain(document), indent=2) + "\n").encode()
    for name, contents in files.items():
        container.write_atomically(folder / name, contents)
    demo_page.close(output.page(), folder, list(files), document["seconds"])
    if as_json:
        output.result(document, lambda page: None)


def _experiment(clients: int, alpha: float, seed: int, layers: int, width: int, rounds: int) -> Experiment:
    """The demo as an experiment: the division that it is about first, then three others of the same rows."""
    many, owners = 5 * clients, counted(clients, "client")
    ridge = {"ridge": 0.1}  # some pixels are blank in every image: without a ridge G is singular
    depths = tuple(sorted({0, layers // 4, layers // 2, layers}))
    return Experiment(
        name="demo",
        title="Handwritten digits",
        notes="",
        paper=None,
        seeds=(seed,),
        datasets=(DatasetSpec("digits", "digits"),),
        partitions=(
            PartitionSpec(f"{owners}, Dirichlet {alpha:g}", "dirichlet", clients, {"alpha": alpha}),
            PartitionSpec(f"{owners}, 2 shards each", "shards", clients, {"per_client": 2}),
            PartitionSpec(f"{many} clients, Dirichlet 0.01", "dirichlet", many, {"alpha": 0.01}),
            PartitionSpec("1 client, all rows pooled", "iid", 1, {}),
        ),
        methods=(
            MethodSpec("local only, mean client", "local", ridge, {}),
            MethodSpec("local only, best client", "local", ridge | {"statistic": "best"}, {}),
            *(
                MethodSpec(f"FedAvg, {counted(number, 'round')}", "fedavg-numpy", {"rounds": number}, {})
                for number in dict.fromkeys((max(1, rounds // 10), rounds))
            ),
            MethodSpec("AFL", "afl", ridge, {}),
            MethodSpec("DeepAFL", "deepafl", {"layers": layers, "width": width}, {}, depths),
        ),
        noise=(0.0,),
        measure=Measure(train=False),
        table=TableSpec(("method",), ("metric",), ("test", "exchanges", "megabytes", "seconds")),
        text="",
    )


def _show(output: Output, experiment: Experiment, figure: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Run the experiment and tell of it; gives what came out and the files to write."""
    page, rows = output.page(), digits()
    first, *others = experiment.partitions
    counts = class_counts(rows.y_train, deal(first, rows.y_train, experiment.seeds[0]), first.clients)
    demo_page.introduce(page, rows, counts, first.options["alpha"])
    dealt = {
        one.name: [cell for cell in experiment.cells() if cell.partition is one]
        for one in experiment.partitions
    }
    run, outcomes = demo_page.train(output, experiment, dealt[first.name], rows)
    *_, fedavg, afl, deepafl = (cell.parameters for cell in dealt[first.name])
    demo_page.show_results(
        page,
        run,
        "MB is payload up and down, all clients together. FedAvg averages a softmax head on the pixels: "
        f"{fedavg['epochs']} local epochs a round, batches of {fedavg['batch']}, rate {fedavg['rate']:g}. "
        f"AFL and the local models solve a ridge of {afl['ridge']:g} on the pixels. DeepAFL has width "
        f"{deepafl['width']} and its default ridges; its lines are one run read after T residual blocks, "
        "each with what a run of that depth takes.",
    )
    changes = []
    for partition in others:
        # FedAvg with all its rounds, AFL and DeepAFL.
        _, again = demo_page.train(output, experiment, dealt[partition.name][-3:], rows)
        changes.append(_change(outcomes[-3:], again, rows))
    demo_page.show_changes(page, first.name, outcomes[-3].values["accuracy"], changes)
    document = demo_page.document(run, counts) | {
        "staged_accuracy": outcomes[-1].values["accuracy_per_layer"],
        "invariance": changes,
    }
    return document, {"demo.png": _figure(counts, observations(run.cells))} if figure else {}


def _change(before: Sequence[Outcome], after: Sequence[Outcome], rows: ExperimentRows) -> dict[str, Any]:
    """What another division of the same rows changes: the largest |W' - W| / |W| of any weight matrix W."""
    fedavg, afl, deepafl = zip(
        *((outcome.model for outcome in side) for side in (before, after)), strict=True
    )
    weights = [[*model.classifiers, *(block.omega for block in model.blocks)] for model in deepafl]
    partition = after[0].values["partition"]
    empty = partition["empty_clients"]
    return {
        "division": partition["name"] + (f", {empty} empty" if empty else ""),
        "clients": partition["clients"],
        "afl": demo_page.relative_difference(*(model.weight for model in afl)),
        "deepafl": max(demo_page.relative_difference(*pair) for pair in zip(*weights, strict=True)),
        "fedavg": demo_page.relative_difference(*fedavg),
        "same_predictions": bool(
            np.array_equal(*(model.predict(rows.x_test) for model in afl))
            and np.array_equal(*(model.staged_predict(rows.x_test) for model in deepafl))
        ),
        "fedavg_accuracy": after[0].values["accuracy"],
    }


def _figure(counts: Array, found: Sequence[Observation]) -> bytes:
    """Who owns which digit, and accuracy over the number of blocks."""
    from fedsolve.experiments.figures.depth import BLOCKS, by_layer
    from fedsolve.experiments.figures.lines import Axis, Panel, draw_lines
    from fedsolve.experiments.figures.maps import Ownership, draw_owners
    from fedsolve.experiments.figures.style import blank, legend_above, render, styled

    # What is compared with comes first in the table and last in the legend.
    once = list({one.cell["key"]: one for one in reversed(found)}.values())
    deepest = max(1, *(one.depth or 0 for one in found))
    least = 50.0 / found[0].cell["test_rows"]
    errors = [
        dataclasses.replace(line, y=tuple(max(100.0 - value, least) for value in line.y))
        for line in by_layer(once, "test", end=float(deepest))
    ]
    axis = Axis(METRICS["test"].label, errors=True)

    def draw() -> Any:
        figure = blank(10.5, 4.4)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        draw_owners(left, Ownership("Who owns which digit (area: number of images)", counts))
        left.set_xlabel("client")
        left.set_ylabel("digit")
        draw_lines(right, Panel("Test accuracy (errors on a log scale)", errors, BLOCKS, axis))
        legend_above(figure, [right], errors)
        return figure

    return render(styled(draw), "png")
