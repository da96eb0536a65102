"""The state of a run, read from the document of a board, and in words for page and terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsolve import version
from fedsolve.pages.words import capital, duration, percent, size

SILENT = 20.0
"""Seconds without a sign of life after which an unfinished run counts as dead."""

PHASES = {
    "starting": "starting",
    "gathering": "waiting for sites",
    "running": "running",
    "complete": "complete",
    "stopped": "stopped",
}
CURVES = ("risk", "loss", "accuracy", "test_accuracy")


def read_document(data: bytes | str) -> dict[str, Any]:
    """The document that a board wrote; a `ValueError` for anything else."""
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("form") != version.STATUS:
        raise ValueError("it is not the status of a run, or of another version of fedsolve")
    return found


def silent(document: Mapping[str, Any], now: float | None = None) -> float | None:
    """Seconds since the last sign of life, if the run has not ended and they exceed `SILENT`; else None."""
    age = (time.time() if now is None else now) - float(document["now"])
    return age if document["phase"] in ("starting", "gathering", "running") and age > SILENT else None


def headline(document: Mapping[str, Any]) -> str:
    phase = document["phase"]
    if (cells := document["cells"]) is not None and phase == "running":
        return f"cell {min(cells['done'] + 1, cells['total'])} of {cells['total']}"
    if phase == "gathering":
        there = sum(one["connected"] for one in document["sites"])
        return f"{there} of {document['expected_sites']} sites are connected"
    if phase == "running" and document["exchanges"]:
        return f"exchange {document['exchange']} of {document['exchanges']}"
    return PHASES[phase]


def extent(document: Mapping[str, Any]) -> tuple[int, int]:
    """How many exchanges, or cells of an experiment, are done, and of how many."""
    cells = document["cells"]
    return (document["done"], document["exchanges"]) if cells is None else (cells["done"], cells["total"])


def doing(document: Mapping[str, Any]) -> str:
    under = document["under_way"]
    if under is None:
        return ""
    return f"{under['kind']}, step {under['step']}, for {duration(document['now'] - under['since'])}"


def site_words(site: Mapping[str, Any]) -> str:
    if site["state"] == "missing":
        return f"missing: {site['why']}"
    if site["state"] == "answered":
        return "answered"
    if not site["connected"]:
        return "not connected" + (", waited for" if site["state"] == "asked" else "")
    if site["state"] == "asked" and site["size"]:
        return f"waiting: {site['done'] / 1e6:.1f} of {site['size'] / 1e6:.1f} MB"
    return "waiting for its answer" if site["state"] == "asked" else "connected"


def tiles(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers that matter, by name."""
    if document["expected_sites"] is not None:
        there = sum(one["connected"] for one in document["sites"])
        yield "sites connected", f"{there} of {max(document['expected_sites'], len(document['sites']))}"
        waited = [one["name"] for one in document["sites"] if one["state"] == "asked"]
        yield "waited for", str(len(waited)) if waited else "nobody"
    elif document["clients"]:
        yield "clients", f"{document['clients']:,}"
    if (cells := document["cells"]) is not None:
        yield "cells", f"{cells['done']} of {cells['total']}"
    if document["exchanges"]:
        yield "exchanges done", f"{document['done']} of {document['exchanges']}"
    if document["seconds_left"] is not None:
        yield "time left", f"about {duration(document['seconds_left'])}"
    yield "under way for", duration(document["now"] - document["started"])
    yield "up", size(document["bytes"]["up"])
    yield "down", size(document["bytes"]["down"] + document["bytes"]["catch_up"])
    if document["starts"] > 1:
        yield "restarts", str(document["starts"] - 1)
    for one in document["certificates"]:
        yield spoken(one["name"].removeprefix("the ")), f"{one['days']:.0f} days left"
    for name, value in document["scores"].items():
        yield spoken(name), measure_words(name, value)


def warnings(document: Mapping[str, Any]) -> Iterator[str]:
    if (age := silent(document)) is not None:
        yield (
            f"No sign of life for {duration(age)}: the process that wrote this ({document['process']}) has "
            "ended, or its disk is full. Start it again with the same command to continue."
        )
    if document["phase"] == "stopped" and document["why"]:
        yield f"Stopped: {document['why']}"
    for one in document["certificates"]:
        if text := one["announced"]:
            yield capital(text)


def exchanges(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A table of exchanges: its heads and its rows."""
    names = [name for name in CURVES if any(name in record["measures"] for record in records)]
    heads = ["exchange", "kind", "step", "clients", "up", "down", "time", *map(spoken, names)]
    rows = []
    for record in records:
        rows.append([str(record[name]) for name in heads[:4]])
        rows[-1] += [size(record["bytes_up"]), size(record["bytes_down"]), f"{record['seconds']:.2f} s"]
        found = record["measures"]
        rows[-1] += [measure_words(name, found[name]) if name in found else "" for name in names]
    return heads, rows


def measure_words(name: str, value: float) -> str:
    return percent(value) if name.endswith("accuracy") else f"{value:.4g}"


def spoken(name: str) -> str:
    return name.replace("_", " ")


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
