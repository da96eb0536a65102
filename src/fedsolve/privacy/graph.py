"""Who shares masks and secrets with whom, where sites are many: neighbours on a circle that nobody ordered.

Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS 2020). The n sites stand
on a circle in an order that a joint seed fixes; each is a neighbour of the k/2 before and the k/2 after it
(a Harary graph: only two gaps of k/2 in a row cut it). A site and its neighbours hold shares of its secrets,
t of which open them. With c colluders and d sites that leave before they help, X drawn without replacement,

    n P[X(n - 1, c, k) >= t] + n C(n - k/2, c - k/2) / C(n, c)  <=  2^-40     nobody learns a part of the sum
    n P[X(n - 1, d, k) > k + 1 - t]                             <=  2^-40     the sum can be opened

where the first two terms are that colluders hold t shares of somebody's secret, and that they are k/2
neighbours in a row. Of the even k and t > (k + 1)/2 that hold both, the smallest are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.errors import CohortError
from fedsolve.privacy.notes import shuffled

SPARSE_FROM = 100
"""Sites from which on a sparse graph costs less than masks with everybody."""

RISK = 2.0**-40


def around(names: Sequence[str], degree: int, seed: int) -> dict[str, tuple[str, ...]]:
    """By name, a site and its neighbours, sorted."""
    circle = shuffled(names, "circle", seed)
    half, twice = degree // 2, circle + circle + circle
    places = {name: len(circle) + place for place, name in enumerate(circle)}
    return {name: tuple(sorted(set(twice[at - half : at + half + 1]))) for name, at in places.items()}


def degree_for(sites: int, colluders: int, dropouts: int) -> tuple[int, int]:
    """The fewest neighbours of each site, and the threshold among them; (0, 0) where all are needed."""
    from scipy.stats import hypergeom  # takes long to import, and a few sites need no sparse graph

    for degree in range(4, sites - 1, 2):
        thresholds = np.arange(degree // 2 + 1, degree + 2)
        enough = np.flatnonzero(risk(sites, degree, thresholds, colluders) <= RISK)
        if len(enough):
            threshold = int(thresholds[enough[0]])
            if sites * hypergeom.sf(degree + 1 - threshold, sites - 1, dropouts, degree) <= RISK:
                return degree, threshold
    return 0, 0


def check_graph(sites: int, degree: int, threshold: int, colluders: int) -> None:
    """Refuse a graph that shows somebody a part of the sum more often than once in 2^40."""
    fits = degree % 2 == 0 and degree < sites and degree + 1 < 2 * threshold <= 2 * (degree + 1)
    if not fits or risk(sites, degree, threshold, colluders) > RISK:
        raise CohortError(
            f"{degree} neighbours of each of {sites} sites, {threshold} of whom open a secret, are refused: "
            f"with {colluders} colluders that is not safe to 2^-40."
        )


def risk(sites: int, degree: int, threshold: Any, colluders: int) -> Any:
    """The chance, at most, that colluders learn a part of the sum; of one threshold or of many."""
    from scipy.stats import hypergeom

    half = degree // 2
    in_a_row = hypergeom.pmf(half, sites, colluders, half)  # so many chosen places are all theirs
    return sites * (hypergeom.sf(threshold - 1, sites - 1, colluders, degree) + in_a_row)
