"""What a choice and a calibration take: plans, estimates beside what travelled, and limits of secure sums."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import make_classification

import fedsolve as fs
from fedsolve.calibration import Calibration
from fedsolve.errors import CalibrationWarning
from fedsolve.federation.engine import hears
from fedsolve.privacy import SecureFederation
from fedsolve.scoring.candidates import cost_of


def federation(rows=300, width=20, clients=20):
    features, labels = make_classification(rows, width, n_informative=4, n_redundant=0, random_state=0)
    return fs.LocalFederation.from_arrays(features, labels, np.arange(rows) % clients)


def test_a_small_table_is_cheap_and_the_plan_says_so():
    plans, expected = [], []
    follow = [hears("planned", plans.append), lambda record, count: expected.append(count)]
    model = fs.Auto().fit(federation(), follow=follow, calibrate=True)
    assert sum(record.bytes_up for record in model.history) < 30e6
    assert "15 candidates are compared" in plans[0]
    assert "MB up" in plans[0]
    assert max(expected) < 2 * len(model.history)  # no jump from hundreds


@pytest.mark.parametrize(
    "method",
    [
        fs.AFL(ridge="auto", intercept=True, scale="standard"),
        fs.KernelAFL(landmarks=40, ridge="auto"),
        fs.DeepAFL(layers=3, width=32),
    ],
    ids=lambda method: method.key,
)
def test_estimates_are_what_travels(method):
    silo = federation(clients=1)
    model = method.fit(silo)
    numbers = sum(record.bytes_up for record in model.history) / 8
    assert numbers == pytest.approx(cost_of(method, silo.describe(), 300)[1], rel=0.35)


def test_secure_sums_leave_out_what_would_tell_too_much():
    with pytest.warns(CalibrationWarning, match="too few to be told about twice"):
        model = fs.Auto().fit(SecureFederation(federation(200, 8, 4)), calibrate=True)
    (taken,) = [trial for trial in model.tried if trial.chosen]
    assert (taken.method, taken.loss) == ("afl", None)
    assert taken.left_out == "200 rows are too few to be told about twice"
    assert any("tell too much" in trial.left_out for trial in model.tried)
    assert model.calibration is None


def test_a_calibration_follows_the_spread_of_scores():
    fitted = Calibration(8.0, np.array([1.0, -1.0]))
    scores = np.array([[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]])
    before = (scores.mean(axis=0), 0.3)
    moved = fitted.moved(before, (0.1 * scores.mean(axis=0), 0.03))
    np.testing.assert_allclose(moved.probabilities(0.1 * scores), fitted.probabilities(scores))
