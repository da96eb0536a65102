"""The one way out of a private run: every array has a declared bound, and leaves with noise.

A method says beside a client's step what one row changes at most (`step(kind, releases={"gram": 1.0})`, in
Euclidean norm; of a symmetric matrix each number off the diagonal counts twice). An opening with "privacy"
makes a run private: a step that declares nothing, and an array or a count that is not declared, are refused.

Numbers are rounded to a grid, and noise is drawn on that grid from the discrete Gaussian distribution, by
whole numbers alone (Canonne, Kamath and Steinke, "The discrete Gaussian", 2020): the rounding of floats shows
nothing. In secure sums every client adds its share before the masks, and `honest` shares are as much as one
server's noise. The grid has 2^24 steps to a share's deviation. The bound allows for rounding to it; from the
continuous Gaussian of the account a million numbers differ by less than 1e-9 in total variation.

The account: a release with sensitivity D and noise of deviation s is as hard to tell from its neighbour as
N(0, 1) from N(mu, 1), with mu = D / s (Dong, Roth and Su, "Gaussian differential privacy", 2022). Releases
compose exactly, also when each depends on those before it: mu² = sum of mu_i². And mu says which epsilon
holds with which delta (Balle and Wang, "Improving the Gaussian mechanism", 2018):

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr

from fedsolve.arrays import Array
from fedsolve.errors import DataError, TermError
from fedsolve.federation.messages import Chain, Request, Term, Total, pack_triangle, unpack_triangle

STEPS = 1 << 24
"""Steps of the grid to the deviation of one share of the noise."""

_FARTHEST = 180
"""Deviations beyond which nothing is drawn: e^-16,200 is as good as never, and squares fit into 64 bits."""

_LEAST, _MOST, _PRECISE = 1e-9, 1e4, 1e-13

Random = Callable[[int], bytes]


@dataclass(frozen=True)
class NoisyAnswer:
    """What one answer of a private run may show.

    bounds: by array, the most that one unit (a row, or a whole site) changes it. mu: what the answer costs.
    honest: share of the sites asked whose noise must be in the sum. unit: "row" or "site".
    """

    bounds: Mapping[str, float]
    mu: float
    honest: float = 1.0
    unit: str = "row"

    def shares(self, sites: int) -> int:
        """How many shares of noise, of so many sites, are as much as the account says; one may be lost."""
        return max(1, min(math.ceil(self.honest * sites - 1e-9), sites - 1))

    def deviation(self, name: str, size: int, shares: int = 1) -> float:
        """The deviation of all noise on an array of so many numbers."""
        own = self.mu / math.sqrt(len(self.bounds)) - math.sqrt(size / shares) / STEPS
        if own <= 0:
            raise DataError(f"'{name}' has too many numbers for so little budget (mu {self.mu:.2g}).")
        return self.bounds[name] / own

    def check(self, term: Term) -> Term:
        """A site's term, if it holds what is declared and nothing else; of a whole site its bound at most."""
        self._check_names(term)
        if self.unit == "site":
            for name, array in term.arrays.items():
                size = float(np.linalg.norm(flat_numbers(array, name in term.symmetric)))
                if size > self.bounds[name]:
                    term.arrays[name] = array * (self.bounds[name] / size)
        return term

    def _check_names(self, term: Term) -> None:
        found = {*term.arrays, *term.counts, *term.factors}
        if found != {*self.bounds} or term.counts or term.factors:
            undeclared = sorted((found ^ {*self.bounds}) | {*term.counts, *term.factors})
            raise TermError(
                f"{undeclared} leaves otherwise than the method declares, so no noise would cover it. "
                "Nothing is sent. Declare its bound beside the step (releases=)."
            )

    def in_steps(self, term: Term, sites: int = 1, noise: Callable[[int], Array] = np.zeros) -> Term:
        """The term in steps of the grid; noise: makes so many whole numbers that are added."""
        self._check_names(term)
        shares, arrays = self.shares(sites), {}
        for name, array in term.arrays.items():
            symmetric = name in term.symmetric
            flat = flat_numbers(array, symmetric)
            step = self.deviation(name, flat.size, shares) / math.sqrt(shares) / STEPS
            flat = np.rint(flat / step) + noise(flat.size)
            arrays[name] = unpack_triangle(flat) if symmetric else flat.reshape(array.shape)
        return Term(arrays, {}, term.symmetric)

    def noised(self, term: Term, sites: int = 1, random: Random = secrets.token_bytes) -> Term:
        """The term in steps of the grid, with one share of the noise."""
        return self.in_steps(term, sites, lambda size: discrete_gaussian(STEPS, size, random))

    def measured(self, term: Term, sites: int = 1) -> Term:
        """A sum of noised terms in the units of the method."""
        shares, arrays = self.shares(sites), {}
        for name, array in term.arrays.items():
            size = flat_numbers(array, name in term.symmetric).size
            step = self.deviation(name, size, shares) / math.sqrt(shares) / STEPS
            arrays[name] = np.asarray(array, dtype=np.float64) * step
            if name in term.symmetric:
                arrays[name] *= np.where(np.eye(len(array), dtype=bool), 1.0, math.sqrt(0.5))
        return Term(arrays, {}, term.symmetric)


