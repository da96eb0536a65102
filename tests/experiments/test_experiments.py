"""Experiment files, their cells, and runs that may be stopped anywhere."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform import laws
from fedsolve.closedform.separability import class_sums, separability
from fedsolve.data.datasets import published
from fedsolve.data.feature_store import FeatureStore
from fedsolve.errors import DataError, ModelFileError
from fedsolve.experiments import runner
from fedsolve.experiments.cells import deal, flip_labels, train_cell
from fedsolve.experiments.config import AXES, Cell, DatasetSpec
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.outcomes import unpacked
from fedsolve.experiments.reading import read_experiment, shipped
from fedsolve.experiments.run_folder import CELLS, DAMAGED, load_run
from fedsolve.experiments.runner import CellProgress, run_experiment
from fedsolve.experiments.sources import ExperimentRows, StoredRows, Tick, random_rows
from fedsolve.gradient import FedAvg
from tests.command import document, fedsolve, refused
from tests.toy import opening, toy_data, toy_rows, written

SHIPPED = Path(__file__).parents[2] / "experiments"
FULL = sorted(
    path
    for folder in ("deepafl", "afl", "apfl", "flfa", "real")
    for path in (SHIPPED / folder).glob("*.toml")
)
SMALL = list(shipped("small"))

ROWS = toy_rows(*toy_data(360, seed=5), 240)

BASE = (
    opening("toy", alpha=0.5, clients=7)
    + """[[method]]
name = "AFL"
method = "afl"
parameters = {ridge = 0.1}

