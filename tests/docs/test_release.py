"""Wheel and source archive: built, installed where nothing else is, and used from a folder of its own."""

from __future__ import annotations

import json
import shlex
import tarfile
import zipfile
from pathlib import Path

import pytest
from benchmarks.installed import Environment, build, install

import fedsolve
from fedsolve.experiments.reading import shipped
from tests.docs.test_readme import README, ROOT, blocks, make_tables

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def core(built, tmp_path_factory) -> Environment:
    """The core: no extra, so neither torch nor flwr."""
    return install(tmp_path_factory.mktemp("core"), built[0])


def test_wheel_and_archive_hold_what_people_need(built):
    wheel, archive = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"fedsolve"}
    inside = {name.partition("/")[2] for name in names if name.startswith("fedsolve/")}
    source = ROOT / "src" / "fedsolve"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert inside == {name for name in files if "__pycache__" not in name}
    assert {"py.typed", "experiments/papers.json", "experiments/small/afl-table-1.toml"} <= inside
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "LICENSE",
        "constraints.txt",
        "deploy/Containerfile",
        "docs/index.md",
        "tests/oracle.py",
    } <= packed


def test_the_core_starts_without_what_it_does_not_need(core):
    assert core.run(core.line("--version")).stdout == f"fedsolve {fedsolve.__version__}\n"
    ready = "import sys, fedsolve as fs; fs.DeepAFL(); print({'sklearn', 'matplotlib'} & set(sys.modules))"
    assert core.run([core.python, "-c", ready]).stdout.strip() == "set()"


def test_readme_is_true_of_the_core(core):
    (code,) = blocks(README, "python")
    core.run([core.python, "-c", code])
    make_tables(core.work)
    first, _network = blocks(README, "sh")
    for line in first.splitlines():
        core.run(core.line(*shlex.split(line, comments=True)[1:]))
    assert len((core.work / "predictions.csv").read_text().splitlines()) == 21
    core.run(core.line("demo", "--clients", "8"))
    assert (core.work / "fedsolve-demo" / "demo.png").exists()


def test_small_experiments_run_as_far_as_they_can(core):
    def run(name: str):
        told = core.run(core.line("experiment", "run", name, "--json"))
        return json.loads(told.stdout)["runs"], told.stderr

    (whole,), said = run("small/deepafl-table-03")
    assert whole["ran"] == whole["total"]
    assert said == ""
    (part,), said = run("small/deepafl-table-01")
    assert 0 < part["ran"] < part["total"]
    assert part["ran"] + sum(part["left_out"].values()) == part["total"]
    assert "torch is not installed here" in said
    assert "FedAvg" in said
    assert "pip install 'fedsolve[torch]'" in said
    listed = json.loads(core.run(core.line("experiment", "list", "small", "--json")).stdout)
    assert len(listed["experiments"]) == len(shipped("small"))
    core.run(core.line("experiment", "table", "runs/small-deepafl-table-01"))
    with pytest.raises(RuntimeError, match="nothing was run"):
        core.run(core.line("experiment", "run", "small/flfa-table-01"))
