"""What it costs that sites check questions: seconds and bytes per layer, of a site that checks.

DeepAFL over clients in one process, each letter timed where it is answered. Times of one process on one core;
over a network, sites that check do so at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import OtherWork, progress
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.notes import read_letter


class _Timed(fs.LocalFederation):
    """Clients whose letters are timed, and their bytes counted."""

    def __init__(self, inner: fs.LocalFederation, classes: int) -> None:
        super().__init__(inner.participants, classes=range(classes), workers=1)
        self.told: dict[str, list[tuple[float, int, int]]] = {}

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        for name in sorted(letters):
            started = time.perf_counter()
            ((_, reply),) = super().carry(channel, {name: letters[name]}, largest)
            seconds = time.perf_counter() - started
            if isinstance(reply, bytes):
                kind = read_letter(letters[name])[1]["message"]
                self.told.setdefault(kind, []).append((seconds, len(letters[name]), len(reply)))
            yield name, reply


def measure(width: int = 1024, classes: int = 100, clients: int = 4, layers: int = 3) -> dict[str, Any]:
    """Means over all layers and clients, by letter, with checked questions and without; as JSON values."""
    others = OtherWork()
    rng = np.random.default_rng(0)
    labels = np.arange(8 * max(width, classes)) % classes
    rows = rng.standard_normal((len(labels), 64)).astype(np.float32)
    method = fs.DeepAFL(layers=layers, width=width, exchange="single")
    result: dict[str, Any] = {"width": width, "classes": classes, "clients": clients, "layers": layers}
    for name, verify in (("unchecked", False), ("checked", True)):
        progress(f"{name} questions")
        inner = fs.LocalFederation.from_arrays(rows, labels, np.arange(len(labels)) % clients)
        timed = _Timed(inner, classes)
        started = time.perf_counter()
        model = method.fit(SecureFederation(timed, verify=verify))
        result[name] = {
            "seconds": time.perf_counter() - started,
            "exchanges": len(model.history),
            "letters": {
                kind: dict(
                    zip(("seconds", "down", "up"), np.mean(found[1:] or found, axis=0).tolist(), strict=True)
                )
                | {"count": len(found)}
                for kind, found in timed.told.items()
            },
        }
    result["other_work"] = others.share()
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    """One table: letters with checked questions and without."""
    table = Table(
        title=f"DeepAFL, width {result['width']}, {result['classes']} classes, {result['clients']} clients, "
        f"{result['layers']} layers; means of one letter to one client"
    )
    for name in ("questions", "letter", "letters", "seconds", "MB down", "MB up"):
        table.add_column(name, justify="left" if name in ("questions", "letter") else "right")
    for name in ("unchecked", "checked"):
        for kind in ("ask", "open", "check"):
            entry = result[name]["letters"].get(kind)
            if entry is not None:
                sizes = (f"{entry[way] / 1e6:.3f}" for way in ("down", "up"))
                table.add_row(name, kind, str(entry["count"]), f"{entry['seconds']:.3f}", *sizes)
    console.print(table)
    spent = {name: result[name]["seconds"] for name in ("unchecked", "checked")}
    console.print(
        f"In one process: {spent['unchecked']:.1f} s unchecked, {spent['checked']:.1f} s checked; clients "
        "and server together."
    )
    if result["other_work"] is not None:
        console.print(f"Other processes took {result['other_work']:.0%} of the machine.")
