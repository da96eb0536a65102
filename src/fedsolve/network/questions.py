"""Questions to members on their way: sent, waited for, and sent again to whoever started anew meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from fedsolve import version
from fedsolve.errors import TermError
from fedsolve.federation.cohort import CohortReport, Missing
from fedsolve.network.agreement import Agreement
from fedsolve.network.link import Link, Reply
from fedsolve.network.parcels import Note
from fedsolve.network.roster import Roster

Policy = Literal["wait", "continue", "error"]
T = TypeVar("T")

REMOVED = "not registered any more"

TRIES = 3
"""How often an answer that arrives damaged is asked for."""

_LOST = 50
"""How often an answer may turn out not to be there: a network that breaks, not a site that never sends."""


_TELL_EVERY = 10.0
"""Seconds between two words on how much of an answer is there."""


def deadline(patience: float | None, started: float | None = None) -> float:
    """The moment at which patience runs out, counted from `started`, or from now."""
    if patience is None:
        return float("inf")
    return (time.monotonic() if started is None else started) + patience


@dataclass
class _Asked:
    """An open question to a member: `message` is None while it cannot be reached, `since` that time.

    came: how much of an answer that is on its way is there; told: when people were told so last.
    """

    message: str | None
    activation: str
    since: float = 0.0
    tries: int = 1
    lost: int = 0
    came: str = ""
    told: float = 0.0


@dataclass(frozen=True)
class Talk:
    """Between whom questions go, what they have agreed on, and how long is waited (`NetworkFederation`)."""

    link: Link
    roster: Roster
    agreement: Agreement
    missing: Policy
    patience: float | None
    grace: float
    interval: float
    tell_once: Callable[[str], None]


class Questions:
    """Open questions to members, by name, until the answer of each is taken.

    report:  where it is noted who was asked again; who is missing or has answered is not asked any more.
    where:   what people are told that is being waited for.
    started: when patience begins; now when None.
    """

    def __init__(self, talk: Talk, report: CohortReport, where: str, started: float | None = None) -> None:
        self._talk, self._roster, self._agreement = talk, talk.roster, talk.agreement
        self._report, self._where = report, where
        self._deadline = deadline(talk.patience, started)
        self._asked: dict[str, _Asked] = {}

    def _send(self, names: Sequence[str]) -> list[str]:
        """Send these members what they are asked now; the ids under which they answer."""
        raise NotImplementedError

    def ask(self, names: Sequence[str]) -> None:
        """Send the question to all of these that are there; the others are asked when they come."""
        self._roster.look()
        members = self._roster.members
        there = [name for name in names if name in members and members[name].online]
        messages = dict(zip(there, self._send(there) if there else [], strict=True))
        for name in names:
            activation = members[name].node.activation if name in members else ""
            self._asked[name] = _Asked(messages.get(name), activation)

    def put(self, name: str) -> None:
        """Send a member its question as it is now."""
        asked = self._asked[name]
        asked.message = self._send([name])[0]
        asked.activation = self._roster.members[name].node.activation

    def taken(self, name: str, read: Callable[[Reply], T]) -> T:
        """What `read` makes of this member's reply; raises `Missing`, or what is wrong with it.

        A reply that `read` refuses with a `TermError` is asked for again, a few times.
        """
        mine = self._asked[name]
        began = time.monotonic()
        while True:
            member = self._roster.members.get(name)
            if member is None:
                raise Missing("absent", REMOVED)
            reply = None
            if mine.message is not None:
                reply = self._talk.link.receive(
                    mine.message, lambda done, size: self._delivers(name, mine, done, size)
                )
            if reply is not None and reply.absent:
                mine.message, mine.since, reply = None, time.monotonic(), None
                member.online = False  # until the next look
                mine.lost += 1
                if mine.lost > _LOST:
                    raise Missing("failed", f"its answer was lost {mine.lost} times on the way")
            if reply is not None:
                try:
                    return read(reply)
                except TermError:
                    if mine.tries >= TRIES:
                        raise
                    mine.tries += 1
                    self._ask_again(name)
                    continue
            if time.monotonic() > self._deadline:
                waited = f"within {self._talk.patience:g} s"
                if mine.came:
                    raise Missing("late", f"too late: {mine.came} of its answer came {waited}")
                if member.online:
                    raise Missing("late", f"too late: no answer {waited}")
                raise Missing("absent", f"not connected {waited}")
            self._roster.look(0.5)
            self._roster.admit(0.0)  # one that comes back may be another node
            settled = {*self._report.missing, *self._report.answered}
            for other in self._asked:
                if other not in settled:
                    self._follow(other)
            if time.monotonic() - began > self._talk.grace:
                state = "it has not answered yet" if member.online else "it is not connected"
                self._talk.tell_once(f"{self._where}: waiting for '{name}': {state}")
            gone = mine.message is None and time.monotonic() - mine.since > self._talk.grace
            if gone and self._talk.missing != "wait":
                raise Missing("absent", "not connected")
            time.sleep(self._talk.interval)

    def _delivers(self, name: str, asked: _Asked, done: int, size: int) -> bool:
        """Whether to go on fetching an answer of which so many bytes are there: patience counts here too."""
        asked.came = f"{done / 1e6:.1f} of {size / 1e6:.1f} MB"
        self._report.coming[name] = (done, size)
        now = time.monotonic()
        if now - asked.told > _TELL_EVERY:
            asked.told = now
            self._talk.tell_once(f"{self._where}: waiting for '{name}': {asked.came}")
        return now <= self._deadline and self._same(name, asked)

    def _same(self, name: str, asked: _Asked) -> bool:
        self._roster.look(0.5)
        member = self._roster.members.get(name)
        return member is not None and member.online and member.node.activation == asked.activation

    def _follow(self, name: str) -> None:
        """Ask a member that has restarted since it was asked once more: it knows nothing of the question."""
        member, asked = self._roster.members.get(name), self._asked[name]
        if member is None or not member.online:
            return
        if asked.message is None or member.node.activation != asked.activation:
            self._ask_again(name)

    def _ask_again(self, name: str) -> None:
        self.put(name)
        self._report.again[name] = self._report.again.get(name, 0) + 1


def check_reply(name: str, reply: Reply, wanted: Note) -> None:
    """Refuse a reply that cannot be read, is a refusal, or says otherwise than `wanted` what it is about."""
    if reply.damaged:
        raise TermError(f"the answer of '{name}' cannot be read: {reply.failure}")
    if reply.failure is not None:
        raise Missing("failed", str(reply.failure))
    note = reply.note
    if note.get("fedsolve") != version.PROTOCOL:
        raise Missing("failed", f"it speaks protocol {note.get('fedsolve')}, the server {version.PROTOCOL}")
    if not note.get("ok"):
        raise Missing("failed", f"{note.get('error')}: {note.get('message')}")
    for part, value in wanted.items():
        if note.get(part) != value:
            raise TermError(f"'{name}' answered {part} {note.get(part)!r}, asked was {value!r}.")
