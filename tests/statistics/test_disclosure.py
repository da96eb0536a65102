"""What a dishonest server tries with formulas: each attack shows a row without the rules, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve import GLM, Cox, Describe, KaplanMeier, MixedModel
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import OFF, Limits
from fedsolve.tables.schema import Column, Schema
from tests.statistics.tables import federation, near

SITES = pytest.mark.parametrize("sites", [3, 4, 6])
ROWS, ALONE = 600, 77
SPLIT = "under secure sums"


def people() -> Any:
    """Numbers, events, categories that meet in one row, and a count that is 2 in one row."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((ROWS, 4)).round(3), columns=["a", "b", "c", "y"])
    frame["days"] = rng.integers(1, 400, ROWS).astype(float)
    frame["died"] = (rng.random(ROWS) < 0.5).astype(float)
    place, there = np.arange(ROWS), np.arange(ROWS) == ALONE
    frame["visits"] = np.where(there, 2.0, place // 7 % 2)
    frame["sex"] = np.where((place // 7 % 3 == 0) & ~there, "f", "m")
    frame["arm"] = np.where((place // 7 % 3 < 2) & ~there, "new", "old")
    frame.loc[place // 7 % 9 == 0, "arm"] = "old"
    frame.loc[(frame.sex == "m") & (frame.arm == "old"), "sex"] = "f"
    frame.loc[ALONE, ["sex", "arm"]] = ["m", "old"]
    return frame


class Heard:
    """A secure federation whose server keeps every total."""

    def __init__(self, frame: Any, sites: int, limits: Limits | None) -> None:
        inner = federation(frame, np.arange(len(frame)) % sites)
        self.federation, self.totals = SecureFederation(inner, limits=limits), []
        exchange = self.federation.exchange

        def heard(request: Any, chain: Any) -> Any:
            total = exchange(request, chain)
            self.totals.append((request.kind, dict(total.term.arrays)))
            return total

        self.federation.exchange = heard  # type: ignore[method-assign]

    def ask(self, method: Any) -> list[tuple[str, dict[str, Any]]]:
        """What is heard of a run, however it ends."""
        before = len(self.totals)
        try:
            method.fit(self.federation)
        except fs.FedsolveError as problem:
            if SPLIT in str(problem):
                raise
        return self.totals[before:]

    def survey(self, method: Any) -> dict[str, Any]:
        return next(arrays for kind, arrays in self.ask(method) if kind == "statistics-survey")


def refused(attack: Callable[[Heard], Any], sites: int, frame: Any, match: str) -> Any:
    """What an attack shows without the rules; with them it is refused by name."""
    with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*{match}"):
        attack(Heard(frame, sites, None))
    return attack(Heard(frame, sites, OFF))


RIGHT = "a + b + c"


def row(frame: Any) -> Any:
    return frame.loc[ALONE, ["a", "b", "c"]].to_numpy(float)


@SITES
def test_weights_that_are_a_threshold(sites: int) -> None:
    frame = people()
    frame.loc[ALONE, "a"] = 9.0
    method = GLM(f"y ~ {RIGHT}", weights="I(a > 8)")
    found = refused(lambda heard: heard.survey(method), sites, frame, "name of a column")
    near(found["first"][1:], row(frame), 1e-9)
    near(found["with_outcome"][0], frame.y[ALONE], 1e-9)


@SITES
def test_events_that_are_a_window(sites: int) -> None:
    frame = people()
    frame.loc[ALONE, "a"] = 9.0
    method = Cox("Surv(abs(b) + .01, I((a > 8)*(a < 10))) ~ b + c")
    found = refused(lambda heard: heard.survey(method), sites, frame, "name of a column")
    near(found["with_outcome"], row(frame)[1:], 1e-9)


@SITES
@pytest.mark.parametrize("kind", [GLM, MixedModel])
def test_columns_that_are_a_window_or_two_thresholds(sites: int, kind: Any) -> None:
    frame = people()
    for column in (
        "I((a > 8)*(a < 10))",
        "floor(a / 9)",
        "maximum(a, 8)",
        "abs(a - 9)",
        "I(a**2 - 2)",
        "2:a",
    ):
        with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*is no column, C"):
            Heard(frame, sites, None).ask(kind(f"y ~ {column} + b"))
    cut = np.sort(np.append(frame.a, frame.a[ALONE]))
    low, high = (
        (cut[np.searchsorted(cut, frame.a[ALONE]) - 1] + frame.a[ALONE]) / 2,
        (cut[np.searchsorted(cut, frame.a[ALONE], side="right")] + frame.a[ALONE]) / 2,
    )
    method = kind(f"y ~ I(a > {low}) + I(a > {high}) + b")
    found = refused(lambda heard: heard.survey(method), sites, frame, "is no column")["with_outcome"]
    same = frame.y[frame.a == frame.a[ALONE]].sum()
    assert abs(found[1] - found[2] - same) < 1e-9


@SITES
def test_categories_that_meet_in_one_row(sites: int) -> None:
    method = GLM("y ~ C(sex):C(arm) + a")
    found = refused(lambda heard: heard.survey(method), sites, people(), "set in few rows")
    assert np.min(np.abs(found["with_outcome"] - people().y[ALONE])) < 1e-9


@SITES
@pytest.mark.parametrize("other", ["I(visits**2)", "sqrt(visits)", "I(visits**3)", "log1p(visits)"])
def test_a_power_that_differs_from_its_column_in_one_row(sites: int, other: str) -> None:
    frame, factor = people(), {"I(visits**2)": 2.0, "sqrt(visits)": np.sqrt(2) - 2, "I(visits**3)": 6.0}
    one, two = GLM("a ~ visits"), GLM(f"a ~ {other}")

    def attack(heard: Heard) -> float:
        first, second = heard.survey(one)["with_outcome"][1], heard.survey(two)["with_outcome"][1]
        turned = first * np.log(2) if other == "log1p(visits)" else first
        return float((second - turned) / factor.get(other, np.log(3) - 2 * np.log(2)))

    assert abs(refused(attack, sites, frame, "single a row out") - frame.a[ALONE]) < 1e-9


@SITES
def test_a_product_that_differs_from_a_column_in_one_row(sites: int) -> None:
    """visits:flag is visits, but for one row."""
    frame = people().assign(flag=lambda f: ((f.visits == 1) | (np.arange(ROWS) % 5 == 0)).astype(float))

    def attack(heard: Heard) -> float:
        first, second = heard.survey(GLM("a ~ visits")), heard.survey(GLM("a ~ visits:flag"))
        return float(first["with_outcome"][1] - second["with_outcome"][1]) / 2

    assert abs(refused(attack, sites, frame, "single a row out|is set in") - frame.a[ALONE]) < 1e-9


@SITES
def test_a_missing_value_in_one_row(sites: int) -> None:
    frame = people()
    frame.loc[ALONE, "c"] = np.nan

    def attack(heard: Heard) -> Any:
        every, some = heard.survey(GLM("y ~ a + b")), heard.survey(GLM("y ~ a + b + c"))
        return every["first"][1:] - some["first"][1:3]

    near(refused(attack, sites, frame, "few rows of this site lack c"), row(frame)[:2], 1e-9)


@SITES
def test_missing_values_of_two_columns_that_differ_in_one_row(sites: int) -> None:
    frame = people()
    frame.loc[np.arange(ROWS) // 7 % 3 == 0, ["b", "c"]] = np.nan
    frame.loc[ALONE, "c"] = np.nan

    def attack(heard: Heard) -> Any:
        return heard.survey(GLM("y ~ a + b"))["first"][1] - heard.survey(GLM("y ~ a + c"))["first"][1]

    assert abs(refused(attack, sites, frame, "lack c") - frame.a[ALONE]) < 1e-9


@SITES
def test_a_category_of_one_row(sites: int) -> None:
    """The census leaves it out; its row would be missing from one sum, and not from another."""
    frame = people()
    frame.loc[ALONE, "arm"] = "third"
    with pytest.raises(
        fs.FedsolveError, match=f"{SPLIT}, 'arm' has .*'third' in too few rows.*is no category"
    ):
        Heard(frame, sites, None).ask(GLM("y ~ a + C(arm)"))
    with pytest.raises(fs.FedsolveError, match=f"{SPLIT}, 'arm' has .*'third' in too few rows"):
        Heard(frame, sites, None).ask(Describe(by="arm"))
    found = Heard(frame, sites, OFF).survey(GLM("y ~ a + C(arm)"))
    assert np.min(np.abs(found["with_outcome"] - frame.y[ALONE])) < 1e-9


@SITES
@pytest.mark.parametrize("value", ["third", None])
@pytest.mark.parametrize("missing", ["other", "flag"])
def test_a_category_that_is_not_listed_in_one_row(sites: int, missing: str, value: Any) -> None:
    """The row counts as one that lacks a value, and is not left out alone; nor do other levels show it."""
    frame = people()
    columns = [Column(name) for name in ("a", "y")]
    columns.append(Column("arm", "category", categories=("new", "old"), missing=missing))
    frame.loc[ALONE, "arm"] = value
    inner = federation(frame, np.arange(ROWS) % sites, Schema(tuple(columns)))
    for method in (GLM("y ~ a + C(arm)"), Describe(by="arm")):
        with pytest.raises(fs.FedsolveError, match=f"{SPLIT}, .*(this site lack arm|'arm' has 'old')"):
            method.fit(SecureFederation(inner))
    with pytest.raises(
        fs.FedsolveError, match=f"{SPLIT}, 'arm' has .* in too few rows.*(no other value|count as a category)"
    ):
        GLM("y ~ a + C(arm)", missing="schema").fit(SecureFederation(inner))


@pytest.mark.parametrize("missing", ["other", "flag", "new"])
def test_few_empty_cells_of_a_category(missing: str) -> None:
    """No level of their own: left out where that many rows are, or a category, as the schema says."""
    frame, place = people(), np.arange(ROWS)
    frame["c"], frame["arm"] = 5.0 + place // 100 % 2, np.where(place // 7 % 2, "new", "old")
    frame.loc[place % 100 < 3, "arm"], frame.loc[place % 100 // 3 % 4 == 1, "c"] = None, np.nan
    columns = [Column(name) for name in ("a", "c", "y")]
    columns.append(Column("arm", "category", categories=("new", "old"), missing=missing))
    inner = federation(frame, place % 3, Schema(tuple(columns)))
    for filled in (False, True)[: 1 + (missing == "new")]:
        method = GLM("y ~ a + c + C(arm)", missing="schema" if filled else "drop")
        found, expected = method.fit(SecureFederation(inner)), method.fit(inner)
        near(found.coefficient[found.kept], expected.coefficient[expected.kept], 1e-9)
        assert found.facts["left_out"] == expected.facts["left_out"]


@SITES
def test_a_description_of_a_column_with_one_gap(sites: int) -> None:
    """The sums of other columns over rows that have it lack one row; nobody is told them."""
    frame = people()
    frame.loc[ALONE, "c"] = np.nan

    def gap(limits: Limits | None) -> Any:
        heard = Heard(frame, sites, limits).ask(Describe())
        return next(arrays["with"] for kind, arrays in heard if "with" in arrays)

    found = gap(OFF)
    assert abs(found[0, 0] - found[0, 2] - frame.a[ALONE]) < 1e-9
    assert np.all(gap(None)[:, 2] == 0)
    assert np.all(gap(None)[2] == 0)


@SITES
def test_an_outcome_or_a_weight_of_one_row(sites: int) -> None:
    """A column with one value in all rows but one is left out by the census, which refuses such a label."""
    frame = people().assign(rare=np.arange(ROWS) == ALONE, heavy=np.where(np.arange(ROWS) == ALONE, 1e9, 1.0))
    frame = frame.assign(rare=frame.rare.astype(float))
    assert np.all(Heard(frame, sites, None).survey(GLM("rare ~ a + b + c"))["with_outcome"] == 0)
    near(Heard(frame, sites, OFF).survey(GLM("rare ~ a + b + c"))["with_outcome"][1:], row(frame), 1e-9)
    method = GLM(f"y ~ {RIGHT}", weights="heavy")
    assert np.all(Heard(frame, sites, None).survey(method)["first"] == 0)
    near(Heard(frame, sites, OFF).survey(method)["first"][1:] / 1e9, row(frame), 1e-5)
    x = frame[["a", "b", "c"]].to_numpy()

    def label(limits: Limits | None) -> Any:
        inner = fs.LocalFederation.from_arrays(
            x, frame.rare.to_numpy(), np.arange(ROWS) % sites, task="regression"
        )
        secure, seen = SecureFederation(inner, limits=limits), []
        run = GLM("y ~ x0 + x1 + x2").start(secure.describe())
        seen.append(secure.exchange(run.request(secure.clients), run.chain)["with_outcome"])
        return seen[0]

    near(label(OFF)[1:], row(frame), 1e-9)
    with pytest.raises(fs.FedsolveError, match="the target is the same in all but few rows"):
        label(None)


@SITES
def test_residuals_that_are_zero_but_for_one_row(sites: int) -> None:
    """Robust errors weight rows by squared residuals: of a count that a flag explains, but for one row."""
    frame = people().assign(flag=lambda f: (f.visits > 0).astype(float))
    method = GLM(f"visits ~ flag + {RIGHT}", robust="HC0")

    def attack(heard: Heard) -> Any:
        meat = heard.ask(method)[-1][1]["meat"]
        return meat[2:, 0] / meat[0, 0]

    x = frame[["a", "b", "c"]]
    expected = (row(frame) - x.mean()) / x.std(ddof=0)
    near(refused(attack, sites, frame, "of the weight in a product"), expected, 0.05)


@SITES
def test_new_rows_are_held_to_the_rules_too(sites: int) -> None:
    """The same question before and after: among the rows that came, two powers differ in one."""
    frame = people()
    inner = federation(frame, np.arange(ROWS) % sites)
    early, later = np.arange(ROWS) // 12 % 2 == 1, [participant.data for participant in inner.participants]
    early[ALONE] = False
    for participant in inner.participants:
        participant.data = participant.data.taking(early[participant.data.rows])
    secure, method = SecureFederation(inner, limits=Limits(told=100.0)), GLM("a ~ I(visits**2)")
    method.fit(secure)
    for participant, data in zip(inner.participants, later, strict=True):
        participant.data = data
        participant.forget()
    with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*single a row out"):
        method.fit(secure)


@SITES
def test_two_grids_of_times(sites: int) -> None:
    frame = people()
    frame["days"] = np.where(np.arange(ROWS) == ALONE, 100.5, frame.days.round())
    by_time = [Cox("Surv(days, died) ~ a + b + c", strata=None, grid=width) for width in (100.0, 100.9)]

    def attack(heard: Heard) -> Any:
        # Standard columns: of the sum of all cells the mean is taken off.
        found = []
        for method in by_time:
            arrays = next(arrays for kind, arrays in heard.ask(method) if kind == "cox-baseline")
            found.append(arrays["s1"][0])
        return found[1] - found[0]

    x = frame[["a", "b", "c"]]
    expected = (row(frame) - x.mean()) / x.std(ddof=0)
    near(refused(attack, sites, frame, "on another grid"), expected, 1e-9)
    heard = Heard(frame, sites, None)
    heard.ask(KaplanMeier("days", "died", grid=20.0))
    with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*counts by 'days' have been told on another grid"):
        heard.ask(KaplanMeier("days", "died", grid=30.0))


@SITES
def test_a_part_of_the_rows(sites: int) -> None:
    from fedsolve.federation.folds import Part

    for method in (GLM("y ~ a"), Describe()):
        secure = SecureFederation(federation(people(), np.arange(ROWS) % sites))
        run = fs.Recipe(method, secure.federation.schema).start(secure.describe())  # type: ignore[attr-defined]
        request = run.request(secure.clients)
        note = {**request.note, **Part((0,)).note()}
        with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*a part of them"):
            secure.exchange(fs.federation.messages.replace(request, note=note), run.chain)


def test_honest_questions_are_answered() -> None:
    """One after the other, of the same rows."""
    frame = people().assign(visits=lambda f: np.minimum(f.visits, 1), arm=np.arange(ROWS) % 3)
    frame = frame.assign(arm=frame.arm.map({0: "x", 1: "y", 2: "z"}))
    frame.loc[::4, "c"] = np.nan
    secure, plain = SecureFederation(federation(frame, 4)), federation(frame, 4)
    for method in (
        Describe(),
        GLM("y ~ a + b + C(sex) + visits"),
        GLM("y ~ a * C(sex) + I(b**2)"),
        GLM("y ~ a + b + c"),
        GLM("died ~ log(days) + C(arm):C(sex)", family="binomial"),
        Cox("Surv(days, died) ~ a + b + C(sex)"),
        Cox("Surv(days, died) ~ a + b", strata=None),
        KaplanMeier("days", "died", "sex", grid=40.0),
        MixedModel("y ~ a + b"),
    ):
        found, expected = method.fit(secure), method.fit(plain)
        if hasattr(expected, "coefficient"):
            near(found.coefficient, expected.coefficient, 1e-9)


@SITES
def test_the_schema_of_the_rows_names_the_columns(sites: int) -> None:
    """Under other names, what was told before would not be known."""
    secure = SecureFederation(federation(people(), np.arange(ROWS) % sites))
    run = GLM("x3 ~ I(x6**2)").start(secure.describe())
    with pytest.raises(fs.FedsolveError, match=f"{SPLIT}.*as the schema of the rows does"):
        secure.exchange(run.request(secure.clients), run.chain)


def test_the_weights_of_the_schema() -> None:
    """They are no column of the formula, and are held to the rules by a name of their own."""
    x, rng = people()[["a", "b"]].to_numpy(), np.random.default_rng(1)
    even, heavy = rng.uniform(1, 2, ROWS), np.where(np.arange(ROWS) == ALONE, 50.0, 1.0)
    for weights, match in ((even, None), (heavy, r"\(weights\).*single a row out")):
        inner = fs.LocalFederation.from_arrays(
            x, x[:, 0] + rng.normal(0, 1, ROWS), np.arange(ROWS) % 4, task="regression", sample_weight=weights
        )
        if match is None:
            near(
                GLM("y ~ x1").fit(SecureFederation(inner)).coefficient,
                GLM("y ~ x1").fit(inner).coefficient,
                1e-9,
            )
            continue
        with pytest.raises(fs.FedsolveError, match=match):
            GLM("y ~ x1").fit(SecureFederation(inner))


def test_what_was_told_is_known_after_a_restart(tmp_path: Any) -> None:
    """The book of earlier questions is kept with the account."""
    from fedsolve.privacy.disclosure import Disclosure

    account = Disclosure(Limits(), b"key", tmp_path)
    account._book["times"] = {"counts days": [20.0]}
    account._save()
    assert Disclosure(Limits(), b"key", tmp_path)._book == {"times": {"counts days": [20.0]}}


FACTORS = ("a", "b", "visits", "I(visits**2)", "sqrt(visits)", "C(sex)", "C(arm)", "I(a**2)", "c", "died")


def adversary(seed: int, limits: Limits) -> float:
    """The largest share that a row has of a combination of what random formulas were told, as formulaic
    builds it from the pooled rows: with a rare count, a rare pair of categories, and gaps."""
    import formulaic

    random, frame = np.random.default_rng(seed), people()
    frame[["a", "b", "c"]] = random.uniform(0.5, 2.0, (ROWS, 3)).round(2)
    if seed % 2:
        frame["visits"] = random.integers(0, 4, ROWS).astype(float)
    frame.loc[random.random(ROWS) < (0.3, 0.002)[seed % 2], "c"] = np.nan
    frame.loc[random.random(ROWS) < (0.3, 0.002, 0.03)[seed % 3], "arm"] = np.nan
    told, answered = [np.ones((ROWS, 1))], 0
    heard = Heard(frame, 3, limits)
    for _ in range(10):
        terms = [":".join(random.choice(FACTORS, random.integers(1, 3), replace=False)) for _ in range(2)]
        formula = " + ".join(terms)
        try:
            heard.survey(GLM(f"y ~ {formula}"))
        except fs.FedsolveError:
            continue
        used = [name for name in frame if name in formula]
        kept = frame[used].notna().all(axis=1).to_numpy()[:, None]
        built = formulaic.Formula(formula).get_model_matrix(frame.fillna(0.0), context={"sqrt": np.sqrt})
        told.append(np.where(kept, np.asarray(built, dtype=float), 0.0))
        answered += 1
    columns = np.hstack(told)
    columns = columns[:, columns.any(axis=0)]
    left, size, _ = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), full_matrices=False)
    assert answered
    return float(np.max(np.sum(left[:, size > 1e-9] ** 2, axis=1)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_random_adversary_finds_no_row(seed: int) -> None:
    assert adversary(seed, Limits(told=100.0)) < 0.6
    if seed < 6:
        assert adversary(seed, OFF) > 0.6


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_a_linear_model_that_begins_at_its_end(mean: float) -> None:
    """The first gradient is nothing but rounding, and the sums of a centred outcome are: neither is too
    coarse, since the curvature and the sum of squares are not."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, 2)), rng.standard_normal(ROWS)
    design = np.column_stack([np.ones(ROWS), x])
    y = mean + y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    inner = fs.LocalFederation.from_arrays(x, y, np.arange(ROWS) % 3, task="regression")
    secure, plain = (GLM("y ~ x0 + x1").fit(one) for one in (SecureFederation(inner), inner))
    assert np.abs(secure.coefficient - plain.coefficient).max() < 1e-14
    near(secure.covariance, plain.covariance, 1e-9)
