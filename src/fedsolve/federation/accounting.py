"""What noisy releases give away together: exact accounts of Gaussian noise.

A release with sensitivity D and noise of deviation s is as hard to tell from its neighbour as N(0, 1) from
N(mu, 1), with mu = D / s (Dong, Roth and Su, "Gaussian differential privacy", 2022). Releases compose
exactly, also when each depends on those before it: mu² = sum of mu_i². And mu says which epsilon holds with
which delta (Balle and Wang, "Improving the Gaussian mechanism", 2018):

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fedsolve.errors import DataError

_LEAST, _MOST = 1e-9, 1e4
_PRECISE = 1e-13


def composed(each: Iterable[float]) -> float:
    """mu of all releases together."""
    return math.sqrt(math.fsum(mu * mu for mu in each))


def delta_of(mu: float, epsilon: float) -> float:
    """The delta with which `epsilon` holds."""
    if mu <= 0:
        return 0.0
    half, part = mu / 2, epsilon / mu
    return max(0.0, float(ndtr(half - part) - np.exp(epsilon + log_ndtr(-half - part))))


def epsilon_of(mu: float, delta: float) -> float:
    """The epsilon that holds with `delta`."""
    _check(delta)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    most = 1.0
    while delta_of(mu, most) > delta:
        most *= 2
    return float(brentq(lambda epsilon: delta_of(mu, epsilon) - delta, 0.0, most, xtol=_PRECISE))


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu with which `epsilon` holds with `delta`."""
    _check(delta)
    if not epsilon > 0 or delta_of(_MOST, epsilon) <= delta:
        raise DataError(f"epsilon must be above 0 and below {_MOST:g}; got {epsilon!r}.")
    return float(brentq(lambda mu: delta_of(mu, epsilon) - delta, _LEAST, _MOST, xtol=_PRECISE))


def _check(delta: float) -> None:
    if not 0 < delta < 1:
        raise DataError(f"delta must lie between 0 and 1; got {delta!r}.")
