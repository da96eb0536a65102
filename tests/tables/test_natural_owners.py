"""Who owns a row is what the data say: owners by name in experiments, in `train` and in Python."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import StoredRows
from tests.command import document, fedsolve

TOML = """
title = "hospitals"
seeds = [0]
[[dataset]]
name = "patients"
address = "csv:{path}?label=ill{client}"
[[partition]]
kind = "column"
column = "hospital"
[[method]]
method = "afl"
parameters = {{ ridge = 0.1 }}
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("owners") / "patients.csv"
    features = rng.normal(size=(90, 3))
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "hospital", "weight", "height", "ill"])
        for number, row in enumerate(features.tolist()):
            owner = ("St. Anna", "north", "Süd")[number % 3]
            writer.writerow([row[0], owner, row[1], row[2], "yes" if row[0] + row[1] > 0 else "no"])
    return path


def run(table, tmp_path, client):
    (tmp_path / "e.toml").write_text(TOML.format(path=table, client=client))
    experiment = read_experiment(tmp_path / "e.toml")
    return run_experiment(experiment, tmp_path / "run", StoredRows(), workers=1)


def test_an_experiment_by_a_column_of_text(table, tmp_path):
    run(table, tmp_path, "&client=hospital")
    folder = next((tmp_path / "run").iterdir())
    line = json.loads((folder / "cells.jsonl").read_text().splitlines()[0])
    assert line["partition"]["kind"] == "column"
    assert line["partition"]["name"] == "by hospital"
    assert (line["partition"]["clients"], line["partition"]["empty_clients"]) == (3, 0)
    assert np.sum(line["partition"]["class_counts"]) == 72  # a fifth is held out for testing
    assert fedsolve("report", folder, "--out", tmp_path / "r.html").exit_code == 0


def test_a_dataset_that_names_no_owners_is_refused(table, tmp_path):
    with pytest.raises(DataError, match=r"by 'hospital'.*csv:FILE\?client=hospital"):
        run(table, tmp_path, "&drop=hospital")


NUMBERS = """
title = "hospitals by number"
seeds = [3]
[parameters]
network = "mlp:4"
rounds = 4
participation = 0.7
batch = 8
rate = 0.1
[[dataset]]
name = "patients"
address = "{address}"
[[partition]]
kind = "column"
column = "hospital"
[[method]]
method = "fedavg"
"""


@pytest.mark.torch
@pytest.mark.parametrize("owners", [("St. Anna", "north", "Süd", "west"), ("9", "10", "2", "11")])
def test_an_experiment_and_the_command_line_agree_to_the_last_digit(tmp_path, owners):
    """Cohorts and batches are drawn by names, so clients have the same ones, in the order of text."""
    rng = np.random.default_rng(5)
    path = tmp_path / "d.csv"
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["a", "b", "hospital", "outcome"])
        for number, (a, b) in enumerate(rng.normal(size=(150, 2)).tolist()):
            writer.writerow([a, b, owners[number % 7 % 4], "yes" if a * b > 0 else "no"])
    address = f"csv:{path}?label=outcome&client=hospital"
    (tmp_path / "e.toml").write_text(NUMBERS.format(address=address))
    run_experiment(read_experiment(tmp_path / "e.toml"), tmp_path / "run", StoredRows(), workers=1)
    line = json.loads((tmp_path / "run" / "e" / "cells.jsonl").read_text().splitlines()[0])
    setting = ("--network", "mlp:4", "--rounds", 4, "--participation", 0.7, "--batch", 8, "--rate", 0.1)
    told = document("train", address, "--method", "fedavg", *setting, "--seed", 3)
    assert line["loss_per_round"] == [record["metrics"]["loss"] for record in told["history"]]
    assert line["accuracy"] == told["accuracy"]["test"]
    assert line["train_accuracy"] == told["accuracy"]["train"]
    assert len(line["partition"]["class_counts"]) == 4


@pytest.mark.parametrize(
    "words",
    [
        ("{}", "--client-column", "hospital", "--label", "ill"),
        ("csv:{}?label=ill&test=0", "--client-column", "hospital"),
        ("csv:{}?label=ill&test=0&client=hospital",),
    ],
    ids=["file", "address and option", "address"],
)
def test_owners_are_text_wherever_rows_come_from(table, tmp_path, words):
    data, *rest = (word.format(table) for word in words)
    told = document("train", data, *rest, "--method", "afl", "--ridge", 1, "--out", tmp_path / "m")
    assert (told["clients"], told["partition"]["kind"], told["features"]) == (3, "named", 3)
    assert len(fedsolve("predict", tmp_path / "m", table).stdout.splitlines()) == 91


def test_owners_may_be_names_in_python():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(30, 4)), np.arange(30) % 2
    numbers = np.arange(30) % 3
    named = np.array(["anna", "north", "süd"])[numbers]
    federation = fs.LocalFederation.from_arrays(features, labels, named)
    assert federation.clients == ("anna", "north", "süd")
    plain = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(features, labels, numbers))
    assert np.array_equal(fs.AFL(ridge=1.0).fit(federation).weight, plain.weight)
    for wrong, words in ((np.where(numbers == 1, "", named), "one is empty"), (named.astype(object), None)):
        if words is None:
            assert fs.LocalFederation.from_arrays(features, labels, wrong).clients == federation.clients
        else:
            with pytest.raises(DataError, match=words):
                fs.LocalFederation.from_arrays(features, labels, wrong)
    with pytest.raises(DataError, match="name 3 clients, and clients is 5"):
        fs.LocalFederation.from_arrays(features, labels, named, clients=5)
