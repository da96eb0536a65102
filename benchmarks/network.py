"""`python -m benchmarks.network [exchange|large|virtual]`: what a federation over Flower costs.

exchange   seconds per exchange with nodes that are small processes of this machine
large      memory of the server process while answers of hundreds of megabytes are summed
virtual    AFL over many virtual clients, by the local engine and in Ray
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from fedsolve.closedform.deepafl_client import KIND
from fedsolve.network.flower import FlowerFederation
from fedsolve.network.link import RuntimeLink
from fedsolve.network.service import serving
from fedsolve.network.superlink import free_port

CLASSES = 10


@contextmanager
def federation(nodes: int, rows: int, features: int, secure: bool) -> Iterator[tuple[RuntimeLink, Path]]:
    """A server in this process and sites as processes of their own, with random rows."""
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        address = f"127.0.0.1:{free_port()}"
        keys = _keys(folder, nodes) if secure else None
        link = stack.enter_context(serving(folder / "server", address, keys))
        rng = np.random.default_rng(0)
        for number in range(nodes):
            labels = np.arange(rows) % CLASSES
            np.savez(folder / f"site-{number}.npz", x=rng.standard_normal((rows, features)), y=labels)
            words = ["client", "--server", address, "--name", f"site-{number}"]
            words += ["--plain"]
            words += ["--insecure"] if keys is None else ["--keys", str(keys)]
            words += [
                "--data",
                str(folder / f"site-{number}.npz"),
                "--state",
                str(folder / f"state-{number}"),
            ]
            stack.enter_context(_process([sys.executable, "-m", "fedsolve", *words], folder / "sites.log"))
        yield link, folder


def _keys(folder: Path, nodes: int) -> Path:
    from fedsolve.network import certificates, security
    from fedsolve.network.keyfolder import Keys

    keys = Keys(folder / "keys")
    certificates.create_authority(keys, ["localhost"])
    for number in range(nodes):
        security.create_client(keys, f"site-{number}")
        security.register(keys, keys.client_public_key(f"site-{number}"))
    return keys.folder


@contextmanager
def _process(line: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Memory:
    """Anonymous memory of processes, sampled beside the work: megabytes at the start, and the peak."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids or (os.getpid(),)
        self._stop = threading.Event()
        self.start = self.peak = 0.0

    def __enter__(self) -> Memory:
        self.start = self.peak = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> float:
        return self.peak - self.start

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._now())

    def _now(self) -> float:
        return sum(_anonymous(pid) for pid in self._pids)


def _anonymous(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1e3
    except OSError:
        pass  # ended meanwhile
    return 0.0


def _family(pid: int) -> list[int]:
    """A process and everything it started."""
    found, parents = [pid], {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    for child, parent in sorted(parents.items()):
        if parent in found:
            found.append(child)
    return found


def _table(title: str, columns: tuple[str, ...], lines: list[tuple[Any, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in line))
    Console(width=120, highlight=False).print(table)


@click.group()
def main() -> None:
    """What a federation over Flower costs."""


@main.command()
@click.option("--nodes", default=4, show_default=True)
@click.option("--layers", default=6, show_default=True, help="Exchanges to measure.")
@click.option("--width", default=128, show_default=True)
@click.option("--insecure", is_flag=True, help="Without TLS and authentication.")
def exchange(nodes: int, layers: int, width: int, insecure: bool) -> None:
    """Seconds per exchange of DeepAFL's single plan, small terms."""
    with federation(nodes, 200, 32, not insecure) as (link, _):
        engine = FlowerFederation(link, clients=nodes, classes=list(range(CLASSES)))
        model = fs.DeepAFL(layers=layers, width=width).fit(engine)
    seconds = [record.seconds for record in model.history]
    title = f"{nodes} nodes, width {width}, {'plain HTTP' if insecure else 'TLS and authentication'}"
    lines = [(min(seconds), float(np.median(seconds)), max(seconds))]
    _table(f"seconds per exchange: {title}", ("least", "median", "most"), lines)


@main.command()
@click.option("--nodes", default=2, show_default=True)
@click.option("--width", default=4096, show_default=True, help="4096 makes terms of 201 MB.")
@click.option("--insecure", is_flag=True, help="Without TLS and authentication.")
def large(nodes: int, width: int, insecure: bool) -> None:
    """Memory of the server process while large terms of the single plan are summed.

    Only the exchange is measured, not what a method does with the sum. The limit is three terms.
    """
    with federation(nodes, 64, 16, not insecure) as (link, _):
        engine = FlowerFederation(link, clients=nodes, classes=list(range(CLASSES)))
        run = fs.DeepAFL(layers=1, width=width, exchange="single").start(engine.describe())
        ask = ["hidden_gram", "hidden_feature", "hidden_cross"]
        note = {"phase": "block", "ask": ask, "track": False}
        request = run.ask(KIND, 0, engine.clients, note)
        with Memory() as memory:
            total = engine.exchange(request, run.chain)
    term = total.bytes_up / nodes / 1e6
    lines = [(nodes, term, total.seconds, memory.start, memory.grown, memory.grown / term)]
    columns = ("nodes", "MB per term", "seconds", "idle MB", "peak above idle MB", "in terms")
    _table(f"width {width}, single plan, {'plain HTTP' if insecure else 'TLS'}", columns, lines)
    if memory.grown > 3 * term:
        raise click.ClickException(f"{memory.grown / term:.2f} terms above idle; the limit is 3.")


@main.command()
@click.option("--clients", default=1000, show_default=True)
@click.option("--width", default=512, show_default=True)
@click.option("--rows-each", default=20, show_default=True)
@click.option("--workers", type=int, help="Processes of the simulation, threads of the local engine.")
def virtual(clients: int, width: int, rows_each: int, workers: int | None) -> None:
    """AFL over virtual clients: the local engine and Ray, the same work, each in a fresh process."""
    lines = []
    for engine in ("local", "flower-simulation"):
        words = [str(clients), str(width), str(rows_each), str(workers or 0), engine]
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "benchmarks.network_virtual", *words, folder]
            with _process(line, Path(folder) / "log") as process:
                peak = 0.0
                while process.poll() is None:
                    peak = max(peak, sum(map(_anonymous, _family(process.pid))))
                    time.sleep(0.05)
            if process.returncode:
                raise click.ClickException((Path(folder) / "log").read_text()[-2000:])
            found = json.loads((Path(folder) / "found.json").read_text())
        lines.append((engine, found["start"], found["exchange"], found["server"], peak, found["digest"][:12]))
    columns = ("engine", "seconds to start", "seconds of exchange", "engine MB", "all processes MB", "model")
    _table(f"AFL, {clients} clients of {rows_each} rows, width {width}", columns, lines)
    if lines[0][-1] != lines[1][-1]:
        raise click.ClickException("the two models differ.")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.network")
