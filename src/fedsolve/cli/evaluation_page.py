"""An evaluation for people: on the terminal, and as one HTML page with figures that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from rich.console import Console

from fedsolve.cli import evaluation_figures as figures
from fedsolve.cli.confusion import SHOWN_CLASSES, Report
from fedsolve.cli.output import percent, table
from fedsolve.experiments.report.svg import inline_svg
from fedsolve.federation.importance import Importance
from fedsolve.federation.quality import Evaluation, Threshold
from fedsolve.markup import Markup, page_head, tag, unbroken

NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "log_loss": "log loss",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
}
TOLD = ("probability", "rows", "told", "came true")
IMPORTANCE = ("column", "log loss", "accuracy")
_STYLE = """
.layout { display: block; max-width: 62rem; }
.measures td { white-space: normal; }
.measures td:nth-child(2) { white-space: nowrap; }
@media (max-width: 40rem) { .measures td { padding-right: 0.6rem; } }
.sheet { display: grid; gap: 0 1.6rem; }
.sheet { grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
@media screen { .sheet figure, figure { display: block; } }
.plot svg { min-width: 0; }
.confusion td { text-align: right; }
.confusion td { background: color-mix(in srgb, var(--series-1) calc(var(--share, 0) * 60%), transparent); }
.confusion td, .confusion th { padding: 0.3rem 0.6rem; }
"""


def measure_lines(found: Evaluation, limit: Threshold | None) -> list[tuple[str, str, str]]:
    """Every measure: name, value, and the interval or what else is to be said."""
    lines = []
    for name, words in NAMES.items():
        value, (low, high) = getattr(found, name), found.intervals[name]
        shown = percent if name.endswith("accuracy") else "{:.4f}".format
        said = f"{shown(low)} to {shown(high)}"
        if name == "auc":
            said += f" (from a histogram, known to ± {found.auc_bound:.1g})"
            words += "" if len(found.classes) == 2 else ", mean over classes"
        lines.append((words, shown(value), said))
    if limit is not None:
        lines.append(
            (
                f"threshold for {limit.positive}",
                f"{limit.probability:.4f}",
                f"chosen on rows held out, to find {percent(limit.wanted)} of them",
            )
        )
        for name in ("sensitivity", "specificity"):
            low, high = limit.intervals[name]
            said = f"{percent(low)} to {percent(high)}, on these rows"
            lines.append((f"{name} there", percent(getattr(limit, name)), said))
    return lines


def show(
    page: Console, found: Evaluation, limit: Threshold | None, important: Sequence[Importance] | None
) -> None:
    """Measures, calibration and importance as tables; the confusion comes from `Report`."""
    page.print(table(("measure", "value", "95 % interval"), measure_lines(found, limit), left=(0, 2)))
    if not found.calibrated:
        page.print("The probabilities are not calibrated ('fedsolve train --calibrate').")
    page.print(f"Calibration: {_told(found)}, and how often it came true.")
    page.print(table(TOLD, _calibration_rows(found)))
    if important is not None:
        page.print(
            "Columns by importance: what is lost when a column is replaced by draws from all its values."
        )
        page.print(table(IMPORTANCE, _importance_rows(important)))


def html_page(
    model: str,
    data: str,
    about: str,
    found: Evaluation,
    limit: Threshold | None,
    important: Sequence[Importance] | None,
    doubts: Iterable[str],
) -> str:
    """The page as the text of an HTML file; equal evaluations give equal bytes."""
    css = resources.files("fedsolve.experiments.report").joinpath("page.css").read_text(encoding="utf-8")
    head = page_head(f"Evaluation of {model}", css + _STYLE)
    opening = tag(
        "header",
        tag("p", tag("span", "fedsolve evaluation"), tag("span", about), class_="eyebrow"),
        tag("h1", f"{model} on {data}"),
        tag("p", _lede(found), class_="lede"),
        *(tag("p", doubt, class_="warning") for doubt in doubts),
        class_="opening",
    )
    words = (
        f"{_told(found).capitalize()}, against how often it came true; on the broken line they agree. Bars "
        "are 95 % intervals."
    )
    sheet = [
        _figure(figures.calibration(found), "Calibration", words),
        _figure(figures.roc(found), "ROC", _roc_caption(found)),
    ]
    details = [("The numbers of the calibration figure", _table(TOLD, _calibration_rows(found)))]
    if len(found.classes) == 2:
        caption = "How the rows of each true class are spread over what they were told."
        sheet.append(_figure(figures.spread(found), "Probabilities", caption))
    if important:
        caption = "Rise of the log loss when a column is replaced by draws from all its values."
        sheet.append(_figure(figures.importance(important), "Importance", caption))
        rows = _importance_rows(important)
        details.append(("The numbers of the importance figure", _table(IMPORTANCE, rows)))
    parts = [
        _measures(found, limit),
        tag("div", *sheet, class_="sheet"),
        _confusion(found),
        *(tag("details", tag("summary", name), tag("div", each, class_="inside")) for name, each in details),
    ]
    body = tag("body", tag("div", opening, tag("main", *parts), class_="layout"))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _lede(found: Evaluation) -> str:
    low, high = found.intervals["accuracy"]
    calibrated = "" if found.calibrated else " Its probabilities are not calibrated."
    return (
        f"Right in {percent(found.accuracy)} of {found.rows:,} rows ({percent(low)} to {percent(high)}); AUC "
        f"{found.auc:.4f}, calibration error {percent(found.ece)}.{calibrated}"
    )


def _roc_caption(found: Evaluation) -> str:
    if len(found.classes) == 2:
        return f"Of {found.classes[1]}, from a histogram: its area is known to ± {found.auc_bound:.1g}."
    many = len(found.classes) > figures.SHOWN_CURVES
    which = f"the {figures.SHOWN_CURVES} classes with the smallest area" if many else "each class"
    return f"Of {which}, against the others."


def _told(found: Evaluation) -> str:
    if len(found.classes) == 2:
        return f"the probability that was told for {found.classes[1]}"
    return "the probability that was told for the answer"


def _measures(found: Evaluation, limit: Threshold | None) -> Markup:
    lines = measure_lines(found, limit)
    note = (
        "Intervals: what other rows of the same kind would give, by resampling the summed histograms (shares "
        "of rows: Wilson's interval; log loss and Brier score: by their sums of squares)."
    )
    drawn = _table(("measure", "value", "95 % interval"), lines, left=(0, 2))
    return tag("section", drawn, tag("p", unbroken(note), class_="notes"), class_="measures")


def _confusion(found: Evaluation) -> Markup:
    report = Report(found.classes, found.confusion)
    names = [str(label) for label in found.classes]
    if len(names) > SHOWN_CLASSES:
        rows = [
            (names[true], names[told], f"{count:,}", percent(count / report.support[true]))
            for true, told, count in report.confused(SHOWN_CLASSES)
        ]
        heads = ("true", "predicted", "rows", "of that class")
        return tag("section", tag("h3", "The most frequent mistakes"), _table(heads, rows, left=(0, 1)))
    support = report.support
    body = []
    for place, name in enumerate(names):
        cells = [
            tag("td", f"{count:,}" if count else "·", style=f"--share: {count / max(1, support[place]):.3f}")
            for count in found.confusion[place].tolist()
        ]
        body.append(tag("tr", tag("th", name, scope="row"), *cells))
    across = [tag("th", name, scope="col", class_="number") for name in names]
    caption = tag("caption", tag("span", tag("b", "Confusion."), " True class down, answer across."))
    drawn = tag(
        "table",
        caption,
        tag("thead", tag("tr", tag("td", ""), *across)),
        tag("tbody", *body),
        class_="confusion",
    )
    return tag("div", drawn, class_="scroll", tabindex="0")


def _calibration_rows(found: Evaluation) -> list[tuple[str, str, str, str]]:
    return [
        (
            f"{row['from']:.2f} to {row['to']:.2f}",
            f"{row['rows']:,}",
            f"{row['told']:.3f}",
            f"{row['true']:.3f}",
        )
        for row in found.calibration_table
    ]


def _importance_rows(important: Sequence[Importance]) -> list[tuple[str, str, str]]:
    return [
        (one.column, f"{one.loss:+.4f} ± {1.96 * one.error:.4f}", f"{-100 * one.accuracy:+.2f} points")
        for one in important[: figures.SHOWN_COLUMNS]
    ]


def _figure(drawn: Any, name: str, caption: str) -> Markup:
    svg = inline_svg(drawn, name.lower(), f"{name}. {caption}")
    return tag("figure", tag("div", svg, class_="plot"), tag("figcaption", tag("b", name), unbroken(caption)))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> Markup:
    def cell(kind: str, place: int, text: str) -> Markup:
        return tag(kind, text, class_=None if place in left else "number")

    head = tag("thead", tag("tr", *(cell("th", place, text) for place, text in enumerate(heads))))
    body = tag(
        "tbody", *(tag("tr", *(cell("td", place, text) for place, text in enumerate(row))) for row in rows)
    )
    return tag("div", tag("table", head, body), class_="scroll", tabindex="0")
