"""Who took part in an exchange, and the sum of what they answered: the same for every engine.

Each term is checked, added in client order, and entered in the report. The report also says what the exchange
cost, and words its errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedsolve.errors import CohortError, DataError, DivergenceError, FedsolveError, TermError
from fedsolve.federation.messages import Request, Term, Total, check_triangle, named

UNKNOWN = "not part of the federation"
"""Why a client that the engine does not know is missing."""

_LARGEST_COUNT = 2**53
_LONGEST = 2000
_DIVERGED = "DivergenceError: "


class Contradiction(TermError):
    """A term that does not fit the only one before it, of `first`. Which of the two is wrong is unknown.

    It stops every engine: either of them may be the wrong one.
    """

    def __init__(self, first: str, text: str) -> None:
        super().__init__(text)
        self.first = first


@dataclass(frozen=True)
class TermLayout:
    """What a term looks like: the shape of every array, as methods read it, and whether it is symmetric.

    A client's own arrays are named without the client; these names end in @.
    """

    forms: Mapping[str, tuple[tuple[int, ...], bool]]

    @classmethod
    def of(cls, term: Term, *clients: str, shared: bool = False) -> TermLayout:
        """What the term of these clients looks like.

        shared: only the arrays that are added to those of others; methods that gather have some besides.
        """
        forms: dict[str, tuple[tuple[int, ...], bool]] = {}
        for name, array in term.arrays.items():
            called = name if "@" not in name else _shared_name(name, clients)
            symmetric = name in term.symmetric
            packed = symmetric and array.ndim == 1
            if not (shared and "@" in called):
                forms[called] = (check_triangle(array),) * 2 if packed else array.shape, symmetric
        return cls(forms)

    @property
    def numbers(self) -> int:
        """How many numbers such a term sends."""
        return sum(
            shape[0] * (shape[0] + 1) // 2 if symmetric else int(np.prod(shape, dtype=np.int64))
            for shape, symmetric in self.forms.values()
        )

    def check(self, other: TermLayout, *who: str) -> None:
        """Refuse the layout of another term unless it equals this one. who: who sent that term."""
        remedy = "All participants must answer the same request."
        for name, form in other.forms.items():
            if form != (expected := self.forms.get(name, form)):
                raise TermError(
                    f"terms do not fit together: '{name}' of {named(who)} has shape {_shown(form)}, expected "
                    f"{_shown(expected)}. {remedy}"
                )
        if other.forms.keys() != self.forms.keys():
            raise TermError(
                f"terms do not fit together: {named(who)} sent {sorted(other.forms)}, expected "
                f"{sorted(self.forms)}. {remedy}"
            )


@dataclass(frozen=True)
class Answer:
    """A term that can be added: of one client, or of several that answered together.

    empty: those of the clients that have no rows.
    bytes_up, catch_up_bytes: what the clients send, and are sent in addition to the request, in all.
    """

    clients: tuple[str, ...]
    term: Term
    empty: tuple[str, ...]
    bytes_up: int
    catch_up_bytes: int = 0


@dataclass(eq=False)
class RunningSum:
    """Adds answers in the order given, which is that of the clients' names in every engine.

    Terms may be in memory or packed as they travel (`Term.symmetric`). All terms of a sum have the same form,
    and both forms give the same bits. The sum takes as much memory as one term.

    layout: what a term must look like; when None, like the first.
    term:   the sum as an addend of another one, symmetric arrays as upper triangles.
    """

    layout: TermLayout | None = None
    term: Term = field(default_factory=Term)
    _first: tuple[tuple[str, ...], TermLayout] | None = field(default=None, init=False)
    _alike: int = field(default=0, init=False)

    def check(
        self, term: Term, *clients: str, empty: tuple[str, ...] = (), catch_up_bytes: int = 0
    ) -> Answer:
        """The term of these clients as an answer; refused if it is wrong by itself.

        May be called from several threads: it does not depend on what was added before.
        """
        for name in term.arrays:
            if "@" in name and _shared_name(name, clients) == name:
                raise TermError(
                    f"{named(clients)} sent '{name}': what is gathered ends in @ and the name of its own "
                    "client."
                )
        if self.layout is not None and (term.arrays or not term.counts):
            self.layout.check(TermLayout.of(term, *clients), *clients)
        term.check_finite(*clients)
        for name, count in term.counts.items():
            if abs(count) > _LARGEST_COUNT:
                raise TermError(
                    f"{named(clients)}: the count '{name}' has {len(str(count))} digits, too many."
                )
        for name, factor in term.factors.items():
            if not np.isfinite(factor):
                who = named(clients)
                raise TermError(f"{who}: the factor of '{name}' is {factor}. Check its rows and weights.")
        return Answer(clients, term, empty, len(clients) * term.nbytes, catch_up_bytes)

    def check_fits(self, answer: Answer) -> TermLayout | None:
        """What an answer looks like; refused if it cannot be added to those before it.

        None: it has only counts, such as that of a client without rows, and fits any sum.
        """
        if answer.term.counts and not answer.term.arrays:
            return None
        found = TermLayout.of(answer.term, *answer.clients, shared=True)
        if self._first is not None:
            first, layout = self._first
            try:
                layout.check(found, *answer.clients)
            except TermError as problem:
                if self._alike == 1:
                    raise Contradiction(named(first), str(problem)) from problem
                raise
        return found

    def add(self, answer: Answer) -> None:
        """Add an answer, or refuse it and leave the sum as it is."""
        found = self.check_fits(answer)
        self.term.add(answer.term)
        if found is not None:
            self._first = self._first or (answer.clients, found)
            self._alike += 1


class Missing(Exception):
    """A member that is not in the sum; `kind` is the field of the report that says why."""

    def __init__(self, kind: Literal["failed", "late", "absent"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


def departed(gone: Collection[str], staying: Collection[str]) -> CohortError:
    """The error for a secure sum without sites that were in earlier ones; it says what can be done."""
    names = ", ".join(sorted(gone)[:5])
    return CohortError(
        f"{names} took part in earlier sums and would be missing: the difference would show what they added. "
        f"Nothing was sent. Bring {names} back; or let them sign a withdrawal that all {len(staying)} who "
        "stay accept (fedsolve certificate withdraw, accept); or train with noise (--epsilon); or let all "
        "who stay allow changes (changing = true, in each policy), where three or more leave together."
    )


@dataclass
class CohortReport:
    """Who took part in one exchange, what became of the others, and what travelled.

    empty:  of those that answered, who has no rows.
    failed: answered with a refusal or with something unusable. late: did not answer in time.
    absent: was not there. again: how often a member had to be asked again.
    bytes_up, catch_up_bytes: payloads; the latter is what members were sent besides that lacked model blocks.
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

    @property
    def missing(self) -> dict[str, str]:
        return dict(sorted({**self.failed, **self.late, **self.absent}.items()))

    @property
    def coverage(self) -> float:
        """Share of those asked that are in the sum."""
        return len(self.answered) / len(self.asked) if self.asked else 0.0

    def take(
        self, sums: RunningSum, answers: Iterable[Answer], failed: dict[str, Exception]
    ) -> dict[str, Exception]:
        """Add answers to a sum and note who is in it. Returns who is not, with the reason."""
        for answer in answers:
            try:
                sums.add(answer)
            except TermError as problem:
                failed |= dict.fromkeys(answer.clients, problem)
                continue
            self.answered += answer.clients
            self.empty += answer.empty
            self.bytes_up += answer.bytes_up
            self.catch_up_bytes += answer.catch_up_bytes
        for name, cause in sorted(failed.items()):
            self.lose(name, cause)
        return failed

    def lose(self, name: str, cause: Exception) -> None:
        """Note that a member is not in the sum, and why."""
        if isinstance(cause, Missing):
            getattr(self, cause.kind)[name] = plain(cause)
        else:
            self.failed[name] = plain(f"{error_kind(cause)}: {cause}")

    def total(self, sums: RunningSum, request: Request, least: int) -> Total:
        """The sum and whose terms are in it. An error if nobody or fewer than `least` answered."""
        if len(self.answered) < max(1, least):
            raise self._too_few(max(1, least))
        return Total(
            term=sums.term.mirror(),  # as methods read it; nothing can be added afterwards
            cohort=tuple(sorted(self.answered)),
            missing=self.missing,
            empty=tuple(sorted(self.empty)),
            bytes_up=self.bytes_up,
            bytes_down=request.nbytes * len(self.answered),
            catch_up_bytes=self.catch_up_bytes,
            seconds=self.seconds,
        )

    # -- errors ----------------------------------------------------------------------------------

    def stopped(self, name: str, cause: Exception, going_on: str = "missing='continue'") -> FedsolveError:
        """The error that stops a run because this member is missing.

        going_on: how the others are let go on without it, in the words of the engine; "" where they cannot.
        """
        if isinstance(cause, Contradiction):
            return CohortError(
                f"{self._where}: {cause.first} and '{name}' contradict each other; which of them is wrong "
                f"is not known ({plain(cause).rstrip('.')}). Mend one of them and resume."
            )
        why = self.missing[name]
        if why.startswith("DataError: "):
            return DataError(f"participant '{name}': {why.removeprefix('DataError: ')}")
        if why.startswith(_DIVERGED):
            return DivergenceError(f"{self._where}: {why.removeprefix(_DIVERGED)}")
        without = f", or let the federation go on without it ({going_on})" if going_on else ""
        return CohortError(
            f"participant '{name}' failed in {self._where}: {why.rstrip('.')}. Mend it and resume{without}."
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
    """Text from elsewhere as a single line that is safe to print on a terminal."""
    text = " ".join(str(said).split())
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST])


def _shared_name(name: str, clients: tuple[str, ...]) -> str:
    """The name of a client's own array, such as "own@client", without the client."""
    return next((name.removesuffix(client) for client in clients if name.endswith(f"@{client}")), name)


def _shown(form: tuple[tuple[int, ...], bool]) -> str:
    shape, symmetric = form
    return f"{shape} (symmetric)" if symmetric else f"{shape}"
