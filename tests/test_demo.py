"""The demo and what it compares with: FedAvg and local models against plain oracles."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import fedsolve as fs
from fedsolve.baselines import FedAvgHead, local_accuracies
from fedsolve.cli.comparison import Comparison, Digits, divisions
from fedsolve.cli.main import main
from fedsolve.errors import DataError

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


@pytest.mark.parametrize("clients", [1, 4])
def test_fedavg_with_one_whole_batch_a_round_is_gradient_descent(clients):
    """A weighted average of single steps from the same point is one step on all rows."""
    features, codes = rows()
    owners = np.random.default_rng(1).integers(clients, size=len(codes))
    method = FedAvgHead(rounds=7, epochs=1, batch=1000, rate=0.4)
    head = method.fit(features, codes, owners, clients, 3)
    assert np.allclose(head.weight, descend(features, codes, 3, 7, 0.4), rtol=0, atol=1e-13)


def test_fedavg_averages_local_epochs_by_rows():
    features, codes = rows()
    owners = (np.arange(len(codes)) >= 20).astype(int)
    head = FedAvgHead(rounds=1, epochs=4, batch=1000, rate=0.4).fit(features, codes, owners, 2, 3)
    parts = [descend(features[owners == k], codes[owners == k], 3, 4, 0.4) for k in (0, 1)]
    assert np.allclose(head.weight, (20 * parts[0] + 70 * parts[1]) / 90, rtol=0, atol=1e-13)


def test_fedavg_is_repeatable_counts_its_bytes_and_ignores_empty_clients():
    features, codes = rows()
    owners = np.arange(len(codes)) % 3
    method = FedAvgHead(rounds=3, batch=8, seed=5)
    heads = []
    last = method.fit(features, codes, owners, 3, 3, heads.append)
    assert np.array_equal(last.weight, method.fit(features, codes, owners, 5, 3).weight)
    assert not np.array_equal(
        last.weight, FedAvgHead(rounds=3, batch=8).fit(features, codes, owners, 3, 3).weight
    )
    assert [head.rounds for head in heads] == [1, 2, 3]
    assert last.nbytes == 3 * 3 * 2 * (6 * 3 * 8)
    assert np.mean(last.predict(features) == codes) > 0.8


def test_fedavg_refuses_what_it_cannot_use():
    features, codes = rows()
    with pytest.raises(DataError, match="rounds must be a whole number"):
        FedAvgHead(rounds=0)
    with pytest.raises(DataError, match="do not fit"):
        FedAvgHead(rounds=1).fit(features, codes[:-1], codes, 3, 3)


def test_local_models_know_only_their_own_rows():
    features, codes = rows()
    test_features, test_codes = rows(seed=3)
    owners = np.arange(len(codes)) % 3
    accuracies = local_accuracies((features, codes), (test_features, test_codes), owners, 4, 0.1)
    for client in range(3):
        own = owners == client
        x, y = features[own], np.eye(3)[codes[own]]
        weight = np.linalg.solve(x.T @ x + 0.1 * np.eye(5), x.T @ y)
        assert accuracies[client] == np.mean(np.argmax(test_features @ weight, axis=1) == test_codes)
    assert np.isnan(accuracies[3])


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
    digits = Digits.load()
    first, *_ = divisions(digits.y_train, 6, 0.1, 0)
    federation = fs.LocalFederation.from_arrays(digits.train, digits.y_train, first.owners, clients=6)
    entries = [entry for entry in told["methods"] if entry["depth"] is not None]
    assert [entry["depth"] for entry in entries] == [0, 1, 2, 4]
    for entry in entries:
        model = fs.DeepAFL(layers=entry["depth"], width=32).fit(federation)
        assert entry["accuracy"] == model.score(digits.test, digits.y_test)
        assert entry["exchanges"] == len(model.history)
        assert entry["bytes_up"] == sum(record.bytes_up for record in model.history)
        assert entry["bytes_down"] == sum(record.bytes_down for record in model.history)


def test_demo_traffic_of_the_other_methods(quick):
    _, told = quick
    named = {entry["name"]: entry for entry in told["methods"]}
    head, triangle, cross, squares = 65 * 10 * 8, 64 * 65 // 2 * 8, 64 * 10 * 8, 10 * 8
    assert named["FedAvg, 10 rounds"]["bytes_up"] == 10 * 6 * head
    assert named["FedAvg, 10 rounds"]["bytes_down"] == 10 * 6 * head
    assert named["FedAvg, 1 round"]["exchanges"] == 1
    assert named["AFL"]["bytes_up"] == 6 * (triangle + cross + squares)
    assert named["AFL"]["exchanges"] == 1
    assert named["local only, mean client"]["bytes_up"] == 0


def test_demo_writes_a_figure_the_results_and_data_that_train_reads(quick):
    folder, told = quick
    assert sorted(path.name for path in folder.iterdir()) == ["demo.png", "digits.npz", "results.json"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "results.json").read_text()) == told
    words = ["train", str(folder / "digits.npz"), "--layers", "4", "--width", "32", "--json"]
    trained = json.loads(CliRunner().invoke(main, words).stdout)
    assert trained["accuracy"]["test"] == told["staged_accuracy"][-1]


def test_demo_page_tells_the_story(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    result = demo(*QUICK, "--no-figure")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for words in ("6 clients", "DeepAFL, 4 blocks", "exchanges", "whoever owns what", "Try next"):
        assert words in result.stdout
    files = sorted(path.name for path in (tmp_path / "fedsolve-demo").iterdir())
    assert files == ["digits.npz", "results.json"]
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_demo_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    def broken(self, *args):
        raise DataError("out of luck")

    monkeypatch.setattr(Comparison, "change", broken)
    result = demo(*QUICK, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == "error: out of luck\n"
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert demo("--out", tmp_path / "file").exit_code == 4
    assert demo("--alpha", "-1", "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_digits_are_split_by_class_once_and_for_all():
    digits = Digits.load()
    assert (len(digits.y_train), len(digits.y_test)) == (1198, 599)
    shares = np.bincount(digits.y_test) / (np.bincount(digits.y_train) + np.bincount(digits.y_test))
    assert np.all(np.abs(shares - 1 / 3) < 0.01)
    assert digits.train.max() == 1.0
    assert np.array_equal(digits.x_train, Digits.load().x_train)


@pytest.mark.slow
def test_the_whole_demo_holds_what_the_readme_says(tmp_path):
    result = demo("--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    reached = {entry["name"]: entry["accuracy"] for entry in told["methods"]}
    assert reached["DeepAFL, 20 blocks"] > 0.98
    assert reached["DeepAFL, 20 blocks"] > reached["FedAvg, 100 rounds"] > reached["local only, best client"]
    assert reached["AFL"] > 0.92
    for change in told["invariance"]:
        assert max(change["afl"], change["deepafl"]) <= 1e-9
        assert change["same_predictions"] is True
