"""What makes a model doubtful, in words that a command shows after its result; and models with NaN."""

from __future__ import annotations

import numpy as np

from fedsolve.cli.output import percent
from fedsolve.container import Array
from fedsolve.data.proposal import whole_and_nearly_unique
from fedsolve.data.tables import Table
from fedsolve.model import Model

GAP = 0.2
"""By how much accuracy on training rows may exceed that on others before it is remarked upon."""


def check_finite(model: Model, what: str) -> None:
    """Refuse a model that holds NaN or infinity."""
    model.check_finite(what)


MANY_VALUES = 20
"""Different numbers as labels up to which they may well be classes."""


def caveats(model: Model) -> list[str]:
    """What the model itself says against predicting with it."""
    return [] if model.caveat is None else [model.caveat]


def majority_doubt(accuracy: float, labels: Array, where: str, balanced: float | None = None) -> list[str]:
    """Where always giving the most frequent label would be right more often.

    balanced: the balanced accuracy, where it is known: a model that weighs classes is to be judged by that.
    """
    classes, counts = np.unique(labels, return_counts=True)
    share = float(counts.max() / len(labels))
    if accuracy >= share:
        return []
    most = classes[int(np.argmax(counts))].item()
    if balanced is not None and balanced > 1 / len(classes):
        return [
            f"{percent(accuracy)} on {where} is worse than always answering {most!r} ({percent(share)}). "
            f"That is so where classes were weighed to count alike (balanced accuracy {percent(balanced)}); "
            "otherwise check columns, scales and parameters."
        ]
    return [
        f"{percent(accuracy)} on {where} is worse than always answering {most!r} ({percent(share)}). "
        "The model has not learnt what it should; check columns, scales and parameters."
    ]


def chance_doubt(accuracy: float, labels: Array, where: str) -> list[str]:
    """Where classes that count alike are answered no better than by drawing lots."""
    count = len(np.unique(labels))
    if accuracy > 1 / count:
        return []
    return [
        f"{percent(accuracy)} on {where}, all classes counting alike, is no better than drawing lots among "
        f"{count} classes. The model has not learnt what it should; check columns, scales and parameters."
    ]


def quantity_doubt(labels: Array, name: str) -> list[str]:
    """Where labels are numbers that measure something: every value would be a class of its own."""
    count = len(np.unique(labels))
    if not np.issubdtype(labels.dtype, np.number) or count <= MANY_VALUES or len(labels) >= 10 * count:
        return []
    return [
        f"{name} has {count:,} different numbers in {len(labels):,} rows, and each is taken for a class: it "
        "looks like a quantity. This command trains classifiers; name another --label, put the numbers into "
        "classes, or fit a regression in Python (fedsolve.estimators.DeepAFLRegressor)."
    ]


def gap_doubt(train: float, test: float, where: str = "test rows") -> list[str]:
    """Where the model knows its training rows by heart."""
    if train - test < GAP:
        return []
    return [
        f"{percent(train)} on training rows but {percent(test)} on {where}: the model has learnt the "
        "training rows by heart. Use a smaller width, fewer layers or a larger ridge, or more rows."
    ]


def identifier_doubt(data: Table) -> list[str]:
    """Columns of a plain table that number its rows rather than measure something."""
    if data.schema is None:
        return []
    names = [
        column.name
        for place, column in enumerate(data.schema.used)
        if whole_and_nearly_unique(data.features[:, place])
    ]
    if not names:
        return []
    drops = " ".join(f"--drop {name}" for name in names)
    return [
        f"the model uses {', '.join(map(repr, names))}, whole numbers that are nearly all different, like "
        f"an identifier. Such a column teaches nothing about new rows; leave it out with {drops}."
    ]
