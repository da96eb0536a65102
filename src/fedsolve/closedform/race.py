"""Which candidates with layers are trained on: those that are ahead on the rows held out, and still improve.

After some layers all of them are compared (`RUNGS`). The better ones go on, and of these none that the last
layers did not improve, nor one that would stay behind the best of all candidates if the layers to come gained
as much again as the last ones did. A candidate that is stopped keeps its marks: it can still be the best,
with as many layers as it did best with.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fedsolve.closedform.candidates import best_of
from fedsolve.container import Array

RUNGS: tuple[tuple[int, int], ...] = ((2, 3), (4, 2), (8, 1))
"""After so many layers so many go on."""

_AGAIN = 2.0
_ERRORS = 2.0
_WORSE = 1.1


def rungs_of(layers: int) -> int:
    """How many comparisons come before the last one, for candidates of so many layers."""
    return sum(after < layers for after, _ in RUNGS)


class Marks:
    """Marks of candidates by number: weight, mistakes and squared error (3, stages), summed over folds.

    counts: whether mistakes count, which they do of classes; rows: how many were held out.
    """

    def __init__(self, counts: bool) -> None:
        self._counts = counts
        self.rows = 0
        self.of: dict[int, Array] = {}

    def best(self, among: Collection[int] | None = None, stages: int | None = None) -> tuple[int, int]:
        """The best candidate and its best stage, of some candidates, of their first stages."""
        numbers = sorted(self.of if among is None else among)
        marks = [self.of[number][:, :stages] for number in numbers]
        weights, errors, losses = np.concatenate(marks, axis=1)
        owners = np.repeat(numbers, [mark.shape[1] for mark in marks])
        best = best_of(errors if self._counts else None, losses, float(weights[0]) / self.rows)
        return int(owners[best]), int(best - np.flatnonzero(owners == owners[best])[0])

    def going_on(self, running: Collection[int], rung: int) -> list[int]:
        """Those of the candidates under way that are trained further after this rung."""
        most, before = RUNGS[rung][1], RUNGS[rung - 1][0] if rung else 0
        left, ahead = set(running), list[int]()
        while left and len(ahead) < most:
            ahead.append(self.best(left)[0])
            left.discard(ahead[-1])
        return sorted(
            number for number in ahead if self.best([number])[1] > before and not self._lost(number, before)
        )

    def _lost(self, number: int, before: int) -> bool:
        """Whether a candidate stays behind the best of all, even if it gains as much again."""
        row = 1 if self._counts else 2
        unit = float(self.of[number][0, 0]) / self.rows
        own = self.of[number][row] / unit
        now, earlier = float(own.min()), float(own[: before + 1].min())
        hoped = now - _AGAIN * max(0.0, earlier - now)
        best = min(float(marks[row].min()) for marks in self.of.values()) / unit
        return hoped > (best + _ERRORS * np.sqrt(best + 1.0) if self._counts else _WORSE * best)
