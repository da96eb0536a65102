"""`python -m benchmarks.sites --sites 20,50,100,200,1000`: what many sites cost one server.

Sites are light, in a few processes, but each has its own key, roster, ledger and connections, through TLS and
the gate. A DeepAFL of a few layers is trained as `fedsolve server` trains by default: in secure sums, with
questions that sites check. The first exchange holds what a run begins with: the seed that all draw, the keys,
the census of rows. Measured are its seconds and those of the exchanges after it, what travels to and from a
site, the largest memory of every kind of process, and the processor time that each took.

The sites of a process answer in turn, so that together they take the time of one after the other; on machines
of their own they answer at the same time. What a site takes by itself is the processor time of all divided by
their number. With --remember the sites of a process verify a signature once, for all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import OtherWork, save, saved
from benchmarks.network import CLASSES, free_port, process, site_keys
from fedsolve.arrays import Array
from fedsolve.container import from_bytes
from fedsolve.errors import TermError
from fedsolve.federation.participant import Participant
from fedsolve.federation.recipe import Recipe
from fedsolve.network import require_network
from fedsolve.network.answering import Answerer
from fedsolve.network.gate_link import serving
from fedsolve.network.keyfolder import Keys
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.node import Connection, SiteNode
from fedsolve.network.parcels import Note
from fedsolve.network.security import load_client_key
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.policy import SitePolicy
from fedsolve.privacy.primitives import Verify, signer, verifier
from fedsolve.privacy.secure_client import SecureClient

_TICKS = os.sysconf("SC_CLK_TCK")
_KINDS = {"network.gate": "gate", "benchmarks.sites": "sites"}


_TURN = threading.Lock()


class InTurn(Answerer):
    """A site that answers while no other of its process does: hundreds of threads that all want Python's lock
    spend most of their time on asking for it."""

    def reply(self, note: Note, payload: Array) -> tuple[Note, bytes]:
        with _TURN:
            return super().reply(note, payload)


def site(number: int, rows: int, features: int, keys: Keys, verify: Verify | None) -> Answerer:
    """A site with random rows, the same whenever it is made. verify: None where sums are plain."""
    rng, name = np.random.default_rng(number), f"site-{number}"
    data = fs.ClientData(rng.standard_normal((rows, features)), np.arange(rows) % CLASSES)
    if verify is None:
        return InTurn(name, data)
    sign = signer(load_client_key(keys, name))

    def attend(participant: Participant) -> None:
        SecureClient(participant, sign, verify, policy=SitePolicy())

    return InTurn(name, data, attend=attend)


class CountedFederation(NetworkFederation):
    """Counts the bytes of letters and of replies by what they are about."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.down, self.up, self.seconds = Counter[str](), Counter[str](), Counter[str]()

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        kinds = {}
        for name, letter in letters.items():
            arrays, note = from_bytes(letter, what="a letter", error=TermError)
            kinds[name] = str(note.get("message", "seed"))
            sealed = arrays["sealed"].nbytes if "sealed" in arrays else 0
            self.down["sealed"] += sealed
            self.down[kinds[name]] += len(letter) - sealed
        started, there = time.perf_counter(), running()
        before = {kind: processor(pids) for kind, pids in there.items()}
        for name, reply in super().carry(channel, letters, largest):
            self.up[kinds[name]] += 0 if isinstance(reply, Exception) else len(reply)
            yield name, reply
        about, seconds = next(iter(kinds.values())), time.perf_counter() - started
        self.seconds[about] += seconds
        spent = {kind: processor(pids) - before[kind] for kind, pids in there.items()}
        if len(kinds) >= TOLD:
            words = ", ".join(f"{kind} {took:.1f}" for kind, took in spent.items())
            click.echo(f"  {about} to {len(kinds)}: {seconds:.1f} s; processor s: {words}", err=True)


@contextmanager
def federation(
    sites: int, processes: int, rows: int, features: int, plain: bool, remember: bool = False
) -> Iterator[CountedFederation]:
    """A server in this process, and sites in a few others."""
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        keys = site_keys(folder, sites)
        address = f"127.0.0.1:{free_port()}"
        link = stack.enter_context(serving(folder / "server", address, keys))
        for numbers in np.array_split(np.arange(sites), min(processes, sites)):
            words = [sys.executable, "-m", "benchmarks.sites", "--at", address, "--keys", str(keys)]
            words += ["--rows", str(rows), "--features", str(features)]
            words += (
                ["--sites", ",".join(map(str, numbers))] + ["--plain"] * plain + ["--remember"] * remember
            )
            stack.enter_context(process(words, folder / "sites.log"))
        yield CountedFederation(
            link,
            clients=sites,
            classes=list(range(CLASSES)),
            patience=LIMIT,
            gather=3 * LIMIT,
            secure=not plain,
        )


TOLD = 500
"""Letters of one kind from which on they are told of as soon as they are answered."""

LIMIT = 600.0
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


