"""Questions to members on their way: sent, waited for, and sent again to whoever started anew meanwhile.

All of them are safe to repeat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from fedsolve.errors import CohortError, TermError
from fedsolve.federation.cohort import CohortReport, Missing
from fedsolve.network.link import Reply
from fedsolve.network.roster import Member, Roster

Policy = Literal["wait", "continue", "error"]
T = TypeVar("T")

Say = Callable[[Sequence[str]], list[str]]
"""Sends these members their question; gives the ids under which they answer."""

REMOVED = "not registered any more"

TRIES = 3
"""How often an answer that arrives damaged is asked for."""

_LOST = 50
"""How often an answer may turn out not to be there: a network that breaks, not a site that never sends."""

_TELL_EVERY = 10.0
"""Seconds between two words on how much of an answer is there."""


def deadline(patience: float | None) -> float:
    """The moment at which patience runs out, which begins now."""
    return math.inf if patience is None else time.monotonic() + patience


@dataclass(frozen=True)
class Waiting:
    """How long is waited, and for whom (see `NetworkFederation`)."""

    missing: Policy
    patience: float | None
    grace: float
    interval: float


@dataclass
class _Asked:
    """An open question to a member: `message` is None while it cannot be reached, `since` that time.

    told: when people were last told how much of the answer is there.
    """

    say: Say
    message: str | None
    activation: str
    since: float = 0.0
    tries: int = 1
    lost: int = 0
    told: float = 0.0


@dataclass
class Questions:
    """Open questions to members, by name, until the answer of each is taken; a context.

    report: where it is noted who was asked again; who is missing or has answered is not asked any more.
    where:  what people are told that is being waited for.
    """

    roster: Roster
    waiting: Waiting
    report: CohortReport
    where: str

    def __post_init__(self) -> None:
        self._deadline = deadline(self.waiting.patience)
        self._asked: dict[str, _Asked] = {}

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CohortError):  # a network that has ended forgets by itself
            self.roster.link.forget([each.message for each in self._asked.values() if each.message])

    def ask(self, names: Sequence[str], say: Say) -> None:
        """Ask all of these that are there; the others are asked when they come."""
        self.roster.look()
        members = self.roster.members
        there = [name for name in names if name in members and members[name].online]
        messages = dict(zip(there, say(there) if there else [], strict=True))
        for name in names:
            activation = members[name].node.activation if name in members else ""
            self._asked[name] = _Asked(say, messages.get(name), activation)

    def put(self, name: str, say: Say) -> None:
        """Ask a member this in place of what it was asked."""
        asked = self._asked[name]
        if asked.message is not None:
            self.roster.link.forget([asked.message])
        asked.say = say
        (asked.message,) = say([name])
        asked.activation = self.roster.members[name].node.activation

    def coming(self, name: str) -> tuple[int, int] | None:
        """The bytes that are there of this member's answer, and those of the whole; from any thread."""
        asked = self._asked.get(name)
        if asked is None or asked.message is None:
            return None
        return self.roster.link.coming(asked.message)

    def taken(self, name: str, read: Callable[[Reply], T]) -> T:
        """What `read` makes of this member's reply; raises `Missing`, or what is wrong with it.

        A reply that `read` refuses with a `TermError` is asked for again, a few times.
        """
        asked, began = self._asked[name], time.monotonic()
        while True:
            member = self.roster.members.get(name)
            if member is None:
                raise Missing("absent", REMOVED)
            reply = None if asked.message is None else self.roster.link.receive(asked.message)
            if reply is not None and reply.absent:
                asked.message, asked.since = None, time.monotonic()
                member.online = False  # until the next look
                asked.lost += 1
                if asked.lost > _LOST:
                    raise Missing("failed", f"its answer was lost {asked.lost} times on the way")
            elif reply is not None:
                try:
                    return read(reply)
                except TermError:
                    if asked.tries >= TRIES:
                        raise
                    asked.tries += 1
                    self._ask_again(name)
                    continue
            self._wait(asked, member, began)

    def _wait(self, asked: _Asked, member: Member, began: float) -> None:
        """Wait a moment for this member's answer; raises `Missing` when the time for it is over."""
        now, name, waiting = time.monotonic(), member.name, self.waiting
        done, size = self.coming(name) or (0, 0)
        came = f"{done / 1e6:.1f} of {size / 1e6:.1f} MB" if done < size else ""
        if now > self._deadline:
            waited = f"within {waiting.patience:g} s"
            if came:
                raise Missing("late", f"too late: {came} of its answer came {waited}")
            if member.online:
                raise Missing("late", f"too late: no answer {waited}")
            raise Missing("absent", f"not connected {waited}")
        if came and now - asked.told > _TELL_EVERY:
            asked.told = now
            self.roster.tell_once(f"{self.where}: waiting for '{name}': {came}")
        self.roster.look(0.5)
        self.roster.admit(0.0)  # one that comes back may be another node
        settled = {*self.report.missing, *self.report.answered}
        for other, question in self._asked.items():
            known = self.roster.members.get(other)
            if other in settled or known is None or not known.online:
                continue
            if question.message is None or known.node.activation != question.activation:
                self._ask_again(other)  # it has restarted since, and knows nothing of the question
        if now - began > waiting.grace:
            state = "it has not answered yet" if member.online else "it is not connected"
            self.roster.tell_once(f"{self.where}: waiting for '{name}': {state}")
        if asked.message is None and now - asked.since > waiting.grace and waiting.missing != "wait":
            raise Missing("absent", "not connected")
        time.sleep(waiting.interval)

    def _ask_again(self, name: str) -> None:
        self.put(name, self._asked[name].say)
        self.report.again[name] = self.report.again.get(name, 0) + 1
