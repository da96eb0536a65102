"""Cox regression, Kaplan-Meier and log-rank against statsmodels and lifelines on the pooled rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from lifelines import KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from lifelines.utils import concordance_index
from statsmodels.duration.hazard_regression import PHReg

import fedsolve as fs
from fedsolve import Cox, DataError, KaplanMeier
from fedsolve.privacy import SecureFederation
from fedsolve.statistics.cox import CoxModel
from fedsolve.testing import check_method
from tests.statistics.tables import federation, near, table

TABLES = {
    "gbsg2": (
        "Surv(time, cens) ~ age + tsize + pnodes + horTh",
        ["age", "tsize", "pnodes", "horTh"],
        "time",
        "cens",
    ),
    "rossi": ("Surv(week, arrest) ~ fin + age + prio", ["fin", "age", "prio"], "week", "arrest"),
    "lung": ("Surv(time, status) ~ age + sex", ["age", "sex"], "time", "status"),
}


def columns(name: str) -> tuple[Any, Any, Any]:
    """Covariates, times and events of a table."""
    _, names, time, event = TABLES[name]
    frame = table(name)
    x = np.column_stack([frame[each] == "yes" if each == "horTh" else frame[each] for each in names])
    return x.astype(float), frame[time].to_numpy(float), frame[event].to_numpy(float)


def oracle(x: Any, time: Any, event: Any, ties: str, strata: Any = None) -> tuple[Any, Any, float]:
    """Coefficients, standard errors, log-likelihood of statsmodels; Newton steps to the last digit."""
    model = PHReg(time, x, status=event, ties=ties, strata=strata)
    point = model.fit(disp=0).params
    for _ in range(10):
        point = point - np.linalg.solve(model.hessian(point), model.score(point))
    return point, np.sqrt(np.diag(np.linalg.inv(-model.hessian(point)))), model.loglike(point)


def agrees(model: CoxModel, expected: tuple[Any, Any, float], within: float = 1e-8) -> None:
    near(model.coefficient, expected[0], within)
    near(model.standard_error, expected[1], within)
    near(model.facts["log_likelihood"], expected[2], within)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_baseline_for_each_site_is_the_stratified_fit(name: str, ties: Any) -> None:
    x, time, event = columns(name)
    owners = np.arange(len(time)) % 4
    model = Cox(TABLES[name][0], ties=ties).fit(federation(table(name), owners))
    agrees(model, oracle(x, time, event, ties, owners))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_one_site_is_the_fit_without_strata(name: str, ties: Any) -> None:
    x, time, event = columns(name)
    agrees(Cox(TABLES[name][0], ties=ties).fit(federation(table(name), 1)), oracle(x, time, event, ties))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_one_baseline_is_exact_on_its_grid(name: str, ties: Any) -> None:
    x, time, event = columns(name)
    model = Cox(TABLES[name][0], ties=ties, strata=None).fit(federation(table(name), 5))
    on_grid = model.times[np.searchsorted(model.times[:-1], time)]
    agrees(model, oracle(x, on_grid, event, ties))
    counts = [np.bincount(np.searchsorted(model.times[:-1], time), weights) for weights in (event, None)]
    assert counts[1][counts[0] > 0].min() >= 10
    if ties == "efron":
        assert counts[0][counts[0] > 0].min() >= 10


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_one_baseline_does_not_depend_on_the_partition(ties: Any) -> None:
    method = Cox(TABLES["gbsg2"][0], strata=None, ties=ties)
    first = method.fit(federation(table("gbsg2"), 1))
    engines = (federation(table("gbsg2"), 5), federation(table("gbsg2"), 50))
    for engine in (*engines, SecureFederation(federation(table("gbsg2"), 5))):
        model = method.fit(engine)
        agrees(model, (first.coefficient, first.standard_error, first.facts["log_likelihood"]), 1e-9)
        near(model.facts["concordance"], first.facts["concordance"], 1e-9)


def test_secure_strata_are_plain_strata() -> None:
    method, frame = Cox(TABLES["gbsg2"][0], ties="efron"), table("gbsg2")
    plain, secure = method.fit(federation(frame, 5)), method.fit(SecureFederation(federation(frame, 5)))
    agrees(secure, (plain.coefficient, plain.standard_error, plain.facts["log_likelihood"]), 1e-9)


def test_a_coarser_grid_moves_the_coefficients_a_little() -> None:
    frame = table("gbsg2")
    exact = Cox(TABLES["gbsg2"][0]).fit(federation(frame, np.zeros(len(frame), dtype=int)))
    gaps = []
    for width in (60.0, 360.0):
        model = Cox(TABLES["gbsg2"][0], strata=None, grid=width).fit(federation(frame, 5))
        gaps.append(np.max(np.abs(model.coefficient - exact.coefficient) / exact.standard_error))
    assert gaps[0] < gaps[1] < 1


def test_the_concordance_is_that_of_lifelines_and_bins_bound_it() -> None:
    x, time, event = columns("gbsg2")
    model = Cox(TABLES["gbsg2"][0]).fit(federation(table("gbsg2"), np.zeros(len(time), dtype=int)))
    expected = concordance_index(time, -x @ model.coefficient, event)
    near(model.facts["concordance"], expected, 1e-12)
    binned = Cox(TABLES["gbsg2"][0], strata=None).fit(federation(table("gbsg2"), 5)).facts
    assert abs(binned["concordance"] - expected) <= binned["concordance_within"]


@pytest.mark.parametrize("strata", ["site", None])
def test_the_check_of_proportional_hazards_is_the_score_test_of_x_times_time(strata: Any) -> None:
    """Against the explicit likelihood of the model with x t, differentiated numerically."""
    frame = table("rossi")
    model = Cox("Surv(week, arrest) ~ age + prio", strata=strata).fit(
        federation(frame, np.zeros(len(frame), dtype=int))
    )
    x = frame[["age", "prio"]].to_numpy(float)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    time, event = frame.week.to_numpy(float), frame.arrest.to_numpy(bool)
    if strata is None:
        time = model.times[np.searchsorted(model.times[:-1], time)]

    def parts(point: Any) -> tuple[Any, Any]:
        score, information = np.zeros(4), np.zeros((4, 4))
        for death in np.flatnonzero(event):
            here = np.hstack([x, x * time[death] / 20])[time >= time[death]]
            own = np.hstack([x[death], x[death] * time[death] / 20])
            share = np.exp(here @ point)
            share /= share.sum()
            mean = share @ here
            score += own - mean
            information += (here * share[:, None]).T @ here - np.outer(mean, mean)
        return score, information

    score, information = parts(
        np.append(model.coefficient * frame[["age", "prio"]].to_numpy(float).std(axis=0), [0, 0])
    )
    left = information[2:, 2:] - information[2:, :2] @ np.linalg.solve(
        information[:2, :2], information[:2, 2:]
    )
    values = score[2:] ** 2 / np.diag(left)
    from scipy.stats import chi2

    expected = {"age": chi2.sf(values[0], 1), "prio": chi2.sf(values[1], 1)}
    expected["all"] = chi2.sf(score[2:] @ np.linalg.solve(left, score[2:]), 2)
    found = model.facts["proportional_hazards"]
    near([found[name] for name in expected], list(expected.values()), 1e-8)


@pytest.mark.parametrize(("name", "by"), [("gbsg2", "tgrade"), ("gbsg2", None), ("lung", None)])
def test_curves_and_log_rank_are_those_of_lifelines_on_the_grid(name: str, by: str | None) -> None:
    _, _, time, event = TABLES[name]
    frame = table(name)
    engines = [federation(frame, 1), federation(frame, 5), federation(frame, 50)]
    found = [
        KaplanMeier(time, event, by).fit(engine)
        for engine in (*engines, SecureFederation(federation(frame, 5)))
    ]
    for model in found:
        assert np.array_equal(model.times, found[0].times)
        assert np.array_equal(model.deaths, found[0].deaths)
        assert np.array_equal(model.at_risk, found[0].at_risk)
        on_grid = model.times[np.searchsorted(model.times[:-1], frame[time])]
        for place, group in enumerate(model.groups):
            rows = np.ones(len(frame), dtype=bool) if by is None else (frame[by] == group).to_numpy()
            fitted = KaplanMeierFitter().fit(on_grid[rows], frame[event][rows])
            expected = fitted.survival_function_at_times(model.times)
            near(model.survival()[place], expected, 1e-9)
            limits = fitted.confidence_interval_.reindex(model.times).to_numpy()
            near(np.transpose(model.interval())[:, place], limits, 1e-9)
            assert model.median(place) == fitted.median_survival_time_
        if by is not None:
            test = multivariate_logrank_test(on_grid, frame[by], frame[event])
            near(model.logrank()[0], test.test_statistic, 1e-9)
            near(model.logrank()[2], test.p_value, 1e-8)


def test_laws() -> None:
    check_method(Cox)
    check_method(Cox(Cox.trial().formula, strata=None))
    check_method(KaplanMeier)


def test_predictions_follow_the_formula(tmp_path: Any) -> None:
    x, _, _ = columns("gbsg2")
    model = Cox(TABLES["gbsg2"][0]).fit(federation(table("gbsg2")))
    model.save(tmp_path / "cox.safetensors")
    near(
        fs.load_model(tmp_path / "cox.safetensors").predict(table("gbsg2")),
        np.exp(x @ model.coefficient),
        1e-9,
    )


def test_the_last_cell_ends_where_its_rows_end() -> None:
    frame = table("gbsg2")
    model = KaplanMeier("time", "cens", "horTh").fit(federation(frame))
    width = model.facts["grid"]
    assert model.times[-1] == width * np.ceil(frame.time.max() / width)
    assert Cox(TABLES["gbsg2"][0], strata=None).fit(federation(frame)).times[-1] < frame.time.max() + 100


# -- what is refused ---------------------------------------------------------------------------------


def refused(method: Any, frame: Any, match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(fs.FedsolveError, match=match):
            method.fit(federation(frame))


def test_times_below_zero() -> None:
    frame = table("rossi").assign(week=lambda t: t.week - 5)
    refused(Cox("Surv(week, arrest) ~ age"), frame, "times must be at least 0")
    refused(KaplanMeier("week", "arrest"), frame, "times must be at least 0")


def test_no_event_at_all() -> None:
    frame = table("rossi").assign(arrest=0)
    refused(Cox("Surv(week, arrest) ~ age"), frame, "zero events")
    refused(KaplanMeier("week", "arrest"), frame, "zero events")


def test_events_that_are_neither_0_nor_1() -> None:
    refused(Cox("Surv(week, arrest) ~ age"), table("rossi").assign(arrest=2), "an event is 0 or 1")


def test_a_category_without_events_is_named() -> None:
    frame = table("gbsg2").copy()
    frame.loc[frame.tgrade == "I", "cens"] = 0
    refused(
        Cox("Surv(time, cens) ~ age + C(tgrade, Treatment('II'))"), frame, r"separation.*\[T\.I\].*no events"
    )


def test_a_column_that_orders_all_deaths_is_named() -> None:
    frame = table("gbsg2").assign(order=lambda t: -t.time)
    refused(Cox("Surv(time, cens) ~ order"), frame, "separation.*'order'")
    refused(Cox("Surv(time, cens) ~ 1"), frame, "names no column")


def test_a_grid_that_is_too_narrow() -> None:
    refused(KaplanMeier("time", "cens", grid=1.0), table("gbsg2"), "too narrow for 686 rows")
    refused(Cox(TABLES["gbsg2"][0], strata=None, grid=1.0), table("gbsg2"), "too narrow")


def test_outcomes_and_groups_that_are_not_there() -> None:
    refused(Cox("time ~ age"), table("gbsg2"), r"must be Surv\(time, event\)")
    refused(
        KaplanMeier("time", "cens", by="age"),
        table("gbsg2"),
        "takes a column that the schema calls a category",
    )
    refused(KaplanMeier("time"), table("gbsg2"), "time and event must be named")


def test_a_grid_that_a_server_made_up_is_refused_at_the_site() -> None:
    from fedsolve.federation.messages import Request
    from fedsolve.statistics.survival import check_cells

    with pytest.raises(DataError, match="500 cells are more than 10 rows each allow"):
        check_cells(np.arange(499.0), Request("survival-cells", 0, 0, (), {"rows": 686}))


def dead(time: Any) -> Any:
    """A federation of two sites where everybody dies at these times, after a number that orders them."""
    x = np.random.default_rng(0).standard_normal(len(time))
    frame = table("rossi").head(len(time))[["age"]].assign(x=np.sort(x)[::-1], week=time, arrest=1.0)
    return federation(frame, np.arange(len(time)) % 2)


def test_a_number_that_orders_all_deaths_is_named() -> None:
    with pytest.raises(DataError, match="separation: the coefficient of 'x' grows without end"):
        Cox("Surv(week, arrest) ~ x").fit(dead(np.arange(400.0)))


def test_hazards_are_not_tested_where_times_do_not_differ() -> None:
    model = Cox("Surv(week, arrest) ~ age").fit(dead(np.full(400, 3.0)))
    assert model.facts["proportional_hazards"] == {}
    assert np.isfinite(model.standard_error).all()
