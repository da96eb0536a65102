"""Trackers: what real stores of MLflow and TensorBoard hold after trainings, whole, resumed and broken."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError, TrackingWarning
from fedsolve.federation.engine import hears
from fedsolve.tracking.tracked_runs import values_of
from fedsolve.tracking.wandb_runs import WandbTracker
from tests.command import document, fedsolve, refused
from tests.federation.test_followers import METHOD, federation

pytestmark = pytest.mark.trackers

NAMES = ("risk", "bytes_up", "bytes_down", "seconds", "clients")


EXPERIMENT = """
name = "heads"
title = "AFL beside clients on their own"
seeds = [0, 1]
[dataset]
address = "digits"
[[partition]]
kind = "iid"
clients = 2
[[method]]
name = "AFL"
method = "afl"
parameters = {ridge = 1.0}
[[method]]
name = "alone"
method = "local"
"""


class Stop(BaseException): ...


def interrupted(follow, path, after=1):
    def stop(record, expected):
        if record.exchange == after:
            raise Stop

    with pytest.raises(Stop):
        METHOD.fit(federation(), path, follow=[stop, follow])


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database with MLflow's tables, which take seconds to make."""
    pytest.importorskip("mlflow")
    file = tmp_path_factory.mktemp("mlflow") / "runs.db"
    fs.tracker(f"mlflow:sqlite:///{file}")
    return file


@pytest.fixture
def mlflow(tmp_path, empty_store):
    """The address of a new store, and what reads it."""
    module = pytest.importorskip("mlflow")
    place = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"

    def read(name):
        client = module.MlflowClient(place)
        experiment = client.get_experiment_by_name(name)
        return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])

    return SimpleNamespace(address=f"mlflow:{place}", client=module.MlflowClient(place), runs=read)


def history(client, run, name):
    """Values of a metric by step, each of which must be there once."""
    found = client.get_metric_history(run.info.run_id, name)
    assert len({one.step for one in found}) == len(found)
    return {one.step: one.value for one in found}


def told(model, name):
    return {record.exchange: values_of(record)[name] for record in model.history if name in values_of(record)}


@pytest.fixture
def tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        store = EventAccumulator(str(folder))
        store.Reload()
        return store

    return SimpleNamespace(address=f"tensorboard:{tmp_path}/board", folder=tmp_path / "board", read=read)


def scalars(store, name):
    found = store.Scalars(name)
    assert len({one.step for one in found}) == len(found)
    return {one.step: one.value for one in found}


# -- MLflow ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_holds_a_training_and_its_scores(mlflow):
    with fs.tracker(mlflow.address) as tracked:
        model = METHOD.fit(
            federation(), follow=[hears("look", lambda run: {"looks": {"odd": True, "list": [1]}}), tracked]
        )
        tracked.scored({"test_accuracy": 0.75})
    (run,) = mlflow.runs("fedsolve")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "deepafl")
    assert {name: run.data.params[name] for name in ("method", "layers", "width", "exchange")} == {
        "method": "deepafl",
        "layers": "2",
        "width": "8",
        "exchange": "lean",
    }
    assert run.data.params["federation.clients"] == "4"
    for name in NAMES:
        assert history(mlflow.client, run, name) == told(model, name) != {}
    assert history(mlflow.client, run, "looks/odd") == dict.fromkeys(range(len(model.history)), 1.0)
    assert "looks/list" not in run.data.metrics
    assert run.data.metrics["final_test_accuracy"] == 0.75
    assert run.data.metrics["total_bytes_up"] == sum(record.bytes_up for record in model.history)
    # Clients are counted, never named.
    names = federation().clients
    assert not any(name in str(run.to_dictionary()) for name in names)


@pytest.mark.slow
def test_mlflow_goes_on_with_the_run_of_a_training_that_is_resumed(mlflow, tmp_path):
    path = tmp_path / "run"
    interrupted(fs.tracker(mlflow.address), path)
    (run,) = mlflow.runs("fedsolve")
    assert run.info.status == "KILLED"
    # The exchange that stopped it is in the checkpoint, and was told to nobody who came after.
    model = METHOD.fit(federation(), path, resume=True, follow=fs.tracker(mlflow.address))
    (run,) = mlflow.runs("fedsolve")
    assert run.info.status == "FINISHED"
    for name in NAMES:
        assert history(mlflow.client, run, name) == told(model, name)
    # Another training with a checkpoint of that name is another run.
    path.unlink()
    METHOD.fit(federation(), path, follow=fs.tracker(mlflow.address))
    assert [run.info.status for run in mlflow.runs("fedsolve")] == ["FINISHED"] * 2