[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 3, width = 16}
depths = [0, 3]
"""
)


def toy(spec: DatasetSpec, seed: int, tick: Tick) -> ExperimentRows:
    return ROWS


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / CELLS).read_text().splitlines()]


# -- reading ---------------------------------------------------------------------------------------


def test_cells_are_the_product_and_seeds_come_first(tmp_path: Path) -> None:
    text = BASE + "[grid]\nresidual_ridge = [0.1, 1]\n\n[noise]\nrates = [0, 0.2]\n"
    text += '[[partition]]\nkind = "iid"\nclients = 3\n'
    cells = read_experiment(written(tmp_path, text)).cells()
    # Two seeds, two noise rates, two partitions, AFL once and DeepAFL at two points of the grid.
    assert len(cells) == 2 * 2 * 2 * (1 + 2)
    assert [cell.seed for cell in cells] == [0] * 12 + [1] * 12
    assert [dict(cell.grid) for cell in cells[:3]] == [{}, {"residual_ridge": 0.1}, {"residual_ridge": 1}]
    assert cells[0].partition.name == "α = 0.5"
    assert cells[3].partition.name == "IID"
    assert cells[1].parameters["width"] == 16
    assert cells[1].parameters["activation"] == "gelu"
    assert "seed" not in cells[1].parameters
    assert len({cell.id for cell in cells}) == len(cells)


def test_labels_do_not_change_a_cell_but_everything_else_does(tmp_path: Path) -> None:
    def keys(text: str) -> list[str]:
        return [cell.key("rows") for cell in read_experiment(written(tmp_path, text)).cells()]

    first = keys(BASE)
    assert keys(BASE.replace('"DeepAFL"', '"ours"').replace('"toy"', '"other"')) == first
    assert keys(BASE.replace("clients = 7", 'clients = 7\nname = "mine"')) == first
    assert keys(BASE.replace("ridge = 0.1", "ridge = 0.1, intercept = false")) == first
    for change in (
        ("seeds = [0, 1]", "seeds = [2, 3]"),
        ("clients = 7", "clients = 8"),
        ("alpha = 0.5", "alpha = 0.6"),
    ):
        assert not set(keys(BASE.replace(*change))) & set(first), change
    assert keys(BASE.replace("width = 16", "width = 17"))[0] == first[0]
    assert keys(BASE.replace("width = 16", "width = 17"))[1] != first[1]
    one = read_experiment(written(tmp_path, BASE)).cells()[0]
    assert one.key("rows") != one.key("other rows")


def test_a_method_wins_over_its_dataset_and_a_grid_over_both(tmp_path: Path) -> None:
    text = BASE.replace('"digits"', '"digits"\nparameters = {ridge = 5, residual_ridge = 3}')
    afl, deep = read_experiment(written(tmp_path, text)).cells()[:2]
    assert afl.parameters["ridge"] == 0.1
    assert deep.parameters["ridge"] == 5.0
    grid = text + "[grid]\nresidual_ridge = [7]\n"
    assert read_experiment(written(tmp_path, grid)).cells()[1].parameters["residual_ridge"] == 7.0


def test_parameters_of_a_file_are_for_every_method_that_has_them(tmp_path: Path) -> None:
    text = BASE.replace('"digits"', '"digits"\nparameters = {residual_ridge = 3.0}')
    text += "[parameters]\nresidual_ridge = 2.0\nridge = 4.0\n"
    afl, deep = read_experiment(written(tmp_path, text)).cells()[:2]
    assert afl.parameters["ridge"] == 0.1, "a method's own come first"
    assert (deep.parameters["ridge"], deep.parameters["residual_ridge"]) == (4.0, 3.0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('title = "toy"', 'titel = "toy"', ["needs the key 'title'", "titel"]),
        ("seeds = [0, 1]", "seeds = [0, 1]\nseed = 3", ["unknown key 'seed'", "'seeds'"]),
        ("alpha = 0.5", "alpah = 0.5", ["needs the key 'alpha'", "alpah"]),
        ("clients = 7", "clients = 7\nper_client = 2", ["unknown key 'per_client'", "[partition]"]),
        ('kind = "dirichlet"', 'kind = "dirichlett"', ["unknown partition kind", "'dirichlet'"]),
        ('method = "deepafl"', 'method = "deepfl"', ["unknown method 'deepfl'", "'deepafl'"]),
        ("width = 16", "widht = 16", ["unknown parameter 'widht'", "'width'", "DeepAFL"]),
        ("width = 16", 'width = "16"', ["width must be", "a whole number", "'16'"]),
        ("width = 16", "width = 16.0", ["width must be", "a whole number"]),
        ("width = 16", 'width = 16, activation = "gleu"', ["DeepAFL", "Did you mean 'gelu'?"]),
        ("width = 16", 'width = 16, block_input = "first"', ["'previous' or 'initial'", "'first'"]),
        ("width = 16", "width = 16, seed = 4", ["'seed' of DeepAFL comes from 'seeds'"]),
        ("ridge = 0.1", "ridge = -0.1", ["AFL", "ridge", "-0.1"]),
        ("ridge = 0.1", "ridge = true", ["ridge must be", "a finite number", "True"]),
        ("depths = [0, 3]", "depths = [0, 4]", ["3 layers", "depth 4"]),
        ("parameters = {ridge = 0.1}", "depths = [1]", ["AFL", "no layers"]),
        ("seeds = [0, 1]", "seeds = [0, 0]", ["'seeds'", "different"]),
        ("seeds = [0, 1]", "seeds = [true]", ["'seeds'", "whole number"]),
        ('address = "digits"', "", ["[dataset]", "'address' or 'random'"]),
        ('name = "DeepAFL"', 'name = "AFL"', ["two methods", "'AFL'"]),
        ("clients = 7", 'clients = 7\ndatasets = ["mnist"]', ["unknown dataset 'mnist'", "digits"]),
        ("clients = 7", "clients = 0", ["'clients'", "at least 1", "0"]),
        ('title = "toy"', 'title = "toy"\nname = "a/b"', ["'name'", "a/b"]),
        ('title = "toy"', 'title = "toy"\npaper = {key = "deepafl", table = "99"}', ["no table '99'"]),
        ('title = "toy"', 'title = "toy"\npaper = {key = "depafl", table = "1"}', ["unknown paper 'depafl'"]),
        ("depths = [0, 3]", "[table]\nrows = 'methods'", ["unknown axis 'methods'", "'method'"]),
        ("depths = [0, 3]", "[table]\nvalues = 'tests'", ["unknown metric 'tests'", "'test'"]),
        ("depths = [0, 3]", "[table]\nbaseline = 'AFl'", ["baseline", "'AFL'"]),
        ("depths = [0, 3]", "[table]\nrows = 'stage'", ["'stage'", "'selected'", "test"]),
        ("depths = [0, 3]", "[table]\nvalues = ['test', 'selected']", ["'stage'", "test, selected"]),
        ("depths = [0, 3]", "[table]\nvalues = 'relative_seconds'", ["'relative_seconds'", "'baseline'"]),
        ("depths = [0, 3]", "[parameters]\nrounds = 3", ["'rounds' of [parameters]", "Known are"]),
        ("depths = [0, 3]", "[grid]\nrigde = [1.0]", ["'rigde' of [grid]", "'ridge'"]),
        ("depths = [0, 3]", "[grid]\nwidth = [8]", ["'width' of DeepAFL", "both fixed and in the grid"]),
        ("depths = [0, 3]", "[noise]\nrates = [1.5]", ["'rates'", "1.5"]),
        ("depths = [0, 3]", "[measure]\nseparable = true", ["unknown key 'separable'", "'separability'"]),
        ('title = "toy"', "title = toy", ["not valid TOML", "line 2"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, told: list[str]) -> None:
    assert old in BASE
    path = written(tmp_path, BASE.replace(old, new))
    with pytest.raises(DataError) as problem:
        read_experiment(path)
    for word in [str(path), *told]:
        assert word in str(problem.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.toml"):
        read_experiment(tmp_path / "nowhere.toml")
    with pytest.raises(ModelFileError, match="is not a run"):
        load_run(tmp_path)


@pytest.mark.parametrize("path", [*FULL, *SMALL], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_stand_for_cells_and_name_no_path(path: Path) -> None:
    experiment = read_experiment(path)
    cells = experiment.cells()
    assert cells
    assert len({cell.id for cell in cells}) == len(cells)
    for dataset in experiment.datasets:
        assert "/" not in (dataset.address or "")
        assert "/" not in (dataset.backbone or "")
    if path.parent.name == "small":
        assert experiment.name == f"small-{path.stem}"
        assert {dataset.address for dataset in experiment.datasets} <= {"digits", None}
    elif path.parent.name != "real":
        assert experiment.name == f"{path.parent.name}-{path.stem}"


def test_every_family_has_a_small_size() -> None:
    small = {path.stem for path in SMALL}
    full = {f"{path.parent.name}-{path.stem}" for path in FULL if path.parent.name != "real"}
    shared = {
        "deepafl-table-02": "deepafl-table-01",
        "deepafl-figure-03": "deepafl-figure-02",
        **{f"deepafl-figure-0{number}": "deepafl-table-09-11" for number in (4, 5, 6)},
        "afl-figure-3": "afl-table-1",
        "apfl-figure-3": "apfl-table-1",
        "apfl-figure-4": "apfl-table-1",
        "apfl-figure-6": "apfl-figure-5",
    }
    assert full - small == shared.keys(), "the same cells on another dataset share one small file"
    assert set(shared.values()) <= small
    assert small <= full
    names = [read_experiment(path).name for path in [*FULL, *SMALL]]
    assert len(set(names)) == len(names)


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    page = (SHIPPED.parent / "docs" / "how-to-reproduce-a-table.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    # Three seeds, two noise rates, AFL once and DeepAFL at three points of the grid.
    assert len(read_experiment(written(tmp_path, text)).cells()) == 3 * 2 * (1 + 3)
    for axis in (*AXES, *METRICS):
        assert f"`{axis}`" in page or axis.split("_")[-1] in ("csr", "ifs", "dm")


def official_archive(root: Path) -> None:
    """A few images in an archive as CIFAR-10 is distributed."""
    rng = np.random.default_rng(0)
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as archive:

        def add(name: str, contents: Any) -> None:
            packed = pickle.dumps(contents, protocol=2)
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(packed)
            archive.addfile(entry, io.BytesIO(packed))

        for name in (*published.CIFAR10.train, published.CIFAR10.test):
            labels = np.arange(20) % 10
            images = rng.integers(0, 30, (20, 3072)) + labels[:, None] * np.arange(3072) % 225
            add(name, {b"data": images.astype(np.uint8), b"labels": labels.tolist(), b"filenames": [b"x"]})
        add("batches.meta", {b"label_names": [b"class %d" % number for number in range(10)]})


@pytest.mark.parametrize(("address", "width"), [("digits", 64), ("cifar10", 192)])
def test_features_as_bytes_are_made_by_a_command(
    tmp_path: Path, address: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's command, on few images and their pixels instead of CIFAR-10 and EfficientNet-Lite0."""
    official_archive(tmp_path)
    spec = dataclasses.replace(published.CIFAR10, rows=(100, 20), digests={})
    known = tuple(spec if each is published.CIFAR10 else each for each in published.KNOWN)
    monkeypatch.setattr(published, "KNOWN", known)
    page = (SHIPPED.parent / "docs" / "how-to-reproduce-a-table.md").read_text()
    assert "fedsolve features build cifar10 --data-root datasets --directions 512 --out " in page
    file = tmp_path / "bytes.npz"
    words = ["features", "build", address, "--backbone", "pixels:8", "--store", tmp_path / "store"]
    words += [] if address == "digits" else ["--data-root", tmp_path]
    refused(fedsolve(*words, "--directions", 16), 2, "--out FILE.npz")
    refused(fedsolve(*words, "--out", tmp_path / "some.csv"), 2, "npz")
    refused(fedsolve(*words, "--directions", width + 1, "--out", file), 2, f"in [1, {width}]; got")
    told = document(*words, "--directions", 16, "--out", file)
    assert told["out"] == str(file)
    stored = FeatureStore(tmp_path / "store").get(told["key"])
    train = np.asarray(stored.x_train, np.float64)
    directions = np.linalg.eigh(np.cov(train.T))[1][:, ::-1][:, :16]
    rows = StoredRows(tmp_path)(DatasetSpec("d", "npz:bytes.npz"), 0, lambda remark: None)
    exact = train @ directions
    # A direction's sign is of no matter, and a byte is off by half a step at most.
    error = np.minimum(np.abs(rows.x_train - exact).max(axis=0), np.abs(rows.x_train + exact).max(axis=0))
    assert np.all(error <= 0.5001 * np.ptp(exact, axis=0) / 255)
    assert np.all(np.diff(rows.x_train.var(axis=0)) <= 1e-3), "the largest directions come first"
    assert rows.x_test is not None
    assert len(rows.x_test) == len(stored.x_test)
    np.testing.assert_array_equal(rows.y_test, stored.y_test)
    # Bytes cost no accuracy: AFL on the file is AFL on the projected features.
    fits = [
        fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(x, rows.y_train, np.arange(len(x)) % 3))
        for x in (rows.x_train, exact)
    ]
    scores = fits[0].score(rows.x_test, rows.y_test), fits[1].score(stored.x_test @ directions, stored.y_test)
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    assert scores[0] > 0.8


