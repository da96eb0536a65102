"""Federations that are killed, frozen and run out of disk, and the model that comes out all the same.

    python -m benchmarks.chaos [--kills 40] [--freezes 10] [--seed 0] [--limit 1800] [--json FILE]

A server and three sites run as the units of deploy/ would run them: whoever ends badly is started again with
the same command. Meanwhile `kill -9` strikes the server, the gate that it started and
the sites, some of them are stopped (SIGSTOP) for seconds and go on, and twice at each side the disk of the
state folder fills up and is emptied again. Trainings of DeepAFL in the open and of Softmax in secure sums
follow each other until all of that has happened; each must give, byte for byte, the model of a training that
nobody disturbed.

The full disk is a small tmpfs where one can be mounted, otherwise a limit on the size of files (RLIMIT_FSIZE)
for one start of the process. Processes are known by their roles: what they do inside is not looked at.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.machine import progress, save

SITES = ("north", "south", "west")
METHODS = {
    "deepafl": ("--plain", "--method", "deepafl", "--layers", "60", "--width", "48"),
    "softmax": ("--method", "softmax", "--tolerance", "0.001"),
}
DISK = 24 << 20
"""Bytes of a state folder's disk, where it is one of its own."""
SHORT = 16 << 10
"""Bytes that a file may have where a full disk is played by a limit."""
BREATH = 0.3
"""Seconds before a process that ended is started again."""


class Supervised:
    """A process that is started again whenever it ends badly, as a service manager would do."""

    def __init__(self, name: str, line: list[str], log: Path) -> None:
        self.name, self.line, self.log = name, line, log
        self.starts = 0
        self.codes: list[int] = []
        self.short_of_disk = False
        self.done = False
        self._since = 0.0
        self._said = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        self.starts += 1
        self._said = self.log.stat().st_size if self.log.exists() else 0
        limited = self.short_of_disk
        path = self.log.with_suffix(".limited") if limited else self.log
        with open(path, "wb" if limited else "ab") as stream:
            self._process = subprocess.Popen(
                self.line,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=_limited if limited else None,
            )

    def watch(self) -> None:
        """Notice that it ended, and start it again if it was not done."""
        if self._process is None:
            if not self.done and time.monotonic() - self._since > BREATH:
                self.start()
            return
        code = self._process.poll()
        if code is not None:
            self.codes.append(code)
            self.done = code == 0
            self._process, self._since = None, time.monotonic()

    def has_said(self, words: str) -> bool:
        """Whether it has said this since it was started last."""
        with open(self.log, "rb") as stream:
            stream.seek(self._said)
            return words.encode() in stream.read()

    def end(self) -> None:
        self.done = True
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)


@dataclass
class Federation:
    """One training: its processes, and the folders of their states."""

    server: Supervised
    sites: dict[str, Supervised]
    states: dict[str, Path]

    @property
    def ready(self) -> bool:
        """Whether the server takes calls, and everybody is up."""
        up = self.server.pid is not None and all(site.pid for site in self.sites.values() if not site.done)
        return up and self.server.has_said("sites may connect")

    def stage(self) -> float:
        """Changes whenever an exchange is finished."""
        try:
            return (self.states["server"] / "checkpoint.safetensors").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def watch(self) -> None:
        for each in (self.server, *self.sites.values()):
            each.watch()

    def roles(self) -> dict[str, int]:
        """The process of every role that is there now."""
        found = {name: site.pid for name, site in self.sites.items()} | {"server": self.server.pid}
        if self.server.pid is not None:
            found |= {role: pid for pid, role in _children(self.server.pid)}
        return {role: pid for role, pid in found.items() if pid is not None}


