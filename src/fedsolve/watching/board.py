"""What is known of a run at this moment: for the page, the metrics, and the file that others read."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from fedsolve import container, formats
from fedsolve.errors import FedsolveError
from fedsolve.federation.followers import Follower, Training
from fedsolve.federation.messages import Request
from fedsolve.federation.method import Record
from fedsolve.model import Model
from fedsolve.version import __version__
from fedsolve.watching.kept_records import KeptRecords
from fedsolve.watching.status_document import read_document

What = Literal["server", "training", "experiment"]
Phase = Literal["starting", "gathering", "running", "complete", "stopped"]

BEAT = 5.0
"""Seconds after which the file is written anew though nothing changed, so that a reader sees it is alive."""

_TICK, _REST = 1.0, 0.25
"""Seconds between two looks at what has changed by itself, and at the least between two files."""

_NOTES = 12
_CELLS = 50


@dataclass(frozen=True)
class SiteStanding:
    """A site at this moment: whether it is connected, and what became of what it was asked.

    state: "idle", "asked", "answered", or "missing" with the reason in `why`.
    done, size: bytes of its answer that have come, and of the whole; 0 where none is on its way.
    """

    name: str
    connected: bool
    state: Literal["idle", "asked", "answered", "missing"] = "idle"
    why: str = ""
    done: int = 0
    size: int = 0


class Expiring(Protocol):
    """A certificate that a run depends on: the days it has left, and what people should hear of that."""

    @property
    def name(self) -> str: ...

    @property
    def days(self) -> int: ...

    @property
    def announced(self) -> str | None: ...


@dataclass
class _Under:
    """The exchange that is under way."""

    number: int
    kind: str
    step: int
    asked: int
    since: float = field(default_factory=time.time)


class Board(Follower):
    """Follows a run and tells, at any moment and from any thread, how it stands (`document`).

    path: file that holds the document too, for `fedsolve status`; written by a thread of its own, readable by
          its owner alone. What it cannot write it leaves: a board never stops a run.
    """

    def __init__(
        self, what: What, title: str = "", *, path: Path | None = None, sites: int | None = None
    ) -> None:
        """sites: how many are waited for at the start, where there are sites."""
        self._lock = threading.RLock()
        self._what, self._title, self._path = what, title, path
        self._phase: Phase = "starting"
        self._why = ""
        self._started = time.time()
        self._expected_sites = sites
        self._starts = 1 + _earlier_starts(path)
        self._method, self._name, self._clients = "", "", 0
        self._secure: bool | None = None
        self._exchanges, self._done = 0, 0
        self._bytes = {"up": 0, "down": 0, "catch_up": 0}
        self._records = KeptRecords()
        self._under: _Under | None = None
        self._pace: list[float] = []
        self._moment = time.monotonic()
        self._scores: dict[str, float] = {}
        self._cells: dict[str, Any] | None = None
        self._finished_cells: deque[dict[str, Any]] = deque(maxlen=_CELLS)
        self._notes: deque[tuple[float, str]] = deque(maxlen=_NOTES)
        self._standings: Callable[[], Sequence[SiteStanding]] = tuple
        self._certificates: Sequence[Expiring] = ()
        self._stop, self._news = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None
        if path is not None:
            self._write()
            self._writer = threading.Thread(target=self._keep_writing, name="status", daemon=True)
            self._writer.start()

    # -- what it is told ---------------------------------------------------------------------------

    def gathering(self, secure: bool, certificates: Sequence[Expiring] = ()) -> None:
        """A server that waits for its sites."""
        with self._lock:
            self._phase, self._secure, self._certificates = "gathering", secure, certificates

    def entitle(self, title: str) -> None:
        """Call what is watched otherwise, as the next of several experiments."""
        with self._lock:
            self._title = title

    def sites_from(self, standings: Callable[[], Sequence[SiteStanding]]) -> None:
        """Ask this whenever somebody looks."""
        self._standings = standings

    def note(self, text: str) -> None:
        """A remark, as people at the terminal have it."""
        with self._lock:
            self._notes.append((time.time(), text))

    def cells(self, done: int, total: int, now: str, remark: str, seconds_left: float | None) -> None:
        """How far an experiment is."""
        with self._lock:
            self._phase = "running"
            self._cells = {"done": done, "total": total, "now": now, "remark": remark, "left": seconds_left}

    def started(self, training: Training) -> None:
        with self._lock:
            self._phase, self._why = "running", ""
            self._method, self._name = training.method, training.name
            self._clients = len(training.clients)
            self._exchanges, self._done = training.expected, 0
            self._bytes = dict.fromkeys(self._bytes, 0)
            self._records, self._pace, self._scores, self._under = KeptRecords(), [], {}, None
            for record in training.history:
                self._enter(record)
            self._moment = time.monotonic()

    def asked(self, request: Request, expected: int) -> None:
        with self._lock:
            self._exchanges = max(expected, request.exchange + 1)
            self._under = _Under(request.exchange + 1, request.kind, request.step, len(request.cohort))
        self._news.set()

    def advanced(self, record: Record, expected: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._pace = [*self._pace[-9:], now - self._moment]
            self._moment = now
            self._exchanges = max(expected, record.exchange + 1)
            self._under = None
            self._enter(record)
        self._news.set()

    def _enter(self, record: Record) -> None:
        told = {**record.metrics, "risk": record.risk, "accuracy": record.accuracy}
        self._records.enter(
            {
                "exchange": record.exchange + 1,
                "kind": record.kind,
                "step": record.step,
                "seconds": record.seconds,
                "bytes_up": record.bytes_up,
                "bytes_down": record.bytes_down,
                "clients": len(record.cohort),
                "missing": len(record.missing),
                "measures": _numbers(told),
            }
        )
        self._done = record.exchange + 1
        self._bytes["up"] += record.bytes_up
        self._bytes["down"] += record.bytes_down
        self._bytes["catch_up"] += record.catch_up_bytes

    def scored(self, scores: Mapping[str, float]) -> None:
        with self._lock:
            self._scores.update(_numbers(scores))
            if self._name:
                self._finished_cells.append({"name": self._name, "scores": dict(self._scores)})

    def finished(self, model: Model | None) -> None:
        with self._lock:
            self._under = None
            if self._what == "training":
                self._phase = "complete"

    def complete(self) -> None:
        """The whole is done: all cells of an experiment, or what a server does after its training."""
        with self._lock:
            self._phase, self._under = "complete", None
            if self._cells is not None:
                self._cells |= {"done": self._cells["total"], "now": "", "remark": "", "left": 0.0}

    def stopped(self, problem: BaseException) -> None:
        with self._lock:
            said = "interrupted" if isinstance(problem, KeyboardInterrupt) else str(problem)
            self._phase, self._why = "stopped", said[:2000]

    def close(self) -> None:
        """End the file's thread; the file keeps how the run stood."""
        self._stop.set()
        self._news.set()
        if self._writer is not None:
            self._writer.join(10)
            self._writer = None
            self._write()

    # -- what it tells -----------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """How the run stands, as JSON values."""
        standings = list(self._standings())
        with self._lock:
            certificates = [
                {"name": one.name, "days": one.days, "announced": one.announced} for one in self._certificates
            ]
            return {
                "form": formats.STATUS.version,
                "fedsolve": __version__,
                "what": self._what,
                "title": self._title,
                "phase": self._phase,
                "why": self._why,
                "process": os.getpid(),
                "starts": self._starts,
                "started": self._started,
                "now": time.time(),
                "method": self._method,
                "name": self._name,
                "secure": self._secure,
                "clients": self._clients,
                "expected_sites": self._expected_sites,
                "sites": [vars(one) for one in standings],
                "exchange": self._done if self._under is None else self._under.number,
                "exchanges": self._exchanges,
                "done": self._done,
                "under_way": None if self._under is None else vars(self._under),
                "bytes": dict(self._bytes),
                "seconds_left": self._left(),
                "records": list(self._records.spread),
                "recent": list(self._records.recent),
                "scores": dict(self._scores),
                "cells": None if self._cells is None else dict(self._cells),
                "finished_cells": list(self._finished_cells),
                "certificates": certificates,
                "notes": [list(entry) for entry in self._notes],
            }

    def _left(self) -> float | None:
        """Seconds until the end, by the pace of the last exchanges; None where there is none to go by."""
        if self._phase != "running":
            return None
        if self._cells is not None:
            left: float | None = self._cells["left"]
            return left
        if not self._pace:
            return None
        usual = sum(self._pace) / len(self._pace)
        spent = time.monotonic() - self._moment
        if spent > 2 * usual + 5:  # somebody is waited for: the pace says nothing of that
            return None
        return max(0.0, usual * (self._exchanges - self._done) - min(usual, spent))

    def _keep_writing(self) -> None:
        seen, written = "", time.monotonic()
        while not self._stop.wait(_REST):
            self._news.wait(_TICK)
            self._news.clear()
            document = self.document()
            still = {name: value for name, value in document.items() if name not in _MOVING}
            text = container.canonical_json(still)
            if text != seen or time.monotonic() - written >= BEAT:
                seen, written = text, time.monotonic()
                self._write(document)

    def _write(self, document: dict[str, Any] | None = None) -> None:
        if self._path is None:
            return
        text = container.canonical_json(document or self.document())
        with suppress(FedsolveError, OSError):
            container.write_atomically(self._path, text.encode(), durable=False, private=True)


_MOVING = frozenset({"now", "seconds_left"})
"""What changes by itself with time."""


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers."""
    kept = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in kept.items() if math.isfinite(value)}


def _earlier_starts(path: Path | None) -> int:
    if path is None:
        return 0
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(read_document(path.read_bytes())["starts"])
    return 0
