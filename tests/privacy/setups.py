"""Setups in one process: clients and a server that hand each other bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.federation.client_data import ClientData
from fedsolve.labels import labels_note
from fedsolve.privacy.census import CensusStage
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import Setup, least_threshold
from fedsolve.privacy.ring import RingVector
from fedsolve.privacy.unmasking import MaskedSum, Server


def repeatable(seed: str) -> Callable[[int], bytes]:
    """Bytes that look random and are the same every time: for tests that compare two runs."""
    state = hashlib.sha256(seed.encode()).digest()
    place = 0

    def draw(size: int) -> bytes:
        nonlocal place
        found = hashlib.shake_256(state + place.to_bytes(8, "big")).digest(size)
        place += 1
        return found

    return draw


def sign_as(name: str) -> Callable[[bytes], bytes]:
    """A stand-in for a signature."""
    return lambda message: hashlib.sha256(name.encode() + message).digest()


def verify(name: str, message: bytes, signature: bytes) -> bool:
    return sign_as(name)(message) == signature


def zeros(wide: int, narrow: int) -> RingVector:
    """The sum of no terms."""
    return RingVector(np.zeros(2 * wide + narrow, dtype=np.uint64), wide)


def plus(total: RingVector, other: RingVector, sign: int = 1) -> None:
    """Add a vector in place, or take it off."""
    combine, before = np.add if sign > 0 else np.subtract, total.low.copy()
    combine(total.low, other.low, out=total.low)
    carry = (total.low if sign > 0 else before) < other.low
    combine(total.high, other.high, out=total.high)
    combine(total.high, carry, out=total.high)
    combine(total.single, other.single, out=total.single)


@dataclass
class Cohort:
    """Clients that are ready for sums, and their server."""

    clients: dict[str, Client]
    server: Server

    @property
    def names(self) -> list[str]:
        return sorted(self.clients)

    def ask(
        self,
        slot: int,
        vectors: dict[str, RingVector],
        silent: Collection[str] = (),
        context: bytes = b"",
    ) -> MaskedSum:
        """A sum with the masked terms of all but the silent ones."""
        first = next(iter(vectors.values()))
        pending = self.server.sum(slot, self.names, first.wide, len(first.single), context)
        for name in self.names:
            if name not in silent:
                pending.add(name, self.clients[name].mask(slot, vectors[name], self.names, context))
        return pending

    def open(self, pending: MaskedSum, silent: Collection[str] = ()) -> RingVector:
        """The total, with the help of all in it but the silent ones."""
        survivors, dropped = pending.close()
        for name in survivors:
            if name not in silent:
                pending.add_opening(name, self.clients[name].open(pending.question.slot, survivors, dropped))
        return pending.total()


def names_of(clients: int) -> list[str]:
    return [f"site-{number:03d}" for number in range(clients)]


def ready(
    clients: int,
    slots: int = 2,
    threshold: int | None = None,
    seed: str = "secrets",
    silent: Sequence[str] = (),
    run: str = "run",
) -> Cohort:
    """A setup that has been made; the silent ones advertised keys but shared nothing."""
    setup = Setup(run, 0, slots, least_threshold(clients) if threshold is None else threshold)
    server = Server(setup)
    made = {
        name: Client(setup, name, sign_as(name), verify, random=repeatable(f"{seed} {name}"))
        for name in names_of(clients)
    }
    for name, client in made.items():
        server.add_keys(name, client.advertise())
    keys = server.keys_for(server.members[0])
    active = {name: client for name, client in made.items() if name not in silent}
    for name, client in active.items():
        server.add_shares(name, client.share(keys))
    for name, client in active.items():
        client.receive(server.shares_for(name))
    return Cohort(active, server)


def take_census(
    accounts: Sequence[Disclosure],
    rows: Sequence[ClientData],
    classes: Any,
    names: Sequence[str],
    run: str,
    heard: list[str] | None = None,
) -> str:
    """All stages of a census, as a server leads sites through them; the history at its end.

    heard: takes the names of the stages.
    """
    known: list[dict[str, bool]] = [dict(account.accounts()) for account in accounts]
    history = [each for each in known[0] if all(each in one for one in known)][-1]
    name = "cells" if all(one[history] for one in known) else "columns"
    note = None if classes is None else labels_note(classes)
    stage: CensusStage | None = CensusStage(name, run, history, accounts[0].limits, note)
    while stage is not None:
        if heard is not None:
            heard.append(stage.name)
        terms = [account.counts(data, stage) for account, data in zip(accounts, rows, strict=True)]
        total = sum(terms[1:], terms[0])
        if stage.name != "cells":  # each has helped to open a sum
            for account in accounts:
                account.settle(run)
        for account, data in zip(accounts, rows, strict=True):
            account.admit(data, stage, total, names)
        history, stage = stage.shown(total)
    return history
