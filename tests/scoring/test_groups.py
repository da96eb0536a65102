"""Evaluations by group against pandas on pooled rows, and that no group is small."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, roc_auc_score

import fedsolve as fs
from fedsolve.scoring.groups import MISSING, OTHERS, by_column, groups_of
from fedsolve.scoring.quality import wilson
from fedsolve.tables.encoder import encode
from fedsolve.tables.schema import Column, Schema
from tests.command import document, fedsolve, refused

ROWS = 600
RNG = np.random.default_rng(3)
TABLE = pd.DataFrame(
    {
        "age": RNG.normal(50, 10, ROWS).round(1),
        "dose": RNG.gamma(2, 1, ROWS).round(2),
        "sex": np.array(["f", "m"])[RNG.integers(0, 2, ROWS)],
        "site": np.where(
            np.arange(ROWS) < 4, "tiny", np.array(["north", "south", "east"])[RNG.integers(0, 3, ROWS)]
        ),
    }
)
LATENT = (TABLE["age"] - 50) / 10 + np.where(TABLE["sex"] == "f", 1.5, 0.5) * TABLE["dose"]
TABLE["ill"] = np.where(LATENT + RNG.normal(0, 1, ROWS) > 1.8, "yes", "no")
TABLE["cost"] = (100 + 20 * LATENT + RNG.normal(0, 5, ROWS)).round(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups")
    TABLE.drop(columns="cost").to_csv(path / "ill.csv", index=False)
    TABLE.drop(columns="ill").to_csv(path / "cost.csv", index=False)
    for label in ("ill", "cost"):
        words = ("--label", label, "--client-column", "site", "--method", "afl", "--intercept", "--ridge", 1)
        assert fedsolve("train", path / f"{label}.csv", *words, "--out", path / label).exit_code == 0
    return path


def by_pandas(folder, column):
    """Every measure of every group, by pandas and scikit-learn."""
    model = fs.load_model(folder / "ill")
    shown = TABLE.drop(columns="cost")
    rows = TABLE.assign(told=model.predict_proba(shown)[:, 1], answer=model.predict(shown))
    rows["true"], rows["called"] = rows["ill"] == "yes", rows["answer"] == "yes"
    return {
        name: {
            "rows": len(group),
            "accuracy": (group["answer"] == group["ill"]).mean(),
            "auc": roc_auc_score(group["true"], group["told"]),
            "false_positive_rate": group.loc[~group["true"], "called"].mean(),
            "false_negative_rate": 1 - group.loc[group["true"], "called"].mean(),
            "predicted_share": group["told"].mean(),
            "observed_share": group["true"].mean(),
        }
        for name, group in rows.groupby(column)
    }


def test_the_command_tells_what_pandas_tells_of_pooled_rows(folder):
    told = document(
        "evaluate", folder / "ill", folder / "ill.csv", "--by", "sex", "--html", folder / "e.html"
    )
    assert told["by"]["column"] == "sex"
    expected = by_pandas(folder, "sex")
    assert [group["group"] for group in told["by"]["groups"]] == ["f", "m"]
    for group in told["by"]["groups"]:
        for name, value in expected[group["group"]].items():
            assert group[name] == pytest.approx(value, abs=group["auc_bound"] if name == "auc" else 1e-9)
        right = round(group["accuracy"] * group["rows"])
        assert group["intervals"]["accuracy"] == pytest.approx(wilson(right, group["rows"]))
        low, high = group["intervals"]["auc"]
        assert low < group["auc"] < high
        low, high = group["intervals"]["false_negative_rate"]
        assert low < group["false_negative_rate"] < high
        assert 0 <= group["ece"] < 0.2
    shown = fedsolve("evaluate", folder / "ill", folder / "ill.csv", "--by", "sex").stdout
    assert "By sex, with 95 % intervals." in shown
    assert "predicted" in shown  # its heading may be broken where the terminal is narrow
    page = (folder / "e.html").read_text()
    assert "By sex, with 95 % intervals." in page
    assert page.count("<figure>") == 4


def test_no_group_is_small_and_none_can_be_found_by_difference(folder):
    told = document("evaluate", folder / "ill", folder / "ill.csv", "--by", "site")["by"]
    sizes = {group["group"]: group["rows"] for group in told["groups"]}
    # Four rows, joined by the smallest of the other groups: ten rows at least stay together.
    assert OTHERS in sizes
    assert len(sizes) == 3
    assert "tiny" in told["joined"]
    assert len(told["joined"]) == 2
    assert sum(sizes.values()) == ROWS
    assert min(sizes.values()) >= 10
    names, codes, joined = groups_of(np.array(["a"] * 30 + ["b"] * 6 + ["c"] * 5 + [""] * 12, dtype=object))
    assert (names, joined) == (["a", MISSING, OTHERS], ("b", "c"))
    assert np.bincount(codes).tolist() == [30, 12, 11]
    names, codes, _ = groups_of(np.arange(100) / 4)
    assert np.bincount(codes).tolist() == [25, 25, 25, 25]
    assert names[0] == "1. 0 to 6.1875"
    with pytest.raises(fs.DataError, match="5 rows are too few for groups"):
        groups_of(np.arange(5))
    with pytest.raises(fs.DataError, match="500 different values, such as 'k0'"):
        groups_of(np.array([f"k{n}" for n in range(500)]))
    refused(fedsolve("evaluate", folder / "ill", folder / "ill.csv", "--by", "sx"), 2, "sx")
    refused(
        fedsolve("evaluate", folder / "ill", folder / "ill.csv", "--by", "sex", "--staged"), 2, "--staged"
    )


def test_regressions_by_group(folder):
    told = document("evaluate", folder / "cost", folder / "cost.csv", "--by", "sex")["by"]["groups"]
    model = fs.load_model(folder / "cost")
    for group in told:
        rows = TABLE[TABLE["sex"] == group["group"]]
        predicted = model.predict(rows.drop(columns="ill"))
        assert group["r2"] == pytest.approx(r2_score(rows["cost"], predicted), abs=1e-9)
        assert group["mae"] == pytest.approx(mean_absolute_error(rows["cost"], predicted), abs=1e-9)
        assert group["intervals"]["r2"][0] < group["r2"] < group["intervals"]["r2"][1]


def federated():
    schema = Schema(
        (Column("age"), Column("dose"), Column("sex", "category", categories=("f", "m"))),
        "ill",
        ("no", "yes"),
    )
    features = encode(schema, TABLE[["age", "dose", "sex"]])
    return fs.LocalFederation.from_arrays(features, TABLE["ill"], TABLE["site"], schema=schema), schema


def test_a_federation_tells_groups_and_sites_by_sums(folder):
    federation, schema = federated()
    model = fs.AFL(ridge=1.0, intercept=True).fit(federation, schema=schema, calibrate=True)
    found = fs.evaluate_by(federation, model, "sex")
    assert list(found.found) == ["f", "m"]
    assert found.joined == ("(other)",)
    rows = TABLE.assign(right=model.predict(TABLE[["age", "dose", "sex"]]) == TABLE["ill"])
    for column, grouped in (("sex", found), ("site", fs.evaluate_by(federation, model))):
        for name, one in grouped.found.items():
            assert one.rows == (rows[column] == name).sum()
            assert one.accuracy == pytest.approx(rows.loc[rows[column] == name, "right"].mean())
            ill = rows.loc[rows[column] == name, "ill"] == "yes"
            assert one.rates["observed_share"] == pytest.approx(ill.mean())
            assert one.rates.keys() - one.rate_intervals.keys() == {"predicted_share"}
    assert list(fs.evaluate_by(federation, model).found) == ["east", "north", "south"]
    with pytest.raises(fs.DataError, match="'se' is no category of the model's schema"):
        fs.evaluate_by(federation, model, "se")


def test_secure_sums_refuse_groups_that_divide_what_they_keep_together():
    federation, schema = federated()
    secure = fs.privacy.SecureFederation(federation)
    model = fs.AFL(ridge=1.0, intercept=True).fit(secure, schema=schema)
    with pytest.raises(fs.FedsolveError, match="split"):
        fs.evaluate_by(secure, model, "sex")
    with pytest.raises(fs.FedsolveError):
        fs.evaluate_by(secure, model)


def test_a_table_that_kept_no_column_is_no_group(folder):
    model = fs.load_model(folder / "ill")
    with pytest.raises(KeyError):
        by_column(model, fs.read_table(folder / "ill.csv", model.schema), "sex")
