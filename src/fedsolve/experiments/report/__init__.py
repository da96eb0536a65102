"""The report: runs as one HTML file that needs no other files and no network.

svg        figures as part of the page
findings   what the numbers say, in sentences
tables     sortable tables with the papers' numbers in the same cells
sections   one experiment: question, answer, table, figures, provenance
page.css, page.js   how it looks and what can be clicked
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fedsolve import container
from fedsolve.errors import DataError
from fedsolve.experiments.observations import distinct
from fedsolve.experiments.report.findings import overall
from fedsolve.experiments.report.sections import Section
from fedsolve.experiments.run_folder import RunFolder, load_run
from fedsolve.experiments.wording import counted
from fedsolve.markup import Markup, join, page_head, tag, trusted


def write_report(runs: Sequence[Path], path: Path, title: str | None = None) -> None:
    """Write the report on these runs to `path`; equal runs give equal bytes."""
    container.write_atomically(path, report([load_run(run) for run in runs], title).encode())


def report(runs: Sequence[RunFolder], title: str | None = None) -> str:
    """The report as the text of an HTML file."""
    if not runs:
        raise DataError("a report needs at least one run. Name folders that 'fedsolve experiment run' made.")
    shown: set[str] = set()
    sections = [Section(run, number, shown) for number, run in enumerate(runs, start=1)]
    title = title or (sections[0].title if len(sections) == 1 else "What the experiments say")
    head = page_head(title, _asset("page.css"))
    body = tag(
        "body",
        tag("a", "Skip to the first experiment", href=f"#{sections[0].id}", class_="skip"),
        tag(
            "div",
            _opening(title, sections),
            _contents(sections),
            tag("main", *(section.html() for section in sections)),
            class_="layout",
        ),
        tag("script", trusted(_asset("page.js"))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _opening(title: str, sections: Sequence[Section]) -> Markup:
    runs = [section.run for section in sections]
    items = [
        tag("li", tag("a", section.title, href=f"#{section.id}"), tag("p", section.headline))
        for section in sections
    ]
    return tag(
        "header",
        tag("p", tag("span", "fedsolve report"), tag("span", _period(runs)), class_="eyebrow"),
        tag("h1", title),
        tag("p", join([_extent(runs), *overall(runs)], " "), class_="lede"),
        tag("ul", *items, class_="findings", aria_label="Main findings") if len(sections) > 1 else "",
        class_="opening",
    )


def _contents(sections: Sequence[Section]) -> Markup:
    items = [tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections]
    # Without scripts the button could do nothing, so a script shows it.
    theme = tag("button", "Dark page", type="button", class_="theme", hidden=True)
    return tag(
        "nav",
        tag("div", tag("p", "Contents", class_="label"), theme, class_="bar"),
        tag("ol", *items),
        class_="contents",
        aria_label="Contents",
    )


def _extent(runs: Sequence[RunFolder]) -> str:
    cells = [cell for run in runs for cell in run.cells]
    datasets = distinct(cell["dataset"]["name"] for cell in cells)
    models = len({cell["key"] for cell in cells})
    counts = (
        counted(len(runs), "experiment"),
        counted(models, "trained model"),
        counted(len(datasets), "dataset"),
    )
    missing = sum(run.missing for run in runs)
    left = f" {missing:,} cells are still to be run." if missing else ""
    return f"{', '.join(counts)}.{left}"


def _period(runs: Sequence[RunFolder]) -> str:
    """The days on which cells were finished; the page has no date of its own, so that pages compare."""
    days = sorted(cell["time"][:10] for run in runs for cell in run.cells)
    if not days:
        return "no finished cells"
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
