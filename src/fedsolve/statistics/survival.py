"""Times to events on a grid of cells, and the Kaplan-Meier curves and log-rank test that follow from it.

    S(t) = product over cells up to t of (1 - d / n),     d deaths in a cell, n rows at risk when it begins

A cell is (edge before, edge]; a time counts as the edge after it, so that curves are exact on the grid. The
grid has at least ten rows a cell on average, and cells are joined until each with a death has ten rows.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.special import chdtrc, ndtri

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.method import Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.pages.plots import Axis, Panel, Series
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.statistics.design import (
    FEWEST_ROWS,
    MOST_BINS,
    STANDARD,
    Design,
    DesignRows,
    RowView,
    StatisticMethod,
    read,
    survey,
)
from fedsolve.statistics.hiding import check_grid
from fedsolve.statistics.results import StatisticModel, number

CELLS = "survival-cells"
_MOST_CELLS = 1000


def grid(design: Design, width: float | None, groups: int = 1) -> Array:
    """Edges of cells of one width up to four deviations above the mean; at least ten rows a cell."""
    mean, square = design.seen["moments"] / design.used
    reach = mean + 4 * np.sqrt(max(square - mean**2, 0.0)) or 1.0
    most = min(max(design.used // (FEWEST_ROWS * groups), 1), _MOST_CELLS)
    if width is None:
        size, enough = 10.0 ** np.floor(np.log10(reach / most)), reach / most * (1 - 1e-12)
        width = float(next(size * step for step in (1, 2, 5, 10) if size * step >= enough))
    elif reach / width > most:
        raise DataError(
            f"cells of {width:g} are too narrow for {design.used} rows: {most} cells hold {FEWEST_ROWS} rows "
            f"each on average. Take a grid of at least {reach / most:.3g}."
        )
    return width * np.arange(1, max(int(np.ceil(reach / width)), 1) + 1)


def coarse(edges: Array, deaths: Array, censored: Array, apart: bool = False) -> tuple[Array, ...]:
    """Cells joined until each with a death has ten rows: their edges, the times they stand for, deaths and
    others by group (groups, cells).

    apart: until each has ten deaths, and none or ten others, so that sums over either are told.
    """
    closing: list[int] = []
    d, c = np.zeros(len(deaths)), np.zeros(len(deaths))
    for cell in range(deaths.shape[1]):
        d, c = d + deaths[:, cell], c + censored[:, cell]
        few = (d < FEWEST_ROWS) | ((c > 0) & (c < FEWEST_ROWS)) if apart else d + c < FEWEST_ROWS
        if np.any(d > 0) and not np.any((d > 0) & few):
            closing.append(cell)
            d, c = np.zeros_like(d), np.zeros_like(c)
    found = edges[closing[:-1]]  # the last cell is open: what is left over joins it
    ends = np.append(edges, edges[-1] + edges[0])
    starts = np.append(0, np.searchsorted(ends, found) + 1)
    seen = np.flatnonzero((deaths + censored).any(axis=0))
    joined = (np.add.reduceat(table, starts, axis=1) for table in (deaths, censored))
    return found, np.append(found, ends[seen[-1]]), *joined


def from_here(table: Array) -> Array:
    """By cell, the sum of it and all later ones, along the last axis."""
    return np.asarray(table[..., ::-1].cumsum(axis=-1)[..., ::-1])


def times_of(rows: DesignRows) -> tuple[Array, Array]:
    """Time and event of rows, refused where they cannot be."""
    time, event = rows.outcome
    if below := int(np.sum(time < 0)):
        raise DataError(f"times must be at least 0; {below} rows have less.")
    if strange := int(np.sum(~np.isin(event, (0, 1)))):
        raise DataError(f"an event is 0 or 1; {strange} rows have other numbers.")
    if not np.all(rows.weight == 1):
        raise DataError("times to events take no weights. Leave the weight column out of the schema.")
    return time, event


def check_cells(edges: Array, request: Request, groups: int = 1) -> None:
    """Refuse a grid of fewer than ten rows a cell."""
    if (len(edges) + 1) * groups > max(int(request.note["rows"]) // FEWEST_ROWS, 1) + groups:
        raise DataError(f"{(len(edges) + 1) * groups} cells are more than {FEWEST_ROWS} rows each allow.")


def in_cells(
    data: ClientData, request: Request, memory: Memory, what: str, groups: int = 1
) -> tuple[DesignRows, Array]:
    """Rows, and the cell of the request's grid that each leaves in; refused where cells are too narrow.

    what: what is told of cells, "counts" or "sums".
    """
    edges, view = request.arrays["edges"], RowView(memory.chain, data.width)
    check_cells(edges, request, groups)
    check_grid(data, view.plan.outcome[0], what, edges)
    rows = read(data, memory)
    return rows, np.searchsorted(edges, times_of(rows)[0])


@step(CELLS, over_rows=True, counts=("deaths", "censored"))
def answer_cells(data: ClientData, request: Request, memory: Memory) -> Term:
    """Rows that die, and others that leave, in every cell of the grid, by group: (groups, cells).

    A group is a category, or a bin of x b where `bins` and `weight` are asked about.
    """
    groups, bins = int(request.note["groups"]), request.arrays.get("bins")
    if bins is not None and len(bins) >= MOST_BINS:
        raise DataError(f"a table of risks has at most {MOST_BINS} bins.")
    rows, cell = in_cells(data, request, memory, "counts", groups)
    group = np.zeros(len(cell), dtype=np.intp)
    if bins is not None:
        group = np.searchsorted(bins, rows.x @ request.arrays["weight"] + rows.offset)
    elif groups > 1:
        standard = RowView(memory.chain, data.width).arrays(STANDARD) or {}
        group = np.argmax(rows.x * standard["scale"] + standard["centre"], axis=1)
    counts = np.zeros((2, groups, len(request.arrays["edges"]) + 1))
    np.add.at(counts, (1 - rows.outcome[1].astype(np.intp), group, cell), 1.0)
    return Term({"deaths": counts[0], "censored": counts[1]})


class SurvivalModel(StatisticModel):
    """Curves by group: times (cells,), deaths and at_risk (groups, cells)."""

    family: ClassVar[str] = "kaplan-meier"
    title: ClassVar[str] = "Kaplan-Meier"
    groups: tuple[str, ...]
    times: Array
    deaths: Array
    at_risk: Array

    def survival(self) -> Array:
        """The share that survives each cell (groups, cells)."""
        return np.asarray(np.cumprod(1 - self.deaths / np.maximum(self.at_risk, 1), axis=1))

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Pointwise limits by Greenwood's variance of log(-log S)."""
        with np.errstate(all="ignore"):
            spread = np.cumsum(self.deaths / (self.at_risk * (self.at_risk - self.deaths)), axis=1)
            curve = self.survival()
            reach = float(ndtri(0.5 + level / 2)) * np.sqrt(spread) / np.log(curve)
            low, high = (np.exp(-np.exp(np.log(-np.log(curve)) - sign * reach)) for sign in (1, -1))
        return np.where(curve == 1, 1.0, low), np.where(curve == 1, 1.0, high)

    def median(self, group: int = 0) -> float:
        """The first time by which half have died; infinite where that does not happen."""
        below = np.flatnonzero(self.survival()[group] <= 0.5)
        return float(self.times[below[0]]) if len(below) else float("inf")

    def logrank(self) -> tuple[float, int, float]:
        """Chi-squared, degrees and p-value of equal curves."""
        d, n = self.deaths.sum(axis=0), self.at_risk.sum(axis=0)
        share = self.at_risk / np.maximum(n, 1)
        gap = (self.deaths - d * share).sum(axis=1)[:-1]
        factor = d * (n - d) / np.maximum(n - 1, 1) * share
        spread = np.diag(factor.sum(axis=1)) - factor @ share.T
        value = float(gap @ np.linalg.lstsq(spread[:-1, :-1], gap, rcond=None)[0])
        return value, len(gap), float(chdtrc(len(gap), max(value, 0.0)))

    def records(self) -> list[dict[str, Any]]:
        low, high = self.interval()
        columns = {"at_risk": self.at_risk, "deaths": self.deaths, "survival": self.survival()}
        columns |= {"low": low, "high": high}
        return [
            {"group": name, "time": float(time)} | {head: float(each[g, k]) for head, each in columns.items()}
            for g, name in enumerate(self.groups)
            for k, time in enumerate(self.times)
        ]

    def figure(self) -> Panel:
        """The share that survives, by group, as a staircase with pointwise 95% intervals."""
        times = tuple(np.repeat(np.append(0.0, self.times), 2)[1:])
        tables = (np.nan_to_num(each) for each in (self.survival(), *self.interval()))
        curve, low, high = (np.repeat(np.insert(each, 0, 1.0, axis=1), 2, axis=1)[:, :-1] for each in tables)
        bars = curve, np.maximum(curve - low, 0), np.maximum(high - curve, 0)
        series = [Series(n, g, times, *(tuple(each[g]) for each in bars)) for g, n in enumerate(self.groups)]
        return Panel(series, Axis("time"), Axis("survival"))


