"""The regularised risk from sums: equal to the one from the rows, and never increasing (Theorem 3)."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from tests.conftest import Dataset
from tests.oracle import DeepOracle

PLANS = ("textbook", "lean", "single")
DEEP = 50


def fit(data: Dataset, exchange: str, **options):
    owners = fs.partition.dirichlet(data.labels, 6, alpha=0.1, seed=2)
    federation = fs.LocalFederation.from_arrays(data.features, data.labels, owners, clients=6)
    return fs.DeepAFL(**{"layers": DEEP, "width": 64, "exchange": exchange, **options}).fit(federation)


def risks_from_rows(model, data: Dataset, **options) -> np.ndarray:
    """|Y - Phi W|² + ridge |W|² + residual_ridge sum |Omega|² of the model's own weights, per layer."""
    network = DeepOracle(model.layers, model.network.width, **options)
    omegas = [block.omega for block in model.blocks]
    phis = network.stages(data.features, omegas)
    return np.array(
        [
            network.risk(phi, data.targets, weight, omegas[:layer])
            for layer, (phi, weight) in enumerate(zip(phis, model.classifiers, strict=True))
        ]
    )


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ridge": 1e-3, "residual_ridge": 1e-5},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"ridge": 10.0, "residual_ridge": 1.0},
                {"gain": 4.0},
                {"block_input": "initial"},
                {"hidden_width": 30},
            )
        ),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_risk_over_fifty_layers(digits, exchange, options):
    data = digits.head(500)
    model = fit(data, exchange, **options)
    assert len(model.risk) == DEEP + 1
    assert np.all(np.diff(model.risk) <= 1e-10 * model.risk[0])
    assert model.risk[-1] < 0.9 * model.risk[0]
    assert np.allclose(model.risk, risks_from_rows(model, data, **options), rtol=1e-9, atol=0)


@pytest.mark.parametrize("exchange", PLANS)
def test_risk_is_that_of_the_centralised_solution(digits, exchange):
    data = digits.head(500)
    expected = DeepOracle(10, 64).fit(data.features, data.targets).risks
    assert np.allclose(fit(data, exchange, layers=10).risk, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("exchange", PLANS)
def test_history_carries_the_risk_of_the_newest_classifier(digits, exchange):
    model = fit(digits.head(300), exchange, layers=4)
    for record in model.history:
        newest = [int(name.removeprefix("W")) for name in record.solved if name.startswith("W")]
        assert record.risk == (model.risk[max(newest)] if newest else None)


def test_risk_of_afl(digits):
    owners = fs.partition.iid(digits.labels, 5)
    federation = fs.LocalFederation.from_arrays(digits.features, digits.labels, owners)
    model = fs.AFL(ridge=0.3).fit(federation)
    direct = np.sum((digits.targets - digits.features @ model.weight) ** 2) + 0.3 * np.sum(model.weight**2)
    assert np.isclose(model.history[0].risk, direct, rtol=1e-9, atol=0)
