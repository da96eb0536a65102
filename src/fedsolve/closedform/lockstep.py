"""Several runs side by side in the exchanges of one: their requests travel together, and so do their answers.

The runs of candidates that are to be compared share every exchange in this way: k of them take as many
exchanges as the longest, and their bytes together. The blocks of a member are blocks of the outer chain under
its name, so that a client that starts anew is sent them like any others; a member is trained on a part of the
rows where its opening says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsolve.container import Array, with_prefix
from fedsolve.errors import DataError, TermError
from fedsolve.federation.messages import Block, Chain, Request, Term, Total
from fedsolve.federation.method import Run
from fedsolve.federation.participant import TOGETHER, ClientData, Memory, adds_up, step, step_of
from fedsolve.federation.parts import PART, Part

KIND = "lockstep"

_MEMBER = "member"


class Lockstep:
    """The members of an outer run that are under way, by name."""

    def __init__(self, outer: Run[Any], members: Mapping[str, Run[Any]], together: int) -> None:
        """together: how many answers each client gives in one at most, over the whole of the outer run."""
        self._outer = outer
        self._together = together
        self.members = dict(members)
        # A run that is resumed has blocks of its members in its chain already.
        sent = [block.note.get(_MEMBER) for block in outer.chain.blocks]
        self._entered = {name: sent.count(name) for name in members}
        self._asked: list[str] = []

    @property
    def exchanges(self) -> int:
        """How many exchanges the members take together."""
        return max(run.exchanges for run in self.members.values())

    def request(self, clients: tuple[str, ...]) -> Request | None:
        """What all members ask next; None when each has its model."""
        asked = {name: run.request(clients) for name, run in self.members.items()}
        open_ = {name: request for name, request in asked.items() if request is not None}
        self._asked = list(open_)
        if not open_:
            return None
        for name in open_:
            blocks = self.members[name].chain.blocks
            for block in blocks[self._entered[name] :]:
                note = {_MEMBER: name, "block": dict(block.note)}
                self._outer.chain.append(Block(note, block.arrays))
            self._entered[name] = len(blocks)
        notes = {
            name: {"kind": r.kind, "exchange": r.exchange, "step": r.step, "note": dict(r.note)}
            for name, r in open_.items()
        }
        arrays = {f"{name}.{key}": a for name, r in open_.items() for key, a in r.arrays.items()}
        step = max(r.step for r in open_.values())

        def sizes() -> dict[str, float]:
            return {f"{name}.{key}": size for name, r in open_.items() for key, size in r.sizes().items()}

        all_of_it = {"asked": notes, TOGETHER: self._together}
        return self._outer.ask(KIND, step, clients, all_of_it, arrays, sizes)

    def absorb(self, total: Total) -> dict[str, DataError]:
        """Give every member its share of the total; what was wrong with the data of those that failed."""
        failed: dict[str, DataError] = {}
        for name in self._asked:
            try:
                self.members[name].absorb(share_of(total, name))
            except DataError as problem:
                failed[name] = problem
        return failed


def share_of(total: Total, name: str) -> Total:
    """What a total says of one member."""
    term, prefix = total.term, f"{name}."
    own = Term(
        with_prefix(term.arrays, prefix),
        {key.removeprefix(prefix): count for key, count in term.counts.items() if key.startswith(prefix)},
        frozenset(key.removeprefix(prefix) for key in term.symmetric if key.startswith(prefix)),
    )
    return Total(own, total.cohort, total.missing, total.empty)


class _Known:
    """What a client knows of the members: their chains so far, and what their steps keep."""

    def __init__(self) -> None:
        self.digest = ""
        self.length = 0
        self.chains: dict[str, Chain] = {}
        self.caches: dict[str, dict[str, Any]] = {}
        self.parts: dict[Part, ClientData] = {}
        self.marks: dict[int | str, Array] = {}
        self.rows: ClientData | None = None

    def follow(self, chain: Chain) -> None:
        """Take over the blocks that are new, or all of them where this is another run."""
        if self.length > len(chain) or chain.digests[self.length] != self.digest:
            self.__init__()  # type: ignore[misc]
        for block in chain.blocks[self.length :]:
            if _MEMBER in block.note:
                member = self.chains.setdefault(block.note[_MEMBER], Chain())
                member.append(Block(block.note["block"], block.arrays))
        self.length, self.digest = len(chain), chain.digest

    def part(self, data: ClientData, note: Mapping[str, Any] | None) -> ClientData:
        """The rows of a part; those of a preparation that changed are chosen anew."""
        if self.rows is not data:
            self.parts.clear()
            self.marks.clear()
            self.rows = data
        if note is None:
            return data
        wanted = Part(**note)
        if wanted not in self.parts:
            if wanted.key not in self.marks:
                self.marks[wanted.key] = data.marks(wanted.key)
            self.parts[wanted] = wanted.of(data, self.marks[wanted.key])
        return self.parts[wanted]


def known_members(memory: Memory) -> _Known:
    """What this client keeps of the members of the run that its chain describes."""
    known: _Known = memory.cache.setdefault(KIND, _Known())
    known.follow(memory.chain)
    return known


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """The answers of all members that ask, each under its name."""
    known, asked = known_members(memory), request.note["asked"]
    for one in asked.values():
        if not adds_up(one["kind"]):
            raise TermError(
                f"requests of kind '{one['kind']}' are no sums over rows: ask them by themselves."
            )
    for name in known.caches.keys() - asked.keys():  # what a member kept that is finished
        del known.caches[name]
    whole = Term()
    for name, one in asked.items():
        chain = known.chains[name]
        rows = known.part(data, chain.blocks[0].note["opening"].get(PART))
        inner = Memory(
            chain,
            known.caches.setdefault(name, {}),
            memory.workspace.within(name),
            memory.budget // len(asked),
            memory.scratch,
            memory.name,
            memory.states,
            memory.device,
        )
        arrays: dict[str, Array] = with_prefix(dict(request.arrays), f"{name}.")
        own = Request(
            one["kind"], one["exchange"], one["step"], (), one["note"], arrays, len(chain), chain.digest
        )
        _enter(whole, name, step_of(one["kind"])(rows, own, inner))
    return whole


def _enter(whole: Term, name: str, term: Term) -> None:
    whole.arrays |= {f"{name}.{key}": array for key, array in term.arrays.items()}
    whole.counts |= {f"{name}.{key}": count for key, count in term.counts.items()}
    whole.factors |= {f"{name}.{key}": factor for key, factor in term.factors.items()}
    whole.symmetric |= {f"{name}.{key}" for key in term.symmetric}
