"""One request on its way: members are asked, waited for, asked again, brought up to date, and read.

A request is safe to repeat: a node that started anew in the middle of an exchange is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsolve.errors import TermError
from fedsolve.federation.cohort import CohortReport, Missing
from fedsolve.federation.encoding import encode_request, read_term
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.running_sum import Answer, RunningSum
from fedsolve.network.agreement import Agreement
from fedsolve.network.link import Link, Reply
from fedsolve.network.roster import Roster
from fedsolve.network.wire import PROTOCOL, Note

Policy = Literal["wait", "continue", "error"]

REMOVED = "not registered any more"

_TRIES = 3
"""How often an answer that arrives damaged is asked for."""

_LOST = 50
"""How often an answer may turn out not to be there: a network that breaks, not a site that never sends."""


@dataclass(frozen=True)
class Waiting:
    """How long a node is waited for in one exchange; `FlowerFederation` says what each of these means."""

    missing: Policy
    patience: float | None
    grace: float
    interval: float


def deadline(patience: float | None, started: float | None = None) -> float:
    """The moment at which patience runs out, counted from `started`, or from now."""
    if patience is None:
        return float("inf")
    return (time.monotonic() if started is None else started) + patience


@dataclass
class _Asked:
    """An open question to a member: `message` is None while it cannot be reached, `since` that time."""

    message: str | None
    activation: str
    request: Request
    since: float = 0.0
    needed: int = 0
    tries: int = 1
    lost: int = 0


class Exchange:
    """Open questions to members, by name, until the answer of each is taken.

    report:    where it is noted who was asked again, and what was sent besides the request.
    started:   when patience begins.
    tell_once: tells people what is being waited for, but not the same thing twice.
    """

    def __init__(
        self,
        link: Link,
        roster: Roster,
        agreement: Agreement,
        chain: Chain,
        report: CohortReport,
        waiting: Waiting,
        started: float,
        tell_once: Callable[[str], None],
    ) -> None:
        self._link = link
        self._roster = roster
        self._agreement = agreement
        self._chain = chain
        self._report = report
        self._waiting = waiting
        self._deadline = deadline(waiting.patience, started)
        self._tell_once = tell_once
        self._asked: dict[str, _Asked] = {}

    def ask(self, names: Sequence[str], request: Request) -> None:
        """Send the request to all of these that are there; the others are asked when they come."""
        self._roster.look()
        members = self._roster.members
        there = [name for name in names if name in members and members[name].online]
        messages = dict(zip(there, self._send(there, request), strict=True))
        for name in names:
            activation = members[name].node.activation if name in members else ""
            self._asked[name] = _Asked(messages.get(name), activation, request)

    def _send(self, names: Sequence[str], request: Request) -> list[str]:
        if not names:
            return []
        agreed = self._agreement
        note = agreed.note("answer") | {"exchange": request.exchange, "classes": agreed.classes_note()}
        note["columns"] = agreed.columns_digest()
        return self._roster.send(names, note, encode_request(request))

    def answer(self, name: str, sums: RunningSum) -> Answer:
        """This member's answer, ready to be added to `sums`; raises `Missing`, or what is wrong with it."""
        mine, report = self._asked[name], self._report
        began = time.monotonic()
        while True:
            member = self._roster.members.get(name)
            if member is None:
                raise Missing("absent", REMOVED)
            reply = None
            if mine.message is not None:
                reply = self._link.receive(mine.message, lambda: self._same(name, mine))
            if reply is not None and reply.absent:
                mine.message, mine.since, reply = None, time.monotonic(), None
                member.online = False  # until the next look
                mine.lost += 1
                if mine.lost > _LOST:
                    raise Missing("failed", f"its answer was lost {mine.lost} times on the way")
            if reply is not None:
                try:
                    answer = _read(name, reply, mine.request, self._agreement.run, sums)
                except TermError:
                    if mine.tries >= _TRIES:
                        raise
                    mine.tries += 1
                    self._ask_again(name, mine)
                    continue
                if isinstance(answer, Needs):
                    self._bring_up(name, mine, answer)
                    continue
                return answer
            if time.monotonic() > self._deadline:
                waited = f"within {self._waiting.patience:g} s"
                if member.online:
                    raise Missing("late", f"too late: no answer {waited}")
                raise Missing("absent", f"not connected {waited}")
            self._roster.look(0.5)
            self._roster.admit(0.0)  # one that comes back may be another node
            for other in self._asked:
                self._follow(other, self._asked[other])
            if time.monotonic() - began > self._waiting.grace:
                state = "it has not answered yet" if member.online else "it is not connected"
                self._tell_once(f"exchange {report.exchange + 1}: waiting for '{name}': {state}")
            gone = mine.message is None and time.monotonic() - mine.since > self._waiting.grace
            if gone and self._waiting.missing != "wait":
                raise Missing("absent", "not connected")
            time.sleep(self._waiting.interval)

    def _same(self, name: str, asked: _Asked) -> bool:
        self._roster.look(0.5)
        member = self._roster.members.get(name)
        return member is not None and member.online and member.node.activation == asked.activation

    def _follow(self, name: str, asked: _Asked) -> None:
        """Ask a member that has restarted since it was asked once more: it knows nothing of the question."""
        member, report = self._roster.members.get(name), self._report
        if member is None or name in report.missing or name in report.answered or not member.online:
            return
        if asked.message is None or member.node.activation != asked.activation:
            self._ask_again(name, asked)

    def _ask_again(self, name: str, asked: _Asked) -> None:
        self._put(name, asked)
        self._report.again[name] = self._report.again.get(name, 0) + 1

    def _put(self, name: str, asked: _Asked) -> None:
        """Send a member its request as it is now."""
        asked.message = self._send([name], asked.request)[0]
        asked.activation = self._roster.members[name].node.activation

    def _bring_up(self, name: str, asked: _Asked, needs: Needs) -> None:
        """Send a member the model blocks that it lacks."""
        # Twice at most: that a node holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything. A restart may begin this anew.
        asked.needed += 1
        if asked.needed > 2 * _TRIES:
            raise Missing("failed", f"it still lacks model blocks from {needs.have} on after being sent them")
        asked.request = asked.request.starting_at(needs.have, self._chain)
        self._report.catch_up_bytes += asked.request.nbytes
        self._put(name, asked)


