"""Generalised linear models against statsmodels on the pooled rows."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedsolve as fs
from fedsolve import GLM, DataError
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import OFF, Limits
from fedsolve.tables.encoder import encode
from fedsolve.tables.formula import INTERCEPT, check
from fedsolve.tables.schema import Column, Schema
from fedsolve.testing import check_method
from tests.statistics.tables import federation, near, schema_of, table

LOG = sm.families.links.Log()
CASES: dict[str, tuple[str, GLM, Any]] = {
    "logistic": (
        "fair",
        GLM("had ~ age + yrs_married + religious", family="binomial"),
        sm.families.Binomial(),
    ),
    "probit": (
        "fair",
        GLM("had ~ age * religious", family="binomial", link="probit"),
        sm.families.Binomial(sm.families.links.Probit()),
    ),
    "proportions": (
        "star98",
        GLM("share ~ lowinc + perasian + perblack", family="binomial", weights="tested"),
        sm.families.Binomial(),
    ),
    "counts": (
        "randhie",
        GLM("mdvis ~ lncoins + idp + lpi + fmde + physlm", family="poisson"),
        sm.families.Poisson(),
    ),
    "rates": (
        "affairs",
        GLM("affairs ~ age + children", family="poisson", offset="log(yrs_married)"),
        sm.families.Poisson(),
    ),
    "gamma": (
        "scotland",
        GLM("yes ~ coutax + unempf + mor + act + gdp", family="gamma"),
        sm.families.Gamma(),
    ),
    "gamma log": (
        "affairs",
        GLM("affairs ~ age + religious", family="gamma", link="log"),
        sm.families.Gamma(LOG),
    ),
    "inverse Gaussian": (
        "affairs",
        GLM("affairs ~ age + children", family="inverse-gaussian", link="log", weights="weight"),
        sm.families.InverseGaussian(LOG),
    ),
    "linear": ("diabetes", GLM("progression ~ age + bmi + bp + s5 + I(bmi**2)"), sm.families.Gaussian()),
    "weighted": ("fair", GLM("affairs ~ age + religious", weights="weight"), sm.families.Gaussian()),
}
FAMILIES = sorted(CASES)


def oracle(name: str, **settings: Any) -> Any:
    where, method, family = CASES[name]
    frame = table(where)
    more: dict[str, Any] = {}
    if method.weights:
        more["var_weights"] = frame[method.weights]
    if method.offset:
        more["offset"] = np.log(frame.yrs_married)
    return smf.glm(method.formula, frame, family=family, **more).fit(tol=1e-14, maxiter=500, **settings)


def agrees(model: Any, expected: Any, factor: float = 1.0) -> None:
    near(model.coefficient, expected.params[list(model.names)], 1e-8)
    near(model.standard_error, factor * expected.bse[list(model.names)], 1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fit_is_that_of_the_pooled_rows(name: str) -> None:
    where, method, _ = CASES[name]
    expected = oracle(name)
    model = method.fit(federation(table(where)))
    agrees(model, expected)
    near(model.facts["deviance"], expected.deviance, 1e-8)
    if name == "proportions":  # of counts, as R has it
        frame = table(where)
        counts = np.column_stack([frame.nabove, frame.nbelow])
        expected = sm.GLM(counts, expected.model.exog, family=sm.families.Binomial()).fit(tol=1e-14)
    near(model.facts["log_likelihood"], expected.llf, 1e-8)
    near(model.facts["aic"], expected.aic, 1e-8)
    assert model.facts["rows"] == len(table(where))
    if not method.offset:
        near(model.facts["null_deviance"], expected.null_deviance, 1e-8)


@pytest.mark.parametrize("name", ["logistic", "rates", "gamma log", "weighted"])
def test_robust_errors_are_those_of_the_pooled_rows(name: str) -> None:
    where, method, _ = CASES[name]
    frame = table(where)
    owners = np.arange(len(frame)) % 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        white = oracle(name, cov_type="HC0")
        sites = oracle(name, cov_type="cluster", cov_kwds={"groups": owners})
    agrees(replace(method, robust="HC0").fit(federation(frame, owners)), white)
    agrees(replace(method, robust="cluster").fit(federation(frame, owners)), sites)
    few = np.sqrt(len(frame) / (len(frame) - len(white.params)))
    agrees(replace(method, robust="HC1").fit(federation(frame, owners)), white, few)


def test_hc1_of_the_linear_model() -> None:
    frame = table("diabetes")
    expected = smf.ols("progression ~ age + bmi", frame).fit(cov_type="HC1")
    agrees(GLM("progression ~ age + bmi", robust="HC1").fit(federation(frame)), expected)
    plain = smf.ols("progression ~ age + bmi", frame).fit()
    model = GLM("progression ~ age + bmi").fit(federation(frame))
    near(model.p, plain.pvalues, 1e-8)
    near(np.transpose(model.interval()), plain.conf_int(), 1e-8)
    near(model.facts["r_squared"], plain.rsquared, 1e-9)


def told_of_cases() -> Any:
    """400 rows of which each is a case or a control."""
    rng = np.random.default_rng(0)
    age = rng.normal(60, 10, 400).round()
    ill = rng.random(400) < 1 / (1 + np.exp(-(age - 60) / 10))
    stage = rng.choice(["I", "II", "III"], 400)
    return pd.DataFrame({"age": age, "ill": np.where(ill, "case", "control"), "stage": stage})


@pytest.mark.parametrize("secure", [False, True])
def test_the_event_is_named_and_may_be_chosen(secure: bool) -> None:
    def fit(formula: str) -> Any:
        rows = federation(told_of_cases())
        return GLM(formula, family="binomial").fit(SecureFederation(rows) if secure else rows)

    second, first = fit("ill ~ age"), fit("I(ill == 'case') ~ age")
    near(second.coefficient, -first.coefficient, 1e-8)
    assert second.facts["event"] == second.document()["event"] == "ill = control"
    for text in (str(second), second.to_markdown(), second.to_latex()):
        assert "event: ill = control" in text
    assert second.remarks == ["the event is ill = control; for case write I(ill == 'case') ~ ..."]
    assert "event" not in first.facts
    assert first.facts["events"] == (told_of_cases().ill == "case").sum()
    rows = federation(told_of_cases())
    model = GLM("age ~ I(stage == 'II')").fit(SecureFederation(rows) if secure else rows)
    near(model.coefficient, smf.ols("age ~ I(stage == 'II')", told_of_cases()).fit().params, 1e-8)


def test_a_linear_model_of_0_and_1_says_what_it_is() -> None:
    model = GLM("had ~ age").fit(federation(table("fair")))
    assert "this is a linear model; family binomial is logistic" in model.remarks[0]
    assert "r_squared" in model.facts
    logistic = GLM("had ~ age", family="binomial").fit(federation(table("fair")))
    assert not logistic.remarks
    assert "r_squared" not in logistic.facts
    share = 1 - logistic.facts["deviance"] / logistic.facts["null_deviance"]
    near(logistic.facts["deviance_explained"], share, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("robust", [None, "HC1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_partition_and_secure_sums_change_nothing(name: str, robust: Any) -> None:
    where, method, _ = CASES[name]
    frame, method = table(where), replace(method, robust=robust)
    first, limits = method.fit(federation(frame, 1)), Limits(told=100.0)
    if name == "proportions":  # one of 303 districts has most of the weight
        with pytest.raises(fs.FedsolveError, match=r"lowinc:tested.* would single a row out"):
            method.fit(SecureFederation(federation(frame, 3), limits=limits))
        limits = OFF
    engines = [federation(frame, 5), federation(frame, min(50, len(frame)))]
    for engine in (*engines, SecureFederation(federation(frame, 3 if name == "gamma" else 5), limits=limits)):
        model = method.fit(engine)
        near(model.coefficient, first.coefficient, 1e-9)
        near(model.standard_error, first.standard_error, 1e-9)
        near(model.facts["log_likelihood"], first.facts["log_likelihood"], 1e-9)


def test_standard_columns_and_reference_levels() -> None:
    frame = table("fair")
    scaled = frame.assign(z=(frame.age - frame.age.mean()) / frame.age.std())
    expected = smf.glm("had ~ z + C(religious, Treatment('3'))", scaled, family=sm.families.Binomial()).fit(
        tol=1e-14
    )
    model = GLM("had ~ scale(age) + C(religious, Treatment('3'))", family="binomial").fit(federation(frame))
    near(model.coefficient[model.names.index("scale(age)")], expected.params["z"], 1e-8)
    near(
        model.coefficient[model.names.index("C(religious, Treatment('3'))[T.4]")],
        expected.params["C(religious, Treatment('3'))[T.4]"],
        1e-8,
    )
    near(model.predict(frame), expected.predict(scaled), 1e-8)


def test_rows_with_missing_values_are_left_out_and_counted() -> None:
    frame = table("diabetes").copy()
    frame.loc[frame.index[::9], "bmi"] = np.nan
    expected = smf.ols("progression ~ age + bmi", frame).fit()
    model = GLM("progression ~ age + bmi").fit(federation(frame))
    agrees(model, expected)
    assert model.facts["left_out"] == {"bmi": int(frame.bmi.isna().sum())}
    assert model.facts["rows"] == frame.bmi.notna().sum()
    filled = GLM("progression ~ age + bmi", missing="schema").fit(federation(frame))
    agrees(filled, smf.ols("progression ~ age + bmi", frame.fillna({"bmi": frame.bmi.mean()})).fit())


def test_a_column_that_follows_from_others_is_named_and_has_no_coefficient() -> None:
    frame = table("diabetes").assign(twice=lambda t: 2 * t.bmi - t.age, one=3.0)
    with pytest.warns(fs.ConditionWarning, match="'twice' is not defined because of singularities"):
        model = GLM("progression ~ age + one + bmi + twice").fit(federation(frame))
    expected = smf.ols("progression ~ age + bmi", frame).fit()
    assert [name for name, kept in zip(model.names, model.kept, strict=True) if not kept] == ["one", "twice"]
    near(model.coefficient[model.kept], expected.params, 1e-8)
    near(model.standard_error[model.kept], expected.bse, 1e-8)
    assert "NA" in str(model)


def test_it_keeps_the_laws() -> None:
    assert "partition" in check_method(GLM)
    check_method(GLM("y ~ x0 + x1"))


def test_the_result_prints_saves_and_predicts(tmp_path: Any) -> None:
    where, method, _ = CASES["logistic"]
    frame = table(where)
    model = method.fit(federation(frame))
    assert "odds ratio" in str(model)
    assert set(model.to_frame().columns) >= {"term", "coefficient", "se", "p", "exp", "exp_low"}
    assert json.loads(model.to_json())["table"][0]["term"] == INTERCEPT
    assert model.to_markdown().startswith("| term |")
    assert r"\toprule" in model.to_latex()
    assert r"yrs\_married" in model.to_latex()
    model.save(tmp_path / "m.safetensors")
    again = fs.load_model(tmp_path / "m.safetensors")
    near(again.predict(frame), oracle("logistic").predict(frame), 1e-8)
    assert str(again) == str(model)


def test_predictions_need_no_outcome_and_name_numbers_far_from_those_of_training() -> None:
    frame = table("fair")
    model = GLM("had ~ age + C(religious)", family="binomial").fit(federation(frame))
    assert [column.name for column in model.schema.columns] == ["age", "religious"]
    some = frame[["religious", "age"]].head(20)
    near(model.predict(some), model.predict(frame)[:20], 1e-12)
    with pytest.warns(fs.ConditionWarning, match="column 'age': 20 of 20 rows are far"):
        model.predict(some.assign(age=some.age * 365))
    gaps = some.assign(age=some.age.where(some.index != 2))
    gaps.loc[4, "religious"] = "9"
    with pytest.warns(fs.ConditionWarning, match=r"2 of 20 rows have no .* row 2 \(age\), row 4 \(rel"):
        found = model.predict(gaps)
    assert np.flatnonzero(np.isnan(found)).tolist() == [2, 4]
    near(np.delete(found, [2, 4]), np.delete(model.predict(some), [2, 4]), 1e-12)
    with pytest.raises(DataError, match=r"2 of 20 rows have no prediction.* Fill them in"):
        model.decision_function(gaps)
    with pytest.raises(DataError, match="20 rows give no finite number"):
        GLM("had ~ log(age)", family="binomial").fit(federation(frame)).predict(some.assign(age=0.0))


def test_the_label_of_a_schema_may_stand_on_the_right() -> None:
    frame = table("gbsg2")
    schema = replace(schema_of(frame.drop(columns="horTh")), label="horTh", classes=("no", "yes"))
    clients = np.arange(len(frame)) % 3
    rows = fs.LocalFederation.from_arrays(
        encode(schema, frame.drop(columns="horTh")), frame.horTh.to_numpy(str), clients, schema=schema
    )
    model = GLM("time ~ age + horTh").fit(rows)
    expected = smf.ols("time ~ age + horTh", frame).fit()
    agrees(model, expected)
    near(model.predict(frame), expected.predict(frame), 1e-9)


# -- what is refused ---------------------------------------------------------------------------------


def refused(method: GLM, frame: Any, match: str, **more: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((DataError, fs.CohortError, fs.TermError), match=match):
            method.fit(federation(frame, **more))


def test_a_category_that_separates_is_named() -> None:
    frame = table("fair").copy()
    frame.loc[frame.religious == "4", "had"] = 0.0
    refused(
        GLM("had ~ age + religious", family="binomial"), frame, r"separation.*religious\[T\.4\].*no events"
    )


def test_a_number_that_separates_is_named() -> None:
    frame = table("diabetes").assign(high=lambda t: (t.bmi > 27.05).astype(float))
    refused(GLM("high ~ age + bmi", family="binomial"), frame, "separation.*'bmi'")


def test_what_looks_like_separation_and_is_not() -> None:
    """Shares on the right side of a half, and a category that has all events where nothing is fixed."""
    shares = np.tile([0.2, 0.3, 0.7, 0.8], 10)
    frame = table("diabetes").head(40).assign(share=shares, trials=50.0, x=shares * 2 + 0.1)
    model = GLM("share ~ x", family="binomial", weights="trials").fit(federation(frame, 3))
    exog = np.column_stack([np.ones(40), frame.x])
    expected = sm.GLM(shares, exog, family=sm.families.Binomial(), var_weights=frame.trials).fit(tol=1e-14)
    near(model.coefficient, expected.params, 1e-8)
    frame = frame.assign(treated=np.tile([0.0, 1.0], 20), count=np.tile([0.0, 1.0, 0.0, 3.0], 10))
    model = GLM("count ~ 0 + treated", family="poisson").fit(federation(frame, 3))
    near(model.coefficient, [np.log(2.0)], 1e-9)


def test_zero_events() -> None:
    frame = table("fair").assign(had=0.0)
    refused(GLM("had ~ age", family="binomial"), frame, "zero events")
    refused(GLM("had ~ age", family="poisson"), frame, "zero events")


def test_negative_counts() -> None:
    frame = table("randhie").assign(mdvis=lambda t: t.mdvis - 3)
    refused(GLM("mdvis ~ lncoins", family="poisson"), frame, "a count of at least 0")


def test_outcomes_that_the_family_does_not_have() -> None:
    refused(GLM("affairs ~ age", family="gamma"), table("fair"), "above 0 in the gamma family")
    refused(GLM("age ~ children", family="binomial"), table("fair"), "between 0 and 1")


def test_a_level_at_one_site_only_is_fitted() -> None:
    frame = table("fair")
    owners = (frame.religious == "4").to_numpy().astype(int)
    model = CASES["logistic"][1].fit(federation(frame, owners))
    agrees(model, oracle("logistic"))


def test_few_rows_for_each_coefficient_are_warned_of() -> None:
    frame = table("diabetes").head(40)
    with pytest.warns(fs.ConditionWarning, match="40 rows for 6 coefficients"):
        model = GLM("progression ~ age + bmi + bp + s1 + s2").fit(federation(frame, 3))
    assert "doubtful" in model.remarks[0]


def test_fits_that_leave_no_error() -> None:
    frame = table("diabetes")
    refused(
        GLM("progression ~ age + bmi + bp + s1"),
        frame.head(5),
        "5 rows for 5 coefficients: none is left",
        owners=2,
    )
    with pytest.warns(fs.ConditionWarning, match="explain the outcome exactly"):
        GLM("exact ~ age").fit(federation(frame.assign(exact=2 * frame.age + 1)))
    with pytest.warns(fs.ConditionWarning, match="explain the outcome exactly"):
        GLM("three ~ age").fit(federation(frame.assign(three=3.0)))


def test_sites_that_disagree_on_a_column() -> None:
    frame = table("diabetes")
    schemas = [Schema((Column("progression"), Column("bmi", unit=unit))) for unit in ("kg/m2", "z")]
    clients = [
        fs.Participant(
            f"site-{place}",
            fs.ClientData(encode(each, frame, extra="ignore"), np.zeros(len(frame)), schema=each),
        )
        for place, each in enumerate(schemas)
    ]
    with pytest.raises(fs.FedsolveError, match=r"site-1.*unit 'z', there 'kg/m2'"):
        GLM("progression ~ bmi").fit(fs.LocalFederation(clients, task="regression"))


@pytest.mark.parametrize(
    ("formula", "match"),
    [
        ("progression ~ agee", "Did you mean 'age'"),
        ("progression ~ C(sex)", "category"),
        ("progression ~ log(age - 100)", "not a finite number"),
        ("progression", "needs an outcome"),
        ("", "a formula is needed"),
        ("progression ~ age | sex", "more than one part"),
        ("progression ~ scale(age + bmi)", "one column"),
        ("progression ~ log(`body mass`)", "Rename the column"),
        ("progression ~ .", "needs its columns by name"),
        ("C(progression) ~ age", "C is for columns on the right"),
        ("scale(progression) ~ age", "scale is for columns on the right"),
    ],
)
def test_formulas_that_cannot_be(formula: str, match: str) -> None:
    refused(GLM(formula), table("diabetes"), match)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('x')",
        "age.real",
        "(lambda: 1)()",
        "age[0]",
        "10**10**10",
        "[x for x in age]",
        "'a' * 1000000000",
        "open('x')",
        "eval('1')",
        "f'{age}'",
        "(age := 1)",
    ],
)
def test_expressions_run_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(DataError):
        check(expression, ["age"])
    refused(GLM(f"progression ~ I({expression})"), table("diabetes"), "")


def test_links_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="link 'logit' does not fit the family 'poisson'"):
        GLM("y ~ x", family="poisson", link="logit")
    refused(GLM("affairs ~ 0 + age", family="gamma"), table("affairs"), "needs an intercept")


def test_weights_below_zero() -> None:
    refused(GLM("progression ~ age", weights="w"), table("diabetes").assign(w=-1.0), "at least 0")


def test_squares_are_written_in_latex() -> None:
    told = GLM("progression ~ age + I(bmi**2)").fit(federation(table("diabetes"))).to_latex()
    assert "I(bmi ** 2)" in told


def test_a_run_resumes_at_any_exchange(tmp_path: Any) -> None:
    """A checkpoint holds the totals; the blocks of the model are not added twice."""
    method, rows = GLM("had ~ scale(age) + religious", family="binomial"), federation(table("fair"))
    whole, states = method.fit(rows), []
    path = tmp_path / "c.fst"
    method.fit(rows, checkpoint=path, follow=lambda record, expected: states.append(path.read_bytes()))
    for state in states:
        path.write_bytes(state)
        again = method.fit(rows, checkpoint=path, resume=True)
        assert again.to_bytes() == whole.to_bytes()


def test_rates_start_near_their_mean() -> None:
    frame = table("affairs").assign(days=365.0 * table("affairs").yrs_married)
    model = GLM("affairs ~ age", family="poisson", offset="log(days)").fit(federation(frame))
    expected = smf.glm("affairs ~ age", frame, family=sm.families.Poisson(), offset=np.log(frame.days))
    near(model.coefficient, expected.fit(tol=1e-14).params, 1e-8)
    assert model.facts["exchanges"] <= 10  # 17 from a first point that knows nothing of the offset


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_of_four_numbers_the_one_that_separates_is_named(link: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4000, 4))
    ill = (x[:, 2] > 0).astype(float)
    rows = fs.LocalFederation.from_arrays(x, ill, np.arange(4000) % 3, task="regression")
    with pytest.raises(DataError, match="separation: the coefficient of 'x2' grows"):
        GLM("y ~ x0 + x1 + x2 + x3", family="binomial", link=link).fit(rows)
