"""README, the start page and the page on the command line: their code and commands, as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.installed import absolute

import fedsolve as fs
from fedsolve.experiments.reading import read_experiment
from tests.command import fedsolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "index.md").read_text()
COMMANDS = (ROOT / "docs" / "how-to-command-line.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def make_tables(folder: Path) -> None:
    """Patients of three hospitals, two numbers each, in files to train with, to test with and to predict."""
    rng = np.random.default_rng(0)
    for name, hospitals, rows in (
        ("patients", ("north", "south", "west"), 240),
        ("test", ("north", "south"), 60),
        ("new", ("west",), 20),
        ("north", ("north",), 120),
        ("south", ("south",), 120),
    ):
        age, pressure = rng.normal(60, 10, rows), rng.normal(130, 15, rows)
        ill = age + pressure + rng.normal(0, 8, rows) > 190
        lines = ["hospital,age,pressure,outcome"]
        for number in range(rows):
            where, outcome = hospitals[number % len(hospitals)], "yes" if ill[number] else "no"
            lines.append(f"{where},{age[number]:.1f},{pressure[number]:.1f},{outcome}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def run(line: str) -> None:
    words = shlex.split(line, comments=True)
    assert words[0] == "fedsolve"
    done = fedsolve(*words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}"


@pytest.mark.slow
def test_the_code_of_readme_and_of_the_start_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (readme,) = blocks(README, "python")
    (start,) = blocks(START, "python")
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(readme, "README.md", "exec"), scope)
    score, difference = map(float, printed.getvalue().split())
    told = [float(number) for number in re.findall(r"#.* ([\d.e-]+)$", readme, flags=re.MULTILINE)]
    assert round(score, len(f"{told[0]}") - 2) == told[0]
    assert difference < told[1]
    assert fs.load_model("model.safetensors").score(scope["X_test"], scope["y_test"]) == score
    exec(compile(start, "index.md", "exec"), scope)
    assert scope["model"].score(scope["X_test"], scope["y_test"]) > 0.9


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of README's network, which run in tests/network/security."""
    monkeypatch.chdir(tmp_path)
    make_tables(tmp_path)
    first, _network = blocks(README, "sh")
    (training,) = blocks(START, "sh")
    lines = [*first.splitlines(), *training.splitlines()]
    assert len(lines) == 4
    for line in lines:
        run(line)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 21
    *earlier, personal = blocks(COMMANDS, "sh")
    for line in "".join(earlier).splitlines():
        run(line)
    schema = ("--schema", "schema.toml", "--method", "apfl", "--width", 8, "--refinement-width", 8)
    trained = fedsolve("train", "north.csv", "south.csv", *schema, "--out", "shared.safetensors")
    assert trained.exit_code == 0, trained.output
    run(personal.strip())
    assert fs.load_model(tmp_path / "north.safetensors").private


def test_make_and_the_experiment_that_readme_names_are_there() -> None:
    for target, does in (("demo", "fedsolve demo"), ("test", "pytest"), ("docs", "sphinx -W")):
        assert f"make {target}" in README
        told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert does in told.stdout
    (path,) = re.findall(r"fedsolve experiment run (\S+\.toml)", README)
    methods = {cell.method.name for cell in read_experiment(ROOT / path).cells()}
    gradient = (ROOT / "docs" / "how-to-gradient.md").read_text()
    table = README.partition("## What comes out")[2]
    for name, numbers in re.findall(r"^\| (\w+)[^|]*\|((?: [\d.]+ \|)+)$", table, flags=re.MULTILINE):
        assert name in methods or f"{name} (T = 5)" in methods or any(name in each for each in methods)
        assert numbers.split(" | ")[0].strip(" |") in gradient


def test_links_are_absolute_for_a_package_index() -> None:
    base = "https://example.org/fedsolve"
    text = absolute(README, base)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", README)) > 30
    assert all(link.startswith("https://") for link in links)
    assert f"]({base}/raw/main/docs/invariance.svg)" in text
    assert f"]({base}/blob/main/docs/how-it-works.md#honest-limits)" in text


def test_readme_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 100
