"""Personalised models in experiments, figures, the command, the demo and the benchmark."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import personal as bench
from benchmarks.__main__ import main as benchmarks
from benchmarks.data import synthetic
from click.testing import CliRunner

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import build
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.config import Cell, Measure
from fedsolve.experiments.digits_demo import AUTO, SHARED
from fedsolve.experiments.findings import overall
from fedsolve.experiments.papers import printed
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.report_page import report
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_figures import gain_plot, gain_plots, plots
from fedsolve.experiments.run_folder import load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.pages.plots import render
from fedsolve.scoring.client_scores import client_rows
from tests.command import document, fedsolve, refused
from tests.toy import opening, toy_data, toy_rows, written

X, Y = toy_data(500, seed=11, noise=0.4)
ROWS = toy_rows(X, Y, 350)
UNSPLIT = ExperimentRows(X, Y, None, None, "unsplit")

TEXT = (
    opening("own models", alpha=0.3, clients=6)
    + """[[method]]
name = "local only"
method = "local"
parameters = {ridge = 1.0}

[[method]]
name = "DeepAFL"
method = "deepafl"
parameters = {layers = 2, width = 12}
depths = [0, 2]

[[method]]
name = "APFL"
method = "apfl"
parameters = {width = 24, refinement_width = 16, ridge = 1.0}
grid = {balance = [0, 0.5, "auto"]}

[measure]
local = true

