"""A request on its way: members are asked, brought up to date where they lack blocks, and read.

Letters are bytes whose meaning the engine does not know.

Both are safe to repeat: a node that started anew in the middle of an exchange is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsolve.errors import TermError
from fedsolve.federation.cohort import Answer, CohortReport, Missing, RunningSum
from fedsolve.federation.encoding import encode_request, read_term
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.network.link import Reply
from fedsolve.network.questions import TRIES, Questions, Talk, check_reply


class Exchange(Questions):
    """A request to members, by name, until the answer of each is taken."""

    def __init__(self, talk: Talk, chain: Chain, report: CohortReport, started: float) -> None:
        super().__init__(talk, report, f"exchange {report.exchange + 1}", started)
        self._chain = chain
        self._requests: dict[str, Request] = {}
        self._needed: dict[str, int] = {}

    def begin(self, names: Sequence[str], request: Request) -> None:
        self._requests = dict.fromkeys(names, request)
        self.ask(names)

    def _send(self, names: Sequence[str]) -> list[str]:
        request = self._requests[names[0]]  # several are asked together at the start only, all the same
        note = self._agreement.asking("answer", exchange=request.exchange)
        return self._roster.send(names, note, encode_request(request))

    def answer(self, name: str, sums: RunningSum) -> Answer:
        """This member's answer, ready to be added to `sums`; raises `Missing`, or what is wrong with it."""
        while True:
            answer = self.taken(
                name, lambda reply: _read(name, reply, self._requests[name], self._agreement.run, sums)
            )
            if not isinstance(answer, Needs):
                return answer
            self._bring_up(name, answer)

    def _bring_up(self, name: str, needs: Needs) -> None:
        """Send a member the model blocks that it lacks."""
        # Twice at most: that a node holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything. A restart may begin this anew.
        self._needed[name] = self._needed.get(name, 0) + 1
        if self._needed[name] > 2 * TRIES:
            raise Missing("failed", f"it still lacks model blocks from {needs.have} on after being sent them")
        self._requests[name] = self._requests[name].starting_at(needs.have, self._chain)
        self._report.catch_up_bytes += self._requests[name].nbytes
        self.put(name)


def _read(name: str, reply: Reply, request: Request, run: str, sums: RunningSum) -> Answer | Needs:
    """The answer in a reply, ready to be added; anything else that was sent is a `TermError` or `Missing`."""
    try:
        term = _term(name, reply, request, run)
        if isinstance(term, Needs):
            return term
        answer = sums.check(term, name, empty=(name,) if reply.note.get("empty") else ())
        sums.check_fits(answer)
        return answer
    except (TermError, Missing):
        raise
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise TermError(f"the answer of '{name}' cannot be read ({why}).") from problem


def _term(name: str, reply: Reply, request: Request, run: str) -> Term | Needs:
    """The term of a reply to this very request; anything else is refused by name."""
    about = {"exchange": request.exchange, "kind": request.kind, "digest": request.digest}
    check_reply(name, reply, {"name": name, "run": run, **about})
    if reply.payload is None:
        raise TermError(f"'{name}' answered without a term.")
    answer = read_term(reply.payload)
    if isinstance(answer, Needs) and not 0 <= answer.have < request.position:
        raise TermError(f"'{name}' asks for blocks from {answer.have} on; there are {request.position}.")
    return answer


class Letters(Questions):
    """Letters of one channel to members, by name, until the reply to each is taken."""

    def __init__(self, talk: Talk, report: CohortReport, channel: str, letters: Mapping[str, bytes]) -> None:
        """Sends its letter to each of these that is there; the others get theirs when they come."""
        super().__init__(talk, report, report.kind)
        self._channel, self._letters = channel, letters
        self.ask(list(letters))

    def _send(self, names: Sequence[str]) -> list[str]:
        note = self._agreement.asking("letter", channel=self._channel)
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
        return self.taken(name, lambda reply: self._read(name, reply))

    def _read(self, name: str, reply: Reply) -> bytes:
        check_reply(name, reply, {"name": name, "run": self._agreement.run, "channel": self._channel})
        if reply.payload is None:
            raise TermError(f"'{name}' replied without a letter.")
        return reply.payload.tobytes()
