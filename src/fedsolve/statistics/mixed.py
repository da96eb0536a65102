"""A linear mixed model with a random intercept for each site, by restricted maximum likelihood, from sums.

    y = x b + u_site + e,   var u = ratio var e,    V = I + ratio 1 1ᵀ  for the rows of a site
    minimise over the ratio   (n - p) log(r / (n - p)) + log|V| + log|Xᵀ V⁻¹ X|,  r = (y - x b)ᵀ V⁻¹ (y - x b)

V⁻¹ = I - ratio / (1 + ratio n_site) 1 1ᵀ, so that every part is a sum over sites. 16 ratios are asked about
in an exchange; the range closes around the best. Of the last and narrow one polynomials give the minimum, and
the sums there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.polynomial.chebyshev import Chebyshev, chebfit, chebval

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.messages import unpack_triangle
from fedsolve.federation.method import Laws, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.registry import register
from fedsolve.statistics.design import Design, FormulaMethod, read, survey
from fedsolve.statistics.results import RegressionModel

SUMS, RATIOS = "mixed-sums", "mixed-ratios"
_RANGES = 3
_POINTS = np.cos(np.pi * np.arange(15, -1, -1) / 15)
"""Chebyshev's points between -1 and 1, where the logarithm of the ratio is asked about."""

_WIDEST = (-14.0, 10.0)
"""Logarithms between which the ratio is looked for."""


class MixedFit(RegressionModel):
    """Fixed effects; the variances are among the facts. `predict` is for a site of which nothing is known."""

    family: ClassVar[str] = "mixed"
    title: ClassVar[str] = "Linear mixed model, random intercept by site"


@register(
    key="mixed",
    paper="Patterson and Thompson 1971",
    exchanges="5",
    up="products of the formula's columns, then what 16 ratios of variances take off them",
    down="ratios of variances",
)
@dataclass(frozen=True)
class MixedModel(FormulaMethod[MixedFit]):
    """Linear mixed model with a random intercept by site."""

    laws: ClassVar[Laws] = Laws(partition=None, empty=False)
    usual: ClassVar[int] = 2 + _RANGES

    @classmethod
    def trial(cls) -> Self:
        return cls("y ~ x0 + x1")

    def talk(self, run: DialogueRun[MixedFit]) -> Talk[MixedFit]:
        design = yield from survey(run)
        # The outcome's mean, where an intercept can take it up.
        mean = float(design.seen["moments"][0]) / design.used if design.plan.intercept else 0.0
        total = yield Ask(SUMS, {"mean": mean})
        gram, (low, high) = total["gram"], _WIDEST
        design.keep_independent(gram[:-1, :-1])
        if len(total.cohort) < 2:
            raise DataError("a random intercept by site needs at least two sites; this federation has one.")
        for _ in range(_RANGES):
            points = low + (_POINTS + 1) / 2 * (high - low)
            total = yield Ask(RATIOS, {"mean": mean}, {"ratios": np.exp(points)})
            off, log = total["off"], total["log"]
            values = np.array([_at(design, gram, *each)[0] for each in zip(off, log, strict=True)])
            lowest, ends = int(np.argmin(values)), (low, high)
            low, high = points[max(lowest - 1, 0)], points[min(lowest + 1, 15)]
        fitted = Chebyshev.fit(points, values, 10)
        stops = fitted.deriv().roots()
        inside = stops[(abs(stops.imag) < 1e-9) & (stops.real > ends[0]) & (stops.real < ends[1])].real
        best = min(inside, key=fitted) if len(inside) else points[lowest]
        # At the lower end nothing is left of the variance between sites.
        ratio = 0.0 if best <= _WIDEST[0] + 1 else float(np.exp(best))
        # Of ratio / (1 + ratio n) through 16 points within a factor of three, no digit is lost.
        through = chebfit(_POINTS, np.column_stack([off, log]), 15)
        table = chebval(2 * (best - ends[0]) / (ends[1] - ends[0]) - 1, through) * (ratio > 0)
        value, found, inner, variance = _at(design, gram, table[:-1], float(table[-1]))
        point = design.whole(found) + mean * design.intercept
        # The determinant of columns as they are, as others report it.
        scale = float(2 * np.log(design.scale[design.kept]).sum())
        facts = {"log_likelihood": -(value + scale) / 2, "variance_between_sites": ratio * variance}
        facts |= {"variance_within": variance, "share_between_sites": ratio / (1 + ratio)}
        if ratio == 0:
            run.remarks.append("the variance between sites is zero: sites do not differ beyond chance.")
        return design.result(MixedFit, point, design.whole(variance * np.linalg.inv(inner)), facts)


def _at(design: Design, gram: Array, off: Array, log: float) -> tuple[float, Array, Array, float]:
    """Minus twice the restricted log-likelihood, b, Xᵀ V⁻¹ X and r / (n - p), of columns that count.

    gram: of [x, y - mean]. off: what the ratio takes off it; log: log|V|.
    """
    keep = np.append(design.kept, True)
    whole = (gram - unpack_triangle(off))[np.ix_(keep, keep)]
    inner, side = whole[:-1, :-1], whole[:-1, -1]
    found, free = np.linalg.solve(inner, side), design.used - len(inner)
    left = float(whole[-1, -1] - side @ found)
    if free < 1 or left <= 1e-14 * gram[-1, -1] or left <= 0:
        raise DataError("the columns explain the outcome exactly; no variance is left to divide.")
    value = free * (np.log(2 * np.pi * left / free) + 1) + float(log) + np.linalg.slogdet(inner)[1]
    return float(value), found, inner, left / free


def _rows(data: ClientData, request: Request, memory: Memory) -> Array:
    """[x, y - mean] of the site's rows."""
    rows = read(data, memory)
    if not np.all(rows.weight == 1):
        raise DataError("a mixed model takes no weights. Leave the weight column out of the schema.")
    return np.column_stack([rows.x, rows.outcome[0] - rows.offset - float(request.note["mean"])])


@step(SUMS)
def answer_sums(data: ClientData, request: Request, memory: Memory) -> Term:
    """The Gram matrix of [x, y - mean]."""
    rows = _rows(data, request, memory)
    return Term({"gram": rows.T @ rows}, {}, frozenset({"gram"}))


@step(RATIOS)
def answer_ratios(data: ClientData, request: Request, memory: Memory) -> Term:
    """For every ratio, what V⁻¹ takes off the Gram matrix of this site, and log|V|."""
    rows, ratios = _rows(data, request, memory), request.arrays["ratios"]
    total = rows.sum(axis=0)
    shares = ratios / (1 + ratios * len(rows))
    upper = np.outer(total, total)[np.triu_indices(len(total))]
    return Term({"off": shares[:, None] * upper, "log": np.log1p(ratios * len(rows))})
