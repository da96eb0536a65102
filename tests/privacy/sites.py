"""Sites whose server may ask what it likes, in any order: for the rules that sites enforce."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

import fedsolve as fs
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.messages import Request, Term
from fedsolve.privacy.census import OFF
from fedsolve.privacy.ledger import Ledger, Opening
from fedsolve.privacy.notes import Setup, context_of, least_threshold, octets, pack, read_letter
from fedsolve.privacy.policy import SitePolicy
from fedsolve.privacy.ring import Layout, decode
from fedsolve.privacy.secure_client import SecureClient, opened_note, request_digest
from fedsolve.privacy.unmasking import MaskedSum, Server

from .setups import repeatable, sign_as, take_census, verify

WIDTH, CLASSES, ROWS = 4, 2, 10

OPEN: dict[str, Any] = {"fewest_rows": 1, "rows_per_width": 0.0, "told": 1e9}
"""A policy without the disclosure rules."""


class Sites:
    """A setup of sites that answer AFL's request; `step` makes other requests of the same meaning."""

    def __init__(
        self,
        clients: int = 9,
        *,
        changing: bool = True,
        colluders: int = 0,
        threshold: int | None = None,
        ledgers: Iterable[Ledger] | None = None,
        scale: float = 1.0,
        policy: SitePolicy | None = None,
        run: str = "run",
        more: int = 0,
    ) -> None:
        """scale: of the rows; the sites' secrets do not depend on it. more: rows added at the last site."""
        rng = np.random.default_rng(0)
        features = scale * rng.standard_normal((clients * ROWS + more, WIDTH))
        labels = np.arange(len(features)) % CLASSES
        owners = np.minimum(np.arange(len(labels)) // ROWS, clients - 1)
        self.federation = fs.LocalFederation.from_arrays(features, labels, owners)
        self.names = self.federation.clients
        self.run = fs.AFL().start(self.federation.describe())
        kept = [Ledger() for _ in self.names] if ledgers is None else list(ledgers)
        self.clients = {
            p.name: SecureClient(
                p,
                sign_as(p.name),
                verify,
                colluders=colluders,
                changing=changing,
                # This server has no signatures to show.
                policy=None if policy is None else dataclasses.replace(policy, verified=False, **OPEN),
                limits=OFF,
                ledger=own,
                random=repeatable(p.name),
            )
            for p, own in zip(self.federation.participants, kept, strict=True)
        }
        chosen = least_threshold(clients, colluders) if threshold is None else threshold
        self.setup = Setup(run, 0, 6, chosen)
        self.server = Server(self.setup)
        self.opened: list[Opening] = []
        self.requests: dict[int, str] = {}
        for name, client in self.clients.items():
            begun = client.answer(pack("begin", self.setup, opened_note([]), {}))
            self.server.add_keys(name, octets(read_letter(begun, "begun", self.setup)[0], "keys").tobytes())
        keys = self.server.keys_for(self.server.members[0])
        for name, client in self.clients.items():
            self.server.add_shares(name, client.answer(keys))
        self.layout = Layout.of(self.term(self.names[0]))
        self.census = self.counted()

    def counted(self) -> str:
        """Let every site take its rows in, as after a census; the history of the census."""
        accounts = [client.disclosure for client in self.clients.values()]
        rows = [client.participant.data for client in self.clients.values()]
        return take_census(accounts, rows, self.federation.describe().classes, self.names, self.setup.run)

    def request(self, step: int = 0) -> Request:
        asked = self.run.request(self.names)
        assert asked is not None
        sent = dataclasses.replace(asked, step=step).starting_at(0, self.run.chain)
        return decode_request(encode_request(sent))

    def term(self, name: str) -> Term:
        """What a site would answer in the open."""
        participant = next(p for p in self.federation.participants if p.name == name)
        answer = participant.answer(self.request())
        assert isinstance(answer, Term)
        answer.mirror()
        return answer

    def gram(self, names: Collection[str]) -> Any:
        return sum(self.term(name).arrays["gram"] for name in names)

    def masked(self, name: str, slot: int, cohort: Collection[str], step: int = 0, **more: Any) -> bytes:
        layout = more.get("layout", self.layout)
        note = {"slot": slot, "cohort": sorted(cohort), "layout": layout.note()}
        parts = {"request": encode_request(self.request(step)), "sealed": self.server.shares_for(name)}
        return self.clients[name].answer(pack("ask", self.setup, note, parts))

    def ask(
        self, slot: int, cohort: Collection[str], step: int = 0, silent: Collection[str] = ()
    ) -> MaskedSum:
        context = context_of(request_digest(self.request(step)), self.layout, self.census)
        pending = self.server.sum(slot, cohort, self.layout.wide, self.layout.narrow, context)
        self.requests[slot] = request_digest(self.request(step))
        for name in sorted(set(cohort) - set(silent)):
            pending.add(name, self.masked(name, slot, cohort, step))
        return pending

    def open(self, pending: MaskedSum, silent: Collection[str] = ()) -> Any:
        """The Gram matrix of a sum that the sites open; the error of the first site that refuses if not.

        silent: whom the server does not ask for help.
        """
        survivors, dropped = pending.close()
        slot = pending.question.slot
        opening = Opening(self.setup.run, self.requests[slot], survivors)
        told = self.opened if opening in self.opened else [*self.opened, opening]
        note = {"slot": slot, "survivors": list(survivors), "dropped": list(dropped), **opened_note(told)}
        refusal: Exception | None = None
        for name in sorted(set(survivors) - set(silent)):
            try:
                pending.add_opening(name, self.clients[name].answer(pack("open", self.setup, note, {})))
            except fs.FedsolveError as problem:
                refusal = refusal or problem
        try:
            total = pending.total()
        except fs.CohortError as too_few:
            raise refusal or too_few from None
        self.opened = told
        return decode(total, self.layout).arrays["gram"]
