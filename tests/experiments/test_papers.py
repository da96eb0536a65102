"""Tables of runs: statistics, layout, rendering, and the numbers printed in the papers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsolve.errors import DataError
from fedsolve.experiments import runner
from fedsolve.experiments.checks import Check, checks_of
from fedsolve.experiments.config import Cell
from fedsolve.experiments.metrics import METRICS, axis_label
from fedsolve.experiments.observations import BACKBONES, mean_and_error, observations, paired
from fedsolve.experiments.outcomes import Outcome, packed
from fedsolve.experiments.papers import papers, printed, same
from fedsolve.experiments.reading import read_experiment, shipped
from fedsolve.experiments.result_tables import ResultTable, tables_of
from fedsolve.experiments.run_folder import RunFolder, load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.gradient.networks.stages import MOBILENET_STAGES
from tests.command import fedsolve

HEAD = """
title = "A & B: 50 %"
seeds = [0, 1, 2]
[dataset]
name = "CIFAR-100"
address = "cifar100"
[[partition]]
kind = "dirichlet"
alpha = 0.1
clients = 100
[[partition]]
kind = "shards"
per_client = 10
clients = 100
[[method]]
name = "AFL"
method = "afl"
"""
DEEP = """
[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 20}
depths = [5, 20]
"""


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """A run whose cells came out as a function says: outcome(cell) gives some of a cell's fields."""

    def make(text: str, outcome: Callable[[Cell], Mapping[str, Any]]) -> RunFolder:
        def pretend(cell: Cell, *_: Any) -> Outcome:
            dealt = cell.partition.as_dict() | {"heterogeneity": 0.5, "empty_clients": 0}
            return Outcome(partition=dealt, **outcome(cell))

        file = tmp_path / "made.toml"
        file.write_text(text)
        rows = ExperimentRows(np.zeros((4, 2)), np.arange(4) % 2, np.zeros((4, 2)), np.arange(4) % 2, "zeros")
        monkeypatch.setattr(runner, "train_cell", pretend)
        run_experiment(read_experiment(file), tmp_path, lambda *_: rows)
        return load_run(tmp_path / "made")

    return make


def hits_of(correct: int) -> str:
    """The first rows of a thousand are right."""
    return packed(np.arange(1000) < correct)


def scores(cell: Cell) -> dict[str, Any]:
    """AFL is right on 600 of 1000 rows whatever the seed; DeepAFL gets better by layers and seeds."""
    if cell.method.algorithm == "afl":
        return {"accuracy": 0.6, "hits": {"": hits_of(600)}, "test_rows": 1000}
    correct = [600 + 2 * layer + cell.seed for layer in range(cell.parameters["layers"] + 1)]
    return {
        "accuracy": correct[-1] / 1000,
        "accuracy_per_layer": [count / 1000 for count in correct],
        "hits": {str(layer): hits_of(count) for layer, count in enumerate(correct)},
        "test_rows": 1000,
        "seconds_per_layer": [0.01 * layer for layer in range(len(correct))],
    }


def cells_of(table: ResultTable) -> list[list[str]]:
    return table.lines()[0]


# -- statistics ------------------------------------------------------------------------------------


def test_standard_error_is_scipys() -> None:
    values = [80.1, 82.4, 81.0, 79.5]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(80.75)
    assert error == pytest.approx(stats.sem(values))
    # By hand: deviations -0.65, 1.65, 0.25, -1.25; squares sum to 4.77; sqrt(4.77 / 3) / 2.
    assert error == pytest.approx(math.sqrt(4.77 / 3) / 2)
    assert mean_and_error([3.0]) == (3.0, None)


def test_one_pair_is_mcnemars_exact_test() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 300)) < [[0.9], [0.85]]
    gained, lost = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    expected = stats.binomtest(gained, gained + lost).pvalue
    assert paired([first], [second]) == pytest.approx(expected, rel=1e-12)
    assert paired([second], [first]) == pytest.approx(expected, rel=1e-12)
    assert paired([first], [first]) == 1.0


def test_several_seeds_are_every_choice_of_signs() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.random((2, 3, 12)) < [[[0.8]], [[0.4]]]
    differences = first.sum(axis=0) - second.sum(axis=0).astype(int)
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    expected = np.mean(np.abs(signs @ differences) >= abs(differences.sum()))
    assert paired(list(first), list(second)) == pytest.approx(expected, rel=1e-12)