# -- one cell --------------------------------------------------------------------------------------


def cell_of(tmp_path: Path, method: str, extra: str = "", partition: str | None = None) -> Cell:
    head = BASE[: BASE.index("[[method]]")]
    if partition is not None:
        head = head[: head.index("[[partition]]")] + partition + "\n"
    return read_experiment(written(tmp_path, f"{head}[[method]]\n{method}\n{extra}")).cells()[0]


def test_a_deep_cell_is_the_model_scored_at_every_layer(tmp_path: Path) -> None:
    parameters = {"layers": 4, "width": 12, "ridge": 0.3}
    method = 'name = "D"\nmethod = "deepafl"\nparameters = {layers = 4, width = 12, ridge = 0.3}'
    cell = cell_of(tmp_path, method, "[measure]\nseparability = true\n[noise]\nrates = [0.25]\n")
    found = train_cell(cell, ROWS, workers=1).values

    labels = flip_labels(ROWS.y_train, 0.25, seed=0)
    owners = fs.partition.dirichlet(ROWS.y_train, 7, 0.5, seed=0)
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, labels, owners, clients=7, workers=1)
    model = fs.DeepAFL(**parameters, seed=0).fit(federation)
    assert found["accuracy_per_layer"] == model.staged_score(ROWS.x_test, ROWS.y_test).tolist()
    assert found["train_accuracy_per_layer"] == model.staged_score(ROWS.x_train, labels).tolist()
    assert found["accuracy"] == found["accuracy_per_layer"][-1]
    (depth, kept), rows = next(iter(found["hits"].items())), found["test_rows"]
    assert unpacked(kept, rows).sum() == round(rows * found["accuracy_per_layer"][int(depth)])
    np.testing.assert_allclose(found["risk"], model.risk, rtol=1e-12)
    assert found["exchanges"] == len(model.history)
    assert found["bytes_up"] == sum(record.bytes_up for record in model.history)
    for part, features, truth in (("train", ROWS.x_train, labels), ("test", ROWS.x_test, ROWS.y_test)):
        for layer in range(5):
            sums = class_sums(model.transform(features, layer), truth, model.classes)
            direct = separability(sums)
            assert found["separability"][part][layer] == pytest.approx(direct, rel=1e-9)
    # What W_2 had cost is what a run of two layers costs.
    shorter = train_cell(
        cell_of(tmp_path, method.replace("layers = 4", "layers = 2")), ROWS, workers=1
    ).values
    for name in ("exchanges", "bytes_up", "bytes_down"):
        assert found[f"{name}_per_layer"][2] == shorter[name]
        assert found[f"{name}_per_layer"][4] == found[name]
    assert sorted(found["seconds_per_layer"]) == found["seconds_per_layer"]
    # Who owns which row does not depend on the labels that were flipped.
    dealt = fs.partition.heterogeneity(ROWS.y_train, owners)
    assert found["partition"]["heterogeneity"] == shorter["partition"]["heterogeneity"] == dealt
    counts = np.bincount(owners, minlength=7)
    assert found["partition"]["empty_clients"] == int(np.sum(counts == 0))


