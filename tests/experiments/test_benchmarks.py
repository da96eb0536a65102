"""The benchmarks run, their yardstick agrees with fedsolve, and their operation counter is right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import growth, machine, plans, rate, scale, transcription
from benchmarks.__main__ import main
from benchmarks.data import from_file, owners_of, synthetic
from benchmarks.operations import afl_operations, lean_operations
from benchmarks.transcription import Setting
from benchmarks.worker import PLANS, TRANSCRIPTIONS, train
from click.testing import CliRunner

import fedsolve as fs
from fedsolve.backends import Kernels, kernels
from fedsolve.closedform.deepafl import DeepAFLRun
from fedsolve.errors import DataError

ROWS, FEATURES, WIDTH, CLASSES, LAYERS, CLIENTS = 240, 12, 24, 10, 3, 6
SETTING = Setting(LAYERS, WIDTH, ridge=0.5, residual_ridge=0.02, seed=4)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    rows = synthetic(ROWS, FEATURES)
    return {
        "x": rows.features,
        "y": rows.labels,
        "owners": owners_of(rows.labels, CLIENTS, 0.1),
        "x_test": rows.test_features,
        "y_test": rows.test_labels,
    }


@pytest.fixture(scope="module")
def yardstick(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return train("transcription", SETTING, data, CLIENTS)


@pytest.mark.parametrize("variant", [*PLANS, *list(TRANSCRIPTIONS)[1:]])
def test_every_variant_has_the_weights_of_the_transcription(
    data: dict[str, Any], yardstick: Any, variant: str
) -> None:
    measured, weights = train(variant, SETTING, data, CLIENTS)
    expected = yardstick[1]
    assert weights.keys() == expected.keys()
    assert len(weights) == 2 * LAYERS + 1
    for name, weight in weights.items():
        difference = np.max(np.abs(weight - expected[name])) / np.max(np.abs(expected[name]))
        assert difference <= 1e-9, name
    assert measured["accuracy"] == yardstick[0]["accuracy"]


def test_the_transcription_solves_the_sandwich_equation() -> None:
    rng = np.random.default_rng(1)
    hidden, residual = rng.standard_normal((50, 9)), rng.standard_normal((50, 3))
    weight, ridge = rng.standard_normal((7, 3)), 0.3
    omega = transcription.sandwich(hidden.T @ hidden, weight @ residual.T @ hidden, weight, ridge)
    stationary = hidden.T @ (residual - hidden @ omega @ weight) @ weight.T
    np.testing.assert_allclose(stationary, ridge * omega, rtol=1e-10, atol=1e-12)


def test_bytes_of_the_transcription_are_those_of_full_matrices(yardstick: Any) -> None:
    up = (LAYERS + 1) * (WIDTH**2 + WIDTH * CLASSES) + LAYERS * 2 * WIDTH**2
    down = LAYERS * (WIDTH * CLASSES + WIDTH**2)
    assert yardstick[0]["bytes_up"] == 8 * CLIENTS * up
    assert yardstick[0]["bytes_down"] == 8 * CLIENTS * down


def test_bytes_of_the_lean_plan_are_those_of_the_design(data: dict[str, Any]) -> None:
    measured, _ = train("lean", SETTING, data, CLIENTS)
    triangle, thin = WIDTH * (WIDTH + 1) // 2, CLASSES * (CLASSES + 1) // 2
    first = triangle + WIDTH * CLASSES + CLASSES
    layer = triangle + WIDTH * CLASSES + WIDTH * CLASSES + CLASSES**2 + thin
    assert measured["bytes_up"] == 8 * CLIENTS * (first + LAYERS * layer)
    assert measured["bytes_down"] == 8 * CLIENTS * LAYERS * 3 * WIDTH * CLASSES


@pytest.mark.slow
def test_whole_run_traffic_targets_hold_at_the_size_of_the_benchmark() -> None:
    # Payloads do not depend on the number of rows, so a few are enough.
    rows = synthetic(40, FEATURES)
    data = {"x": rows.features, "y": rows.labels, "owners": np.arange(40) % 2, "y_test": rows.labels[:0]}
    lean, full = (train(name, Setting(5, 1024), data, 2)[0] for name in ("lean", "transcription"))
    assert full["bytes_up"] >= plans.UP_TARGET * lean["bytes_up"]
    assert full["bytes_down"] >= plans.DOWN_TARGET * lean["bytes_down"]


class Ledger:
    """Counts the operations of matrix products and symmetric updates while clients answer."""

    def __init__(self) -> None:
        self.operations = 0
        self.answering = False

    def product(self, left: Any, right: Any) -> None:
        if self.answering:
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _count_everything(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Count np.matmul, symmetric updates, and `@` with anything the server sent."""
    ledger = Ledger()
    multiply, update, send = np.matmul, kernels.add_gram, DeepAFLRun._send
    addition = kernels.add_product
    exchange = fs.LocalFederation.exchange

    class Sent(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
            plain = [np.asarray(value) for value in inputs]
            if ufunc is multiply:
                ledger.product(*plain)
            return getattr(ufunc, method)(*plain, **keywords)

    def counted_matmul(left: Any, right: Any, **keywords: Any) -> Any:
        ledger.product(left, right)
        return multiply(np.asarray(left), np.asarray(right), **keywords)

    def counted_update(rows: Any, out: Any, accumulate: bool = True) -> None:
        ledger.operations += rows.shape[0] * rows.shape[1] ** 2
        update(rows, out, accumulate)

    def counted_addition(left: Any, right: Any, out: Any) -> None:
        ledger.product(left, right)
        addition(np.asarray(left), np.asarray(right), out)

    def counted_exchange(*arguments: Any) -> Any:
        ledger.answering = True
        try:
            return exchange(*arguments)
        finally:
            ledger.answering = False

    monkeypatch.setattr(np, "matmul", counted_matmul)
    monkeypatch.setattr(kernels, "add_gram", counted_update)
    monkeypatch.setattr(kernels, "add_product", counted_addition)
    place = Kernels.array

    def still_sent(kernels: Any, values: Any, dtype: Any = None) -> Any:
        """Where clients compute, what the server sent is still told from their own arrays."""
        placed = place(kernels, values, dtype)
        return placed.view(Sent) if isinstance(values, Sent) else placed

    monkeypatch.setattr(Kernels, "array", still_sent)
    monkeypatch.setattr(DeepAFLRun, "_send", lambda run, array: send(run, array).view(Sent))
    monkeypatch.setattr(fs.LocalFederation, "exchange", counted_exchange)
    return ledger


def _federation(data: dict[str, Any]) -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(data["x"], data["y"], data["owners"], CLIENTS, workers=1)


@pytest.mark.parametrize("hidden_width", [None, 17])
def test_operation_counter_of_lean_counts_what_participants_do(
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch, hidden_width: int | None
) -> None:
    ledger = _count_everything(monkeypatch)
    fs.DeepAFL(layers=LAYERS, width=WIDTH, hidden_width=hidden_width, exchange="lean").fit(_federation(data))
    counted = lean_operations(ROWS, FEATURES, WIDTH, CLASSES, LAYERS, hidden_width)
    assert ledger.operations == sum(counted.values())


def test_operation_counter_of_afl_counts_what_participants_do(
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = _count_everything(monkeypatch)
    fs.AFL(ridge=1.0).fit(_federation(data))
    assert ledger.operations == afl_operations(ROWS, FEATURES, CLASSES)


def test_operation_counter_by_hand() -> None:
    # Two rows, 3 features, width 5, 4 classes, one block of hidden width 6.
    counted = lean_operations(2, 3, 5, 4, 1, hidden_width=6)
    assert counted["classifier"] == 2 * (2 * 3 * 5 + 25 + 2 * 5 * 4)
    assert counted["block"] == 2 * (2 * 5 * 6 + 36 + 2 * 5 * 4 + 2 * 6 * 4)
    assert counted["step"] == 2 * (2 * 6 * 4 + 2 * 5 * 4 + 2 * 4 * 4 + 16 + 2 * 4 * 5)


def test_ratios_are_those_to_the_transcription() -> None:
    sizes = {"bytes_up": 10, "bytes_down": 8, "peak_bytes": None}
    found = plans.ratios({"lean": {"seconds": 2.0, **sizes}, "transcription": {"seconds": 6.0, **sizes}})
    assert found["lean"] == {"seconds": 3.0, "bytes_up": 1.0, "bytes_down": 1.0}
    assert plans.ratios({"lean": {"seconds": 2.0, **sizes}}) == {}


def test_features_of_a_file_are_decoded(tmp_path: Path) -> None:
    x = np.array([[0, 1], [2, 3], [4, 5]], dtype=np.uint8)
    scale, offset = np.array([2.0, 0.5]), np.array([-1.0, 3.0])
    y = np.array([1, 0, 1])
    np.savez(tmp_path / "f.npz", x_train=x, y_train=y, x_test=x, y_test=y, scale=scale, offset=offset)
    rows = from_file(tmp_path / "f.npz", limit=2)
    np.testing.assert_array_equal(rows.features, [[-1.0, 3.5], [3.0, 4.5]])
    np.testing.assert_array_equal(rows.labels, [1, 0])
    np.testing.assert_array_equal(rows.test_features[2], [7.0, 5.5])


def test_a_file_without_training_rows_is_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x_train=np.ones((2, 2)))
    with pytest.raises(DataError, match="lacks y_train; it has x_train"):
        from_file(tmp_path / "f.npz")


def test_synthetic_rows_have_every_class_and_repeat() -> None:
    rows = synthetic(50, 6)
    assert set(rows.labels) == set(range(10))
    np.testing.assert_array_equal(rows.features, synthetic(50, 6).features)


def test_rate_and_growth_report_every_quantity() -> None:
    found = rate.measure(clients=3, rows_each=20, features=6, width=12, layers=2, repeats=2, side=64)
    assert found["seconds"].keys() == found["operations"].keys() == {"classifier", "block", "step"}
    assert found["operations"] == lean_operations(60, 6, 12, 10, 2)
    assert found["share"] == pytest.approx(found["rate"] / max(found["matmul_rates"]))
    points = growth.measure({"N": 60, "d": 8, "K": 3, "T": 1}, {"N": (40,), "T": (1, 2)}, repeats=1)
    assert [(p["varied"], p["N"], p["T"]) for p in points] == [("N", 40, 1), ("T", 60, 1), ("T", 60, 2)]
    assert all(p[name]["rate"] > 0 for p in points for name in ("afl", "deepafl"))


def test_memory_sees_an_allocation() -> None:
    """In a process of its own: what other tests leave behind may be given back at any moment."""
    script = (
        "import numpy as np; from benchmarks import machine; before = machine.resident_memory(); "
        "block = np.ones(8 << 20); print(before, machine.resident_memory(), machine.peak_memory())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root
    )
    before, after, peak = map(int, done.stdout.split())
    assert after - before >= 0.9 * (8 << 23)
    assert peak >= after


@pytest.fixture
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    describe: Callable[..., Any] = machine.describe
    monkeypatch.setattr(machine, "describe", lambda: describe(side=64))
    monkeypatch.setattr(plans, "sustained_rates", lambda: machine.sustained_rates(0.01, side=64))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_machine")
def test_plans_from_the_command_line(tmp_path: Path) -> None:
    rows = synthetic(200, 8)
    np.savez(tmp_path / "rows.npz", x_train=rows.features, y_train=rows.labels)
    sizes = ["--clients", "4", "--width", "16", "--layers", "2", "--repeats", "2"]
    only = ["--only", "lean", "--only", "transcription"]
    out = tmp_path / "results.json"
    done = CliRunner().invoke(
        main, ["plans", "--data", str(tmp_path / "rows.npz"), "--json", str(out), *sizes, *only]
    )
    assert done.exit_code == 0, done.output
    assert "lean is faster, same workers" in done.stdout
    assert "rows.npz 200 x 8" in done.stdout
    result = json.loads(out.read_text())["results"]["plans"][0]
    assert [len(result["variants"][name]["runs"]) for name in ("lean", "transcription")] == [2, 2]
    assert result["variants"]["lean"]["difference"] <= 1e-9
    assert result["partition"] == "Dirichlet 0.1"


@pytest.mark.usefixtures("fast_machine")
def test_a_file_that_is_not_npz_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "rows.npz").write_text("not rows")
    done = CliRunner().invoke(main, ["plans", "--data", str(tmp_path / "rows.npz")])
    assert done.exit_code == 2
    assert "np.savez" in done.stderr


