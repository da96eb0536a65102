"""The one sum of an exchange, whatever carries the terms: each is checked, then added in client order.

Terms may be in memory or packed as they travel (`Term.symmetric`); all terms of a sum have the same form,
and every number is added in the same way, so that both give the same bits. The sum takes as much memory as
one term, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedsolve.errors import TermError
from fedsolve.federation.messages import Term, packed_size

_LARGEST_COUNT = 2**53


class Contradiction(TermError):
    """A term unlike the only one before it, that of `first`; which of the two is wrong is not known.

    It stops every engine, for to go on with either of them may be to go on with the wrong one.
    """

    def __init__(self, first: str, text: str) -> None:
        super().__init__(text)
        self.first = first


class Arithmetic(Protocol):
    """What numbers the terms of a sum may hold, and how they are added.

    A masked sum differs from a plain one here and nowhere else: it takes whole numbers of a ring, adds them
    modulo its size, and removes what is left of the masks when the sum is taken.
    """

    def check(self, term: Term, who: str) -> None:
        """Refuse numbers that would spoil the sum. May be called from several threads."""

    def add(self, term: Term) -> None:
        """Add a term that was checked and fits."""

    def take(self) -> Term:
        """The sum as methods read it; nothing can be added afterwards."""

    def so_far(self) -> Term:
        """The sum as an addend of another one."""


class PlainArithmetic:
    """Finite numbers, added in float64: the sum, not the addend, sets the error of a float32 term."""

    def __init__(self) -> None:
        self._sum = Term()

    def check(self, term: Term, who: str) -> None:
        term.check_finite(who)
        for name, count in term.counts.items():
            if abs(count) > _LARGEST_COUNT:
                raise TermError(f"{who}: the count '{name}' has {len(str(count))} digits, too many.")
        for name, factor in term.factors.items():
            if not np.isfinite(factor):
                raise TermError(f"{who}: the factor of '{name}' is {factor}. Check its rows and weights.")

    def add(self, term: Term) -> None:
        self._sum.add(term)

    def take(self) -> Term:
        self._sum.mirror()
        return self._sum

    def so_far(self) -> Term:
        return self._sum


@dataclass(frozen=True)
class TermLayout:
    """What a term looks like: of every array its shape, as methods read it, and whether it is symmetric.

    Names of a client's own arrays are without the client's; they end in @.
    """

    forms: Mapping[str, tuple[tuple[int, ...], bool]]

    @classmethod
    def of(cls, term: Term, client: str) -> TermLayout:
        """What this client's term looks like."""
        return cls(
            {
                name.removesuffix(client) if _is_own(name, client) else name: (
                    term.shape(name),
                    name in term.symmetric,
                )
                for name in term.arrays
            }
        )

    @property
    def shared(self) -> TermLayout:
        """Only the arrays that are added to those of others; methods that gather have some besides."""
        return TermLayout({name: form for name, form in self.forms.items() if "@" not in name})

    @property
    def numbers(self) -> int:
        """How many numbers such a term sends."""
        return sum(
            packed_size(shape[0]) if symmetric else int(np.prod(shape, dtype=np.int64))
            for shape, symmetric in self.forms.values()
        )

    def check(self, other: TermLayout, client: str) -> None:
        """Refuse a term of this client that looks like `other`, unless that is like this one."""
        remedy = "All participants must answer the same request."
        for name, form in other.forms.items():
            if form != (expected := self.forms.get(name, form)):
                raise TermError(
                    f"terms do not fit together: '{name}' of '{client}' has shape {_shown(form)}, expected "
                    f"{_shown(expected)}. {remedy}"
                )
        if other.forms.keys() != self.forms.keys():
            raise TermError(
                f"terms do not fit together: '{client}' sent {sorted(other.forms)}, expected "
                f"{sorted(self.forms)}. {remedy}"
            )


@dataclass(frozen=True)
class Answer:
    """A client's term with which nothing is wrong by itself; `RunningSum.check` gives it.

    empty: whether the client has no rows.
    """

    client: str
    term: Term
    empty: bool


class RunningSum:
    """Adds the answers of clients in the order given, which is that of their names in every engine.

    layout:     what a term must look like; when None, like the first.
    arithmetic: how numbers are added.
    """

    def __init__(self, layout: TermLayout | None = None, arithmetic: Arithmetic | None = None) -> None:
        self._layout = layout
        self._arithmetic = PlainArithmetic() if arithmetic is None else arithmetic
        self._first: tuple[str, TermLayout] | None = None
        self._alike = 0

    def check(self, client: str, term: Term, empty: bool = False) -> Answer:
        """The term as an answer, unless it cannot be right whatever the others are.

        May be called from several threads: it does not depend on what was added before.
        """
        for name in term.arrays:
            if "@" in name and not _is_own(name, client):
                raise TermError(
                    f"'{client}' sent '{name}': what is gathered ends in @ and the name of its own client."
                )
        if self._layout is not None and not _abstains(term):
            self._layout.check(TermLayout.of(term, client), client)
        self._arithmetic.check(term, f"'{client}'")
        return Answer(client, term, empty)

    def check_fits(self, answer: Answer) -> None:
        """Refuse an answer that cannot be added to those before it."""
        if self._first is None or _abstains(answer.term):
            return
        first, layout = self._first
        try:
            layout.check(TermLayout.of(answer.term, answer.client).shared, answer.client)
        except TermError as problem:
            if self._alike == 1:
                raise Contradiction(first, str(problem)) from problem
            raise

    def add(self, answer: Answer) -> None:
        """Add an answer, or refuse it and leave the sum as it is."""
        self.check_fits(answer)
        self._arithmetic.add(answer.term)
        if _abstains(answer.term):
            return
        if self._first is None:
            self._first = answer.client, TermLayout.of(answer.term, answer.client).shared
        self._alike += 1

    def take(self) -> Term:
        """The sum as methods read it; nothing can be added afterwards."""
        return self._arithmetic.take()

    def so_far(self) -> Term:
        """The sum as an addend of another one: symmetric arrays as upper triangles."""
        return self._arithmetic.so_far()


def _is_own(name: str, client: str) -> bool:
    return name.endswith(f"@{client}")


def _abstains(term: Term) -> bool:
    """Whether a client has nothing to add to arrays, for want of rows or of a batch: counts fit any sum."""
    return not term.arrays and bool(term.counts)


def _shown(form: tuple[tuple[int, ...], bool]) -> str:
    shape, symmetric = form
    return f"{shape} (symmetric)" if symmetric else f"{shape}"
