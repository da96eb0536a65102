"""The current state of a run, for the page, the metrics and the status file."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsolve import container, version
from fedsolve.errors import FedsolveError
from fedsolve.federation.engine import Follower, Training
from fedsolve.federation.messages import Request
from fedsolve.federation.method import Record
from fedsolve.model import Model
from fedsolve.version import __version__
from fedsolve.watching.phrases import read_document

What = Literal["server", "training", "experiment"]

BEAT = 5.0
"""Seconds after which an unchanged file is written again, as a sign of life."""

_TICK, _REST = 1.0, 0.25
"""Seconds between two looks for changes, and at least between two writes of the file."""

_NOTES, _CELLS, _RECORDS, _RECENT = 12, 50, 400, 12


@dataclass(frozen=True)
class SiteStanding:
    """A site at this moment: whether it is connected, and how far its answer is.

    state: "idle", "asked", "answered", or "missing" with the reason in `why`.
    done, size: bytes of its answer that have arrived, and of the whole; 0 where none is on its way.
    """

    name: str
    connected: bool
    state: Literal["idle", "asked", "answered", "missing"] = "idle"
    why: str = ""
    done: int = 0
    size: int = 0


class KeptRecords:
    """The last records, and some hundreds spread evenly over all of a run."""

    def __init__(self) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.spread: list[dict[str, Any]] = []
        self._every = 1

    def enter(self, record: dict[str, Any]) -> None:
        if self.spread and (self.spread[-1]["exchange"] - 1) % self._every:
            self.spread.pop()
        self.spread.append(record)
        self.recent.append(record)
        if len(self.spread) > _RECORDS:
            self._every *= 2
            self.spread = [
                one for one in self.spread if one is record or (one["exchange"] - 1) % self._every == 0
            ]


class Board(Follower):
    """Follows a run and gives its state at any moment and from any thread (`document`).

    path: file that holds the document too, for `fedsolve status`; a thread of its own writes it, and only its
          owner can read it. A file that cannot be written never stops a run.
    """

    def __init__(
        self, what: What, title: str = "", *, path: Path | None = None, sites: int | None = None
    ) -> None:
        """sites: how many are expected at the start, where there are sites."""
        self._lock = threading.RLock()
        self._path, starts = path, 1
        if path is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                starts += int(read_document(path.read_bytes())["starts"])
        self._state: dict[str, Any] = {
            "form": version.STATUS,
            "fedsolve": __version__,
            "what": what,
            "title": title,
            "phase": "starting",
            "process": os.getpid(),
            "starts": starts,
            "started": time.time(),
            "clients": 0,
            "expected_sites": sites,
            "bytes": {"up": 0, "down": 0, "catch_up": 0},
            "scores": {},
        }
        self._state |= dict.fromkeys(("why", "method", "name"), "")
        self._state |= dict.fromkeys(("secure", "under_way", "cells"))
        self._state |= dict.fromkeys(("exchanges", "done"), 0)
        self._records = KeptRecords()
        self._finished_cells: deque[dict[str, Any]] = deque(maxlen=_CELLS)
        self._notes: deque[tuple[float, str]] = deque(maxlen=_NOTES)
        self._pace: deque[float] = deque(maxlen=10)
        self._moment = time.monotonic()
        self._standings: Callable[[], Sequence[SiteStanding]] = tuple
        self._certificates: Sequence[Any] = ()
        self._stop, self._news = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None
        if path is not None:
            self._write()
            self._writer = threading.Thread(target=self._keep_writing, name="status", daemon=True)
            self._writer.start()

    def _enter(self, **values: Any) -> None:
        with self._lock:
            self._state |= values

    def gathering(self, secure: bool, certificates: Sequence[Any] = ()) -> None:
        """A server that waits for its sites. certificates: `Validity` of each that it needs."""
        self._certificates = certificates
        self._enter(phase="gathering", secure=secure)

    def entitle(self, title: str) -> None:
        self._enter(title=title)

    def sites_from(self, standings: Callable[[], Sequence[SiteStanding]]) -> None:
        """Set the function that returns the current state of the sites."""
        self._standings = standings

    def note(self, text: str) -> None:
        with self._lock:
            self._notes.append((time.time(), text))

    def cells(self, done: int, total: int, now: str, remark: str, seconds_left: float | None) -> None:
        """How far an experiment is."""
        cells = {"done": done, "total": total, "now": now, "remark": remark, "left": seconds_left}
        self._enter(phase="running", cells=cells)

    def started(self, training: Training) -> None:
        with self._lock:
            self._enter(phase="running", why="", method=training.method, name=training.name)
            self._enter(clients=len(training.clients), exchanges=training.expected, done=0, under_way=None)
            self._enter(bytes=dict.fromkeys(self._state["bytes"], 0), scores={})
            self._records = KeptRecords()
            self._pace.clear()
            for record in training.history:
                self._record(record)
            self._moment = time.monotonic()

    def asked(self, request: Request, expected: int) -> None:
        number = request.exchange + 1
        under_way: dict[str, Any] = {"number": number, "kind": request.kind, "step": request.step}
        under_way |= {"asked": len(request.cohort), "since": time.time()}
        self._enter(exchanges=max(expected, number), under_way=under_way)
        self._news.set()

    def advanced(self, record: Record, expected: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._pace.append(now - self._moment)
            self._moment = now
            self._enter(exchanges=max(expected, record.exchange + 1), under_way=None)
            self._record(record)
        self._news.set()

    def _record(self, record: Record) -> None:
        measures = {**record.metrics, "risk": record.risk, "accuracy": record.accuracy}
        number, sums = record.exchange + 1, self._state["bytes"]
        copied = ("kind", "step", "seconds", "bytes_up", "bytes_down")
        entry = {"exchange": number, **{name: getattr(record, name) for name in copied}}
        entry |= {"clients": len(record.cohort), "missing": len(record.missing)}
        self._records.enter(entry | {"measures": _numbers(measures)})
        more = {"up": record.bytes_up, "down": record.bytes_down, "catch_up": record.catch_up_bytes}
        self._enter(done=number, bytes={name: sums[name] + count for name, count in more.items()})
        if "epsilon" in record.metrics:  # what all noisy answers so far have cost
            self._enter(scores={**self._state["scores"], "epsilon": record.metrics["epsilon"]})

    def scored(self, scores: Mapping[str, float]) -> None:
        with self._lock:
            self._enter(scores={**self._state["scores"], **_numbers(scores)})
            if name := self._state["name"]:
                self._finished_cells.append({"name": name, "scores": self._state["scores"]})

    def finished(self, model: Model | None) -> None:
        done = {"phase": "complete"} if self._state["what"] == "training" else {}
        self._enter(under_way=None, **done)

    def complete(self) -> None:
        """Everything is done: all cells of an experiment, or what a server does after its training."""
        with self._lock:
            if (cells := self._state["cells"]) is not None:
                self.cells(cells["total"], cells["total"], "", "", 0.0)
            self._enter(phase="complete", under_way=None)

    def stopped(self, problem: BaseException) -> None:
        said = "interrupted" if isinstance(problem, KeyboardInterrupt) else str(problem)
        self._enter(phase="stopped", why=said[:2000])

    def close(self) -> None:
        """End the thread that writes the file; the file keeps the last state of the run."""
        self._stop.set()
        self._news.set()
        if self._writer is not None:
            self._writer.join(10)
            self._writer = None
            self._write()

    def document(self) -> dict[str, Any]:
        standings = [vars(one) for one in self._standings()]
        with self._lock:
            under_way = self._state["under_way"]
            return self._state | {
                "now": time.time(),
                "sites": standings,
                "exchange": self._state["done"] if under_way is None else under_way["number"],
                "seconds_left": self._left(),
                "records": list(self._records.spread),
                "recent": list(self._records.recent),
                "finished_cells": list(self._finished_cells),
                "certificates": [
                    {"name": one.name, "days": one.days, "announced": one.announced}
                    for one in self._certificates
                ],
                "notes": [list(entry) for entry in self._notes],
            }

    def _left(self) -> float | None:
        """Seconds until the end, by the pace of the last exchanges; None where it is not known."""
        state = self._state
        if state["phase"] != "running":
            return None
        if state["cells"] is not None:
            left: float | None = state["cells"]["left"]
            return left
        if not self._pace:
            return None
        usual = sum(self._pace) / len(self._pace)
        spent = time.monotonic() - self._moment
        if spent > 2 * usual + 5:  # it waits for somebody, and the pace says nothing about that
            return None
        return max(0.0, usual * float(state["exchanges"] - state["done"]) - min(usual, spent))

    def _keep_writing(self) -> None:
        seen, written = "", time.monotonic()
        while not self._stop.wait(_REST):
            self._news.wait(_TICK)
            self._news.clear()
            document = self.document()
            moving = ("now", "seconds_left")  # what changes with time alone
            still = {name: value for name, value in document.items() if name not in moving}
            text = container.canonical_json(still)
            if text != seen or time.monotonic() - written >= BEAT:
                seen, written = text, time.monotonic()
                self._write(document)

    def _write(self, document: dict[str, Any] | None = None) -> None:
        assert self._path is not None
        text = container.canonical_json(document or self.document())
        with suppress(FedsolveError, OSError):
            container.write_atomically(self._path, text.encode(), durable=False, private=True)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are finite numbers."""
    kept = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in kept.items() if math.isfinite(value)}
