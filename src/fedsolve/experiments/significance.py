"""Mean and standard error over seeds, and the chi-squared test of two accuracies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Counts = tuple[int, int]
"""Test rows that a model reads correctly, and all of them."""

LEVEL = 0.05
"""Below this p-value a difference is marked."""


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error s / sqrt(n), with s from n - 1; no error for a single value."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array)))


def mean_error(values: Iterable[float]) -> tuple[float, float]:
    """The same as numbers to draw: what is not a number is left out, and nan stands where there is none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    mean, error = mean_and_error(known)
    return mean, math.nan if error is None else error


def compare(first: Sequence[Counts | None], second: Sequence[Counts | None]) -> float | None:
    """p-value that two groups of models are right equally often; None where one has no counts.

    Counts are means over the models of a group, of one test set each: adding up seeds would count every
    test row several times and call small differences certain.
    """
    known = [[counts for counts in side if counts is not None] for side in (first, second)]
    if not all(known):
        return None
    ours, theirs = (np.mean(side, axis=0).tolist() for side in known)
    return independence((ours[0], ours[1]), (theirs[0], theirs[1]))


def independence(first: tuple[float, float], second: tuple[float, float]) -> float:
    """p-value that two models are right equally often: chi-squared test of independence.

    first, second: (correct, rows). The 2 x 2 table of correct and wrong predictions is tested with
    Yates' correction. Where both are always right, or both always wrong, nothing differs: 1.
    """
    from scipy.stats import chi2_contingency  # takes a second to import; most commands need no test

    table = np.array([(correct, rows - correct) for correct, rows in (first, second)], dtype=np.float64)
    if np.any(table.sum(axis=0) == 0):
        return 1.0
    return float(chi2_contingency(table, correction=True).pvalue)
