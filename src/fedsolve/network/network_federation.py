"""The engine over a network: carries a request to nodes and sums their terms as they are taken.

Answers wait on the disk of the gate and are taken one by one in the order of names, so that the result does
not depend on who was first, and one answer at a time is in this process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fedsolve.arrays import check_choice, check_whole
from fedsolve.backends.devices import resolve
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.cohort import (
    UNKNOWN,
    Answer,
    CohortReport,
    Contradiction,
    Missing,
    RunningSum,
    departed,
)
from fedsolve.federation.encoding import encode_request
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.messages import Chain, Request, Total
from fedsolve.labels import TASKS, Task, class_list
from fedsolve.network.agreement import PREFERS, Agreement
from fedsolve.network.expected import check_reply, expected_layout, largest_matrix, read_answer
from fedsolve.network.link import Link
from fedsolve.network.parcels import LARGEST, Note
from fedsolve.network.questions import REMOVED, TRIES, Policy, Questions, Say, Waiting, deadline
from fedsolve.network.roster import Roster
from fedsolve.pages.words import listed
from fedsolve.tables.proposal import summary
from fedsolve.tables.schema import Schema
from fedsolve.watching.board import SiteStanding

__all__ = ["CohortReport", "NetworkFederation", "Policy"]

_SLACK = 1 << 20
"""Bytes that an answer may take besides its numbers."""

_GOING_ON = "--missing continue; in Python missing='continue'"


class NetworkFederation(Federation):
    """The sites of a network, over a link to them.

    clients:   how many must be there before the first exchange.
    classes:   the class list; when None it is the union of what the sites agree to send.
    task:      what the labels are; None for a classification, unless the sites propose a regression.
    missing:   "wait" for a node that is not there; "continue" without it (exact for those present) as
               long as `min_clients` answered; "error": stop at the first failure. A refusal is a
               failure; with "wait" it stops the run too, for waiting would not mend it.
    patience:  seconds to wait for an answer, until all of it is there: then "continue" goes on without it,
               the others stop.
    gather:    seconds to wait for the nodes at the beginning; `patience` when None.
    grace:     seconds that a node which left in the middle of an exchange has to come back.
    interval:  seconds between two looks for an answer.
    schema:    what a row is, where sites read their tables by it; train with `fit(..., schema=schema)`.
    begun:     what was agreed in an earlier part of this run, when it is resumed (`running.State`).
    secure:    whether sites are asked for secure sums (by a `SecureFederation` around this one) and told so.
               Its members are those at the start: who comes later is not taken in.

    agreement: what the run's sites have agreed on.
    """

    prefers: Literal["bytes", "exchanges"] = PREFERS

    def __init__(
        self,
        link: Link,
        *,
        clients: int = 1,
        classes: Sequence[Any] | None = None,
        task: Task | None = "classification",
        missing: Policy = "wait",
        min_clients: int = 1,
        patience: float | None = None,
        gather: float | None = None,
        grace: float = 5.0,
        interval: float = 0.05,
        schema: Schema | None = None,
        begun: Note | None = None,
        device: str = "cpu",
        secure: bool = False,
        report: Callable[[CohortReport], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_whole(1, clients=clients, min_clients=min_clients)
        if min_clients > clients:
            raise DataError(
                f"min_clients is {min_clients}, but only {clients} clients are waited for at the start. "
                "Lower the one or raise the other."
            )
        check_choice("missing", missing, ("wait", "continue", "error"))
        check_choice("task", task, (None, *TASKS))
        self.missing = missing
        self.min_clients = min_clients
        self.reports: list[CohortReport] = []
        self.expected = clients
        self.given = None if classes is None else class_list(classes)
        self._gather = patience if gather is None else gather
        self._device = resolve(device)
        self._report = report or (lambda report: None)
        self._tell = tell or (lambda text: None)
        self._under_way: Questions | None = None
        self.agreement = Agreement(task, self.given, schema, secure, begun)
        self._roster = Roster(link, self.agreement, interval, self._tell)
        self._waiting = Waiting(missing, patience, grace, interval)

    @property
    def schema(self) -> Schema | None:
        return self.agreement.schema

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the members, sorted; with "continue" those that are there now."""
        until = deadline(self._waiting.patience)
        self._roster.look()
        self._roster.admit(self._waiting.interval)
        while True:
            present = sorted(name for name, member in self._roster.members.items() if member.online)
            chosen = present if self.missing == "continue" else sorted(self._roster.members)
            if len(chosen) >= self.min_clients and (self.missing != "error" or present == chosen):
                return tuple(chosen)
            self._roster.tell_once(
                f"waiting: {len(chosen)} of at least {self.min_clients} members are connected "
                f"({', '.join(present) or 'none'})"
            )
            if time.monotonic() > until or self.missing == "error":
                there = f"{len(present)} of {len(self._roster.members)} members are connected"
                needed = f"({', '.join(present) or 'none'}), at least {self.min_clients} needed."
                raise CohortError(f"{there} {needed} Start them and resume.")
            time.sleep(self._waiting.interval)
            self._roster.look(0.5)
            self._roster.admit(0.0)

    def describe(self, patience: float | None = None) -> Spec:
        """What a method needs to know; waits until enough clients are there and agree."""
        patience = self._gather if patience is None else patience
        until, announced = deadline(patience), ""
        while True:
            self._roster.look(0.2)
            self._roster.admit(0.0)
            there = len(self._roster.members)
            if there >= self.expected:
                if (schema := self.agreement.proposed(sorted(self._roster.members))) is None:
                    break
                self._tell(
                    f"of what the sites propose, the schema is: {'; '.join(summary(schema, levels=True))}. "
                    "All read their rows by it now"
                )
                self._roster.members = {}  # all are asked once more, by the schema
                self._roster.look()
                continue
            began, registered = self.agreement.only, self._roster.link.registered()
            if began is not None and registered is not None and (gone := began - registered):
                raise departed(gone, began & registered)
            text = f"{there} of {self.expected} clients are there{self._awaited(registered)}"
            if text != announced:
                announced = text
                self._tell(text)
            if time.monotonic() > until:
                came = f"{there} of {self.expected} clients came within {patience:g} s."
                raise CohortError(f"{came} {self._roster.why_refused()}Start them and resume.")
            time.sleep(self._waiting.interval)
        members = sorted(self._roster.members)
        if self.agreement.secure and self.agreement.only is None:
            self.agreement.only = frozenset(members)
        return dataclasses.replace(self.agreement.settle(members), device=self._device)

    def _awaited(self, registered: frozenset[str] | None) -> str:
        """Who of those that may take part is not there yet, where there is a list of them."""
        lacking = sorted((self.agreement.only or registered or frozenset()) - self._roster.members.keys())
        more = self.expected - len(self._roster.members)
        some = "" if len(lacking) <= more else f"{more} of "
        return f"; waiting for {some}{listed(lacking, 12)}" if lacking else ""

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, added in the order of names."""
        started = time.monotonic()
        if request.exchange == 0 and not self._roster.members:
            self.describe()
        report = CohortReport(request.exchange, request.kind, tuple(sorted(request.cohort)))
        report.absent = {name: UNKNOWN for name in report.asked if name not in self._roster.members}
        self.reports.append(report)
        known = [name for name in report.asked if name not in report.absent]
        sums, largest = self._sums(request, chain)
        with self._asking(report, f"exchange {request.exchange + 1}") as questions:
            questions.ask(known, self._saying(request, largest))
            for name in known:
                try:
                    answer = self._answer(questions, name, request, chain, sums, largest)
                except (Missing, TermError) as cause:
                    report.lose(name, cause)
                    goes_on = self.missing == "continue" or str(cause) == REMOVED
                    if goes_on and not isinstance(cause, Contradiction):
                        continue
                    self._finish(report, started)
                    raise report.stopped(name, cause, _GOING_ON) from cause
                for refusal in report.take(sums, [answer], {}).values():  # it was found to fit
                    raise refusal
                del answer  # the next one takes its place
        self._finish(report, started)
        return report.total(sums, request, self.min_clients)

    def _answer(
        self, questions: Questions, name: str, request: Request, chain: Chain, sums: RunningSum, largest: int
    ) -> Answer:
        """A member's answer, ready to be added to `sums`; a member is sent the model blocks that it lacks."""
        # Twice at most: that a node holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything. A restart may begin this anew.
        for _ in range(2 * TRIES + 1):
            found = questions.taken(name, partial(read_answer, name, request, self.agreement.run, sums))
            if isinstance(found, Answer):
                return found
            request = request.starting_at(found.have, chain)
            questions.report.catch_up_bytes += request.nbytes
            questions.put(name, self._saying(request, largest))
        why = f"it still lacks model blocks from {request.position} on after being sent them"
        raise Missing("failed", why)

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        """The members' replies to letters, in the order of names."""
        self._check_size(largest, channel)
        report = CohortReport(0, channel, tuple(sorted(letters)))
        note = self.agreement.asking("letter", channel=channel)
        wanted = {"run": self.agreement.run, "channel": channel}
        known = [name for name in report.asked if name in self._roster.members]
        alike: dict[int, list[str]] = {}
        for name in known:
            alike.setdefault(id(letters[name]), []).append(name)
        with self._asking(report, channel) as questions:
            for names in alike.values():
                letter = letters[names[0]]
                questions.ask(names, partial(self._roster.send, note=note, payload=letter, largest=largest))
            for name in report.asked:
                try:
                    if name not in known:
                        raise Missing("absent", UNKNOWN)
                    reply = questions.taken(name, partial(check_reply, name, wanted))
                except (Missing, TermError) as cause:
                    report.lose(name, cause)
                    yield name, cause
                    continue
                report.answered.append(name)
                yield name, reply.tobytes()

    def _asking(self, report: CohortReport, where: str) -> Questions:
        """Questions to members, which from now on are those under way."""
        self._under_way = Questions(self._roster, self._waiting, report, where)
        return self._under_way

    def _saying(self, request: Request, largest: int) -> Say:
        note = self.agreement.asking("answer", exchange=request.exchange)
        return lambda names: self._roster.send(names, note, encode_request(request), largest)

    def standings(self) -> list[SiteStanding]:
        """How each member stands at this moment; may be asked from another thread."""
        questions, members = self._under_way, sorted(self._roster.members.items())

        def standing(name: str, connected: bool) -> SiteStanding:
            if questions is None or name not in questions.report.asked:
                return SiteStanding(name, connected)
            done, size = questions.coming(name) or (0, 0)
            if why := questions.report.missing.get(name):
                return SiteStanding(name, connected, "missing", why)
            if name in questions.report.answered or 0 < done == size:
                return SiteStanding(name, connected, "answered")
            return SiteStanding(name, connected, "asked", "", done, size)

        return [standing(name, member.online) for name, member in members]

    def _sums(self, request: Request, chain: Chain) -> tuple[RunningSum, int]:
        """An empty sum that knows which terms fit, where that can be known in advance; the largest answer."""
        spec = self.agreement.spec or self.describe()
        layout = expected_layout(request, chain, spec)
        if layout is not None:
            largest = _SLACK + 8 * layout.numbers
            self._check_size(largest, request.kind)
            return RunningSum(layout), largest
        self._roster.tell_once(f"what answers to '{request.kind}' look like is known from the first one only")
        self._check_size(largest_matrix(chain, spec), request.kind)
        return RunningSum(), LARGEST

    def _check_size(self, largest: int, what: str) -> None:
        """Refuse answers that no message carries, before anybody computes one."""
        if largest > LARGEST:
            raise DataError(
                f"answers to '{what}' have up to {largest / 2**30:.1f} GiB; a message carries "
                f"{LARGEST >> 30}. Choose a smaller width, or a plan with smaller answers (--plan lean)."
            )

    def _finish(self, report: CohortReport, started: float) -> None:
        report.seconds = time.monotonic() - started
        self._report(report)

    def tell_over(self, message: str, failed: bool = False) -> None:
        """Tell the members that the run has ended, with a model or without (`failed`)."""
        self._roster.tell_over(message, failed, self._waiting.grace)

    def __repr__(self) -> str:
        return f"NetworkFederation({len(self._roster.members)} clients, missing={self.missing!r})"
