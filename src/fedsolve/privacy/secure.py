"""A federation whose server sees sums only, around an engine that carries letters to clients.

Two trips per run make keys; every exchange takes two more, one for the masked terms, one to open their sum,
and one before them where clients check the question.
Methods see totals as in any federation, except that nobody learns who has no rows.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from fedsolve.checks import check_choice, check_whole
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.cohort import CohortReport, plain
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.engine import CarriesLetters, Federation, KeepsStates, KnowsHoldings, Spec
from fedsolve.federation.holdings import Holdings
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Chain, Request, Total
from fedsolve.federation.method import Method
from fedsolve.federation.recipes import recipe
from fedsolve.privacy.joint_seed import about_opening, draw_seed
from fedsolve.privacy.ledger import Ledger
from fedsolve.privacy.made_up import MadeUpClient
from fedsolve.privacy.notes import (
    LEAST_COHORT,
    Setup,
    least_threshold,
    least_verified,
    octets,
    text,
    unpack,
)
from fedsolve.privacy.question_trips import QuestionTrips
from fedsolve.privacy.ring import decode
from fedsolve.privacy.rules import Opening
from fedsolve.privacy.run_store import Asked, Course, RunStore
from fedsolve.privacy.secure_client import (
    CHANNEL,
    SecureClient,
    check_method,
    context_of,
    letter,
    opened_note,
    read_letter,
    request_digest,
)
from fedsolve.privacy.sizes import KnownTotals
from fedsolve.privacy.unmasking import MaskedSum, Server
from fedsolve.privacy.witness import Evidence, slot_name

if TYPE_CHECKING:
    from fedsolve.model import Model

_SLOTS = 8
"""Sums that the keys of one setup last for where the length of the run is not known."""

_MOST_SLOTS = 32
"""Longer runs make new keys in between: shares of many slots take time before the first exchange."""

_SPARE_SLOTS = 2
"""For an evaluation, and for an array that does not fit into one limb."""

_SLACK = 1 << 20
"""Bytes that a reply may take besides its numbers."""


class _OneLimbFailed(Exception):
    """One limb does not do for some arrays: a term is too large for it, or the total too small."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(sorted(names))
        self.names = names


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
    verify:    whether clients check every question against the totals that were opened, before anybody
               answers it. None: where clients are elsewhere and enough; in one process nobody is hidden from
               anybody, and each client that checks would repeat the server's work there.
    signatures: how many clients must agree to a question; more than half when None.
    store:     folder of one run, which goes on from it when the server was stopped at any moment.
    lasting:   whether replies stay with the engine over a restart of the server, as files do: then a setup
               that was stopped goes on, and every letter is the same whenever it is written.
    report:    called after every exchange with who took part.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        threshold: int | None = None,
        colluders: int = 0,
        missing: Literal["error", "continue"] = "error",
        changing: bool = False,
        verify: bool | None = None,
        signatures: int | None = None,
        ledgers: str | Path | None = None,
        store: str | Path | None = None,
        lasting: bool = False,
        report: Callable[[CohortReport], None] | None = None,
    ) -> None:
        if not isinstance(federation, CarriesLetters):
            raise DataError(f"{type(federation).__name__} cannot carry secure sums; LocalFederation can.")
        check_whole(0, colluders=colluders)
        check_choice("missing", missing, ("error", "continue"))
        if threshold is not None:
            check_whole(1, threshold=threshold)
        if signatures is not None:
            check_whole(1, signatures=signatures)
        self.federation: Federation = federation
        self.prefers: Literal["bytes", "exchanges"] = federation.prefers
        self._engine: CarriesLetters = federation
        self.threshold = threshold
        self.colluders = colluders
        self.missing = missing
        self.changing = changing
        self.verify = not isinstance(federation, LocalFederation) if verify is None else verify
        self.signatures = signatures
        self._ledgers = None if ledgers is None else Path(ledgers)
        self._attending: set[str] = set()
        self._verifies = False
        self._store = RunStore(None if store is None else Path(store))
        self._lasting = lasting
        self._report = report or (lambda report: None)
        self.plan(_SLOTS - _SPARE_SLOTS)

    @property
    def clients(self) -> tuple[str, ...]:
        """Who is asked: everybody at first, then those of the run's first sum."""
        return self._course.cohort or self.federation.clients

    def describe(self) -> Spec:
        return self.federation.describe()

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, where they live in this process."""
        if isinstance(self.federation, KeepsStates):
            self.federation.keep_states(folder)

    def holdings(self) -> Holdings | None:
        """Who holds what, where the clients live in this process."""
        return self.federation.holdings() if isinstance(self.federation, KnowsHoldings) else None

    def evaluate(self, model: Model) -> float:
        """Accuracy over all clients' rows (R² for regression), from a secure sum."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    def plan(self, exchanges: int, method: Any = None, done: int = 0) -> None:
        """Begin a new run of so many exchanges, with new keys and everybody who is present.

        method: which is trained; its opening says it otherwise. done: exchanges that are behind it, of a run
        that is resumed.
        """
        described = recipe(method) if self.verify and method is not None else None
        self._trips = QuestionTrips(
            self._engine,
            self._store,
            self.colluders,
            self.signatures,
            self.changing,
            described,
            resumed=done > 0,
        )
        self._plan(exchanges)

    def _plan(self, exchanges: int) -> None:
        self._course = Course(secrets.token_hex(16), min(_MOST_SLOTS, exchanges + _SPARE_SLOTS))
        self._server: Server | None = None
        self._received: set[str] = set()
        self._known = KnownTotals()
        self._before: Asked | None = None
        self._made_up = MadeUpClient(self.describe)

    def seeded(self, method: Method[Any], spec: Spec) -> Method[Any]:
        """The method with a seed that all clients draw together; as it is where it has none."""
        opening = method.start(spec).chain.blocks[0].note["opening"]
        if "seed" not in opening["parameters"]:
            return method
        self._attend()
        about = about_opening(opening)
        kept = self._store.seed(about) or {"about": about, "run": seed_mark(), "attempt": 0}
        if "seed" not in kept:
            self._store.keep_seed(kept)
            try:
                drawn = draw_seed(self._engine, self.clients, kept["run"], kept["attempt"], about)
            except CohortError:
                self._store.keep_seed({**kept, "attempt": kept["attempt"] + 1})
                raise
            kept = {**kept, "seed": drawn}
            self._store.keep_seed(kept)
        return with_seed(method, kept["seed"])

    # -- one exchange ------------------------------------------------------------------------------

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, of which nobody saw one."""
        started = time.perf_counter()
        self._agreed = self._enter(request, chain)
        asked = self._asked_before(request)
        try:
            if asked is None:
                asked = self._question(request, chain, narrow=True)
            total = self._sum(asked, request, chain)
        except _OneLimbFailed as failed:  # again in two limbs, in a new slot
            self._known.give_up(failed.names)
            total = self._sum(self._question(request, chain, narrow=False), request, chain)
        total.seconds = time.perf_counter() - started
        return total

    def _enter(self, request: Request, chain: Chain) -> dict[str, Any]:
        """Bring the run to this request; what the clients agree to it with, where they check questions."""
        # Once for the whole exchange: who is there may change meanwhile.
        self._verifies = self.verify and len(request.cohort) >= least_verified(self.colluders)
        if not self._verifies:
            self._follow(request, chain)
            return {}
        digest = request_digest(_sent(request))
        setup = self._trips.before(digest)
        if setup is None:
            self._follow(request, chain)
            setup = self._keys().setup
            return self._trips.agreed(request, digest, chain, setup, self.clients, self.prefers)
        # The total before is shown under the keys that it was made with: a run that follows may have others.
        self._attend()
        agreed = self._trips.agreed(request, digest, chain, setup, self.clients, self.prefers)
        self._follow(request, chain)
        return agreed

    @property
    def verifies(self) -> bool:
        """Whether clients checked the latest question: where that is wanted, and there are enough."""
        return self._verifies

    def _asked_before(self, request: Request) -> Asked | None:
        """The question under way when the server was stopped, if it is this one: it has its slot."""
        before, self._before = self._before, None
        return before if before is not None and before.request == request_digest(_sent(request)) else None

    def _question(self, request: Request, chain: Chain, narrow: bool) -> Asked:
        """The request in a free slot, written down before anybody is asked."""
        server, slot = self._next_slot()
        cohort = tuple(name for name in sorted(request.cohort) if name in server.sharers)
        known, clients = self._known, len(request.cohort)
        exponents, bounded = known.exponents(clients), known.bounded(request.sizes(), clients)
        layout = self._made_up.layout(request, chain, exponents, bounded)
        if not narrow:
            layout = layout.widened()
        asked = Asked(request_digest(_sent(request)), slot, cohort, layout)
        self._course.asked = asked
        self._store.keep(self._course)
        return asked

    def _sum(self, asked: Asked, request: Request, chain: Chain) -> Total:
        assert self._server is not None
        report = CohortReport.of(request, asked.cohort)
        for name in list(report.absent):
            self._lose(report, name, CohortError("it took no part in the setup of this run"))
        pending = self._masked(asked, report, request, chain)
        opening = Opening(self._course.run, asked.request, pending.survivors)
        if opening not in self._course.opened:
            self._course.opened.append(opening)
            self._store.keep(self._course)
        signed = self._open(pending)
        layout, survivors = asked.layout, pending.survivors
        term = decode(pending.total(), layout)
        if coarse := self._known.too_coarse(term, layout, len(survivors)):
            raise _OneLimbFailed(coarse)
        bounds = self._known.check_accuracy(term, layout, len(survivors))
        self._known.remember(term)
        if self.verifies:
            self._trips.show(
                Evidence(
                    self._server.setup,
                    asked.slot,
                    asked.request,
                    layout,
                    survivors,
                    pending.dropped,
                    pending.masked,
                    *pending.secrets(),
                    signed,
                )
            )
        self._course.cohort, self._course.sizes = survivors, self._known.note()
        self._store.keep(self._course)
        report.answered, report.bytes_up = list(survivors), pending.masked.nbytes * len(survivors)
        self._report(report)
        return Total(
            term=term,
            cohort=survivors,
            missing=report.missing,
            bytes_up=report.bytes_up,
            bytes_down=request.nbytes * len(survivors),
            catch_up_bytes=report.catch_up_bytes,
            error_bounds=bounds,
        )

    def _masked(self, asked: Asked, report: CohortReport, request: Request, chain: Chain) -> MaskedSum:
        """The sum of masked terms, closed and written down together with whom it is over."""
        assert self._server is not None
        layout, place = asked.layout, slot_name(self._server.setup, asked.slot)
        sized = (layout.wide, layout.narrow, context_of(asked.request, layout))
        stored = self._store.sum(place)
        if stored is not None:
            pending = self._server.sum(
                asked.slot, asked.cohort, *sized, masked=stored[0], survivors=stored[1]
            )
            for name in pending.dropped:
                report.lose(name, CohortError("it had not answered when the server was stopped"))
            return pending
        pending = self._server.sum(asked.slot, asked.cohort, *sized)
        note = {"slot": asked.slot, "cohort": list(asked.cohort), "layout": layout.note()}
        if self._agreed:
            note["agreed"] = self._agreed
        refused = self._collect(pending, report, request, chain, note)
        if refused:
            narrow = {field.name for field in layout.fields if field.exponent is not None}
            if not refused <= narrow:
                raise TermError(
                    f"{sorted(refused - narrow)} has numbers too large for a secure sum, or NaN. Check the "
                    "features for values whose squares overflow; rescale such columns."
                )
            raise _OneLimbFailed(refused)
        survivors, _ = pending.close()
        self._store.keep_sum(place, pending.masked, survivors)
        return pending

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
            for name, reply in self._ask(asked, note, pending.masked.nbytes):
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
        self, asked: Mapping[str, Request], note: Mapping[str, Any], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        assert self._server is not None
        encoded = {id(request): encode_request(request) for request in asked.values()}
        letters = {}
        for name, request in asked.items():
            parts = {"request": encoded[id(request)]}
            if self._lasting or name not in self._received:
                parts["sealed"] = self._server.shares_for(name)
            letters[name] = letter("ask", self._server.setup, note, parts)
        return self._engine.carry(CHANNEL, letters, largest + _SLACK)

    def _open(self, pending: MaskedSum) -> dict[str, tuple[str, str]]:
        """Ask for help to open a sum; signed fingerprints of its terms, where questions are checked."""
        assert self._server is not None
        survivors, dropped = pending.survivors, pending.dropped
        slot = pending.question.slot
        note = {"slot": slot, "survivors": list(survivors), "dropped": list(dropped)}
        note |= opened_note(self._course.opened)
        if self.verifies:
            note["sum"] = pending.masked.digest(pending.opening)
        signed: dict[str, tuple[str, str]] = {}
        told = letter("open", self._server.setup, note, {})
        reasons = {}
        for name, reply in self._engine.carry(CHANNEL, dict.fromkeys(survivors, told), _SLACK):
            try:
                if isinstance(reply, Exception):
                    raise reply
                if self.verifies:
                    arrays, witness = unpack(reply, "witnessed", self._server.setup)
                    signed[name] = text(witness, "value"), text(witness, "signature")
                    reply = octets(arrays, "opened").tobytes()
                pending.add_opening(name, reply)
            except Exception as problem:
                reasons[name] = plain(problem)
        if not pending.can_open:
            said = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*reasons.items()][:2])
            raise CohortError(
                f"{len(survivors) - len(reasons)} of {len(survivors)} clients helped to open the sum, "
                f"{self._server.setup.threshold} must. {said}."
            )
        if self.verifies and set(signed) != set(survivors):
            said = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*reasons.items()][:2])
            raise CohortError(
                f"{len(signed)} of {len(survivors)} clients signed what they sent; all must where questions "
                f"are checked. {said}."
            )
        return signed

    def _lose(self, report: CohortReport, name: str, problem: Exception) -> None:
        report.absent.pop(name, None)
        report.lose(name, problem)
        if self.missing == "error":
            self._report(report)
            raise report.stopped(name, problem) from problem

    # -- the run -----------------------------------------------------------------------------------

    def _follow(self, request: Request, chain: Chain) -> None:
        """Take the method from the opening, another one begins a new run; refuse a cohort that changed."""
        if request.position:
            self._take_opening(request, chain)
        self._check_cohort(request)

    def _take_opening(self, request: Request, chain: Chain) -> None:
        kind: Any = check_method(chain)
        begun, opening = self._course.opening, chain.digests[1]
        if begun is not None and (begun != opening or request.exchange == 0):
            self._plan(self._course.slots - _SPARE_SLOTS)
        if self._course.opening is not None:
            return
        kept = self._store.resume(opening)
        if kept is not None:
            self._course, self._before = kept, kept.asked
            self._server = self._store.server(kept.run, kept.epoch)
            if self._server is None:  # stopped in the middle of a setup, in whose slots nobody answered
                self._before = None
        self._course.opening = opening
        self._known = KnownTotals(kind.additive, kind.recurring)
        self._known.recall(self._course.sizes)
        self._made_up = MadeUpClient(self.describe)

    def _check_cohort(self, request: Request) -> None:
        members = self._course.members
        joined = sorted(set(self.federation.clients) - set(members)) if members else []
        if joined:
            raise CohortError(
                f"{joined[:5]} joined in mid-run; a secure run keeps its cohort, since totals before and "
                "after would show what they added. Begin a new run with them."
            )
        left_out = sorted(set(self.clients) - set(request.cohort))
        if left_out and not self.changing:
            raise CohortError(
                f"this request leaves out {left_out[:5]} (participation below 1?); a secure run keeps its "
                "cohort, since totals with and without them would show what they add. Ask everybody, or "
                "allow changes on both sides (changing=True)."
            )

    def _next_slot(self) -> tuple[Server, int]:
        """A free slot; new keys where none is left."""
        server = self._keys()
        self._course.slot += 1
        return server, self._course.slot - 1

    def _keys(self) -> Server:
        """A server with a free slot."""
        if self._server is None or self._course.slot >= self._server.setup.slots:
            self._server = self._set_up()
        return self._server

    def _set_up(self) -> Server:
        course, names = self._course, self.clients
        self._attend()
        if len(names) < LEAST_COHORT:
            raise CohortError(
                f"{len(names)} clients cannot make a secure sum: of fewer than {LEAST_COHORT}, one would "
                "learn another's term. Train in the open, or pool rows."
            )
        threshold = least_threshold(len(names), self.colluders) if self.threshold is None else self.threshold
        goes_on = self._lasting and self._server is None and course.invited == names
        if not goes_on:  # an epoch that was begun is not begun again: others might come
            course.epoch, course.invited = course.epoch + 1, names
        course.slot, course.asked = 0, None
        self._store.keep(course)
        setup = Setup(course.run, course.epoch, course.slots, threshold)
        server, report = Server(setup), CohortReport(0, "setup", names)
        self._received = set()
        begin = dict.fromkeys(names, letter("begin", setup, opened_note(course.opened), {}))
        keys = self._gathered(begin, report, server.add_keys)
        shares = self._gathered(dict.fromkeys(server.members, server.keys()), report, server.add_shares)
        course.invited, course.members = (), self.federation.clients
        self._store.keep_setup(setup, keys, shares)
        return server

    def _gathered(
        self, letters: Mapping[str, bytes], report: CohortReport, add: Callable[[str, bytes], None]
    ) -> dict[str, bytes]:
        """The replies to letters of a setup, by name, each taken by `add`."""
        found = {}
        for name, reply in self._engine.carry(CHANNEL, letters):
            try:
                if isinstance(reply, Exception):
                    raise reply
                add(name, reply)
                found[name] = reply
            except Exception as problem:
                self._lose(report, name, problem)
        return found

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
                verified=self.verify,
                ledger=Ledger(folder),
            )
            client.attend()
            self._attending.add(participant.name)

    def __repr__(self) -> str:
        return f"SecureFederation({self.federation!r})"


def seed_mark() -> str:
    """A new name for the drawing of a seed."""
    return secrets.token_hex(16)


def with_seed(method: Method[Any], seed: int) -> Method[Any]:
    """The method with this seed, or around one that has it."""
    inner = getattr(method, "method", None)
    change = {"seed": seed} if inner is None else {"method": with_seed(inner, seed)}
    return dataclasses.replace(method, **change)  # type: ignore[type-var]


def _sent(request: Request) -> Request:
    """The request as clients read it."""
    return decode_request(encode_request(request))
