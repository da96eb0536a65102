"""A federation whose server sees sums only, around an engine that carries letters to clients.

Two trips per run make keys; every exchange takes two more, one for the masked terms, one to open their sum.
Methods see totals as in any federation, except that nobody learns who has no rows.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import numpy as np

from fedsolve.checks import check_choice, check_whole
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.cohort import CohortReport, plain
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.engine import CarriesLetters, Federation, KeepsStates, Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Chain, Needs, Request, Total
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.privacy.ledger import Ledger
from fedsolve.privacy.notes import LEAST_COHORT, Setup, least_threshold
from fedsolve.privacy.ring import decode
from fedsolve.privacy.ring_layout import Exponents, Layout
from fedsolve.privacy.secure_client import (
    CHANNEL,
    SecureClient,
    check_method,
    context_of,
    letter,
    read_letter,
)
from fedsolve.privacy.sizes import KnownTotals
from fedsolve.privacy.unmasking import MaskedSum, Server

if TYPE_CHECKING:
    from fedsolve.model import Model

_SLOTS = 8
"""Sums that the keys of one setup last for where the length of the run is not known."""

_MOST_SLOTS = 32
"""Longer runs make new keys in between: shares of many slots take time before the first exchange."""

_SPARE_SLOTS = 2
"""For an evaluation, and for an array that does not fit into one limb."""


class _OneLimbFailed(Exception):
    """One limb does not do for some array: a term is too large for it, or the total too small."""


class SecureFederation:
    """A federation around another one, in which nobody sees a client's term.

    threshold: how many clients must help to open a sum; the fewest that are safe when None.
    colluders: how many clients might side with the server.
    missing:   "error" stops at the first client that fails, naming it; "continue" goes on with those present,
               which the clients must allow too:
    changing:  whether clients open sums that lack somebody who was asked, and let a run's cohort change. Also
               then, clients that were always in or out together must be at least three.
    ledgers:   folder with one folder per client, in which it keeps account of what it opened; in memory when
               None, which forgets at the end of this object.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        threshold: int | None = None,
        colluders: int = 0,
        missing: Literal["error", "continue"] = "error",
        changing: bool = False,
        ledgers: str | Path | None = None,
    ) -> None:
        if not isinstance(federation, CarriesLetters):
            raise DataError(f"{type(federation).__name__} cannot carry secure sums; LocalFederation can.")
        check_whole(0, colluders=colluders)
        check_choice("missing", missing, ("error", "continue"))
        if threshold is not None:
            check_whole(1, threshold=threshold)
        self.federation: Federation = federation
        self.prefers: Literal["bytes", "exchanges"] = federation.prefers
        self._engine: CarriesLetters = federation
        self.threshold = threshold
        self.colluders = colluders
        self.missing = missing
        self.changing = changing
        self._ledgers = None if ledgers is None else Path(ledgers)
        self._attending: set[str] = set()
        self.plan(_SLOTS - _SPARE_SLOTS)

    @property
    def clients(self) -> tuple[str, ...]:
        """Who is asked: everybody at first, then those of the run's first sum."""
        return self._cohort or self.federation.clients

    def describe(self) -> Spec:
        return self.federation.describe()

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, where they live in this process."""
        if isinstance(self.federation, KeepsStates):
            self.federation.keep_states(folder)

    def evaluate(self, model: Model) -> float:
        """Accuracy over all clients' rows (R² for regression), from a secure sum."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    def plan(self, exchanges: int) -> None:
        """Begin a new run of so many exchanges, with new keys and everybody who is present."""
        self._slots = min(_MOST_SLOTS, exchanges + _SPARE_SLOTS)
        self._run = secrets.token_hex(16)
        self._epoch = self._slot = 0
        self._server: Server | None = None
        self._members: tuple[str, ...] = ()
        self._cohort: tuple[str, ...] | None = None
        self._received: set[str] = set()
        self._known = KnownTotals()
        self._opening: str | None = None
        self._probe: Participant | None = None

    # -- one exchange ------------------------------------------------------------------------------

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, of which nobody saw one."""
        started = time.perf_counter()
        if request.position:
            self._follow(request, chain)
        self._check_joined()
        try:
            total = self._sum(request, chain, self._known.exponents(len(request.cohort)))
        except _OneLimbFailed:  # again in two limbs, in a new slot
            total = self._sum(request, chain, {})
        total.seconds = time.perf_counter() - started
        return total

    def _sum(self, request: Request, chain: Chain, exponents: Exponents) -> Total:
        server, slot = self._next_slot()
        report = CohortReport.of(request, server.sharers)
        cohort = tuple(name for name in report.asked if name not in report.absent)
        for name in list(report.absent):
            self._lose(report, name, CohortError("it took no part in the setup of this run"))
        layout = self._layout(request, chain, exponents)
        sent = decode_request(encode_request(request))
        pending = server.sum(slot, cohort, layout.wide, layout.narrow, context_of(sent, layout))
        note = {"slot": slot, "cohort": list(cohort), "layout": layout.note()}
        refused = self._collect(pending, report, request, chain, note)
        if refused:
            narrow = {field.name for field in layout.fields if field.exponent is not None}
            if not refused <= narrow:
                raise TermError(
                    f"{sorted(refused - narrow)} has numbers too large for a secure sum, or NaN. Check the "
                    "features for values whose squares overflow; rescale such columns."
                )
            raise _OneLimbFailed
        survivors, _ = pending.close()
        self._open(pending)
        term = decode(pending.total(), layout)
        if self._known.too_coarse(term, layout, len(survivors)):
            raise _OneLimbFailed
        bounds = self._known.check_accuracy(term, layout, len(survivors))
        self._known.remember(term)
        self._cohort = survivors
        return Total(
            term=term,
            cohort=survivors,
            missing=report.missing,
            bytes_up=pending.masked.nbytes * len(survivors),
            bytes_down=request.nbytes * len(survivors),
            catch_up_bytes=report.catch_up_bytes,
            error_bounds=bounds,
        )

    def _collect(
        self, pending: MaskedSum, report: CohortReport, request: Request, chain: Chain, note: dict[str, Any]
    ) -> set[str]:
        """Add the masked terms of all who answer; the arrays that somebody refused."""
        refused: set[str] = set()
        asked: dict[str, Request] = dict.fromkeys(note["cohort"], request)
        # Twice more at most: that a client holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything.
        for _ in range(3):
            lacking: dict[str, Request] = {}
            for name, reply in self._ask(asked, note):
                try:
                    if isinstance(reply, Exception):
                        raise reply
                    told = read_letter(reply)[1]
                    self._received.add(name)
                    if told.get("message") == "needs":
                        lacking[name] = request.starting_at(int(told["have"]), chain)
                        report.catch_up_bytes += lacking[name].nbytes
                    elif told.get("message") == "refused":
                        refused.add(str(told["array"]))
                    else:
                        pending.add(name, reply)
                except Exception as problem:
                    self._lose(report, name, problem)
            if not lacking:
                return refused
            asked = lacking
        for name in asked:
            self._lose(report, name, TermError("it still lacks model blocks after being sent them"))
        return refused

    def _ask(
        self, asked: Mapping[str, Request], note: Mapping[str, Any]
    ) -> Iterator[tuple[str, bytes | Exception]]:
        assert self._server is not None
        encoded = {id(request): encode_request(request) for request in asked.values()}
        letters = {}
        for name, request in asked.items():
            parts = {"request": encoded[id(request)]}
            if name not in self._received:
                parts["sealed"] = self._server.shares_for(name)
            letters[name] = letter("ask", self._server.setup, note, parts)
        return self._engine.carry(CHANNEL, letters)

    def _open(self, pending: MaskedSum) -> None:
        assert self._server is not None
        survivors, dropped = pending.survivors, pending.dropped
        slot = pending.question.slot
        note = {"slot": slot, "survivors": list(survivors), "dropped": list(dropped)}
        told = letter("open", self._server.setup, note, {})
        reasons = {}
        for name, reply in self._engine.carry(CHANNEL, dict.fromkeys(survivors, told)):
            try:
                if isinstance(reply, Exception):
                    raise reply
                pending.add_opening(name, reply)
            except Exception as problem:
                reasons[name] = plain(problem)
        if not pending.can_open:
            said = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*reasons.items()][:2])
            raise CohortError(
                f"{len(survivors) - len(reasons)} of {len(survivors)} clients helped to open the sum, "
                f"{self._server.setup.threshold} must. {said}."
            )

    def _lose(self, report: CohortReport, name: str, problem: Exception) -> None:
        report.absent.pop(name, None)
        report.lose(name, problem)
        if self.missing == "error":
            raise report.stopped(name, problem) from problem

    # -- the run -----------------------------------------------------------------------------------

    def _follow(self, request: Request, chain: Chain) -> None:
        """Take the method from the opening; another one begins a new run."""
        additive: frozenset[str] = check_method(chain).additive  # type: ignore[attr-defined]
        if self._opening is not None and (self._opening != chain.digests[1] or request.exchange == 0):
            self.plan(self._slots - _SPARE_SLOTS)
        if self._opening is None:
            self._opening = chain.digests[1]
            self._known = KnownTotals(additive)
            self._probe = None

    def _check_joined(self) -> None:
        joined = sorted(set(self.federation.clients) - set(self._members)) if self._members else []
        if joined:
            raise CohortError(
                f"{joined[:5]} joined in mid-run; a secure run keeps its cohort, since totals before and "
                "after would show what they added. Begin a new run with them."
            )

    def _layout(self, request: Request, chain: Chain, exponents: Exponents) -> Layout:
        """What an answer to this request looks like: that of a client with made-up rows."""
        if self._probe is None:
            self._probe = Participant("made-up rows", _made_up(self.describe(), chain))
        term = self._probe.answer(request)
        for _ in range(2):
            if isinstance(term, Needs):
                term = self._probe.answer(request.starting_at(term.have, chain))
        assert not isinstance(term, Needs)
        own = [name for name in term.arrays if "@" in name]
        if own:
            raise DataError(f"the answers have {own[0]!r}, which is no addend of a sum.")
        return Layout.of(term, exponents)

    def _next_slot(self) -> tuple[Server, int]:
        """A free slot; new keys where none is left."""
        if self._server is None or self._slot == self._server.setup.slots:
            self._server = self._set_up()
            self._epoch, self._slot = self._epoch + 1, 0
        self._slot += 1
        return self._server, self._slot - 1

    def _set_up(self) -> Server:
        names = self.clients
        self._attend()
        if len(names) < LEAST_COHORT:
            raise CohortError(
                f"{len(names)} clients cannot make a secure sum: of fewer than {LEAST_COHORT}, one would "
                "learn another's term. Train in the open, or pool rows."
            )
        threshold = least_threshold(len(names), self.colluders) if self.threshold is None else self.threshold
        setup = Setup(self._run, self._epoch, self._slots, threshold)
        server, report = Server(setup), CohortReport(0, "setup", names)
        self._members, self._received = self.federation.clients, set()
        begin = dict.fromkeys(names, letter("begin", setup, {}, {}))
        for name, reply in self._engine.carry(CHANNEL, begin):
            self._take(report, name, reply, server.add_keys)
        keys = server.keys()
        for name, reply in self._engine.carry(CHANNEL, dict.fromkeys(server.members, keys)):
            self._take(report, name, reply, server.add_shares)
        return server

    def _take(self, report: CohortReport, name: str, reply: bytes | Exception, add: Any) -> None:
        try:
            if isinstance(reply, Exception):
                raise reply
            add(name, reply)
        except Exception as problem:
            self._lose(report, name, problem)

    def _attend(self) -> None:
        """Give the clients of this process their side of the protocol."""
        if not isinstance(self.federation, LocalFederation):
            return
        for participant in self.federation.participants:
            if participant.name in self._attending:
                continue
            folder = None if self._ledgers is None else self._ledgers / quote(participant.name, safe="")
            client = SecureClient(
                participant,
                lambda message: b"",  # in one process nobody can take another's place
                lambda name, message, signature: True,
                colluders=self.colluders,
                changing=self.changing,
                ledger=Ledger(folder),
            )
            participant.attend(CHANNEL, client.answer)
            self._attending.add(participant.name)

    def __repr__(self) -> str:
        return f"SecureFederation({self.federation!r})"


def _made_up(spec: Spec, chain: Chain) -> ClientData:
    """A few rows of every class that nobody owns: their answer has the shapes of everybody's."""
    rows = 2 * max(2, spec.outputs)
    features = np.random.default_rng(0).standard_normal((rows, spec.features)).astype(np.float32)
    if spec.classes is None:
        labels = np.zeros(rows if spec.outputs == 1 else (rows, spec.outputs))
    else:
        labels = np.resize(spec.classes, rows)
    return ClientData(features, labels, schema=run_schema(chain))