def test_a_single_exchange_can_hold_two_classifiers(tmp_path: Path) -> None:
    method = 'name = "D"\nmethod = "deepafl"\nparameters = {layers = 2, width = 8, exchange = "%s"}'
    single, lean = (
        train_cell(cell_of(tmp_path, method % plan), ROWS, 1).values for plan in ("single", "lean")
    )
    assert single["exchanges_per_layer"] == [1, 1, 2]
    assert lean["exchanges_per_layer"] == [1, 3, 5]
    np.testing.assert_allclose(single["risk"], lean["risk"], rtol=1e-9)


def test_clients_on_their_own(tmp_path: Path) -> None:
    method = 'name = "L"\nmethod = "local"\nparameters = {ridge = 0.5, statistic = "%s"}'
    best, mean = (train_cell(cell_of(tmp_path, method % s), ROWS).values for s in ("best", "mean"))
    owners = deal(cell_of(tmp_path, method % "best").partition, ROWS.y_train, seed=0)
    alone = []
    for client in np.unique(owners):
        x, y = ROWS.x_train[owners == client], np.eye(3)[ROWS.y_train[owners == client]]
        weight = np.linalg.solve(x.T @ x + 0.5 * np.eye(6), x.T @ y)
        alone.append(np.mean(np.argmax(ROWS.x_test @ weight, axis=1) == ROWS.y_test))
    assert best["accuracy"] == pytest.approx(max(alone))
    assert mean["accuracy"] == pytest.approx(np.mean(alone))
    assert unpacked(best["hits"][""], 120).sum() == round(120 * max(alone))
    assert mean["hits"] is None
    assert best["bytes_up"] == 0


