"""Gradient methods in experiments: rounds, drift, representation and feedback alignment, told and drawn."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import experiments
from fedsolve.errors import DataError
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import Cell, DatasetSpec
from fedsolve.experiments.findings import findings
from fedsolve.experiments.observations import (
    chosen_stages,
    observations,
    pairs,
    scored,
    with_relative_seconds,
)
from fedsolve.experiments.outcomes import enter_rounds
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_figures import plots
from fedsolve.experiments.run_folder import load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import ExperimentRows, StoredRows
from fedsolve.federation.method import Record
from fedsolve.gradient import FLFA, FedAvg
from fedsolve.gradient.alignment import representation
from fedsolve.gradient.watch import Watch
from tests.command import document

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SMALL = Path(experiments.__file__).parent / "small"
RNG = np.random.default_rng(7)
X = RNG.standard_normal((300, 6))
Y = np.argmax(np.c_[X[:, 0] * X[:, 1], X[:, 2], np.sin(2 * X[:, 3])], axis=1)
ROWS = ExperimentRows(X[:200], Y[:200], X[200:], Y[200:], "toy")

TEXT = """
title = "aligned"
seeds = [0, 1]

[parameters]
network = "mlp:8,8"
rounds = 12
batch = 16
rate = 0.2
track = "drift"

[dataset]
address = "digits"

[[partition]]
kind = "dirichlet"
alpha = 0.5
clients = 4

[[method]]
name = "FedAvg"
method = "fedavg"

[[method]]
name = "FedAvg + FLFA"
method = "fedavg"
parameters = {feedback = "lowest", feedback_first = true}

[[method]]
name = "FLFA, random feedback"
method = "fedavg"
parameters = {feedback = "lowest", feedback_first = true, feedback_matrix = "random"}

