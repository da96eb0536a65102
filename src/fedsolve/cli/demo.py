"""`fedsolve demo`: closed forms against FedAvg on embedded data, invariance, and personal models."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.cli.options import LAST, Options, command, option
from fedsolve.cli.output import Output, check_target, table
from fedsolve.data.partitions import class_counts
from fedsolve.experiments import digits_demo
from fedsolve.experiments.cells import deal
from fedsolve.experiments.config import Cell, Experiment
from fedsolve.experiments.observations import observations
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.sources import ExperimentRows, digits
from fedsolve.pages.words import counted, percent
from fedsolve.pages.written_tables import plain

_MODEL = "The methods"
_NEXT = (
    "fedsolve train digits --layers 5 --partition shards --out model.safetensors",
    "fedsolve evaluate model.safetensors digits",
    "fedsolve train --help      # your own npz, csv or parquet file",
)


class DemoOptions(Options):
    title = "The federation"
    clients: int = option(20, "How many clients.", least=1)
    alpha: float = option(0.1, "Dirichlet parameter: small is uneven.")
    seed: int = option(0, "Of the division, projections and shuffles.", least=0)
    layers: int = option(20, "DeepAFL: residual blocks.", least=0, group=_MODEL)
    width: int = option(256, "DeepAFL, APFL: features.", least=1, group=_MODEL)
    rounds: int = option(100, "FedAvg: rounds of averaging.", least=1, group=_MODEL)
    out: str = option("fedsolve-demo", "Folder for figures and results.", "DIR", group=LAST)
    figure: bool = option(True, "Whether to draw the figures.", group=LAST)


@command()
def demo(options: DemoOptions, output: Output) -> None:
    """Train AFL, DeepAFL, FedAvg and APFL on handwritten digits divided among clients, and prove invariance.

    Compares them, and clients on their own, by test accuracy, exchanges, megabytes and seconds. Deals the
    same rows differently and shows that the closed-form models do not change. Then gives every client a model
    of its own (APFL), tested on images like those it owns. All data are embedded. Writes demo.png,
    personal.png and results.json to the folder --out.

    # the whole story in about a minute
    fedsolve demo
    # milder division, more clients
    fedsolve demo --clients 50 --alpha 1
    """
    started = time.perf_counter()
    folder, rows = Path(options.out), digits()
    check_target(str(folder / "demo.png"))
    page = output.page()
    shared = digits_demo.shared_experiment(
        options.clients, options.alpha, options.seed, options.layers, options.width, options.rounds
    )
    first = shared.partitions[0]
    owners = deal(first, rows.y_train, shared.seeds[0])
    counts = class_counts(rows.y_train, owners, first.clients)
    _introduce(page, rows, counts, options.alpha)
    run, document = _compare(output, shared, rows)
    document["division"]["rows_per_client"] = counts.sum(axis=1)
    personal = digits_demo.personal_experiment(shared)
    document["personal"] = _personalise(output, personal, rows, owners)
    files: dict[str, bytes] = {}
    if options.figure:
        from fedsolve.experiments.run_figures import GAINS, client_gains, gain_plot
        from fedsolve.pages.plots import draw, render

        gains = {GAINS[kind]: client_gains(document["personal"]["local"], kind) for kind in GAINS}
        drawn = digits_demo.panels(counts, observations(run.cells))
        files["demo.png"] = render(draw(drawn), "png")
        files["personal.png"] = render(gain_plot("", "", gains).figure, "png")
    document |= {"folder": options.out, "seconds": time.perf_counter() - started}
    files["results.json"] = (json.dumps(plain(document), indent=2) + "\n").encode()
    for name, contents in files.items():
        container.write_atomically(folder / name, contents)
    page.print(
        f"Wrote {', '.join(files)} to {folder}/ after {document['seconds']:.0f} seconds.", markup=False
    )
    page.print("Try next", style="bold")
    for line in _NEXT:
        page.print(f"  {line}", markup=False, soft_wrap=True)
    output.result(document)


def _introduce(page: Console, rows: ExperimentRows, counts: Array, alpha: float) -> None:
    """Whose data these are. counts: images of each client and digit."""
    sizes = counts.sum(axis=1)
    kinds = float(np.mean((counts > 0).sum(axis=1)[sizes > 0]))
    owners = counted(len(counts), "client")
    assert rows.y_test is not None
    page.print(f"Handwritten digits, divided among {owners}", style="bold")
    page.print(
        f"{len(rows.y_train):,} training images of 8 x 8 pixels belong to {owners}. "
        f"A Dirichlet({alpha:g}) draw decides who owns what: {sizes.min()} to {sizes.max()} images each, "
        f"{kinds:.1f} of the {counts.shape[1]} digits on average. No image may leave its owner. "
        f"{len(rows.y_test):,} further images are kept for testing."
    )


def _compare(
    output: Output, experiment: Experiment, rows: ExperimentRows
) -> tuple[RunFolder, dict[str, Any]]:
    """Train everything under the first division, and FedAvg, AFL and DeepAFL under the others."""
    page, (first, *others) = output.page(), experiment.partitions
    dealt = {
        one.name: [cell for cell in experiment.cells() if cell.partition is one] for one in (first, *others)
    }
    run, outcomes = _train(output, experiment, dealt[first.name], rows)
    *_, fedavg, afl, deepafl = (cell.parameters for cell in dealt[first.name])
    _show_results(
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
        _, again = _train(output, experiment, dealt[partition.name][-3:], rows)
        changes.append(digits_demo.change(outcomes[-3:], again, rows))
    _show_changes(page, first.name, outcomes[-3].values["accuracy"], changes)
    cell = run.cells[0]
    return run, {
        "data": cell["dataset"],
        "division": cell["partition"],
        "seed": cell["seed"],
        "parameters": {cell["method"]: cell["parameters"] for cell in run.cells},
        "methods": _methods(run),
        "staged_accuracy": outcomes[-1].values["accuracy_per_layer"],
        "invariance": changes,
    }


def _personalise(
    output: Output, experiment: Experiment, rows: ExperimentRows, owners: Array
) -> dict[str, Any]:
    """Give every client a model of its own, compare client by client, and reshuffle everybody else."""
    page, cells = output.page(), experiment.cells()
    page.print("A model of its own for every client", style="bold")
    page.print(
        "Now each client is tested on images like its own: the test images are dealt so that its digits have "
        "the same shares as among its training images."
    )
    run, outcomes = _train(output, experiment, cells, rows)
    _show_results(
        page,
        run,
        "Accuracy is the mean over clients of what each reaches on its own test images. Local only is a "
        f"ridge on a client's own pixels; both streams of APFL have width {cells[-1].parameters['width']}. "
        "One exchange trains the shared stream; a client's own stream takes none and never leaves it. Its "
        "balance is chosen from its training images by leave-one-out, in closed form.",
    )
    change = digits_demo.reshuffled(outcomes[-1].model, rows, owners, experiment.seeds[0])
    same = "it reads every test image as before" if change["same_predictions"] else "some answers differ"
    page.print(
        f"[bold]Everybody else reshuffled[/bold]: {change['client']} keeps its {change['rows']} images; "
        f"{change['moved']:,} images of all others change hands at random. Its shared stream changes by "
        f"{change['shared']:.0e} and its own by {change['own']:.0e}, which is rounding: {same}. A client's "
        "model depends on its own rows and on the union of all, not on how the rest is divided.\n"
    )
    return {"methods": _methods(run), "local": outcomes[-1].values["local"], "reshuffled": change}


def _train(
    output: Output, experiment: Experiment, cells: Collection[Cell], rows: ExperimentRows
) -> tuple[RunFolder, list[Outcome]]:
    with output.bar("training", "model") as bar:
        return digits_demo.train(experiment, cells, rows, bar)


def _methods(run: RunFolder) -> list[dict[str, Any]]:
    return [{"name": one.method, "depth": one.depth, **one.values} for one in observations(run.cells)]


def _show_results(page: Console, run: RunFolder, remark: str) -> None:
    (results,) = tables_of(run)
    page.print(table((results.corner, *results.columns), results.lines()[0]))
    page.print(remark, style="dim")
    page.print()


def _show_changes(page: Console, first: str, reached: float, changes: Sequence[Mapping[str, Any]]) -> None:
    """What happens when the same rows are dealt differently."""
    page.print("The same images, dealt differently", style="bold")
    page.print(
        "How much the weights change against the models above (largest relative difference of any weight "
        "matrix), and whether AFL and DeepAFL, at every depth, still read every test image the same way."
    )
    lines = [(f"{first} (above)", "-", "-", "-", "-", percent(reached))]
    for change in changes:
        shown = [_difference(change[name]) for name in ("afl", "deepafl")]
        same, fedavg = "yes" if change["same_predictions"] else "NO", f"{change['fedavg']:.0%}"
        lines.append((change["division"], *shown, same, fedavg, percent(change["fedavg_accuracy"])))
    heads = ("who owns the images", "AFL", "DeepAFL", "same answers", "FedAvg", "FedAvg accuracy")
    page.print(table(heads, lines))
    worst = _difference(max(max(change["afl"], change["deepafl"]) for change in changes))
    accuracies = [reached, *(change["fedavg_accuracy"] for change in changes)]
    spread = 100 * (max(accuracies) - min(accuracies))
    exact = " (AFL has none: sums of products of sixteenths are exact)"
    if all(change["same_predictions"] for change in changes):
        page.print(
            "[bold]The closed-form models are those of the pooled data, whoever owns what[/bold]: clients "
            "send terms of sums, and sums do not depend on who holds which addend. What remains, "
            f"{worst}, is rounding{'' if any(change['afl'] for change in changes) else exact}. "
            f"FedAvg's accuracy moves by {spread:.1f} points."
        )
    else:
        page.print(
            f"[bold]Some answers differ[/bold] although the weights agree to {worst}: two scores of a test "
            "image are equal up to rounding."
        )
    page.print()


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
