"""The commands describe, glm, cox, survival and mixed, on files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as smf
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

import fedsolve as fs
from tests.command import document, fedsolve, refused
from tests.statistics.tables import federation, near, table


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three hospitals, and all rows with a column of hospitals."""
    frame, paths = table("gbsg2"), []
    for place, name in enumerate(("north", "south", "west")):
        paths.append(tmp_path / f"{name}.csv")
        frame.iloc[place::3].to_csv(paths[-1], index=False)
    frame.assign(hospital=[("north", "south", "west")[row % 3] for row in range(len(frame))]).to_csv(
        tmp_path / "all.csv", index=False
    )
    return paths


def test_files_and_a_column_of_sites_are_the_same(files: list[Path], tmp_path: Path) -> None:
    formula = "Surv(time, cens) ~ age + C(horTh)"
    one = document("cox", formula, *files)
    other = document("cox", formula, tmp_path / "all.csv", "--client-column", "hospital", "--secure")
    for mine, theirs in zip(one["table"], other["table"], strict=True):
        near([mine["coefficient"], mine["se"]], [theirs["coefficient"], theirs["se"]], 1e-9)
    assert one["sites"] == other["sites"] == 3


def test_a_schema_with_a_label_and_a_saved_result(files: list[Path], tmp_path: Path) -> None:
    schema, saved = tmp_path / "schema.toml", tmp_path / "glm.safetensors"
    assert fedsolve("schema", files[0], "--label", "cens", "--out", schema).exit_code == 0
    told = document(
        "glm", "cens ~ age + C(tgrade)", *files, "--family", "binomial", "--schema", schema, "--out", saved
    )
    expected = fs.GLM("cens ~ age + C(tgrade)", family="binomial").fit(federation(table("gbsg2"), 3))
    near([line["coefficient"] for line in told["table"]], expected.coefficient, 1e-8)
    printed = fedsolve("info", saved)
    assert "C(tgrade)[T.III]" in printed.stdout


@pytest.mark.parametrize("suffix", ["md", "tex", "json", "csv"])
def test_tables_as_files(files: list[Path], tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"table.{suffix}"
    told = fedsolve("mixed", "estrec ~ age", *files, "--table", target, "-q")
    assert told.exit_code == 0, told.output
    assert "age" in target.read_text()


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("cens ~ weight", "no column 'weight'. The columns are age, estrec, horTh"),
        ("cens ~ bs(age)", "; bs is none of these."),
        ("cens ~ np.log(age)", "; np.log is none of these."),
        ("cens ~ tumour size", "write `tumour size` where it stands by itself, or rename it"),
        ("Surv(`tumour size`, cens) ~ age", "only a column that stands by itself"),
        ("I(horTh == 'Yes') ~ age", "no category is called 'Yes'. Did you mean 'yes'? There are no, yes."),
    ],
)
def test_names_that_a_formula_cannot_use(formula: str, told: str, tmp_path: Path) -> None:
    rows = table("gbsg2")[["age", "estrec", "horTh", "cens", "tsize"]]
    rows.rename(columns={"tsize": "tumour size"}).to_csv(tmp_path / "a.csv", index=False)
    refused(fedsolve("cox" if formula[0] == "S" else "glm", formula, tmp_path / "a.csv"), 2, told)


def test_what_is_refused(files: list[Path], tmp_path: Path) -> None:
    refused(fedsolve("glm", "cens ~ agee", *files), 2, "no column 'agee'. Did you mean 'age'?")
    refused(fedsolve("glm", "cens ~ age", *files, "--table", tmp_path / "t.xls"), 2, "a table is written as")
    refused(fedsolve("survival", *files, "--time", "time"), 2, "time and event must be named")
    refused(fedsolve("describe", *files, "--plot", tmp_path / "p.svg"), 2, "has no figure")


def test_words_for_missing_numbers_do_not_make_a_category_of_a_column(
    files: list[Path], tmp_path: Path
) -> None:
    frame = table("gbsg2").astype({"age": object})
    frame.loc[::50, "age"] = "?"
    frame.to_csv(tmp_path / "odd.csv", index=False)
    told = document("glm", "cens ~ age", tmp_path / "odd.csv", "--family", "binomial")
    assert [line["term"] for line in told["table"]] == ["Intercept", "age"]
    assert told["left_out"] == {"age": 14}
    frame["age"] = [f"{row} years" for row in range(len(frame))]
    frame.to_csv(tmp_path / "odd.csv", index=False)
    refused(fedsolve("glm", "cens ~ age", tmp_path / "odd.csv"), 2, "column 'age' is no number")
    described = document("describe", tmp_path / "odd.csv")
    assert "age" not in [line["column"] for line in described["table"]]