[measure]
score = "tail"
representation = true
"""


def written(folder: Path, text: str = TEXT) -> Path:
    path = folder / "aligned.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gradient")
    run_experiment(read_experiment(written(folder)), folder, lambda *_: ROWS, workers=1)
    return load_run(folder / "aligned")


def cell_of(run: Any, method: str, seed: int = 0) -> dict[str, Any]:
    return next(cell for cell in run.cells if (cell["method"], cell["seed"]) == (method, seed))


# -- cells -----------------------------------------------------------------------------------------


def test_flfa_is_a_method_of_its_own(tmp_path: Path) -> None:
    head = TEXT[: TEXT.index("[[method]]")].replace("[0, 1]", "[1]")
    text = head + '[[method]]\nname = "FLFA"\nmethod = "flfa"\n[measure]\nscore = "tail"\n'
    run_experiment(read_experiment(written(tmp_path, text)), tmp_path, lambda *_: ROWS, workers=1)
    cell = cell_of(load_run(tmp_path / "aligned"), "FLFA", 1)
    owners = fs.partition.dirichlet(ROWS.y_train, 4, 0.5, seed=1)
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners, clients=4, workers=1)
    method = FLFA(network="mlp:8,8", rounds=12, batch=16, rate=0.2, track="drift", seed=1)
    model = method.fit(federation, follow=Watch(ROWS.x_test, ROWS.y_test))
    seen = [record.metrics for record in model.history if record.kind == "train"]
    assert cell["accuracy_per_round"] == [metrics["test_accuracy"] for metrics in seen]
    assert any(metrics.get("feedback") for metrics in seen)


@pytest.mark.slow
def test_a_cell_holds_what_the_run_measured(run: Any) -> None:
    owners = fs.partition.dirichlet(ROWS.y_train, 4, 0.5, seed=1)
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners, clients=4, workers=1)
    method = FedAvg(
        network="mlp:8,8",
        rounds=12,
        batch=16,
        rate=0.2,
        track="drift",
        feedback="lowest",
        feedback_first=True,
        seed=1,
    )
    model = method.fit(federation, follow=Watch(ROWS.x_test, ROWS.y_test, representation=True))
    seen = [record.metrics for record in model.history if record.kind == "train"]
    cell = cell_of(run, "FedAvg + FLFA", 1)
    assert cell["accuracy_per_round"] == [metrics["test_accuracy"] for metrics in seen]
    # A tenth of twelve rounds is one.
    assert cell["accuracy"] == cell["accuracy_per_round"][-1] == cell["measures"]["tail_rounds"]
    assert cell["hits"] is None
    drifts = [record.metrics["drift"] for record in model.history if record.kind == "drift"]
    assert cell["drift_per_round"] == drifts
    assert cell["measures"]["drift"] == pytest.approx(np.mean(drifts))
    features, _ = model.representation(ROWS.x_test)
    exact = representation(features, ROWS.y_test)
    for name in ("intra", "inter", "ratio"):
        assert cell["representation_per_round"][name][-1] == pytest.approx(getattr(exact, name), rel=1e-6)
        assert cell["measures"][name] == cell["representation_per_round"][name][-1]
    chosen = [layer for metrics in seen for layer in metrics.get("feedback", ())]
    told = cell["feedback"]
    assert told["layers"] == ["hidden1", "hidden2", "classifier"]
    assert told["rounds"] == [chosen.count(layer) for layer in told["layers"]]
    assert sum(told["rounds"]) == 11, "the first round has nothing to choose by"
    assert told["first"] == list(seen[0]["alignment"].values())
    means = [np.mean([metrics["alignment"][layer] for metrics in seen]) for layer in told["layers"]]
    assert told["mean"] == pytest.approx(means)


def test_only_what_was_asked_for_is_measured(run: Any, tmp_path: Path) -> None:
    assert "feedback" not in cell_of(run, "FedAvg")
    text = TEXT.replace("representation = true", "").replace('track = "drift"', "")
    plain, *_ = read_experiment(written(tmp_path, text)).cells()
    found = train_cell(
        dataclasses.replace(plain, parameters={**plain.parameters, "rounds": 2}), ROWS, 1
    ).values
    assert "representation_per_round" not in found
    assert "drift_per_round" not in found
    assert set(found["measures"]) == {"best_round", "tail_rounds"}


def test_the_question_of_representation_leaves_older_cells_alone(tmp_path: Path) -> None:
    with_it, without = (
        read_experiment(written(tmp_path, text)).cells()[0].key("rows")
        for text in (TEXT, TEXT.replace("representation = true", ""))
    )
    never = read_experiment(written(tmp_path, TEXT.replace("true\n", "false\n"))).cells()[0].key("rows")
    assert without == never != with_it


def test_named_layers_are_counted_and_have_no_alignment(tmp_path: Path) -> None:
    text = TEXT.replace('"lowest", feedback_first = true', '"hidden2,classifier"', 1)
    cell = read_experiment(written(tmp_path, text)).cells()[1]
    found = train_cell(dataclasses.replace(cell, parameters={**cell.parameters, "rounds": 3}), ROWS, 1).values
    assert found["feedback"] == {
        "layers": ["hidden2", "classifier"],
        "rounds": [3, 3],
        "first": [None, None],
        "mean": [None, None],
    }


def test_what_is_no_number_becomes_null() -> None:
    def record(number: int, ratio: float, z: float) -> Record:
        metrics = {
            "loss": 1.0,
            "test_accuracy": 0.5,
            "representation": {"intra": 1.0, "inter": 2.0, "ratio": ratio},
            "alignment": {"a": z},
        }
        return Record(number, "train", number, ("a",), {}, (), 0, 0, 0, 0.0, metrics=metrics)

    outcome: dict[str, Any] = {"measures": {}, "test_rows": 10}
    enter_rounds(outcome, [record(0, float("nan"), 0.5), record(1, float("inf"), float("nan"))], "last")
    assert outcome["representation_per_round"]["ratio"] == [None, None]
    assert "ratio" not in outcome["measures"]
    assert outcome["measures"]["intra"] == 1.0
    assert outcome["feedback"]["first"] == outcome["feedback"]["mean"] == [0.5]
    json.dumps(outcome, allow_nan=False)


def test_records_name_torch(run: Any) -> None:
    cell = cell_of(run, "FedAvg")
    assert set(cell["versions"]) == {"fedsolve", "numpy", "scipy", "torch", "python"}
    assert "gpu" not in cell["machine"]


# -- tables ----------------------------------------------------------------------------------------


def table_of(folder: Path, run: Any, table: str) -> Any:
    (folder / "cells.jsonl").write_text((run.folder / "cells.jsonl").read_text())
    (folder / "experiment.toml").write_text(TEXT + table)
    return load_run(folder)


def test_stages_are_rows_of_shares(run: Any, tmp_path: Path) -> None:
    found = table_of(tmp_path, run, '[table]\nrows = "stage"\ncolumns = "method"\nvalues = "selected"\n')
    (table,) = tables_of(found)
    assert [row.label for row in table.rows] == ["hidden1", "hidden2", "classifier"]
    assert table.columns == ("FedAvg + FLFA", "FLFA, random feedback"), "FedAvg has nothing to choose"
    for column in range(2):
        means = [row.entries[column].mean for row in table.rows]
        assert sum(means) == pytest.approx(100.0)
    expected = np.mean([chosen_stages(cell_of(run, "FedAvg + FLFA", seed))["hidden2"] for seed in (0, 1)])
    assert table.rows[1].entries[0].mean == pytest.approx(100 * expected)


def test_seconds_are_told_as_multiples_of_the_baseline(run: Any, tmp_path: Path) -> None:
    text = '[table]\nrows = "method"\ncolumns = "metric"\nvalues = ["test", "relative_seconds"]\n'
    found = table_of(tmp_path, run, text + 'baseline = "FedAvg"\n')
    related = {
        (one.method, one.seed): one.values["relative_seconds"]
        for one in with_relative_seconds(observations(found.cells), "FedAvg")
    }
    for seed in (0, 1):
        assert related["FedAvg", seed] == 1.0
        seconds = [cell_of(run, name, seed)["seconds"] for name in ("FedAvg + FLFA", "FedAvg")]
        assert related["FedAvg + FLFA", seed] == pytest.approx(seconds[0] / seconds[1])
    (table,) = tables_of(found)
    assert table.columns == ("test accuracy (%)", "seconds, baseline = 1")
    assert "Accuracy of a gradient method: over the last tenth of its rounds." in table.notes


# -- figures and sentences -------------------------------------------------------------------------


def test_pairs_differ_in_feedback_alone(run: Any) -> None:
    found = pairs(scored(run.cells))
    assert [(host[0].method, aligned[0].method) for host, aligned in found] == [
        ("FedAvg", "FedAvg + FLFA"),
        ("FedAvg", "FLFA, random feedback"),
    ]
    # A seed that only one of the two has is left out of both.
    fewer = [item for item in scored(run.cells) if (item.method, item.seed) != ("FedAvg", 1)]
    assert all({item.seed for side in pair for item in side} == {0} for pair in pairs(fewer))


def test_gradient_methods_have_their_figures(run: Any) -> None:
    (found,) = plots(run).values()
    drawn = {plot.name: plot for plot in found}
    for name in (
        "rounds",
        "drift",
        "feedback-gain",
        "drift-reduction",
        "representation",
        "alignment",
        "selected",
    ):
        assert name in drawn
        assert drawn[name].caption.endswith(".")
        assert len(drawn[name].description) > 40
    axes = drawn["drift-reduction"].figure.axes[0]
    line = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))["FedAvg + FLFA"]
    drifts = {
        name: np.mean([cell_of(run, name, seed)["drift_per_round"] for seed in (0, 1)], axis=0)
        for name in ("FedAvg", "FedAvg + FLFA")
    }
    np.testing.assert_allclose(line.get_ydata(), drifts["FedAvg"] - drifts["FedAvg + FLFA"], atol=1e-12)
    assert list(line.get_xdata()) == list(range(1, 13))
    titles = [axes.get_title(loc="left") for axes in drawn["representation"].figure.axes]
    assert titles == ["within classes", "between classes", "between / within"]


def test_feedback_alignment_is_told_without_its_ablations(run: Any) -> None:
    told = " ".join(findings(run)[""]).replace("\u00a0", " ")
    gains = [
        100 * np.mean([cell_of(run, name, seed)["accuracy"] for seed in (0, 1)])
        for name in ("FedAvg", "FedAvg + FLFA")
    ]
    drift = [
        np.mean([cell_of(run, name, seed)["measures"]["drift"] for seed in (0, 1)])
        for name in ("FedAvg", "FedAvg + FLFA")
    ]
    change = f"{gains[1] - gains[0]:+.2f} points and drift by {100 * (drift[1] / drift[0] - 1):+.1f} %"
    assert f"Feedback alignment changes accuracy by {change}." in told


def test_a_best_round_is_not_tested_for_significance(tmp_path: Path) -> None:
    text = TEXT.replace('"tail"', '"best"').replace("representation = true", "")
    path = written(tmp_path, text.replace("rounds = 12", "rounds = 3"))
    run_experiment(read_experiment(path), tmp_path, lambda *_: ROWS, workers=1)
    best = load_run(tmp_path / "aligned")
    for cell in best.cells:
        assert cell["accuracy"] == max(cell["accuracy_per_round"])
        assert cell["hits"] is None
    told = " ".join(findings(best)[""])
    assert "is best with" in told
    assert not re.search(r"p\W=|p\W<|chance", told)


# -- shipped files ---------------------------------------------------------------------------------


def gradient_cells(path: Path) -> list[Cell]:
    """One cell of each method and point of its grid, cut to two rounds; none that clients are scored by."""
    found: dict[str, Cell] = {}
    for cell in read_experiment(path).cells():
        if "network" in cell.parameters and not cell.measure.local:
            found.setdefault(f"{cell.method.name}{sorted(cell.grid.items())}", cell)
    return [
        dataclasses.replace(cell, parameters={**cell.parameters, "rounds": min(2, cell.parameters["rounds"])})
        for cell in found.values()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in SMALL.glob("*.toml") if gradient_cells(path)))
def test_small_files_with_gradient_methods_run(name: str) -> None:
    digits = StoredRows()(DatasetSpec("digits", "digits"), 0, lambda remark: None)
    for cell in gradient_cells(SMALL / f"{name}.toml"):
        found = train_cell(cell, digits, workers=1).values
        assert 0.0 < found["accuracy"] < 1.0, cell.method.name
        assert len(found["accuracy_per_round"]) == cell.parameters["rounds"]
        if cell.parameters["feedback"] is not None:
            layers = cell.parameters["feedback_layers"]
            assert sum(found["feedback"]["rounds"]) == layers, "the second round alone acts on chosen layers"


# -- images ----------------------------------------------------------------------------------------

IMAGES = """
title = "images"
seeds = [0]

