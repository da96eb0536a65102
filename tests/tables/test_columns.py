"""Columns are part of a model trained from a table: found by name, refused by name, never by position."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from sklearn.datasets import load_iris

from fedsolve import load_model
from tests.command import document, fedsolve, refused

NAMES = ["sepal_length", "sepal_width", "petal_length", "petal_width"]


def write(path, columns):
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture(scope="module")
def iris():
    """Columns of iris with a row number, a hospital and a kind as text."""
    values, labels = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(values))
    columns = {"row": list(range(len(values)))}
    columns |= {name: values[order, place].tolist() for place, name in enumerate(NAMES)}
    columns["hospital"] = [("north", "south")[row % 2] for row in range(len(values))]
    columns["kind"] = [("setosa", "versicolor", "virginica")[label] for label in labels[order]]
    return columns


@pytest.fixture(scope="module")
def trained(tmp_path_factory, iris):
    """A folder with the table and models of three methods that were trained on it."""
    folder = tmp_path_factory.mktemp("iris")
    write(folder / "iris.csv", iris)
    words = ("--label", "kind", "--client-column", "hospital", "--drop", "row")
    for method, more in (("afl", ()), ("apfl", ("--width", 16)), ("deepafl", ("--layers", 1, "--width", 16))):
        out = folder / f"{method}.safetensors"
        result = fedsolve("train", folder / "iris.csv", "--method", method, *words, *more, "--out", out)
        assert result.exit_code == 0, result.stderr
    return folder


def shuffled(columns, seed=3):
    order = np.random.default_rng(seed).permutation(len(columns))
    return {name: columns[name] for name in np.array(list(columns))[order].tolist()}


def without(columns, *names):
    return {name: cells for name, cells in columns.items() if name not in names}


def renamed(columns, **names):
    return {names.get(name, name): cells for name, cells in columns.items()}


def test_the_model_keeps_the_columns(trained):
    schema = load_model(trained / "afl.safetensors").schema
    assert [column.name for column in schema.used] == NAMES
    assert [column.name for column in schema.columns if column.kind == "unused"] == ["row"]
    assert (schema.label, schema.client) == ("kind", "hospital")
    assert schema.classes == ("setosa", "versicolor", "virginica")


@pytest.mark.parametrize("method", ["afl", "apfl", "deepafl"])
def test_any_order_of_columns_gives_the_same_scores(trained, iris, tmp_path, method):
    model = trained / f"{method}.safetensors"
    expected = fedsolve("predict", model, trained / "iris.csv", "--scores").stdout
    assert expected.count("\n") == 151
    for seed in range(3):
        file = write(tmp_path / "shuffled.csv", shuffled(iris, seed))
        assert fedsolve("predict", model, file, "--scores").stdout == expected
    bare = write(tmp_path / "bare.csv", shuffled({name: iris[name] for name in NAMES}))
    assert fedsolve("predict", model, bare, "--scores").stdout == expected


def test_evaluate_and_personalise_find_columns_by_name(trained, iris, tmp_path):
    file = write(tmp_path / "shuffled.csv", shuffled(iris))
    model = trained / "apfl.safetensors"
    first, second = (document("evaluate", model, data) for data in (trained / "iris.csv", file))
    assert first["accuracy"] == second["accuracy"] > 0.9
    for data, out in ((trained / "iris.csv", "a"), (file, "b")):
        document("personalise", model, data, "--out", tmp_path / out)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_model(tmp_path / "a").schema == load_model(model).schema


def test_parquet_and_csv_share_columns(trained, iris, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(shuffled(iris)), tmp_path / "iris.parquet")
    # Nothing is chosen or calibrated: which rows are held out for that depends on the order of the columns.
    words = ("--method", "afl", "--ridge", 1, "--no-calibrate", "--label", "kind", "--drop", "row")
    told = []
    for data in (tmp_path / "iris.parquet", trained / "iris.csv"):
        out = tmp_path / f"{data.name}.safetensors"
        document("train", data, *words, "--client-column", "hospital", "--out", out)
        told.append(document("evaluate", out, trained / "iris.csv"))
    for name in ("accuracy", "auc", "brier", "log_loss"):
        assert told[0][name] == pytest.approx(told[1][name], abs=1e-12)
    assert told[0]["confusion"] == told[1]["confusion"]


@pytest.mark.parametrize("command", ["predict", "evaluate", "personalise"])
def test_all_that_is_missing_is_named_at_once(trained, iris, tmp_path, command):
    wrong = renamed(without(iris, "sepal_width"), petal_length="petal_lenght")
    file = write(tmp_path / "wrong.csv", wrong)
    out = tmp_path / "out"
    words = () if command == "evaluate" else ("--out", out)
    result = fedsolve(command, trained / "apfl.safetensors", file, *words)
    refused(result, 2, "wrong.csv", "'sepal_width' is missing", "'petal_length' is missing", "'petal_lenght'")
    assert "did you mean 'petal_lenght'?" in result.stderr
    assert "or add it: its cells may be empty" in result.stderr
    assert ("kind = " in result.stderr) == (command == "personalise")
    assert not out.exists()


def test_added_columns_are_told(trained, iris, tmp_path):
    file = write(tmp_path / "more.csv", iris | {"weight": [1.0] * 150})
    model = trained / "afl.safetensors"
    told = fedsolve("evaluate", model, file)
    assert told.exit_code == 0
    assert told.stderr == f"warning: {file}: the model does not use 'weight', which is ignored.\n"
    told = fedsolve("predict", model, file)
    assert told.exit_code == 0
    assert "'weight', which is ignored (--keep weight writes it beside the predictions)" in told.stderr
    assert told.stdout == fedsolve("predict", model, trained / "iris.csv").stdout
    index = write(tmp_path / "index.csv", iris | {"": [1.0] * 150})
    assert "(--keep '' writes it beside the predictions)" in fedsolve("predict", model, index).stderr
    assert document("evaluate", model, file, "--drop", "weight")["rows"] == 150
    refused(fedsolve("evaluate", model, file, "--drop", "petal_width"), 2, "petal_width", "--drop")


def test_text_in_a_column_of_numbers_is_refused_by_line(trained, iris, tmp_path):
    cells = list(iris["petal_width"])
    cells[4] = "wide"
    file = write(tmp_path / "text.csv", iris | {"petal_width": cells})
    refused(fedsolve("predict", trained / "afl.safetensors", file), 2, "line 6", "'petal_width'", "'wide'")
    cells[4] = ""
    file = write(tmp_path / "empty.csv", iris | {"petal_width": cells})
    refused(fedsolve("evaluate", trained / "afl.safetensors", file), 2, "line 6", "'petal_width'", "empty")


def test_a_label_of_another_name_or_place(trained, iris, tmp_path):
    file = write(tmp_path / "other.csv", renamed(iris, kind="truth"))
    model = trained / "afl.safetensors"
    refused(fedsolve("evaluate", model, file), 2, "column 'kind' is missing")
    assert document("evaluate", model, file, "--label", "truth")["rows"] == 150
    assert document("evaluate", model, file, "--label", "-1")["rows"] == 150


def test_test_rows_of_train_are_found_by_name(trained, iris, tmp_path):
    words = ("--method", "afl", "--label", "kind", "--client-column", "hospital", "--drop", "row")
    whole = document("train", trained / "iris.csv", *words, "--test", trained / "iris.csv")
    file = write(tmp_path / "shuffled.csv", shuffled(without(iris, "row", "hospital")))
    again = document("train", trained / "iris.csv", *words, "--test", file)
    assert whole["accuracy"]["test"] == again["accuracy"]["test"] == whole["accuracy"]["train"]


def test_files_without_names_are_taken_by_position_with_a_warning(trained, iris, tmp_path):
    lines = "\n".join(",".join(str(iris[name][row]) for name in NAMES) for row in range(150))
    (tmp_path / "bare.csv").write_text(lines)
    result = fedsolve("predict", trained / "afl.safetensors", tmp_path / "bare.csv", "--no-header")
    assert result.stdout == fedsolve("predict", trained / "afl.safetensors", trained / "iris.csv").stdout
    assert "by position" in result.stderr


def test_twice_the_same_name_is_refused(iris, tmp_path):
    text = "a,a,y\n" + "\n".join(f"{row},{row * row},{row % 2}" for row in range(20))
    (tmp_path / "twice.csv").write_text(text)
    out = tmp_path / "m"
    result = fedsolve("train", tmp_path / "twice.csv", "--method", "afl", "--clients", 2, "--out", out)
    refused(result, 2, "'a'", "more than one")
    assert not out.exists()


def test_a_row_number_without_a_name_is_dropped_once(iris, tmp_path):
    """As pandas writes it: the first column is the index."""
    indexed = {"": iris["row"]} | without(iris, "row", "hospital")
    file, out = write(tmp_path / "pandas.csv", indexed), tmp_path / "m"
    document("train", file, "--method", "afl", "--label", "kind", "--drop", "0", "--clients", 2, "--out", out)
    assert document("evaluate", out, file)["rows"] == 150
    assert fedsolve("predict", out, file).stderr == ""