def test_signs_for_missing_categories_are_no_level(files: list[Path], tmp_path: Path) -> None:
    frame = table("gbsg2").copy()
    frame.loc[::50, "tgrade"] = "."
    frame.to_csv(tmp_path / "odd.csv", index=False)
    told = document("glm", "cens ~ C(tgrade)", tmp_path / "odd.csv", "--family", "binomial")
    assert [line["term"] for line in told["table"]] == ["Intercept", "C(tgrade)[T.II]", "C(tgrade)[T.III]"]
    assert told["left_out"] == {"tgrade": 14}


def test_columns_without_values_and_names_with_spaces(files: list[Path], tmp_path: Path) -> None:
    frame = table("gbsg2").rename(columns={"tsize": "size of it"}).assign(empty=None)
    frame.to_csv(tmp_path / "odd.csv", index=False)
    told = document("glm", "cens ~ age + `size of it`", tmp_path / "odd.csv", "--family", "binomial")
    expected = document("glm", "cens ~ age + tsize", *files, "--family", "binomial")
    near(told["log_likelihood"], expected["log_likelihood"], 1e-9)
    gone = fedsolve("glm", "cens ~ empty", tmp_path / "odd.csv")
    refused(gone, 2, "no row is complete: of 686 rows, values are missing of empty in 686")
    lines = {line["column"]: line for line in document("describe", tmp_path / "odd.csv")["table"]}
    assert lines["empty"]["missing"] == 686


def test_predict_writes_what_the_model_predicts(files: list[Path], tmp_path: Path) -> None:
    saved, new, out = tmp_path / "glm.safetensors", tmp_path / "new.csv", tmp_path / "out.csv"
    document("glm", "cens ~ age + C(tgrade)", *files, "--family", "binomial", "--out", saved)
    frame = table("gbsg2")[["age", "tgrade"]].head(8).assign(who=[f"P{row}" for row in range(8)])
    frame["age"] = frame.age.where(frame.index != 3)
    frame.to_csv(new, index=False)
    told = fedsolve("predict", saved, new, "--scores", "--keep", "who", "--out", out)
    assert told.exit_code == 0
    assert "1 of 8 rows have no prediction" in told.stderr
    assert "row 3 (age)" in told.stderr
    written = pandas.read_csv(out)
    assert written.columns.tolist() == ["row", "who", "prediction", "linear_predictor"]
    expected = fs.load_model(saved).predict(table("gbsg2").head(8))
    there = written.index != 3
    near(written.prediction[there], expected[there], 1e-12)
    near(1 / (1 + np.exp(-written.linear_predictor[there])), expected[there], 1e-12)
    assert written.loc[3, ["prediction", "linear_predictor"]].isna().all()
    assert "(--keep who writes it beside" in fedsolve("predict", saved, new).stderr
    refused(fedsolve("predict", saved, new, "--strict", "--keep", "who"), 2, "1 of 8 rows have no prediction")
    refused(fedsolve("predict", saved, new, "--probabilities"), 2, "the prediction is the probability of 1")


def test_predictions_of_a_cox_regression_are_called_what_they_are(files: list[Path], tmp_path: Path) -> None:
    saved = tmp_path / "cox.safetensors"
    document("cox", "Surv(time, cens) ~ age + C(horTh)", *files, "--out", saved)
    told = document("predict", saved, files[0])
    near(told["relative_hazard"], fs.load_model(saved).predict(pandas.read_csv(files[0])), 1e-12)


def test_the_site_is_a_category_of_formulas(files: list[Path], tmp_path: Path) -> None:
    owned = (tmp_path / "all.csv", "--client-column", "hospital")
    one = document("glm", "estrec ~ age + site", *files)
    other = document("glm", "estrec ~ age + C(hospital)", *owned)
    expected = smf.ols("estrec ~ age + C(hospital)", pandas.read_csv(tmp_path / "all.csv")).fit()
    for told in (one, other):
        near([line["coefficient"] for line in told["table"]], expected.params.iloc[[0, 3, 1, 2]], 1e-8)
    hidden = fedsolve("glm", "estrec ~ age + hospital", *owned, "--secure")
    refused(hidden, 2, "which secure sums hide. Use --robust cluster")