def test_many_differences_are_normal() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.random((2, 40_000)) < 0.5
    limit = paired([first] * 2, [second] * 2)
    assert limit == pytest.approx(paired([first], [second]), abs=0.01)
    assert 0.01 < limit < 1.0


def test_runs_on_the_same_rows_add_no_evidence() -> None:
    first, second = np.arange(200) < 120, np.arange(200) < 110
    alone = paired([first], [second])
    assert paired([first] * 5, [second] * 5) == pytest.approx(alone, rel=1e-12)
    # Unpaired, ten rows of 200 are chance; the same ten rows that only one model reads are not.
    assert alone == pytest.approx(2 * 0.5**10)
    assert stats.chi2_contingency([[120, 80], [110, 90]]).pvalue > 0.3


def test_a_dataset_without_test_rows_has_tables(run_of: Callable[..., RunFolder]) -> None:
    """A staged model then has neither accuracies nor counts, at any depth."""

    def untested(cell: Cell) -> dict[str, Any]:
        if cell.method.algorithm == "afl":
            return {"train_accuracy": 0.7}
        layers = [0.7 + layer / 100 for layer in range(21)]
        return {
            "train_accuracy": layers[-1],
            "train_accuracy_per_layer": layers,
            "seconds_per_layer": [1.0] * 21,
        }

    text = HEAD + DEEP + '[table]\nvalues = ["test", "train"]\nbaseline = "AFL"\n'
    test, train = tables_of(run_of(text, untested))
    assert {text for row in cells_of(test) for text in row[1:]} == {"–"}
    assert [row[0] for row in cells_of(train)] == ["AFL", "DeepAFL (T = 5)", "DeepAFL (T = 20)"]
    assert cells_of(train)[1][1] == "75.00 ± 0.00"


def test_a_backbone_keeps_its_name_whatever_its_options(run_of: Callable[..., RunFolder]) -> None:
    address = "torchvision:vgg11?shorter_side=224&normalise=half"
    text = HEAD.replace('address = "cifar100"', f'address = "cifar100"\nbackbone = "{address}"')
    text = text.replace("seeds", 'paper = {key = "afl", table = "4"}\nseeds')
    run = run_of(text, scores)
    assert {one.coordinates["backbone"] for one in observations(run.cells)} == {"VGG11"}
    (table,) = tables_of(run)
    assert cells_of(table)[1] == ["paper, Table 4", "60.43", "60.43"]


def test_means_errors_and_marks(run_of: Callable[..., RunFolder]) -> None:
    (table,) = tables_of(run_of(HEAD + DEEP + '[table]\nbaseline = "AFL"\n', scores))
    assert table.columns == ("α = 0.1", "s = 10")
    assert [row.label for row in table.rows] == ["AFL", "DeepAFL (T = 5)", "DeepAFL (T = 20)"]
    afl, shallow, deep = (row.entries[0] for row in table.rows)
    assert afl is not None
    assert shallow is not None
    assert deep is not None
    assert (afl.mean, afl.error, afl.p) == (pytest.approx(60.0), 0.0, None)
    # 640, 641 and 642 of 1000 are right.
    assert deep.mean == pytest.approx(64.1)
    assert deep.error == pytest.approx(stats.sem([64.0, 64.1, 64.2]))
    # What AFL reads, both depths read too, seed by seed, and more.
    for cell, least in ((shallow, 610), (deep, 640)):
        better = [np.arange(1000) < least + seed for seed in range(3)]
        assert cell.p == pytest.approx(paired(better, [np.arange(1000) < 600] * 3), rel=1e-12)
        assert cell.marked


def test_a_staged_baseline_is_met_at_its_own_depth(run_of: Callable[..., RunFolder]) -> None:
    text = (
        HEAD + DEEP + DEEP.replace('"DeepAFL"', '"other"').replace("layers = 20", "layers = 20, gain = 2.0")
    )
    (table,) = tables_of(run_of(text + '[table]\nrows = "method"\nbaseline = "DeepAFL"\n', scores))
    found = {row.label: row.entries[0] for row in table.rows}
    other = found["other (T = 5)"]
    assert other is not None
    assert other.p == pytest.approx(1.0)
    afl = found["AFL"]
    assert afl is not None
    assert afl.p is None, "AFL has no depth to be compared at"


