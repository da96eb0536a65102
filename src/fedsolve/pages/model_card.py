"""The card of a model in words: sections of names and values, and the whole as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.pages.words import harmless, percent, traffic_words
from fedsolve.pages.words import known as known_as

MOST_COLUMNS = 40
"""Columns of a schema that a page lists; JSON has them all."""

_LEFT_OUT = {"identifier": "identifiers", "unused": "unused"}

Section = tuple[str, list[tuple[str, str]]]


def sections(told: dict[str, Any]) -> list[Section]:
    """The card in words: titles, and names with values under each."""
    parts = {
        "Model": _model(told),
        "Rows": _rows(told["schema"], told["prepared"]),
        "Training": _training(told),
        "Probabilities": _calibration(told["calibration"], told["classes"]),
        "Intervals": _intervals(told["intervals"]),
        "Licence": [("", told["licence"])],
    }
    known = {title: [line for line in lines if line[1]] for title, lines in parts.items()}
    return [(title, lines) for title, lines in known.items() if lines]


def markdown(told: dict[str, Any]) -> str:
    """The card as a Markdown document."""
    lines = [f"# {_plain(Path(told['file']).name)}", "", f"`{told['model']}`"]
    for title, told_of in sections(told):
        lines += ["", f"## {title}", ""]
        lines += [f"- {f'**{_plain(name)}**: ' if name else ''}{_plain(value)}" for name, value in told_of]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in harmless(text))


def _model(told: dict[str, Any]) -> list[tuple[str, str]]:
    classes = told["classes"]
    predicts = (
        f"{told['targets']} targets" if classes is None else _listed(classes, f"{len(classes)} classes")
    )
    return [
        ("file", told["file"]),
        ("kind", f"{told['family']}{', of one client alone' if told['private'] else ''}"),
        ("takes", f"{told['features']:,} features"),
        ("predicts", predicts),
        ("size", f"{told['numbers']:,} numbers, format {told['format']}"),
        ("method", told["method"]),
        ("parameters", _named(told["parameters"])),
        ("chosen", _named(told["settings"])),
    ]


def _named(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items())


def _rows(schema: dict[str, Any] | None, prepared: bool) -> list[tuple[str, str]]:
    if schema is None:
        return []
    if schema["extractor"] is not None:
        extractor = schema["extractor"]
        lines = [("backbone", extractor["address"]), ("weights", extractor["weights"])]
        return [*lines, *((name, str(value)) for name, value in extractor["preprocessing"].items())]
    lines = [("label", str(schema["label"]))] if schema["label"] else []
    used = [column for column in schema["columns"] if column["kind"] not in _LEFT_OUT]
    for column in used[:MOST_COLUMNS]:
        unit = f" in {column['unit']}" if column.get("unit") else ""
        kinds = _listed(column["categories"], column["kind"]) if column.get("categories") else column["kind"]
        lines.append((column["name"], f"{kinds}{unit}, missing: {column['missing']}"))
    if len(used) > MOST_COLUMNS:
        lines.append(("...", f"and {len(used) - MOST_COLUMNS} more columns (all of them with --json)"))
    for kind, words in _LEFT_OUT.items():
        names = [column["name"] for column in schema["columns"] if column["kind"] == kind]
        lines.append((words, ", ".join(names)))
    lines.append(("preparation", "filled and standardised by sums" if prepared else "none"))
    return lines


def _training(told: dict[str, Any]) -> list[tuple[str, str]]:
    known = told["training"]
    if known is None:
        return []
    named = known["clients"] == len(known["cohort"])  # of many, the card has the number only
    clients = _listed(known["cohort"], str(known["clients"])) if named else f"{known['clients']:,}"
    noise, scores, errors = known.get("privacy"), known.get("accuracy") or {}, known.get("r2") or {}
    return [
        ("clients", clients),
        ("rows", known_as(known.get("rows"), "{:,}")),
        ("exchanges", f"{known['exchanges']} ({traffic_words(known)})"),
        *(("", f"{one['exchanges']} x {one['kind']}: {traffic_words(one)}") for one in known["history"]),
        ("privacy", known_as(noise, _privacy)),
        ("risk", known_as(known["risk"], "{:.6g}")),
        *(("accuracy", f"{percent(one)} on {part} rows") for part, one in scores.items() if one is not None),
        *(("R²", known_as(one, f"{{:.4f}} on {part} rows")) for part, one in errors.items()),
        ("sums", "secret: clients' answers were masked" if known.get("secure") else ""),
        ("versions", _named(known["versions"])),
    ]


def _privacy(noise: dict[str, Any]) -> str:
    unit = "row" if noise["unit"] == "row" else "whole site"
    by = "the sites, in secure sums" if noise["noise"] == "sites" else "the server, which saw exact sums"
    return f"epsilon {noise['epsilon']:g}, delta {noise['delta']:g} for every {unit}; noise added by {by}"


def _calibration(known: dict[str, Any] | None, classes: list[Any] | None) -> list[tuple[str, str]]:
    if classes is None:
        return []
    if known is None:
        return [("calibration", "none: probabilities are estimates put between 0 and 1")]
    biases = (
        "" if known["biases"] is None else f", biases {', '.join(f'{b:.3g}' for b in known['biases'][:10])}"
    )
    reached = ", on which the model of the others reached" if known["metrics"] else ""
    lines = [
        ("calibration", f"slope {known['slope']:.4g}{biases}"),
        ("held out", f"{known['held_out_rows']:,} rows{reached}"),
    ]
    names = {"auc": "AUC", "ece": "ECE", "log_loss": "log loss", "brier": "Brier score"}
    for name, value in known["metrics"].items():
        if value is not None and name != "auc_bound":
            lines.append((names.get(name, name.replace("_", " ")), f"{value:.4f}"))
    return lines


def _intervals(known: dict[str, Any] | None) -> list[tuple[str, str]]:
    if known is None:
        return []
    names = {"r2": "R²", "mae": "mean absolute error", "rmse": "root mean squared error", "bias": "bias"}
    return [
        ("reach", f"± {', '.join(f'{far:.4g}' for far in known['reach'])} holds 95 % of the truths"),
        ("held out", f"{known['held_out_rows']:,} rows, on which the model of the others reached"),
        *((names[name], f"{value:.4g}") for name, value in known["metrics"].items() if value is not None),
    ]


def _listed(values: list[Any], what: str) -> str:
    shown = ", ".join(map(str, values[:10]))
    return f"{what} ({shown}{', ...' if len(values) > 10 else ''})" if values else what