[parameters]
network = "{network}"
shape = "1,8,8"
rounds = 2
batch = 32
rate = 0.1

[dataset]
address = "digits"
{backbone}

[[partition]]
kind = "iid"
clients = 3

[[method]]
name = "treated"
method = "fedavg"
parameters = {{crop = 1, flip = 0.5, pixel_mean = "0.3", pixel_deviation = "0.38"}}

[[method]]
name = "plain"
method = "fedavg"
"""
SCALED = ("--crop", 1, "--flip", 0.5, "--pixel-mean", 0.3, "--pixel-deviation", 0.38)


def on_images(folder: Path, network: str, backbone: str = "") -> dict[str, Any]:
    """The cells by method, of rows in a store of their own."""
    path = written(folder, IMAGES.format(network=network, backbone=backbone))
    source = StoredRows(store=folder / "store")
    run_experiment(read_experiment(path), folder / "runs", source, workers=1)
    return {cell["method"]: cell for cell in load_run(folder / "runs" / "aligned").cells}


@pytest.mark.slow
@pytest.mark.parametrize("network", ["cnn", "mlp:8"])
@pytest.mark.parametrize("backbone", ["", 'backbone = "pixels"'])
def test_images_are_treated_as_on_the_command_line(tmp_path: Path, network: str, backbone: str) -> None:
    cells = on_images(tmp_path, network, backbone)
    words = ("--method", "fedavg", "--network", network, "--shape", "1,8,8", "--rounds", 2, "--batch", 32)
    words += ("--rate", 0.1, "--clients", 3, "--store", tmp_path / "store")
    words += ("--backbone", "pixels") if backbone else ()
    told = document("train", "digits", *words, *SCALED)
    treated = cells["treated"]
    assert treated["loss_per_round"] == [record["metrics"]["loss"] for record in told["history"]]
    assert treated["accuracy"] == told["accuracy"]["test"]
    assert treated["dataset"]["pixels"].endswith("order=channels&normalise=half")
    # Methods that leave images as they are have the rows that they always had.
    assert "pixels" not in cells["plain"]["dataset"]
    assert cells["plain"]["dataset"]["key"] != treated["dataset"]["key"]
    if not backbone:
        digits = StoredRows()(DatasetSpec("digits", "digits"), 0, lambda remark: None)
        assert cells["plain"]["dataset"]["key"] == digits.key


def test_treated_pixels_of_another_form_are_refused_in_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"another scale than \[-1, 1\].*order=channels&normalise=half"):
        on_images(tmp_path, "mlp:8", 'backbone = "pixels?normalise=none"')
