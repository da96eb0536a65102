"""How long nodes are waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

Policy = Literal["wait", "continue", "error"]


@dataclass(frozen=True)
class Waiting:
    """How long a node is waited for in one exchange; `FlowerFederation` says what each of these means."""

    missing: Policy
    patience: float | None
    grace: float
    interval: float


def deadline(patience: float | None, started: float | None = None) -> float:
    """The moment at which patience ends that began at `started`, or now."""
    if patience is None:
        return float("inf")
    return (time.monotonic() if started is None else started) + patience
