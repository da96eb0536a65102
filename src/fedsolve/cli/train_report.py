"""The report of `fedsolve train`: numbers for programs, and lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from fedsolve.cli.inputs import Division
from fedsolve.cli.output import fact_grid, table
from fedsolve.data.partitions import heterogeneity
from fedsolve.federation.engine import Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.pages.words import known, percent, traffic_words
from fedsolve.tables.table_file import Table

_TELLING = ("scale", "gain", "ridge", "residual_ridge", "width", "bandwidth", "landmarks")
"""The settings that tell candidates apart."""
_UNEVEN = "; heterogeneity {:.2f}, from 0: equal shares of classes, to 1: a class each"
_SHARED_PART = "of the shared part by itself, which is not meant to predict (see --personal)"


def counts_of(data: Table, federation: LocalFederation, split: Division, spec: Spec) -> dict[str, Any]:
    assert data.labels is not None
    dealt: dict[str, Any] = {"kind": "named"}
    if split.kind is not None:
        dealt = {"kind": split.kind, **split.options, "seed": split.seed}
    owners = np.empty(len(data), dtype=np.int64)
    for index, participant in enumerate(federation.participants):
        owners[participant.data.rows] = index
    classes = None if spec.classes is None else spec.classes.tolist()
    rows = {} if classes is None else {one: float(np.mean(data.labels == one)) for one in classes}
    return {
        "data": data.source,
        "rows": len(data),
        "features": spec.features,
        "task": federation.task,
        "classes": classes,
        "largest_class": max(rows.items(), key=lambda one: one[1], default=None),
        "labels": list(spec.labels) or None,
        "clients": len(federation.clients),
        "empty_clients": sum(len(participant) == 0 for participant in federation.participants),
        "partition": {
            **dealt,
            "heterogeneity": None if spec.classes is None else heterogeneity(data.labels, owners),
        },
    }


def show_training(page: Console, told: dict[str, Any]) -> None:
    split, numbers = told["partition"], told["classes"] is None and not told["labels"]
    accuracy, of_what = (told["r2"], "R²") if numbers else (told["accuracy"], "accuracy")
    empty = f", {told['empty_clients']} of them empty" if told["empty_clients"] else ""
    dealt = "named by the data" if split["kind"] == "named" else split["kind"]
    compared = any(one["loss"] is not None for one in told["tried"])
    held_out = told["calibration"] is not None or told["intervals"] is not None
    parts = ["choice"] * compared + ["calibration"] * held_out
    if parts == ["calibration"]:
        parts.insert(0, "a training without the rows held out")
    twice = f" ({', '.join(parts)} and training)" if parts else ""
    settings = ("layers", "width", "ridge", "epochs", "batch", "rate")
    shown_settings = ", ".join(f"{n} {v}" for n, v in told["parameters"].items() if n in settings)
    several = f"{len(told['labels'] or ())} labels each"
    predicts = (
        "a number each" if numbers else several if told["labels"] else f"{len(told['classes'])} classes"
    )
    if (largest := told["largest_class"]) is not None:
        predicts += f", most often {largest[0]!r} ({percent(largest[1])})"

    def scored(share: float | None, on: str, form: Any = "{:.4f}".format if numbers else percent) -> str:
        return "" if share is None else f"{form(share)} {on}"

    if compared:
        _show_tried(page, told["tried"])
    lines = [
        ("method", f"{told['method']} ({shown_settings})"),
        ("clients", f"{told['clients']}{empty} ({dealt}{known(split['heterogeneity'], _UNEVEN)})"),
        ("rows", f"{told['rows']:,} of {told['features']:,} features, {predicts}"),
        *(_network_lines(told) if "weights" in told else ()),
        ("exchanges", f"{told['exchanges']}{twice}"),
        ("traffic", traffic_words(told)),
        ("sums", "secret: clients' answers were masked, only totals were opened" * told["secure"]),
        ("seconds", f"{told['seconds']:.2f}"),
        (of_what, scored(accuracy["train"], "on the clients' training rows")),
        ("", scored(accuracy["held_out"], "on rows held out, before all were trained on")),
        ("", scored(accuracy["test"], f"on {told['test_rows'] or 0:,} test rows")),
        ("probabilities", known(told["calibration"], _calibrated)),
        ("predictions", known(told["intervals"], _within)),
        ("", "" if told["predicts"] else _SHARED_PART),
        ("", scored(told.get("final_accuracy"), "on them over the last tenth of the rounds", percent)),
        *([] if told["personal"] is None else _personal_lines(told["personal"])),
        ("model", told["model"]),
    ]
    page.print(fact_grid(lines))


def _calibrated(told: dict[str, Any]) -> str:
    seen = told["metrics"]
    reached = f"(error {percent(seen['ece'])}, log loss {seen['log_loss']:.4f})"
    return f"calibrated on {told['held_out_rows']:,} rows held out {reached}"


def _within(told: dict[str, Any]) -> str:
    reach, errors = ", ".join(f"{far:.4g}" for far in told["reach"]), told["metrics"]
    reached = f"(mean absolute error {errors['mae']:.4g}, root mean squared {errors['rmse']:.4g})"
    return f"± {reach} hold 95 % of {told['held_out_rows']:,} rows held out {reached}"


def _show_tried(page: Console, tried: Sequence[Mapping[str, Any]]) -> None:
    page.print(tried_table(tried))
    if tried[0]["errors"] is not None:
        page.print(
            "Held out: right answers on rows held out. Squared error: of the scores there, summed over the "
            "classes; with two classes, half of it is the Brier score of scores that are probabilities. "
            "Numbers: what a client tells in a training."
        )
        page.print(
            "Of candidates within half a standard error of the fewest mistakes, the kind with the fewest "
            "exchanges is taken, then with the fewest numbers told.\n"
        )
    marks = [(one["method"], one["errors"], one["loss"]) for one in tried if one["loss"]]
    if len(set(marks)) < len(marks):
        page.print(
            "Rows with the same numbers differ in a setting without effect here, such as the scale of "
            "columns that have unit variance already.\n"
        )


def _personal_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if told["local_accuracy"] is not None:
        shared, own = (told["local_accuracy"][name] for name in ("shared", "personal"))
        shared_words = "" if shared is None else f", shared model {percent(shared['mean'])}"
        reached = f"{percent(own['mean'])} mean local accuracy{shared_words}"
        lines.append(("personal", f"{reached} (test rows dealt like each client's own)"))
    if told["balances"] is not None:
        low, middle, high = np.quantile(list(told["balances"].values()), (0.0, 0.5, 1.0))
        lines.append(("balance", f"{middle:.2f} ({low:.2f} to {high:.2f} over the clients)"))
        low, middle, high = np.quantile(list(told["refinement_ridges"].values()), (0.0, 0.5, 1.0))
        if low < high:
            lines.append(("ridge", f"{middle:.3g} ({low:.3g} to {high:.3g} over the clients)"))
    return [*lines, ("their models", known(told["folder"], "{}/CLIENT.safetensors"))]


def _network_lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    parameters = told["parameters"]
    loss = known(told["loss"], ", local loss {:.4f} in the last") + known(told["drift"], ", drift {:.4g}")
    last = f", last in {', '.join(told['feedback_layers'])}" if told["feedback_layers"] else ""
    return [
        ("network", f"{parameters['network']} ({told['weights']:,} weights)"),
        ("rounds", f"{told['rounds']}{loss}"),
        ("feedback", known(parameters["feedback"], "{}" + last)),
    ]


def tried_table(tried: Sequence[Mapping[str, Any]]) -> RichTable:
    """Candidates with their marks on the rows held out; an arrow at the one that was taken."""
    settings = [
        ", ".join(f"{n.replace('_', ' ')} {one['settings'][n]}" for n in _TELLING if n in one["settings"])
        for one in tried
    ]
    columns = {
        "": ["->" if one["chosen"] else "" for one in tried],
        "tried": [one["method"] for one in tried],
        "settings": settings,
        "layers": [known(one["layers"]) for one in tried],
        "held out": [known(one["errors"], lambda share: percent(1.0 - share)) for one in tried],
        "squared error": [known(one["loss"], "{:.4f}") for one in tried],
        "exchanges": [known(one["exchanges"]) for one in tried],
        "numbers": [known(one["numbers"], "{:,}") for one in tried],
        "left out": [one["left_out"] for one in tried],
    }
    used = {head: cells for head, cells in columns.items() if any(cells)}
    left = [place for place, head in enumerate(used) if head in ("", "tried", "settings", "left out")]
    return table([*used], [*zip(*used.values(), strict=True)], left=left)
