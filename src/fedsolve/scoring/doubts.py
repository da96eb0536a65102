"""Reasons to doubt a model, in words to show after a result."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.model import Model
from fedsolve.pages.words import percent
from fedsolve.tables.proposal import numbers_the_rows
from fedsolve.tables.table_file import Table

GAP = 0.2
"""Warn when accuracy on training rows exceeds accuracy on other rows by this much."""

MISCALIBRATED = 0.1
"""Warn from this expected calibration error (ECE) on."""

_UNLEARNT = "The model has not learnt what it should; check columns, scales and parameters."


def caveats(model: Model) -> list[str]:
    """The model's own warning about predicting with it, as a list."""
    return [] if model.caveat is None else [model.caveat]


def majority_doubt(accuracy: float, labels: Array, where: str, balanced: float | None = None) -> list[str]:
    """A warning if always answering the most frequent label would be right more often.

    balanced: the balanced accuracy, where it is known: a model that weighs classes is to be judged by that.
    """
    classes, counts = np.unique(labels, return_counts=True)
    share = float(counts.max() / len(labels))
    if accuracy >= share:
        return []
    most, why = classes[int(np.argmax(counts))].item(), _UNLEARNT
    if balanced is not None and balanced > 1 / len(classes):
        why = (
            f"That is so where classes were weighed to count alike (balanced accuracy {percent(balanced)}); "
            "otherwise check columns, scales and parameters."
        )
    told = f"{percent(accuracy)} on {where} is worse than always answering {most!r} ({percent(share)})."
    return [f"{told} {why}"]


def mean_doubt(r2: float, where: str = "these rows") -> list[str]:
    """A warning if always answering the mean would be more accurate."""
    told = f"R² {r2:.4f} on {where} is worse than always answering the mean of the targets (0). {_UNLEARNT}"
    return [told] if r2 < 0 else []


def chance_doubt(accuracy: float, labels: Array, where: str) -> list[str]:
    """A warning if the model is no better than guessing, where classes count alike."""
    count = len(np.unique(labels))
    if accuracy > 1 / count:
        return []
    return [
        f"{percent(accuracy)} on {where}, all classes counting alike, is no better than drawing lots among "
        f"{count} classes. {_UNLEARNT}"
    ]


def gap_doubt(train: float, test: float, where: str = "test rows", shown: Any = percent) -> list[str]:
    """A warning if the model has learnt its training rows by heart."""
    if train - test < GAP:
        return []
    return [
        f"{shown(train)} on training rows but {shown(test)} on {where}: the model has learnt the "
        "training rows by heart. Use a smaller width, fewer layers or a larger ridge, or more rows."
    ]


def calibration_doubt(model: Model) -> list[str]:
    """A warning if probabilities are further from the truth on rows held out than chance explains."""
    known = model.calibration
    error = None if known is None else known.metrics.get("ece")
    if known is None or error is None or error < max(MISCALIBRATED, 1.5 / max(1, known.rows) ** 0.5):
        return []
    return [
        f"probabilities are off by {percent(error)} on average on {known.rows:,} rows held out: do not use "
        "them as they are. Look for codes among the numbers, which a schema can make categories."
    ]


def identifier_doubt(data: Table) -> list[str]:
    """A warning about columns of a plain table that number the rows instead of measuring something."""
    columns = [] if data.schema is None else data.schema.used
    names = [one.name for place, one in enumerate(columns) if numbers_the_rows(data.features[:, place])]
    if not names:
        return []
    drops = " ".join(f"--drop {name}" for name in names)
    return [
        f"the model uses {', '.join(map(repr, names))}, whole numbers that are nearly all different, like "
        f"an identifier. Such a column teaches nothing about new rows; leave it out with {drops}."
    ]


def held_out_accuracy(model: Model, balanced: bool) -> float | None:
    """Accuracy or R² on rows held out of what was chosen: of the model that was calibrated, or of its trial.

    The trial may have been a smaller one. balanced: classes count alike, and so do mistakes of the trial.
    """
    if model.spread is not None:
        return float(model.spread.metrics["r2"] or 0.0)
    known = None if model.calibration is None else model.calibration.metrics.get("accuracy")
    if model.tried and known is not None and not balanced:
        return float(known)
    chosen = (tried.errors for tried in model.tried if tried.chosen and tried.errors is not None)
    return next((1.0 - errors for errors in chosen), None)


def doubts_about(
    model: Model, data: Table, test: Table | None, accuracy: dict[str, Any], plain: bool, balanced: bool
) -> list[str]:
    """The warnings about this model.

    plain: whether no schema describes the rows. balanced: whether classes count alike, so that their shares
    are no measure.
    """
    doubts = identifier_doubt(data) if plain else []
    if not model.predicts:  # which the page says beside the accuracy
        return doubts
    assert data.labels is not None
    if caveat := model.caveat:  # why accuracies are low, if they are
        return [*doubts, caveat]
    if model.labels:
        return doubts
    if model.classes is None:
        other, where = ("test", "test rows") if test is not None else ("held_out", "rows held out")
        if (reached := accuracy[other]) is None:
            return doubts + mean_doubt(accuracy["train"], "training rows")
        gap = gap_doubt(accuracy["train"], reached, where, "R² {:.4f}".format)
        return doubts + mean_doubt(reached, where) + gap
    doubts += calibration_doubt(model)
    if test is not None and test.labels is not None:
        doubts += [] if balanced else majority_doubt(accuracy["test"], test.labels, "test rows")
        doubts += gap_doubt(accuracy["train"], accuracy["test"])
    if accuracy["held_out"] is not None:
        told = chance_doubt if balanced else majority_doubt
        doubts += told(accuracy["held_out"], data.labels, "rows held out")
        if test is None:
            doubts += gap_doubt(accuracy["train"], accuracy["held_out"], "rows held out")
    elif not balanced:
        doubts += majority_doubt(accuracy["train"], data.labels, "training rows")
    return doubts