def test_the_aggregation_law_is_afl_with_the_regulariser_left_in_or_out(tmp_path: Path) -> None:
    method = 'name = "W"\nmethod = "law"\nparameters = {regulariser = 2.0, remove = %s}'
    left, removed = (train_cell(cell_of(tmp_path, method % word), ROWS).values for word in ("false", "true"))
    owners = np.zeros(240, dtype=np.int64)
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners)
    scores = [fs.AFL(ridge=r).fit(federation).score(ROWS.x_test, ROWS.y_test) for r in (7 * 2.0, 0.0)]
    assert [left["accuracy"], removed["accuracy"]] == scores
    assert removed["measures"]["deviation"] < 1e-12 < left["measures"]["deviation"]
    owners = deal(cell_of(tmp_path, method % "false").partition, ROWS.y_train, seed=0)
    merged = laws.aggregate(
        laws.local_solution(ROWS.x_train[owners == k], np.eye(3)[ROWS.y_train[owners == k]], 2.0)
        for k in range(7)
    )
    joint = np.linalg.lstsq(ROWS.x_train, np.eye(3)[ROWS.y_train], rcond=None)[0]
    # The paper's norm is the sum over all entries.
    assert left["measures"]["deviation"] == pytest.approx(np.abs(joint - merged.weight).sum(), rel=1e-9)
    # A feature that is blank in every row: sums of Gram matrices cannot be inverted.
    plain = 'name = "W"\nmethod = "law"\nparameters = {regulariser = 0.0, remove = %s}'
    blank = np.where(np.arange(6) == 2, 0.0, ROWS.x_train)
    singular = train_cell(cell_of(tmp_path, plain % "false"), dataclasses.replace(ROWS, x_train=blank)).values
    assert singular["measures"] == {"singular": True}
    assert singular["accuracy"] is None
    # Nothing was added that could be removed.
    nothing = train_cell(cell_of(tmp_path, plain % "true"), ROWS).values
    assert (nothing["measures"], nothing["accuracy"], nothing["seconds"]) == ({}, None, None)


