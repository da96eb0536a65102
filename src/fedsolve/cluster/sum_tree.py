"""Sums that meet in a binary tree over the places of their addends.

Place 0 is added to 1, 2 to 3, then their sums, and so on; a place without a neighbour moves up as it is. The
shape depends on the number of places alone: whoever adds which part of it, and when, the bits are the same.
"""

from __future__ import annotations

from fedsolve.federation.messages import Term
from fedsolve.federation.running_sum import TermLayout

Node = tuple[int, int, Term]
"""A sum of the tree: its level above the places, its place on that level, the sum."""


class SumTree:
    """The part of a tree that is known so far; two sums that meet become one.

    places: how many the whole tree has.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._sums: dict[tuple[int, int], Term] = {}

    def add(self, level: int, place: int, term: Term) -> None:
        """Enter a sum, which becomes part of the tree and may be changed."""
        while True:
            width = (self._places + (1 << level) - 1) >> level
            if width == 1:
                break
            if place == width - 1 and place % 2 == 0:  # no neighbour on this level
                level, place = level + 1, place // 2
                continue
            other = self._sums.pop((level, place ^ 1), None)
            if other is None:
                break
            left, right = (other, term) if place % 2 else (term, other)
            term = joined(left, right)
            level, place = level + 1, place // 2
        self._sums[level, place] = term

    def nodes(self) -> list[Node]:
        """What is known and has not met its neighbour."""
        return [(level, place, term) for (level, place), term in sorted(self._sums.items(), key=_key)]

    def root(self) -> Term:
        """The sum of all places."""
        ((_, _, term),) = self.nodes()
        return term


def _key(entry: tuple[tuple[int, int], Term]) -> tuple[int, int]:
    return entry[0]


def joined(left: Term, right: Term) -> Term:
    """left + right, in the place of left where that can be changed; unlike terms are refused by name."""
    if left.arrays and right.arrays:
        TermLayout.of(left, "").shared.check(TermLayout.of(right, "").shared, "a block of clients")
    if left.factors or not all(array.flags.writeable for array in left.arrays.values()):
        left = Term() + left  # what came from another process cannot be changed
    left.add(right)
    return left
