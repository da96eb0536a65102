"""What an evaluation is made of: sums over rows of how a classifier's probabilities fare.

confusion    (classes, classes) rows, true class down, answer across
histogram    (classes, 2, bins) rows by the probability of each class, without and with it; of two classes, of
             the second only
reliability  (3, 15) by the probability that was told: rows, its sum, and rows of which it came true. Told is
             the probability of the answer; of two classes, that of the second.
losses       (2, 2) log loss and Brier score: sum and sum of squares over rows
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import REACH
from fedsolve.federation.messages import Term
from fedsolve.labels import encode_labels, label_matrix, regression_targets
from fedsolve.model import Model

NORMAL = 1.959963984540054
"""Standard errors to either side in a 95 % interval."""
DRAWS = 400
"""How often sums are resampled for an interval."""

_BINS = ((2, 640), (16, 320))
_LEAST_BINS = 160


_COARSE = np.array(
    [-16, -8, -6, -4.8, -4, -3.2, -2.4, -1.8, -1.2, -0.6, 0, 0.6, 1.2, 1.8, 2.4, 3.2, 4, 4.8, 6]
)
"""Lower ends, in logits, of the bins that secure sums count rows in: 20 with that of certainty."""


def logit_histogram(probabilities: Array, members: Array, bins: int, coarse: bool = False) -> Array:
    """The histogram (2, bins) of these rows. probabilities: (rows,). members: (rows,) booleans.

    coarse: rows are counted at the lower ends of 20 bins, one fixed grid for all questions.
    """
    inner = bins - 2
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities) - np.log1p(-probabilities)
    inside = np.clip(logits, -REACH, REACH)
    if coarse:
        inside = _COARSE[np.searchsorted(_COARSE, inside, side="right") - 1] + 1e-9
        probabilities = np.maximum(probabilities, 1e-300)
    places = 1 + np.minimum((inside + REACH) * (inner / (2 * REACH)), inner - 1).astype(np.int64)
    places[probabilities <= 0] = 0
    places[probabilities >= 1] = bins - 1
    return np.bincount(members * bins + places, minlength=2 * bins).reshape(2, bins)


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


RELIABILITY_BINS = 15

_LEAST = np.finfo(np.float64).eps
"""A probability of zero counts as this one in the log loss, as in scikit-learn."""


_WHOLE = ("confusion", "histogram")

COUNTS = (*_WHOLE, "reliability")
"""What a tally has numbers of rows in; of rows in cells, no probabilities are added up either."""

Tally = dict[str, Array]


def empty_tally(classes: int) -> Tally:
    """The tally of no rows. Each class has a histogram, with fewer bins if there are many classes."""
    bins = 2 + next((bins for most, bins in _BINS if classes <= most), _LEAST_BINS)
    return {
        "confusion": np.zeros((classes, classes), dtype=np.int64),
        "histogram": np.zeros((1 if classes == 2 else classes, 2, bins), dtype=np.int64),
        "reliability": np.zeros((3, RELIABILITY_BINS)),
        "losses": np.zeros((2, 2)),
    }


def truth_of(model: Model, labels: Array) -> Array:
    """Labels in the form of a model's answers: positions (rows,), 0 and 1 (rows, labels), or targets."""
    labels = model.truths(labels)
    if model.judged is not None:
        return encode_labels(labels, model.judged)
    if model.labels:
        return label_matrix(labels, model.labels).astype(np.int64)
    return regression_targets(labels, model.outputs).astype(np.float64)


def tally(
    probabilities: Array, answers: Array, codes: Array, coarse: bool = False, sums: Tally | None = None
) -> Tally:
    """The tally of these rows: probabilities (rows, classes); answers and true classes by position.

    coarse: in the few bins of secure sums, whose probabilities count as their middle.
    sums: that of other rows, to which these are added.
    """
    classes = probabilities.shape[1]
    sums = empty_tally(classes) if sums is None else sums
    np.add.at(sums["confusion"], (codes, answers), 1)
    bins = sums["histogram"].shape[-1]
    for place, number in enumerate((1,) if classes == 2 else range(classes)):
        sums["histogram"][place] += logit_histogram(probabilities[:, number], codes == number, bins, coarse)
    if classes == 2:
        told, true = probabilities[:, 1], codes == 1
    else:
        told, true = probabilities.max(axis=1), probabilities.argmax(axis=1) == codes
    places = np.minimum((told * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    if coarse:  # a sum over a bin of one row would be its probability
        told = (places + 0.5) / RELIABILITY_BINS
    for row, weights in enumerate((None, told, true)):
        sums["reliability"][row] += np.bincount(places, weights, minlength=RELIABILITY_BINS)
    given = np.take_along_axis(probabilities, codes[:, None], axis=1)[:, 0]
    # |p - y|², y being 1 at the true class: of two classes, by custom, that of one of them.
    squares = (np.sum(probabilities**2, axis=1) - 2 * given + 1) / (2 if classes == 2 else 1)
    for place, losses in enumerate((-np.log(np.maximum(given, _LEAST)), squares)):
        sums["losses"][place] += losses.sum(), (losses**2).sum()
    return sums


def tally_term(sums: Tally, rows: int) -> Term:
    """Sums of an evaluation as clients send them; counts of rows take half the bytes where that is exact."""
    narrow = np.float32 if rows < 2**24 else np.float64
    counts = {name: sums[name].astype(narrow) for name in _WHOLE if name in sums}
    return Term({**sums, **counts}, {"rows": rows})


def tally_from(arrays: Tally) -> Tally:
    """Sums of an evaluation from a total, with counts of rows rounded to whole numbers again."""
    whole = {name: np.rint(arrays[name]).astype(np.int64) for name in _WHOLE if name in arrays}
    if "reliability" in arrays:
        reliability = whole["reliability"] = arrays["reliability"].copy()
        reliability[..., [0, 2], :] = np.rint(reliability[..., [0, 2], :])
    return {**arrays, **whole}