@pytest.mark.slow
def test_a_round_is_timed_beside_plain_loops() -> None:
    pytest.importorskip("torch")
    from benchmarks import speed

    found = speed.measure(rounds=1, flower=False, workers=(1, 2), clients=2, rows=16, network="cnn")
    ways = ("fedsolve", "plain loop", "PFLlib's loop", "plain loop, torch's layers")
    assert [(one["way"], one["cores"]) for one in found["ways"]] == [(w, n) for n in (1, 2) for w in ways]
    assert [one["ratio"] for one in found["ways"] if one["way"] == "fedsolve"] == [1, 1]
    assert "| plain loop | " in speed.table(found)


@pytest.mark.slow
def test_methods_for_frozen_features_stand_beside_each_other(tmp_path: Path) -> None:
    rows = synthetic(200, 6)
    file, out, figure = (tmp_path / name for name in ("rows.npz", "heads.json", "heads.png"))
    arrays = {"x_train": rows.features, "y_train": rows.labels}
    np.savez(file, **arrays, x_test=rows.test_features, y_test=rows.test_labels)
    words = ["heads", "--clients", "3", "--json", str(out)]
    done = CliRunner().invoke(main, [*words, "--data", str(file), "--only", "AFL, LDA head"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, [*words, "--data", str(file), "--only", "KernelAFL"])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["results"]["rows"]
    assert [row["exchanges"] for row in found.values()] == [1, 2], "rows measured before are kept"
    assert CliRunner().invoke(main, [*words, "--figure", str(figure)]).exit_code == 0
    assert figure.stat().st_size > 10_000
    assert "no row is called" in CliRunner().invoke(main, [*words, "--only", "KernelAfl"]).stderr


@pytest.mark.slow
def test_the_table_of_twelve_goes_on_from_its_file(tmp_path: Path) -> None:
    from benchmarks import tables

    path = tmp_path / "t.jsonl"
    given = ["--table", "iris", "--only", "RidgeClassifierCV", "--json", str(path)]
    stopped = CliRunner().invoke(tables.main, [*given, "--splits", "2", "--seconds", "0"])
    assert stopped.exit_code == 1
    assert "2 of 2 splits are not complete" in stopped.output
    assert CliRunner().invoke(tables.main, [*given, "--splits", "1"]).exit_code == 0
    first = path.read_text()
    path.write_text(first + '{"table": "iris", "spl')  # cut off while it was written
    done = CliRunner().invoke(tables.main, [*given, "--splits", "2", "--jobs", "2"])
    assert done.exit_code == 0
    assert "1 fits to do, 1 known" in done.output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.read_text().startswith(first)
    assert [line["split"] for line in lines] == [0, 1]
    assert len(tables.TABLES) == 12
    assert tables.SPLITS == 20


def test_the_model_of_many_workers_finds_what_its_measurements_were_made_of() -> None:
    cores = {1: 1.0, 4: 0.9, 16: 0.6}
    lines = [{"workers": n, "clients": c, "rows": 2000, "seconds": 0.0} for n in cores for c in (16, 128)]
    true = np.array([3e-4, 1.5, 0.2])
    for line, terms in zip(lines, scale.terms_of(lines, cores), strict=True):
        line["seconds"] = float(terms @ true)
    np.testing.assert_allclose(scale.fit_model(lines, cores), true, rtol=1e-9)
    assert scale.terms_of(lines[-1:], cores)[0, 0] == pytest.approx(128 * 2000 / (16 * 0.6))
