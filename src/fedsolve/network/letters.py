"""Letters on their way: bytes to each member whose meaning the engine does not know, and theirs back.

A letter is safe to repeat, too: whoever started anew is sent it again, and answers with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from fedsolve.errors import TermError
from fedsolve.federation.cohort import CohortReport
from fedsolve.network.agreement import Agreement
from fedsolve.network.link import Link, Reply
from fedsolve.network.questions import Questions, Waiting, check_reply
from fedsolve.network.roster import Roster


class Letters:
    """Letters of one channel to members, by name, until the reply to each is taken."""

    def __init__(
        self,
        link: Link,
        roster: Roster,
        agreement: Agreement,
        report: CohortReport,
        waiting: Waiting,
        tell_once: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._agreement = agreement
        self._channel = ""
        self._letters: Mapping[str, bytes] = {}
        self._questions = Questions(
            link, roster, report, waiting, time.monotonic(), self._send, report.kind, tell_once
        )

    def send(self, channel: str, letters: Mapping[str, bytes]) -> None:
        """Send its letter to each of these that is there; the others get theirs when they come."""
        self._channel, self._letters = channel, letters
        self._questions.ask(list(letters))

    def _send(self, names: Sequence[str]) -> list[str]:
        agreed = self._agreement
        note = agreed.note("letter") | {"channel": self._channel, "classes": agreed.classes_note()}
        note["columns"] = agreed.columns_digest()
        alike: dict[int, list[str]] = {}
        for name in names:
            alike.setdefault(id(self._letters[name]), []).append(name)
        sent: dict[str, str] = {}
        for some in alike.values():
            messages = self._roster.send(some, note, self._letters[some[0]])
            sent.update(zip(some, messages, strict=True))
        return [sent[name] for name in names]

    def reply(self, name: str) -> bytes:
        """What this member replied; raises `Missing`, or what is wrong with it."""
        return self._questions.answer(name, lambda reply: self._read(name, reply))

    def _read(self, name: str, reply: Reply) -> bytes:
        check_reply(name, reply, {"name": name, "run": self._agreement.run, "channel": self._channel})
        if reply.payload is None:
            raise TermError(f"'{name}' replied without a letter.")
        return reply.payload.tobytes()