def _read(name: str, reply: Reply, request: Request, run: str, sums: RunningSum) -> Answer | Needs:
    """The answer in a reply, ready to be added; anything else that was sent is a `TermError` or `Missing`."""
    try:
        term = _term(name, reply, request, run)
        if isinstance(term, Needs):
            return term
        answer = sums.check(name, term, bool(reply.note.get("empty")))
        sums.check_fits(answer)
        return answer
    except (TermError, Missing):
        raise
    except Exception as problem:
        raise TermError(
            f"the answer of '{name}' cannot be read ({type(problem).__name__}: {problem})."
        ) from problem


def _term(name: str, reply: Reply, request: Request, run: str) -> Term | Needs:
    """The term of a reply to this very request; anything else is refused by name."""
    if reply.damaged:
        raise TermError(f"the answer of '{name}' cannot be read: {reply.failure}")
    if reply.failure is not None:
        raise Missing("failed", str(reply.failure))
    note = reply.note
    if note.get("fedsolve") != PROTOCOL:
        raise Missing("failed", f"it speaks protocol {note.get('fedsolve')}, the server {PROTOCOL}")
    if not note.get("ok"):
        raise Missing("failed", f"{note.get('error')}: {note.get('message')}")
    wanted: Note = {
        "name": name,
        "run": run,
        "exchange": request.exchange,
        "kind": request.kind,
        "digest": request.digest,
    }
    for part, value in wanted.items():
        if note.get(part) != value:
            raise TermError(f"'{name}' answered {part} {note.get(part)!r}, asked was {value!r}.")
    if reply.payload is None:
        raise TermError(f"'{name}' answered without a term.")
    answer = read_term(reply.payload)
    if isinstance(answer, Needs) and not 0 <= answer.have < request.position:
        raise TermError(
            f"'{name}' asks for model blocks from {answer.have} on; there are {request.position}."
        )
    return answer
