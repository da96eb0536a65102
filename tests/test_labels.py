"""What the labels are, classes or numbers, and that everything asks the same."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.labels import task_of
from fedsolve.tables.proposal import propose
from fedsolve.tables.schema import Column, Schema, from_toml, to_toml

RNG = np.random.default_rng(0)
TASKS = {
    "two classes": (np.arange(30) % 2, "classification"),
    "as real numbers": ((np.arange(30) % 2).astype(float), "classification"),
    "three doses": (np.array([0.5, 1.0, 2.0])[np.arange(90) % 3], "classification"),
    "booleans": (np.arange(30) % 2 == 0, "classification"),
    "text": (np.array(["a", "b"])[np.arange(30) % 2], "classification"),
    "a hundred classes": (np.arange(2000) % 100, "classification"),
    "measurements": (RNG.normal(size=50), "regression"),
    "prices in cents": (np.round(RNG.gamma(2, 5, 3000), 1), "regression"),
    "whole numbers that hardly repeat": (RNG.permutation(500)[:300] + 25, "regression"),
    "ages": (18 + RNG.integers(0, 60, 2000), None),
    "a hundred classes with few rows": (np.arange(400) % 100, None),
    "marks in halves": (1 + RNG.integers(0, 9, 500) / 2, None),
}


@pytest.mark.parametrize("case", TASKS)
def test_the_task_follows_from_the_labels_or_is_asked_for(case):
    labels, task = TASKS[case]
    if task is None:
        with pytest.raises(fs.DataError, match=r"classes, or a quantity\? Say which: task .*--task"):
            task_of(labels)
        return
    assert task_of(labels) == task


def test_a_federation_trains_numbers_as_numbers():
    features, targets = RNG.normal(size=(60, 3)), RNG.normal(size=60)
    federation = fs.LocalFederation.from_arrays(features, targets, np.arange(60) % 3)
    assert federation.task == "regression"
    assert "regression" in repr(federation)
    assert fs.AFL(ridge=1.0).fit(federation).classes is None
    with pytest.raises(fs.DataError, match="softmax regression is for classes"):
        fs.Softmax().fit(federation)
    whole = np.arange(60) % 30
    with pytest.raises(fs.DataError, match="30 different whole numbers in 60 rows"):
        fs.LocalFederation.from_arrays(features, whole, np.arange(60) % 3)
    taken = fs.LocalFederation.from_arrays(features, whole, np.arange(60) % 3, task="classification")
    assert len(taken.describe().classes) == 30
    declared = fs.LocalFederation.from_arrays(features, whole, np.arange(60) % 3, classes=range(30))
    assert declared.task == "classification"
    with pytest.raises(fs.DataError, match="task"):
        fs.LocalFederation.from_arrays(features, whole, np.arange(60) % 3, task="ranking")


def test_a_schema_says_that_labels_are_numbers():
    rows = {
        "size": [f"{value:.3f}" for value in RNG.normal(size=200)],
        "price": [f"{value:.2f}".replace(".", ",") for value in RNG.gamma(2, 50, 200)],
        "unit": ["1.5"] * 100 + ["2.5"] * 100,
    }
    rows["in cents"] = [str(round(100 * float(value.replace(",", ".")))) for value in rows["price"]]
    rows["price"] = [value.replace(",", ".") for value in rows["price"]]
    schema = propose(rows, "price")
    assert (schema.task, schema.classes) == ("regression", ())
    kinds = {column.name: column for column in schema.columns}
    # All its values differ, and so do those of the label: only what is the label in another unit is a leak.
    assert kinds["size"].kind == "number"
    assert kinds["in cents"].kind == "unused"
    assert "leak" in kinds["in cents"].remark
    assert from_toml(to_toml(schema)) == schema
    assert Schema.from_note(schema.to_note()) == schema
    assert schema.digest != Schema(schema.columns, "price").digest
    with pytest.raises(fs.DataError, match="leave out one of them"):
        Schema((Column("a"),), "y", (0, 1), task="regression")