def test_fedavg_uses_the_seed_of_the_cell(tmp_path: Path) -> None:
    method = 'name = "F"\nmethod = "fedavg"\nparameters = {rounds = 3, rate = 0.2}'
    cells = read_experiment(
        written(tmp_path, BASE[: BASE.index("[[method]]")] + f"[[method]]\n{method}\n")
    ).cells()
    for cell in cells:
        owners = fs.partition.dirichlet(ROWS.y_train, 7, 0.5, seed=cell.seed)
        federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners, clients=7)
        model = FedAvg(rounds=3, rate=0.2, seed=cell.seed).fit(federation)
        found = train_cell(cell, ROWS).values
        assert found["accuracy"] == model.score(ROWS.x_test, ROWS.y_test)
        assert found["accuracy_per_round"][-1] == found["accuracy"]
        assert found["exchanges"] == len(found["loss_per_round"]) == 3


def test_test_rows_of_an_unknown_class_count_as_wrong(tmp_path: Path) -> None:
    strange = ExperimentRows(ROWS.x_train, ROWS.y_train, ROWS.x_test, np.full(120, 9), "strange")
    for name in ("afl", "deepafl", "fedavg", "law", "local"):
        parameters = "parameters = {layers = 1, width = 8}" if name == "deepafl" else ""
        found = train_cell(
            cell_of(tmp_path, f'name = "M"\nmethod = "{name}"\n{parameters}'), strange, 1
        ).values
        assert found["accuracy"] == 0.0, name


def test_random_rows_follow_the_seed_and_have_even_classes() -> None:
    spec = DatasetSpec("dummy", None, random={"rows": 60, "width": 4, "classes": 3})
    first, again, other = (random_rows(spec, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.x_train, again.x_train)
    assert not np.array_equal(first.x_train, other.x_train)
    assert np.bincount(first.y_train).tolist() == [20, 20, 20]
    assert first.key == other.key, "the seed is part of the cell already"


# -- runs ------------------------------------------------------------------------------------------


def test_only_missing_cells_run(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, BASE))
    told: list[CellProgress] = []
    first = run_experiment(experiment, tmp_path / "runs", toy, workers=1, progress=told.append)
    assert (first.total, first.found, first.ran) == (4, 0, 4)
    assert told[0].seconds_left is None
    assert told[-1].seconds_left is not None
    assert max(progress.done for progress in told) == 3
    folder = tmp_path / "runs" / "toy"
    before = (folder / CELLS).read_bytes()
    again = run_experiment(experiment, tmp_path / "runs", toy)
    assert (again.found, again.ran) == (4, 0)
    assert (folder / CELLS).read_bytes() == before

    more = read_experiment(written(tmp_path, BASE.replace("seeds = [0, 1]", "seeds = [0, 1, 2]")))
    third = run_experiment(more, tmp_path / "runs", toy)
    assert (third.total, third.found, third.ran) == (6, 4, 2)
    assert (folder / CELLS).read_bytes().startswith(before)


def test_a_record_says_what_ran_where(tmp_path: Path) -> None:
    run_experiment(read_experiment(written(tmp_path, BASE)), tmp_path / "runs", toy, workers=1)
    record = lines(tmp_path / "runs" / "toy")[1]
    assert record["experiment"] == "toy"
    assert record["method"] == "DeepAFL"
    assert record["algorithm"] == "deepafl"
    assert record["dataset"]["rows"] == 240
    assert record["dataset"]["key"] == "toy"
    assert set(record["versions"]) == {"fedsolve", "numpy", "scipy", "python"}
    assert record["versions"]["numpy"] == np.__version__
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["cpu"]
    assert record["time"].endswith("+00:00")
    run = load_run(tmp_path / "runs" / "toy")
    [table] = run.dealt(run.cells[0]["dataset"]["name"])
    owners = fs.partition.dirichlet(ROWS.y_train, 7, 0.5, seed=0)
    np.testing.assert_array_equal(table["class_counts"], fs.partition.class_counts(ROWS.y_train, owners, 7))


def test_labels_follow_the_file_and_old_cells_stay_out(tmp_path: Path) -> None:
    run_experiment(read_experiment(written(tmp_path, BASE)), tmp_path / "runs", toy)
    changed = BASE.replace('"DeepAFL"', '"deep"').replace("seeds = [0, 1]", "seeds = [1]")
    summary = run_experiment(read_experiment(written(tmp_path, changed)), tmp_path / "runs", toy)
    assert summary.ran == 0
    run = load_run(tmp_path / "runs" / "toy")
    assert [(cell["method"], cell["seed"]) for cell in run.cells] == [("AFL", 1), ("deep", 1)]
    assert run.missing == 0
    assert len(lines(tmp_path / "runs" / "toy")) == 4


