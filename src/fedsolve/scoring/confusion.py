"""Confusion of a classifier: precision, recall and F1 of every class, and the most frequent mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.labels import encode_labels


@dataclass(frozen=True)
class Confusion:
    """counts: (classes, classes) numbers of rows, true class down, predicted class across."""

    classes: Array
    counts: Array

    @classmethod
    def of(cls, labels: Array, predicted: Array, classes: Array) -> Confusion:
        """The confusion of these predictions; labels outside `classes` are refused."""
        counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
        np.add.at(counts, (encode_labels(labels, classes), encode_labels(predicted, classes)), 1)
        return cls(classes, counts)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def correct(self) -> int:
        return int(np.trace(self.counts))

    @property
    def support(self) -> Array:
        """Rows of each class."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def precision(self) -> Array:
        """Share of the rows predicted as a class that are of it; NaN where none was predicted."""
        return _ratio(np.diag(self.counts), self.counts.sum(axis=0))

    @property
    def recall(self) -> Array:
        """Share of a class's rows that were predicted as it; NaN where it has no rows."""
        return _ratio(np.diag(self.counts), self.support)

    @property
    def f1(self) -> Array:
        """2 TP / (2 TP + FP + FN); NaN where a class neither occurs nor is predicted."""
        return _ratio(2 * np.diag(self.counts), self.counts.sum(axis=0) + self.support)

    def mistakes(self, limit: int) -> list[tuple[int, int, int]]:
        """The most frequent mistakes: (true class, predicted class, rows), positions in `classes`."""
        wrong = self.counts - np.diag(np.diag(self.counts))
        order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
        pairs = [(*(int(i) for i in np.unravel_index(flat, wrong.shape)),) for flat in order]
        return [(true, answer, int(wrong[true, answer])) for true, answer in pairs if wrong[true, answer]]

    def as_dict(self) -> dict[str, Any]:
        columns = zip(self.classes, self.precision, self.recall, self.f1, self.support, strict=True)
        names = ("class", "precision", "recall", "f1", "support")
        return {
            "rows": self.rows,
            "accuracy": self.correct / max(1, self.rows),
            "macro_f1": float(np.nanmean(self.f1)),
            "classes": self.classes.tolist(),
            "confusion": self.counts.tolist(),
            "per_class": [dict(zip(names, values, strict=True)) for values in columns],
        }


def _ratio(part: Array, whole: Array) -> Array:
    return np.asarray(np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0))
