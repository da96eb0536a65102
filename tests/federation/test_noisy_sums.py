"""Accounts of Gaussian noise, the discrete Gaussian, and the one way out of a private run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedsolve.errors import DataError, TermError
from fedsolve.federation.messages import Term
from fedsolve.federation.noisy_sums import (
    STEPS,
    NoisyAnswer,
    composed,
    delta_of,
    discrete_gaussian,
    epsilon_of,
    mu_of,
)

PLD = {
    (1.0,): 4.37717810002493,
    (0.5,): 9.99725615024243,
    (2.0,): 1.993091407908809,
    (4.0,): 0.9263415237343752,
    (20.0,): 0.1600421196045381,
    (1.0, 2.0): 4.983306411253372,
    (3.0,) * 5: 3.124648415260643,
    (10.0,) * 30: 2.207059679013232,
    (1.5, 2.5, 3.5, 4.5): 3.6672430748552505,
    (14.0, 1.2, 5.0, 5.0): 3.791780264953185,
}
"""Deviations of noise at sensitivity 1, and epsilon at delta 1e-5 by dp-accounting 0.6.0:

    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for sigma in sigmas:
        accountant.compose(dp_event.GaussianDpEvent(sigma))
    accountant.get_epsilon(1e-5)
"""


@pytest.mark.parametrize("sigmas", PLD)
def test_accounts_are_those_of_dp_accounting(sigmas):
    assert epsilon_of(composed(1 / s for s in sigmas), 1e-5) == pytest.approx(PLD[sigmas], abs=1e-4)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 8.0, 60.0])
def test_mu_and_epsilon_are_inverse(epsilon):
    mu = mu_of(epsilon, 1e-6)
    assert epsilon_of(mu, 1e-6) == pytest.approx(epsilon, rel=1e-9)
    assert delta_of(mu, epsilon) == pytest.approx(1e-6, rel=1e-6)
    # Independent: the privacy loss of N(0, 1) against N(mu, 1) is N(mu²/2, mu²).
    losses = np.linspace(epsilon, epsilon + 12 * mu + mu * mu, 200_001)
    density = stats.norm(mu * mu / 2, mu).pdf(losses)
    assert np.trapezoid(-np.expm1(epsilon - losses) * density, losses) == pytest.approx(1e-6, rel=1e-3)


def test_impossible_budgets_are_refused():
    for epsilon, delta in ((0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (math.nan, 1e-5)):
        with pytest.raises(DataError):
            mu_of(epsilon, delta)


def fixed(seed):
    return np.random.default_rng(seed).bytes


@pytest.mark.parametrize("scale", [1, 3, 20])
def test_the_discrete_gaussian_is_exact(scale):
    """Chi-squared over all values with 20 expected draws, and the exact tail beyond three deviations."""
    draws = discrete_gaussian(scale, 300_000, fixed(scale))
    values = np.arange(-12 * scale, 12 * scale + 1)
    chance = np.exp(-(values**2) / (2.0 * scale**2))
    chance /= chance.sum()
    found = np.bincount(draws + 12 * scale, minlength=len(values))
    expected = chance * len(draws)
    many = expected >= 20
    observed = [*found[many], found[~many].sum()]
    assert stats.chisquare(observed, [*expected[many], expected[~many].sum()]).pvalue > 1e-3
    tail = np.abs(values) > 3 * scale
    within = stats.binomtest(int(found[tail].sum()), len(draws), chance[tail].sum())
    assert within.pvalue > 1e-3


def test_at_full_scale_it_is_a_gaussian():
    draws = discrete_gaussian(STEPS, 100_000, fixed(1))
    assert stats.kstest(draws / STEPS, "norm").pvalue > 1e-3
    # Every residue occurs: noise on a coarser grid would leave the last bits of the sums.
    assert stats.chisquare(np.bincount(draws % 16, minlength=16)).pvalue > 1e-3


TERM = {"gram": np.array([[4.0, 1.0], [1.0, 2.0]]), "sum": np.arange(3.0)}


def sums(release, sites, present, runs, seed=0):
    """Totals of many runs in which `present` of `sites` add their share; the term is that of one of them."""
    found = []
    for run in range(runs):
        total = Term()
        for site in range(present):
            arrays = {name: a if site == 0 else np.zeros_like(a) for name, a in TERM.items()}
            term = Term({n: a.copy() for n, a in arrays.items()}, {}, frozenset({"gram"}))
            total.add(release.noised(term, sites, fixed([seed, run, site])))
        found.append(release.measured(total, sites).arrays)
    return {name: np.array([each[name] for each in found]) for name in TERM}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "present", "honest"),
    [(1, 1, 1.0), (4, 4, 0.75), (4, 3, 0.75)],
    ids=["server", "all present", "one dropped out, or subtracts its own"],
)
def test_the_noise_of_a_total_is_what_the_formula_says(sites, present, honest):
    release = NoisyAnswer({"gram": 1.0, "sum": 2.0}, 0.5, honest)
    runs = sums(release, sites, present, 2000)
    shares = release.shares(sites)
    for name, size in (("gram", 3), ("sum", 3)):
        says = release.deviation(name, size, shares) * math.sqrt(present / shares)
        own = runs[name] - TERM[name]
        seen = own[:, 0, 0] if name == "gram" else own[:, 1]
        assert abs(seen.std() / says - 1) < 4 / math.sqrt(2 * 2000)
        assert abs(seen.mean()) < 4 * says / math.sqrt(2000)
        # What honest sites add is never less than the account says: bound / (mu / sqrt 2).
        assert says >= release.bounds[name] * math.sqrt(2) / 0.5
    off = (runs["gram"] - TERM["gram"])[:, 0, 1]
    deviation = release.deviation("gram", 3, shares) * math.sqrt(present / shares)
    assert off.std() == pytest.approx(deviation / math.sqrt(2), rel=0.07)


def test_what_is_not_declared_is_refused():
    release = NoisyAnswer({"sum": 1.0}, 1.0)
    with pytest.raises(TermError, match=r"\['more'\] leaves otherwise"):
        release.noised(Term({"sum": np.ones(2), "more": np.ones(2)}))
    with pytest.raises(TermError, match="rows"):
        release.noised(Term({"sum": np.ones(2)}, {"rows": 3}))
    with pytest.raises(TermError, match="sum"):
        release.noised(Term({}))


def test_a_site_is_clipped_as_a_whole():
    release = NoisyAnswer({"sum": 10.0}, 1.0, unit="site")
    assert np.linalg.norm(release.check(Term({"sum": np.full(4, 100.0)})).arrays["sum"]) == pytest.approx(10)
    assert np.array_equal(release.check(Term({"sum": np.ones(4)})).arrays["sum"], np.ones(4))
