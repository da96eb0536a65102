"""Runs the commands of docs/three-sites-one-model.md as they stand there, each machine a folder and a shell.

    python -m tests.network.security.tutorial [--fresh]

With --fresh every machine makes its environment by the page's own commands, from a wheel of this checkout;
otherwise the environment of the running interpreter is used and the block marked `install` is left out.

The page's code blocks say where they run: `sh MACHINE [install|starts]`, MACHINE being server, north, south,
west, sites (all three) or every (all four). Blocks of several machines run at the same time. A block that
`starts` something is not waited for before the next one, only until it says that sites may connect. Blocks
`text carry` name files to be copied between machines.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from .processes import QUIET, free_ports

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "three-sites-one-model.md"
SITES = ("north", "south", "west")
GROUPS = {"sites": SITES, "every": ("server", *SITES)}
READY = "sites may connect"
PATIENCE = 600.0


@dataclass(frozen=True)
class Block:
    """A code block of the page: its words after the opening fence, and its text."""

    words: tuple[str, ...]
    text: str

    @property
    def machines(self) -> tuple[str, ...]:
        return GROUPS.get(self.words[1], (self.words[1],))


def blocks(page: str) -> list[Block]:
    """The blocks to run or to carry, in the page's order."""
    found = re.findall(r"^```(sh|text)((?: \w+)+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [Block((kind, *words.split()), text) for kind, words, text in found]


class Machine:
    """A folder with a shell in it that stays open, as a terminal does."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        self.name, self.folder = name, folder
        self.log = folder / "terminal.log"
        self._done = 0
        folder.mkdir(parents=True)
        own = {"HOME": str(folder), "FEDSOLVE_STORE": str(folder / "store")}
        with open(self.log, "wb") as out:
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc", "-eu", "-o", "pipefail"],
                cwd=folder,
                env=environment | own | ({"SITE": name} if name in SITES else {}),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def begin(self, text: str) -> None:
        """Type the block; it runs when what was typed before has ended."""
        self._done += 1
        script = self.folder / f"block-{self._done}.sh"
        script.write_text(text)
        assert self._shell.stdin is not None
        marker = self.folder / f"done-{self._done}"
        self._shell.stdin.write(f". ./{script.name} </dev/null\ntouch {marker.name}\n".encode())
        self._shell.stdin.flush()

    def finish(self) -> None:
        """Wait until everything typed has ended well."""
        self.wait(lambda: (self.folder / f"done-{self._done}").exists())

    def wait(self, happened: object) -> None:
        assert callable(happened)
        end = time.monotonic() + PATIENCE
        while not happened():
            if self._shell.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"at {self.name}:\n{self.said()[-4000:]}")
            time.sleep(0.1)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End the shell and all it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._shell.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()


def carry(line: str, machines: dict[str, Machine]) -> None:
    """Copy `MACHINE:FILE -> MACHINE:FILE`, where one side may be all sites."""
    source, target = (end.strip().split(":") for end in line.split("->"))
    for site in SITES if "sites" in (source[0], target[0]) else ("",):
        ends = []
        for machine, path in (source, target):
            folder = machines[site if machine == "sites" else machine].folder
            ends.append(folder / path.replace("$SITE", site))
        shutil.copyfile(*ends)


def run(folder: Path, *, server: str, fresh: bool, page: str | None = None) -> dict[str, Machine]:
    """Follow the page on machines that are folders here; gives them, closed, with what they printed."""
    environment = {
        "PATH": os.environ["PATH"] if fresh else f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "SERVER": server,
        "PORT": str(free_ports(1)[0]),
        "COLUMNS": "120",
        **QUIET,
    }
    if fresh:
        environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= _wheel(folder)
    else:
        environment["PYTHONPATH"] = str(ROOT / "src")
    with ExitStack() as stack:
        machines: dict[str, Machine] = {}
        for name in GROUPS["every"]:
            machines[name] = Machine(name, folder / name, environment)
            stack.callback(machines[name].close)
        for block in blocks(page or PAGE.read_text()):
            if block.words[:2] == ("text", "carry"):
                for each in machines.values():
                    each.finish()
                for line in block.text.splitlines():
                    carry(line, machines)
                continue
            if "install" in block.words and not fresh:
                continue
            for name in block.machines:
                machines[name].begin(block.text)
            for name in block.machines:
                if "starts" in block.words:
                    machines[name].wait(lambda each=machines[name]: READY in each.said())
                else:
                    machines[name].finish()
        for each in machines.values():
            each.finish()
    return machines


def _wheel(folder: Path) -> dict[str, str]:
    """pip settings under which `pip install fedsolve` finds a wheel of this checkout."""
    wheels = folder / "wheels"
    line = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(ROOT),
    ]
    subprocess.run(line, check=True)
    links = f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    return {"PIP_FIND_LINKS": links, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="make the environments, as the page says")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for machine in run(Path(folder), server="localhost", fresh=given.fresh).values():
            print(f"\n===== {machine.name} =====\n{machine.said()}")


if __name__ == "__main__":
    main()
