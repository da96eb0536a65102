"""RayFederation on a cluster of two nodes on this machine: the local engine's models, and its own bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cluster import check_address
from fedsolve.errors import CohortError, DataError, ModelFileError
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.sources import ExperimentRows
from tests.cluster.test_crew import sources
from tests.command import document, fedsolve, refused
from tests.toy import RANDOM, opening, written

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

CLIENTS = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes that only the test knows of; Ray takes it that one of them has a GPU."""
    from fedsolve.cluster import require_ray

    require_ray()
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2, num_gpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    yield
    ray.shutdown()
    nodes.shutdown()


def contents(model: fs.Model) -> dict[str, np.ndarray]:
    return model.contents()[0]


def difference(left: fs.Model, right: fs.Model) -> float:
    one, other = contents(left), contents(right)
    assert one.keys() == other.keys()
    return max(float(np.max(np.abs(one[name] - other[name]), initial=0.0)) for name in one)


def test_both_engines_give_the_same_models_and_losses_change_no_bit(cluster, digits, tmp_path: Path):
    owners = fs.partition.dirichlet(digits.labels, CLIENTS, alpha=0.3, seed=0)
    owners[owners == 7] = 8  # an empty client
    given = (digits.features, digits.labels, owners, CLIENTS)
    local = fs.LocalFederation.from_arrays(*given, workers=1)
    methods = [
        fs.AFL(ridge=0.1),
        fs.DeepAFL(layers=2, width=48),
        fs.gradient.FedAvg(rounds=2, network="mlp:16"),
        fs.gradient.Scaffold(rounds=3, network="linear", participation=0.5),
    ]
    with fs.RayFederation.from_arrays(*given, workers=3) as federation:
        models = [method.fit(federation) for method in methods]
        for method, model in zip(methods, models, strict=True):
            expected = method.fit(local)
            assert difference(model, expected) <= 1e-10, method.key
            assert [r.bytes_up for r in model.history] == [r.bytes_up for r in expected.history]
            assert [r.empty for r in model.history] == [r.empty for r in expected.history]
        assert federation.evaluate(models[1]) == local.evaluate(models[1])

    killed: list[int] = []
    with fs.RayFederation.from_arrays(*given, workers=2) as federation:
        pids = federation.pids

        def kill(answered: int, asked: int) -> None:
            """Once in every run's middle: another worker still has packets of this exchange."""
            if answered < asked and len(killed) < 2:
                killed.append(pids[len(killed)])
                os.kill(killed[-1], signal.SIGKILL)

        federation.progress = kill
        for method, model in zip(methods[:2], models, strict=False):
            assert difference(method.fit(federation), model) == 0.0
        assert len(killed) == 2
        assert not set(killed) & set(federation.pids)
        federation.progress = None
        checkpoint = tmp_path / "run.ckpt"
        with pytest.raises(KeyboardInterrupt):
            methods[1].fit(federation, checkpoint=checkpoint, follow=_interrupt)
        other = fs.LocalFederation.from_arrays(*given[:2], owners[::-1].copy(), CLIENTS)
        with pytest.raises(ModelFileError, match="other rows of"):
            methods[1].fit(other, checkpoint=checkpoint, resume=True)
        again = methods[1].fit(federation, checkpoint=checkpoint, resume=True)
        assert difference(again, models[1]) == 0.0
        with pytest.raises(ModelFileError, match="other rows of"):
            federation.holdings().check(other.holdings().note(), "run.ckpt")


def _interrupt(record, expected) -> None:
    if record.exchange == 1:
        raise KeyboardInterrupt


def test_a_worker_that_is_lost_too_often_and_a_client_that_fails_are_named(cluster, digits):
    features = digits.features.copy()
    owners = np.arange(len(features)) % 6
    features[3] = 1e200
    with (
        fs.RayFederation.from_arrays(features, digits.labels, owners, workers=2) as federation,
        pytest.raises(CohortError, match="'client-3' failed"),
    ):
        fs.AFL(ridge=0.1).fit(federation)
    given = (digits.features, digits.labels, owners)
    keywords = {"workers": 2, "missing": "continue", "restarts": 0}
    with fs.RayFederation.from_arrays(*given, **keywords) as federation:
        os.kill(federation.pids[0], signal.SIGKILL)
        model = fs.AFL(ridge=0.1).fit(federation)
        assert model.history[0].cohort == ("client-3", "client-4", "client-5")
        rest = owners >= 3
        expected = fs.AFL(ridge=0.1).fit(
            fs.LocalFederation.from_arrays(digits.features[rest], digits.labels[rest], owners[rest], 6)
        )
        assert difference(model, expected) <= 1e-10


def test_rows_in_files_and_a_client_in_two_places(cluster, tmp_path: Path):
    files, features, labels = sources(tmp_path)
    with fs.RayFederation(files, workers=2) as federation:
        model = fs.DeepAFL(layers=1, width=10).fit(federation)
        owners = np.repeat(np.arange(4), [100, 100, 120, 80])
        local = fs.LocalFederation.from_arrays(features, labels, owners)
        expected = fs.DeepAFL(layers=1, width=10).fit(local)
        assert difference(model, expected) <= 1e-10
        assert model.history[0].cohort == ("a", "b", "c", "d")
        assert model.history[0].bytes_up == expected.history[0].bytes_up
        known = fs.LocalFederation([fs.Participant("a", fs.ClientData(features[:100], labels[:100]))])
        held = federation.holdings()
        assert held.clients["a"] == known.holdings().clients["a"]
        assert [held.clients[name][0] for name in "abcd"] == [100, 100, 120, 80]
        assert not held.dealt
        with pytest.raises(DataError, match="the rows of 'b' lie in 2 places"):
            fs.gradient.FedAvg(rounds=1, network="linear").fit(federation)
    (tmp_path / "a.npz").unlink()
    with (
        fs.RayFederation(files, workers=1) as federation,
        pytest.raises(DataError, match=r"participant 'a': .*cannot read"),
    ):
        federation.describe()


