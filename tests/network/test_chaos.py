"""A federation that is killed, frozen and short of disk gives the model of one that nobody disturbed."""

from __future__ import annotations

import pytest
from benchmarks.chaos import chaos

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_a_little_chaos() -> None:
    """`python -m benchmarks.chaos` does more of it."""
    told = chaos(kills=4, freezes=1, fills=1, methods=["deepafl"])
    assert told["identical"] == told["trainings"] >= 1
    assert sum(told["kills"].values()) == 4
    assert sum(told["freezes"].values()) == 1
    assert len(told["full_disks"]) == 2
