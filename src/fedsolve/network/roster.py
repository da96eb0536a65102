"""Who is a member: which nodes are there, what they are asked before they belong, and messages to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedsolve.errors import CohortError
from fedsolve.federation.cohort import plain
from fedsolve.network.agreement import Agreement, unfit
from fedsolve.network.link import Link, Node, Reply
from fedsolve.network.parcels import Note

_DESCRIPTION = 20.0
"""Seconds in which the few bytes of a description must come, once they are announced."""


@dataclass
class Member:
    """A node that belongs: its name, where it is, and since when it has been up."""

    name: str
    node: Node
    online: bool = True


@dataclass
class _Stranger:
    """A node that is no member: it is asked by `message` what it has, or refused (`why`).

    double: the member whose name it has. announced: when a part of its description was first seen.
    """

    activation: str
    message: str = ""
    why: str = ""
    double: str = ""
    announced: float = math.inf
    name: str | None = None


@dataclass
class Roster:
    """The members of a run, by name, and the nodes that are asked about or were refused."""

    link: Link
    agreement: Agreement
    interval: float
    tell: Callable[[str], None]
    members: dict[str, Member] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _strangers: dict[int, _Stranger] = field(default_factory=dict)
    _looked: float = 0.0

    def why_refused(self) -> str:
        """A sentence on the nodes that were refused; empty if there are none."""
        why = "; ".join(each.why for each in self._strangers.values() if each.why)
        return f"Not taken in: {why} " if why else ""

    def look(self, every: float = 0.0) -> None:
        """See which nodes are there now, at most once in `every` seconds."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        nodes = self.link.nodes()
        registered = self.link.registered()
        for name in [] if registered is None else sorted(self.members.keys() - registered):
            del self.members[name]
            self.agreement.described.pop(name, None)
            self.tell(f"'{name}' is not registered any more; the run goes on without it")
        for member in self.members.values():
            member.online = member.node.id in nodes
            if member.online:
                member.node = nodes[member.node.id]
        known = {member.node.id for member in self.members.values()}
        for node in nodes.values():
            heard = self._strangers.get(node.id)
            # One that started anew may have been mended, or has not heard what it was asked; one that was
            # taken for a second site may find the name free.
            again = heard is None or heard.activation != node.activation
            earlier = None if heard is None else self.members.get(heard.double)
            if node.id not in known and (again or (earlier is not None and not earlier.online)):
                (message,) = self._sent([node.id], self.agreement.describing())
                self._strangers[node.id] = _Stranger(node.activation, message, name=node.name)

    def admit(self, seconds: float) -> None:
        """Take in the nodes that have said what they have; wait `seconds` at most for those asked."""
        until = time.monotonic() + seconds
        while waiting := [(number, each) for number, each in self._strangers.items() if each.message]:
            nodes = self.link.nodes()
            for number, asked in waiting:
                reply = self.link.receive(asked.message)
                node = nodes.get(number) or Node(number, asked.activation, asked.name)
                if reply is None:
                    if self.link.coming(asked.message) is not None:
                        asked.announced = min(asked.announced, time.monotonic())
                    if time.monotonic() - asked.announced >= _DESCRIPTION:
                        self.link.forget([asked.message])
                        name = node.name or str(number)
                        self._refuse(node, name, "it announced what it has and did not send it.")
                    continue
                del self._strangers[number]
                if not reply.absent:
                    self._take_in(node, reply)
            if time.monotonic() >= until:
                return
            time.sleep(self.interval)

    def _take_in(self, node: Node, reply: Reply) -> None:
        """Make a node a member, or say on both sides why not."""
        note, why = reply.note, reply.failure
        name = node.name or plain(note.get("name") or node.id)
        double = name in self.members and self.members[name].online
        twice = f"two sites are called '{name}'; names must differ." if double else None
        if why is None and not note.get("ok"):
            why = plain(f"{note.get('error')}: {note.get('message')}")
        elif why := why or unfit(name, note) or twice or self.agreement.misfit(name, note):
            # A name that another site has now is free when that one leaves; all else waiting cannot mend.
            told = {"message": f"refused: {why}", "barred": not double}
            self.link.send([node.id], self.agreement.note("tell") | told, b"")
        if why is not None:
            self._refuse(node, name, why)
            return
        self.members[name] = Member(name, node)
        self.agreement.described[name] = note
        self.tell(f"'{name}' is there")
        if unnamed := self.agreement.unnamed():
            self.tell(
                f"no names of columns from {', '.join(map(repr, unnamed))}: whether they are those of the "
                "others, in the same order, is for people to check"
            )

    def _refuse(self, node: Node, name: str, why: str) -> None:
        double = name if name in self.members else ""
        self._strangers[node.id] = _Stranger(node.activation, why=f"'{name}': {why}", double=double)
        self.tell(f"'{name}' is not taken in: {why}")

    def tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.tell(text)

    def send(self, names: Sequence[str], note: Note, payload: bytes, largest: int) -> list[str]:
        """Send the same message to members; the ids under which they answer (see `Link.send`)."""
        return self._sent([self.members[name].node.id for name in names], note, payload, largest)

    def _sent(self, nodes: Sequence[int], note: Note, payload: bytes = b"", largest: int = 0) -> list[str]:
        messages = self.link.send(nodes, note, payload, largest)
        if (taken := sum(map(bool, messages))) != len(nodes):
            raise CohortError(f"the network took {taken} of {len(nodes)} messages; its log says why. Resume.")
        return messages

    def tell_over(self, message: str, failed: bool, seconds: float) -> None:
        """Tell every node that the run has ended, and how; each has so many seconds to take it."""
        self.look()
        online = [member.node.id for member in self.members.values() if member.online]
        if online:
            note = self.agreement.note("tell") | {"message": message, "over": True, "failed": failed}
            for number, name in zip(online, self.link.send(online, note, b""), strict=True):
                # Nobody need have heard it, but whoever is there now has a moment to take it.
                until = time.monotonic() + seconds
                while self.link.receive(name) is None and time.monotonic() < until:
                    if number not in self.link.nodes():
                        break
                    time.sleep(self.interval)
