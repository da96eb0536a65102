"""What the disclosure rules cost honest runs: rows that wait, columns left out, numbers told.

`python -m benchmarks.disclosed`: the twelve tables (`benchmarks.tables`) and, where it is there, a table of
image features (`--features FILE.npz`), each with 20 clients at Dirichlet 0.1. AFL, Auto, Softmax and DeepAFL
in secure sums are compared with the same method in the open on the rows and columns that took part (what Auto
chose, with the settings that it chose). Then how many analyses of a table of 569 rows at three sites are
answered until one is refused, and what the user reads: 60 % of the rows are there at first, and a tenth
of them comes every week.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer

import fedsolve as fs
from benchmarks.machine import progress
from benchmarks.tables import TABLES
from fedsolve import registry
from fedsolve.federation.participant import Participant
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.secure_client import SecureClient

CLIENTS, ALPHA = 20, 0.1

METHODS: dict[str, Callable[[], Any]] = {
    "afl": lambda: fs.AFL(ridge=1.0),
    "auto": fs.Auto,
    "softmax": lambda: fs.Softmax(ridge=1.0),
    "deepafl": lambda: fs.DeepAFL(layers=2, width=64),
}


def client_of(participant: Participant) -> SecureClient:
    """The side of secure sums of a participant of this process."""
    found: Any = participant._channels["secure sums"]
    client: SecureClient = found.__self__
    return client


def honest(features: Any, labels: Any, method: Any) -> dict[str, Any]:
    """A secure run and one in the open on the rows that took part, and what the sites said."""
    owners = fs.partition.dirichlet(labels, clients=CLIENTS, alpha=ALPHA, seed=0)
    inner = fs.LocalFederation.from_arrays(features, labels, owners, clients=CLIENTS)
    secure = SecureFederation(inner)
    found: dict[str, Any] = {"rows": len(labels), "refused": ""}
    try:
        model = method.fit(secure)
    except fs.FedsolveError as problem:
        found["refused"] = str(problem)
    clients = [client_of(participant) for participant in inner.participants]
    shown = [client.disclosure.rows(client.participant.data) for client in clients]
    account = clients[0].disclosure.account
    found["part"] = sum(len(rows) for rows in shown)
    found["left"] = int(account.left_out[-1:, 0].sum())
    found["folds"] = max(int(client.disclosure.account.rows["count"].max(initial=1)) for client in clients)
    found["told"] = max(client.disclosure.told for client in clients)
    if not found["refused"]:
        values = [fs.ClientData(rows.features(slice(None)), rows.own_labels) for rows in shown]
        names = [participant.name for participant in inner.participants]
        plain = fs.LocalFederation(
            [Participant(name, one) for name, one in zip(names, values, strict=True)],
            classes=inner.describe().classes,
        )
        if method.chooses:
            best = next(one for one in model.tried if one.chosen)
            method = registry.method_class(best.method)(**best.settings)
            found["chose"] = best.method
        scores = [
            one.decision_function(np.asarray(features, dtype=float)) for one in (model, method.fit(plain))
        ]
        found["apart"] = float(np.abs(scores[0] - scores[1]).max() / np.abs(scores[1]).max())
    return found


def analyses() -> list[tuple[str, str]]:
    """Ordinary analyses of 569 rows at three sites, one after the other, until one is refused."""
    features, labels = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(len(labels)) % 3)
    wholes, weeks = [one.data for one in inner.participants], [0]
    secure = SecureFederation(inner)
    models: list[Any] = []

    def arrive(share: float) -> None:
        """Show each site the first rows of its table: those that have come by now."""
        for one, whole in zip(inner.participants, wholes, strict=True):
            one.data = whole.taking(np.arange(len(whole)) < share * len(whole))
            one.forget()
        secure.plan(1)

    def another_week() -> None:
        weeks[0] += 1
        arrive(0.6 + 0.1 * weeks[0])
        models.append(fs.AFL(ridge=1.0).fit(secure))

    arrive(0.6)
    asked: list[tuple[str, Callable[[], Any]]] = [
        ("AFL", lambda: models.append(fs.AFL(ridge=1.0).fit(secure))),
        ("evaluation", lambda: fs.evaluate(secure, models[-1], detailed=True)),
        ("describe", lambda: fs.Describe().fit(secure)),
        *((f"AFL after week {week} of new rows", another_week) for week in (1, 2, 3, 4)),
        ("softmax", lambda: models.append(fs.Softmax(ridge=1.0).fit(secure))),
    ]
    asked += [
        (f"AFL, ridge {ridge:g}", lambda ridge=ridge: models.append(fs.AFL(ridge=ridge).fit(secure)))
        for ridge in (0.1, 10.0)
    ]
    for ridge in (0.3, 3.0, 30.0, 100.0, 300.0):
        asked.append((f"softmax, ridge {ridge:g}", lambda ridge=ridge: fs.Softmax(ridge=ridge).fit(secure)))
        asked.append((f"evaluation {ridge:g}", lambda: fs.evaluate(secure, models[-1], detailed=True)))
    found = []
    for name, ask in asked:
        try:
            ask()
        except fs.FedsolveError as problem:
            found.append((name, str(problem)))
            break
        found.append((name, f"told so far: {client_of(inner.participants[0]).disclosure.told:.1%}"))
    return found


@click.command()
@click.option(
    "--features", type=click.Path(exists=True, path_type=Path), help="npz with x_train and y_train."
)
@click.option("--only", multiple=True, help="Names of tables.")
@click.option("--method", "methods", multiple=True, type=click.Choice([*METHODS]), default=[*METHODS])
def main(features: Path | None, only: tuple[str, ...], methods: tuple[str, ...]) -> None:
    """Rows that take part, and the difference between secure sums and sums in the open."""
    warnings.simplefilter("ignore")
    console, table = Console(width=180), Table(title=f"{CLIENTS} clients, Dirichlet {ALPHA}")
    for head in (
        "table",
        "method",
        "rows",
        "take part",
        "columns left out",
        "folds",
        "told",
        "apart from plain",
        "refused",
    ):
        table.add_column(head, justify="left" if head in ("table", "method", "refused") else "right")
    sources: dict[str, Callable[[], Any]] = {n: t for n, t in TABLES.items() if not only or n in only}
    if features is not None:
        kept = np.load(features)
        images, answers = (kept[name] for name in ("x_train", "y_train"))
        sources[features.stem] = lambda: (np.asarray(images, dtype=float).reshape(len(images), -1), answers)
    for name, source in sources.items():
        for method in methods:
            progress(f"{name}: {method}")
            found = honest(*source(), METHODS[method]())
            apart = "" if "apart" not in found else f"{found['apart']:.1e}"
            table.add_row(
                name,
                f"{method}: {found['chose']}" if "chose" in found else method,
                f"{found['rows']:,}",
                f"{found['part'] / found['rows']:.1%}",
                str(found["left"]),
                str(found["folds"]),
                f"{found['told']:.1%}",
                apart,
                found["refused"].partition(": ")[2][:160],
            )
    console.print(table)
    console.print("569 rows, three sites, one analysis after the other:")
    for name, said in analyses():
        console.print(f"  {name}: {said}")


if __name__ == "__main__":
    main()