def privacy_of(chain: Chain) -> Mapping[str, Any] | None:
    """What the opening of a run promises of noise; None where it is not private."""
    found = chain.opening.get("privacy")
    return found if isinstance(found, Mapping) else None


def release_of(request: Request, chain: Chain, bounds: Mapping[str, float] | None) -> NoisyAnswer | None:
    """What this request may release; None in runs without noise. Refused where nothing is declared."""
    privacy = privacy_of(chain) if request.position else None
    if privacy is None:
        if bounds is not None:  # disclosure rules leave these to the noise, which there is none of
            raise TermError(f"'{request.kind}' is answered with noise, and this run is not private.")
        return None
    mu = request.note.get("mu")
    if bounds is None or not isinstance(mu, float) or not mu > 0:
        raise TermError(
            f"'{request.kind}' cannot be asked in a private run: nothing says how much one row changes its "
            "answer. Leave out class weights, calibration and choices, or train without epsilon."
        )
    if mu > 1.000001 * mu_of(privacy["epsilon"], privacy["delta"]):
        raise TermError(f"'{request.kind}' asks for more than the run's epsilon {privacy['epsilon']:g}.")
    most = float(privacy["rows"]) if privacy["unit"] == "site" else 1.0
    return NoisyAnswer({n: most * b for n, b in bounds.items()}, mu, privacy["honest"], privacy["unit"])


def released(request: Request, chain: Chain, bounds: Mapping[str, float] | None, total: Total) -> Total:
    """A total with its noise, which is added here, unless the sites added theirs."""
    release = release_of(request, chain, bounds)
    if release is None:
        raise TermError(f"'{request.kind}' is no question of a private run.")
    term = total.term if total.noised else release.noised(total.term)
    sites = total.noised or 1
    shares, present = release.shares(sites), len(total.cohort) if total.noised else 1
    sizes = {n: flat_numbers(array, n in term.symmetric).size for n, array in term.arrays.items()}
    spread = math.sqrt(present / shares)
    noise = {name: spread * release.deviation(name, size, shares) for name, size in sizes.items()}
    return replace(total, term=release.measured(term, sites), noise=noise)


def flat_numbers(array: Array, symmetric: bool) -> Array:
    """The numbers that travel, each as often as it counts in the norm of a symmetric matrix."""
    if not symmetric:
        return np.asarray(array, dtype=np.float64).reshape(-1)
    weights = np.where(np.eye(len(array), dtype=bool), 1.0, math.sqrt(2.0))
    return pack_triangle(np.asarray(array, dtype=np.float64) * weights)