def test_a_logistic_regression_is_evaluated_by_its_probabilities(files: list[Path], tmp_path: Path) -> None:
    saved, new = tmp_path / "glm.safetensors", tmp_path / "new.csv"
    document("glm", "cens ~ age + C(tgrade)", *files, "--family", "binomial", "--out", saved)
    frame = table("gbsg2").assign(hospital="north")
    frame["age"] = frame.age.where(frame.index % 50 != 3)
    frame.to_csv(new, index=False)
    words = ("--by", "menostat", "--importance", "--html", tmp_path / "page.html")
    told = document("evaluate", saved, new, *words)
    there = frame.age.notna()
    chance, truth = fs.load_model(saved).predict(frame[there]), frame.cens[there].to_numpy()
    assert told["rows"] == there.sum()
    assert told["brier"] == pytest.approx(brier_score_loss(truth, chance), abs=1e-12)
    assert told["log_loss"] == pytest.approx(log_loss(truth, chance), abs=1e-12)
    assert told["auc"] == pytest.approx(roc_auc_score(truth, chance), abs=told["auc_bound"])
    assert "14 of 686 rows have no prediction" in " ".join(told["warnings"])
    assert not any("worse than" in warning for warning in told["warnings"])
    assert {one["column"] for one in told["importance"]} == {"age", "tgrade"}
    assert sum(group["rows"] for group in told["by"]["groups"]) == there.sum()
    assert document("evaluate", saved, new, "--label", "cens")["brier"] == told["brier"]
    frame[["age", "tgrade", "time"]].to_csv(new, index=False)
    refused(fedsolve("evaluate", saved, new, "--label", "time"), 2, "in row 0 is not one of the 2 classes")


def test_an_outcome_of_two_categories_is_evaluated_by_its_event(files: list[Path], tmp_path: Path) -> None:
    saved, new = tmp_path / "glm.safetensors", tmp_path / "new.csv"
    frame = table("gbsg2")
    told = {}
    for formula in ("horTh ~ age", "I(horTh == 'no') ~ age"):
        document("glm", formula, *files, "--family", "binomial", "--out", saved)
        told[formula] = document("evaluate", saved, files[0], "--by", "menostat")
        chance = fs.load_model(saved).predict(frame.iloc[::3])
        truth = frame.horTh[::3] == ("yes" if formula.startswith("horTh") else "no")
        assert told[formula]["brier"] == pytest.approx(brier_score_loss(truth, chance), abs=1e-12)
    frame.assign(horTh=(frame.horTh == "no") * 1)[["age", "horTh"]].to_csv(new, index=False)
    refused(fedsolve("evaluate", saved, new), 2, "predicts horTh = no, and 'horTh' has 0, 1")
    assert document("evaluate", saved, new, "--label", "horTh")["rows"] == len(frame)


def test_other_regressions_are_evaluated_by_their_means(files: list[Path], tmp_path: Path) -> None:
    saved = tmp_path / "saved.safetensors"
    document(
        "glm", "pnodes ~ age + C(tgrade) + offset(log(tsize))", *files, "--family", "poisson", "--out", saved
    )
    frame = table("gbsg2")
    told, mean = document("evaluate", saved, files[0]), fs.load_model(saved).predict(frame.iloc[::3])
    assert told["rmse"] == pytest.approx(np.sqrt(np.mean((frame.pnodes[::3] - mean) ** 2)), rel=1e-9)
    document("mixed", "estrec ~ age", *files, "--out", saved)
    told, mean = document("evaluate", saved, files[0]), fs.load_model(saved).predict(frame.iloc[::3])
    assert told["mae"] == pytest.approx(np.mean(np.abs(frame.estrec[::3] - mean)), rel=1e-9)
    document("cox", "Surv(time, cens) ~ age", *files, "--out", saved)
    refused(fedsolve("evaluate", saved, files[0]), 2, "hazards against each other")
    document("glm", "I(estrec > 20) ~ age", *files, "--family", "binomial", "--out", saved)
    refused(fedsolve("evaluate", saved, files[0]), 2, "predicts 'I(estrec > 20)'", "name that: --label")
    assert document("evaluate", saved, files[0], "--label", "cens")["rows"] == 229
