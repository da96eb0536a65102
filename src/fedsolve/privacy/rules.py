"""What a client does not help to open, and why: rules over all totals that it knows to have been opened.

A total shows nothing but the total; two totals show their difference. So there are rules about the cohorts of
totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedsolve.errors import CohortError
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


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    more, fewer = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    return " and ".join(
        f"{word} {names[:5]}" for word, names in (("with", more), ("without", fewer)) if names
    )
