"""A running sum of terms in the form in which they travel: one term's size, whatever their number."""

from __future__ import annotations

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import TermError
from fedsolve.federation.encoding import PackedTerm
from fedsolve.federation.messages import Term, unpack_triangle
from fedsolve.network.expected import TermLayout, stem

_LARGEST_COUNT = 2**53


class Misfit(TermError):
    """A term unlike those before it; which of them is wrong is not known."""


class PackedSum:
    """Adds terms in the order given; the upper triangles are unpacked once, at the end.

    Every number is added as `LocalFederation` adds it, so that the sums have the same bits.

    layout: what a term must look like; when None, like the first.
    """

    def __init__(self, layout: TermLayout | None = None) -> None:
        self._layout = layout
        self._arrays: dict[str, Array] = {}
        self._counts: dict[str, int] = {}
        self._symmetric: frozenset[str] = frozenset()
        self._common: set[str] | None = None

    def check(self, term: PackedTerm, client: str, empty: bool = False) -> None:
        """Refuse a term that does not fit, or holds NaN or infinity, before anything is added."""
        who = f"'{client}'"
        if self._layout is not None and not (empty and not term.arrays):
            self._check_layout(term, client, self._layout)
        for name, array in term.arrays.items():
            mine = self._arrays.get(name)
            if mine is None:
                continue
            alike = (name in self._symmetric) == (name in term.symmetric)
            if mine.shape != array.shape or not alike:
                raise Misfit(
                    f"terms do not fit together: '{name}' of {who} has shape {array.shape}, expected "
                    f"{mine.shape}. All participants must answer the same request."
                )
        common = _common(term, client)
        if self._layout is None and self._common is not None and common != self._common:
            raise Misfit(
                f"terms do not fit together: {who} sent {sorted(common)}, expected {sorted(self._common)}. "
                "All participants must answer the same request."
            )
        Term(term.arrays).check_finite(who)
        for name, count in term.counts.items():
            if abs(count) > _LARGEST_COUNT:
                raise TermError(f"{who}: the count '{name}' has {len(str(count))} digits, too many.")
        for name, factor in term.factors.items():
            if not np.isfinite(factor):
                raise TermError(f"{who}: the factor of '{name}' is {factor}. Check its rows and weights.")

    @staticmethod
    def _check_layout(term: PackedTerm, client: str, layout: TermLayout) -> None:
        found = {stem(name, client): name for name in term.arrays}
        if found.keys() != layout.shapes.keys():
            raise TermError(
                f"the term of '{client}' does not fit: '{client}' sent {sorted(found)}, expected "
                f"{sorted(layout.shapes)}. All participants must answer the same request."
            )
        for part, name in found.items():
            shape, alike = term.arrays[name].shape, (name in term.symmetric) == (part in layout.symmetric)
            if shape != layout.shapes[part] or not alike:
                raise TermError(
                    f"a term does not fit: '{name}' of '{client}' has shape {shape}, expected "
                    f"{layout.shapes[part]}. All participants must answer the same request."
                )

    def add(self, term: PackedTerm, client: str) -> None:
        self._common = _common(term, client) or self._common
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
    """Names that every term has; methods that gather add some that end in @ and the client's name."""
    return {name for name in term.arrays if not name.endswith(f"@{client}")}
