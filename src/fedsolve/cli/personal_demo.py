"""`fedsolve demo --personal`: what a model of its own gains each client, and on what it depends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedsolve.cli import demo_page
from fedsolve.cli.output import Output
from fedsolve.closedform.apfl import APFLModel
from fedsolve.container import Array
from fedsolve.data.partitions import class_counts
from fedsolve.experiments.config import Experiment, Measure, MethodSpec, TableSpec
from fedsolve.experiments.sources import ExperimentRows, digits
from fedsolve.experiments.trials import Trial
from fedsolve.federation.local import LocalFederation

SHARED, AUTO = "APFL, shared stream", "APFL, own balance"


def show(output: Output, experiment: Experiment, figure: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Train, personalise, compare client by client, and reshuffle everybody else.

    experiment: the demo's, whose first division is taken. Gives what came out and the files to write.
    """
    page, rows, experiment = output.page(), digits(), _personal(experiment)
    cells = experiment.cells()
    trial = Trial.of(cells[0], rows)
    counts = class_counts(rows.y_train, trial.owners, trial.clients)
    demo_page.introduce(page, rows, counts, trial.cell.partition.options["alpha"])
    page.print(
        "Now each client is tested on images like its own: the test images are dealt so that its digits have "
        "the shares that they have among its training images."
    )
    run, outcomes = demo_page.train(output, experiment, cells, rows)
    demo_page.show_results(
        page,
        run,
        "Accuracy is the mean over clients of what each reaches on its own test images. Local only is a "
        f"ridge on a client's own pixels; both streams of APFL have width {cells[-1].parameters['width']}. "
        "One exchange trains the shared stream; a client's own stream takes none and never leaves it. Its "
        "balance is chosen from its training images by leave-one-out, in closed form.",
    )
    change = _reshuffled(outcomes[-1].model, rows, trial.owners, trial.cell.seed)
    same = "it reads every test image as before" if change["same_predictions"] else "some answers differ"
    page.print("Everybody else reshuffled", style="bold")
    page.print(
        f"{change['client']} keeps its {change['rows']} images; {change['moved']:,} images of all others "
        f"change hands at random. Its shared stream changes by {change['shared']:.0e} and its own by "
        f"{change['own']:.0e}, which is rounding: {same}. A client's model depends on its own rows and on "
        "the union of all, not on how the rest is divided.\n"
    )
    local = outcomes[-1].values["local"]
    document = demo_page.document(run, counts) | {"local": local, "reshuffled": change}
    return document, {"personal.png": _figure(local)} if figure else {}


def _personal(experiment: Experiment) -> Experiment:
    """The same division with APFL, measured client by client."""
    alone, *_, afl, deepafl = experiment.methods
    width = deepafl.parameters["width"]
    # A few hundred rows need a firmer hand than the paper's tens of thousands.
    apfl = {"width": width, "refinement_width": width, "ridge": 1.0}
    return dataclasses.replace(
        experiment,
        partitions=experiment.partitions[:1],
        methods=(
            dataclasses.replace(alone, name="local only"),
            afl,
            dataclasses.replace(deepafl, depths=()),
            MethodSpec(SHARED, "apfl", apfl | {"balance": 0.0}, {}),
            MethodSpec(AUTO, "apfl", apfl | {"balance": "auto"}, {}),
        ),
        measure=Measure(local=True),
        table=TableSpec(("method",), ("metric",), ("test", "worst_decile", "gain_shared")),
    )


def _reshuffled(model: APFLModel, rows: ExperimentRows, owners: Array, seed: int) -> dict[str, Any]:
    """Deal everybody else's images anew and see what changes for one client (Theorem 3)."""
    assert model.federation is not None
    assert rows.x_test is not None
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
    before, after = model.personal(clients[kept]), again.personal(clients[kept])
    shared = [one.shared.decision_function(rows.x_test) for one in (before, after)]
    return {
        "client": clients[kept],
        "rows": int(sizes[kept]),
        "moved": int(np.sum(dealt != owners)),
        "shared": demo_page.relative_difference(*shared),
        "own": demo_page.relative_difference(before.weight, after.weight),
        "same_predictions": bool(np.array_equal(before.predict(rows.x_test), after.predict(rows.x_test))),
    }


def _figure(local: dict[str, Any]) -> bytes:
    from fedsolve.experiments.figures.gains import OVER, client_gains, sorted_gains
    from fedsolve.experiments.figures.style import render

    return render(sorted_gains({OVER[kind]: 100 * client_gains(local, kind) for kind in OVER}), "png")
