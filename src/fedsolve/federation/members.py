"""The clients of one process by name; those whose rows lie in common arrays are made when they are needed.

A participant takes some kilobytes by itself. A hundred thousand of them that only ever take part in sums over
rows are never made: neighbours answer as one (`Deal.pooled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedsolve.backends.devices import resolve
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.holdings import Held, Holdings, held_by
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.schema import Schema


@dataclass(frozen=True)
class Deal:
    """Rows of common arrays, dealt to clients.

    order, bounds: client k has the rows order[bounds[k]:bounds[k + 1]].
    memory: bytes that all clients together may keep.
    names: of the clients, sorted; client-0 and so on when None.
    """

    features: Array
    labels: Array
    weights: Array | None
    schema: Schema | None
    order: Array
    bounds: Array
    memory: int
    scratch: Path | None
    names: tuple[str, ...] | None = None

    @cached_property
    def places(self) -> dict[str, int]:
        """The clients' names, in their order, each with its number."""
        if self.names is not None:
            return {name: client for client, name in enumerate(self.names)}
        clients = len(self.bounds) - 1
        digits = len(str(clients - 1))
        return {f"client-{client:0{digits}d}": client for client in range(clients)}

    @cached_property
    def held(self) -> dict[str, Held]:
        """What each client holds."""
        return {name: held_by(self._rows(client, client)) for name, client in self.places.items()}

    def size(self, client: int) -> int:
        return int(self.bounds[client + 1] - self.bounds[client])

    def participant(self, name: str, device: str) -> Participant:
        return self._holding(name, self.places[name], self.places[name], device)

    def pooled(self, names: Sequence[str], device: str) -> Participant | None:
        """One participant that has the rows of all these; None unless they are neighbours."""
        first, last = self.places.get(names[0]), self.places.get(names[-1])
        if first is None or last is None or last - first + 1 != len(names):
            return None
        return self._holding(f"{names[0]} to {names[-1]}", first, last, device)

    def _holding(self, name: str, first: int, last: int, device: str) -> Participant:
        data = self._rows(first, last)
        share = self.memory * len(data) // len(self.features)
        return Participant(name, data, memory_budget=share, scratch=self.scratch, device=device)

    def _rows(self, first: int, last: int) -> ClientData:
        rows = self.order[self.bounds[first] : self.bounds[last + 1]]
        return ClientData(self.features, self.labels, rows, self.weights, checked=True, schema=self.schema)