def test_a_failure_is_told(mlflow):
    features, labels = np.ones((6, 2)), np.arange(6) % 2
    features[0, 0] = 1e200  # squares beyond float64
    broken = fs.LocalFederation.from_arrays(features, labels, labels)
    with pytest.raises(fs.FedsolveError):
        fs.AFL(ridge=1.0).fit(broken, follow=fs.tracker(mlflow.address))
    assert [run.info.status for run in mlflow.runs("fedsolve")] == ["FAILED"]


def test_a_store_that_fails_is_left_and_the_training_goes_on(mlflow, tmp_path):
    tracked = fs.tracker(mlflow.address)

    def lose(record, expected):
        (tmp_path / "runs.db").write_bytes(b"no database any more" * 1000)

    with pytest.warns(TrackingWarning, match="takes nothing more.*training continues") as seen:
        model = METHOD.fit(federation(), follow=[lose, tracked])
    assert len(seen) == 1
    rows = np.random.default_rng(1).normal(size=(9, 5))
    untracked = METHOD.fit(federation())
    np.testing.assert_array_equal(model.decision_function(rows), untracked.decision_function(rows))


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard_holds_every_exchange_once_though_the_training_was_resumed(tensorboard, tmp_path):
    path = tmp_path / "run"
    interrupted(fs.tracker(tensorboard.address), path)
    with fs.tracker(tensorboard.address) as tracked:
        model = METHOD.fit(federation(), path, resume=True, follow=tracked)
        tracked.scored({"accuracy": 0.5})
    (folder,) = tensorboard.folder.iterdir()
    assert len(list(folder.iterdir())) == 2
    store = tensorboard.read(folder)
    for name in NAMES:
        assert scalars(store, name) == pytest.approx(told(model, name), rel=1e-6)
    assert scalars(store, "final_accuracy") == {model.history[-1].exchange: 0.5}
    (text,) = store.Tensors("parameters")[-1].tensor_proto.string_val
    assert b"| layers | 2 |" in text


def test_tensorboard_has_a_folder_for_every_training(tensorboard):
    with fs.tracker(tensorboard.address) as tracked:
        for _ in range(3):
            fs.AFL(ridge=1.0).fit(federation(), follow=tracked)
    folders = sorted(tensorboard.folder.iterdir())
    assert len(folders) == 3
    assert all(set(scalars(tensorboard.read(folder), "bytes_up")) == {0} for folder in folders)


