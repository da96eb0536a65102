"""`fedsolve demo`: closed forms against FedAvg on embedded data, and a proof of invariance on the spot."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from fedsolve import container
from fedsolve.cli import demo_page, personal_demo
from fedsolve.cli.command import LAST, Command, option
from fedsolve.cli.comparison import Change, Comparison, Digits, Entry, divisions
from fedsolve.cli.figure import draw
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, check_target, plain
from fedsolve.data.partitions import class_counts

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
@option("--out", metavar="DIR", default="fedsolve-demo", group=LAST, help="Folder for figure, data, results.")
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
    needs is embedded. Writes demo.png, digits.npz and results.json to the folder --out.

    With --personal: what a model of its own gains each client, on test images like those it owns. Writes
    personal.png and personal.json.
    """
    if personal:
        personal_demo.show(Output(as_json, quiet), Path(out), clients, alpha, seed, layers, width, figure)
        return
    started = time.perf_counter()
    output = Output(as_json, quiet)
    page = output.page()
    folder = Path(out)
    check_target(str(folder / "demo.png"))
    digits = Digits.load()
    comparison = Comparison(digits, layers, width, rounds, seed)
    first, *others = divisions(digits.y_train, clients, alpha, seed)
    demo_page.introduce(page, digits, first, alpha)

    with output.bar("training", "step") as bar:
        reference = comparison.train(first, bar)
    entries = comparison.entries(first, reference)
    stages = comparison.stages(reference.deepafl)
    demo_page.show_entries(page, entries, comparison)

    changes = []
    for division in others:
        with output.bar(division.name, "step") as bar:
            changes.append(comparison.change(division, comparison.train(division, bar), reference))
    fedavg = next(entry for entry in entries if entry.name == comparison.fedavg_name(reference.fedavg))
    demo_page.show_changes(page, first, fedavg, changes)

    document: dict[str, Any] = {
        "data": {"name": "digits", "train_rows": len(digits.y_train), "test_rows": len(digits.y_test)},
        "division": {"name": first.name, "rows_per_client": first.sizes},
        "seed": seed,
        "parameters": comparison.parameters(),
        "methods": [dataclasses.asdict(entry) for entry in entries],
        "staged_accuracy": stages,
        "invariance": [_change(change) for change in changes],
        "folder": out,
    }
    files = {"digits.npz": _npz(digits)}
    if figure:
        counts = class_counts(digits.y_train, first.owners, clients)
        files["demo.png"] = draw(counts, stages, _lines(entries, fedavg), len(digits.y_test))
    document["seconds"] = time.perf_counter() - started
    files["results.json"] = (json.dumps(plain(document), indent=2) + "\n").encode()
    for name, contents in files.items():
        container.write_atomically(folder / name, contents)
    demo_page.close(page, folder, figure, document["seconds"])
    if as_json:
        output.result(document, lambda page: None)


def _lines(entries: list[Entry], fedavg: Entry) -> list[tuple[str, Entry]]:
    """What the figure compares DeepAFL with."""
    named = {entry.name: entry for entry in entries}
    lines = [("AFL", named["AFL"]), (fedavg.name, fedavg)]
    return lines + [(name, named[name]) for name in named if name.startswith("local only")]


def _change(change: Change) -> dict[str, Any]:
    told = {name: value for name, value in vars(change).items() if name != "division"}
    return {"division": change.division.name, "clients": change.division.clients} | told


def _npz(digits: Digits) -> bytes:
    """The demo's data as `fedsolve train` reads them."""
    archive = io.BytesIO()
    np.savez_compressed(archive, **vars(digits))
    return archive.getvalue()
