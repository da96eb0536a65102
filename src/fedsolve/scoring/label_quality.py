"""How good a model of several labels a row is: an `Evaluation` of each label, and means over them.

The sums are those of `tallies` for two classes, with an axis of labels before the others, and `exact`, the
rows of which every label is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.labels import label_matrix
from fedsolve.scoring.quality import Evaluation, Threshold
from fedsolve.scoring.tallies import empty_tally, tally

if TYPE_CHECKING:
    from fedsolve.federation.participant import ClientData
    from fedsolve.model import Model

_MEANS = ("accuracy", "balanced_accuracy", "auc", "auc_bound", "log_loss", "brier", "ece")


def labels_tally(model: Model, data: ClientData) -> dict[str, Array]:
    """The sums of a client's rows, some of them at a time."""
    truth = label_matrix(data.own_labels(), model.labels).astype(np.int64)
    sums = {name: np.repeat(array[None], model.outputs, axis=0) for name, array in empty_tally(2).items()}
    sums["exact"] = np.zeros(1)
    for span in data.spans():
        answers, shares = model.told(data.features(span, data.source.dtype))
        for place, of_label in enumerate(shares.T):
            two = np.column_stack([1.0 - of_label, of_label])
            more = tally(two, answers[:, place], truth[span, place], data.cells is not None)
            for name, array in more.items():
                sums[name][place] += array
        sums["exact"] += np.sum((answers == truth[span]).all(axis=1))
    return sums


@dataclass(frozen=True)
class LabelsEvaluation(Evaluation):
    """Measures of several labels a row: means over the labels that have them, and each label by its name."""

    labels: tuple[str, ...] = ()

    @cached_property
    def by_label(self) -> dict[str, Evaluation]:
        """The evaluation of each label by itself, of the classes 0 and 1."""
        return {
            name: Evaluation(self.classes, {key: self.sums[key][place] for key in empty_tally(2)})
            for place, name in enumerate(self.labels)
        }

    @property
    def rows(self) -> int:
        return int(self.confusion[0].sum())

    @property
    def exact(self) -> float:
        """The share of rows of which every label is right."""
        return float(self.sums["exact"][0] / max(1, self.rows))

    @property
    def accuracy(self) -> float:
        return self.measures()["accuracy"]

    @property
    def auc(self) -> float:
        return self.measures()["auc"]

    def measures(self) -> dict[str, float]:
        """Means over the labels, of an AUC over those that some rows have and others lack; and `exact`."""
        found = np.array([[getattr(one, name) for name in _MEANS] for one in self.by_label.values()])
        there = np.isfinite(found)
        with np.errstate(invalid="ignore"):
            means = np.where(there, found, 0.0).sum(axis=0) / there.sum(axis=0)
        return {"exact": self.exact, **dict(zip(_MEANS, means.tolist(), strict=True))}

    def thresholds(self, chosen: Array, wanted: float) -> dict[str, Threshold]:
        """What thresholds that were chosen on other rows reach here, by label."""
        each = zip(self.by_label.items(), chosen.tolist(), strict=True)
        return {name: one.threshold(probability, wanted) for (name, one), probability in each}

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values, NaN where a measure does not exist."""
        return {
            "rows": self.rows,
            "calibrated": self.calibrated,
            **self.measures(),
            "labels": {
                name: {
                    "share": float(one.confusion[1].sum() / max(1, one.rows)),
                    **one.measures(),
                    "intervals": {key: list(pair) for key, pair in one.intervals.items()},
                    "confusion": one.confusion.tolist(),
                }
                for name, one in self.by_label.items()
            },
        }

    def __repr__(self) -> str:
        return (
            f"LabelsEvaluation({self.rows} rows, {len(self.labels)} labels: accuracy {self.accuracy:.4f}, "
            f"all labels right {self.exact:.4f}, AUC {self.auc:.4f})"
        )


def labels_evaluation(model: Model, sums: Mapping[str, Array]) -> LabelsEvaluation:
    """The evaluation of summed tallies."""
    return LabelsEvaluation(np.arange(2), sums, model.calibration is not None, model.labels)