def test_the_writer_of_tensorboard_needs_no_framework():
    """In a process of its own: here torch may have been loaded by other tests."""
    pytest.importorskip("tensorboard")
    code = (
        "import sys, tempfile, fedsolve as fs; fs.tracker('tensorboard:' + tempfile.mkdtemp()); "
        "sys.exit(str([name for name in ('torch', 'tensorflow', 'mlflow', 'wandb') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


# -- Weights & Biases ------------------------------------------------------------------------------


class PretendedWandb:
    """Notes the calls that `wandb` would get, which is not installed for the tests: it is large."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def Settings(self, **settings):
        return settings

    def init(self, **settings):
        self.calls.append(("init", settings))
        return self

    def log(self, values, step):
        self.calls.append(("log", values, step))

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code))


def test_wandb_is_told_the_same_and_stays_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb, path = PretendedWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with WandbTracker("heads") as tracked:
        interrupted(tracked, path)
        model = METHOD.fit(federation(), path, resume=True, follow=tracked)
        tracked.scored({"accuracy": 0.5})
    kinds = [call[0] for call in wandb.calls]
    count = len(model.history)
    assert kinds == ["init", "log", "finish", "init", *["log"] * (count + 2), "finish"]
    assert [call[1] for call in wandb.calls if call[0] == "finish"] == [1, 0]
    settings = wandb.calls[0][1]
    assert (settings["project"], settings["mode"], settings["config"]["layers"]) == ("heads", "offline", "2")
    again = wandb.calls[4:-1]
    assert [call[2] for call in again] == [*range(count), count - 1, count - 1]
    assert [call[1] for call in again[:count]] == [values_of(record) for record in model.history]
    assert again[-1][1] == {"final_accuracy": 0.5}


@pytest.mark.slow
def test_wandb_itself_takes_what_it_is_told(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with fs.tracker("wandb:heads") as tracked:
        model = METHOD.fit(federation(), follow=tracked)
    wandb.teardown()  # its service writes in the background
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for value in told(model, "risk").values():
        assert repr(value).encode() in content


# -- addresses and the command line ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mlfow:sqlite:///x.db", ("'mlfow:sqlite:///x.db' names no tracker", "Did you mean 'mlflow'?")),
        ("tensorboard", ("does not say where to; write tensorboard:DIR",)),
        ("mlflow: ", ("does not say where to; write mlflow:URI",)),
        ("mlflow:runs", ("'runs' is no address", "mlflow:sqlite:///FILE.db")),
        ("mlflow:nowhere://x", ("cannot be used", "mlflow:sqlite:///FILE.db")),
        ("mlflow:sqlite:///{file}/x.db", ("cannot be used", "mlflow:sqlite:///FILE.db")),
        ("tensorboard:{file}/x", ("Not a directory", "folder that can be written")),
        ("wandb:a/b", ("must not have '/'", "wandb:PROJECT")),
    ],
)
def test_a_bad_address_is_refused_before_any_work(address, said, tmp_path, monkeypatch):
    if address.startswith("mlflow:") and "://" in address:
        pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "file").touch()
    result = fedsolve("train", "no-such-file.npz", "--tracker", address.format(file=file))
    refused(result, 2, *said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["server", "experiment"])
def test_every_command_refuses_it(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "heads.toml").write_text(EXPERIMENT)
    line = {
        "server": ("server", "--clients", 3, "--insecure", "--plain", "--gather", 1),
        "experiment": ("experiment", "run", file),
    }[command]
    refused(fedsolve(*line, "--tracker", "board:runs"), 2, "'board:runs' names no tracker")
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    if importlib.util.find_spec("wandb") is not None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DataError, match=r"wandb:PROJECT needs wandb.*pip install 'fedsolve\[wandb\]'"):
        fs.tracker("wandb:heads")


@pytest.mark.slow
def test_train_writes_to_several_trackers_at_once(mlflow, tensorboard, tmp_path):
    both = ("--tracker", mlflow.address, "--tracker", tensorboard.address)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackingWarning)
        found = document("train", "digits", "--method", "afl", "--ridge", "1", "--clients", 3, *both)
    (run,) = mlflow.runs("fedsolve")
    (folder,) = tensorboard.folder.iterdir()
    assert run.data.metrics["final_train_accuracy"] == found["accuracy"]["train"]
    assert run.data.metrics["total_exchanges"] == found["exchanges"]
    sent = {step: float(one["bytes_up"]) for step, one in enumerate(found["history"])}
    assert history(mlflow.client, run, "bytes_up") == sent
    assert scalars(tensorboard.read(folder), "bytes_up") == pytest.approx(sent, rel=1e-6)


@pytest.mark.slow
def test_an_experiment_is_an_mlflow_experiment_and_a_cell_a_run(mlflow, tmp_path):
    file = tmp_path / "heads.toml"
    file.write_text(EXPERIMENT)
    line = ("experiment", "run", file, "--runs", tmp_path / "runs", "--tracker", mlflow.address)
    (run,) = document(*line)["runs"]
    assert run["ran"] == 4
    found = mlflow.runs("heads")
    assert sorted(run.info.run_name for run in found) == [
        f"{name}, IID, seed {seed}" for name in ("AFL", "alone") for seed in (0, 1)
    ]
    cells = [json.loads(line) for line in (tmp_path / "runs/heads/cells.jsonl").read_text().splitlines()]
    reached = {cell["cell"]: cell["accuracy"] for cell in cells}
    for one in found:
        assert one.info.status == "FINISHED"
        assert one.data.params["experiment"] == "heads"
        assert one.data.metrics["final_accuracy"] == reached[one.data.params["cell"]]
    # Cells that are there are not trained again, and so not written again.
    assert document(*line)["runs"][0]["found"] == 4
    assert len(mlflow.runs("heads")) == 4