@dataclass
class Faults:
    """What is still to be done to federations, and what was done."""

    kills: int
    freezes: int
    disks: list[str]
    rng: np.random.Generator
    mounted: bool = True
    killed: Counter[str] = field(default_factory=Counter)
    frozen: Counter[str] = field(default_factory=Counter)
    filled: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return not (self.disks or self.kills > self.killed.total() or self.freezes > self.frozen.total())

    def strike(self, federation: Federation) -> None:
        """Do one of them now, unless everybody has ended."""
        roles = federation.roles()
        if not roles:
            return
        left = {
            "kill": self.kills - self.killed.total(),
            "freeze": 3 * (self.freezes - self.frozen.total()),
            "disk": 3 * len(self.disks),
        }
        kinds = [kind for kind, weight in left.items() if weight > 0]
        weights = np.array([left[kind] for kind in kinds], dtype=float)
        kind = str(self.rng.choice(kinds, p=weights / weights.sum()))
        if kind == "disk" and self.disks[0] in roles:
            self._fill(federation, self.disks.pop(0))
            return
        done = self.frozen if kind == "freeze" else self.killed
        role = min(roles, key=lambda name: (done[name], self.rng.random()))  # every role gets its share
        done[role] += 1
        if kind == "freeze":
            self._freeze(federation, roles[role])
        else:
            _send(roles[role], signal.SIGKILL)

    def _freeze(self, federation: Federation, pid: int) -> None:
        _send(pid, signal.SIGSTOP)
        _attend(federation, self.rng.uniform(3, 8))
        _send(pid, signal.SIGCONT)

    def _fill(self, federation: Federation, role: str) -> None:
        """No space at this side for a while."""
        process = federation.server if role == "server" else federation.sites[role]
        before, ended = federation.stage(), len(process.codes)
        if self.mounted:
            filler = federation.states[role] / "filler"
            with open(filler, "wb", buffering=0) as stream, suppress(OSError):
                while True:
                    stream.write(bytes(4096))
        else:
            process.short_of_disk = True
            if process.pid is not None:
                _send(process.pid, signal.SIGKILL)
                ended += 1
        _attend(federation, 10.0)
        if self.mounted:
            filler.unlink()
        else:
            process.short_of_disk = False
            if process.pid is not None:
                _send(process.pid, signal.SIGKILL)
        codes = Counter(process.codes[ended:])
        how = f"ended with {dict(codes)}" if codes else "went on"
        exchanges = "went on" if federation.stage() != before else "stood still"
        self.filled.append(f"{role} {how}, exchanges {exchanges}, until there was space again")


def trained(folder: Path, method: str, faults: Faults | None, until: float) -> bytes:
    """The bytes of the model of a training, disturbed by faults unless they are None."""
    with ExitStack() as stack:
        federation = stack.enter_context(_federation(folder, method, faults))
        pause = _Pause(federation, faults)
        while not federation.server.done:
            federation.watch()
            if time.monotonic() > until:
                said = federation.server.log.read_text(errors="replace")[-2000:]
                raise TimeoutError(f"not done in time; the server said last:\n{said}")
            if faults is not None and not faults.over and pause.over():
                faults.strike(federation)
                pause = _Pause(federation, faults)
            time.sleep(0.05)
        return (folder / f"{method}.safetensors").read_bytes()


class _Pause:
    """The time to the next fault: some come while processes start, some in an exchange, some after one."""

    def __init__(self, federation: Federation, faults: Faults | None) -> None:
        self._federation = federation
        rng = np.random.default_rng(0) if faults is None else faults.rng
        self._when = str(rng.choice(["starting", "running", "advanced"], p=[0.2, 0.4, 0.4]))
        self._wait = float(rng.uniform(0.1, 1.0))
        self._stage = federation.stage()
        self._since: float | None = None

    def over(self) -> bool:
        happened: Callable[[], bool] = {
            "starting": lambda: self._federation.server.pid is not None,
            "running": lambda: self._federation.ready,
            "advanced": lambda: self._federation.stage() != self._stage,
        }[self._when]
        if self._since is None and happened():
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since > self._wait


