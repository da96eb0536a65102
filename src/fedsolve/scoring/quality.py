"""How good a classifier is, from sums over rows alone: `Evaluation`, `LabelsEvaluation`, `Confusion`.

confusion    (classes, classes) rows, true class down, answer across
histogram    (classes, 2, bins) rows by the probability of each class, without and with it; of two classes, of
             the second only
reliability  (3, 15) by the probability that was told: rows, its sum, and rows of which it came true. Told is
             the probability of the answer; of two classes, that of the second.
losses       (2, 2) log loss and Brier score: sum and sum of squares over rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import lower_edges
from fedsolve.errors import DataError
from fedsolve.labels import encode_labels, label_matrix, regression_targets

if TYPE_CHECKING:
    from fedsolve.model import Model

NORMAL = 1.959963984540054
"""Standard errors to either side in a 95 % interval."""
DRAWS = 400
"""How often sums are resampled for an interval."""
RELIABILITY_BINS = 15


@dataclass(frozen=True)
class Threshold:
    """From which probability of a class on rows are called, so that a wanted share of its rows is found.

    sensitivity, specificity: what it reaches on the rows of the evaluation; wanted was asked for, and the
    probability chosen, on rows that were held out of training.
    """

    positive: Any
    wanted: float
    probability: float
    sensitivity: float
    specificity: float
    intervals: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Evaluation:
    """Accuracy, AUC, losses and calibration of a classifier, with intervals; see the module for the sums.

    Intervals are those of other rows of the same kind: the summed histograms are resampled (`resampled`). Of
    shares of rows they are Wilson's; of log loss and Brier score they follow from the sums of squares. AUC of
    more than two classes is the mean over classes, each against the others, and its interval resamples each
    class by itself.
    """

    classes: Array
    sums: Mapping[str, Array]
    calibrated: bool = False

    @property
    def confusion(self) -> Array:
        """(classes, classes) rows, true class down, answer across."""
        return self.sums["confusion"]

    @property
    def rows(self) -> int:
        return int(self.confusion.sum())

    def measures(self) -> dict[str, float]:
        """The numbers by name, without tables."""
        confusion, losses = self.sums["confusion"], self.sums["losses"]
        rows = max(1, int(confusion.sum()))
        balanced, (auc, bound), ece = _means(
            confusion, np.array(area(self.sums["histogram"])), self.sums["reliability"]
        )
        return {
            "accuracy": float(np.trace(confusion) / rows),
            "balanced_accuracy": float(balanced),
            "auc": float(auc),
            "auc_bound": float(bound),
            "log_loss": float(losses[0, 0] / rows),
            "brier": float(losses[1, 0] / rows),
            "ece": float(ece),
        }

    @property
    def accuracy(self) -> float:
        return self.measures()["accuracy"]

    @property
    def balanced_accuracy(self) -> float:
        """Mean over the classes that have rows of the share of their rows that is right."""
        return self.measures()["balanced_accuracy"]

    @property
    def auc(self) -> float:
        """Area under the ROC curve, of the second of two classes, or the mean over classes with rows."""
        return self.measures()["auc"]

    @property
    def auc_bound(self) -> float:
        """How far the AUC of the rows themselves can be from `auc`."""
        return self.measures()["auc_bound"]

    @property
    def log_loss(self) -> float:
        return self.measures()["log_loss"]

    @property
    def brier(self) -> float:
        """Mean of |p - y|² over all classes; of two classes, of the second alone."""
        return self.measures()["brier"]

    @property
    def ece(self) -> float:
        """Expected calibration error: mean over rows of |told - came true| in 15 bins of what was told."""
        return self.measures()["ece"]

    @property
    def class_aucs(self) -> Array:
        """AUC of each class against the others; of two classes, of the second alone."""
        return area(self.sums["histogram"])[0]

    @property
    def calibration_table(self) -> list[dict[str, Any]]:
        """Bins with rows: from, to, rows, mean probability told, and the share of which it came true."""
        edges = np.linspace(0, 1, RELIABILITY_BINS + 1)
        return [
            {"from": low, "to": high, "rows": int(rows), "told": told / rows, "true": true / rows}
            for low, high, (rows, told, true) in zip(
                edges[:-1].tolist(), edges[1:].tolist(), self.sums["reliability"].T.tolist(), strict=True
            )
            if rows
        ]

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals by the name of the measure."""
        confusion = resampled(self.confusion)
        areas = [area(resampled(histogram))[0] for histogram in self.sums["histogram"]]
        rows, told, true = self.sums["reliability"]
        means = np.divide(told, rows, out=np.zeros_like(told), where=rows > 0)
        cells = resampled(np.rint(np.stack([rows - true, true])).astype(np.int64))
        again = cells.sum(axis=1)
        reliability = np.stack([again, again * means, cells[:, 1]], axis=1)
        balanced, auc, ece = _means(confusion, np.stack(areas, axis=-1), reliability)
        found = {
            "accuracy": share_interval(np.trace(self.confusion), self.rows),
            "balanced_accuracy": _between(balanced),
            "auc": _between(auc),
            "ece": _between(ece),
        }
        for place, name in enumerate(("log_loss", "brier")):
            total, square = self.sums["losses"][place]
            count = max(1, self.rows)
            error = NORMAL * np.sqrt(max(0.0, square / count - (total / count) ** 2) / count)
            found[name] = (float(total / count - error), float(total / count + error))
        return found

    @property
    def rates(self) -> dict[str, float]:
        """Of two classes: how many rows of the first are called the second, and the reverse; and the mean
        probability of the second beside its share of the rows.
        """
        return {name: part / whole if whole else np.nan for name, (part, whole) in self._rates().items()}

    @property
    def rate_intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of `rates`, but for the mean probability, which is no share of rows."""
        shares = [(name, *share) for name, share in self._rates().items() if name != "predicted_share"]
        return {n: share_interval(part, whole) if whole else (np.nan, np.nan) for n, part, whole in shares}

    def _rates(self) -> dict[str, tuple[float, float]]:
        """Parts and wholes."""
        if len(self.classes) != 2:
            return {}
        (right, false), (missed, found) = self.confusion.tolist()
        _, told, true = self.sums["reliability"].sum(axis=1).tolist()
        return {
            "false_positive_rate": (false, right + false),
            "false_negative_rate": (missed, missed + found),
            "predicted_share": (told, self.rows),
            "observed_share": (true, self.rows),
        }

    def at(self, probability: float, positive: Any = None) -> tuple[float, float]:
        """Sensitivity and specificity where rows of at least this probability are called.

        Exact where the probability is the edge of a bin, as `threshold` gives it.
        """
        histogram = self._histogram(positive)
        place = int(np.searchsorted(lower_edges(histogram.shape[-1]), probability * (1 - 1e-12)))
        place = max(place, 1) if probability > 0 else 0
        with np.errstate(invalid="ignore", divide="ignore"):
            without, called = histogram[:, place:].sum(axis=-1) / histogram.sum(axis=-1)
        return float(called), float(1 - without)

    def threshold(self, probability: float, wanted: float) -> Threshold:
        """What a threshold that was chosen on other rows reaches here; of two classes, for the second."""
        reached = self.at(probability)
        of_class = self._histogram(None).sum(axis=1)[::-1]
        names = ("sensitivity", "specificity")
        intervals = {
            name: share_interval(share * rows, rows) if rows else (np.nan, np.nan)
            for name, share, rows in zip(names, reached, of_class, strict=True)
        }
        return Threshold(self.classes[1].item(), wanted, probability, *reached, intervals)

    def roc(self, positive: Any = None) -> tuple[Array, Array]:
        """False and true positive rates at every edge of a bin, from (0, 0) to (1, 1)."""
        histogram = self._histogram(positive)[:, ::-1]
        rates = np.cumsum(histogram, axis=1) / np.maximum(1, histogram.sum(axis=1, keepdims=True))
        return np.concatenate([[0.0], rates[0]]), np.concatenate([[0.0], rates[1]])

    def _histogram(self, positive: Any) -> Array:
        known = self.classes.tolist()
        if positive is None and len(known) == 2:
            positive = known[1]
        if positive not in known:
            raise DataError(f"which class? Give one of {known[:10]}; got {positive!r}.")
        place = known.index(positive)
        chosen: Array = self.sums["histogram"][place if len(known) > 2 else 0]
        # Of the first of two classes, probability and membership are those of the second turned round.
        return chosen[::-1, ::-1] if len(known) == 2 and place == 0 else chosen

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values, NaN where a measure does not exist."""
        return {
            "rows": self.rows,
            "calibrated": self.calibrated,
            **self.measures(),
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "class_aucs": self.class_aucs.tolist(),
            "calibration_table": self.calibration_table,
            "confusion": self.confusion.tolist(),
            "classes": self.classes.tolist(),
        }

    def __repr__(self) -> str:
        return (
            f"Evaluation({self.rows} rows: accuracy {self.accuracy:.4f}, AUC {self.auc:.4f} "
            f"± {self.auc_bound:.1g}, log loss {self.log_loss:.4f}, ECE {self.ece:.4f})"
        )