def test_blocks_of_a_thousand_clients_have_the_same_bits_for_any_workers(cluster):
    rng = np.random.default_rng(0)
    features = rng.standard_normal((5_000, 32))
    labels, owners = np.arange(5_000) % 10, np.repeat(np.arange(1000), 5)
    found = []
    for workers in (1, 3):
        with fs.RayFederation.from_arrays(features, labels, owners, workers=workers) as federation:
            found.append(fs.AFL(ridge=1.0).fit(federation))
    assert difference(*found) == 0.0
    local = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(features, labels, owners))
    assert difference(found[0], local) <= 1e-10


def test_workers_compute_on_their_device_and_reserve_the_gpus_of_the_cluster(cluster):
    import ray

    features = np.random.default_rng(0).standard_normal((600, 20))
    given = (features, np.argmax(features[:, :3], axis=1), np.arange(600) % 6)
    found = []
    for device in (None, "cpu", "torch:cpu"):
        with fs.RayFederation.from_arrays(*given, workers=1, device=device) as federation:
            assert ray.available_resources()["GPU"] == 1.0
            found.append(fs.AFL(ridge=0.1).fit(federation))
    assert difference(found[0], found[1]) == 0.0
    assert 0.0 < difference(found[0], found[2]) <= 1e-10
    for workers, several in ((None, 1), (2, 2)):
        with fs.RayFederation.from_arrays(*given, workers=workers, device="auto") as federation:
            assert len(federation.pids) == several
            assert ray.available_resources().get("GPU", 0.0) == 0.0
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:1"):
            with pytest.raises(DataError, match=f"cannot start: .*'{device}' was asked for.*no GPU here"):
                fs.RayFederation.from_arrays(*given, workers=1, device=device)


def test_a_cluster_that_is_there_is_found_by_its_address(cluster, monkeypatch):
    import ray

    check_address(ray.get_runtime_context().gcs_address, "address=")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(DataError, match="RAY_ADDRESS is 'nonsense'"):
        fs.RayFederation.from_arrays(np.ones((2, 2)), [0, 1], [0, 1])


def _kill(federation: fs.RayFederation) -> list[int]:
    pids = federation.pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    return pids


def test_workers_lost_before_anything_was_asked_are_replaced(cluster, tmp_path: Path):
    files, _, _ = sources(tmp_path)
    with fs.RayFederation(files, workers=2) as federation:
        expected = fs.AFL(ridge=0.1).fit(federation)
    with fs.RayFederation(files, workers=2) as federation:
        first = _kill(federation)
        assert len(federation.pids) == 2
        assert not set(first) & set(_kill(federation))
        assert difference(fs.AFL(ridge=0.1).fit(federation), expected) == 0.0
    with fs.RayFederation(files, workers=1, restarts=0) as federation:
        _kill(federation)
        with pytest.raises(DataError, match=r"participant 'a': WorkerLost: its worker was lost once \("):
            federation.describe()
        assert federation.pids == []


def test_one_loss_is_one_loss_however_much_the_worker_was_asked_for(cluster, digits):
    given = (digits.features, digits.labels, np.arange(len(digits.labels)) % 20)
    with fs.RayFederation.from_arrays(*given, workers=1, restarts=0, missing="continue") as federation:
        federation.describe()
        _kill(federation)
        for _ in range(2):
            with pytest.raises(CohortError) as told:
                fs.AFL(ridge=0.1).fit(federation)
            assert "lost once" in str(told.value)
            assert "times" not in str(told.value)


METHOD = """[[method]]
method = "deepafl"
parameters = {layers = 1, width = 16}
"""


def test_an_experiment_and_the_command_line_by_either_engine(cluster, tmp_path: Path):
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((400, 12)), rng.integers(0, 3, 400)
    rows = ExperimentRows(features[:300], labels[:300], features[300:], labels[300:], "key")
    outcomes = []
    for engine in (None, "ray"):
        text = opening("DeepAFL", 0.1, 10, RANDOM, seeds=(0,), engine=engine)
        (cell,) = read_experiment(written(tmp_path, text + METHOD)).cells()
        outcomes.append((cell.id, train_cell(cell, rows, workers=2).values))
    (first, local), (second, found) = outcomes
    assert first != second
    for name in ("accuracy", "train_accuracy_per_layer", "exchanges", "bytes_up", "bytes_down"):
        assert local[name] == found[name]
    assert np.allclose(local["risk"], found["risk"], rtol=1e-10)

    np.savez(tmp_path / "rows.npz", x=features, y=labels)
    line = ("train", tmp_path / "rows.npz", "--method", "afl", "--clients", 8)
    by_ray = document(*line, "--engine", "ray", "--workers", 2, "--out", tmp_path / "ray.safetensors")
    document(*line, "--out", tmp_path / "local.safetensors")
    assert by_ray["engine"] == "ray"
    models = [fs.load_model(tmp_path / f"{engine}.safetensors") for engine in ("ray", "local")]
    assert difference(*models) <= 1e-10
    refused(fedsolve(*line, "--engine", "ray", "--secure"), 2, "needs --engine local")