def test_other_rows_are_other_cells_and_going_back_runs_nothing(tmp_path: Path) -> None:
    other = ExperimentRows(ROWS.x_train[:200], ROWS.y_train[:200], ROWS.x_test, ROWS.y_test, "fewer rows")
    experiment = read_experiment(written(tmp_path, BASE))
    run_experiment(experiment, tmp_path, toy)
    first = [cell["accuracy"] for cell in load_run(tmp_path / "toy").cells]
    assert run_experiment(experiment, tmp_path, lambda *_: other).ran == 4
    assert [cell["dataset"]["rows"] for cell in load_run(tmp_path / "toy").cells] == [200] * 4
    back = run_experiment(experiment, tmp_path, toy)
    assert (back.found, back.ran) == (4, 0)
    run = load_run(tmp_path / "toy")
    assert [cell["accuracy"] for cell in run.cells] == first
    assert run.missing == 0


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_truncated_line_is_set_aside_and_its_cell_runs_again(tmp_path: Path, cut: int) -> None:
    experiment = read_experiment(written(tmp_path, BASE))
    run_experiment(experiment, tmp_path, toy)
    folder = tmp_path / "toy"
    whole = (folder / CELLS).read_bytes()
    (folder / CELLS).write_bytes(whole[:-cut])
    assert load_run(folder).missing == 1, "readers ignore it too"
    summary = run_experiment(experiment, tmp_path, toy)
    assert (summary.found, summary.ran, summary.damaged) == (3, 1, 1)
    kept = whole.splitlines(keepends=True)
    assert (folder / CELLS).read_bytes().startswith(b"".join(kept[:3]))
    assert (folder / DAMAGED).read_bytes() == kept[3][:-cut] + b"\n"
    assert [record["key"] for record in lines(folder)] == [json.loads(line)["key"] for line in kept]


def test_a_damaged_line_in_the_middle_costs_only_its_cell(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, BASE))
    run_experiment(experiment, tmp_path, toy)
    folder = tmp_path / "toy"
    kept = (folder / CELLS).read_bytes().splitlines(keepends=True)
    kept[1] = b'{"key": "nonsense"}\n'
    (folder / CELLS).write_bytes(b"".join(kept))
    summary = run_experiment(experiment, tmp_path, toy)
    assert (summary.found, summary.ran, summary.damaged) == (3, 1, 1)
    assert load_run(folder).missing == 0


def test_a_failing_cell_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = read_experiment(written(tmp_path, BASE))
    real = runner.train_cell

    def failing(cell: Cell, *rest: Any) -> dict[str, Any]:
        if cell.seed == 1:
            raise KeyboardInterrupt
        return real(cell, *rest)

    monkeypatch.setattr(runner, "train_cell", failing)
    summary = runner.Summary(tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path, toy, summary=summary)
    assert (summary.total, summary.ran) == (4, 2)
    monkeypatch.undo()
    assert run_experiment(experiment, tmp_path, toy).found == 2


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, BASE))

    def nested(spec: DatasetSpec, seed: int, tick: Tick) -> ExperimentRows:
        run_experiment(experiment, tmp_path, toy)
        raise AssertionError("the second run must be refused")

    with pytest.raises(ModelFileError, match="is being run by another process"):
        run_experiment(experiment, tmp_path, nested)
    assert run_experiment(experiment, tmp_path, toy).ran == 4


def test_datasets_and_backbones_can_be_chosen(tmp_path: Path) -> None:
    text = BASE.replace('[dataset]\naddress = "digits"', "")
    for name in ("a", "b"):
        text += f'\n[[dataset]]\nname = "{name}"\naddress = "digits"\nbackbone = "pixels:4"\n'
        text += f"limit_train = {100 if name == 'a' else 101}\n"
    experiment = read_experiment(written(tmp_path, text))
    assert len(experiment.only(["b"]).cells()) == 4
    with pytest.raises(DataError, match="no dataset 'c'; it has a, b"):
        experiment.only(["c"])
    source = StoredRows(store=tmp_path / "store")
    run_experiment(experiment.only(["b"]), tmp_path, source, backbone="pixels:2", workers=1)
    run = load_run(tmp_path / "toy")
    assert run.missing == 4
    assert {(c["dataset"]["name"], c["dataset"]["features"], c["dataset"]["rows"]) for c in run.cells} == {
        ("b", 4, 101)
    }
    # The list counts what was run through the other backbone.
    for words in ([tmp_path / "toy.toml"], []):
        (listed,) = document("experiment", "list", *words, "--runs", tmp_path)["experiments"]
        assert (listed["cells"], listed["finished"]) == (8, 4)
    run_experiment(experiment, tmp_path, source, workers=1)
    assert {c["dataset"]["features"] for c in load_run(tmp_path / "toy").cells} == {16}


