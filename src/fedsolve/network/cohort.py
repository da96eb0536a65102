"""Who took part in an exchange, how long nodes are waited for, and the errors of those that are missing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.network.wire import plain

Policy = Literal["wait", "continue", "error"]


@dataclass(frozen=True)
class Waiting:
    """How long a node is waited for in one exchange; `FlowerFederation` says what each of these means."""

    missing: Policy
    patience: float | None
    grace: float
    interval: float


def deadline(patience: float | None, started: float | None = None) -> float:
    """The moment at which patience ends that began at `started`, or now."""
    if patience is None:
        return float("inf")
    return (time.monotonic() if started is None else started) + patience


class Missing(Exception):
    """A member that is not in the sum; `kind` is the field of the report that says why."""

    def __init__(self, kind: Literal["failed", "late", "absent"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass
class CohortReport:
    """Who took part in one exchange, and what became of the others.

    failed: answered with a refusal or with something unusable. late: did not answer in time.
    absent: was not there. again: how often a node had to be asked again.
    """

    exchange: int
    kind: str
    asked: tuple[str, ...]
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def missing(self) -> dict[str, str]:
        return dict(sorted({**self.failed, **self.late, **self.absent}.items()))

    @property
    def coverage(self) -> float:
        """Share of those asked that are in the sum."""
        return len(self.answered) / len(self.asked) if self.asked else 0.0

    def stopped(self, name: str) -> Exception:
        """The error of a run that does not go on without this member."""
        why = self.missing[name]
        if why.startswith("DataError: "):
            return DataError(f"participant '{name}': {why.removeprefix('DataError: ')}")
        return CohortError(
            f"participant '{name}' failed in exchange {self.exchange} ({self.kind}): {why.rstrip('.')}. "
            "Mend it and resume, or let the federation go on without it (missing='continue')."
        )

    def undecided(self, first: str, second: str, problem: TermError) -> CohortError:
        """The error of two answers that contradict each other."""
        return CohortError(
            f"exchange {self.exchange} ({self.kind}): '{first}' and '{second}' contradict each other; "
            f"which of them is wrong is not known ({plain(problem)}). Mend one of them and resume."
        )

    def too_few(self, least: int) -> CohortError:
        """The error of fewer answers than `least`."""
        reasons = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*self.missing.items()][:3])
        return CohortError(
            f"exchange {self.exchange} ({self.kind}): {len(self.answered)} of {len(self.asked)} "
            f"participants answered, at least {least} needed. {reasons or 'Nobody was asked'}. "
            "Mend them and resume, or lower min_clients."
        )
