"""The demo and the numpy FedAvg that it compares with, against plain oracles."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import fedsolve as fs
from fedsolve.cli.main import main
from fedsolve.data import partitions
from fedsolve.data.partitions import owned_rows
from fedsolve.errors import DataError
from fedsolve.experiments import digits_demo
from fedsolve.experiments.algorithms import SoftmaxFedAvg
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import Cell, DatasetSpec, Measure, MethodSpec, PartitionSpec
from fedsolve.experiments.sources import ExperimentRows, digits

QUICK = ("--clients", "6", "--layers", "4", "--width", "32", "--rounds", "10")


def demo(*words):
    return CliRunner().invoke(main, ["demo", *map(str, words)])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A small run of the demo: its folder and its JSON document."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    result = demo(*QUICK, "--out", folder, "--json")
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


# -- FedAvg ----------------------------------------------------------------------------------------


def rows(seed=0, count=90, width=5, classes=3):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((count, width))
    return features, np.argmax(features[:, :classes] + 0.3 * rng.standard_normal((count, classes)), axis=1)


def descend(features, codes, classes, steps, rate):
    """Full-batch gradient descent on the mean cross-entropy, from zero."""
    inputs = np.c_[features, np.ones(len(features))]
    weight = np.zeros((inputs.shape[1], classes))
    for _ in range(steps):
        scores = np.exp(inputs @ weight)
        shares = scores / scores.sum(axis=1, keepdims=True)
        weight = weight - rate * inputs.T @ (shares - np.eye(classes)[codes]) / len(inputs)
    return weight


def head(method, features, codes, owners, clients):
    return method.fit(features, codes, owned_rows(owners, clients), 3)


@pytest.mark.parametrize("clients", [1, 4])
def test_fedavg_with_one_whole_batch_a_round_is_gradient_descent(clients):
    """A weighted average of single steps from the same point is one step on all rows."""
    features, codes = rows()
    owners = np.random.default_rng(1).integers(clients, size=len(codes))
    method = SoftmaxFedAvg(rounds=7, epochs=1, batch=1000, rate=0.4)
    weight = head(method, features, codes, owners, clients)
    assert np.allclose(weight, descend(features, codes, 3, 7, 0.4), rtol=0, atol=1e-13)


def test_fedavg_averages_local_epochs_by_rows():
    features, codes = rows()
    owners = (np.arange(len(codes)) >= 20).astype(int)
    weight = head(SoftmaxFedAvg(rounds=1, epochs=4, batch=1000, rate=0.4), features, codes, owners, 2)
    parts = [descend(features[owners == k], codes[owners == k], 3, 4, 0.4) for k in (0, 1)]
    assert np.allclose(weight, (20 * parts[0] + 70 * parts[1]) / 90, rtol=0, atol=1e-13)


def test_fedavg_is_repeatable_and_ignores_empty_clients():
    features, codes = rows()
    owners = np.arange(len(codes)) % 3
    method = SoftmaxFedAvg(rounds=3, batch=8, seed=5)
    weight = head(method, features, codes, owners, 3)
    assert np.array_equal(weight, head(method, features, codes, owners, 5))
    other = SoftmaxFedAvg(rounds=3, batch=8)
    assert not np.array_equal(weight, head(other, features, codes, owners, 3))


def test_fedavg_in_an_experiment_counts_its_bytes_and_is_refused_client_by_client():
    (features, codes), (test_features, test_codes) = rows(), rows(seed=3)
    made = ExperimentRows(features, codes + 10, test_features, test_codes + 10, "made")
    partition = PartitionSpec("IID", "iid", 4, {})
    method = MethodSpec("FedAvg", "fedavg-numpy", {}, {})
    parts = (DatasetSpec("made", "made"), partition, method, {"rounds": 3, "batch": 8}, {}, 0.0, 1)
    outcome = train_cell(Cell(*parts, Measure()), made).values
    owners = partitions.iid(codes, 4, seed=1)
    weight = head(SoftmaxFedAvg(rounds=3, batch=8, seed=1), features, codes, owners, 4)
    predicted = np.argmax(np.c_[test_features, np.ones(len(test_codes))] @ weight, axis=1)
    assert outcome["accuracy"] == np.mean(predicted == test_codes) > 0.7
    assert outcome["bytes_up"] == outcome["bytes_down"] == 3 * 4 * (6 * 3 * 8)
    assert outcome["exchanges"] == 3
    with pytest.raises(DataError, match="SoftmaxFedAvg is not measured client by client"):
        train_cell(Cell(*parts, Measure(local=True)), made)
    with pytest.raises(DataError, match="rounds must be a whole number"):
        SoftmaxFedAvg(rounds=0)


# -- the demo --------------------------------------------------------------------------------------


def test_demo_shows_invariance(quick):
    _, told = quick
    assert len(told["invariance"]) == 3
    assert {change["clients"] for change in told["invariance"]} == {6, 30, 1}
    for change in told["invariance"]:
        assert change["afl"] <= 1e-9
        assert change["deepafl"] <= 1e-9
        assert change["same_predictions"] is True
        assert change["fedavg"] > 1e-3


def test_demo_numbers_are_those_of_runs_of_that_depth(quick):
    _, told = quick
    data = digits()
    owners = partitions.dirichlet(data.y_train, 6, 0.1, seed=0)
    federation = fs.LocalFederation.from_arrays(data.x_train, data.y_train, owners, clients=6)
    entries = [entry for entry in told["methods"] if entry["depth"] is not None]
    assert [entry["depth"] for entry in entries] == [0, 1, 2, 4]
    for entry in entries:
        model = fs.DeepAFL(layers=entry["depth"], width=32).fit(federation)
        assert entry["test"] == 100 * model.score(data.x_test, data.y_test)
        assert entry["exchanges"] == len(model.history)
        for way in ("up", "down"):
            moved = sum(getattr(record, f"bytes_{way}") for record in model.history)
            assert entry[f"megabytes_{way}"] == pytest.approx(moved / 1e6)


def test_demo_traffic_of_the_other_methods(quick):
    _, told = quick
    named = {entry["name"]: entry for entry in told["methods"]}
    weight, triangle, cross, squares = 65 * 10 * 8, 64 * 65 // 2 * 8, 64 * 10 * 8, 10 * 8
    assert named["FedAvg, 10 rounds"]["megabytes_up"] == pytest.approx(10 * 6 * weight / 1e6)
    assert named["FedAvg, 10 rounds"]["megabytes"] == pytest.approx(2 * 10 * 6 * weight / 1e6)
    assert named["FedAvg, 1 round"]["exchanges"] == 1
    assert named["AFL"]["megabytes_up"] == pytest.approx(6 * (triangle + cross + squares) / 1e6)
    assert named["AFL"]["exchanges"] == 1
    assert named["local only, mean client"]["megabytes"] == 0


def test_demo_writes_a_figure_and_results_that_train_repeats(quick):
    folder, told = quick
    assert sorted(path.name for path in folder.iterdir()) == ["demo.png", "personal.png", "results.json"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "results.json").read_text()) == told
    words = ["train", "digits", "--layers", "4", "--width", "32", "--json"]
    trained = json.loads(CliRunner().invoke(main, words).stdout)
    assert trained["accuracy"]["test"] == told["staged_accuracy"][-1]


def test_demo_page_tells_the_story(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    result = demo(*QUICK, "--no-figure")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for words in ("6 clients", "DeepAFL (T = 4)", "exchanges", "whoever owns what", "Try next"):
        assert words in result.stdout
    files = sorted(path.name for path in (tmp_path / "fedsolve-demo").iterdir())
    assert files == ["results.json"]
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_demo_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    def broken(*args):
        raise DataError("out of luck")

    monkeypatch.setattr(digits_demo, "change", broken)
    result = demo(*QUICK, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == "error: out of luck\n"
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert demo("--out", tmp_path / "file").exit_code == 4
    assert demo("--alpha", "-1", "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_whole_demo_holds_what_the_readme_says(tmp_path):
    result = demo("--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    reached = {entry["name"]: entry["test"] for entry in told["methods"]}  # of DeepAFL, the deepest
    assert reached["DeepAFL"] > 98
    assert reached["DeepAFL"] > reached["FedAvg, 100 rounds"] > reached["local only, best client"]
    assert reached["AFL"] > 92
    for change in told["invariance"]:
        assert max(change["afl"], change["deepafl"]) <= 1e-9
        assert change["same_predictions"] is True
