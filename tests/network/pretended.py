"""A link without a network: nodes answer when they are looked at, unless the test has other plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedsolve.network.answering import Answerer
from fedsolve.network.link import Link, Node, Reply
from fedsolve.network.parcels import Note

Meddle = Callable[[str, Note, bytes], "tuple[Note, bytes] | None"]


class PretendedLink(Link):
    """Nodes in this process; `meddle(name, note, payload)` may change an answer, or lose it (None)."""

    def __init__(self, sites: Sequence[Answerer], meddle: Meddle | None = None, named: bool = True) -> None:
        self.sites = dict(enumerate(sites, start=1))
        self.present = set(self.sites)
        self.activations = dict.fromkeys(self.sites, "first")
        self.meddle = meddle or (lambda name, note, payload: (note, payload))
        self.sent: list[tuple[str, Note]] = []
        self.taken: list[str] = []
        self.listed: frozenset[str] | None = None
        self._named = named
        self.open: dict[str, tuple[int, str, Note, bytes]] = {}

    def number(self, name: str) -> int:
        return next(number for number, site in self.sites.items() if site.name == name)

    def registered(self) -> frozenset[str] | None:
        return self.listed

    def nodes(self) -> dict[int, Node]:
        return {
            number: Node(number, self.activations[number], self.sites[number].name if self._named else None)
            for number in self.present
        }

    def send(self, nodes: Sequence[int], note: Note, payload: bytes, largest: int = 0) -> list[str]:
        names = []
        for number in nodes:
            names.append(f"message-{len(self.sent)}")
            self.sent.append((self.sites[number].name, note))
            self.open[names[-1]] = (number, self.activations[number], note, payload)
        return names

    def receive(self, message: str) -> Reply | None:
        number, activation, note, payload = self.open[message]
        if number not in self.present:
            return Reply({}, failure="it is not connected", absent=True)
        if activation != self.activations[number]:
            return None  # it went to a process that is no more
        name = self.sites[number].name
        answer = self.sites[number].reply(note, np.frombuffer(payload, dtype=np.uint8))
        kept = answer if note["ask"] != "answer" else self.meddle(name, *answer)
        if kept is None:
            return None
        self.taken.append(name)
        return Reply(kept[0], np.frombuffer(kept[1], dtype=np.uint8))