@contextmanager
def _federation(folder: Path, method: str, faults: Faults | None) -> Iterator[Federation]:
    folder.mkdir(parents=True)
    port, words = _free_port(), METHODS[method]
    plain = [word for word in words if word == "--plain"]
    with ExitStack() as stack:
        states = {}
        for name in ("server", *SITES):
            states[name] = folder / f"state-{name}"
            states[name].mkdir(mode=0o700)
            if faults is not None and faults.mounted:
                stack.enter_context(_mounted(states[name]))
        keys = folder.parent / "keys"
        line = ["server", "--listen", f"127.0.0.1:{port}", "--keys", str(keys / "server"), *words]
        line += ["--clients", str(len(SITES)), "--classes", ",".join(map(str, range(10)))]
        line += ["--state", str(states["server"]), "--out", str(folder / f"{method}.safetensors")]
        server = Supervised("server", [sys.executable, "-m", "fedsolve", *line], folder / "server.log")
        stack.callback(server.end)
        sites = {}
        for name in SITES:
            line = ["client", "--server", f"127.0.0.1:{port}", "--keys", str(keys / name), "--name", name]
            line += [*plain, "--data", str(folder.parent / f"{name}.npz"), "--state", str(states[name])]
            line += ["--once"]
            sites[name] = Supervised(name, [sys.executable, "-m", "fedsolve", *line], folder / f"{name}.log")
            stack.callback(sites[name].end)
        yield Federation(server, sites, states)


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    line = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "tmpfs", str(folder)]
    subprocess.run(line, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _can_mount(folder: Path) -> bool:
    folder.mkdir()
    try:
        with _mounted(folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _world(folder: Path) -> None:
    """Keys and rosters of a server and its sites, and their rows: digits, of which each sees some."""
    from fedsolve.network import certificates, security
    from fedsolve.network.keyfolder import Keys

    server = Keys(folder / "keys/server")
    certificates.create_authority(server, ["localhost"])
    own = {name: Keys(folder / "keys" / name) for name in SITES}
    for name, keys in own.items():
        security.create_client(keys, name)
        shutil.copy(server.authority, keys.authority)
        server.registered.add(keys.client_public_key(name))
    for keys in own.values():
        pages = [str(other.client_public_key(name)) for name, other in own.items()]
        line = ["keys", "roster", *pages, "--keys", str(keys.folder)]
        subprocess.run([sys.executable, "-m", "fedsolve", *line], check=True, capture_output=True)
    features, labels = load_digits(return_X_y=True)
    for number, name in enumerate(SITES):
        np.savez(folder / f"{name}.npz", x=features[number::3] / 16, y=labels[number::3])


def _attend(federation: Federation, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        federation.watch()
        time.sleep(0.05)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(parent: int) -> list[tuple[int, str]]:
    """The processes that this one started, and theirs, with the role that their command lines show."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            about = (entry / "stat").read_text().rpartition(")")[2].split()
            if entry.name.isdigit() and int(about[1]) == parent and about[0] != "Z":
                line = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found += [(int(entry.name), _role(line)), *_children(int(entry.name))]
    return found


def _role(line: list[str]) -> str:
    named = [word.rpartition(".")[2] for word in line if word.startswith("fedsolve.")]
    return {"guarded": "SuperLink"}.get(named[0], named[0]) if named else "child"


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, SHORT))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chaos(
    kills: int,
    freezes: int,
    fills: int = 2,
    seed: int = 0,
    limit: float = 1800.0,
    methods: Sequence[str] = tuple(METHODS),
) -> dict[str, Any]:
    """What was done to how many trainings, and how many gave the undisturbed one's model, byte for byte.

    fills: how often the disk of each side is full.
    """
    started = time.monotonic()
    until = started + limit
    with tempfile.TemporaryDirectory(prefix="fedsolve-chaos-") as name:
        folder = Path(name)
        _world(folder)
        calm = {method: trained(folder / f"calm-{method}", method, None, until) for method in methods}
        progress(f"undisturbed: {time.monotonic() - started:.0f} s")
        sides = fills * ["server", SITES[0]]
        faults = Faults(kills, freezes, sides, np.random.default_rng(seed), _can_mount(folder / "mount"))
        same: list[bool] = []
        while not faults.over:
            method = methods[len(same) % len(methods)]
            found = trained(folder / f"{len(same) + 1}-{method}", method, faults, until)
            same.append(found == calm[method])
            progress(
                f"training {len(same)}, {method}: {'the same bytes' if same[-1] else 'ANOTHER MODEL'}; "
                f"{faults.killed.total()} kills, {faults.frozen.total()} freezes so far"
            )
        return {
            "trainings": len(same),
            "identical": sum(same),
            "kills": dict(faults.killed),
            "freezes": dict(faults.frozen),
            "full_disks": faults.filled,
            "disk": "tmpfs" if faults.mounted else "RLIMIT_FSIZE",
            "seconds": round(time.monotonic() - started, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40, help="kill -9, over all roles")
    parser.add_argument("--freezes", type=int, default=10, help="SIGSTOP for some seconds")
    parser.add_argument("--seed", type=int, default=0, help="of when and whom")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all of it")
    parser.add_argument("--json", help="write what was done to this file as well")
    given = parser.parse_args()
    told = chaos(given.kills, given.freezes, seed=given.seed, limit=given.limit)
    for name in ("kills", "freezes"):
        parts = ", ".join(f"{role} {count}" for role, count in sorted(told[name].items()))
        print(f"{name}: {sum(told[name].values())} ({parts})")
    for how in told["full_disks"]:
        print(f"full disk ({told['disk']}): {how}")
    print(f"{told['identical']} of {told['trainings']} trainings gave the same bytes, in {told['seconds']} s")
    save(given.json, told)
    if told["identical"] != told["trainings"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
