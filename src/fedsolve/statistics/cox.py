"""Cox regression: the partial likelihood of the pooled rows, by site or with one baseline, from sums.

    l(b) = sum over deaths j of  x_j b - log phi_j,    phi_j = sum at risk - a_j sum tied, of exp(x b)

Cox, JRSS B 1972; a_j = 0 (Breslow) or the share of tied deaths before j (Efron). With strata="site" every
site compares its own rows only: it answers with its own l, gradient and information, and no time leaves it.
With one baseline sites answer with sums of exp(x b), x exp(x b) and x xᵀ exp(x b) by cell of a grid of times,
joined until each cell with a death has ten rows (Efron: ten deaths). Proportional hazards are tested as
Grambsch and Therneau do, by the score test of x t; the concordance is exact by site, by bins of risk
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.special import chdtrc, ndtri

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.messages import unpack_triangle
from fedsolve.federation.method import Laws, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.statistics.design import FEWEST_ROWS, MOST_BINS, Design, DesignRows, read, survey
from fedsolve.statistics.likelihood import LikelihoodMethod, Newton, check_categories
from fedsolve.statistics.results import RegressionModel
from fedsolve.statistics.survival import CELLS, coarse, from_here, grid, in_cells, times_of

STRATA, BASELINE = "cox-strata", "cox-baseline"


class CoxModel(RegressionModel):
    """A fitted Cox model; `predict` gives the hazard against that of a row of zeros."""

    family: ClassVar[str] = "cox"
    title: ClassVar[str] = "Cox regression"
    times: Array
    hazard: Array  # cumulative, at the mean of all rows and these times, with one baseline only

    predicted: ClassVar[str] = "relative_hazard"

    def estimated(self, scores: Array) -> Array:
        return np.asarray(np.exp(scores))


@register(
    paper="Cox 1972",
    exchanges="a survey (and a grid), about 5 Newton steps, a summary",
    up="likelihood, gradient and information of a site's rows; with one baseline sums by cell of time",
    down="coefficients",
)
@dataclass(frozen=True)
class Cox(LikelihoodMethod[CoxModel]):
    """Cox regression with standard errors: 'Surv(days, died) ~ age + C(arm)'."""

    survival: ClassVar[bool] = True
    laws: ClassVar[Laws] = Laws(partition=None)

    strata: Literal["site"] | None = parameter("site", "A baseline for each site.", none="one baseline")
    ties: Literal["breslow", "efron"] = parameter("breslow", "Deaths at the same time.")
    grid: float | None = parameter(
        None, "With one baseline: width of a cell of time.", above=0, none="as the rows allow"
    )

    @classmethod
    def trial(cls) -> Self:
        return cls("Surv(exp(x0), I(y > 0)) ~ x1 + x2")

    def talk(self, run: DialogueRun[CoxModel]) -> Talk[CoxModel]:
        design = yield from survey(run)
        if design.plan.intercept:
            raise DataError("the formula names no column; curves without columns are Kaplan-Meier's.")
        check_categories(design, all_events=False)
        unit = float(design.seen["moments"][0]) / design.used or 1.0  # times are told in their mean
        asked: dict[str, Any] = {"unit": unit, "rows": design.used}
        cells, times = {}, np.zeros(0)
        if self.strata is None:
            fine = grid(design, self.grid)
            total = yield Ask(CELLS, asked | {"groups": 1}, {"edges": fine})
            tables = total["deaths"], total["censored"]
            edges, times, deaths, _ = coarse(fine, *tables, self.ties == "efron")
            cells = {"edges": edges, "times": times / unit}
        newton, kind = Newton(design, np.zeros(len(design.names))), BASELINE if cells else STRATA
        while not newton.converged:
            total = yield Ask(kind, asked | {"last": False}, {"weight": newton.trial(), **cells})
            found = total.term.arrays
            if cells:
                found = _by_cells(found, deaths[0], cells["times"])
            newton.take(-float(found["likelihood"][0]), -found["gradient"], found["curvature"])
        if cells:
            bins = _risk_bins(design, total["spread"], cells["edges"])
            groups = {"groups": len(bins["bins"]) + 1}
            total = yield Ask(CELLS, asked | groups, {"weight": newton.weight, **bins})
            pairs = _binned(total["deaths"], total["censored"])
        else:
            total = yield Ask(kind, asked | {"last": True}, {"weight": newton.weight})
            found, pairs = total.term.arrays, total["pairs"]
        comparable, concordant, tied = pairs / max(pairs[0], 1)
        facts = {
            "ties": self.ties,
            "strata": self.strata or "one baseline",
            "events": design.seen["outcome"][0],
            **newton.facts(float(found["likelihood"][0])),
            "concordance": concordant + tied / 2 if comparable else None,
            "concordance_within": tied / 2 if cells else None,
            "cells": len(times) if cells else None,
            "proportional_hazards": _proportional(newton, found),
        }
        covariance = newton.covariance(found["curvature"])
        hazard = np.cumsum(found["hazard"]) if cells else np.zeros(0)
        known = {"ratio": "hazard ratio", "times": times, "hazard": hazard}
        return design.result(CoxModel, newton.weight, covariance, facts, **known)


def _risk_bins(design: Design, spread: Array, edges: Array) -> dict[str, Array]:
    """Bins of x b, and fewer edges of time, in whose table the concordance is counted; ten rows a cell.

    spread: sums of x b and (x b)².
    """
    mean, square = spread / design.used
    bins = int(min(MOST_BINS, max(2, np.sqrt(design.used / FEWEST_ROWS))))
    ends = mean + np.sqrt(max(square - mean**2, 1e-300)) * ndtri(np.arange(1, bins) / bins)
    most = max(design.used // (FEWEST_ROWS * bins), 1)
    places = np.linspace(0, len(edges), min(most, len(edges) + 1) + 1)[1:-1]
    return {"bins": ends, "edges": edges[np.unique(places.astype(np.intp))]}


def _proportional(newton: Newton, found: Mapping[str, Array]) -> dict[str, float]:
    """P-values of the score test of x t, by column and for all; none where times of death do not differ."""
    kept = newton.design.kept
    first, score = newton.part(found["time_first"]), found["time_score"][kept]
    left = newton.part(found["time_second"]) - first @ newton.solved(first, found["curvature"])
    if not np.all(np.diag(left) > 1e-12 * np.diag(newton.part(found["time_second"]))):
        return {}
    names, single = np.array(newton.design.names)[kept].tolist(), chdtrc(1, score**2 / np.diag(left))
    values = dict(zip(names, single.tolist(), strict=True))
    return values | {"all": float(chdtrc(len(score), max(score @ np.linalg.solve(left, score), 0.0)))}


# -- the partial likelihood of rows in cells of time -------------------------------------------------

Second = Callable[[Array, Array], Array]
"""Of weights of cells, for those that leave in them and for their deaths, the sum of x xᵀ exp(x b)."""


def partial(
    sums: Mapping[str, Array], second: Second, deaths: Array, times: Array, powers: int = 3
) -> dict[str, Array]:
    """Likelihood, gradient and information; with powers 3 also what the test of hazards needs.

    sums: by cell, in order of time: s0, s1 of exp(x b) and x exp(x b) over those that leave in it; d0, d1 the
    same over its deaths, with Efron's ties only. eta: of all deaths; of_deaths: sums of x and t x over them.
    """
    s0, s1 = (from_here(sums[name].T).T for name in ("s0", "s1"))
    at, shares = np.flatnonzero(deaths), 0.0
    count = deaths[at]
    phi, mean = s0[at], s1[at]
    if "d0" in sums:  # the share of tied deaths before each
        tied = count.astype(np.intp)
        at, before = np.repeat(at, tied), np.repeat(np.cumsum(tied) - tied, tied)
        shares = (np.arange(len(at)) - before) / np.repeat(count, tied)
        phi, mean = s0[at] - shares * sums["d0"][at], s1[at] - shares[:, None] * sums["d1"][at]
        count = np.ones(len(at))
    mean = mean / phi[:, None]
    out = {"likelihood": sums["eta"] - count @ np.log(phi), "hazard": np.bincount(at, count / phi, len(s0))}
    for power, name in enumerate(("curvature", "time_first", "time_second")[:powers]):
        weight = count * times[at] ** power
        held = np.cumsum(np.bincount(at, weight / phi, len(s0)))
        off = np.bincount(at, weight * shares / phi, len(s0))
        out[name] = second(held, off) - (mean * weight[:, None]).T @ mean
        if power < 2:
            out[("gradient", "time_score")[power]] = sums["of_deaths"][power] - weight @ mean
    return out


def _by_cells(sums: Mapping[str, Array], deaths: Array, times: Array) -> dict[str, Array]:
    """The same of the sums over all sites."""

    def second(held: Array, off: Array) -> Array:
        upper = held @ sums["s2"] - (off @ sums["d2"] if "d2" in sums else 0.0)
        return unpack_triangle(upper)

    return partial(sums, second, deaths, times)


# -- at the client -----------------------------------------------------------------------------------


def _risks(rows: DesignRows, request: Request, memory: Memory) -> tuple[Array, tuple[tuple[str, Array], ...]]:
    """x b + offset; exp of it over all rows and, of Efron's ties, over deaths.

    A step so long that its exponential is no number counts as one less long.
    """
    eta = np.clip(rows.x @ request.arrays["weight"] + rows.offset, -500.0, 500.0)
    efron = memory.chain.opening["parameters"]["ties"] == "efron"
    return eta, (("s", np.exp(eta)), ("d", np.exp(eta) * rows.outcome[1]))[: 1 + efron]


@step(STRATA)
def answer_strata(data: ClientData, request: Request, memory: Memory) -> Term:
    """Log partial likelihood, gradient and information of this site's rows, whose times are its own cells; at
    the end also what the test of proportional hazards and the concordance need.
    """
    rows, last = read(data, memory), bool(request.note["last"])
    (time, event), (eta, counts) = times_of(rows), _risks(rows, request, memory)
    times, cell = np.unique(time / float(request.note["unit"]), return_inverse=True)
    size, risk = len(times), counts[0][1]
    sums = {"eta": np.array([event @ eta])}
    sums["of_deaths"] = np.array([event @ rows.x, (event * times[cell]) @ rows.x])
    for name, counted in counts:
        sums[f"{name}0"] = np.bincount(cell, counted, size)
        columns = [np.bincount(cell, counted * column, size) for column in rows.x.T]
        sums[f"{name}1"] = np.array(columns).reshape(rows.x.shape[1], size).T

    def second(held: Array, off: Array) -> Array:
        return np.asarray((rows.x * (risk * (held[cell] - event * off[cell]))[:, None]).T @ rows.x)

    arrays = partial(sums, second, np.bincount(cell, event, size), times, 3 if last else 1)
    del arrays["hazard"]  # which has a number for each time
    if last:
        arrays["pairs"] = concordance(cell, event > 0, eta)
    return Term(arrays, {}, frozenset(arrays) & {"curvature", "time_first", "time_second"})


def concordance(cell: Array, event: Array, risk: Array) -> Array:
    """Pairs that can be compared, those in which the higher risk dies first, and those of equal risk.

    cell: the rank of a row's time. Pairs of different times differ first in some bit of their ranks: they are
    counted bit by bit.
    """
    rank = 2 * cell + ~event
    score, size, found = np.unique(risk, return_inverse=True)[1], len(cell) + 1, np.zeros(3)
    for bit in range(int(rank.max(initial=0)).bit_length()):
        later = (rank >> bit) & 1 == 1
        keys = (rank >> (bit + 1)) * size + score
        others, own, base = np.sort(keys[later]), keys[~later & event], (keys - score)[~later & event]
        begin, end = np.searchsorted(others, base), np.searchsorted(others, base + size)
        less, equal = np.searchsorted(others, own), np.searchsorted(others, own, side="right")
        found += [(end - begin).sum(), (less - begin).sum(), (equal - less).sum()]
    return found


@step(BASELINE, over_rows=True)
def answer_baseline(data: ClientData, request: Request, memory: Memory) -> Term:
    """Sums of exp(x b) by cell of time, over all rows that leave in it and (Efron) over its deaths."""
    rows, place = in_cells(data, request, memory, "sums")
    (eta, counts), event = _risks(rows, request, memory), rows.outcome[1]
    width, cells = rows.x.shape[1], len(request.arrays["edges"]) + 1
    upper, order = np.triu_indices(width), np.argsort(place, kind="stable")
    shapes = ((), (width,), (len(upper[0]),))
    sums = {f"{name}{p}": np.zeros((cells, *s)) for name, _ in counts for p, s in enumerate(shapes)}
    for here in np.split(order, np.flatnonzero(np.diff(place[order])) + 1) if len(order) else ():
        x, cell = rows.x[here], place[here[0]]
        for name, counted in counts:
            weight = counted[here]
            sums[f"{name}0"][cell] = weight.sum()
            sums[f"{name}1"][cell] = weight @ x
            sums[f"{name}2"][cell] = ((x * weight[:, None]).T @ x)[upper]
    sums |= {"eta": np.array([event @ eta]), "spread": np.array([eta.sum(), (eta**2).sum()])}
    sums["of_deaths"] = np.array([event @ rows.x, (event * request.arrays["times"][place]) @ rows.x])
    return Term(sums)


def _binned(deaths: Array, censored: Array) -> Array:
    """`concordance` of tables (bins of risk, times); pairs of one bin count as ties."""
    every = deaths + censored
    later = from_here(every) - every
    pairs = (later.sum(axis=0), later.cumsum(axis=0) - later, later)
    return np.array([(deaths * each).sum() for each in pairs])
