"""Histograms of probabilities, in bins of equal width in the logit: sums that AUC and thresholds need.

A histogram is (2, bins): rows without and rows with the class, by the logit of the probability that they were
given for it. Probabilities of exactly 0 and exactly 1 have a bin each, the first and the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError

REACH = 16.0
"""Logits further out than this are in the outermost bin but one."""
NORMAL = 1.959963984540054
"""Standard errors to either side in a 95 % interval."""
DRAWS = 400
"""How often sums are resampled for an interval."""

_BINS = ((2, 640), (16, 320))
_LEAST_BINS = 160


def bins_for(classes: int) -> int:
    """How many bins a histogram has: fewer where there are many classes, each with a histogram."""
    return 2 + next((bins for most, bins in _BINS if classes <= most), _LEAST_BINS)


def logit_histogram(probabilities: Array, members: Array, bins: int) -> Array:
    """The histogram (2, bins) of these rows. probabilities: (rows,). members: (rows,) booleans."""
    inner = bins - 2
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities) - np.log1p(-probabilities)
    inside = np.clip(logits, -REACH, REACH)
    places = 1 + np.minimum((inside + REACH) * (inner / (2 * REACH)), inner - 1).astype(np.int64)
    places[probabilities <= 0] = 0
    places[probabilities >= 1] = bins - 1
    return np.bincount(members * bins + places, minlength=2 * bins).reshape(2, bins)


def lower_edges(bins: int) -> Array:
    """The smallest probability of every bin."""
    logits = np.linspace(-REACH, REACH, bins - 1)[:-1]
    edges: Array = np.concatenate([[0.0, 0.0], 1 / (1 + np.exp(-logits[1:])), [1.0]])
    return edges


def area(histogram: Array) -> tuple[Array, Array]:
    """Area under the ROC curve of (..., 2, bins), and how far from it that of the rows themselves can be.

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


def threshold(histogram: Array, sensitivity: float) -> float:
    """The largest edge of a bin from which on at least this share of the class's rows lies.

    Whoever calls rows of at least this probability finds that share of them, on the rows of the histogram.
    """
    if not 0 < sensitivity <= 1:
        raise DataError(f"a sensitivity is a share of rows, above 0 and at most 1; got {sensitivity!r}.")
    found = np.cumsum(histogram[1][::-1])[::-1]
    if found[0] == 0:
        raise DataError("no row of the class was held out, so no threshold can be chosen.")
    # With slack: 0.95 of 20 rows are 19 of them, whatever 0.95 * 20 rounds to.
    place = int(np.flatnonzero(found >= sensitivity * found[0] - 1e-9)[-1])
    return float(lower_edges(histogram.shape[-1])[place])


def at_threshold(histogram: Array, probability: float) -> tuple[Array, Array]:
    """Sensitivity and specificity of (..., 2, bins) where rows from this probability on are called.

    Exact where the probability is the edge of a bin, as `threshold` gives it.
    """
    bins = histogram.shape[-1]
    place = int(np.searchsorted(lower_edges(bins), probability * (1 - 1e-12)))
    place = max(place, 1) if probability > 0 else 0
    with np.errstate(invalid="ignore", divide="ignore"):
        called = histogram[..., place:].sum(axis=-1) / histogram.sum(axis=-1)
    return called[..., 1], 1 - called[..., 0]


def wilson(part: Any, whole: Any) -> tuple[Any, Any]:
    """The 95 % interval of a share of rows, which has a width also where the share is nothing or all."""
    rows = np.maximum(whole, 1)
    share, noise = part / rows, NORMAL**2 / rows
    middle = (share + noise / 2) / (1 + noise)
    reach = np.sqrt(noise * (share * (1 - share) + noise / 4)) / (1 + noise)
    return np.maximum(middle - reach, 0.0), np.minimum(middle + reach, 1.0)


def resampled(counts: Array, draws: int = DRAWS) -> Array:
    """Counts as other rows of the same kind might have given: (draws, *counts.shape), of the same total.

    The draws depend on the counts alone, so equal sums have equal intervals.
    """
    total = int(counts.sum())
    there = np.flatnonzero(counts)
    again = np.zeros((draws, counts.size), dtype=np.int64)
    if total:
        shares = counts.ravel()[there] / total
        again[:, there] = np.random.default_rng(0).multinomial(total, shares, size=draws)
    return again.reshape(draws, *counts.shape)
