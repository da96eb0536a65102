"""`fedsolve demo --personal`: what a model of its own gains each client, and on what it depends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve.cli import demo_page
from fedsolve.cli.output import Output, counted, percent, table
from fedsolve.closedform.apfl import APFL, APFLModel
from fedsolve.container import Array
from fedsolve.data.partitions import class_counts
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import Experiment, Measure, MethodSpec
from fedsolve.experiments.sources import ExperimentRows, digits
from fedsolve.experiments.trials import Trial
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.local_scores import LocalScores
from fedsolve.federation.participant import Participant

ALONE, SHARED = "local only", "APFL, shared stream alone"
AUTO = "APFL, each client's own balance"


def _personal(experiment: Experiment) -> Experiment:
    """The same division with APFL, measured client by client."""
    *_, afl, deepafl = experiment.methods
    width = deepafl.parameters["width"]
    # A few hundred rows need a firmer hand than the paper's tens of thousands.
    parameters = {"width": width, "refinement_width": width, "ridge": 1.0, "balance": "auto"}
    return dataclasses.replace(
        experiment,
        partitions=experiment.partitions[:1],
        methods=(afl, deepafl, MethodSpec("APFL", "apfl", parameters, {})),
        measure=Measure(local=True),
    )


def show(output: Output, experiment: Experiment, figure: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Train, personalise, compare client by client, and reshuffle everybody else.

    experiment: the demo's, of which AFL and DeepAFL on the first division are taken. Gives what came out and
        the files to write.
    """
    page, rows = output.page(), digits()
    cells = _personal(experiment).cells()
    trial = Trial.of(cells[0], rows)
    counts = class_counts(rows.y_train, trial.owners, trial.clients)
    demo_page.introduce(page, rows, counts, trial.cell.partition.options["alpha"])
    page.print(
        "Now each client is tested on images like its own: the test images are dealt so that its digits have "
        "the shares that they have among its training images."
    )
    outcomes = {}
    with output.bar("training", "model") as bar:
        for done, cell in enumerate(cells):
            bar(done, len(cells), cell.method.name)
            outcomes[cell.method.algorithm] = train_cell(cell, rows)
    model: APFLModel = outcomes["apfl"].model
    method: APFL = model.method
    parts = trial.parts

    def scores(algorithm: str, kind: str = "correct") -> LocalScores:
        local = outcomes[algorithm].values["local"]
        return LocalScores(parts.names, np.array(local[kind]), np.array(local["rows"]))

    over = method.over(outcomes["deepafl"].model)
    clients = zip(parts.names, parts.train, strict=True)
    compared = {
        ALONE: scores("apfl", "alone"),
        "AFL": scores("afl"),
        f"DeepAFL, {counted(cells[1].parameters['layers'], 'block')}": scores("deepafl"),
        SHARED: scores("apfl", "shared"),
        AUTO: scores("apfl"),
        "the same over DeepAFL": parts.score(Participant(*client).personalise(over) for client in clients),
    }
    _show_scores(page, compared, method)
    change = _reshuffled(model, rows, trial.owners, trial.cell.seed)
    _show_change(page, change)
    document = {
        "data": {"name": "digits", "train_rows": len(rows.y_train), "test_rows": sum(map(len, parts.test))},
        "division": {"name": trial.cell.partition.name, "rows_per_client": counts.sum(axis=1)},
        "seed": trial.cell.seed,
        "parameters": method.parameters(),
        "methods": {name: one.as_dict() for name, one in compared.items()},
        "balances": outcomes["apfl"].values["local"]["balances"],
        "reshuffled": change,
    }
    return document, {"personal.png": _figure(compared)} if figure else {}


def _show_scores(page: Console, scores: dict[str, LocalScores], method: APFL) -> None:
    shared = scores[SHARED]
    rows = []
    for name, found in scores.items():
        gains = found.gains(shared)
        better, worse = (str(int(np.sum(side))) for side in (gains > 0, gains < 0))
        rows.append((name, percent(found.mean), percent(found.worst_decile), better, worse))
    page.print(table(("method", "local accuracy", "worst tenth", "better", "worse"), rows))
    page.print(
        "Local accuracy is the mean over clients; worst tenth, the mean of those that fare worst; better and "
        "worse, how many clients gain and lose against APFL's shared stream. Both streams have width "
        f"{method.width}; local only is a client's own stream fitted to its labels, with nothing shared. "
        "One exchange trains the shared stream; a client's own stream takes none and never leaves it. Its "
        "balance is chosen from its training images by leave-one-out, in closed form.",
        style="dim",
    )
    page.print()


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


def _show_change(page: Console, change: dict[str, Any]) -> None:
    page.print("Everybody else reshuffled", style="bold")
    same = "it reads every test image as before" if change["same_predictions"] else "some answers differ"
    page.print(
        f"{change['client']} keeps its {change['rows']} images; {change['moved']:,} images of all others "
        f"change hands at random. Its shared stream changes by {change['shared']:.0e} and its own by "
        f"{change['own']:.0e}, which is rounding: {same}. A client's model depends on its own rows and on "
        "the union of all, not on how the rest is divided."
    )
    page.print()


def _figure(scores: dict[str, LocalScores]) -> bytes:
    from fedsolve.experiments.figures.gains import sorted_gains
    from fedsolve.experiments.figures.style import render

    gains = {
        f"over {words}": 100 * scores[AUTO].gains(scores[name])
        for name, words in ((SHARED, "the shared stream"), (ALONE, "each client alone"))
    }
    return render(sorted_gains(gains), "png")
