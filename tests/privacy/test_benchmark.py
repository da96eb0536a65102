"""The benchmark of secure sums runs and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.masks import uploads, weight_uploads
from click.testing import CliRunner


@pytest.mark.slow
def test_the_masks_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "masks.json"
    small = ["--width", "8", "--classes", "2", "--clients", "4", "--clients", "51", "--slots", "2"]
    done = CliRunner().invoke(
        main, ["masks", *small, "--repeats", "1", "--mebibytes", "1", "--json", str(path)]
    )
    assert done.exit_code == 0, done.output
    assert "masks, two limbs" in done.output
    result = json.loads(path.read_text())["results"]
    assert all(rate > 0 for rate in (*result["masks"].values(), *result["ring"].values()))
    assert [(entry["clients"], entry["limbs"]) for entry in result["sums"]] == [
        (4, 1),
        (4, 2),
        (51, 1),
        (51, 2),
    ]
    assert result["sums"][0]["bytes"] == 8 * (36 + 16) + 16
    assert "server_opens" in result["sums"][0]
    assert "server_opens" not in result["sums"][2]


@pytest.mark.slow
def test_the_benchmark_of_checked_questions(tmp_path: Path) -> None:
    path = tmp_path / "checked.json"
    done = CliRunner().invoke(
        main, ["checked", "--width", "16", "--classes", "3", "--layers", "2", "--json", str(path)]
    )
    assert done.exit_code == 0, done.output
    assert "check" in done.output
    result = json.loads(path.read_text())["results"]
    assert "check" not in result["unchecked"]["letters"]
    assert result["checked"]["letters"]["check"]["count"] == 3 * result["checked"]["exchanges"]


@pytest.mark.slow
def test_uploads_of_secure_sums_are_what_they_should_be() -> None:
    pytest.importorskip("torch")
    found = uploads((5,)) | weight_uploads(rounds=2)
    assert all(ratio <= 1.3 for name, ratio in found.items() if name.endswith("5 layers"))
    assert found["fedavg, float32, later rounds"] < 2.001
