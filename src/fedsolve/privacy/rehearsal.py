"""A run tried at one site alone: what it would send, which rows wait, and how much would have been told.

The other sites are pretended to have rows like this one's. Nothing is sent, and nothing is entered in the
site's account of what it told: a copy of it is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve.container import read
from fedsolve.errors import FedsolveError
from fedsolve.federation.cohort import plain
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.method import Method
from fedsolve.federation.participant import ClientData, Participant, ask, kind_of
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import labels_note
from fedsolve.privacy.census import OFF, CensusStage
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.policy import Budget, PolicyGuard, SitePolicy
from fedsolve.privacy.ring import Layout


@dataclass
class Rehearsed:
    """What one method would have sent and told. told: then, in all. refused: why it stopped."""

    method: str
    exchanges: int = 0
    bytes_up: int = 0
    arrays: tuple[str, ...] = ()
    told: float | None = None
    refused: str = ""


@dataclass(eq=False)
class Rehearsal(Federation):
    """A federation of one site, which stands for `sites` sites with rows like its own.

    ledger: the folder of the site's account, of which a copy is used. secure: whether sums are.
    """

    name: str
    data: ClientData
    policy: SitePolicy
    ledger: Path
    sites: int
    secure: bool = True
    classes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        schema, self.sites = self.data.schema, self.sites if self.secure else 1
        declared = self.classes or (None if schema is None else schema.classes) or None
        self._spec = LocalFederation([Participant(self.name, self.data)], classes=declared).describe()
        self._begin("")

    def _begin(self, method: str) -> None:
        """Begin as the site is now."""
        path, policy = self.ledger / "row-key", self.policy
        key = read(path) if path.exists() else b"rehearsal"
        self._account = Disclosure(policy.limits if self.secure else OFF, key, self.ledger, entering=False)
        self._participant = Participant(self.name, self.data)
        self._budget = Budget(None, key, policy.epsilon_total, policy.delta_total, policy.epsilon_most)
        self._participant.guard = PolicyGuard(policy, self._budget).check
        self.run, self._rows = Rehearsed(method), ""

    @property
    def clients(self) -> tuple[str, ...]:
        return self._account.account.cohort or (self.name,)

    def describe(self) -> Spec:
        return self._spec

    def exchange(self, request: Request, chain: Chain) -> Total:
        """This site's answer, as often as there are sites; held to all rules."""
        if not self._rows:
            self.count()
        data, account = self._participant.data, self._account
        term, _ = ask(self._participant, request, chain, rows=account.rows(data), permit=self._permit)
        layout = Layout.of(term := term.on_host())
        if kind_of(request.kind).releases is None:
            account.disclosed(request, chain, term, layout)
            self.run.told = account.told if self.secure else None
        self.run.exchanges += 1
        self.run.bytes_up += 8 * (2 * layout.wide + layout.narrow) if self.secure else term.nbytes
        self.run.arrays = tuple(sorted({*self.run.arrays, *term.arrays}))
        return Total(self._of_all(term), tuple(request.cohort))

    def _permit(self, request: Request, chain: Chain, data: ClientData) -> None:
        if self.secure:
            if request.position:
                self._budget.check_run(chain)
            self._account.permit(request, chain)

    def count(self) -> str:
        """Count the rows as a census would; which of them take part, in words."""
        account, data = self._account, self._participant.data
        self._rows = f"{len(data):,} of {len(data):,} rows take part"
        if not self.secure:
            return self._rows
        now, classes = account.account, labels_note(self._spec.classes)
        name, labels = "cells" if now.finished else "columns", len(self._spec.labels)
        stage: CensusStage | None
        stage = CensusStage(name, "rehearsal", now.history, account.limits, classes, labels=labels)
        while stage is not None:
            total = self._of_all(account.counts(data, stage))
            self._rows = account.admit(data, stage, total, self.clients)
            stage = stage.shown(total)[1]
        return self._rows

    def _of_all(self, term: Term) -> Term:
        arrays = {name: array * self.sites for name, array in term.arrays.items()}
        counts = {name: count * self.sites for name, count in term.counts.items()}
        return dataclasses.replace(term, arrays=arrays, counts=counts)

    def tried(self, method: Method[Any]) -> Rehearsed:
        """A run of this method, to its end or to what is refused, as the next one of this site."""
        self._begin(method.key)
        try:
            Recipe(method, self.data.schema).fit(self)
        except FedsolveError as problem:
            self.run.refused = plain(problem)
        return self.run