def test_whatever_varies_finds_a_place(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD + DEEP + "[grid]\nresidual_ridge = [0.1, 1.0]\n[noise]\nrates = [0.0, 0.5]\n"
    (table,) = tables_of(run_of(text, scores))
    # Columns take the partition; grid and noise, which no axis shows, become rows.
    assert table.columns == ("α = 0.1", "s = 10")
    labels = [row.label for row in table.rows]
    assert len(labels) == len(set(labels)) == 2 + 2 * 2 * 2
    assert "DeepAFL (T = 5), γ = 0.1, τ = 50 %" in labels
    assert all(entry is not None and entry.seeds == 3 for row in table.rows for entry in row.entries)


def test_columns_are_sorted_axis_by_axis(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD[: HEAD.index("[[partition]]")] + '[[partition]]\nkind = "iid"\nclients = 9\n' + DEEP
    text += "[grid]\nparticipation = [1.0, 0.5]\nconsistent = [true, false]\n"
    text += '[table]\nrows = "depth"\ncolumns = ["consistent", "participation"]\n'
    (table,) = tables_of(run_of(text, scores))
    assert table.columns == (
        "consistent, η = 100 %",
        "consistent, η = 50 %",
        "inconsistent, η = 100 %",
        "inconsistent, η = 50 %",
    )


def test_metrics_are_columns_or_tables(run_of: Callable[..., RunFolder]) -> None:
    def outcome(cell: Cell) -> dict[str, Any]:
        return {"accuracy": 0.5, "train_accuracy": 0.75, "bytes_up": 2_500_000, "seconds": 1.5 + cell.seed}

    text = HEAD + '[table]\nrows = "partition"\ncolumns = "metric"\n'
    text += 'values = ["train", "test", "seconds", "megabytes_up", "deviation"]\n'
    (table,) = tables_of(run_of(text, outcome))
    assert cells_of(table)[0] == ["α = 0.1", "75.00 ± 0.00", "50.00 ± 0.00", "2.50 ± 0.58", "2.50", "–"]
    assert any("not measured" in note for note in table.notes)
    several = run_of(
        HEAD + '[table]\nrows = "method"\ncolumns = "partition"\nvalues = ["train", "test"]\n', outcome
    )
    assert [each.title for each in tables_of(several)] == [
        "A & B: 50 %, training accuracy (%)",
        "A & B: 50 %, test accuracy (%)",
    ]


def test_an_unfinished_run_says_so(run_of: Callable[..., RunFolder], tmp_path: Path) -> None:
    run_of(HEAD, scores)
    cells = tmp_path / "made" / "cells.jsonl"
    cells.write_text("".join(cells.read_text().splitlines(keepends=True)[:4]))
    (table,) = tables_of(load_run(tmp_path / "made"))
    assert "2 cells of this experiment have not been run yet." in table.notes
    assert "Mean over 2 seeds; ± is the standard error." in table.notes
    cells.write_text("")
    assert tables_of(load_run(tmp_path / "made")) == []


# -- beside the papers -----------------------------------------------------------------------------


def test_the_papers_numbers_stand_below_ours(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'paper = {key = "deepafl", table = "1"}\nseeds') + DEEP
    (table,) = tables_of(run_of(text + '[table]\nrows = "method"\ncolumns = "partition"\n', scores))
    assert cells_of(table)[1] == ["paper, Table 1", "58.56 ± 0.00", "58.56 ± 0.00"]
    assert cells_of(table)[3] == ["paper, Table 1", "64.72 ± 0.07", "64.72 ± 0.07"]
    assert [[name for name, _ in row.printed()] for row in table.rows] == [["1"]] * 3


def test_a_papers_numbers_of_another_dataset_stand_nowhere(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'paper = {key = "deepafl", table = "1"}\nseeds')
    (table,) = tables_of(run_of(text, scores))
    assert [[name for name, _ in row.printed()] for row in table.rows] == [["1"]]
    other = text.replace('name = "CIFAR-100"', 'name = "digits"')
    (table,) = tables_of(run_of(other, scores))
    assert [[*row.printed()] for row in table.rows] == [[]]
    assert not any("paper" in note for note in table.notes)


def test_no_small_experiment_shows_a_papers_number() -> None:
    for path in shipped("small"):
        experiment = read_experiment(path)
        if experiment.paper is not None:
            numbers = printed(experiment.paper.key, experiment.paper.tables)
            named = {value.coordinates.get("dataset") for value in numbers} - {None}
            assert not named & {dataset.name for dataset in experiment.datasets}, path.name


def test_every_table_of_the_papers_is_a_full_grid() -> None:
    assert set(papers()) == {"deepafl", "afl", "apfl", "flfa"}
    deepafl, afl = papers()["deepafl"]["tables"], papers()["afl"]["tables"]
    wanted = [str(n) for n in range(1, 32)] + ["figure 7"]
    assert sorted(deepafl) == sorted(wanted)
    assert sorted(afl) == ["1", "2", "3", "4", "A.1", "A.2", "A.3", "figure 2", "figure 3"]
    assert sorted(papers()["apfl"]["tables"]) == ["1", "2"]
    assert sorted(papers()["flfa"]["tables"], key=int) == [str(number_) for number_ in range(1, 14)]
    for key, paper in papers().items():
        for number_, table in paper["tables"].items():
            rows, columns = table["axes"]
            assert all(len(column) == len(columns) for column in table["columns"])
            for place, values in table["rows"]:
                assert len(place) == len(rows), (key, number_)
                assert len(values) == len(table["columns"]), (key, number_)
            for value in printed(key, [number_]):
                metric = value.coordinates["metric"]
                assert metric in METRICS
                if metric in ("test", "train"):
                    assert 0 < value.mean < 100
                assert value.spread is None or 0 <= value.spread < 3


@pytest.mark.parametrize(
    ("key", "table", "about", "mean", "spread"),
    [
        ("deepafl", "1", {"method": "FedDyn", "dataset": "CIFAR-100", "partition": "s = 10"}, 61.09, 0.09),
        ("deepafl", "1", {"method": "DeepAFL", "depth": 20, "dataset": "Tiny-ImageNet"}, 62.35, 0.01),
        ("deepafl", "2", {"method": "AFL", "partition": "α = 0.05"}, 80.75, 0.0),
        ("deepafl", "3", {"dataset": "CIFAR-10", "depth": 5, "ridge": 10.0}, 85.20, 0.05),
        ("deepafl", "4", {"dataset": "Tiny-ImageNet", "depth": 20, "residual_ridge": 10}, 60.98, 0.02),
        ("deepafl", "5", {"dataset": "CIFAR-10", "depth": 20, "activation": "leaky_relu"}, 83.85, 1.48),
        ("deepafl", "6", {"dataset": "CIFAR-10", "depth": 20, "width": 8192}, 83.12, 0.39),
        ("deepafl", "7", {"dataset": "CIFAR-100", "depth": 20, "hidden_width": 2048}, 68.20, 0.03),
        ("deepafl", "8", {"dataset": "CIFAR-100", "depth": 10, "width": 4096}, 69.10, 0.03),
        ("deepafl", "10", {"depth": 50, "metric": "train"}, 92.93, 0.06),
        ("deepafl", "11", {"depth": 50, "metric": "seconds"}, 279.68, 0.14),
        ("deepafl", "13", {"depth": 35, "method": "Ablation (1)"}, 82.94, 0.12),
        ("deepafl", "16", {"depth": 50, "method": "Ablation (2)"}, 63.86, 0.01),
        ("deepafl", "23", {"depth": 5, "method": "Strategy (4)"}, 53.26, 0.12),
        ("deepafl", "26", {"depth": 20, "metric": "test"}, 80.13, None),
        ("deepafl", "27", {"method": "AFL", "metric": "test"}, 86.35, None),
        ("deepafl", "27", {"depth": 30, "metric": "seconds"}, 156.21, None),
        ("afl", "figure 2", {"method": "FedAvg", "clients": 1000}, 41.01, None),
        ("deepafl", "28", {"depth": 10, "participation": 0.6, "consistent": False}, 64.09, None),
        ("deepafl", "29", {"depth": 20, "noise": 0.5}, 60.45, None),
        ("deepafl", "30", {"depth": 25, "method": "DeepAFL from Φ0", "metric": "test"}, 68.23, None),
        ("deepafl", "30", {"method": "AFL", "metric": "train"}, 61.55, None),
        ("deepafl", "30", {"method": "AFL", "metric": "test"}, 58.56, None),
        ("deepafl", "31", {"depth": 15, "metric": "train_ifs"}, 3.15, None),
        ("deepafl", "figure 7", {"dataset": "CIFAR-100", "method": "FedAvg", "clients": 1000}, 41.01, None),
        ("afl", "1", {"dataset": "CIFAR-10", "partition": "s = 4", "method": "FedNTD"}, 70.24, 0.11),
        ("afl", "2", {"method": "FedAvg", "partition": "IID"}, 57.89, None),
        ("afl", "3", {"clients": 1000, "remove": False, "regulariser": 100.0}, 49.62, None),
        ("afl", "4", {"backbone": "ViT-B-16", "dataset": "Tiny-ImageNet"}, 82.02, None),
        ("afl", "A.1", {"remove": False, "clients": 200}, 3.67e12, None),
        ("afl", "A.2", {"method": "Local Max"}, 16.36, None),
        ("afl", "A.3", {"method": "FedFisher"}, 19.31, None),
        ("deepafl", "24", {"method": "FedLPA", "dataset": "CIFAR-10", "partition": "α = 0.05"}, 42.56, None),
        ("deepafl", "25", {"method": "FedDyn", "network": "mlp:1024x4"}, 56.26, None),
        (
            "flfa",
            "1",
            {"method": "FedAvgM + FLFA", "dataset": "FMNIST", "metric": "test"},
            85.03,
            None,
        ),
        (
            "flfa",
            "1",
            {"method": "FedSOL", "dataset": "CIFAR-10", "metric": "relative_seconds"},
            3.34,
            None,
        ),
        ("flfa", "2", {"method": "FedAvg + FLFA", "dataset": "CIFAR-10.1 v6"}, 55.16, None),
        ("flfa", "3", {"method": "FedProx + FLFA", "dataset": "ImageNet-100"}, 44.62, None),
        ("flfa", "4", {"method": "FLFA, no scaling"}, 65.21, None),
        ("flfa", "5", {"method": "MOON + FLFA", "dataset": "CIFAR-100"}, 45.12, None),
        ("flfa", "6", {"method": "FedAvg", "dataset": "BloodMNIST"}, 48.81, None),
        ("flfa", "7", {"method": "FedLC + FLFA", "dataset": "OrganSMNIST"}, 57.95, None),
        ("flfa", "8", {"method": "FedAvgM", "dataset": "FMNIST"}, 68.40, None),
        ("flfa", "9", {"method": "FedRS + FLFA", "dataset": "PathMNIST"}, 75.51, None),
        (
            "flfa",
            "10",
            {"method": "MOON + FLFA", "dataset": "OrganCMNIST", "feedback_layers": 3},
            75.71,
            None,
        ),
        (
            "flfa",
            "11",
            {"method": "FedLC + FLFA", "dataset": "CIFAR-10", "feedback_layers": 2},
            70.50,
            None,
        ),
        ("flfa", "12", {"method": "FedDyn", "dataset": "CIFAR-10"}, 74.81, None),
        ("flfa", "13", {"method": "highest", "stage": "stage 4"}, 20.92, None),
    ],
)
def test_numbers_as_printed(
    key: str, table: str, about: dict[str, Any], mean: float, spread: float | None
) -> None:
    found = [
        value
        for value in printed(key, [table])
        if all(same(value.coordinates[name], wanted) for name, wanted in about.items())
    ]
    assert {(value.mean, value.spread) for value in found} == {(mean, spread)}


def test_the_papers_agree_with_themselves() -> None:
    """Numbers that are printed twice are the same twice; what the text says follows from the tables."""
    one = {(v.coordinates["partition"], v.mean, v.spread) for v in printed("deepafl", ["2"])}
    two = {
        (v.coordinates["partition"], v.mean, v.spread)
        for v in printed("afl", ["1"])
        if v.coordinates["dataset"] == "CIFAR-10"
    }
    assert two <= one
    ablation, depth = (
        {v.coordinates["depth"]: v.mean for v in printed("deepafl", [table]) if about(v.coordinates)}
        for table, about in (
            ("15", lambda c: c["method"] == "DeepAFL"),
            ("10", lambda c: c["method"] == "DeepAFL" and c["metric"] == "test"),
        )
    )
    assert ablation == depth
    clients = {
        (v.coordinates["dataset"], v.coordinates["method"], v.coordinates["clients"]): v.mean
        for v in printed("deepafl", ["figure 7"])
    }
    gains = {
        (data, count): round(clients[data, "DeepAFL", count] - clients[data, "FedAvg", count], 2)
        for data in ("CIFAR-100", "Tiny-ImageNet")
        for count in (100, 1000)
    }
    assert gains == {
        ("CIFAR-100", 100): 10.41,
        ("CIFAR-100", 1000): 25.97,
        ("Tiny-ImageNet", 100): 18.65,
        ("Tiny-ImageNet", 1000): 32.8,
    }


@pytest.mark.slow
def test_shipped_files_meet_their_papers() -> None:
    """Every number of a table that a shipped file refers to, and that we run, is found by its coordinates."""
    folder = Path(__file__).parents[2] / "experiments"
    for path in sorted(path for key in ("deepafl", "afl", "flfa") for path in (folder / key).glob("*.toml")):
        experiment = read_experiment(path)
        if experiment.paper is None:
            assert path.stem.startswith("figure"), f"{path.name}: only figures are without numbers"
            continue
        numbers = printed(experiment.paper.key, experiment.paper.tables)
        met = set()
        for cell in experiment.cells():
            if cell.seed != experiment.seeds[0]:
                continue
            coordinates = dict(cell.parameters) | {
                "dataset": cell.dataset.name,
                "backbone": BACKBONES.get((cell.dataset.backbone or "").partition("?")[0]),
                "partition": cell.partition.setting,
                "clients": cell.partition.clients,
                "method": cell.method.name,
                "algorithm": cell.method.algorithm,
                "noise": cell.noise,
            }
            stages = MOBILENET_STAGES if experiment.table.by_stage else (None,)
            for depth, stage in itertools.product(cell.method.depths or (None,), stages):
                for metric in experiment.table.values:
                    place = coordinates | {"depth": depth, "stage": stage, "metric": metric}
                    met |= {index for index, value in enumerate(numbers) if value.about(place)}
        ours = {method.name for method in experiment.methods}
        missed = [
            value.coordinates
            for index, value in enumerate(numbers)
            if index not in met
            and "dataset" in value.coordinates
            and value.coordinates.get("method", next(iter(ours))) in ours
        ]
        assert not missed, f"{path.name}: {missed[:3]}"


NUMBERED = {
    # paper: tables, figures
    "deepafl": ([str(n) for n in range(1, 32)], range(1, 17)),
    "afl": (["1", "2", "3", "4", "A.1", "A.2", "A.3"], range(1, 4)),
    "apfl": ([str(n) for n in range(1, 11)], range(1, 7)),
    "flfa": ([str(n) for n in range(1, 14)], range(1, 5)),
}


def test_every_table_and_figure_of_the_papers_has_a_file() -> None:
    """Of drawings alone there is none; every file is of a table or figure, and refers to it."""
    folder = Path(__file__).parents[2] / "experiments"
    listed = tomllib.loads((folder / "contents.toml").read_text())
    assert listed.keys() == NUMBERED.keys()
    for key, (tables, figures) in NUMBERED.items():
        wanted = [f"Table {number}" for number in tables] + [f"Figure {number}" for number in figures]
        assert list(listed[key]) == wanted
        drawn = {item for item, file in listed[key].items() if file == "drawing"}
        assert all(item.startswith("Figure") for item in drawn)
        files: dict[str, set[str]] = {}
        for item, file in listed[key].items():
            if item not in drawn:
                files.setdefault(file, set()).add(item)
        assert set(files) == {f"{key}/{path.name}" for path in (folder / key).glob("*.toml")}
        for file, items in files.items():
            experiment = read_experiment(folder / file)
            name = "-".join(file.removesuffix(".toml").split("/"))
            assert experiment.name == name, "runs are found by the name of the file"
            if experiment.paper is not None and "table" in file:
                assert {f"Table {number}" for number in experiment.paper.tables} <= items, file


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(DataError, match="has no table '33'"):
        printed("deepafl", ["33"])


# -- rendering -------------------------------------------------------------------------------------


def test_markdown(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'paper = {key = "afl", table = "1"}\nseeds')
    (table,) = tables_of(run_of(text, scores))
    assert table.to_markdown() == (
        "### A & B: 50 %\n"
        "\n"
        "| method | α = 0.1 | s = 10 |\n"
        "| :--- | ---: | ---: |\n"
        "| AFL | 60.00 ± 0.00 | 60.00 ± 0.00 |\n"
        "| *paper, Table 1* | *58.56 ± 0.00* | *58.56 ± 0.00* |\n"
        "\n"
        "Mean over 3 seeds; ± is the standard error.  \n"
        "paper: He et al., AFL, CVPR 2025, printed numbers; ± there is the standard deviation.\n"
    )


def test_what_the_file_notes_stands_under_its_tables(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'notes = "FedAvg: last_round."\nseeds')
    (table,) = tables_of(run_of(text, scores))
    assert table.to_markdown().endswith("standard error.  \nFedAvg: last\\_round.\n")
    assert r"standard error. FedAvg: last\_round.}" in table.to_latex()
    assert table.as_dict()["remark"] == "FedAvg: last_round."


def test_latex(run_of: Callable[..., RunFolder]) -> None:
    def far(cell: Cell) -> dict[str, Any]:
        correct = 600 if cell.method.name == "AFL" else 900
        return {"accuracy": correct / 1000, "hits": {"": hits_of(correct)}, "test_rows": 1000}

    text = HEAD.replace("[0, 1, 2]", "[0]") + '[[method]]\nname = "a_b"\nmethod = "afl"\n'
    text += 'parameters = {ridge = 1.0}\n[table]\nbaseline = "AFL"\n'
    (table,) = tables_of(run_of(text, far))
    assert table.to_latex() == "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            r"\caption{A \& B: 50 \%. Mean over 1 seed. "
            r"$^{*}$ differs from AFL (paired test on the test rows, p $<$ 0.05).}",
            r"\begin{tabular}{lrr}",
            r"\toprule",
            r"method & $\alpha$ = 0.1 & s = 10 \\",
            r"\midrule",
            r"AFL & 60.00 & 60.00 \\",
            r"a\_b & 90.00$^{*}$ & 90.00$^{*}$ \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def test_a_table_is_json(run_of: Callable[..., RunFolder]) -> None:
    (table,) = tables_of(run_of(HEAD + DEEP, scores))
    again = json.loads(json.dumps(table.as_dict()))
    assert again["columns"] == ["α = 0.1", "s = 10"]
    assert again["rows"][0]["entries"][0]["mean"] == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("metric", "value", "error", "text"),
    [
        ("test", 85.204, 0.049, "85.20 ± 0.05"),
        ("seconds", 0.0080712, 0.00036, "0.00807 ± 0.00036"),
        ("seconds", 1234.6, 12.34, "1235 ± 12"),
        ("seconds", 123.44, 0.0312, "123.44 ± 0.03"),
        ("risk", 4012.3456, 3.2e-12, "4012 ± 3e-12"),
        ("risk", 4012.3456, 0.0, "4012 ± 0"),
        ("exchanges", 21.0, 0.0, "21"),
        ("megabytes_up", 19.08, 1e-15, "19.1"),
        ("train_csr", 0.58834, 0.0131, "0.5883 ± 0.0131"),
        ("deviation", 4.942e-14, 2e-15, "4.94e-14 ± 2.0e-15"),
        ("test", None, None, "–"),
    ],
)
def test_digits(metric: str, value: float | None, error: float | None, text: str) -> None:
    assert METRICS[metric].number(value, error) == text


def test_every_metric_has_a_name_and_axes_have_signs() -> None:
    assert all(key == metric.key and metric.label for key, metric in METRICS.items())
    assert axis_label("residual_ridge", 0.01) == "γ = 0.01"
    assert axis_label("noise", 0.1) == "τ = 10 %"
    assert axis_label("zero_activation", "tanh") == "tanh"
    assert axis_label("block_activation", "gelu") == "block activation = gelu"
    assert axis_label("method", ("DeepAFL", 5)) == "DeepAFL (T = 5)"
    assert axis_label("method", ("AFL", None)) == "AFL"
    assert axis_label("depth", None) == ""


# -- checked against the papers --------------------------------------------------------------------


def checked(run_of: Callable[..., RunFolder], shares: tuple[float, float, float], table: str) -> list[Check]:
    """AFL on CIFAR-100 came out as these three seeds say."""
    text = HEAD.replace("seeds", f"paper = {table}\nseeds")
    return checks_of(run_of(text, lambda cell: {"accuracy": shares[cell.seed]}))


@pytest.mark.parametrize("shares", [(0.5856, 0.5856, 0.5856), (0.58, 0.5856, 0.591), (0.61, 0.5, 0.6)])
def test_the_interval_is_welchs(run_of: Callable[..., RunFolder], shares: tuple[float, ...]) -> None:
    """AFL's Table 1 has 58.56 with a standard deviation of 0 after three runs."""
    one, other = checked(run_of, shares, '{key = "afl", table = "1"}')
    error = 100 * float(stats.sem(shares))
    expected = 0.005 + (0.0 if error < 1e-9 else error * stats.t.ppf(0.975, 2))
    assert one.allowed == pytest.approx(expected)
    apart = abs(100 * np.mean(shares) - 58.56)
    assert one.excess == pytest.approx(max(0.0, apart - expected))
    assert (one.row, one.column, one.table, one.paper, one.seeds) == ("AFL", "α = 0.1", "1", 58.56, 3)
    assert other.column == "s = 10"


def test_spreads_of_the_paper_count(run_of: Callable[..., RunFolder]) -> None:
    """DeepAFL's T = 5: 64.72 with a standard error of 0.07 after three runs; AFL prints deviations."""
    text = HEAD.replace("seeds", 'paper = {key = "deepafl", table = "1"}\nseeds') + DEEP
    found = checks_of(run_of(text, scores))
    shallow = next(one for one in found if one.row == "DeepAFL (T = 5)")
    ours = stats.sem([61.0, 61.1, 61.2])
    interval = stats.ttest_ind_from_stats(61.1, ours * 3**0.5, 3, 64.72, 0.07 * 3**0.5, 3, equal_var=False)
    apart, freedom = 64.72 - 61.1, interval.statistic  # the statistic is apart over the error
    error = apart / abs(freedom)
    assert shallow.ours == pytest.approx(61.1)
    assert error == pytest.approx(math.hypot(ours, 0.07))
    assert 0.005 + 2.776 * error * 0.99 < shallow.allowed < 0.005 + 4.31 * error
    assert not shallow.inside
    assert shallow.excess == pytest.approx(apart - shallow.allowed)
    deviation = 'paper = {key = "afl", table = "1"}\nseeds'
    text = HEAD.replace("seeds", deviation).replace('name = "AFL"', 'name = "FedDyn"')
    one = checks_of(run_of(text, lambda cell: {"accuracy": 0.5755}))[0]
    assert one.paper == 57.55
    spread = next(v.spread for v in printed("afl", ["1"]) if v.mean == 57.55)
    assert spread is not None
    assert one.allowed == pytest.approx(0.005 + stats.t.ppf(0.975, 2) * spread / 3**0.5)


@pytest.mark.parametrize(
    ("shares", "excess"), [({"accuracy": 0.58564}, 0.0), ({"accuracy": 0.5858}, 0.015), ({}, math.inf)]
)
def test_one_seed_beside_a_number_without_spread(
    shares: dict[str, float], excess: float, run_of: Callable[..., RunFolder]
) -> None:
    text = HEAD.replace("[0, 1, 2]", "[0]").replace("seeds", 'paper = {key = "afl", table = "2"}\nseeds')
    (one,) = checks_of(run_of(text, lambda _: shares))
    assert one.allowed == 0.005
    assert one.excess == pytest.approx(excess)
    assert one.inside == (excess == 0.0)


def test_what_cannot_be_checked_is_refused(run_of: Callable[..., RunFolder]) -> None:
    with pytest.raises(DataError, match="names no 'paper'"):
        checks_of(run_of(HEAD, scores))
    run = run_of(HEAD.replace("seeds", 'paper = {key = "afl", table = "2"}\nseeds'), scores)
    with pytest.raises(DataError, match="the backbone pixels instead of its own"):
        checks_of(dataclasses.replace(run, backbone="pixels"))


DUMMY = """
title = "AFL Table A.1, two of its cells"
paper = {{key = "afl", table = "A.1"}}
seeds = [0]
[dataset]
name = "{name}"
random = {{rows = 400, width = 16, classes = 4}}
[[partition]]
kind = "iid"
clients = 2
[[partition]]
kind = "iid"
clients = 10
[method]
name = "AFL"
method = "law"
parameters = {{regulariser = {regulariser}, remove = {remove}}}
[table]
rows = "remove"
columns = "clients"
values = "deviation"
"""


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (("dummy", "1.0", "true"), 0, "2 of 2 inside"),
        (("dummy", "0.0", "false"), 0, "2 of 2 inside"),
        (("dummy", "1.0", "false"), 1, "0 of 2 inside"),  # the regulariser is left in
        (("another", "1.0", "true"), 1, "no number for any cell"),
    ],
)
def test_a_check_says_so_by_its_exit_code(
    case: tuple[str, str, str], code: int, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "made.toml"
    file.write_text(DUMMY.format(**dict(zip(("name", "regulariser", "remove"), case, strict=True))))
    command = ["experiment", "run", str(file), "--runs", str(tmp_path / "runs"), "--check"]
    told = fedsolve(*command)
    assert told.exit_code == code, told.output
    assert words in told.stdout
    document = json.loads(fedsolve(*command, "--json").stdout)
    found = document["checks"]["made"]
    assert [one["inside"] for one in found] == [code == 0] * (0 if case[0] == "another" else 2)
