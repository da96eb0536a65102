"""Sums over blocks of neighbouring clients: what an engine with many of them adds, instead of each term.

A block is a run of clients in the order of their names, counted from the first, so that which clients share
one depends on the cohort and its rows alone. Where a step answers with a sum over rows and the clients share
their arrays, a block answers as one client with the rows of all, in one set of products; else its clients
answer one by one and their terms are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedsolve.errors import TermError
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import Participant, adds_up
from fedsolve.federation.running_sum import Answer, RunningSum
from fedsolve.federation.workspace import Workspace

BLOCK = 64
"""Clients of a block where there are very many. Bits of sums depend on it."""

ROWS = 1024
"""Rows of a block where clients are fewer: products of a block reach nearly a processor's rate. Bits of sums
depend on it."""


@dataclass
class BlockSum:
    """The sum of the terms of a block, who is in it and who is not.

    bytes_up, catch_up_bytes: what its clients would have sent, and been sent besides, each by itself.
    """

    term: Term = field(default_factory=Term)
    answered: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)
    bytes_up: int = 0
    catch_up_bytes: int = 0

    @property
    def answer(self) -> Answer:
        """The block as one answer to be added."""
        return Answer(self.answered[0], self.term, empty=False)


def blocks_of_clients(cohort: Sequence[str]) -> list[list[str]]:
    """A cohort in blocks."""
    return [list(cohort[first : first + BLOCK]) for first in range(0, len(cohort), BLOCK)]


def blocks_of_rows(cohort: Sequence[str], rows: Callable[[str], int]) -> list[list[str]]:
    """A cohort in blocks of at least `ROWS` rows; of fewer towards the end, so that workers end together."""
    blocks: list[list[str]] = [[]]
    held, left = 0, sum(map(rows, cohort))
    for name in cohort:
        if held >= min(ROWS, max(ROWS // 4, left // 8)):
            blocks.append([])
            held = 0
        blocks[-1].append(name)
        held += rows(name)
        left -= rows(name)
    return blocks


def block_sum(
    names: Sequence[str],
    member: Callable[[str], Participant],
    rows: Callable[[str], int],
    pool: Participant | None,
    request: Request,
    chain: Chain,
    workspace: Workspace,
) -> BlockSum:
    """The sum of these clients' terms; one client's failure does not affect the others.

    pool: a participant with the rows of all, where there is one. The sum may live in `workspace`.
    """
    apart: Exception | None = None
    if pool is not None and adds_up(request.kind):
        try:
            term, catch_up = ask(pool, request, chain, workspace)
            RunningSum().check(pool.name, term)
        except Exception as problem:
            apart = problem  # asked one by one below, which shows whose failure it is
        else:
            empty = [name for name in names if rows(name) == 0]
            return BlockSum(term, list(names), empty, {}, len(names) * term.nbytes, len(names) * catch_up)
    found, sums = BlockSum(), RunningSum()
    for name in names:
        try:
            term, catch_up = ask(member(name), request, chain, workspace)
            sums.add(sums.check(name, term))
        except Exception as problem:  # reported with the client's name
            found.failed[name] = problem
            continue
        found.answered.append(name)
        found.bytes_up += term.nbytes
        found.catch_up_bytes += catch_up
        if rows(name) == 0:
            found.empty.append(name)
    found.term = sums.so_far()
    if apart is not None and not found.failed:
        warn_apart(len(names), names[0], apart)
    return found


def warn_apart(clients: int, first: str, why: Exception) -> None:
    """Say that clients answered one by one what they could not answer together."""
    warnings.warn(
        f"{clients} clients from '{first}' on could not answer together ({type(why).__name__}: {why}) and "
        "answered one by one, which is slower.",
        RuntimeWarning,
        stacklevel=3,
    )


def ask(participant: Participant, request: Request, chain: Chain, workspace: Workspace) -> tuple[Term, int]:
    """A participant's term, and the bytes of the model blocks that it lacked."""
    term = participant.answer(request, workspace)
    catch_up = 0
    # Twice at most: that a participant holds blocks of another run shows only when newer ones do not
    # continue them; then it asks for everything.
    for _ in range(2):
        if not isinstance(term, Needs):
            break
        fuller = request.starting_at(term.have, chain)
        catch_up += fuller.nbytes
        term = participant.answer(fuller, workspace)
    if isinstance(term, Needs):
        raise TermError(
            f"it still lacks model blocks from {term.have} on after being sent them. Restart it "
            "(participant.forget()) and resume."
        )
    return term, catch_up
