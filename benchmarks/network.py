"""`python -m benchmarks.network [exchange|large]`: what a federation over a network costs.

exchange   seconds per exchange with nodes that are small processes of this machine
large      memory of the server process while answers of hundreds of megabytes are summed
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import Memory
from fedsolve.closedform.deepafl_client import KIND
from fedsolve.network.gate_link import GateLink, serving
from fedsolve.network.network_federation import NetworkFederation

CLASSES = 10


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def federation(nodes: int, rows: int, features: int, secure: bool) -> Iterator[tuple[GateLink, Path]]:
    """A server in this process and sites as processes of their own, with random rows."""
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        address = f"127.0.0.1:{free_port()}"
        keys = site_keys(folder, nodes) if secure else None
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
            stack.enter_context(process([sys.executable, "-m", "fedsolve", *words], folder / "sites.log"))
        yield link, folder


def site_keys(folder: Path, nodes: int) -> Path:
    """Keys of a server and of so many registered sites."""
    from fedsolve.network import certificates, security
    from fedsolve.network.keyfolder import Keys

    keys = Keys(folder / "keys")
    certificates.create_authority(keys, ["localhost"])
    for number in range(nodes):
        security.create_client(keys, f"site-{number}")
        keys.registered.add(keys.client_public_key(f"site-{number}"))
    return keys.folder


@contextmanager
def process(line: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
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


def _table(title: str, columns: tuple[str, ...], lines: list[tuple[Any, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in line))
    Console(width=120, highlight=False).print(table)


@click.group()
def main() -> None:
    """What a federation over a network costs."""


@main.command()
@click.option("--nodes", default=4, show_default=True)
@click.option("--layers", default=6, show_default=True, help="Exchanges to measure.")
@click.option("--width", default=128, show_default=True)
@click.option("--insecure", is_flag=True, help="Without TLS and authentication.")
def exchange(nodes: int, layers: int, width: int, insecure: bool) -> None:
    """Seconds per exchange of DeepAFL's single plan, small terms."""
    with federation(nodes, 200, 32, not insecure) as (link, _):
        engine = NetworkFederation(link, clients=nodes, classes=list(range(CLASSES)))
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
        engine = NetworkFederation(link, clients=nodes, classes=list(range(CLASSES)))
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


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.network")
