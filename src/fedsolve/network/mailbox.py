"""The gate's mailbox: messages that wait for sites, answers that sites brought, and who is there.

The server and its gate talk over the pipes between them, a JSON table a line; messages and answers lie in
files of a folder that both know. The server says

    {"do": "send", "messages": {ID: SITE}, "file": NAME, "size": BYTES, "digest": SHA256, "largest": BYTES}
    {"do": "drop", "messages": [ID]}

and hears

    {"is": "open"}, when sites may connect
    {"is": "node", "site": SITE, "name": NAME, "process": MARK, "here": BOOL}
    {"is": "coming", "message": ID, "done": BYTES, "size": BYTES}
    {"is": "answer", "message": ID, "file": NAME, "digest": SHA256}
    {"is": "failed", "message": ID, "why": TEXT}
    {"is": "trouble", "text": TEXT}, which people at the server must see to

SITE is a number. A message waits until it is answered or dropped, or its site starts anew: a new process
knows nothing of what an earlier one was asked, and the server asks it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsolve.network.calls import REPLACED, UNWANTED

_log = logging.getLogger("fedsolve.gate")

ALIVE = 20.0
"""Seconds without a sign of life after which a site counts as gone."""

HUNG_UP = 10.0
"""The same after its connection broke."""

_COMING = 1.0
_LONG = 1 << 20
"""Bytes of an answer whose first part is worth telling, too: its site may freeze after it."""


class Refusal(Exception):
    """A call that is refused: the status and the sentence that the sender gets.

    reason: the same for all sentences that differ only in what the sender wrote.
    """

    def __init__(self, status: int, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason or sentence


@dataclass(frozen=True)
class Caller:
    """Who makes a call. site: tells sites apart, `process` their starts; name: where there is a list."""

    site: str
    name: str | None
    process: str


@dataclass
class Post:
    """A message that waits for its answer, of `largest` bytes at most. told: when the server last heard."""

    id: str
    file: str
    size: int
    digest: str
    largest: int
    told: float | None = None


@dataclass
class Pigeonhole:
    """What the mailbox knows of a site. waits: calls that wait for a message; past: earlier processes."""

    number: int
    name: str | None
    process: str
    seen: float
    here: bool = False
    waits: int = 0
    past: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    posts: dict[str, Post] = field(default_factory=dict)
    uploads: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Mailbox:
    """Messages and answers in files of `folder`; `tell` tells the server what happens. For one event loop."""

    def __init__(self, folder: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.tell = folder, tell
        self._holes: dict[str, Pigeonhole] = {}
        self._by_number: dict[int, Pigeonhole] = {}
        self._closed = False

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
        for hole in self._holes.values():
            hole.arrived.set()

    # -- the server's side -----------------------------------------------------------------------

    def take(self, command: dict[str, Any]) -> None:
        if command["do"] == "drop":
            for message in command["messages"]:
                for hole in self._holes.values():
                    if hole.posts.pop(message, None) is not None:
                        hole.arrived.set()
            return
        about = {name: command[name] for name in ("file", "size", "digest", "largest")}
        for message, number in command["messages"].items():
            if (to := self._by_number.get(number)) is not None:
                to.posts[message] = Post(message, **about)
                to.arrived.set()

    async def keep_watch(self) -> None:
        """Tell the server who has gone, for ever."""
        while True:
            await asyncio.sleep(ALIVE / 20)
            late = time.monotonic() - ALIVE
            for hole in self._holes.values():
                if hole.here and not hole.waits and hole.seen < late:
                    self.place(hole, here=False)

    # -- a site's side ---------------------------------------------------------------------------

    def hole(self, caller: Caller) -> Pigeonhole:
        """The pigeonhole of a caller, who is there. A new process takes the place of the one before."""
        hole = self._holes.get(caller.site)
        if hole is None:
            hole = Pigeonhole(len(self._holes) + 1, caller.name, caller.process, time.monotonic())
            self._holes[caller.site] = self._by_number[hole.number] = hole
        if hole.process != caller.process:
            if caller.process in hole.past:
                raise Refusal(401, "another process of this site has connected after this one.", REPLACED)
            hole.past.append(hole.process)
            hole.process = caller.process
            hole.posts.clear()
            hole.here = False
            hole.arrived.set()
        self.alive(hole)
        return hole

    def alive(self, hole: Pigeonhole) -> None:
        hole.seen = time.monotonic()
        if not hole.here:
            self.place(hole, here=True)

    def place(self, hole: Pigeonhole, here: bool) -> None:
        """Enter that a site is there, or gone."""
        hole.here = here
        fields = {"site": hole.name or hole.number, "here": here}
        _log.info("site %s is %s", fields["site"], "here" if here else "gone", extra={"fields": fields})
        node = {"site": hole.number, "name": hole.name, "process": hole.process}
        self.tell({"is": "node", **node, "here": here})

    async def next(self, hole: Pigeonhole, have: Collection[str], seconds: float) -> Post | None:
        """A message that the site does not have yet, as soon as there is one; None after so many seconds.

        None at once where the site has a message that nobody waits for any more (`dropped`).
        """
        process = hole.process
        hole.waits += 1
        try:
            async with asyncio.timeout(seconds):
                while hole.process == process and not self._closed:
                    for post in hole.posts.values():
                        if post.id not in have:
                            return post
                    if self.dropped(hole, have):
                        break
                    hole.arrived.clear()
                    await hole.arrived.wait()
        except TimeoutError:
            pass
        finally:
            hole.waits -= 1
            hole.seen = time.monotonic()
        return None

    def dropped(self, hole: Pigeonhole, have: Collection[str]) -> list[str]:
        """The messages that a site has, and nobody waits for any more."""
        return [message for message in have if message not in hole.posts]

    def hung_up(self, hole: Pigeonhole) -> None:
        """A site's connection broke while it waited: its process has ended, or it will soon call again."""
        hole.seen = time.monotonic() - ALIVE + HUNG_UP

    def wanted(self, hole: Pigeonhole, message: str) -> Post:
        """The message that an answer is for, while it is wanted."""
        post = hole.posts.get(message)
        if post is None:
            raise Refusal(410, "this answer is not wanted any more.", UNWANTED)
        return post

    def coming(self, hole: Pigeonhole, post: Post, done: int, size: int) -> None:
        """A part of an answer is there; the server hears of it once a second, where that takes long."""
        self.wanted(hole, post.id)
        self.alive(hole)
        now = time.monotonic()
        if post.told is None:
            post.told = 0.0 if size > _LONG else now
        if now - post.told > _COMING:
            post.told = now
            self.tell({"is": "coming", "message": post.id, "done": done, "size": size})

    def settle(self, hole: Pigeonhole, post: Post, event: dict[str, Any]) -> None:
        """Tell the server what came of a message: an answer, or one that is not taken."""
        del hole.posts[post.id]
        self.tell({"message": post.id, **event})

    @contextmanager
    def uploading(self, hole: Pigeonhole, post: Post) -> Iterator[None]:
        """Be the task that takes an answer; an earlier one ends, whose connection broke, or is too many."""
        task = asyncio.current_task()
        assert task is not None
        if (earlier := hole.uploads.pop(post.id, None)) is not None:
            earlier.cancel()
        hole.uploads[post.id] = task
        try:
            yield
        except asyncio.CancelledError:
            if hole.uploads.get(post.id) is task:
                raise
            raise Refusal(409, "the same answer was brought anew.", "superseded") from None
        finally:
            if hole.uploads.get(post.id) is task:
                del hole.uploads[post.id]