def measure(
    sites: int, processes: int, exchanges: int, rows: int, features: int, plain: bool, remember: bool
) -> dict[str, Any]:
    """What a run of so many sites takes."""
    other = OtherWork()
    with federation(sites, processes, rows, features, plain, remember) as engine:
        engine.describe()
        there = running()
        before = {kind: processor(pids) for kind, pids in there.items()}
        whole = engine if plain else SecureFederation(engine)
        method = fs.DeepAFL(layers=exchanges, width=features)
        ended = [time.perf_counter()]
        recipe = Recipe(method)
        if isinstance(whole, SecureFederation):
            recipe = whole.seeded(recipe, whole.describe())
        recipe.fit(whole, follow=[lambda record, expected: ended.append(time.perf_counter())])
        took = {kind: processor(pids) for kind, pids in there.items()}
        spent = {
            kind: {"MB": round(memory(pids)), "processor_s": round(took[kind] - before[kind], 1)}
            for kind, pids in there.items()
        }
        for kind in sorted(engine.down):
            down, up = (part[kind] / sites / 1e6 for part in (engine.down, engine.up))
            told = f"{kind}: {down:.3f} MB down, {up:.3f} up for a site, {engine.seconds[kind]:.1f} s"
            click.echo(f"  {told}", err=True)
        setup = sum((engine.down + engine.up)[kind] for kind in SETUP) / sites / 1e6
        first = sum(engine.seconds[kind] for kind in SETUP)
    seconds = np.diff(ended)
    return {
        "sites": sites,
        "exchanges": exchanges,
        "secure": not plain,
        "remember": remember,
        "setup_s": first,
        "setup_MB_a_site": setup,
        "first_s": float(seconds[0]),
        "next_s": float(np.median(seconds[1:])) if len(seconds) > 1 else None,
        "processes": spent,
        "load": os.getloadavg()[0],
        "others": other.share(),
    }


def line(found: Mapping[str, Any]) -> list[str]:
    """The same as a line of the table."""
    spent = [f"{kind} {each['MB']} MB, {each['processor_s']} s" for kind, each in found["processes"].items()]
    spent.append(f"a site {1000 * found['processes']['sites']['processor_s'] / found['sites']:.0f} ms")
    later, share = found["next_s"], found["others"]
    times = [f"{found['setup_s']:.1f}", f"{found['setup_MB_a_site']:.2f}", f"{found['first_s']:.1f}"]
    times.append("-" if later is None else f"{later:.2f}")
    busy = [f"{found['load']:.1f}", "-" if share is None else f"{share:.0%}"]
    return [str(found["sites"]), *times, "\n".join(spent), *busy]


SETUP = ("seed", "begin", "members", "sealed")
"""What a letter is about that makes keys."""


def be_sites(
    numbers: Sequence[int], address: str, keys: Keys, rows: int, features: int, plain: bool, remember: bool
) -> None:
    """Be these sites, in one process, until it is ended."""
    require_network()
    roster = {site.name: site.pem for site in keys.registered.sites().values()}
    verify = None if plain else verifier({name: load_pem_public_key(pem) for name, pem in roster.items()})
    if remember and verify is not None:
        verify = cache(verify)
    threads = []
    for number in numbers:
        connection = Connection(address, keys.authority, keys.client_key(f"site-{number}"))
        node = SiteNode(site(number, rows, features, keys, verify), connection)
        threads.append(threading.Thread(target=node.serve, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()


@click.command()
@click.option(
    "--sites", default="20,50,100,200,1000", show_default=True, help="Numbers of sites, one after the other."
)
@click.option("--processes", default=4, show_default=True, help="Processes that the sites are in.")
@click.option("--exchanges", default=3, show_default=True, help="Exchanges to measure.")
@click.option("--rows", default=100, show_default=True, help="Rows of a site.")
@click.option("--features", default=64, show_default=True)
@click.option("--plain", is_flag=True, help="No secure sums.")
@click.option("--remember", is_flag=True, help="The sites of a process verify a signature once.")
@click.option("--out", type=Path, help="Keep measurements here too; those of other numbers of sites stay.")
@click.option("--at", help="Be sites of the server at this address.", hidden=True)
@click.option("--keys", hidden=True)
def main(
    sites: str,
    processes: int,
    exchanges: int,
    rows: int,
    features: int,
    plain: bool,
    remember: bool,
    out: Path | None,
    at: str | None,
    keys: str | None,
) -> None:
    """Seconds per exchange and memory of each process with many sites on this machine."""
    numbers = [int(word) for word in sites.split(",")]
    if at is not None and keys is not None:
        be_sites(numbers, at, Keys(keys), rows, features, plain, remember)
        return
    how = "plain sums" if plain else "secure sums, checked questions"
    title = f"DeepAFL of {exchanges} exchanges, {features} features, {how}"
    table = Table(title=title, title_justify="left")
    for column in ("sites", "setup s", "setup MB a site", "first s", "next s"):
        table.add_column(column, justify="right")
    table.add_column("largest memory; processor time")
    table.add_column("load", justify="right")
    table.add_column("others", justify="right")
    kept = saved(out, [])
    for number in numbers:
        found = measure(number, processes, exchanges, rows, features, plain, remember)
        table.add_row(*line(found))
        told = number, not plain, remember
        kept = [one for one in kept if (one["sites"], one["secure"], one["remember"]) != told] + [found]
        save(out, sorted(kept, key=lambda one: one["sites"]))
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.sites")
