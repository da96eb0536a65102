"""What a client does not help to open, and why: rules over all totals that it knows to have been opened.

A total shows nothing but the total; two totals show their difference. So there are rules about the cohorts of
totals, and one about rows that changed between two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import CohortError, DataError
from fedsolve.privacy.notes import LEAST_COHORT


@dataclass(frozen=True)
class Opening:
    """A total that was opened: in which run, of which request (its digest), over whom."""

    run: str
    request: str
    cohort: tuple[str, ...]


def one_cohort_per_request(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a second cohort for a request: the difference of the two totals is about few."""
    for before in opened:
        if before.request == new.request and before.cohort != new.cohort:
            raise CohortError(
                f"this request has been opened for {len(before.cohort)} clients; opening it for "
                f"{_difference(before.cohort, new.cohort)} too would show the difference."
            )


def one_cohort_per_run(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a cohort that changed within a run."""
    for before in opened:
        if before.run == new.run and before.cohort != new.cohort:
            raise CohortError(
                f"the cohort of this run has changed: {_difference(before.cohort, new.cohort)}. Totals "
                "before and after would show the difference. Start a new run, or let clients allow changes "
                "(changing=True)."
            )


def groups_of_three(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a cohort that, with those opened before, sets one or two clients apart."""
    cohorts = {opening.cohort for opening in (*opened, new)}
    members = {name: frozenset(c for c in cohorts if name in c) for cohort in cohorts for name in cohort}
    sizes = Counter(members.values())
    apart = sorted(name for name, kind in members.items() if sizes[kind] < LEAST_COHORT)
    if apart:
        raise CohortError(
            f"with the totals opened before, this one would set {apart[:5]} apart from all others: clients "
            f"that are always in or out together must be at least {LEAST_COHORT}. They join or leave as "
            f"{LEAST_COHORT}, or not at all."
        )


def one_chain(seen: Sequence[Opening], told: Sequence[Opening]) -> None:
    """Refuse a list of a run's totals that does not go on from the one seen last.

    More than half of the members open each total, so two lists that part cannot both be gone on with.
    """
    if tuple(told[: len(seen)]) != tuple(seen):
        raise CohortError(
            "the list of totals opened in this run is not the one that this client was shown before. "
            "Somebody was told otherwise; this client opens nothing more in this run."
        )


def enough_rows_changed(before: Array, now: Array, fewest: int) -> None:
    """Refuse rows that differ from those of an earlier total by few: the difference is about them.

    before, now: digests of rows, sorted. At least `fewest` must have been added, and as many removed or none.
    """
    added, removed = _beyond(now, before), _beyond(before, now)
    if not added and not removed:
        return
    if added < fewest or 0 < removed < fewest:
        raise DataError(
            f"since an earlier total {added} rows were added and {removed} removed; with fewer than {fewest} "
            "added, or some but fewer removed, two totals would show those rows. Take part again when more "
            "have changed, or with the rows of before."
        )


def _beyond(some: Array, others: Array) -> int:
    """How many entries of `some`, repeats counted, `others` lacks."""
    mine, how_often = np.unique(some, return_counts=True)
    theirs, known = np.unique(others, return_counts=True)
    place = np.minimum(np.searchsorted(theirs, mine), max(len(theirs) - 1, 0))
    there = np.where(theirs[place] == mine, known[place], 0) if len(theirs) else np.zeros(len(mine), int)
    return int(np.maximum(how_often - there, 0).sum())


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    more, fewer = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    return " and ".join(
        f"{word} {names[:5]}" for word, names in (("with", more), ("without", fewer)) if names
    )
