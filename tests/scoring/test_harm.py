"""Calibrated probabilities on fresh rows: the first fits of `python -m benchmarks.harm`."""

from __future__ import annotations

import pytest
from benchmarks.harm import KINDS, largest, one


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_does_no_harm(kind):
    worst = largest([found for seed in range(6) if (found := one(kind, seed, "afl"))])
    assert worst["excess"] < 0.02, "nats above the log loss of telling the share of the class"
    assert worst["errors"] < 4, "standard errors of the share in the training rows"
    assert worst["far off"] == 0
