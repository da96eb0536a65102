"""Mixed models against statsmodels, and against the dense likelihood."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import statsmodels.formula.api as smf
from scipy.optimize import minimize_scalar

import fedsolve as fs
from fedsolve import MixedModel
from fedsolve.privacy import SecureFederation
from fedsolve.testing import check_method
from tests.statistics.tables import federation, near, table


def firms() -> tuple[Any, Any]:
    frame = table("grunfeld")
    return frame, np.unique(frame.firm, return_inverse=True)[1]


def hospitals() -> tuple[Any, Any]:
    frame = table("diabetes")
    owners = np.random.default_rng(0).integers(0, 12, len(frame))
    shift = np.random.default_rng(1).normal(0, 30, 12)[owners]
    return frame.assign(progression=frame.progression + shift), owners


def dense(x: Any, y: Any, owners: Any) -> dict[str, Any]:
    """The restricted maximum likelihood by dense matrices and a golden section."""

    def at(log: float) -> tuple[float, Any, Any, float]:
        spread = np.eye(len(y)) + np.exp(log) * (owners[:, None] == owners)
        inverse = np.linalg.inv(spread)
        gram = x.T @ inverse @ x
        point = np.linalg.solve(gram, x.T @ inverse @ y)
        left = float((y - x @ point) @ inverse @ (y - x @ point))
        free = len(y) - x.shape[1]
        value = free * np.log(left / free) + np.linalg.slogdet(spread)[1] + np.linalg.slogdet(gram)[1]
        return value, point, gram, left / free

    best = minimize_scalar(lambda log: at(log)[0], bracket=(-4, 0), tol=1e-10).x
    _, point, gram, variance = at(best)
    return {"ratio": np.exp(best), "point": point, "errors": np.sqrt(variance * np.diag(np.linalg.inv(gram)))}


CASES = pytest.mark.parametrize(
    ("rows", "formula"), [(firms, "invest ~ value + capital"), (hospitals, "progression ~ bmi + bp + s5")]
)


@CASES
def test_it_is_the_restricted_maximum_likelihood(rows: Any, formula: str) -> None:
    frame, owners = rows()
    model = MixedModel(formula).fit(federation(frame, owners))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = smf.mixedlm(formula, frame, groups=owners).fit(
            reml=True, method="powell", xtol=1e-14, ftol=1e-15, maxiter=500
        )
    near(model.facts["log_likelihood"], expected.llf, 1e-8)
    near(model.coefficient, expected.fe_params, 1e-6)
    # Its own errors take the curvature between effects and variances in; these are of the effects alone.
    effects = -expected.model.hessian(expected.params_object)[0][: len(model.names), : len(model.names)]
    near(model.standard_error, np.sqrt(np.diag(np.linalg.inv(effects))), 1e-6)
    near(model.standard_error, expected.bse_fe, 3e-3)
    near(model.facts["variance_within"], expected.scale, 1e-6)
    exact = dense(expected.model.exog, expected.model.endog, owners)
    near(model.facts["variance_between_sites"] / model.facts["variance_within"], exact["ratio"], 1e-6)
    near(model.coefficient, exact["point"], 1e-6)
    near(model.standard_error, exact["errors"], 1e-6)
    assert model.facts["exchanges"] == 5


@CASES
def test_secure_sums_change_nothing(rows: Any, formula: str) -> None:
    frame, owners = rows()
    plain = MixedModel(formula).fit(federation(frame, owners))
    secure = MixedModel(formula).fit(SecureFederation(federation(frame, owners)))
    near(secure.coefficient, plain.coefficient, 1e-9)
    near(secure.standard_error, plain.standard_error, 1e-9)
    for name in ("log_likelihood", "variance_between_sites", "variance_within"):
        near(secure.facts[name], plain.facts[name], 1e-9)


def test_sites_that_do_not_differ() -> None:
    frame = table("diabetes")
    spread = frame.groupby(np.arange(len(frame)) % 4).progression.transform("mean") - frame.progression.mean()
    model = MixedModel("progression ~ 1").fit(
        federation(frame.assign(progression=frame.progression - spread), np.arange(len(frame)) % 4)
    )
    assert model.facts["variance_between_sites"] == 0
    near(model.coefficient, [(frame.progression - spread).mean()], 1e-9)
    assert "do not differ" in model.remarks[-1]


def test_one_site_is_too_few() -> None:
    with pytest.raises(fs.DataError, match="at least two sites"):
        MixedModel("progression ~ bmi").fit(federation(table("diabetes"), np.zeros(442, dtype=int)))


def test_laws() -> None:
    check_method(MixedModel)
