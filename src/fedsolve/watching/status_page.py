"""How a run stands as one HTML page, which needs no other file and asks only where it came from."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from fedsolve.markup import Markup, join, page_head, palette, tag, trusted
from fedsolve.watching import phrases
from fedsolve.watching.curves import curve
from fedsolve.watching.phrases import measure_words, size, spoken

_LAST = 12


def html_status(document: Mapping[str, Any]) -> str:
    """The page of a document of a `Board`."""
    title = document["title"] or document["method"] or "fedsolve"
    icon = tag("link", rel="icon", href="data:,")
    body = tag(
        "body",
        tag(
            "div",
            tag("p", "", id="silence", class_="warning", hidden=True, role="status"),
            tag("main", *_parts(document, title)),
            tag(
                "footer",
                "This page is served to this machine alone. ",
                tag("a", "As JSON", href="/status.json"),
                ", ",
                tag("a", "as metrics", href="/metrics"),
                ".",
            ),
            class_="layout",
        ),
        tag("script", trusted(_asset("status.js"))),
    )
    head = page_head(f"{phrases.headline(document)} · {title}", _asset("status.css"), icon)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


@cache
def content_policy() -> str:
    """The header that lets the page run its own script and style, talk to where it came from, and no more."""
    style = _digest(f"{palette()}\n{_asset('status.css')}")
    script = _digest(_asset("status.js"))
    return (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _parts(document: Mapping[str, Any], title: str) -> Iterator[Markup]:
    eyebrow = [f"fedsolve {document['fedsolve']}", phrases.WHATS[document["what"]]]
    if document["secure"] is not None:
        eyebrow.append("secure sums" if document["secure"] else "plain sums")
    eyebrow.append(f"since {phrases.clock(document['started'])}")
    yield tag("p", *(tag("span", word) for word in eyebrow), class_="eyebrow")
    yield tag("h1", title)
    phase = document["phase"]
    yield tag(
        "p",
        tag("span", phrases.PHASES[phase], class_=f"phase {phase}"),
        tag("span", phrases.headline(document))
        if phrases.headline(document) != phrases.PHASES[phase]
        else "",
        tag("small", phrases.doing(document)),
        class_="where",
    )
    yield _bar(document)
    for text in phrases.warnings(document):
        yield tag("p", text, class_="warning")
    yield tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value)) for name, value in phrases.tiles(document)),
        class_="tiles",
    )
    yield _sites(document["sites"])
    yield _cells(document)
    yield _curves(document)
    yield _exchanges(document["recent"])
    if document["notes"]:
        lines = [
            tag("li", tag("time", phrases.clock(at)), tag("span", text))
            for at, text in reversed(document["notes"])
        ]
        yield join([tag("h2", "What was said"), tag("ul", *lines, class_="notes")])


def _bar(document: Mapping[str, Any]) -> Markup:
    cells = document["cells"]
    done, total = (
        (document["done"], document["exchanges"]) if cells is None else (cells["done"], cells["total"])
    )
    if not total:
        return trusted("")
    return tag("progress", value=done, max=total, aria_label=f"{done} of {total}")


def _sites(sites: Sequence[Mapping[str, Any]]) -> Markup:
    if not sites:
        return trusted("")
    rows = []
    for site in sites:
        words: list[Any] = [phrases.site_words(site)]
        if site["state"] == "asked" and site["size"]:
            words.append(tag("progress", value=site["done"], max=site["size"], aria_label=words[0]))
        name = [tag("span", "", class_="dot on" if site["connected"] else "dot"), site["name"]]
        rows.append(tag("tr", tag("th", *name, scope="row", class_="name"), tag("td", *words)))
    head = tag("thead", tag("tr", tag("th", "site"), tag("th", "what it is at")))
    return join([tag("h2", "Sites"), _scroll(head, rows)])


def _cells(document: Mapping[str, Any]) -> Markup:
    cells = document["cells"]
    if cells is None:
        return trusted("")
    parts = []
    if document["phase"] == "running":
        remark = f": {cells['remark']}" if cells["remark"] else ""
        parts.append(tag("p", f"Now {cells['now']}{remark}"))
    rows = []
    for cell in list(reversed(document["finished_cells"]))[:_LAST]:
        scores = ", ".join(
            f"{spoken(name)} {measure_words(name, value)}" for name, value in cell["scores"].items()
        )
        rows.append(tag("tr", tag("th", cell["name"], scope="row", class_="name"), tag("td", scores)))
    if rows:
        parts.append(_scroll(tag("thead", tag("tr", tag("th", "cell"), tag("th", "scores"))), rows))
    return join([tag("h2", "Cells"), *parts])


def _curves(document: Mapping[str, Any]) -> Markup:
    found = phrases.measures(document)
    drawn = []
    for name in phrases.CURVES:
        points = found.get(name, [])
        if len(points) < 2:
            continue
        values = [value for _, value in points]
        low, high, last = (measure_words(name, value) for value in (min(values), max(values), values[-1]))
        ends = (f"exchange {points[0][0]:.0f}", f"{points[-1][0]:.0f}")
        words = f"{spoken(name)} over exchanges, from {low} to {high}, now {last}"
        drawing = curve(points, words, f"least {low}", f"most {high}", ends)
        drawn.append(tag("figure", tag("figcaption", spoken(name), tag("b", last)), drawing))
    if not drawn:
        return trusted("")
    return join([tag("h2", "As it comes"), tag("div", *drawn, class_="curves")])


def _exchanges(records: Sequence[Mapping[str, Any]]) -> Markup:
    if not records:
        return trusted("")
    names = [name for name in phrases.CURVES if any(name in record["measures"] for record in records)]
    heads = [("exchange", ""), ("kind", "wide"), ("step", "number"), ("clients", "number wide")]
    heads += [("up", "number"), ("down", "number wide"), ("time", "number")]
    heads += [(spoken(name), "number") for name in names]
    rows = []
    for record in reversed(records):
        cells = [str(record["exchange"]), record["kind"], str(record["step"]), str(record["clients"])]
        cells += [size(record["bytes_up"]), size(record["bytes_down"]), f"{record['seconds']:.2f} s"]
        for name in names:
            value = record["measures"].get(name)
            cells.append("" if value is None else measure_words(name, value))
        rows.append(
            tag(
                "tr",
                *(tag("td", text, class_=kind or None) for text, (_, kind) in zip(cells, heads, strict=True)),
            )
        )
    head = tag("thead", tag("tr", *(tag("th", name, class_=kind or None) for name, kind in heads)))
    return join([tag("h2", "The last exchanges"), _scroll(head, rows)])


def _scroll(head: Markup, rows: Sequence[Markup]) -> Markup:
    return tag("div", tag("table", head, tag("tbody", *rows)), class_="scroll", tabindex="0")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return resources.files("fedsolve.watching").joinpath(name).read_text(encoding="utf-8")
