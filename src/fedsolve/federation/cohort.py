"""Who took part in an exchange and what it cost: the report of every engine, and its errors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Literal

from fedsolve.errors import CohortError, DataError, DivergenceError, FedsolveError
from fedsolve.federation.blocks import BlockSum
from fedsolve.federation.messages import Request, Total
from fedsolve.federation.running_sum import Answer, Contradiction, RunningSum

UNKNOWN = "not part of the federation"
"""Why a client that the engine does not know is missing."""

_LONGEST = 2000
_DIVERGED = "DivergenceError: "


class Missing(Exception):
    """A member that is not in the sum; `kind` is the field of the report that says why."""

    def __init__(self, kind: Literal["failed", "late", "absent"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass
class CohortReport:
    """Who took part in one exchange, what became of the others, and what travelled.

    empty:  of those that answered, who has no rows.
    failed: answered with a refusal or with something unusable. late: did not answer in time.
    absent: was not there. again: how often a member had to be asked again.
    bytes_up, catch_up_bytes: payloads; the latter is what members were sent besides that lacked model blocks.
    coming: of answers that are being fetched, the bytes that are there and those of the whole.
    """

    exchange: int
    kind: str
    asked: tuple[str, ...]
    answered: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    catch_up_bytes: int = 0
    seconds: float = 0.0
    coming: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, request: Request, members: Container[str]) -> CohortReport:
        """The report of a request that is about to be sent to those of its cohort among `members`."""
        report = cls(request.exchange, request.kind, tuple(sorted(request.cohort)))
        report.absent = {name: UNKNOWN for name in report.asked if name not in members}
        return report

    @property
    def missing(self) -> dict[str, str]:
        return dict(sorted({**self.failed, **self.late, **self.absent}.items()))

    @property
    def coverage(self) -> float:
        """Share of those asked that are in the sum."""
        return len(self.answered) / len(self.asked) if self.asked else 0.0

    def enter(self, answer: Answer) -> None:
        """Note that this answer was added."""
        self.answered.append(answer.client)
        self.bytes_up += answer.term.nbytes
        if answer.empty:
            self.empty.append(answer.client)

    def enter_block(self, block: BlockSum) -> None:
        """Note that the sum of these answers was added."""
        self.answered += block.answered
        self.empty += block.empty
        self.bytes_up += block.bytes_up
        self.catch_up_bytes += block.catch_up_bytes

    def lose(self, name: str, cause: Exception) -> None:
        """Note that a member is not in the sum, and why."""
        if isinstance(cause, Missing):
            getattr(self, cause.kind)[name] = plain(cause)
        else:
            self.failed[name] = plain(f"{error_kind(cause)}: {cause}")

    def total(self, sums: RunningSum, request: Request, least: int) -> Total:
        """The sum with those it was summed over; an error where fewer than `least` answered, or nobody."""
        least = max(1, least)
        if len(self.answered) < least:
            raise self._too_few(least)
        return Total(
            term=sums.take(),
            cohort=tuple(sorted(self.answered)),
            missing=self.missing,
            empty=tuple(sorted(self.empty)),
            bytes_up=self.bytes_up,
            bytes_down=request.nbytes * len(self.answered),
            catch_up_bytes=self.catch_up_bytes,
            seconds=self.seconds,
        )

    # -- errors ----------------------------------------------------------------------------------

    def stopped(self, name: str, cause: Exception) -> FedsolveError:
        """The error that stops a run because this member is missing."""
        if isinstance(cause, Contradiction):
            return CohortError(
                f"{self._where}: '{cause.first}' and '{name}' contradict each other; which of them is wrong "
                f"is not known ({plain(cause).rstrip('.')}). Mend one of them and resume."
            )
        why = self.missing[name]
        if why.startswith("DataError: "):
            return DataError(f"participant '{name}': {why.removeprefix('DataError: ')}")
        if why.startswith(_DIVERGED):
            return DivergenceError(f"{self._where}: {why.removeprefix(_DIVERGED)}")
        return CohortError(
            f"participant '{name}' failed in {self._where}: {why.rstrip('.')}. "
            "Mend it and resume, or let the federation go on without it (missing='continue')."
        )

    def _too_few(self, least: int) -> FedsolveError:
        diverged = [why for why in self.missing.values() if why.startswith(_DIVERGED)]
        if diverged and len(diverged) == len(self.missing):
            return DivergenceError(f"{self._where}: {diverged[0].removeprefix(_DIVERGED)}")
        reasons = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*self.missing.items()][:3])
        return CohortError(
            f"{self._where}: {len(self.answered)} of {len(self.asked)} participants answered, at least "
            f"{least} needed. {reasons or 'Nobody was asked'}. Mend them and resume, or lower min_clients."
        )

    @property
    def _where(self) -> str:
        return f"exchange {self.exchange} ({self.kind})"


def error_kind(problem: Exception) -> str:
    """The type of an error as it is reported to others; every error about data is a DataError."""
    return "DataError" if isinstance(problem, DataError) else type(problem).__name__


def plain(said: Any) -> str:
    """Somebody else's text as a single line that is safe to print on a terminal."""
    text = " ".join(str(said).split())
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST])
