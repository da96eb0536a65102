"""Batches: clients that answer together, with the union of their rows. Every engine asks in batches.

A step that gives a sum over rows answers for a batch with one term: it sees the rows of all its clients as
those of one, in one set of products. Where the rows cannot be brought together, the clients answer one by one
and their terms are added. A step of groups (gradient methods) trains the clients of a batch at once; each has
its own term. A client that cannot answer is found by asking it alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsolve.errors import TermError
from fedsolve.federation.cohort import Answer, RunningSum
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import TOGETHER, Participant, Workspace, kind_of

if TYPE_CHECKING:
    from fedsolve.federation.members import Members

BLOCK = 64
"""Clients of a batch where there are very many. Bits of sums depend on it."""

ROWS = 1024
"""Rows of a batch where clients are fewer: products of so many reach nearly a processor's rate. Bits of sums
depend on it."""

MANY = 1024
"""Answers of a cohort from which on clients answer in batches of `BLOCK`: terms of one client each would cost
more to make and to add than the products in them."""

SEVERAL = 64
"""Clients from which on those with few rows answer in batches of `ROWS`, where everybody is asked."""


def batched(
    cohort: Sequence[str],
    rows: Callable[[str], int],
    request: Request,
    chain: Chain,
    everybody: bool,
    device: str = "cpu",
    device_of: Callable[[str], str] = lambda name: "cpu",
) -> list[tuple[str, ...]]:
    """A sorted cohort in batches: first the clients of each device, then neighbours among the rest.

    Batches depend on the clients asked and on their rows, and bits of sums on the batches; neither depends on
    the number of workers. Clients that are asked now and then (not `everybody`) answer by themselves, so that
    they keep what they derived from their rows.

    device: where the server solves; groups of gradient methods have as many clients as suit it.
    """
    kind = kind_of(request.kind)
    size = max(1, kind.together(request, chain, device))
    if size == 1 and kind.over_rows:
        devices = {name: device_of(name) for name in cohort} if everybody else {}
        if places := sorted({*devices.values()} - {"cpu"}):
            batches = [tuple(name for name in cohort if devices[name] == place) for place in places]
            rest = [name for name in cohort if devices[name] == "cpu"]
            return batches + batched(rest, rows, request, chain, False)
        if len(cohort) > 1 and len(cohort) * request.note.get(TOGETHER, 1) >= MANY:
            size = BLOCK
        elif everybody and len(cohort) >= SEVERAL:
            return _by_rows(cohort, rows)
    return [tuple(cohort[first : first + size]) for first in range(0, len(cohort), size)]


def _by_rows(cohort: Sequence[str], rows: Callable[[str], int]) -> list[tuple[str, ...]]:
    """Batches of at least `ROWS` rows; of fewer towards the end, so that workers end together."""
    batches: list[list[str]] = [[]]
    held, left = 0, sum(map(rows, cohort))
    for name in cohort:
        if held >= min(ROWS, max(ROWS // 4, left // 8)):
            batches.append([])
            held = 0
        batches[-1].append(name)
        held += rows(name)
        left -= rows(name)
    return [tuple(batch) for batch in batches]


Outcome = tuple[list[Answer], dict[str, Exception]]
"""What came of a batch: answers that can be added, in client order, and who failed."""


@dataclass(frozen=True)
class Batch:
    """Clients that are asked together.

    union: one participant with the rows of all, where these can be brought together.
    lacking: bytes of the model blocks that each client must be sent in addition to the request.
    """

    names: tuple[str, ...]
    members: Members
    union: Participant | None = None
    lacking: int = 0

    def ask(self, request: Request, chain: Chain, workspace: Workspace, sums: RunningSum) -> Outcome:
        """What the clients answer, checked by `sums`; terms live in `workspace` until it is used again."""
        apart: Exception | None = None
        if len(self.names) > 1:
            try:
                answers = self._together(request, workspace, sums)
                if answers is not None:
                    return answers, {}
            except Exception as problem:
                # Asking one by one below shows which client failed; the memory of the batch is freed.
                apart = problem.with_traceback(None)
        answers, failed = self._one_by_one(request, chain, workspace, sums)
        if apart is not None and not failed:
            warnings.warn(
                f"{len(self.names)} clients from '{self.names[0]}' on could not answer together "
                f"({type(apart).__name__}: {apart}) and answered one by one, which is slower.",
                RuntimeWarning,
                stacklevel=2,
            )
        return answers, failed

    def _together(self, request: Request, workspace: Workspace, sums: RunningSum) -> list[Answer] | None:
        """Answers of a union or of a group; None where the clients must be asked one by one."""
        empty = tuple(name for name in self.names if self.members.rows(name) == 0)
        if self.union is not None:
            term = self.union.answer(request, workspace)
            assert not isinstance(term, Needs)
            lacked = len(self.names) * self.lacking
            return [sums.check(term, *self.names, empty=empty, catch_up_bytes=lacked)]
        if (group := kind_of(request.kind).group) is None:
            return None
        members = [self.members[name] for name in self.names]
        if not all(member.memory.chain.accept(request) for member in members):
            return None
        for member in members:
            member.memory.workspace = workspace
        data, memories = zip(*(member.view(request) for member in members), strict=True)
        return [
            sums.check(term, name, empty=(name,) if name in empty else ())
            for name, term in zip(self.names, group(data, request, memories), strict=True)
        ]

    def _one_by_one(self, request: Request, chain: Chain, workspace: Workspace, sums: RunningSum) -> Outcome:
        """The clients' answers; of a step that gives sums their sum, since each term reuses the workspace."""
        answers: list[Answer] = []
        failed: dict[str, Exception] = {}
        partial = RunningSum() if len(self.names) > 1 and kind_of(request.kind).over_rows else None
        for name in self.names:
            try:
                participant = self.members[name]
                term, catch_up = ask(participant, request, chain, workspace)
                empty = () if len(participant.data) else (name,)
                answer = sums.check(term, name, empty=empty, catch_up_bytes=catch_up)
                if partial is not None:
                    partial.add(answer)
            except Exception as problem:  # reported with the client's name
                failed[name] = problem
            else:
                answers.append(answer)
        if partial is None or not answers:
            return answers, failed
        whole = Answer(
            clients=tuple(name for answer in answers for name in answer.clients),
            term=partial.term,
            empty=tuple(name for answer in answers for name in answer.empty),
            bytes_up=sum(answer.bytes_up for answer in answers),
            catch_up_bytes=sum(answer.catch_up_bytes for answer in answers),
        )
        return [whole], failed


def ask(
    participant: Participant, request: Request, chain: Chain, workspace: Workspace | None = None, **rules: Any
) -> tuple[Term, int]:
    """A participant's term, and the bytes of the model blocks that it lacked. rules: as of its `answer`."""
    term = participant.answer(request, workspace, **rules)
    catch_up = 0
    # Twice at most: that a participant holds blocks of another run shows only when newer ones do not
    # continue them; then it asks for everything.
    for _ in range(2):
        if not isinstance(term, Needs):
            break
        fuller = request.starting_at(term.have, chain)
        catch_up += fuller.nbytes
        term = participant.answer(fuller, workspace, **rules)
    if isinstance(term, Needs):
        raise TermError(
            f"it still lacks model blocks from {term.have} on after being sent them. Restart it "
            "(participant.forget()) and resume."
        )
    return term, catch_up