# -- the account ----------------------------------------------------------------------------------


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
    return _root(lambda epsilon: delta_of(mu, epsilon) - delta, 0.0, most)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu with which `epsilon` holds with `delta`."""
    _check(delta)
    if not epsilon > 0 or delta_of(_MOST, epsilon) <= delta:
        raise DataError(f"epsilon must be above 0 and below {_MOST:g}; got {epsilon!r}.")
    return _root(lambda mu: delta_of(mu, epsilon) - delta, _LEAST, _MOST)


def _root(gap: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # takes long to import; only noise needs it

    return float(brentq(gap, low, high, xtol=_PRECISE))


def _check(delta: float) -> None:
    if not 0 < delta < 1:
        raise DataError(f"delta must lie between 0 and 1; got {delta!r}.")


# -- the distribution ------------------------------------------------------------------------------


def discrete_gaussian(scale: int, size: int, random: Random = secrets.token_bytes) -> Array:
    """Whole numbers k, each with probability proportional to exp(-k² / (2 scale²)), exactly."""
    if not 0 < scale <= STEPS:
        raise DataError(f"the scale must lie between 1 and {STEPS:,}; got {scale!r}.")
    found, lacking = np.empty(size, dtype=np.int64), np.arange(size)
    while len(lacking):
        drawn, kept = _laplace(scale, len(lacking), random)
        away = np.abs(drawn) - scale
        kept &= away < _FARTHEST * scale
        square = np.where(kept, away, 0).astype(np.uint64) ** 2
        kept &= _with_chance_exp(square, 2 * scale * scale, random)
        found[lacking[kept]] = drawn[kept]
        lacking = lacking[~kept]
    return found


def _laplace(scale: int, size: int, random: Random) -> tuple[Array, Array]:
    """Whole numbers with probability proportional to exp(-|k| / scale), and which of them count."""
    low = _below(scale, size, random)
    kept = _with_chance_exp(low, scale, random)
    times, going = np.zeros(size, dtype=np.int64), np.flatnonzero(kept)
    while len(going):
        going = going[_with_chance_exp(np.full(len(going), 1, dtype=np.uint64), 1, random)]
        times[going] += 1
    value = low.astype(np.int64) + scale * np.minimum(times, 2 * _FARTHEST)
    negative = _below(2, size, random) == 1
    return np.where(negative, -value, value), kept & ~(negative & (value == 0))


def _with_chance_exp(over: Array, under: int, random: Random) -> Array:
    """True with probability exp(-over / under), exactly."""
    wholes, rest = over // np.uint64(under), over % np.uint64(under)
    true = np.ones(len(over), dtype=bool)
    going = np.flatnonzero(wholes)
    while len(going):
        lasts = _chance_of_fraction(np.full(len(going), 1, dtype=np.uint64), 1, random)
        true[going[~lasts]] = False
        wholes[going] -= np.uint64(1)
        going = going[lasts]
        going = going[wholes[going] > 0]
    true[true] = _chance_of_fraction(rest[true], under, random)
    return true


def _chance_of_fraction(over: Array, under: int, random: Random) -> Array:
    """True with probability exp(-over / under) where over <= under: the parity of a run of rarer coins."""
    true, going, rank = np.zeros(len(over), dtype=bool), np.arange(len(over)), 1
    while len(going):
        hit = _below(under * rank, len(going), random) < over[going]
        true[going[~hit]] = rank % 2 == 1
        going, rank = going[hit], rank + 1
    return true


def _below(limit: int, size: int, random: Random) -> Array:
    """Whole numbers from 0, all below the limit alike."""
    mask = np.uint64((1 << (limit - 1).bit_length()) - 1)
    found, lacking = np.empty(size, dtype=np.uint64), np.arange(size)
    while len(lacking):
        drawn = np.frombuffer(random(8 * len(lacking)), dtype="<u8") & mask
        kept = drawn < np.uint64(limit)
        found[lacking[kept]] = drawn[kept]
        lacking = lacking[~kept]
    return found