[table]
rows = "method"
columns = "partition"
values = ["test", "worst_decile", "gain_shared", "gain_alone"]
"""
)


def cells(tmp_path: Path, text: str = TEXT) -> dict[str, Cell]:
    found = read_experiment(written(tmp_path, text, "own.toml")).cells()
    return {f"{cell.method.name}{cell.grid.get('balance', '')}": cell for cell in found if cell.seed == 0}


# -- cells -----------------------------------------------------------------------------------------


def split() -> tuple[Any, Any]:
    owners = fs.partition.dirichlet(ROWS.y_train, 6, 0.3, seed=0)
    tested = fs.partition.alike(ROWS.y_test, ROWS.y_train, owners, 6, seed=0)
    return owners, client_rows(ROWS.x_test, ROWS.y_test, tested, 6)


def test_a_personal_cell_is_every_client_on_its_own_rows(tmp_path: Path) -> None:
    found = train_cell(cells(tmp_path)["APFLauto"], ROWS, workers=1).values
    owners, tests = split()
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners, clients=6, workers=1)
    model = fs.APFL(width=24, refinement_width=16, ridge=1.0, balance="auto", seed=0).fit(federation)
    own = fs.client_scores([model.personal(c) for c in federation.clients], tests, federation.clients)
    shared = fs.client_scores(model, tests, federation.clients)
    alone = fs.client_scores(
        [model.alone().personal(c) for c in federation.clients], tests, federation.clients
    )
    assert found["accuracy"] == own.mean
    assert found["local"]["correct"] == own.correct.tolist()
    assert found["local"]["shared"] == shared.correct.tolist()
    assert found["local"]["alone"] == alone.correct.tolist()
    assert found["local"]["balances"] == pytest.approx(
        [model.personal(c).balance for c in federation.clients]
    )
    assert found["measures"]["worst_decile"] == own.worst_decile
    assert found["measures"]["gain_shared"] == pytest.approx(own.mean - shared.mean)
    assert found["measures"]["gain_alone"] == pytest.approx(own.mean - alone.mean)
    assert found["exchanges"] == 1
    assert found["hits"] is None, "a mean over clients is no share of the rows"
    json.dumps(found)


def test_shared_and_lonely_cells_are_scored_on_the_same_rows(tmp_path: Path) -> None:
    named = cells(tmp_path)
    owners, tests = split()
    federation = fs.LocalFederation.from_arrays(ROWS.x_train, ROWS.y_train, owners, clients=6, workers=1)
    deep = fs.DeepAFL(layers=2, width=12, seed=0).fit(federation)
    found = train_cell(named["DeepAFL"], ROWS, workers=1).values
    expected = [fs.client_scores(lambda x, t=t: deep.predict(x, layers=t), tests).mean for t in range(3)]
    assert found["accuracy_per_layer"] == pytest.approx(expected)
    assert found["accuracy"] == found["accuracy_per_layer"][-1]
    assert len(found["seconds_per_layer"]) == 3
    lonely = train_cell(named["local only"], ROWS, workers=1).values
    assert lonely["exchanges"] == 0
    assert lonely["local"]["rows"] == found["local"]["rows"]
    primary = train_cell(named["APFL0"], ROWS, workers=1).values
    assert primary["local"]["correct"] == primary["local"]["shared"]
    assert primary["measures"]["gain_shared"] == 0.0


def test_without_a_test_part_every_client_keeps_some_rows_back(tmp_path: Path) -> None:
    found = train_cell(cells(tmp_path)["APFLauto"], UNSPLIT, workers=1).values
    owners = fs.partition.dirichlet(Y, 6, 0.3, seed=0)
    held = fs.partition.held_out(Y, owners, seed=0)
    assert found["local"]["rows"] == np.bincount(owners[held], minlength=6).tolist()
    assert 0.3 < found["accuracy"] <= 1.0


def test_flipped_labels_move_no_test_row(tmp_path: Path) -> None:
    cell = cells(tmp_path)["APFLauto"]
    clean, noisy = (train_cell(dataclasses.replace(cell, noise=n), ROWS, 1).values for n in (0.0, 0.4))
    assert clean["local"]["rows"] == noisy["local"]["rows"]
    assert noisy["accuracy"] < clean["accuracy"]


def test_a_cell_is_named_by_all_that_it_depends_on(tmp_path: Path) -> None:
    (first, *_) = cells(tmp_path, TEXT).values()
    others = [
        dataclasses.replace(first, measure=Measure(train=False, local=True)),
        dataclasses.replace(first, engine="ray"),
        dataclasses.replace(first, device="cuda"),
        dataclasses.replace(first, seed=first.seed + 1),
    ]
    assert len({cell.id for cell in (first, *others)}) == 5


def test_a_balance_is_a_number_or_a_word() -> None:
    assert build("apfl", {"balance": 0}).balance == 0.0
    assert isinstance(build("apfl", {"balance": 0}).balance, float)
    assert build("apfl", {"balance": "auto"}).balance == "auto"
    with pytest.raises(DataError, match="balance"):
        build("apfl", {"balance": "much"})


def test_methods_that_have_no_local_measure_say_so(tmp_path: Path) -> None:
    text = TEXT.replace('method = "local"\nparameters = {ridge = 1.0}', 'method = "law"')
    with pytest.raises(DataError, match="not measured client by client"):
        train_cell(cells(tmp_path, text)["local only"], ROWS, workers=1)


# -- tables and figures ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    file = written(folder, TEXT, "own.toml")
    run_experiment(read_experiment(file), folder, lambda spec, seed, tick: ROWS, workers=1)
    return load_run(folder / "own")


def test_tables_show_local_measures(run: Any) -> None:
    tables = tables_of(run)
    assert [table.title.rpartition(", ")[2] for table in tables] == [
        "test accuracy (%)",
        "accuracy of the worst tenth of the clients (%)",
        "gain over the shared model (points)",
        "gain over each client alone (points)",
    ]
    cells = [cell for cell in run.cells if cell["grid"].get("balance") == "auto"]
    expected = 100 * float(np.mean([cell["measures"]["gain_shared"] for cell in cells]))
    entries = [entry for row in tables[2].rows for entry in row.entries if entry and entry.mean is not None]
    assert any(entry.mean == pytest.approx(expected) for entry in entries)
    assert all(len(entry.plain.split(" ± ")[0].rpartition(".")[2]) == 2 for entry in entries)


def test_a_report_claims_nothing_of_partitions_that_deal_the_test_rows(tmp_path: Path) -> None:
    text = TEXT + '[[partition]]\nkind = "iid"\nclients = 4\n[[method]]\nname = "AFL"\nmethod = "afl"\n'
    file = written(tmp_path, text.replace("seeds = [0, 1]", "seeds = [0]"), "two.toml")
    run_experiment(read_experiment(file), tmp_path, lambda spec, seed, tick: ROWS, workers=1)
    found = load_run(tmp_path / "two")
    assert not any("partition" in sentence for sentence in overall([found]))
    page = report([found])
    assert "The partition moves" not in page
    assert "What each client gains" in page


def test_figures_show_sorted_gains(run: Any) -> None:
    found = {plot.name: plot for plot in plots(run)["digits"]}
    assert {"gains-shared", "gains-alone"} <= set(found)
    drawn = {line.name: line for panel in found["gains-shared"].panels for line in panel.series}
    assert set(drawn) == {"APFL, balance = 0.5, α = 0.3", "APFL, balance = auto, α = 0.3"}
    (cell,) = (c for c in run.cells if c["seed"] == 0 and c["grid"].get("balance") == "auto")
    local = cell["local"]
    rows = np.array(local["rows"])
    gains = 100 * (np.array(local["correct"]) - local["shared"])[rows > 0] / rows[rows > 0]
    values = np.array(drawn["APFL, balance = auto, α = 0.3"].y)
    np.testing.assert_allclose(values, np.sort(gains))
    assert "worse for" in found["gains-shared"].description


def test_too_many_lines_leave_the_last_method() -> None:
    def cell(method: str, partition: int) -> dict[str, Any]:
        local = {"rows": [10, 0], "correct": [9, 0], "shared": [8, 0], "balances": [0.3, 0.0]}
        return {
            "method": method,
            "grid": {},
            "seed": 0,
            "partition": {"name": f"α = {partition}"},
            "local": local,
        }

    many = [cell(method, number) for method in ("A", "B") for number in range(5)]
    (plot,) = gain_plots(many)
    assert plot.description.count("B, α") == 5
    assert "A, α" not in plot.description
    assert gain_plots([cell("A", 0) | {"local": None}]) == []


def test_a_figure_of_gains_is_the_same_bytes_each_time() -> None:
    gains = {"over one": np.array([1.0, np.nan, -2.0]), "over another": np.array([0.5, 1.5])}
    first, second = (render(gain_plot("", "", gains).figure, "svg") for _ in range(2))
    assert first == second


def test_the_papers_numbers_are_found() -> None:
    table = printed("apfl", ["1", "2"])
    assert len(table) == 12 * 12 + 6 * 6
    apfl = {"method": "APFL", "dataset": "CIFAR-100", "clients": 50, "partition": "α = 0.1", "metric": "test"}
    assert [n.mean for n in table if n.table == "1" and n.about(apfl)] == [80.72]
    assert [n.mean for n in table if n.table == "2" and n.about(apfl | {"balance": 0.3})] == [78.9]
    advance = {0.1: (15.09, "ImageNet-R"), 1.0: (4.75, "CIFAR-100")}
    for alpha, (points, dataset) in advance.items():
        about = {"dataset": dataset, "clients": 50, "partition": f"α = {alpha:g}", "metric": "test"}
        rivals = [n for n in table if n.table == "1" and about.items() <= dict(n.coordinates).items()]
        best = {n.coordinates["method"]: n.mean for n in rivals}
        own = best.pop("APFL")
        assert own - max(best.values()) == pytest.approx(points), "the paper's own row of advances"


# -- the command -----------------------------------------------------------------------------------

SIZES = ("--method", "apfl", "--width", "48", "--refinement-width", "32", "--ridge", "1", "--workers", "1")
DEALT = ("--clients", "5", "--partition", "dirichlet", "--alpha", "0.2")


def test_train_writes_the_shared_model_and_the_clients_own(tmp_path: Path) -> None:
    words = ("train", "digits", *SIZES, *DEALT, "--balance", "auto", "--out", tmp_path / "shared.safetensors")
    told = document(*words, "--no-calibrate", "--personal", tmp_path / "own")
    files = sorted((tmp_path / "own").iterdir())
    assert [file.name for file in files] == [f"client-{k}.safetensors" for k in range(5)]
    shared = fs.load_model(tmp_path / "shared.safetensors")
    own = [fs.load_model(file) for file in files]
    assert told["personal"]["balances"] == {f"client-{k}": model.balance for k, model in enumerate(own)}  # type: ignore[attr-defined]
    assert all(model.shared.contents()[1] == shared.primary.contents()[1] for model in own)  # type: ignore[attr-defined]
    accuracy = told["personal"]["local_accuracy"]
    assert accuracy["personal"]["mean"] >= accuracy["shared"]["mean"]
    assert sum(accuracy["personal"]["rows"]) == told["test_rows"]
    assert told["exchanges"] == 1
    page = fedsolve("evaluate", files[0], "digits")
    assert page.exit_code == 0
    page = fedsolve(*words, "--personal", tmp_path / "own")
    assert "mean local accuracy" in page.stdout


def test_clients_are_named_after_the_column_that_owns_them(tmp_path: Path) -> None:
    owners = np.array(["ward/1", "ward 2"])[np.random.default_rng(11).integers(0, 2, 350)]
    np.savez(tmp_path / "d.npz", x=X[:350], y=Y[:350], who=owners)
    document("train", tmp_path / "d.npz", *SIZES, "--client-column", "who", "--personal", tmp_path / "own")
    assert sorted(file.name for file in (tmp_path / "own").iterdir()) == [
        "ward_1.safetensors",
        "ward_2.safetensors",
    ]
    np.savez(tmp_path / "d.npz", x=X[:350], y=Y[:350], who=np.char.replace(owners, "ward 2", "ward:1"))
    result = fedsolve(
        "train", tmp_path / "d.npz", *SIZES, "--client-column", "who", "--personal", tmp_path / "own"
    )
    refused(result, 2, "same as file names")


def test_personal_models_need_a_method_that_has_them(tmp_path: Path) -> None:
    refused(fedsolve("train", "digits", "--method", "afl", "--personal", tmp_path), 2, "apfl", "not afl")
    (tmp_path / "file").write_text("")
    refused(fedsolve("train", "digits", *SIZES, "--personal", tmp_path / "file"), 4, "Name a folder that is")
    refused(
        fedsolve("train", "digits", *SIZES, "--balance", "half"),
        2,
        "balance must be 'auto' or a finite number >= 0; got 'half'",
    )


# -- the demo --------------------------------------------------------------------------------------


def test_the_demo_shows_what_each_client_gains(tmp_path: Path) -> None:
    words = ("demo", "--rounds", 2, "--clients", 8, "--layers", 2, "--width", 64, "--out", tmp_path)
    told = document(*words)["personal"]
    assert json.loads((tmp_path / "results.json").read_text())["personal"] == told
    reached = {entry["name"]: entry for entry in told["methods"]}
    assert reached[AUTO]["test"] > reached[SHARED]["test"]
    assert reached[AUTO]["gain_shared"] == pytest.approx(reached[AUTO]["test"] - reached[SHARED]["test"])
    assert len(told["local"]["balances"]) == 8
    assert told["reshuffled"]["own"] <= 1e-9
    assert told["reshuffled"]["shared"] <= 1e-9
    assert told["reshuffled"]["same_predictions"]
    assert told["reshuffled"]["moved"] > 100
    page = fedsolve(*words, "--no-figure")
    assert page.exit_code == 0
    assert "Everybody else reshuffled" in page.stdout
    few = ("--clients", 1, "--layers", 1, "--width", 32, "--rounds", 1, "--no-figure")
    assert document("demo", *few, "--out", tmp_path)["personal"]["reshuffled"]["moved"] == 0


# -- the benchmark ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_compares_every_entry_in_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = synthetic(300, 8)
    np.savez(
        tmp_path / "rows.npz",
        x_train=rows.features,
        y_train=rows.labels,
        x_test=rows.test_features,
        y_test=rows.test_labels,
    )
    monkeypatch.setitem(bench.ENTRIES, "always 3", lambda cell: lambda features: np.full(len(features), 3))
    out = tmp_path / "results.json"
    words = ["personal", "--data", tmp_path / "rows.npz", "--json", out, "--clients", 4, "--alpha", 0.2]
    words += ["--alpha", 1, "--seeds", 2, "--width", 16, "--layers", 1, "--figures", tmp_path / "figures"]
    done = CliRunner().invoke(benchmarks, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert "at least as good as the better of its streams" in done.stdout
    assert "lose against the shared" in " ".join(done.stdout.split())
    assert "always 3" in done.stdout
    result = json.loads(out.read_text())["results"]
    assert len(result["cells"]) == 4
    for cell in result["cells"]:
        assert set(cell["entries"]) == set(bench.ENTRIES)
        assert cell["grid"][0] == pytest.approx(cell["entries"]["primary only"]["mean"])
        assert cell["grid"][3] == pytest.approx(cell["entries"]["APFL, balance 0.3"]["mean"])
        assert sum(cell["entries"]["AFL"]["rows"]) == len(rows.test_labels)
    assert len(list((tmp_path / "figures").iterdir())) == 2
    done = CliRunner().invoke(
        benchmarks, list(map(str, [*words[:3], "--only", "AFL", "--seeds", 1, *words[5:9]]))
    )
    assert done.exit_code == 0, done.output
    assert "DeepAFL" not in done.stdout
    np.savez(tmp_path / "rows.npz", x_train=rows.features, y_train=rows.labels)
    done = CliRunner().invoke(benchmarks, ["personal", "--data", str(tmp_path / "rows.npz")])
    assert done.exit_code == 2
    assert "no test rows" in done.stderr
