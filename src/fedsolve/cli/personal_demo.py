"""`fedsolve demo --personal`: what a model of its own gains each client, and on what it depends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve import container
from fedsolve.cli import demo_page
from fedsolve.cli.comparison import DemoDivision, Digits, counted, relative_difference
from fedsolve.cli.output import Output, check_target, percent, plain, table
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.apfl import APFL, APFLModel
from fedsolve.closedform.deepafl import DeepAFL
from fedsolve.container import Array
from fedsolve.data import partitions
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.local_scores import LocalScores, client_rows, local_scores

SHARED = "APFL, shared stream alone"
AUTO = "APFL, each client's own balance"


def show(
    output: Output, folder: Path, clients: int, alpha: float, seed: int, layers: int, width: int, figure: bool
) -> None:
    """Train, personalise, compare client by client, and reshuffle everybody else."""
    started = time.perf_counter()
    page = output.page()
    check_target(str(folder / "personal.png"))
    digits = Digits.load()
    owners = partitions.dirichlet(digits.y_train, clients, alpha, seed=seed)
    name = f"{counted(clients, 'client')}, Dirichlet {alpha:g}"
    demo_page.introduce(page, digits, DemoDivision(name, owners, clients), alpha)
    tested = partitions.alike(digits.y_test, digits.y_train, owners, clients, seed=seed)
    tests = client_rows(digits.test, digits.y_test, tested, clients)
    page.print(
        "Now each client is tested on images like its own: the test images are dealt so that its digits have "
        "the shares that they have among its training images."
    )
    # A few hundred rows need a firmer hand than the paper's tens of thousands.
    method = APFL(width=width, refinement_width=width, ridge=1.0, balance="auto", seed=seed)
    federation = _federate(digits, owners, clients)
    with output.bar("training", "step") as bar:
        scores, model = _scores(method, federation, tests, layers, seed, bar)
    _show_scores(page, scores, method)
    change = _reshuffled(method, digits, owners, clients, model, seed)
    _show_change(page, change)
    document = {
        "data": {"name": "digits", "train_rows": len(digits.y_train), "test_rows": len(digits.y_test)},
        "division": {"name": name, "rows_per_client": np.bincount(owners, minlength=clients)},
        "seed": seed,
        "parameters": method.parameters(),
        "methods": {name: found.as_dict() for name, found in scores.items()},
        "balances": [model.personal(client).balance for client in federation.clients],
        "reshuffled": change,
        "folder": str(folder),
    }
    files: dict[str, bytes] = {}
    if figure:
        files["personal.png"] = _figure(scores)
    document["seconds"] = time.perf_counter() - started
    files["personal.json"] = (json.dumps(plain(document), indent=2) + "\n").encode()
    for file, contents in files.items():
        container.write_atomically(folder / file, contents)
    told = " and ".join(files)
    page.print(f"Wrote {told} to {folder}/ after {document['seconds']:.0f} seconds.", markup=False)
    if output.as_json:
        output.result(document, lambda page: None)


def _federate(digits: Digits, owners: Array, clients: int) -> LocalFederation:
    return LocalFederation.from_arrays(digits.train, digits.y_train, owners, clients=clients)


def _scores(
    method: APFL,
    federation: LocalFederation,
    tests: list[Any],
    layers: int,
    seed: int,
    bar: Callable[[int, int, str], None],
) -> tuple[dict[str, LocalScores], APFLModel]:
    bar(0, 4, "AFL, DeepAFL")
    afl = AFL(ridge=0.1).fit(federation)
    deepafl = DeepAFL(layers=layers, width=method.width, seed=seed).fit(federation)
    bar(1, 4, "APFL")
    model = method.fit(federation)
    own = [participant.personalise(model) for participant in federation.participants]
    bar(2, 4, "each client alone")
    alone = [model.alone().personal(client) for client in federation.clients]
    bar(3, 4, "over DeepAFL")
    deep = [participant.personalise(method.over(deepafl)) for participant in federation.participants]
    predictors: dict[str, Any] = {
        "local only": alone,
        "AFL": afl,
        f"DeepAFL, {counted(layers, 'block')}": deepafl,
        SHARED: model,
        AUTO: own,
        "the same over DeepAFL": deep,
    }
    return {name: local_scores(found, tests, federation.clients) for name, found in predictors.items()}, model


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


def _reshuffled(
    method: APFL, digits: Digits, owners: Array, clients: int, model: APFLModel, seed: int
) -> dict[str, Any]:
    """Deal everybody else's images anew and see what changes for one client (Theorem 3)."""
    sizes = np.bincount(owners, minlength=clients)
    kept = int(np.argmax(sizes))
    others = np.flatnonzero(owners != kept)
    rest = [client for client in range(clients) if client != kept]
    dealt = owners.copy()
    if rest:
        dealt[others] = np.random.default_rng(seed).choice(rest, len(others))
    again = method.fit(_federate(digits, dealt, clients))
    assert model.federation is not None
    client = model.federation.clients[kept]
    before, after = model.personal(client), again.personal(client)
    shared = relative_difference(
        before.shared.decision_function(digits.test), after.shared.decision_function(digits.test)
    )
    return {
        "client": client,
        "rows": int(sizes[kept]),
        "moved": int(np.sum(dealt != owners)),
        "shared": shared,
        "own": relative_difference(before.weight, after.weight),
        "same_predictions": bool(np.array_equal(before.predict(digits.test), after.predict(digits.test))),
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
        for name, words in ((SHARED, "the shared stream"), ("local only", "each client alone"))
    }
    return render(sorted_gains(gains), "png")