class Members:
    """Participants by name, sorted; names that are given twice and features of another width are refused."""

    def __init__(self, deal: Deal | None = None, device: str | None = None) -> None:
        """device: where all compute; each where it says itself when None."""
        self.device = None if device is None else resolve(device)
        self._deal = deal
        self._made: dict[str, Participant] = {}
        self._unmade: dict[str, int] = {} if deal is None else dict(deal.places)
        self._sorted: tuple[str, ...] | None = None
        self._everybody: tuple[Participant, ...] | None = None
        self._states: Path | None = None
        self._held: dict[str, tuple[ClientData, Held]] = {}
        self._width = None if deal is None else int(deal.features.shape[1])

    def __len__(self) -> int:
        return len(self._made) + len(self._unmade)

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._unmade

    def __getitem__(self, name: str) -> Participant:
        # Two workers never ask for the same client at a time.
        if name in self._unmade:
            assert self._deal is not None
            participant = self._deal.participant(name, self.device or "cpu")
            participant.keep_states(self._states)
            self._made[name] = participant
            del self._unmade[name]
        return self._made[name]

    @property
    def names(self) -> tuple[str, ...]:
        if self._sorted is None:
            self._sorted = tuple(sorted([*self._made, *self._unmade]))
        return self._sorted

    @property
    def everybody(self) -> tuple[Participant, ...]:
        """All participants, in the order of their names; those that were not made yet are."""
        if self._everybody is None:
            self._everybody = tuple(self[name] for name in self.names)
        return self._everybody

    def add(self, participant: Participant) -> None:
        name, width = participant.name, participant.data.width
        if name in self:
            raise DataError(f"two participants are called '{name}'; names must differ.")
        if self._width is None:
            self._width = width
        if width != self._width:
            raise DataError(
                f"'{name}' has {width} features per row, the others {[self._width]}. "
                "All must use the same backbone."
            )
        self._made[name] = participant
        self._sorted = self._everybody = None
        if self.device is not None:
            participant.move(self.device)
        participant.keep_states(self._states)

    def remove(self, name: str) -> Participant:
        if name not in self:
            raise DataError(f"no participant is called '{name}'.")
        participant = self[name]
        del self._made[name]
        self._sorted = self._everybody = None
        if not len(self):
            self._width = None
        return participant

    def keep_states(self, folder: Path | None) -> None:
        """Let all keep their states in this folder, also those that join or are made later."""
        self._states = folder
        for participant in self._made.values():
            participant.keep_states(folder)

    @property
    def elsewhere(self) -> bool:
        """Whether somebody computes on a device other than the host."""
        return (self.device or "cpu") != "cpu" or any(each.device != "cpu" for each in self._made.values())

    def rows(self, name: str) -> int:
        """How many rows a client has."""
        client = self._unmade.get(name)
        if client is None:
            return len(self._made[name])
        assert self._deal is not None
        return self._deal.size(client)

    @property
    def width(self) -> int:
        """Features per row."""
        assert self._width is not None
        return self._width

    def label_sets(self) -> list[tuple[str, Array]]:
        """Labels of every client with its name; those of clients that are not made yet stand together."""
        held = [(name, participant.data.own_labels()) for name, participant in sorted(self._made.items())]
        if self._unmade:
            assert self._deal is not None
            labels, order, bounds = self._deal.labels, self._deal.order, self._deal.bounds
            if len(self._unmade) < len(bounds) - 1:
                spans = [order[bounds[client] : bounds[client + 1]] for client in self._unmade.values()]
                labels = labels[np.concatenate(spans)]
            held.append((next(iter(self._unmade)), labels))
        return held

    def holdings(self) -> Holdings:
        """Who holds what; looked at once for as long as a client has the same rows."""
        deal = self._deal
        if deal is not None and not self._made and len(self._unmade) == len(deal.places):
            return Holdings(deal.held, dealt=True)  # of a hundred thousand clients, too
        found = {name: self._held_by(name) for name in self.names}
        return Holdings(found, deal is not None and found.keys() == deal.places.keys())

    def _held_by(self, name: str) -> Held:
        if self._deal is not None and (name in self._unmade or self._has_dealt_rows(name)):
            return self._deal.held[name]
        data, known = self._made[name].data, self._held.get(name)
        if known is None or known[0] is not data:
            known = self._held[name] = (data, held_by(data))
        return known[1]

    @property
    def deal(self) -> Deal:
        """The deal, where all clients have what it gave them and nobody joined or left."""
        deal = self._deal
        if deal is None or len(self) != len(deal.places) or not all(map(self._as_dealt, deal.places)):
            raise DataError("these clients have arrays of their own; their rows lie in no common ones.")
        return deal

    def _as_dealt(self, name: str) -> bool:
        return name in self._unmade or (name in self._made and self._dealt(name))

    def pooled(self, names: Sequence[str]) -> Participant | None:
        """One participant that has the rows of all these; None where they lie in arrays of their own.

        Whether one of them was made does not matter: what a participant keeps besides its rows is not asked.
        """
        if self._deal is None or not all(map(self._as_dealt, names)):
            return None
        return self._deal.pooled(names, self.device or "cpu")

    def _dealt(self, name: str) -> bool:
        """Whether a participant that was made is still the one that was dealt its rows."""
        return self._made[name].device == (self.device or "cpu") and self._has_dealt_rows(name)

    def _has_dealt_rows(self, name: str) -> bool:
        assert self._deal is not None
        data = self._made[name].data
        client = self._deal.places.get(name)
        rows = data.rows
        return (
            client is not None
            and data.source is self._deal.features
            and rows is not None
            and rows.base is self._deal.order
            and len(rows) == self._deal.size(client)
        )


class Pools:
    """Participants that stand for blocks of clients, kept as long as the blocks stay the same."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._held: dict[tuple[str, ...], Participant | None] = {}

    def begin(
        self, blocks: Sequence[Sequence[str]], members: Members, request: Request, chain: Chain
    ) -> None:
        """Prepare an exchange with these blocks; they share one model so far."""
        held = {}
        for block in map(tuple, blocks):
            pool = members.pooled(block)
            kept = self._held.get(block)
            if pool is not None and kept is not None and _same_rows(pool, kept):
                pool = kept
            held[block] = pool
            if pool is not None:
                pool.take_back(self._chain)
        self._held = held
        if not self._chain.accept(request):
            self._chain.accept(request.starting_at(0, chain))

    def of(self, names: Sequence[str]) -> Participant | None:
        return self._held.get(tuple(names))


def _same_rows(one: Participant, other: Participant) -> bool:
    mine, theirs = one.data, other.data
    return mine.source is theirs.source and np.array_equal(mine.rows, theirs.rows)  # type: ignore[arg-type]
