"""docs/how-to-own-method.md: its two methods in a package outside the repository, used everywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from tests.network.security.processes import free_port, running

PAGE = (Path(__file__).parents[2] / "docs" / "how-to-own-method.md").read_text()

pytestmark = [pytest.mark.torch]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with the package `own` and the experiment of the page."""
    means, check, smooth = blocks("python")
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "means.py").write_text(means)
    (package / "smooth.py").write_text(smooth)
    (tmp_path / "check.py").write_text(
        check + "\nfrom own.smooth import Smooth\n\nprint(check_method(Smooth))\n"
    )
    (tmp_path / "own.toml").write_text(blocks("toml")[0])
    return tmp_path


def run(folder: Path, *words: str, code: int = 0) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder}",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_methods_are_short() -> None:
    means, _, smooth = blocks("python")
    assert len(means.splitlines()) <= 40
    assert len(smooth.splitlines()) <= 30


@pytest.mark.slow
def test_the_methods_keep_the_laws_and_all_commands_run(outside: Path) -> None:
    checked = run(outside, "check.py").splitlines()
    assert "'partition'" in checked[0]
    assert "'partition'" not in checked[1]
    assert all("'resume'" in line and "'gathers'" in line for line in checked)
    commands = [line for line in blocks("sh")[0].splitlines() if line]
    assert len(commands) == 7
    printed = [run(outside, "-m", *shlex.split(command)) for command in commands]
    assert "own.means:NearestMean" in printed[0]
    assert len((outside / "predictions.csv").read_text().splitlines()) > 100
    report = (outside / "report.html").read_text()
    assert all(name in report for name in ("Nearest mean", "Smoothed labels", "DeepAFL", "FedAvg"))


OWN_MODEL = """
from dataclasses import dataclass
from own.means import NearestMean
from fedsolve.extend import Model


class Distances(Model):
    def __init__(self, means, classes):
        super().__init__(means.shape[0], classes, means.shape[1])
        self.means = means

    def scores(self, features):
        return -((features[:, :, None] - self.means) ** 2).sum(axis=1)


@dataclass(frozen=True)
class ByDistance(NearestMean):
    def solve(self, total, spec):
        return Distances(super().solve(total, spec).weight, spec.classes)
"""


@pytest.mark.slow
def test_a_model_file_does_not_choose_what_is_imported(outside: Path) -> None:
    (outside / "own" / "distance.py").write_text(OWN_MODEL)
    train = ("-m", "fedsolve", "train", "digits", "--clients", "2", "--method", "own.distance:ByDistance")
    run(outside, *train, "--out", "m.safetensors")
    evaluate = ("-m", "fedsolve", "evaluate", "m.safetensors", "digits")
    told = " ".join(run(outside, *evaluate, code=2).split())
    assert "'own.distance:Distances' would import" in told
    assert "--allow-method" in told
    assert "accuracy" in run(outside, *evaluate, "--allow-method", "own.distance:ByDistance")
    assert "NotAllowed" in run(outside, "-c", "import fedsolve as f; f.load_model('m.safetensors')", code=1)
    leave = "allow_methods=['own.distance:ByDistance']"
    run(outside, "-c", f"import fedsolve as f; f.load_model('m.safetensors', {leave})")


COMMANDS = """
import json, sys
from click.testing import CliRunner
from fedsolve.cli.main import main
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    print(done.exit_code, *done.stderr.split())
"""


@pytest.mark.slow
def test_mistakes_are_named(outside: Path) -> None:
    cases = {
        "own.means:NearestMaen": "Did you mean 'NearestMean'?",
        "own.mean:NearestMean": "there is no module 'own.mean'",
        "own.means:np": "has no class 'np'",
        "nearest-mean": "unknown method 'nearest-mean'",
        "own.means:NearestMean --pull 2": "pull must be",
    }
    words = [["train", "digits", "--method", *method.split()] for method in cases]
    said = run(outside, "-c", COMMANDS, json.dumps(words)).splitlines()
    for line, expected in zip(said, cases.values(), strict=True):
        assert line.startswith("2 ")
        assert expected in line


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("allowed", [True, False])
def test_sites_run_a_method_only_if_they_allowed_it(
    outside: Path, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes on 127.0.0.1: two sites and a server that names the method."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    features = rng.normal(size=(60, 5)) + labels[:, None]
    address, name = f"127.0.0.1:{free_port()}", "own.means:NearestMean"
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{outside}")
    monkeypatch.chdir(outside)
    leave = ("--allow-method", name) if allowed else ()
    with ExitStack() as stack:

        def start(log: str, *words: str) -> subprocess.Popen[bytes]:
            line = [sys.executable, "-m", "fedsolve", *words]
            return stack.enter_context(running(line, outside / f"{log}.log", home=outside))

        server = start(
            *(
                "server",
                "server",
                "--listen",
                address,
                "--insecure",
                "--plain",
                "--clients",
                "2",
                "--classes",
                "0,1,2",
            ),
            *("--patience", "120", "--state", "state", "--out", "model.safetensors", "--method", name),
        )
        for place, site in enumerate(("north", "south")):
            rows = slice(30 * place, 30 * place + 30)
            np.savez(outside / f"{site}.npz", x=features[rows], y=labels[rows])
            start(
                *(site, "client", "--server", address, "--insecure", "--plain", "--name", site, "--once"),
                *("--data", f"{site}.npz", "--state", f"state-{site}", *leave),
            )
        code = server.wait(timeout=180)
    if not allowed:
        assert code != 0
        told = (outside / "server.log").read_text() + (outside / "north.log").read_text()
        assert f"--allow-method {name}" in " ".join(told.split())
        return
    assert code == 0, (outside / "server.log").read_text()
    sys.path.insert(0, str(outside))
    try:
        method = registry.method_class(name)()
        owners = np.arange(60) // 30
        local = method.fit(fs.LocalFederation.from_arrays(features, labels, owners))
    finally:
        sys.path.remove(str(outside))
        sys.modules.pop("own.means"), sys.modules.pop("own")
    assert np.array_equal(fs.load_model(outside / "model.safetensors").weight, local.weight)
