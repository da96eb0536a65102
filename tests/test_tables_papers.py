"""Tables of runs: statistics, layout, rendering, and the numbers printed in the papers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsolve.errors import DataError
from fedsolve.experiments import runner
from fedsolve.experiments.config import Cell
from fedsolve.experiments.metrics import METRICS
from fedsolve.experiments.observations import BACKBONES, observations
from fedsolve.experiments.outcomes import Outcome
from fedsolve.experiments.papers import papers, printed, same
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.rendering import latex, markdown
from fedsolve.experiments.result_tables import ResultTable, tables_of
from fedsolve.experiments.run_folder import RunFolder, load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.significance import compare, independence, mean_and_error
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.experiments.wording import axis_label
from fedsolve.gradient.networks.stages import MOBILENET_STAGES

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
        def pretend(cell: Cell, *_: Any) -> dict[str, Any]:
            dealt = cell.partition.as_dict() | {"heterogeneity": 0.5, "empty_clients": 0}
            return Outcome(partition=dealt, **outcome(cell)).values

        file = tmp_path / "made.toml"
        file.write_text(text)
        rows = ExperimentRows(np.zeros((4, 2)), np.arange(4) % 2, np.zeros((4, 2)), np.arange(4) % 2, "zeros")
        monkeypatch.setattr(runner, "run_cell", pretend)
        run_experiment(read_experiment(file), tmp_path, lambda *_: rows)
        return load_run(tmp_path / "made")

    return make


def scores(cell: Cell) -> dict[str, Any]:
    """AFL is right on 600 of 1000 rows whatever the seed; DeepAFL gets better by layers and seeds."""
    if cell.method.algorithm == "afl":
        return {"accuracy": 0.6, "test_correct": 600, "test_rows": 1000}
    correct = [600 + 2 * layer + cell.seed for layer in range(cell.parameters["layers"] + 1)]
    return {
        "accuracy": correct[-1] / 1000,
        "accuracy_per_layer": [count / 1000 for count in correct],
        "test_correct_per_layer": correct,
        "test_rows": 1000,
        "seconds_per_layer": [0.01 * layer for layer in range(len(correct))],
    }


def cells_of(table: ResultTable) -> list[list[str]]:
    return [
        [row.label, *("" if entry is None else entry.text for entry in row.entries)] for row in table.rows
    ]


# -- statistics ------------------------------------------------------------------------------------


def test_standard_error_is_scipys() -> None:
    values = [80.1, 82.4, 81.0, 79.5]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(80.75)
    assert error == pytest.approx(stats.sem(values))
    # By hand: deviations -0.65, 1.65, 0.25, -1.25; squares sum to 4.77; sqrt(4.77 / 3) / 2.
    assert error == pytest.approx(math.sqrt(4.77 / 3) / 2)
    assert mean_and_error([3.0]) == (3.0, None)


def test_chi_squared_by_hand() -> None:
    # 2 x 2 table 660/340 against 600/400, Yates: n (|ad - bc| - n/2)² / product of the margins.
    a, b, c, d = 660.0, 340.0, 600.0, 400.0
    n = a + b + c + d
    chi = n * (abs(a * d - b * c) - n / 2) ** 2 / ((a + b) * (c + d) * (a + c) * (b + d))
    assert independence((660, 1000), (600, 1000)) == pytest.approx(math.erfc(math.sqrt(chi / 2)))
    assert independence((660, 1000), (600, 1000)) == pytest.approx(independence((600, 1000), (660, 1000)))
    assert independence((10, 10), (20, 20)) == 1.0
    assert independence((0, 10), (0, 20)) == 1.0
    assert independence((5, 10), (5, 10)) == pytest.approx(1.0)


# -- layout ----------------------------------------------------------------------------------------


def test_groups_are_compared_by_their_mean_counts() -> None:
    """Three seeds of one test set are as certain as one, and models without counts do not count."""
    one = independence((630, 1000), (600, 1000))
    assert compare([(629, 1000), None, (631, 1000)], [(600, 1000)] * 3) == one
    assert compare([None], [(600, 1000)]) is None
    assert compare([(600, 1000)], []) is None


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
    assert deep.p == pytest.approx(stats.chi2_contingency([[641, 359], [600, 400]]).pvalue)
    assert shallow.p == pytest.approx(stats.chi2_contingency([[611, 389], [600, 400]]).pvalue)
    assert not shallow.marked
    assert not deep.marked
    assert deep.p > 0.05, "one test set of 1000 rows; added up over seeds it would seem certain"


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
    assert [row.paper for row in table.rows] == [None, "1", None, "1", None, "1"]
    others = text + '[table]\nrows = "method"\ncolumns = "partition"\nothers = true\n'
    (table,) = tables_of(run_of(others, scores))
    found = {row.label: row.entries for row in table.rows}
    dyn = found["FedDyn (paper, Table 1)"]
    assert [entry.mean for entry in dyn if entry is not None] == [57.55, 61.09]
    assert "DeepAFL (T = 10) (paper, Table 1)" in found
    assert "AFL (paper, Table 1)" not in found


def test_another_datasets_numbers_are_named(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'paper = {key = "deepafl", table = "1", dataset = "CIFAR-100"}\nseeds')
    text = text.replace('name = "CIFAR-100"', 'name = "digits"')
    (table,) = tables_of(run_of(text, scores))
    assert cells_of(table)[1] == ["paper, Table 1, CIFAR-100", "58.56 ± 0.00", "58.56 ± 0.00"]
    assert any("for CIFAR-100" in note for note in table.notes)
    (table,) = tables_of(run_of(text.replace(', dataset = "CIFAR-100"', ""), scores))
    assert len(table.rows) == 1, "without it the paper's numbers are not about digits"


def test_every_table_of_the_papers_is_a_full_grid() -> None:
    assert set(papers()) == {"deepafl", "afl", "apfl", "flfa"}
    deepafl, afl = papers()["deepafl"]["tables"], papers()["afl"]["tables"]
    wanted = [str(n) for n in (*range(1, 26), 28, 29, 30, 31)] + ["figure 7"]
    assert sorted(deepafl) == sorted(wanted)
    assert sorted(afl) == ["1", "2", "3", "4", "A.1", "A.2", "A.3"]
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
    folder = Path(__file__).parent.parent / "experiments"
    for path in sorted(path for key in ("deepafl", "afl", "flfa") for path in (folder / key).glob("*.toml")):
        experiment = read_experiment(path)
        assert experiment.paper is not None
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
            if index not in met and value.coordinates.get("method", next(iter(ours))) in ours
        ]
        assert not missed, f"{path.name}: {missed[:3]}"


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(DataError, match="has no table '26'"):
        printed("deepafl", ["26"])


# -- rendering -------------------------------------------------------------------------------------


def test_markdown(run_of: Callable[..., RunFolder]) -> None:
    text = HEAD.replace("seeds", 'paper = {key = "afl", table = "1"}\nseeds')
    (table,) = tables_of(run_of(text, scores))
    assert markdown(table) == (
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
    assert markdown(table).endswith("standard error.  \nFedAvg: last\\_round.\n")
    assert r"standard error. FedAvg: last\_round.}" in latex(table)
    assert table.as_dict()["remark"] == "FedAvg: last_round."


def test_latex(run_of: Callable[..., RunFolder]) -> None:
    def far(cell: Cell) -> dict[str, Any]:
        correct = 600 if cell.method.name == "AFL" else 900
        return {"accuracy": correct / 1000, "test_correct": correct, "test_rows": 1000}

    text = HEAD.replace("[0, 1, 2]", "[0]") + '[[method]]\nname = "a_b"\nmethod = "afl"\n'
    text += 'parameters = {ridge = 1.0}\n[table]\nbaseline = "AFL"\n'
    (table,) = tables_of(run_of(text, far))
    assert latex(table) == "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            r"\caption{A \& B: 50 \%. Mean over 1 seed. "
            r"$^{*}$ differs from AFL (chi-squared test of independence, p $<$ 0.05).}",
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
    assert axis_label("method", ("DeepAFL", 5)) == "DeepAFL (T = 5)"
    assert axis_label("method", ("AFL", None)) == "AFL"
    assert axis_label("depth", None) == ""
