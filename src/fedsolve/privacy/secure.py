"""A federation whose server sees sums only, around an engine that carries letters to clients.

Two trips per run make keys, and two for each stage of the `census` count the rows in their cells; the next
question tells what was counted. Every exchange takes two more, one for the masked terms, one to open their
sum, and one before them where clients check the question.
Methods see totals as in any federation, except that nobody learns who has no rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from fedsolve.arrays import Array, check_choice, check_whole
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.cohort import CohortReport, RunningSum, departed, plain
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.engine import CarriesLetters, Federation, Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.meaning import ADDITIVE
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import kind_of
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import labels_note
from fedsolve.privacy import notes
from fedsolve.privacy.census import CensusStage, Limits, few_columns
from fedsolve.privacy.disclosure import check_method
from fedsolve.privacy.graph import SPARSE_FROM, degree_for
from fedsolve.privacy.joint_seed import about_circle, about_opening, draw_seed, drawing_of
from fedsolve.privacy.ledger import Ledger, Opening
from fedsolve.privacy.notes import CHANNEL, LEAST_COHORT, Setup, least_verified
from fedsolve.privacy.ring import Layout, decode
from fedsolve.privacy.run_store import Asked, Course, RunStore
from fedsolve.privacy.secure_client import (
    CENSUS,
    SecureClient,
    opened_note,
    request_digest,
)
from fedsolve.privacy.sizes import KnownTotals
from fedsolve.privacy.unmasking import Evidence, MaskedSum, Server
from fedsolve.privacy.verifying import QuestionTrips, said_of

_SLOTS = 8  # sums that the keys of one setup last for where the length of the run is not known
_MOST_SLOTS = 32  # longer runs make new keys in between: shares of many slots take time before the first sum
_SPARE_SLOTS = 6  # for the stages of the census, an evaluation, and an array that does not fit into one limb
_DROPOUTS = 0.1  # part of many sites that may leave before they have helped to open a sum
_SLACK = 1 << 20  # bytes that a reply may take besides its numbers


class _OneLimbFailed(Exception):
    """One limb is not enough for these arrays: a term is too large for it, or the total too small."""


class SecureFederation(Federation):
    """A federation around another one, in which nobody sees a client's term.

    colluders: how many clients might side with the server. How many must help to open a sum follows from it,
               and how many neighbours a client has among many (`graph`).
    missing:   "error" stops at the first client that fails, naming it; "continue" goes on with those present,
               which the clients must allow too:
    changing:  whether clients open sums that lack somebody who was asked, and let a run's cohort change. Also
               then, clients that were always in or out together must be at least three.
    limits:    of the disclosure rules, for clients of this process.
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
        colluders: int = 0,
        missing: Literal["error", "continue"] = "error",
        changing: bool = False,
        verify: bool | None = None,
        signatures: int | None = None,
        limits: Limits | None = None,
        ledgers: str | Path | None = None,
        store: str | Path | None = None,
        lasting: bool = False,
        report: Callable[[CohortReport], None] | None = None,
    ) -> None:
        if not isinstance(federation, CarriesLetters):
            raise DataError(f"{type(federation).__name__} cannot carry secure sums; LocalFederation can.")
        check_whole(0, colluders=colluders)
        check_choice("missing", missing, ("error", "continue"))
        if signatures is not None:
            check_whole(1, signatures=signatures)
        self.federation: Federation = federation
        self.within = federation if federation.within is None else federation.within
        self.prefers: Literal["bytes", "exchanges"] = federation.prefers
        self.engine: CarriesLetters = federation
        self.colluders, self.missing, self.changing = colluders, missing, changing
        self.verify = not isinstance(federation, LocalFederation) if verify is None else verify
        self.signatures = signatures
        self.limits = Limits() if limits is None else limits
        self.told = self.limits.told
        if colluders > self.limits.colluders and not self.limits.off:
            self.limits = dataclasses.replace(self.limits, colluders=colluders)
        self._ledgers = None if ledgers is None else Path(ledgers)
        self._attending: dict[str, SecureClient] = {}
        self.verifies = False  # whether clients check the latest question
        self.left_out: Array | None = None  # (features,) columns that the latest census took out, where known
        self.store = None if store is None else RunStore(Path(store))
        self._lasting = lasting
        self._report = report or (lambda report: None)
        self.plan(_SLOTS - _SPARE_SLOTS)

    @property
    def clients(self) -> tuple[str, ...]:
        """Who is asked: everybody at first, later those of the run's last sum."""
        return self._course.cohort or self.federation.clients

    def describe(self) -> Spec:
        return self.federation.describe()

    def plan(self, exchanges: int, recipe: Any = None, done: int = 0) -> None:
        """Begin a new run of so many exchanges, with new keys and everybody who is present.

        recipe: what is trained; the opening says it otherwise. done: exchanges behind it, of a resumed run.
        """
        if self.verify:
            described = None if recipe is None else recipe.note()
            self._trips = QuestionTrips(self, described, resumed=done > 0 or self._lasting)
        self._begin(exchanges)

    def _begin(self, exchanges: int) -> None:
        self._course = Course(secrets.token_hex(16), min(_MOST_SLOTS, exchanges + _SPARE_SLOTS))
        self._server: Server | None = None
        self._received: set[str] = set()
        self._told, self._informed = b"", set[str]()
        self._known = KnownTotals(describe=self.describe)
        self._before: Asked | None = None

    def seeded(self, recipe: Recipe[Any], spec: Spec) -> Recipe[Any]:
        """The recipe with a seed that all clients draw together; as it is where it has none."""
        opening = recipe.start(spec).chain.opening
        if "seed" not in opening["parameters"]:
            return recipe
        self._attend()
        about, kept = about_opening(opening), None if self.store is None else self.store.note("seed")
        drawing = drawing_of(about, self.clients)
        if kept is None or kept.get("drawing") != drawing:
            drawn = draw_seed(self.engine, self.clients, about, self.colluders)
            kept = {"drawing": drawing, "seed": drawn}
            if self.store is not None:
                self.store.keep("seed.json", kept)
        return dataclasses.replace(recipe, method=_seeded(recipe.method, kept["seed"]))

    # -- one exchange ------------------------------------------------------------------------------

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, of which nobody saw one; refused
        where the run's cohort changed."""
        started = time.perf_counter()
        present, members = self.federation.clients, self._course.members
        if (gone := set(self._course.cohort or ()) - set(present)) and not self.changing:
            raise departed(gone, present)
        # Once for the whole exchange: who is there may change meanwhile.
        self.verifies = self.verify and len(request.cohort) >= least_verified(self.colluders)
        if request.position:
            self._take_opening(chain, first=request.exchange == 0)
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
        self._laid_out: Layout | None = None
        # The clients' signed agreement to this question, if they check questions.
        self._agreed = self._agreement(request, chain) if self.verifies else {}
        if kind_of(request.kind).releases is None:  # noise hides rows by itself, and a census is without it
            self._take_census()
        try:
            total = self._sum(request, chain, narrow=True)
        except _OneLimbFailed as failed:  # again in two limbs, in a new slot
            self._known.given_up.update(failed.args)
            total = self._sum(request, chain, narrow=False)
        total.seconds = time.perf_counter() - started
        return total

    def _agreement(self, request: Request, chain: Chain) -> dict[str, Any]:
        """What enough clients sign, who have checked this question."""
        self._attend()
        self._keep()  # sites agree to a question of this very run
        digest = request_digest(decode_request(encode_request(request)))
        # The total before is shown under the keys that it was made with: a run that follows has others.
        before = self._trips.before(digest)
        setup = self._keys().setup if before is None else before.setup
        try:
            self._laid_out = self._known.layout(request, chain)
        except Exception:  # what the sites say to such a question says more
            self._laid_out = Layout(())
        return self._trips.agreed(request, digest, chain, setup, self._course.run, self._laid_out)

    def _sum(self, request: Request, chain: Chain, narrow: bool) -> Total:
        """The total of a request; narrow: in as few limbs as the clients agreed to."""
        layout = self._known.layout(request, chain) if self._laid_out is None else self._laid_out
        if not narrow or (self._agreed and layout.digest() not in self._agreed["layouts"]):
            layout = layout.widened()
        asked, pending, report = self._masked(request, request.cohort, layout, chain)
        term, evidence = self._open(pending, asked, self.verifies)
        known, layout, survivors = self._known, asked.layout, pending.survivors
        if layout.narrow and (coarse := known.too_coarse(term, layout, len(survivors))):
            raise _OneLimbFailed(*coarse)
        bounds = known.check_accuracy(term, layout, len(survivors))
        if self.verifies:
            self._trips.show(evidence)
        self._course.cohort = survivors
        self._keep()
        report.answered, report.bytes_up = list(survivors), pending.masked.limbs.nbytes * len(survivors)
        self._report(report)
        total = report.total(RunningSum(term=term), request, len(survivors))
        digest = hashlib.sha256(notes.purpose("total", sorted(term.arrays), sorted(term.counts.items())))
        for name in sorted(term.arrays):
            digest.update(np.ascontiguousarray(term.arrays[name]).data)
        total.error_bounds, total.noised, total.digest = bounds, len(asked.cohort), digest.hexdigest()
        return total

    def _take_census(self) -> None:
        """Count the rows of all clients in their cells, once in a run; the next question tells the sums."""
        while self._course.census is None:
            server, spec, course = self._keys(), self.describe(), self._course
            stage = course.stage or self._first_stage(spec)
            request = Request(CENSUS, 0, 0, server.sharers, note=stage.note())
            laid_out = stage.layout(spec.features, spec.outputs)
            asked, pending, report = self._masked(request, server.sharers, laid_out, Chain())
            total, evidence = self._open(pending, asked, True)
            history, following = stage.shown(total)
            if stage.name == "columns" and not stage.limits.off:
                few = few_columns(total.arrays["columns"], stage.limits, int(total.counts["sites"]))
                self.left_out = few[0, : spec.features]
            elif stage.name == "crowded" and self.left_out is not None:
                self.left_out = self.left_out | (total.arrays["crowded"][0, : spec.features] > 0)
            setup, survivors, sent = server.setup, pending.survivors, {"request": encode_request(request)}
            about = {"place": setup.place(asked.slot), "history": history}
            arrays, shows = evidence.parts()
            told = notes.pack(CENSUS, setup, {**about, "evidence": {**about, **shows}}, {**arrays, **sent})
            if len(survivors) > notes.committee_size(self.colluders):
                about |= self._checked_by_some(setup, survivors, told, report)
                told = notes.pack(
                    CENSUS, setup, {**about, "counts": dict(total.counts)}, {**total.arrays, **sent}
                )
            self._told, self._informed = told, set()
            if self.store is not None:
                self.store.write("census.safetensors", told)
            if asked.slot == setup.slots - 1:  # the next question has new keys
                self.gathered(dict.fromkeys(survivors, told), _SLACK, lambda name, reply: None, report)
            course.stage = following
            course.census = history if following is None else None
            self._keep()

    def _checked_by_some(
        self, setup: Setup, everybody: tuple[str, ...], told: bytes, report: CohortReport
    ) -> dict[str, Any]:
        """What some of many clients sign of a stage of the census that they check; the others trust them."""
        checking = notes.committee(everybody, setup.run, self.colluders)
        needed = notes.signatures_needed(len(everybody), self.colluders)
        agreed: dict[str, str] = {}

        def take(name: str, reply: bytes) -> None:
            agreed[name] = notes.text(notes.read_letter(reply)[1], "signature")

        self.gathered(dict.fromkeys(sorted(checking[:needed]), told), _SLACK, take, report)
        return {"signatures": agreed, "cohort": everybody}

    def _first_stage(self, spec: Spec) -> CensusStage:
        """Where the census of a run begins: at the newest history that all clients can go on from."""
        course = self._course
        known = [{str(history): bool(done) for history, done in one} for one in course.accounts.values()]
        common = [history for history in known[0] if all(history in one for one in known)]
        if not common and not self.changing:
            most = max((h for one in known for h in one), key=lambda h: sum(h in one for one in known))
            others = sorted(name for name, one in zip(course.accounts, known, strict=True) if most not in one)
            raise CohortError(
                f"{others[:5]} have another account of the rows that took part than other sites have: an "
                "older copy of a ledger, or a new one. Put the newest one back (docs/operations.md), or let "
                "all sites begin with new ledgers."
            )
        history = common[-1] if common else ""
        finished = all(one.get(history, True) for one in known)
        name, classes = "cells" if finished else "columns", labels_note(spec.classes)
        return CensusStage(name, course.run, history, self.limits, classes, labels=len(spec.labels))

    def _masked(
        self, request: Request, names: Sequence[str], layout: Layout, chain: Chain
    ) -> tuple[Asked, MaskedSum, CohortReport]:
        """A request in a free slot, or in its own if it was under way when the server was stopped; the sum of
        masked terms, closed; and who took part. What is asked is written down before anybody is, and whom the
        sum is over before it is opened."""
        digest = request_digest(decode_request(encode_request(request)))  # of what clients read
        course, asked = self._course, self._before
        if asked is not None and asked.request == digest:
            self._before = None
        else:
            sharers = self._keys().sharers
            cohort = tuple(name for name in sorted(names) if name in sharers)
            asked = Asked(digest, course.slot, cohort, layout)
            course.slot, course.asked = course.slot + 1, asked
            self._keep()
        assert self._server is not None
        layout, place = asked.layout, self._server.setup.place(asked.slot)
        report = CohortReport(request.exchange, request.kind, tuple(sorted(request.cohort)))
        for name in [name for name in report.asked if name not in asked.cohort]:
            self._lose(report, name, CohortError("it took no part in the setup of this run"))
        counted = request.kind != CENSUS and kind_of(request.kind).releases is None
        context = notes.context_of(asked.request, layout, (course.census or "") if counted else "")
        stored = None if self.store is None else self.store.sum(place)
        pending = self._server.sum(asked.slot, asked.cohort, layout.wide, layout.narrow, context, stored)
        if stored is not None:
            for name in pending.dropped:
                report.lose(name, CohortError("it had not answered when the server was stopped"))
        else:
            note = {"slot": asked.slot, "cohort": list(asked.cohort), "layout": layout.note()}
            if self._agreed and request.kind != CENSUS:
                note["agreed"] = self._agreed
            if refused := self._collect(pending, report, request, chain, note):
                narrow = {field.name for field in layout.fields if field.exponent is not None}
                if not refused <= narrow:
                    raise TermError(
                        f"{sorted(refused - narrow)} has numbers too large for a secure sum, or NaN. Check "
                        "the features for values whose squares overflow; rescale such columns."
                    )
                raise _OneLimbFailed(*refused)
            pending.close()
            if self.store is not None:
                self.store.keep_sum(place, pending.masked, pending.survivors)
        opening = Opening(course.run, asked.request, pending.survivors)
        if opening not in course.opened:
            course.opened.append(opening)
            self._keep()
        return asked, pending, report

    def _collect(
        self, pending: MaskedSum, report: CohortReport, request: Request, chain: Chain, note: dict[str, Any]
    ) -> set[str]:
        """Add the masked terms of all who answer; the arrays that somebody refused."""
        assert self._server is not None
        server, refused = self._server, set[str]()
        asked: dict[str, Request] = dict.fromkeys(note["cohort"], request)
        # Twice more at most: that a client holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything.
        for _ in range(3):
            lacking: dict[str, Request] = {}

            def take(name: str, reply: bytes, lacking: dict[str, Request] = lacking) -> None:
                told = notes.read_letter(reply)[1]
                self._received.add(name)
                self._informed.add(name)
                if told.get("message") == "needs":
                    lacking[name] = request.starting_at(int(told["have"]), chain)
                    report.catch_up_bytes += lacking[name].nbytes
                elif told.get("message") == "refused":
                    refused.add(str(told["array"]))
                else:
                    pending.add(name, reply)

            encoded = {id(each): encode_request(each) for each in asked.values()}
            letters = {}
            for name, each in asked.items():
                parts = {"request": encoded[id(each)]}
                if self._lasting or name not in self._received:
                    parts["sealed"] = server.shares_for(name)
                if self._told and (self._lasting or name not in self._informed):
                    parts["census"] = self._told
                letters[name] = notes.pack("ask", server.setup, note, parts)
            self.gathered(letters, pending.masked.limbs.nbytes + _SLACK, take, report)
            if not lacking:
                return refused
            asked = lacking
        for name in asked:
            self._lose(report, name, TermError("it still lacks model blocks after being sent them"))
        return refused

    def _open(self, pending: MaskedSum, asked: Asked, witnessed: bool) -> tuple[Term, Evidence]:
        """A sum that is opened, and what shows it; that holds where those in it sign fingerprints of their
        terms, too (witnessed)."""
        setup, survivors, dropped = pending.question.setup, pending.survivors, pending.dropped
        note = {"slot": pending.question.slot, "survivors": list(survivors), "dropped": list(dropped)}
        note |= opened_note(self._course.opened)
        if witnessed:
            pending.witnessed, note["sum"] = True, pending.masked.digest(pending.opening)
        told = dict.fromkeys(survivors, notes.pack("open", setup, note))
        reasons = self.gathered(told, _SLACK, pending.add_opening)
        try:
            total = pending.total()
        except CohortError as problem:
            raise CohortError(
                f"{len(survivors) - len(reasons)} of {len(survivors)} clients helped to open the sum, "
                f"{setup.threshold} must. {said_of(reasons)}."
            ) from problem
        if witnessed and set(pending.signed) != set(survivors):
            raise CohortError(
                f"{len(pending.signed)} of {len(survivors)} clients signed what they sent; all must where "
                f"questions are checked. {said_of(reasons)}."
            )
        about = (setup, asked.slot, asked.request, asked.layout, survivors, dropped)
        return decode(total, asked.layout), Evidence(*about, pending.masked, pending.secrets, pending.signed)

    def _keep(self) -> None:
        """Write down where the run is."""
        if self.store is not None:
            self._course.sizes = self._known.note()
            self.store.keep("course.json", self._course.note())

    def _lose(self, report: CohortReport, name: str, problem: Exception) -> None:
        report.absent.pop(name, None)
        report.lose(name, problem)
        if self.missing == "error":
            self._report(report)
            # Without it the others would have to be other sums; who may leave is said where one is missing.
            raise report.stopped(name, problem, "") from problem

    # -- the run -----------------------------------------------------------------------------------

    def _take_opening(self, chain: Chain, first: bool) -> None:
        """Take the method from the opening; another one begins a new run, and so does a first question."""
        kind: Any = check_method(chain)
        begun, opening = self._course.opening, chain.digests[1]
        if begun is not None and (begun != opening or first):
            self._begin(self._course.slots - _SPARE_SLOTS)
        if self._course.opening is not None:
            return
        additive = kind.additive | ADDITIVE.get(kind.key, frozenset())
        self._known = KnownTotals(additive, kind.recurring, self.describe)
        if self.store is not None and (kept := self.store.resume(opening)) is not None:
            self._course, self._before = kept, kept.asked
            self._known.recall(kept.sizes)
            self._server = self.store.server(kept.run, kept.epoch)
            if self._server is None:  # stopped in the middle of a setup, in whose slots nobody answered
                self._before = None
            else:
                self._told = self.store.census(self._server.setup)
        self._course.opening = opening

    def _keys(self) -> Server:
        """A server with a free slot, with new keys where none is left."""
        course, names = self._course, self.clients
        if self._server is not None and course.slot < self._server.setup.slots:
            return self._server
        self._attend()
        if len(names) < LEAST_COHORT:
            raise CohortError(
                f"{len(names)} clients cannot make a secure sum: of fewer than {LEAST_COHORT}, one would "
                "learn another's term. Train in the open, or pool rows."
            )
        goes_on = self._lasting and self._server is None and course.invited == names
        if not goes_on:  # an epoch that was begun is not begun again: others might come
            course.epoch, course.invited = course.epoch + 1, names
        course.slot, course.asked = 0, None
        self._keep()
        setup = Setup(
            course.run, course.epoch, course.slots, notes.least_threshold(len(names), self.colluders)
        )
        if len(names) >= SPARSE_FROM and not self.changing:  # of many clients, none may drop out of a sum
            setup = self._graph(setup, names)
        server, report = Server(setup), CohortReport(0, "setup", names)
        self._received, self._told = set(), b""
        begin = dict.fromkeys(names, notes.pack("begin", setup, opened_note(course.opened)))
        course.accounts = {}

        def begun(name: str, reply: bytes) -> None:
            arrays, note = notes.read_letter(reply, "begun", setup)
            server.add_keys(name, notes.octets(arrays, "keys").tobytes())
            course.accounts[name] = note.get("accounts", [])

        self.gathered(begin, _SLACK, begun, report)
        self._keep()
        told = {name: server.keys_for(name) for name in server.members}
        # For every neighbour a share of two secrets of each slot.
        largest = _SLACK + len(told) * (1024 + 128 * setup.slots)
        self.gathered(told, largest, server.add_shares, report)
        course.invited, course.members = (), self.federation.clients
        if self.store is not None:
            self.store.keep_setup(server)
        self._server = server
        return server

    def _graph(self, setup: Setup, names: Sequence[str]) -> Setup:
        """The setup, with neighbours on a circle if there are enough clients for that."""
        degree, threshold = degree_for(len(names), self.colluders, math.ceil(_DROPOUTS * len(names)))
        if not degree:
            return setup
        circle = draw_seed(self.engine, names, about_circle(setup), self.colluders)
        return dataclasses.replace(setup, threshold=threshold, degree=degree, circle=circle)

    def gathered(
        self,
        letters: Mapping[str, bytes],
        largest: int,
        take: Callable[[str, bytes], None],
        report: CohortReport | None = None,
    ) -> dict[str, str]:
        """Have the replies to letters taken, each of `largest` bytes at most; of others, by name, why not.

        report: loses those others, which may stop the run.
        """
        reasons = {}
        for name, reply in self.engine.carry(CHANNEL, letters, largest):
            try:
                if isinstance(reply, Exception):
                    raise reply
                take(name, reply)
            except Exception as problem:
                reasons[name] = plain(problem)
                if report is not None:
                    self._lose(report, name, problem)
        return reasons

    def _attend(self) -> None:
        """Give the clients of this process their side of the protocol."""
        if not isinstance(self.federation, LocalFederation):
            return
        for name in self.federation.clients:
            if name in self._attending:
                continue
            folder = None if self._ledgers is None else self._ledgers / quote(name, safe="")
            self._attending[name] = SecureClient(
                self.federation[name],
                lambda message: b"",  # in one process nobody can take another's place
                lambda name, message, signature: True,
                colluders=self.colluders,
                changing=self.changing,
                verified=self.verify,
                limits=self.limits,
                ledger=Ledger(folder),
            )

    def withdrawn(self, site: str, cohort: Collection[str], noise: bool = False) -> None:
        """Enter at the clients of this process that a site has left, which signed that it did."""
        self._attend()
        for client in self._attending.values():
            client.ledger.withdraw(site, cohort, noise)

    def __repr__(self) -> str:
        return f"SecureFederation({self.federation!r})"


def _seeded(method: Any, seed: int) -> Any:
    """The method with this seed, set in it or in the method inside it."""
    inner = getattr(method, "method", None)
    changed = {"seed": seed} if inner is None else {"method": _seeded(inner, seed)}
    return dataclasses.replace(method, **changed)
