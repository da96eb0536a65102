"""DataFrames: columns are found by name or refused by name, in estimators, models and described tables."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.tables.encoder import encode
from tests.command import fedsolve

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(1)
    frame = pandas.DataFrame(rng.normal(size=(120, 3)) * [1, 10, 100], columns=["age", "pressure", "weight"])
    return frame, np.where(frame["age"] + frame["pressure"] / 10 - frame["weight"] / 100 > 0, "ill", "well")


@pytest.mark.parametrize("kind", ["AFLClassifier", "DeepAFLClassifier", "AFLRegressor", "DeepAFLRegressor"])
def test_columns_of_a_frame(frame, kind, tmp_path):
    rows, labels = frame
    target = labels if "Classifier" in kind else rows["age"].to_numpy()
    estimator = getattr(fs, kind)().fit(rows, target)
    assert estimator.feature_names_in_.tolist() == list(rows.columns)
    expected = estimator.predict(rows)
    shuffled = rows[["weight", "age", "pressure"]]
    assert np.array_equal(estimator.model_.predict(shuffled), expected)
    assert np.array_equal(estimator.predict(shuffled[estimator.feature_names_in_]), expected)
    for wrong, words in (
        (shuffled, r"same order.*feature_names_in_"),
        (rows.rename(columns={"age": "years"}), r"unseen at fit time:\n- years"),
        (rows[["age", "weight"]], r"now missing:\n- pressure"),
        (rows.assign(height=1.0), r"unseen at fit time:\n- height"),
    ):
        with pytest.raises(DataError, match=rf"(?s){words}.*estimator.model_"):
            estimator.predict(wrong)
    with pytest.raises(DataError, match="'pressure' is missing"):
        estimator.model_.predict(rows[["age", "weight"]])
    with pytest.raises(DataError, match=r"120 cells in column 'age' .*is not a number"):
        estimator.model_.predict(rows.assign(age="old"))
    if "Classifier" in kind:  # the file knows the columns too
        estimator.model_.save(tmp_path / "m")
        shuffled.to_csv(tmp_path / "new.csv", index=False)
        told = fedsolve("predict", tmp_path / "m", tmp_path / "new.csv")
        assert [line.split(",")[1] for line in told.stdout.splitlines()[1:]] == expected.tolist()


def raw(rng, rows=300):
    age = rng.normal(50, 15, rows)
    sex = rng.choice(["f", "m"], rows)
    ill = (age > 50) ^ ((sex == "m") & (rng.random(rows) < 0.3))
    return pandas.DataFrame(
        {
            "id": [f"p{number}" for number in range(rows)],
            "age": np.where(rng.random(rows) < 0.1, np.nan, age),
            "sex": sex,
            "visit": pandas.Timestamp("2020-01-01") + pandas.to_timedelta(rng.integers(0, 900, rows), "D"),
            "hospital": rng.choice(["north", "south"], rows),
            "ill": np.where(ill, "yes", "no"),
        }
    )


def test_a_raw_table_in_python(tmp_path):
    table = raw(np.random.default_rng(2))
    table.to_csv(tmp_path / "p.csv", index=False)
    schema = fs.propose_schema(tmp_path / "p.csv", label="ill", client="hospital")
    assert schema.identifiers == ("id",)
    rows = fs.read_table(tmp_path / "p.csv", schema, owned=True, keep=["id"])
    assert rows.kept["id"].tolist() == table["id"].tolist()
    federation = fs.LocalFederation.from_arrays(rows.features, rows.labels, rows.owners, schema=schema)
    assert federation.clients == ("north", "south")
    model = fs.Recipe(fs.AFL(ridge=1.0), schema).fit(federation)
    assert model.score(table, table["ill"]) > 0.7
    assert np.array_equal(model.predict(table[table.columns[::-1]]), model.predict(rows.features))


def test_one_silo_behind_a_column_transformer():
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = raw(np.random.default_rng(3))
    prepared = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
        (OneHotEncoder(sparse_output=False), ["sex"]),
    )
    for classifier in (fs.AFLClassifier(), fs.DeepAFLClassifier(layers=1)):
        pipe = make_pipeline(prepared, classifier).fit(table, table["ill"])
        shuffled = table[table.columns[::-1]]  # the transformer finds columns by name
        assert np.array_equal(pipe.predict(shuffled), pipe.predict(table))
        assert pipe.score(table, table["ill"]) > 0.7
    named = make_pipeline(prepared.set_output(transform="pandas"), fs.AFLClassifier())
    named.fit(table, table["ill"])
    assert [column.name for column in named[-1].model_.schema.used][1] == "onehotencoder__sex_f"


@pytest.mark.parametrize("cells", [[2**53 + 1, 1, 2**53], [2**53 + 1, None, 2**53]])
def test_nullable_whole_numbers_keep_their_digits(cells):
    """As float64, 2**53 + 1 is 2**53, which is another category."""
    schema = fs.Schema((fs.Column("code", "category", categories=(str(2**53), str(2**53 + 1))),))
    rows = encode(schema, pandas.DataFrame({"code": pandas.array(cells, dtype="Int64")}))
    assert rows.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
