"""How well a classifier does: confusion, precision, recall and F1 per class, as numbers and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from fedsolve.cli.output import percent, table
from fedsolve.container import Array
from fedsolve.labels import encode_labels

SHOWN_CLASSES = 20
SHOWN_PAIRS = 15


@dataclass(frozen=True)
class Report:
    """confusion: (classes, classes) numbers of rows, true class down, predicted class across."""

    classes: Array
    confusion: Array

    @classmethod
    def of(cls, labels: Array, predicted: Array, classes: Array) -> Report:
        """The report on these predictions; labels outside `classes` are refused."""
        true, told = encode_labels(labels, classes), encode_labels(predicted, classes)
        confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
        np.add.at(confusion, (true, told), 1)
        return cls(classes, confusion)

    @property
    def rows(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.confusion) / max(1, self.rows))

    @property
    def support(self) -> Array:
        return np.asarray(self.confusion.sum(axis=1))

    @property
    def precision(self) -> Array:
        """Share of the rows predicted as a class that are of it; NaN where none was predicted."""
        return _ratio(np.diag(self.confusion), self.confusion.sum(axis=0))

    @property
    def recall(self) -> Array:
        """Share of a class's rows that were predicted as it; NaN where it has no rows."""
        return _ratio(np.diag(self.confusion), self.support)

    @property
    def f1(self) -> Array:
        """2 TP / (2 TP + FP + FN); NaN where a class neither occurs nor is predicted."""
        return _ratio(2 * np.diag(self.confusion), self.confusion.sum(axis=0) + self.support)

    def confused(self, limit: int) -> list[tuple[int, int, int]]:
        """The most frequent mistakes: (true class, predicted class, rows), positions in `classes`."""
        wrong = self.confusion - np.diag(np.diag(self.confusion))
        order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
        pairs = [(*(int(i) for i in np.unravel_index(flat, wrong.shape)),) for flat in order]
        return [(true, told, int(wrong[true, told])) for true, told in pairs if wrong[true, told]]

    def as_dict(self) -> dict[str, Any]:
        columns = zip(self.classes, self.precision, self.recall, self.f1, self.support, strict=True)
        names = ("class", "precision", "recall", "f1", "support")
        return {
            "rows": self.rows,
            "accuracy": self.accuracy,
            "macro_f1": float(np.nanmean(self.f1)),
            "classes": self.classes.tolist(),
            "confusion": self.confusion.tolist(),
            "per_class": [dict(zip(names, values, strict=True)) for values in columns],
        }

    def show(self, page: Console) -> None:
        """Accuracy, the per-class table and the confusion matrix (or the worst of both)."""
        wrong = self.rows - int(np.trace(self.confusion))
        page.print(
            f"[bold]accuracy {percent(self.accuracy)}[/bold]  ({self.rows:,} rows, {wrong:,} wrong, "
            f"macro F1 {np.nanmean(self.f1):.4f})"
        )
        page.print()
        self._show_classes(page)
        self._show_confusion(page)

    def _show_classes(self, page: Console) -> None:
        order = np.arange(len(self.classes))
        if len(order) > SHOWN_CLASSES:
            order = np.argsort(np.nan_to_num(self.f1, nan=2.0), kind="stable")[:SHOWN_CLASSES]
            page.print(f"The {SHOWN_CLASSES} classes of {len(self.classes)} with the lowest F1:")
        rows = [
            (
                str(self.classes[i]),
                *(_share(values[i]) for values in (self.precision, self.recall, self.f1)),
                f"{self.support[i]:,}",
            )
            for i in order
        ]
        page.print(table(("class", "precision", "recall", "F1", "rows"), rows))

    def _show_confusion(self, page: Console) -> None:
        names = [str(label) for label in self.classes]
        if len(names) > SHOWN_CLASSES:
            page.print("The most frequent mistakes:")
            rows = [
                (names[true], names[told], f"{count:,}", percent(count / self.support[true]))
                for true, told, count in self.confused(SHOWN_PAIRS)
            ]
            page.print(table(("true", "predicted", "rows", "of that class"), rows, left=(0, 1)))
            return
        page.print("Confusion: true class down, predicted class across; a dot is zero.")
        heads = names
        if max(map(len, names)) > 4:
            # Long names would not fit across the page; their positions do.
            heads = [str(index) for index in range(len(names))]
            names = [f"{index} {name}" for index, name in enumerate(names)]
        cells = [[f"{count}" if count else "." for count in line] for line in self.confusion]
        drawn = table(("", *heads), [(name, *line) for name, line in zip(names, cells, strict=True)])
        drawn.padding = (0, 0, 0, 1)
        page.print(drawn)


def _ratio(part: Array, whole: Array) -> Array:
    return np.asarray(np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0))


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"