@register(
    key="kaplan-meier",
    paper="Kaplan and Meier 1958",
    exchanges="2",
    up="deaths and rows that leave, by group and cell of time",
    down="the grid",
)
@dataclass(frozen=True)
class KaplanMeier(StatisticMethod[SurvivalModel]):
    """Kaplan-Meier curves and log-rank test. time and event are columns or expressions of them."""

    survival: ClassVar[bool] = True
    usual: ClassVar[int] = 2

    time: str = parameter("", "Time under observation.")
    event: str = parameter("", "1 where it ended with the event, else 0.")
    by: str | None = parameter(None, "A category: one curve for each.", none="one curve")
    _: KW_ONLY
    grid: float | None = parameter(None, "Width of a cell of time.", above=0, none="as the rows allow")
    missing: Literal["drop", "schema"] = parameter("drop", "The same as in GLM.", flag="--missing-values")

    @property
    def asked(self) -> str:
        if not self.time or not self.event:
            raise DataError("time and event must be named, such as time='days', event='died'.")
        return f"Surv({self.time}, {self.event}) ~ {f'0 + C({self.by})' if self.by else '1'}"

    @classmethod
    def trial(cls) -> Self:
        return cls("exp(x0)", "I(y > 0)")

    def talk(self, run: DialogueRun[SurvivalModel]) -> Talk[SurvivalModel]:
        design = yield from survey(run)
        names = design.names if self.by else ("[all]",)
        groups = tuple(name.partition("[")[2].removesuffix("]").removeprefix("T.") for name in names)
        edges = grid(design, self.grid, len(groups))
        note = {"groups": len(groups), "rows": design.used}
        total = yield Ask(CELLS, note, {"edges": edges})
        _, times, deaths, censored = coarse(edges, total["deaths"], total["censored"])
        known = {"groups": groups, "times": times, "deaths": deaths, "at_risk": from_here(deaths + censored)}
        facts = {**design.outline(), "events": deaths.sum(), "grid": edges[0]}
        model = SurvivalModel(run.spec.features, facts, **known)
        if self.by:
            model.facts["log_rank"] = dict(zip(("chi2", "degrees", "p"), model.logrank(), strict=True))
        model.facts["median"] = {name: number(model.median(g)) for g, name in enumerate(groups)}
        return model
