"""fedsolve as people get it: built, installed into an empty environment, and tried there.

    python -m benchmarks.installed [--experiments small] [--with network] [--json FILE]
    python -m benchmarks.installed --smoke [--lowest] [--python python3.12] [--base URL]
    python -m benchmarks.installed --extras [NAME ...] [--json FILE]

Builds wheel and source archive of this checkout, installs the wheel (with the versions of constraints.txt)
into a new environment, and prints how large that is, how long `import fedsolve` and `fedsolve --version`
take, and how the demo and the small experiments fare there. Seconds are of the processor, the least of
several starts, so that other work on the machine counts little. `--experiments` may name one of them:
small/afl-table-a1.

`--smoke` tries what people do first instead: demo, training, a regression, an export, a network of three
sites. It prints with which versions they ran. `--lowest` installs the oldest versions that pyproject.toml
allows, and `--dist` keeps wheel and archive. `--base` is where the repository can be read: links of the
README become absolute, and the metadata name it.

`--extras` makes an environment for every extra, or for those that are named, runs its first command of
docs/install.md there, and prints the table of docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import progress, save

ROOT = Path(__file__).parents[1]
STARTS = 7
SMOKE = ("network", "statistics", "privacy", "onnx", "export")
"""Extras of a smoke test: all that need neither torch nor a cluster."""
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

    def start(self, line: Sequence[str]) -> subprocess.Popen[str]:
        """A command that goes on."""
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(line, cwd=self.work, env=self._clean(), **said)

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
        home = {"HOME": str(self.work), "FEDSOLVE_STORE": str(self.work / "store"), "WANDB_MODE": "offline"}
        return kept | home | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}


def absolute(text: str, base: str) -> str:
    """A README for a package index: its links and pictures lead to the repository at `base`."""

    def lead(found: re.Match[str]) -> str:
        mark, told, link = found.groups()
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        return f"{mark}[{told}]({base.rstrip('/')}/{'raw' if mark else 'blob'}/main/{link})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", lead, text)


def with_base(archive: Path, base: str, folder: Path) -> Path:
    """The unpacked archive, with links that lead to `base` and a metadata entry that names it."""
    shutil.unpack_archive(archive, folder, filter="data")
    (source,) = folder.iterdir()
    readme, project = source / "README.md", source / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), base))
    urls = {"Repository": base, "Changelog": f"{base}/blob/main/CHANGELOG.md", "Issues": f"{base}/issues"}
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    project.write_text(f"{project.read_text()}\n[project.urls]\n{lines}")
    return source


def build(folder: Path, base: str | None = None) -> tuple[Path, Path]:
    """Wheel and source archive of this checkout, the wheel built from the archive as pip would."""
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    pip = [str(tools / "bin/python"), "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "install", *quiet, "hatchling"], check=True)
    hatch = [str(tools / "bin/python"), "-m", "hatchling", "build", "-d", str(folder / "dist"), "-t", "sdist"]
    subprocess.run(hatch, cwd=ROOT, check=True, capture_output=True)
    (archive,) = (folder / "dist").glob("*.tar.gz")
    if base:
        source = with_base(archive, base, folder / "source")
        subprocess.run(hatch, cwd=source, check=True, capture_output=True)
    line = [*pip, "wheel", *quiet, "--no-deps", "--no-build-isolation", "-w", str(folder / "dist")]
    subprocess.run([*line, str(archive)], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, archive


def check_metadata(wheel: Path) -> None:
    """Refuse a wheel whose page on a package index would lack something."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(opened.read(name))
    for field in ("Name", "Version", "Summary", "License-Expression", "Author", "Requires-Python"):
        if not about[field]:
            raise RuntimeError(f"the wheel's metadata have no {field}")


