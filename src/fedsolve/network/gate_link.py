"""The server's end of its gate: starts and stops it, and talks to the sites behind it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedsolve.errors import CohortError, ModelFileError, TermError
from fedsolve.network.calls import address
from fedsolve.network.keyfolder import Keys, private_folder
from fedsolve.network.link import Link, Node, Reply
from fedsolve.network.parcels import Note, Parcel, open_parcel
from fedsolve.network.security import WatchedFile
from fedsolve.watching import log_lines
from fedsolve.watching.log_lines import Style

_SLACK = 2 << 20
"""Bytes of an answer's note."""


@dataclass
class _Open:
    """A message on its way: to whom, in which file it lies, and what has come of it."""

    site: int
    file: str
    progress: tuple[int, int] | None = None
    answer: tuple[str, str] | None = None
    why: str | None = None


@dataclass(eq=False)
class GateLink(Link):
    """Sites behind the gate `process`, whose folder of messages and answers is `mail`.

    names: the sites that may take part; None where there is no list of them.
    check: called before every look; raises when the gate has ended.
    tell:  shows people at the server what they must see to.

    Answers lie on the gate's disk, all that have come, until the engine takes them one by one: whoever is
    slow delays nobody else, and one answer at a time is in this process.
    """

    process: subprocess.Popen[bytes]
    mail: Path
    names: Callable[[], frozenset[str] | None]
    check: Callable[[], None]
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._here: dict[int, Node] = {}
        self._open: dict[str, _Open] = {}
        threading.Thread(target=self._hear, daemon=True, name="fedsolve-gate").start()

    def registered(self) -> frozenset[str] | None:
        return self.names()

    def nodes(self) -> dict[int, Node]:
        self.check()
        names = self.names()
        with self._lock:
            here = dict(self._here)
        return {number: node for number, node in here.items() if names is None or node.name in names}

    def send(self, nodes: Sequence[int], note: Note, payload: bytes, largest: int = 0) -> list[str]:
        parcel = Parcel.of(note, payload)
        digest = parcel.digest()
        file = f"to-{digest[:32]}"
        self._write(parcel, self.mail / file)
        messages = {secrets.token_hex(16): number for number in nodes}
        with self._lock:
            self._open |= {message: _Open(number, file) for message, number in messages.items()}
        about = {"file": file, "size": len(parcel), "digest": digest, "largest": _SLACK + largest}
        self._say({"do": "send", "messages": messages, **about})
        return list(messages)

    def receive(self, message: str) -> Reply | None:
        self.check()
        with self._lock:
            asked = self._open.get(message)
            here = asked is not None and asked.site in self._here
        if asked is None:
            return Reply({}, failure="its answer was lost", absent=True)
        reply: Reply | None = None
        if asked.answer is not None:
            reply = self._take(*asked.answer)
        elif asked.why is not None:
            reply = Reply({}, failure=asked.why, damaged=True)
        elif not here:
            reply = Reply({}, failure="it is not connected", absent=True)
        if reply is not None:
            self.forget([message])
        return reply

    def coming(self, message: str) -> tuple[int, int] | None:
        with self._lock:
            asked = self._open.get(message)
        return None if asked is None else asked.progress

    def forget(self, messages: Sequence[str]) -> None:
        """Let go of messages, and of files that no other message needs."""
        with self._lock:
            gone = {message: self._open.pop(message) for message in messages if message in self._open}
            needed = {asked.file for asked in self._open.values()}
        for asked in gone.values():
            if asked.file not in needed:
                (self.mail / asked.file).unlink(missing_ok=True)
            if asked.answer is not None:
                (self.mail / asked.answer[0]).unlink(missing_ok=True)
        if unanswered := [message for message, asked in gone.items() if asked.answer is None]:
            self._say({"do": "drop", "messages": unanswered})

    def _write(self, parcel: Parcel, path: Path) -> None:
        """The same message to several sites is one file."""
        if path.exists():
            return
        try:
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
                stream.writelines(parcel.pieces())
        except OSError as problem:
            path.unlink(missing_ok=True)
            why = f"cannot write {path}: {problem.strerror or problem}."
            raise CohortError(f"{why} Make room and start again with the same state folder.") from problem

    def _take(self, file: str, digest: str) -> Reply:
        path = self.mail / file
        try:
            return Reply(*open_parcel(np.fromfile(path, dtype=np.uint8), digest))
        except TermError as problem:
            return Reply({}, failure=str(problem), damaged=True)
        except OSError as problem:
            return Reply({}, failure=f"{path}: {problem.strerror or problem}", damaged=True)
        finally:
            path.unlink(missing_ok=True)

    def _say(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.check()
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as problem:
            self.process.wait(10)
            self.check()
            raise CohortError(f"the gate cannot be told anything ({problem}); its log says why.") from problem

    def _hear(self) -> None:
        """Enter what the gate says, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # else the gate was killed while it spoke
                with self._lock:
                    self._enter(json.loads(line))

    def _enter(self, event: dict[str, Any]) -> None:
        if event["is"] == "node":
            self._here.pop(event["site"], None)
            if event["here"]:
                self._here[event["site"]] = Node(event["site"], event["process"], event["name"])
            return
        if event["is"] == "trouble":
            self.tell(event["text"])
            return
        asked = self._open.get(event["message"])
        if asked is None:
            if event["is"] == "answer":  # to what is not wanted any more
                (self.mail / event["file"]).unlink(missing_ok=True)
        elif event["is"] == "coming":
            asked.progress = (event["done"], event["size"])
        elif event["is"] == "answer":
            asked.answer, asked.progress = (event["file"], event["digest"]), (1, 1)
        else:
            asked.why = event["why"]


def site_names(keys: Keys, tell: Callable[[str], None]) -> Callable[[], frozenset[str]]:
    """The names of the registered sites, read again when the list changes."""

    def failed(problem: Exception, names: frozenset[str] | None) -> frozenset[str]:
        # Half written, or replaced at this moment: the gate lets nobody in meanwhile.
        told = f"the list of registered sites {keys.registered.path} cannot be read ({problem})."
        if names is None:
            raise ModelFileError(told) from problem
        tell(f"{told} The last list stays in force.")
        return names

    found = WatchedFile(keys.registered.path, lambda: frozenset(keys.registered.sites()), failed)
    found()
    return found


@contextmanager
def serving(
    state: Path,
    listen: str,
    keys: Path | None,
    tell: Callable[[str], None] | None = None,
    style: Style = "text",
) -> Iterator[GateLink]:
    """A link to the sites that connect to `listen` (HOST:PORT); without keys in plain HTTP.

    tell: shows people at the server what is amiss but does not end the run. style: of the gate's log.
    """
    tell = tell or partial(logging.getLogger("fedsolve").warning, "%s")
    sites = (lambda: None) if keys is None else site_names(Keys(keys), tell)
    mail, log = state / "mail", state / "gate.log"
    address(listen)  # refused, if it is none
    shutil.rmtree(mail, ignore_errors=True)  # what a server left that was killed
    private_folder(mail)
    with begin_log(log, style) as stream:
        process = subprocess.Popen(
            gate_command(listen, mail, keys),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, **log_lines.for_child(style, log)},
        )

    def check() -> None:
        if process.poll() is not None:
            raise CohortError(
                f"the gate, through which sites connect, has ended (exit code {process.returncode}): "
                f"{last_line(log)} (Log: {log}.) Start again with the same state folder to go on."
            )

    try:
        assert process.stdout is not None
        opened = select.select([process.stdout], [], [], 60.0)[0] and process.stdout.readline()
        if not opened:  # its first line says so
            raise CohortError(f"the gate does not open on {listen}: {last_line(log)} (Log: {log})")
        yield GateLink(process, mail, sites, check, tell)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        with suppress(OSError):  # what was not said yet is of no use any more
            process.stdin.close()
        shutil.rmtree(mail, ignore_errors=True)


def gate_command(listen: str, mail: Path, keys: str | os.PathLike[str] | None) -> list[str]:
    """The command line of a gate that ends when the calling process does; its log goes to stderr."""
    held = [] if keys is None else [str(Path(keys).absolute())]
    place = [listen, str(mail.absolute()), str(os.getpid()), *held]
    return [sys.executable, "-m", "fedsolve.network.gate", *place]


_STARTED = "== the process starts"


def begin_log(path: Path, style: Style = "text") -> BinaryIO:
    """The log of a process that is being started, which says so first: what stands before is another's."""
    with closing(log_lines.LogFile(path, style, path.stem)) as log:
        log.emit(logging.makeLogRecord({"name": "fedsolve", "levelname": "INFO", "msg": _STARTED}))
    return open(path, "ab")


def last_line(path: Path) -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    last = log_lines.message_of(lines[-1].strip()) if lines else _STARTED
    return "its log is empty." if last.endswith(_STARTED) else last
