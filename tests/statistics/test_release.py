"""One noisy Gram matrix, and intervals that hold."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.dialogue import DialogueRun
from fedsolve.federation.messages import Term, Total
from fedsolve.federation.noisy_sums import NoisyAnswer
from fedsolve.privacy import SecureFederation
from fedsolve.statistics.release import KIND
from tests.command import fedsolve

SCHEMA = fs.Schema(
    [
        fs.Column("age", reference=50.0, scale=15.0),
        fs.Column("dose", reference=2.0, scale=1.0),
        fs.Column("bmi", reference=25.0, scale=5.0),
        fs.Column("sex", kind="category", categories=("f", "m")),
    ],
    label="y",
)
FORMULAS = ("y ~ age", "y ~ age + dose", "y ~ bmi + sex", "y ~ age + dose + bmi + sex", "dose ~ age + C(sex)")
METHOD = fs.Releasing(epsilon=2.0, target_reference=10.0, target_scale=10.0)


def table(seed, rows=6000):
    rng = np.random.default_rng(seed)
    age = np.clip(rng.normal(50, 15, rows), 10, 90)
    sex = rng.integers(0, 2, rows)
    dose = np.clip(2 + 0.02 * (age - 50) + 0.3 * sex + rng.normal(0, 0.8, rows), -0.5, 4.5)
    bmi = np.clip(rng.normal(25, 5, rows), 12, 38)
    y = 3 + 0.1 * age + 2 * dose + rng.normal(0, 3, rows)
    x = np.column_stack([age, dose, bmi, sex == 0, sex == 1, np.zeros(rows)]).astype(float)
    return x, np.clip(y, -19, 39)


def pooled(x, y, formula):
    """Least squares on the rows themselves."""
    columns = {"age": x[:, 0], "dose": x[:, 1], "bmi": x[:, 2], "sex=m": x[:, 4], "y": y}
    left, right = formula.split(" ~ ")
    names = [word.removeprefix("C(").removesuffix(")").replace("sex", "sex=m") for word in right.split(" + ")]
    design = np.column_stack([np.ones(len(y)), *(columns[name] for name in names)])
    return np.linalg.lstsq(design, columns[left], rcond=None)[0]


def federation(x, y, sites=4):
    owners = np.arange(len(y)) % sites
    return fs.LocalFederation.from_arrays(x, y, owners, schema=SCHEMA, task="regression")


def drawn(run, total):
    """A release of the same exact total with fresh noise."""
    fresh = DialogueRun(METHOD, run.spec)
    fresh.chain = run.chain
    fresh.request(total.cohort)
    term = Term({"gram": total.term.arrays["gram"].copy()}, {}, frozenset({"gram"}))
    fresh.absorb(Total(term, total.cohort))
    return fresh.model()


@pytest.fixture(scope="module")
def exact():
    """The run and its exact total, before any noise."""
    x, y = table(0)
    engine = federation(x, y)
    run = fs.Recipe(METHOD, SCHEMA).start(engine.describe()).run
    return x, y, run, engine.exchange(run.request(engine.clients), run.chain)


def test_intervals_hold_the_pooled_coefficients(exact, monkeypatch):
    """Five regressions on subsets, 200 draws of the noise: 95 % intervals hold in 90 to 99 % of the cases.

    Over 2,000 draws every interval holds in 94.4 to 95.6 % of them; 200 draws of one seed are the same
    whenever they are made.
    """
    x, y, run, total = exact
    random = np.random.default_rng(0).bytes
    noised = NoisyAnswer.noised
    monkeypatch.setattr(NoisyAnswer, "noised", lambda self, term, sites=1: noised(self, term, sites, random))
    held = {formula: [] for formula in FORMULAS}
    for _ in range(200):
        release = drawn(run, total)
        for formula in FORMULAS:
            low, high = release.fit(formula).interval(of="pooled")
            truth = pooled(x, y, formula)
            held[formula].append((low <= truth) & (truth <= high))
    for formula, cases in held.items():
        share = np.mean(cases, axis=0)
        assert np.all((share >= 0.90) & (share <= 0.99)), (formula, share)
        assert 0.92 <= share.mean() <= 0.98, (formula, share)


def test_intervals_of_the_population_hold_what_rows_are_drawn_from():
    held = []
    for seed in range(60):
        x, y = table(seed + 1, 3000)
        release = METHOD.fit(federation(x, y), schema=SCHEMA)
        low, high = release.fit("y ~ age + dose").interval()
        held.append((low <= [3, 0.1, 2]) & (high >= [3, 0.1, 2]))
    assert np.all(np.mean(held, axis=0) > 0.85)


def test_one_row_changes_the_gram_by_one_at_most(exact):
    x, y, run, total = exact
    far = np.array([[1e9, -1e9, 1e9, 0.0, 1.0, 0.0]])
    one = federation(np.vstack([x, far]), np.append(y, 1e9))
    more = one.exchange(run.request(one.clients), run.chain).term.arrays["gram"]
    change = np.linalg.norm(more - total.term.arrays["gram"])
    assert 0.9 < change <= 1 + 1e-9
    assert run.request(one.clients).kind == KIND


def test_a_release_is_saved_and_answers_more(exact, tmp_path):
    x, _, run, total = exact
    release = drawn(run, total)
    release.save(tmp_path / "r.safetensors")
    again = fs.load_model(tmp_path / "r.safetensors")
    assert np.array_equal(again.fit("y ~ .").coefficient, release.fit("y ~ .").coefficient)
    assert again.rows == pytest.approx(6000, abs=300)
    assert again.correlation()[0, 1] == pytest.approx(np.corrcoef(x[:, 0], x[:, 1])[0, 1], abs=0.1)
    values, directions = again.pca(["age", "dose", "bmi"])
    assert values.sum() == pytest.approx(3.0, abs=1e-6)
    assert directions.shape == (3, 3)
    assert np.abs(again.fit("y ~ age", ridge=1e5).coefficient[1]) < abs(again.fit("y ~ age").coefficient[1])
    assert "epsilon" in str(again)


def test_what_a_release_cannot_answer_is_refused(exact):
    _, _, run, total = exact
    release = drawn(run, total)
    for formula, said in (
        ("y ~ weight", "no column 'weight'"),
        ("y ~ age:dose", "products and functions"),
        ("age", "is no formula"),
        ("y ~ y", "other columns on its right"),
    ):
        with pytest.raises(fs.DataError, match=said):
            release.fit(formula)
    x, y = table(1, 60)
    few = fs.Releasing(epsilon=0.1, target_scale=10.0).fit(federation(x, y), schema=SCHEMA)
    with pytest.raises(fs.DataError, match="noise of this release is too large"):
        few.fit("y ~ age + dose + bmi")


def test_sites_can_add_the_noise(exact):
    x, y, _, _ = exact
    release = METHOD.fit(SecureFederation(federation(x, y)), schema=SCHEMA)
    assert release.facts["noise_by"] == "sites"
    low, high = release.fit("y ~ age").interval(0.9999, of="pooled")
    truth = pooled(x, y, "y ~ age")
    assert np.all((low <= truth) & (truth <= high))


def test_the_commands(tmp_path):
    rng = np.random.default_rng(0)
    age = rng.normal(50, 10, 4000)
    died = rng.random(4000) < 1 / (1 + np.exp(-(age - 50) / 10))
    for site in range(2):
        lines = [f"{a:.1f},{'yes' if d else 'no'}" for a, d in zip(age[site::2], died[site::2], strict=True)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,died", *lines]))
    schema = fs.Schema([fs.Column("age", reference=50.0, scale=10.0)], label="died", classes=("no", "yes"))
    fs.write_schema(schema, tmp_path / "s.toml")
    out = tmp_path / "r.safetensors"
    files = (tmp_path / "0.csv", tmp_path / "1.csv", "--schema", tmp_path / "s.toml")
    made = fedsolve("release", *files, "--epsilon", "2", "--out", out)
    assert made.exit_code == 0, made.stderr
    assert "epsilon" in made.stdout
    fitted = fedsolve("fit", out, "died ~ age")
    assert fitted.exit_code == 0, fitted.stderr
    assert "age" in fitted.stdout
    assert fs.load_model(out).fit("died ~ age").coefficient[1] == pytest.approx(0.02, abs=0.01)
    assert "no column" in fedsolve("fit", out, "died ~ sex").stderr