@dataclass(frozen=True)
class LabelsEvaluation(Evaluation):
    """Measures of several labels a row: means over the labels that have them, and each label by its name."""

    labels: tuple[str, ...] = ()

    @cached_property
    def by_label(self) -> dict[str, Evaluation]:
        """The evaluation of each label by itself, of the classes 0 and 1."""
        return {
            name: Evaluation(
                self.classes, {key: sums[place] for key, sums in self.sums.items() if key != "exact"}
            )
            for place, name in enumerate(self.labels)
        }

    @property
    def rows(self) -> int:
        return int(self.confusion[0].sum())

    @property
    def exact(self) -> float:
        """The share of rows of which every label is right."""
        return float(self.sums["exact"][0] / max(1, self.rows))

    def measures(self) -> dict[str, float]:
        """Means over the labels, of an AUC over those that some rows have and others lack; and `exact`."""
        each = [one.measures() for one in self.by_label.values()]
        found = np.array([[*one.values()] for one in each])
        there = np.isfinite(found)
        with np.errstate(invalid="ignore"):
            means = np.where(there, found, 0.0).sum(axis=0) / there.sum(axis=0)
        return {"exact": self.exact, **dict(zip(each[0], means.tolist(), strict=True))}

    def thresholds(self, chosen: Array, wanted: float) -> dict[str, Threshold]:
        """What thresholds that were chosen on other rows reach here, by label."""
        each = zip(self.by_label.items(), chosen.tolist(), strict=True)
        return {name: one.threshold(probability, wanted) for (name, one), probability in each}

    def as_dict(self) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Confusion:
    """counts: (classes, classes) numbers of rows, true class down, predicted class across."""

    classes: Array
    counts: Array

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


