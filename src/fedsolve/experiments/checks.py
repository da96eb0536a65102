"""Our numbers beside the papers': inside the interval of the difference, or outside and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsolve.errors import DataError
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import LEVEL
from fedsolve.experiments.papers import papers
from fedsolve.experiments.result_tables import TableCell, tables_of
from fedsolve.experiments.run_folder import RunFolder

TIMES = ("seconds", "relative_seconds")
"""Not compared: the papers' machines were others."""
FACTOR = 10.0
"""Rounding errors, metrics written as powers of ten, may be this many times what the paper prints."""


@dataclass(frozen=True)
class Check:
    """One number of ours and the paper's."""

    row: str
    column: str
    table: str
    metric: str
    ours: float | None
    seeds: int | None
    paper: float
    allowed: float  # how far apart they may be
    excess: float  # by how much they are farther apart, 0 inside; infinite where no model came out

    @property
    def inside(self) -> bool:
        return self.excess == 0.0


def checks_of(run: RunFolder) -> list[Check]:
    """Every number of a run's tables that stands above one of its paper.

    The paper's numbers are of the backbones that the file names, so a run with another one is refused.
    """
    ref = run.experiment.paper
    if ref is None:
        raise DataError(f"{run.name} names no 'paper', so there is nothing to check it against.")
    if run.backbone is not None:
        raise DataError(
            f"{run.name} was run with the backbone {run.backbone} instead of its own, and the paper's "
            "numbers are of its own. Run it without --backbone to check it."
        )
    found = []
    for table in tables_of(run):
        for row in table.rows:
            for printed, entries in row.printed():
                for column, ours, theirs in zip(table.columns, row.entries, entries, strict=True):
                    if ours is None or theirs is None or theirs.mean is None or ours.metric in TIMES:
                        continue
                    allowed = _allowed(ours, theirs, theirs.mean, ref.key)
                    apart = math.inf if ours.mean is None else abs(ours.mean - theirs.mean)
                    if METRICS[ours.metric].form == "power" and ours.mean is not None:
                        apart = max(0.0, ours.mean - theirs.mean)
                    # The last bits of a decimal are no difference.
                    excess = 0.0 if apart <= allowed * (1 + 1e-9) else apart - allowed
                    counts = ours.mean, ours.seeds, theirs.mean, allowed, excess
                    found.append(Check(row.label, column, printed, ours.metric, *counts))
    return found


def _allowed(ours: TableCell, theirs: TableCell, printed: float, key: str) -> float:
    """Half the paper's last digit, and Welch's interval of the difference of two means at 95 %.

    Where the paper prints no spread, its runs are taken to vary as ours do; where we have one seed, ours as
    the paper's. Where neither is known, the last digit is all.
    """
    metric, paper = METRICS[ours.metric], papers()[key]
    if metric.form == "power":
        return (FACTOR - 1) * printed
    decimals = 2 if metric.form == "hundredths" else len(f"{printed:g}".partition(".")[2])
    rounding = 0.5 * 10.0**-decimals
    runs = int(paper["runs"])
    spread = theirs.error
    if spread is not None and paper["spread"] == "standard deviation":
        spread /= math.sqrt(runs)
    pairs = [(ours.error, ours.seeds or 1), (spread, runs)]
    known = [(error, count) for error, count in pairs if error is not None and count > 1]
    known *= 3 - len(known) if known else 1
    total = sum(error**2 for error, _ in known)
    if total == 0.0:
        return rounding
    from scipy.stats import t  # takes a second to import; most commands need no test

    freedom = total**2 / sum(error**4 / (count - 1) for error, count in known)
    return rounding + float(t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(total)