# -- processes -------------------------------------------------------------------------------------

LONG = """
title = "long"
seeds = SEEDS
[dataset]
address = "digits"
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 10
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 2, width = 32}
[[method]]
name = "AFL"
method = "afl"
parameters = {ridge = 0.1}
""".replace("SEEDS", str(list(range(100))))

COMMAND = """
import sys
from fedsolve.cli.main import main
main(sys.argv[1:])
"""


def command(*words: str | Path, **settings: Any) -> subprocess.Popen[str]:
    source = Path(fs.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "experiment", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(source), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError("the run never got going")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_without_loss_or_duplicate(tmp_path: Path, stop: signal.Signals) -> None:
    file = written(tmp_path, LONG, "long.toml")
    cells = tmp_path / "runs" / "long" / CELLS
    process = command("run", file, "--runs", tmp_path / "runs", "--workers", "1")
    wait_for_lines(cells, 5, process)
    process.send_signal(stop)
    _, told = process.communicate(timeout=60)
    if stop is signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted" in told
        assert "of 200 cells" in told
        assert "Run the same command to continue" in told
    else:
        assert process.returncode == -signal.SIGKILL
    before = cells.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 5 <= whole.count(b"\n") < 200

    process = command("run", file, "--runs", tmp_path / "runs", "--workers", "1", "--json")
    out, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    (summary,) = json.loads(out)["runs"]
    assert summary["found"] == whole.count(b"\n")
    assert summary["found"] + summary["ran"] == 200
    after = cells.read_bytes()
    assert after.startswith(whole)
    keys = [record["key"] for record in lines(cells.parent)]
    assert len(keys) == len(set(keys)) == 200
    planned = read_experiment(file).cells()
    rows = StoredRows()(planned[0].dataset, 0, lambda remark: None)
    assert set(keys) == {cell.key(rows.key) for cell in planned}
    # A cell is the same whether it was computed before the stop, after it, or here.
    by_key = {record["key"]: record for record in lines(cells.parent)}
    for cell in (planned[0], planned[-2]):
        fresh = train_cell(cell, rows, workers=1).values
        assert by_key[cell.key(rows.key)]["accuracy_per_layer"] == fresh["accuracy_per_layer"]


@pytest.mark.slow
def test_the_command_end_to_end(tmp_path: Path) -> None:
    file = written(tmp_path, BASE + '[table]\nbaseline = "AFL"\n')
    runs = tmp_path / "runs"

    def ran(*words: str | Path) -> str:
        process = command(*words)
        out, problem = process.communicate(timeout=120)
        assert process.returncode == 0, problem
        return out

    listed = json.loads(ran("list", file, "--runs", runs, "--json"))["experiments"]
    assert [(entry["experiment"], entry["cells"], entry["finished"]) for entry in listed] == [("toy", 4, 0)]
    assert "fedsolve experiment table" in ran("run", file, "--runs", runs)
    listed = json.loads(ran("list", "--runs", runs, "--json"))["experiments"]
    assert [(entry["experiment"], entry["cells"], entry["finished"]) for entry in listed] == [("toy", 4, 4)]
    page = ran("table", runs / "toy")
    assert page.startswith("### toy\n")
    assert "| DeepAFL (T = 3) |" in page
    afl = fs.AFL(ridge=0.1)
    digits = StoredRows()(DatasetSpec("digits", "digits"), 0, lambda remark: None)
    assert digits.x_test is not None
    pooled = fs.LocalFederation.from_arrays(
        digits.x_train, digits.y_train, np.zeros(len(digits.y_train), int)
    )
    accuracy = 100 * afl.fit(pooled).score(digits.x_test, digits.y_test)
    assert f"| AFL | {accuracy:.2f} ± 0.00 |" in page
    ran("table", runs / "toy", "--format", "latex", "--out", tmp_path / "t.tex")
    assert r"\begin{tabular}" in (tmp_path / "t.tex").read_text()

    process = command("run", written(tmp_path, BASE + "[grids]\nx = [1]\n", "bad.toml"), "--json")
    out, problem = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "unknown key 'grids'" in json.loads(out)["error"]["message"]
    assert "bad.toml" in problem
