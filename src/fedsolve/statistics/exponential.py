"""The exponential families of generalised linear models, and their links.

A row has the mean mu = g⁻¹(eta), eta = x b + offset, and the variance phi V(mu) / weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, gammaln, logit, ndtr, ndtri, xlog1py, xlogy

from fedsolve.arrays import Array

Function = Callable[[Array], Array]

_TINY = 2.0**-53
"""How near to 0 and 1 a probability gets."""


class MeanLink(NamedTuple):
    """g, its inverse, and the inverse's first and second derivative, all but g as functions of eta."""

    link: Function
    mean: Function
    slope: Function
    bend: Function


class Family(NamedTuple):
    """What a family says of an outcome."""

    variance: Function
    variance_slope: Function
    kernel: Callable[[Array, Array], Array]  # the log-likelihood's part with (y, mu), at weight 1
    rest: Callable[[Array, Array, float], Array]  # the part without, from (y, weight, phi)
    estimated: bool  # whether phi is
    links: tuple[str, ...]  # those that fit, the canonical one first
    allowed: str  # what outcomes may be
    fits: Callable[[Array], Any]  # whether they are
    domain: Callable[[Array], Any]  # whether means can be

    def deviance(self, y: Array, mean: Array) -> Array:
        """Of every row, at weight 1."""
        return 2 * (self.kernel(y, y) - self.kernel(y, mean))

    def log_likelihood(self, y: Array, mean: Array, weight: Array, phi: float) -> Array:
        """Of every row; weight 0 counts as 1 where it would divide."""
        known = np.where(weight > 0, weight, 1.0)
        return weight / (phi if self.estimated else 1.0) * self.kernel(y, mean) + self.rest(y, known, phi)


def _density(x: Array) -> Array:
    return np.asarray(np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi))


def _within(mean: Function) -> Function:
    return lambda eta: np.clip(mean(eta), _TINY, 1 - _TINY)


def _logit_slope(eta: Array) -> Array:
    return np.asarray(expit(eta) * expit(-eta))


def _cloglog_slope(eta: Array) -> Array:
    return np.asarray(np.exp(eta - np.exp(eta)))


LINKS: dict[str, MeanLink] = {
    "identity": MeanLink(lambda m: m, lambda e: e, np.ones_like, np.zeros_like),
    "log": MeanLink(np.log, np.exp, np.exp, np.exp),
    "logit": MeanLink(
        logit, _within(expit), _logit_slope, lambda e: _logit_slope(e) * (expit(-e) - expit(e))
    ),
    "probit": MeanLink(ndtri, _within(ndtr), _density, lambda e: -e * _density(e)),
    "cloglog": MeanLink(
        lambda m: np.log(-np.log1p(-m)),
        _within(lambda e: -np.expm1(-np.exp(e))),
        _cloglog_slope,
        lambda e: _cloglog_slope(e) * (1 - np.exp(e)),
    ),
    "inverse": MeanLink(lambda m: 1 / m, lambda e: 1 / e, lambda e: -1 / e**2, lambda e: 2 / e**3),
    "inverse-squared": MeanLink(
        lambda m: m**-2, lambda e: e**-0.5, lambda e: -0.5 * e**-1.5, lambda e: 0.75 * e**-2.5
    ),
    "sqrt": MeanLink(np.sqrt, np.square, lambda e: 2 * e, lambda e: np.full_like(e, 2)),
}


def _ways(y: Array, w: Array, phi: float) -> Array:
    """Of w trials of which the share y succeeds, as R has it."""
    return np.asarray(gammaln(w + 1) - gammaln(w * y + 1) - gammaln(w * (1 - y) + 1))


def _gamma(y: Array, w: Array, phi: float) -> Array:
    return np.asarray(w / phi * np.log(w / phi * y) - gammaln(w / phi) - np.log(y))


def _positive(m: Array) -> Any:
    return (m > 0) & np.isfinite(m)


_POSITIVE: Any = ("above 0", lambda y: y > 0, _positive)
_FAMILIES: dict[str, tuple[Any, ...]] = {
    "gaussian": (
        *(np.ones_like, np.zeros_like, lambda y, m: -0.5 * (y - m) ** 2),
        *(lambda y, w, phi: -0.5 * np.log(2 * np.pi * phi / w), True),
        *(("identity", "log", "inverse"), "any number", np.isfinite, np.isfinite),
    ),
    "binomial": (
        *(lambda m: m * (1 - m), lambda m: 1 - 2 * m, lambda y, m: xlogy(y, m) + xlog1py(1 - y, -m)),
        *(_ways, False, ("logit", "probit", "cloglog", "log", "identity"), "between 0 and 1"),
        *(lambda y: (y >= 0) & (y <= 1), lambda m: (m > 0) & (m < 1)),
    ),
    "poisson": (
        *(lambda m: m, np.ones_like, lambda y, m: xlogy(y, m / np.maximum(y, 1e-300)) - (m - y)),
        *(lambda y, w, phi: w * (xlogy(y, y) - y - gammaln(y + 1)), False),
        *(("log", "identity", "sqrt"), "a count of at least 0", lambda y: y >= 0, _positive),
    ),
    "gamma": (
        *(lambda m: m**2, lambda m: 2 * m, lambda y, m: -np.log(m) - y / m, _gamma, True),
        *(("inverse", "log", "identity"), *_POSITIVE),
    ),
    "inverse-gaussian": (
        *(lambda m: m**3, lambda m: 3 * m**2, lambda y, m: -0.5 * (y - m) ** 2 / (y * m**2)),
        *(lambda y, w, phi: -0.5 * np.log(phi / w * y**3 * 2 * np.pi), True),
        *(("inverse-squared", "inverse", "log", "identity"), *_POSITIVE),
    ),
}
FAMILIES = {name: Family(*parts) for name, parts in _FAMILIES.items()}

RATIOS = {
    ("binomial", "logit"): "odds ratio",
    ("poisson", "log"): "rate ratio",
    ("binomial", "log"): "risk ratio",
}
"""What exp(coefficient) is called, by family and link; "ratio" of other log links."""
