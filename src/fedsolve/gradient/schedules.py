"""The learning rate of every round: how --rate falls and, in the first rounds, rises.

With r the round from 0 and R all rounds,

    rate_r = rate * rate_decay^r * schedule(r) * min(1, (r + 1) / warmup)
    step     schedule(r) = schedule_factor^(how many of schedule_rounds are <= r)
    cosine   schedule(r) = (1 + cos(pi (r - warmup) / (R - warmup))) / 2, and 1 while warming up

A round after the last, in which a client makes its own model, is scheduled as the last; the decay goes on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedsolve.errors import DataError

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod


SCHEDULE_FACTOR = 0.1
"""By how much a stepped rate falls unless somebody says otherwise."""


def factor_of(method: GradientMethod, round_: int) -> float:
    """What the rate is multiplied by in a round."""
    factor = method.rate_decay**round_
    inside = min(round_, method.rounds - 1)
    if method.schedule == "step":
        factor *= method.schedule_factor ** sum(first <= inside for first in milestones(method))
    if method.schedule == "cosine":
        past = max(0, inside - method.warmup) / max(1, method.rounds - method.warmup)
        factor *= (1 + math.cos(math.pi * past)) / 2
    if inside < method.warmup:
        factor *= (inside + 1) / method.warmup
    return float(factor)


def milestones(method: GradientMethod) -> list[int]:
    """The rounds from which a stepped rate is lower."""
    text = method.schedule_rounds or ""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(first < 1 for first in found):
        raise DataError(
            f"schedule_rounds are rounds from 1 on, joined by commas, such as 50,75; got {text!r}."
        )
    return found


def check_parameters(method: GradientMethod) -> None:
    """Refuse parameters of a schedule that do not go together."""
    if (method.schedule == "step") != bool(milestones(method)):
        raise DataError(
            "schedule 'step' and schedule_rounds go together; got "
            f"{method.schedule!r} and {method.schedule_rounds!r}."
        )
    if method.schedule != "step" and method.schedule_factor != SCHEDULE_FACTOR:
        raise DataError(
            f"schedule_factor ({method.schedule_factor}) is of schedule 'step'; got {method.schedule!r}."
        )
    if method.warmup > method.rounds:
        raise DataError(f"warmup ({method.warmup}) is longer than the run ({method.rounds} rounds).")
