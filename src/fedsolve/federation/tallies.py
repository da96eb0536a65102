"""What an evaluation is made of: sums over rows of how a classifier's probabilities fare.

confusion    (classes, classes) rows, true class down, answer across
histogram    (classes, 2, bins) rows by the probability of each class, without and with it; of two classes, of
             the second only
reliability  (3, 15) by the probability that was told: rows, its sum, and rows of which it came true. Told is
             the probability of the answer; of two classes, that of the second.
losses       (2, 2) log loss and Brier score: sum and sum of squares over rows
"""

from __future__ import annotations

import numpy as np

from fedsolve.container import Array
from fedsolve.federation.messages import Term
from fedsolve.histograms import bins_for, logit_histogram

RELIABILITY_BINS = 15

_LEAST = np.finfo(np.float64).eps
"""A probability of zero counts as this one in the log loss, as in scikit-learn."""


def empty_tally(classes: int) -> dict[str, Array]:
    """The tally of no rows."""
    return {
        "confusion": np.zeros((classes, classes), dtype=np.int64),
        "histogram": np.zeros((1 if classes == 2 else classes, 2, bins_for(classes)), dtype=np.int64),
        "reliability": np.zeros((3, RELIABILITY_BINS)),
        "losses": np.zeros((2, 2)),
    }


def tally(probabilities: Array, answers: Array, codes: Array) -> dict[str, Array]:
    """The tally of these rows: probabilities (rows, classes); answers and true classes by position."""
    classes = probabilities.shape[1]
    sums = empty_tally(classes)
    np.add.at(sums["confusion"], (codes, answers), 1)
    bins = sums["histogram"].shape[-1]
    for place, number in enumerate((1,) if classes == 2 else range(classes)):
        sums["histogram"][place] = logit_histogram(probabilities[:, number], codes == number, bins)
    if classes == 2:
        told, true = probabilities[:, 1], codes == 1
    else:
        told, true = probabilities.max(axis=1), probabilities.argmax(axis=1) == codes
    places = np.minimum((told * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    for row, weights in enumerate((None, told, true)):
        sums["reliability"][row] = np.bincount(places, weights, minlength=RELIABILITY_BINS)
    given = np.take_along_axis(probabilities, codes[:, None], axis=1)[:, 0]
    # |p - y|², y being 1 at the true class: of two classes, by custom, that of one of them.
    squares = (np.sum(probabilities**2, axis=1) - 2 * given + 1) / (2 if classes == 2 else 1)
    for place, losses in enumerate((-np.log(np.maximum(given, _LEAST)), squares)):
        sums["losses"][place] = losses.sum(), (losses**2).sum()
    return sums


def tally_term(sums: dict[str, Array], rows: int) -> Term:
    """A tally as a client sends it: numbers of rows in half the bytes where that loses none."""
    narrow = np.float32 if rows < 2**24 else np.float64
    counts = {name: sums[name].astype(narrow) for name in ("confusion", "histogram")}
    return Term({**sums, **counts}, {"rows": rows})


def tally_from(arrays: dict[str, Array]) -> dict[str, Array]:
    """A tally of a total; rows are whole again, also after a sum in a ring."""
    whole = {name: np.rint(arrays[name]).astype(np.int64) for name in ("confusion", "histogram")}
    reliability = arrays["reliability"].copy()
    reliability[[0, 2]] = np.rint(reliability[[0, 2]])
    return {**whole, "reliability": reliability, "losses": arrays["losses"]}
