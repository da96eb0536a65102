"""Virtual clients in Ray: the same bits as in one process, from an experiment file too."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments.cells import run_cell
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.network.simulation import _write, simulate
from tests.toy import RANDOM, opening, written

from .sites import same_bits

pytestmark = [pytest.mark.flower, pytest.mark.slow]

CLIENTS = 30


def test_virtual_clients_give_the_same_bits(digits):
    owners = fs.partition.dirichlet(digits.labels, CLIENTS, alpha=0.1, seed=0)
    owners[owners == 7] = 8  # an empty client

    def work(federation):
        deep = fs.DeepAFL(layers=2, width=48).fit(federation)
        return deep, fs.AFL(ridge=0.1).fit(federation), federation.evaluate(deep)

    deep, flat, accuracy = simulate(digits.features, digits.labels, owners, work, clients=CLIENTS, workers=2)
    local = fs.LocalFederation.from_arrays(digits.features, digits.labels, owners, CLIENTS, workers=1)
    expected = fs.DeepAFL(layers=2, width=48, exchange="single").fit(local)
    assert same_bits(deep, expected)
    assert same_bits(flat, fs.AFL(ridge=0.1).fit(local))
    assert accuracy == local.evaluate(expected)
    assert deep.history[0].empty == ("client-07",)
    assert [record.bytes_up for record in deep.history] == [record.bytes_up for record in expected.history]


def test_a_file_stands_for_features_only_as_a_whole(tmp_path):
    np.save(tmp_path / "features.npy", np.arange(40.0).reshape(20, 2))
    whole = np.load(tmp_path / "features.npy", mmap_mode="r")
    changed = np.load(tmp_path / "features.npy", mmap_mode="c")
    changed[0] = 7.0
    for number, features in enumerate(
        [whole, whole[10:], whole[:10], whole[:, :1], whole[::-1], changed, whole.reshape(10, 4)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        none = np.zeros(len(features), dtype=int)
        found = np.load(_write(folder, features, none, none, 1).features)
        assert found.tolist() == features.tolist()
        assert (folder / "features.npy").exists() == (number > 0)


METHOD = """[[method]]
method = "deepafl"
parameters = {layers = 2, width = 16, exchange = "single"}
"""


def test_an_experiment_by_either_engine_has_the_same_result(tmp_path):
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((400, 12)), rng.integers(0, 3, 400)
    rows = ExperimentRows(features[:300], labels[:300], features[300:], labels[300:], "key")
    outcomes = []
    for engine in (None, "flower-simulation"):
        text = opening("DeepAFL", 0.1, 10, RANDOM, seeds=(0,), engine=engine)
        (cell,) = read_experiment(written(tmp_path, text + METHOD)).cells()
        outcomes.append((cell.id, run_cell(cell, rows, workers=2)))
    (first, local), (second, simulated) = outcomes
    assert first != second
    for name in ("accuracy", "train_accuracy_per_layer", "risk", "exchanges", "bytes_up", "bytes_down"):
        assert local[name] == simulated[name]
