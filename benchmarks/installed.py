"""fedsolve as people get it: built, installed into an empty environment, and tried there.

    python -m benchmarks.installed [--experiments small] [--extras flower,privacy] [--json FILE]

Builds wheel and source archive of this checkout, installs the wheel (with the versions of constraints.txt)
into a new environment, and prints how large that is, how long `import fedsolve` and `fedsolve --version`
take, and how the demo and the small experiments fare there. Seconds are of the processor, the least of
several starts, so that other work on the machine counts little. `--experiments` may name one of them:
small/afl-table-a1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import progress

ROOT = Path(__file__).parents[1]
STARTS = 7
READY = "import fedsolve; fedsolve.LocalFederation, fedsolve.DeepAFL"
GOALS = {"import fedsolve": 0.5, "fedsolve --version": 0.7}
"""Seconds that people do not notice."""


@dataclass(frozen=True)
class Environment:
    """An environment that knows nothing of this checkout, and a folder to work in."""

    folder: Path
    work: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def line(self, *words: str) -> list[str]:
        """A `fedsolve` command of this environment."""
        return [str(self.folder / "bin" / "fedsolve"), *words]

    def run(self, line: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        told = subprocess.run(
            line, cwd=self.work, env=self._clean(), capture_output=True, text=True, **settings
        )
        if told.returncode:
            raise RuntimeError(f"{' '.join(line)} ended with {told.returncode}:\n{told.stdout}{told.stderr}")
        return told

    def seconds(self, line: Sequence[str], starts: int = STARTS) -> float:
        """Processor seconds of a command: the least of several starts, after one that compiles."""
        found = []
        for _ in range(starts + 1):
            before = _children()
            self.run(line)
            found.append(_children() - before)
        return min(found[1:])

    def _clean(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDSOLVE"))
        }
        home = {"HOME": str(self.work), "FEDSOLVE_STORE": str(self.work / "store")}
        return kept | home | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and source archive of this checkout, the wheel built from the archive as pip would."""
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    pip = [str(tools / "bin/python"), "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "install", *quiet, "hatchling"], check=True)
    hatch = [str(tools / "bin/python"), "-m", "hatchling", "build", "-d", str(folder / "dist"), "-t", "sdist"]
    subprocess.run(hatch, cwd=ROOT, check=True, capture_output=True)
    (archive,) = (folder / "dist").glob("*.tar.gz")
    line = [*pip, "wheel", *quiet, "--no-deps", "--no-build-isolation", "-w", str(folder / "dist")]
    subprocess.run([*line, str(archive)], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, archive


def install(folder: Path, wheel: Path, extras: str = "") -> Environment:
    """A new environment with this wheel and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
    made = Environment(folder / "environment", folder / "work")
    made.work.mkdir()
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([made.python, "-m", "pip", "install", *quiet, what], check=True)
    made.run([made.python, "-m", "pip", "check"])
    return made


def measured(made: Environment) -> dict[str, Any]:
    """Size of the environment, and processor seconds of the two starts."""
    listed = made.run([made.python, "-m", "pip", "list", "--format", "json"]).stdout
    return {
        "packages": len(json.loads(listed)),
        "megabytes": round(_size(made.folder) / 1e6, 1),
        "fedsolve_megabytes": round(_size(next(made.folder.glob("lib/*/site-packages/fedsolve"))) / 1e6, 1),
        "seconds": {
            "import fedsolve": made.seconds([made.python, "-c", "import fedsolve"]),
            "fedsolve, ready to train": made.seconds([made.python, "-c", READY]),
            "fedsolve --version": made.seconds(made.line("--version")),
            "fedsolve train --help": made.seconds(made.line("train", "--help"), 3),
        },
    }


def tried(made: Environment, experiments: str) -> dict[str, Any]:
    """The demo and the experiments in this environment: seconds, cells that ran, and those left out."""
    started = time.perf_counter()
    made.run(made.line("demo"))
    demo = time.perf_counter() - started
    progress(f"demo: {demo:.0f} s")
    started = time.perf_counter()
    told = made.run(made.line("experiment", "run", experiments, "--json"))
    runs = json.loads(told.stdout)["runs"]
    left_out: dict[str, int] = {}
    for run in runs:
        for method, cells in run["left_out"].items():
            left_out[method] = left_out.get(method, 0) + cells
    return {
        "demo_seconds": demo,
        "experiments": len(runs),
        "cells_run": sum(run["ran"] for run in runs),
        "cells_left_out": left_out,
        "experiment_seconds": time.perf_counter() - started,
        "told": told.stderr.strip(),
    }


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experiments", default="small", help="what `fedsolve experiment run` is given")
    parser.add_argument("--extras", default="", help="extras to install, such as flower,privacy")
    parser.add_argument("--json", help="write the numbers to this file as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("building")
        wheel, archive = build(folder)
        progress("installing")
        made = install(folder, wheel, given.extras)
        found = {
            "wheel_megabytes": round(wheel.stat().st_size / 1e6, 2),
            "archive_megabytes": round(archive.stat().st_size / 1e6, 2),
            "extras": given.extras,
            **measured(made),
            **tried(made, given.experiments),
        }
    for name, seconds in found["seconds"].items():
        goal = f" (goal: below {GOALS[name]})" if name in GOALS else ""
        print(f"{name:24} {seconds:.2f} s{goal}")
    for name in ("wheel_megabytes", "archive_megabytes", "packages", "megabytes", "fedsolve_megabytes"):
        print(f"{name.replace('_', ' '):24} {found[name]}")
    print(f"{'demo':24} {found['demo_seconds']:.0f} s")
    print(
        f"{given.experiments:24} {found['experiments']} experiments, {found['cells_run']} cells in "
        f"{found['experiment_seconds']:.0f} s\n{found['told']}"
    )
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