def lowest(folder: Path) -> Path:
    """Constraints that hold every direct dependency at the oldest version that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in SMOKE for line in project["optional-dependencies"][extra]),
    ]
    floors = {re.split(r"[>=<\[]", line)[0]: line.partition(">=")[2].partition(",")[0] for line in lines}
    path = folder / "lowest.txt"
    path.write_text("".join(f"{name}=={floor}\n" for name, floor in floors.items() if floor))
    return path


def install(
    folder: Path,
    wheel: Path,
    extras: str = "",
    python: str = sys.executable,
    constraints: Path = ROOT / "constraints.txt",
) -> Environment:
    """A new environment with this wheel and nothing else."""
    subprocess.run([python, "-m", "venv", str(folder / "environment")], check=True)
    made = Environment(folder / "environment", folder / "work")
    made.work.mkdir()
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    quiet = ["--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    subprocess.run([made.python, "-m", "pip", "install", *quiet, what], check=True)
    made.run([made.python, "-m", "pip", "check"])
    return made


def measured(made: Environment) -> dict[str, Any]:
    """Size of the environment, and processor seconds of the two starts."""
    return {
        "packages": len(_packages(made)),
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


def make_table(folder: Path) -> None:
    """Patients of three hospitals, and a file for each of them."""
    rng = np.random.default_rng(0)
    names, rows = ("north", "south", "west"), 900
    age, dose = rng.normal(60, 10, rows), rng.normal(5, 2, rows)
    ill = age + 4 * dose + rng.normal(0, 10, rows) > 80
    lines = [f"{names[n % 3]},{age[n]:.1f},{dose[n]:.2f},{'yes' if ill[n] else 'no'}" for n in range(rows)]
    head = "hospital,age,dose,outcome"
    (folder / "patients.csv").write_text("\n".join([head, *lines]) + "\n")
    for name in names:
        own = [line for line in lines if line.startswith(name)]
        (folder / f"{name}.csv").write_text("\n".join([head, *own]) + "\n")


def network(made: Environment) -> None:
    """Keys, a server and three sites on this machine; ends when all have ended well."""
    names, place = ("north", "south", "west"), f"127.0.0.1:{_free_port()}"
    made.run(made.line("keys", "init", "--host", "127.0.0.1"))
    for name in names:
        made.run(made.line("keys", "client", name))
    public = [f"keys/clients/{name}.pub" for name in names]
    made.run(made.line("keys", "register", *public))
    made.run(made.line("keys", "roster", *public))
    server = made.line(
        "server", "--listen", place, "--clients", "3", "--classes", "no,yes", "--method", "afl"
    )
    lines = [[*server, "--out", "joint.safetensors"]]
    for name in names:
        site = ("--server", place, "--name", name, "--data", f"{name}.csv", "--label", "outcome", "--drop")
        lines.append(made.line("client", *site, "hospital", "--once"))
    started = [made.start(line) for line in lines]
    for line, process in zip(lines, started, strict=True):
        told, _ = process.communicate(timeout=180)
        if process.returncode:
            raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}:\n{told}")


TINY_VIT = """
from transformers import ViTConfig, ViTImageProcessor, ViTModel
small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32)
ViTModel(ViTConfig(patch_size=8, **small)).save_pretrained("my-vit")
ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("my-vit")
"""
TINY_ONNX = """
import onnx
from onnx import TensorProto, helper
images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 16, 16])
features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 768])
graph = helper.make_graph([helper.make_node("Flatten", ["images"], ["features"])], "g", [images], [features])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "net.onnx")
"""
TABLE = ("patients.csv", "--label", "outcome", "--client-column", "hospital")
FIRST: dict[str, list[Sequence[str]]] = {
    "network": [("keys", "init", "--host", "127.0.0.1")],
    "privacy": [("train", *TABLE, "--method", "afl", "--secure", "--out", "secure.safetensors")],
    "statistics": [
        ("glm", "outcome ~ age", "patients.csv", "--client-column", "hospital", "--family", "binomial")
    ],
    "torch": [("train", "digits", "--method", "fedavg", "--rounds", "5", "--clients", "5")],
    "efficientnet": [("features", "build", "folder:./images", "--backbone", "efficientnet-lite0")],
    "hf": [("python", "-c", TINY_VIT), ("features", "build", "folder:./images", "--backbone", "hf:./my-vit")],
    "onnx": [
        ("here", "-c", TINY_ONNX),
        ("features", "build", "folder:./images", "--backbone", "onnx:net.onnx"),
    ],
    "export": [
        ("train", *TABLE, "--method", "afl", "--out", "model.safetensors"),
        ("export", "model.safetensors", "--onnx", "model.onnx"),
    ],
    "ray": [("train", "digits", "--engine", "ray", "--method", "afl", "--clients", "5")],
    "flower": [
        ("python", "-c", "from fedsolve.cli.flower_apps import client, server; print(server, client)")
    ],
    "tensorboard": [("train", "digits", "--method", "afl", "--tracker", "tensorboard:runs")],
    "mlflow": [("train", "digits", "--method", "afl", "--tracker", "mlflow:sqlite:///runs.db")],
    "wandb": [("train", "digits", "--method", "afl", "--tracker", "wandb:first")],
}
"""What is run in an environment with this extra alone. "python" is its own, "here" the one that runs this."""


def make_images(folder: Path) -> None:
    """Six small pictures in two classes."""
    from PIL import Image

    for kind, colour in (("dark", 40), ("light", 200)):
        (folder / "images" / kind).mkdir(parents=True)
        for number in range(3):
            picture = Image.new("RGB", (32, 32), (colour, colour, 40 * number))
            picture.save(folder / "images" / kind / f"{number}.png")


def first_commands(wheel: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every extra in an environment of its own: its size, and whether its first command ran."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder, started = Path(place), time.perf_counter()
            told = {"extra": name, "ran": "yes"}
            try:
                made = install(folder, wheel, name)
                make_table(made.work)
                make_images(made.work)
                for words in FIRST[name]:
                    own = {"python": [made.python], "here": [sys.executable]}.get(words[0])
                    made.run([*own, *words[1:]] if own else made.line(*words), timeout=600)
                told |= {"packages": len(_packages(made)), "megabytes": round(_size(made.folder) / 1e6)}
            except (RuntimeError, subprocess.SubprocessError) as failed:
                told["ran"] = f"no: {str(failed).strip().splitlines()[-1][:120]}"
            told["command"] = "fedsolve " + " ".join(FIRST[name][-1])
            if FIRST[name][-1][0] == "python":
                told["command"] = f"python -c '{FIRST[name][-1][2]}'"
            progress(f"{name}: {told['ran']}, {time.perf_counter() - started:.0f} s")
            found.append(told)
    return found


def _packages(made: Environment) -> dict[str, str]:
    listed = json.loads(made.run([made.python, "-m", "pip", "list", "--format", "json"]).stdout)
    return {each["name"]: each["version"] for each in listed}


def smoke(made: Environment) -> dict[str, str]:
    """The first things that people do, as far as they need no torch; the versions with which they worked."""
    make_table(made.work)
    data = ("patients.csv", "--label", "outcome", "--client-column", "hospital")
    for line in (
        ("--version",),
        ("demo", "--clients", "8"),
        ("train", *data, "--out", "model.safetensors"),
        ("evaluate", "model.safetensors", "patients.csv"),
        ("predict", "model.safetensors", "patients.csv", "--probabilities", "--out", "predictions.csv"),
        ("train", *data, "--method", "afl", "--secure", "--out", "secure.safetensors"),
        (
            "glm",
            "outcome ~ age + dose",
            "patients.csv",
            "--client-column",
            "hospital",
            "--family",
            "binomial",
        ),
        ("export", "model.safetensors", "--onnx", "model.onnx"),
    ):
        progress(f"fedsolve {' '.join(line)}")
        made.run(made.line(*line))
    progress("a network of three sites")
    network(made)
    return _packages(made)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experiments", default="small", help="what `fedsolve experiment run` is given")
    parser.add_argument("--with", dest="chosen", default="", help="extras to install, such as network")
    parser.add_argument(
        "--extras", nargs="*", metavar="NAME", help="the first command of every extra, or of these"
    )
    parser.add_argument("--base", help="where the repository can be read: https://HOST/OWNER/NAME")
    parser.add_argument("--json", help="write the numbers to this file as well")
    parser.add_argument(
        "--smoke", action="store_true", help="try the first things that people do, and no more"
    )
    parser.add_argument("--lowest", action="store_true", help="with the oldest versions that are allowed")
    parser.add_argument("--dist", type=Path, help="keep wheel and archive here")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the new environment")
    given = parser.parse_args()
    if given.extras is not None:
        with tempfile.TemporaryDirectory() as name:
            wheel, _ = build(Path(name))
            found = first_commands(wheel, given.extras or list(FIRST))
        print("| extra | packages | MB | first command | ran |\n|---|---|---|---|---|")
        for each in found:
            sizes = f"{each.get('packages', '')} | {each.get('megabytes', '')}"
            print(f"| `{each['extra']}` | {sizes} | `{each['command']}` | {each['ran']} |")
        save(given.json, found)
        sys.exit(any(each["ran"] != "yes" for each in found))
    if given.smoke:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            wheel, archive = build(folder, given.base)
            check_metadata(wheel)
            if given.dist is not None:
                given.dist.mkdir(exist_ok=True)
                for path in (wheel, archive):
                    print(shutil.copy(path, given.dist))
            constraints = lowest(folder) if given.lowest else ROOT / "constraints.txt"
            made = install(folder, wheel, ",".join(SMOKE), given.python, constraints)
            versions = smoke(made)
        for name in (
            "fedsolve",
            "numpy",
            "scipy",
            "scikit-learn",
            "pyarrow",
            "click",
            "httpx",
            "cryptography",
        ):
            print(f"{name:24} {versions[name]}")
        print("all of it ran")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("building")
        wheel, archive = build(folder)
        progress("installing")
        made = install(folder, wheel, given.chosen)
        found = {
            "wheel_megabytes": round(wheel.stat().st_size / 1e6, 2),
            "archive_megabytes": round(archive.stat().st_size / 1e6, 2),
            "extras": given.chosen,
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
    save(given.json, found)


if __name__ == "__main__":
    main()
