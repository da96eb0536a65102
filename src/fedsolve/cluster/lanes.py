"""A cohort in lanes, and the tree in which the sums of lanes meet: whoever adds them, the bits are the same.

A lane is a run of batches whose terms are added one after the other. Lanes are made of the clients asked and
of their rows alone. Lane 0 is added to 1, 2 to 3, then their sums, and so on; a sum without a neighbour moves
up as it is. So bits depend neither on the number of workers nor on their speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from fedsolve.federation.cohort import TermLayout
from fedsolve.federation.messages import Term

Lane = tuple[int, Sequence[tuple[str, ...]]]
"""The number of a lane, and its batches."""

Node = tuple[int, int, Term]
"""A sum of the tree: its level above the lanes, its place on that level, the sum."""

LANES = 64
"""Lanes of a cohort on one machine, and so workers that share its work; bits of sums depend on it. Of 2, 4, 8
and so on workers each has one part of the tree, and passes on a single sum."""


def in_lanes(
    batches: Sequence[tuple[str, ...]], rows: Callable[[str], int], machine: Callable[[str], str | None]
) -> list[Lane]:
    """Batches in runs with about as many rows each; the clients of a lane are on one machine."""
    if len(batches) <= LANES:
        return [(number, [batch]) for number, batch in enumerate(batches)]
    sizes = [sum(max(1, rows(name)) for name in batch) for batch in batches]
    numbers = shares(sizes, LANES)
    runs = groupby(zip(numbers, batches, strict=True), lambda each: (each[0], machine(each[1][0])))
    return [(number, [batch for _, batch in run]) for number, (_, run) in enumerate(runs)]


def shares(sizes: Sequence[int], parts: int) -> list[int]:
    """Which of so many parts, about equal, each of these falls into, one after the other."""
    work = np.array(sizes, dtype=float)
    middle = (np.cumsum(work) - work / 2) / max(1.0, work.sum())
    found: list[int] = np.minimum(parts - 1, middle * parts).astype(int).tolist()
    return found


class SumTree:
    """The part of a tree that is known so far; two sums that meet become one."""

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
            term = _joined(left, right)
            level, place = level + 1, place // 2
        self._sums[level, place] = term

    def nodes(self) -> list[Node]:
        """What is known and has not met its neighbour."""
        return [(level, place, self._sums[level, place]) for level, place in sorted(self._sums)]


def _joined(left: Term, right: Term) -> Term:
    """left + right, in the place of left where that can be changed; unlike terms are refused by name."""
    if left.arrays and right.arrays:
        TermLayout.of(left, shared=True).check(TermLayout.of(right, shared=True), "a lane of clients")
    if not all(array.flags.writeable for array in left.arrays.values()):
        left = Term() + left  # what came from another process cannot be changed
    left.add(right)
    return left
