"""`python -m benchmarks.engines`: the engines side by side, for the page "Which engine".

The same DeepAFL over the same sites by each engine: in this process, by Ray's workers, through the mailbox of
`fedsolve server`, by files, and over a Flower federation (a SuperLink with TLS and a stock SuperNode for each
site, on this machine); those over networks and files in plain and in secure, checked sums. Seconds are those
of an exchange after the first, which holds what an engine starts with; memory is the largest of the process
that adds the sums up. Each line is measured in a process of its own, and is kept in --out: started again, the
command measures what is missing.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import save, saved
from benchmarks.network import CLASSES, free_port, process, site_keys
from benchmarks.sites import memory
from fedsolve.network.keyfolder import Keys

ROWS, FEATURES, LAYERS = 200, 32, 3
WORDS = ["--method", "deepafl", "--layers", str(LAYERS), "--width", str(FEATURES), "--classes"]
WORDS += [",".join(map(str, range(CLASSES)))]
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
QUIET |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "OPENBLAS_NUM_THREADS": "1"}

Measured = tuple[float, float]
"""Seconds of an exchange and megabytes."""


def rows(sites: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(sites * ROWS) % CLASSES
    return rng.standard_normal((sites * ROWS, FEATURES)), labels, np.arange(sites * ROWS) // ROWS


def in_process(sites: int, folder: Path, engine: str) -> Measured:
    made = fs.LocalFederation if engine == "local" else fs.RayFederation
    federation = made.from_arrays(*rows(sites))
    history = fs.DeepAFL(layers=LAYERS, width=FEATURES, exchange="single").fit(federation).history
    if engine == "ray":
        federation.close()
    own = memory([os.getpid()])
    return float(np.median([record.seconds for record in history[1:]])), own


def prepared(sites: int, folder: Path) -> tuple[Keys, list[str]]:
    """Keys, a roster and a file of rows for each site; the names of sites."""
    keys = Keys(site_keys(folder, sites))
    for site in range(sites):
        keys.roster.add(keys.client_public_key(f"site-{site}"))
    x, y, owners = rows(sites)
    for site in range(sites):
        np.savez(folder / f"site-{site}.npz", x=x[owners == site], y=y[owners == site])
    return keys, [f"site-{site}" for site in range(sites)]


def fedsolve(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedsolve", *words]


def trained(line: list[str], state: Path) -> Measured:
    """Run a server to its end; seconds from its report, and the largest memory of its kind of process."""
    subprocess.run(line, check=True, capture_output=True, env=os.environ | QUIET)
    history = json.loads((state / "report.json").read_text())["history"]
    seconds = float(np.median([entry["seconds"] for entry in history[1:]]))
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def by_mailbox(sites: int, folder: Path, plain: list[str]) -> Measured:
    address, state = f"127.0.0.1:{free_port()}", folder / "state"
    keys, names = prepared(sites, folder)
    with ExitStack() as stack:
        for name in names:
            words = ["client", "--server", address, "--keys", str(keys.folder), "--name", name, *plain]
            words += ["--data", str(folder / f"{name}.npz"), "--state", str(folder / name)]
            stack.enter_context(process(fedsolve(*words), folder / "sites.log"))
        words = ["server", "--listen", address, "--keys", str(keys.folder), "--clients", str(sites)]
        return trained(fedsolve(*words, *WORDS, *plain, "--state", str(state)), state)


def by_files(sites: int, folder: Path, plain: list[str]) -> Measured:
    """Seconds of all commands of an exchange one after the other; nobody carries the files."""
    state, answers, spent = folder / "state", list[str](), list[float]()
    keys, _ = prepared(sites, folder)
    while not (state / "model.safetensors").exists():
        started = time.perf_counter()
        ask = ["files", "ask", *answers, "--keys", str(keys.folder), "--state", str(state), *WORDS, *plain]
        done = subprocess.run(fedsolve(*ask, "--json"), check=True, capture_output=True)
        answers = []
        for request in json.loads(done.stdout).get("requests", []):
            for name in request["waiting_for"]:
                answers.append(str(folder / f"{name}-{Path(request['file']).stem}.fst"))
                words = [
                    "files",
                    "answer",
                    request["file"],
                    "--keys",
                    str(keys.folder),
                    "--name",
                    name,
                    *plain,
                ]
                words += ["--data", str(folder / f"{name}.npz"), "--state", str(folder / name)]
                subprocess.run(fedsolve(*words, "--out", answers[-1]), check=True, capture_output=True)
        spent.append(time.perf_counter() - started)
    return sum(spent[1:]) / LAYERS, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def by_flower(sites: int, folder: Path, plain: list[str]) -> Measured:
    keys, names = prepared(sites, folder)
    port, beside = free_port(), Path(sys.executable).parent
    os.environ |= QUIET | {"FLWR_HOME": str(folder), "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    place, state = f"127.0.0.1:{port}", folder / "state"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{place}"\n'
        f'root-certificates = "{keys.authority}"\n'
    )
    with ExitStack() as stack:
        line = [str(beside / "flower-superlink"), "--ssl-ca-certfile", str(keys.authority), "--ssl-certfile"]
        line += [str(keys.server_certificate), "--ssl-keyfile", str(keys.server_key)]
        line += ["--host", "127.0.0.1", "--port", str(port)]
        stack.enter_context(process(line, folder / "superlink.log"))
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        for name in names:
            (folder / f"{name}.toml").write_text(
                f'[client]\nname = "{name}"\nplain = {str(bool(plain)).lower()}\nkeys = "{keys.folder}"\n'
                f'data = "{folder / name}.npz"\nstate = "{folder / name}"\n'
            )
            line = [str(beside / "flower-supernode"), "--root-certificates", str(keys.authority)]
            line += ["--superlink", place]
            line += ["--port", str(free_port()), "--node-config", f'config="{folder / name}.toml"']
            stack.enter_context(process(line, folder / "sites.log"))
        words = ["server", "--engine", "flower", "--superlink", "here", "--clients", str(sites), *WORDS]
        return trained(fedsolve(*words, *plain, "--state", str(state)), state)


LISTENS = {
    "one process": ("nothing", "whoever has all rows"),
    "Ray": ("Ray's ports among the machines of one owner", "one owner of several machines"),
    "mailbox": ("one port at the server, TLS 1.3", "the server's operator; sites open nothing"),
    "files": ("nothing", "people who carry files"),
    "Flower": ("a SuperLink, TLS; its Control API too", "who runs a Flower federation already"),
}
ENGINES: dict[str, Callable[[int, Path], Measured]] = {
    "one process": lambda sites, folder: in_process(sites, folder, "local"),
    "Ray": lambda sites, folder: in_process(sites, folder, "ray"),
}
for _name, _by in (("mailbox", by_mailbox), ("files", by_files), ("Flower", by_flower)):
    ENGINES[_name] = partial(_by, plain=["--plain"])
    ENGINES[f"{_name}, secure"] = partial(_by, plain=[])


@click.command()
@click.option("--sites", default=4, show_default=True)
@click.option("--engine", multiple=True, type=click.Choice(list(ENGINES)), help="Only these.")
@click.option("--out", type=Path, help="Keep measurements here, and measure only what is missing.")
@click.option("--limit", default=1500.0, show_default=True, help="Seconds that an engine may take.")
@click.option("--alone", is_flag=True, hidden=True)
def main(sites: int, engine: tuple[str, ...], out: Path | None, limit: float, alone: bool) -> None:
    """Seconds an exchange and memory of each engine, and who runs it."""
    if alone:
        with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as folder:
            click.echo(json.dumps(ENGINES[engine[0]](sites, Path(folder))))
        return
    kept: dict[str, dict[str, Any]] = saved(out, {})
    table = Table(title=f"DeepAFL, {LAYERS} exchanges, {sites} sites", title_justify="left")
    for column in ("engine", "seconds an exchange", "MB", "load", "what listens", "who operates it"):
        table.add_column(column)
    for name in engine or ENGINES:
        if name not in kept or kept[name]["sites"] != sites:
            line = [sys.executable, "-m", "benchmarks.engines", "--alone", "--engine", name]
            line += ["--sites", str(sites)]
            try:
                done = subprocess.run(line, capture_output=True, text=True, timeout=limit, check=True)
                seconds, largest = json.loads(done.stdout.splitlines()[-1])
            except subprocess.SubprocessError as problem:
                click.echo(f"{name}: {problem} {str(getattr(problem, 'stderr', ''))[-2000:]}", err=True)
                continue
            kept[name] = {"sites": sites, "seconds": seconds, "MB": largest, "load": os.getloadavg()[0]}
            save(out, kept)
        found = kept[name]
        numbers = f"{found['seconds']:.2f}", f"{found['MB']:.0f}", f"{found['load']:.1f}"
        table.add_row(name, *numbers, *LISTENS[name.removesuffix(", secure")])
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.engines")
