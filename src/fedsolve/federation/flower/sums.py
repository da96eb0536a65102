"""A running sum of terms in the form in which they travel: one term's size, whatever their number."""

from __future__ import annotations

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import TermError
from fedsolve.federation.encoding import PackedTerm
from fedsolve.federation.messages import Term, unpack_triangle


class PackedSum:
    """Adds terms in the order given; the upper triangles are unpacked once, at the end.

    Every number is added as `LocalFederation` adds it, so that the sums have the same bits.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._counts: dict[str, int] = {}
        self._symmetric: frozenset[str] = frozenset()
        self._common: set[str] | None = None

    def check(self, term: PackedTerm, client: str) -> None:
        """Refuse a term that does not fit, or holds NaN or infinity, before anything is added."""
        who = f"'{client}'"
        for name, array in term.arrays.items():
            mine = self._arrays.get(name)
            if mine is None:
                continue
            alike = (name in self._symmetric) == (name in term.symmetric)
            if mine.shape != array.shape or not alike:
                raise TermError(
                    f"terms do not fit together: '{name}' of {who} has shape {array.shape}, expected "
                    f"{mine.shape}. All participants must answer the same request."
                )
        common = _common(term, client)
        if self._common is not None and common != self._common:
            raise TermError(
                f"terms do not fit together: {who} sent {sorted(common)}, expected {sorted(self._common)}. "
                "All participants must answer the same request."
            )
        Term(term.arrays).check_finite(who)
        for name, factor in term.factors.items():
            if not np.isfinite(factor):
                raise TermError(f"{who}: the factor of '{name}' is {factor}. Check its rows and weights.")

    def add(self, term: PackedTerm, client: str) -> None:
        self._common = _common(term, client)
        for name, array in term.arrays.items():
            mine = self._arrays.get(name)
            if name in term.factors:
                array = np.multiply(array, term.factors[name], dtype=np.float64)
            if mine is None:
                # A float32 term is summed in float64: the sum, not the addend, sets the error.
                self._arrays[name] = array.astype(np.float64)
            else:
                np.add(mine, array, out=mine)
        for name, count in term.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        self._symmetric |= term.symmetric

    def take(self) -> Term:
        """The sum as methods read it; afterwards this object is empty."""
        arrays: dict[str, Array] = {}
        while self._arrays:
            name, array = self._arrays.popitem()
            arrays[name] = unpack_triangle(array) if name in self._symmetric else array
        return Term(dict(sorted(arrays.items())), self._counts, self._symmetric)


def _common(term: PackedTerm, client: str) -> set[str]:
    """Names that every term has; methods that gather add some that end in the client's own."""

    def own(name: str) -> bool:
        before = name.removesuffix(client)
        return before != name and before != "" and not before[-1].isalnum()

    return {name for name in term.arrays if not own(name)}
