"""GLM and Describe with noise: intervals that hold, bounds that no row exceeds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.messages import Block, Chain, Request
from fedsolve.federation.method import opening
from fedsolve.federation.participant import ClientData, Participant, kind_of
from fedsolve.privacy import SecureFederation
from fedsolve.statistics import noisy
from tests.command import fedsolve

SCHEMA = fs.Schema(
    (
        fs.Column("age", bounds=(18, 95)),
        fs.Column("bmi", reference=27.0, scale=8.0),
        fs.Column("sex", "category", categories=("f", "m")),
        fs.Column("died", bounds=(0, 1)),
        fs.Column("cost", bounds=(0, 70)),
    )
)
LOGISTIC = fs.GLM("died ~ age + bmi + C(sex)", family="binomial")
LINEAR = fs.GLM("cost ~ age + C(sex)")


def table(rows=6000):
    """Encoded rows: age, bmi, three columns of sex, died, cost."""
    rng = np.random.default_rng(0)
    age, bmi = rng.normal(55, 12, rows).clip(20, 90), rng.normal(27, 5, rows).clip(10, 45)
    sex = rng.integers(0, 2, rows)
    chance = 1 / (1 + np.exp(0.5 - 0.04 * (age - 55) - 0.06 * (bmi - 27) - 0.5 * sex))
    died, cost = rng.random(rows) < chance, 10 + 0.3 * age + 2 * sex + rng.normal(0, 5, rows)
    return np.column_stack([age, bmi, sex == 0, sex == 1, np.zeros(rows), died, cost.clip(0, 70)]).astype(
        float
    )


def federation(rows, **settings):
    owners = np.arange(len(rows)) % 4
    return fs.LocalFederation.from_arrays(
        rows, np.zeros(len(rows)), owners, task="regression", schema=SCHEMA, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", [LOGISTIC, LINEAR], ids=["logistic", "linear"])
def test_intervals_include_the_noise(method):
    rows = federation(table())
    pooled = method.fit(rows).coefficient
    gaps, model = [], None
    for _ in range(25):
        model = fs.Private(method, epsilon=2.0).fit(rows)
        gaps.append((model.coefficient - pooled) / np.sqrt(np.diag(model.by_noise)))
    assert np.mean(np.abs(gaps) < 1.96) > 0.85
    assert 0.7 < np.sqrt(np.mean(np.square(gaps))) < 1.3
    assert np.all(model.standard_error > method.fit(rows).standard_error * 0.9)
    assert model.history[-1].metrics["epsilon"] == pytest.approx(2.0)
    assert model.facts["rows"] == pytest.approx(6000, abs=600)
    some = {"age": [50.0, 60.0], "bmi": [25.0, 30.0], "sex": ["f", "m"]}
    assert np.all(np.diff(model.predict(some)) > 0)


def test_a_description_with_noise():
    rows = table()
    model = fs.Private(fs.Describe(), epsilon=4.0).fit(federation(rows))
    lines = {line["column"]: line for line in model.records()}
    assert lines["age"]["mean"] == pytest.approx(rows[:, 0].mean(), abs=1.0)
    assert lines["age"]["sd"] == pytest.approx(rows[:, 0].std(), abs=1.0)
    assert lines["age"]["quantiles"][2] == pytest.approx(np.median(rows[:, 0]), abs=4.0)
    assert lines["sex"]["categories"]["m"] == pytest.approx(rows[:, 3].sum(), abs=100)
    assert model.tables["correlation"][0, 3] == pytest.approx(
        np.corrcoef(rows[:, 0], rows[:, 6])[0, 1], abs=0.1
    )
    assert model.page().count("<svg") == 4
    assert "noise of counts" in str(model)


def test_sites_add_the_noise_in_secure_sums_and_a_run_resumes(tmp_path):
    rows = federation(table())
    model = fs.Private(LOGISTIC, epsilon=4.0).fit(SecureFederation(rows))
    assert model.facts["noise_by"] == "sites"
    method, path, states = fs.Private(LOGISTIC, epsilon=4.0), tmp_path / "c", []
    whole = method.fit(rows, checkpoint=path, follow=lambda *_: states.append(path.read_bytes()))
    path.write_bytes(states[-1])
    assert np.array_equal(method.fit(rows, checkpoint=path, resume=True).coefficient, whole.coefficient)


@pytest.mark.parametrize(
    ("kind", "method"), [(noisy.GRAM, LINEAR), (noisy.STEP, LOGISTIC), (noisy.SUMS, fs.Describe())]
)
def test_one_row_changes_no_more_than_is_declared(kind, method):
    """Neighbours with one row more, as far out as rows can be, or no number at all."""
    rows, spec = table(40), federation(table(40)).describe()
    note = {**opening(fs.Private(method, epsilon=1.0), spec), "schema": SCHEMA.to_note()}
    chain = Chain([Block({"opening": note})])
    weight = 1e3 * np.random.default_rng(1).standard_normal(4)
    request = Request(kind, 0, 0, ("a",), {"mu": 0.01}, {"weight": weight}, 1, chain.digest, (*chain.blocks,))
    for last in ([1e9, -1e9, 0, 1, 0, 1, 1e9], [18, 3, 1, 0, 0, 0, 70], [np.nan, np.inf, 0, 0, 1, 1, 0]):
        terms = []
        for some in (rows, np.vstack([rows, np.array(last, dtype=float)])):
            data = ClientData(some, np.zeros(len(some)), schema=SCHEMA, checked=True)
            terms.append(Participant("a", data).answer(request))
        for name, bound in kind_of(kind).releases.items():
            change = np.linalg.norm(terms[1].arrays[name] - terms[0].arrays[name])
            assert change <= bound + 1e-9, name


def test_what_is_refused():
    rows = federation(table(500))
    for method, said in (
        (fs.GLM("died ~ age", family="poisson"), "gaussian or binomial"),
        (fs.GLM("died ~ age", robust="HC0"), "robust errors"),
        (fs.GLM("died ~ scale(age)"), "neither center"),
        (fs.GLM("died ~ log(cost)"), "no finite number everywhere"),
        (fs.Describe(by="sex"), "leave `by` out"),
    ):
        with pytest.raises(fs.DataError, match=said):
            fs.Private(method, epsilon=1.0).fit(rows)
    bare = fs.Schema((fs.Column("age"), fs.Column("cost", bounds=(0, 70))))
    plain = fs.LocalFederation.from_arrays(
        table(500)[:, [0, 6]], np.zeros(500), np.arange(500) % 4, task="regression", schema=bare
    )
    with pytest.raises(fs.DataError, match="'age' has no bounds in the schema"):
        fs.Private(fs.GLM("cost ~ age"), epsilon=1.0).fit(plain)
    with pytest.raises(fs.DataError, match="noise is too large"):
        fs.Private(LOGISTIC, epsilon=0.1).fit(rows)
    for method in (fs.Cox("Surv(a, b) ~ c"), fs.MixedModel("y ~ x"), fs.KaplanMeier("a", "b")):
        with pytest.raises(fs.DataError, match=f"'{method.key}' cannot be made private"):
            fs.Private(method, epsilon=1.0)
    with pytest.raises(fs.FedsolveError, match="weights are not private"):
        fs.Private(LINEAR, epsilon=1.0).fit(federation(table(500), sample_weight=np.ones(500)))


def test_the_commands(tmp_path):
    rows = table(4000)
    for site in range(2):
        lines = [f"{a:.1f},{'m' if m else 'f'},{d:.0f}" for a, _, _, m, _, d, _ in rows[site::2]]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,sex,died", *lines]))
    schema = fs.Schema(
        (
            fs.Column("age", bounds=(18, 95)),
            fs.Column("sex", "category", categories=("f", "m")),
            fs.Column("died", bounds=(0, 1)),
        )
    )
    fs.write_schema(schema, tmp_path / "s.toml")
    files = (tmp_path / "0.csv", tmp_path / "1.csv")
    noise = ("--epsilon", "4", "--schema", tmp_path / "s.toml")
    fitted = fedsolve("glm", "died ~ age + C(sex)", *files, "--family", "binomial", *noise)
    assert fitted.exit_code == 0, fitted.stderr
    assert "of rows and noise" in fitted.stdout
    assert "noise of counts" in fedsolve("describe", *files, *noise).stdout
    assert "noise needs --schema" in fedsolve("describe", *files, "--epsilon", "1").stderr
    assert "'cox' cannot be made private" in fedsolve("cox", "Surv(age, died) ~ sex", *files, *noise).stderr
