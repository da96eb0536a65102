"""`python -m benchmarks.sites --sites 20,50,100,200`: what many sites cost one server.

Sites are light, in a few processes, but each has its own key and its own connections, through TLS and the
gate. Measured are whole exchanges of AFL (the server asks all, each answers, the sum is there), the largest
memory of every process, and the seconds of processor time that each took for an exchange.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import OtherWork
from benchmarks.network import CLASSES, process, site_keys
from fedsolve.errors import CohortError
from fedsolve.network import require_flower
from fedsolve.network.answering import Answerer
from fedsolve.network.flower import FlowerFederation
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, FleetNode
from fedsolve.network.service import serving

_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = {"network.gate": "gate", "benchmarks.sites": "sites"}


def site(number: int, rows: int, features: int) -> Answerer:
    """A site with random rows, the same whenever it is made."""
    rng = np.random.default_rng(number)
    data = fs.ClientData(rng.standard_normal((rows, features)), np.arange(rows) % CLASSES)
    return Answerer(f"site-{number}", data)


@contextmanager
def federation(sites: int, processes: int, rows: int, features: int) -> Iterator[FlowerFederation]:
    """A server in this process, and sites in a few others."""
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        keys = site_keys(folder, sites)
        address = f"127.0.0.1:{_free_port()}"
        link = stack.enter_context(serving(folder / "server", address, keys))
        for numbers in np.array_split(np.arange(sites), min(processes, sites)):
            words = [sys.executable, "-m", "benchmarks.sites", "--at", address, "--keys", str(keys)]
            words += ["--rows", str(rows), "--features", str(features)]
            words += ["--sites", ",".join(map(str, numbers))]
            stack.enter_context(process(words, folder / "sites.log"))
        yield FlowerFederation(
            link, clients=sites, classes=list(range(CLASSES)), patience=LIMIT, gather=3 * LIMIT
        )


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LIMIT = 100.0
"""Seconds after which an exchange counts as one that does not end."""


def running() -> dict[str, list[int]]:
    """The processes of the federation by what they are."""
    found: dict[str, list[int]] = {"server": [os.getpid()]}
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        pid, _, words = line.strip().partition(" ")
        for part, kind in _KINDS.items():
            if part in words:
                found.setdefault(kind, []).append(int(pid))
    return found


def memory(pids: Sequence[int]) -> float:
    """The largest resident sizes so far, together, in MB."""
    total = 0.0
    for pid in pids:
        total += int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return total


def processor(pids: Sequence[int]) -> float:
    """Seconds of processor time that these took so far."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def measure(sites: int, processes: int, exchanges: int, rows: int, features: int) -> list[str]:
    """A line of the table."""
    other = OtherWork()
    with federation(sites, processes, rows, features) as engine:
        seconds: list[float] = []
        gathered = "-"
        there = running()
        before = {}
        try:
            engine.describe()
            gathered = "yes"
            before = {kind: processor(pids) for kind, pids in there.items()}
            for _ in range(exchanges):
                seconds.append(fs.AFL(ridge=1.0).fit(engine).history[0].seconds)
        except CohortError as problem:
            click.echo(str(problem), err=True)
        took = {kind: processor(pids) for kind, pids in there.items()}
        spent = [
            f"{kind} {memory(pids):.0f} MB"
            + (f", {(took[kind] - before[kind]) / len(seconds):.2f} s" if seconds else "")
            for kind, pids in there.items()
        ]
    share = other.share()
    times = (
        [f"{min(seconds):.2f}", f"{np.median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["-"] * 3
    )
    busy = f"{os.getloadavg()[0]:.1f}"
    return [str(sites), gathered, *times, "\n".join(spent), busy, "-" if share is None else f"{share:.0%}"]


def be_sites(numbers: Sequence[int], address: str, keys: Keys, rows: int, features: int) -> None:
    """Be these sites, in one process, until it is ended."""
    require_flower()
    threads = []
    for number in numbers:
        connection = Connection(address, keys.authority, keys.client_key(f"site-{number}"))
        node = FleetNode(site(number, rows, features), connection)
        threads.append(threading.Thread(target=node.serve, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()


@click.command()
@click.option(
    "--sites", default="20,50,100,200", show_default=True, help="Numbers of sites, one after the other."
)
@click.option("--processes", default=4, show_default=True, help="Processes that the sites are in.")
@click.option("--exchanges", default=3, show_default=True, help="Exchanges to measure.")
@click.option("--rows", default=100, show_default=True, help="Rows of a site.")
@click.option("--features", default=64, show_default=True)
@click.option("--at", help="Be sites of the server at this address.", hidden=True)
@click.option("--keys", hidden=True)
def main(
    sites: str, processes: int, exchanges: int, rows: int, features: int, at: str | None, keys: str | None
) -> None:
    """Seconds per exchange and memory of each process with many sites on this machine."""
    numbers = [int(word) for word in sites.split(",")]
    if at is not None and keys is not None:
        be_sites(numbers, at, Keys(keys), rows, features)
        return
    table = Table(title=f"AFL, {features} features, TLS and keys", title_justify="left")
    for column in ("sites", "gathered", "least s", "median s", "most s"):
        table.add_column(column, justify="right")
    table.add_column("largest memory; processor time an exchange")
    table.add_column("load", justify="right")
    table.add_column("others", justify="right")
    for number in numbers:
        table.add_row(*measure(number, processes, exchanges, rows, features))
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.sites")
