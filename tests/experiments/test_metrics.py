"""One table of metrics: what a new entry gives, and what every entry says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsolve.errors import DataError
from fedsolve.experiments import metrics
from fedsolve.experiments.metrics import METRICS, Metric
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.report_page import report
from fedsolve.experiments.result_tables import tables_of
from fedsolve.experiments.run_folder import load_run
from fedsolve.experiments.runner import run_experiment
from fedsolve.experiments.sources import digits

TEXT = """
title = "By clients"
seeds = [0]
[dataset]
address = "digits"
[partition]
kind = "dirichlet"
alpha = 0.1
clients = 4
[[method]]
name = "alone"
method = "local"
[[method]]
name = "AFL"
method = "afl"
parameters = {ridge = 1.0}
[measure]
local = true
[table]
values = ["test", "wrong"]
"""


def test_a_new_metric_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.toml").write_text(TEXT)
    with pytest.raises(DataError, match="unknown metric 'wrong'"):
        read_experiment(tmp_path / "made.toml")
    wrong = Metric(
        "wrong",
        "rows read wrongly (%)",
        "%",
        "down",
        "hundredths",
        read=lambda cell, depth: 1 - cell["measures"]["pooled"],
        ranked=True,
    )
    monkeypatch.setitem(METRICS, wrong.key, wrong)
    run_experiment(read_experiment(tmp_path / "made.toml"), tmp_path, lambda *_: digits())
    run = load_run(tmp_path / "made")
    pooled = {cell["method"]: cell["measures"]["pooled"] for cell in run.cells}
    shown = {method: f"{100 * (1 - share):.2f}" for method, share in pooled.items()}
    (table,) = tables_of(run)
    assert table.columns == ("test accuracy (%)", "rows read wrongly (%)")
    assert {row.label: row.entries[1].text for row in table.rows if row.entries[1]} == shown
    for text in (table.to_markdown(), table.to_latex().replace("\\%", "%"), report([run])):
        assert "rows read wrongly (%)" in text.replace("\u00a0", " ")
        assert all(number in text for number in shown.values())
    # Less is better: the report marks the lowest.
    best = min(shown.values(), key=float)
    assert f"<strong>{best}</strong>" in report([run])
    assert f"<strong>{max(shown.values(), key=float)}</strong>" not in report([run])


def test_every_metric_says_what_it_is() -> None:
    for key, metric in METRICS.items():
        assert metric.key == key
        assert metric.label
        assert metric.unit in ("%", "points", "MB", "s", "")
        assert metric.unit != "%" or metric.label.endswith("(%)")
        assert metric.better or key == "selected"


def test_nobody_else_knows_what_a_metric_is_called() -> None:
    """Labels stand in the table of metrics only."""
    folder = Path(metrics.__file__).parent
    others = [path for path in folder.rglob("*.py") if path.name != "metrics.py"]
    for label in ("test accuracy (%)", "MB down", "drift H", "share of the choices (%)"):
        for path in others:
            assert not re.search(re.escape(f'"{label}"'), path.read_text()), (label, path.name)
