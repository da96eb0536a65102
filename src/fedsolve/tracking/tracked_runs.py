"""What all trackers share: which numbers of a training they write, under which names, to which run.

Only numbers of the whole training leave a federation: nothing about a single client, not even its name.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from fedsolve.errors import TrackingWarning, first_line
from fedsolve.federation.card import totals
from fedsolve.federation.engine import Follower, Training
from fedsolve.federation.method import Record
from fedsolve.model import Model
from fedsolve.version import __version__

Facts = Mapping[str, str]

COMPLETE, INTERRUPTED, FAILED = "complete", "interrupted", "failed"

_COUNTED = ("bytes_up", "bytes_down", "catch_up_bytes", "seconds", "step")
_MEASURED = ("risk", "accuracy")


class Tracker(Follower):
    """Writes every training that it follows as one run of a store.

    address: what it was made from, for messages. A resumed training, known by its checkpoint, continues its
    run.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lost = False
        self._step = 0

    @abstractmethod
    def begin(self, name: str, identity: str | None, resumed: bool, facts: Facts) -> Collection[int]:
        """Begin or continue the run of a training; return the exchanges that the store already has.

        identity: identifies a training when it is started again; None if nothing does.
        facts:    what was trained, on what.
        """

    @abstractmethod
    def write(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers, at the exchange `step`."""

    @abstractmethod
    def end(self, how: str) -> None:
        """The training is over: complete, interrupted or failed. Scores may still follow."""

    def started(self, training: Training) -> None:
        self._step = 0
        self._safely(lambda: self._begin(training))

    def _begin(self, training: Training) -> None:
        # What identifies a training when it is started again: its cell, or its checkpoint.
        known = training.about.get("cell")
        if known is None and training.checkpoint is not None:
            known = os.path.abspath(training.checkpoint)
        identity = None if known is None else hashlib.sha256(str(known).encode()).hexdigest()[:16]
        name = training.name or training.method
        there = self.begin(name, identity, bool(training.history), facts_of(training))
        for record in training.history:
            self._step = record.exchange
            if record.exchange not in there:
                self.write(values_of(record), record.exchange)

    def advanced(self, record: Record, expected: int) -> None:
        self._step = record.exchange
        self._safely(lambda: self.write(values_of(record), record.exchange))

    def finished(self, model: Model | None) -> None:
        if model is not None and model.history:
            spent = {f"total_{name}": float(value) for name, value in totals(model.history).items()}
            self._safely(lambda: self.write(spent, self._step))
        self._safely(lambda: self.end(COMPLETE))

    def scored(self, scores: Mapping[str, float]) -> None:
        found = {f"final_{name}": float(value) for name, value in scores.items()}
        self._safely(lambda: self.write(found, self._step))

    def stopped(self, problem: BaseException) -> None:
        how = FAILED if isinstance(problem, Exception) else INTERRUPTED
        self._safely(lambda: self.end(how))

    def _safely(self, write: Callable[[], None]) -> None:
        """Write. A store that fails once is not used again, and the training continues."""
        if self._lost:
            return
        try:
            write()
        except Exception as problem:  # whatever a database, a disk or a network can raise
            self._lost = True
            why = f"{type(problem).__name__}: {first_line(problem)}"
            warnings.warn(
                f"{self.address} takes nothing more ({why}). The training continues without it; with a "
                "checkpoint it can be resumed, and is then written completely.",
                TrackingWarning,
                stacklevel=3,
            )


def values_of(record: Record) -> dict[str, float]:
    """The numbers of an exchange by name; those of a mapping among its metrics as NAME/KEY."""
    values = {name: float(getattr(record, name)) for name in _COUNTED}
    values |= {name: float(v) for name in _MEASURED if (v := getattr(record, name)) is not None}
    values |= {"clients": float(len(record.cohort)), "missing_clients": float(len(record.missing))}
    if record.error_bounds:
        values["error_bound"] = max(record.error_bounds.values())
    return values | dict(_numbers(record.metrics))


def _numbers(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, (bool, int, float, np.number)):
            yield f"{before}{name}", float(value)


def facts_of(training: Training) -> dict[str, str]:
    """What was trained, on what, as text by name."""
    classes = training.spec.classes
    facts = {
        **training.parameters,
        **training.about,
        "method": training.method,
        "federation.clients": len(training.clients),
        "federation.features": training.spec.features,
        "federation.classes": 0 if classes is None else len(classes),
        "fedsolve": __version__,
    }
    return {name: str(value) for name, value in facts.items()}