def truth_of(model: Model, labels: Array) -> Array:
    """Labels in the form of a model's answers: positions (rows,), 0 and 1 (rows, labels), or targets."""
    labels = model.truths(labels)
    if model.judged is not None:
        return encode_labels(labels, model.judged)
    if model.labels:
        return label_matrix(labels, model.labels).astype(np.int64)
    return regression_targets(labels, model.outputs).astype(np.float64)


def area(histogram: Array) -> tuple[Array, Array]:
    """Area under the ROC curve of (..., 2, bins), and how far the exact area can be from it.

    Within a bin the order of the rows is not known: pairs in one bin count half, and the bound is what they
    could add or take away. NaN where a class has no rows, or nothing else has.
    """
    without, with_ = (histogram[..., side, :].astype(np.float64) for side in (0, 1))
    below = np.cumsum(without, axis=-1) - without
    pairs = with_.sum(axis=-1) * without.sum(axis=-1)
    equal = with_ * without
    with np.errstate(invalid="ignore", divide="ignore"):
        value = (np.sum(with_ * below, axis=-1) + equal.sum(axis=-1) / 2) / pairs
        # Equal probabilities of 0, or of 1, are known to be equal.
        bound = equal[..., 1:-1].sum(axis=-1) / 2 / pairs
    return value, bound


def wilson(part: Any, whole: Any) -> tuple[Any, Any]:
    """The 95 % interval of a share of rows; it has a width even if the share is 0 or 1."""
    rows = np.maximum(whole, 1)
    share, noise = part / rows, NORMAL**2 / rows
    middle = (share + noise / 2) / (1 + noise)
    reach = np.sqrt(noise * (share * (1 - share) + noise / 4)) / (1 + noise)
    return np.maximum(middle - reach, 0.0), np.minimum(middle + reach, 1.0)


def resampled(counts: Array, draws: int = DRAWS) -> Array:
    """Counts that other rows of the same kind might have given: (draws, *counts.shape), with the same total.

    The draws depend on the counts alone, so equal sums have equal intervals.
    """
    total = int(counts.sum())
    there = np.flatnonzero(counts)
    again = np.zeros((draws, counts.size), dtype=np.int64)
    if total:
        shares = counts.ravel()[there] / total
        again[:, there] = np.random.default_rng(0).multinomial(total, shares, size=draws)
    return again.reshape(draws, *counts.shape)


def _ratio(part: Array, whole: Array) -> Array:
    return np.asarray(np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0))


def _means(confusion: Array, areas: Array, reliability: Array) -> tuple[Array, Array, Array]:
    """Balanced accuracy, mean area and ECE, of these sums or of several like them along the first axis.

    The area is a mean over the classes that have rows, and of which others have rows.
    """
    support = confusion.sum(axis=-1)
    there = support > 0
    recalls = np.diagonal(confusion, axis1=-2, axis2=-1) / np.maximum(1, support)
    balanced = np.sum(recalls * there, axis=-1) / np.maximum(1, there.sum(axis=-1))
    known = ~np.isnan(areas)
    with np.errstate(invalid="ignore"):
        macro = np.where(known, areas, 0).sum(axis=-1) / known.sum(axis=-1)
    rows, told, true = (reliability[..., place, :] for place in range(3))
    return balanced, macro, np.abs(told - true).sum(axis=-1) / np.maximum(1, rows.sum(axis=-1))


def share_interval(part: float, rows: float) -> tuple[float, float]:
    """The 95 % interval of a share of rows."""
    low, high = wilson(part, rows)
    return float(low), float(high)


def _between(values: Array) -> tuple[float, float]:
    outside = (1 - 0.95) / 2
    low, high = np.quantile(values, (outside, 1 - outside))  # NaN where a class has no rows
    return float(low), float(high)
