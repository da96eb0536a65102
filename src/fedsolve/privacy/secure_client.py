"""The client's side of a secure federation: letters in, letters out, as bytes that any engine can carry.

    begin    a setup, and what was opened in its run -> its public keys
    members  all members' keys          -> shares of its secrets, sealed for each of them
    ask      a request, whom it is for, where each array stands, and what shows the `census` of rows before it
             -> the masked term
    census   what shows it, to those who check it for many -> a signature
    open     who is in the sum, who dropped out, what was opened before -> shares that open the total
    check    a question, and what shows the total before it -> a signature that it follows from the totals

Instead of a masked term the reply may be `needs`, when blocks of the model are missing, or `refused`, when an
array is too large for the layout. The latter is the one reply that depends on data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import CohortError, TermError, explained
from fedsolve.federation.encoding import decode_request
from fedsolve.federation.encoding import request_digest as request_digest
from fedsolve.federation.messages import Chain, Needs, Request, Term, Total
from fedsolve.federation.noisy_sums import NoisyAnswer, release_of
from fedsolve.federation.participant import ClientData, Participant, kind_of
from fedsolve.privacy import notes
from fedsolve.privacy.census import CensusStage, Limits
from fedsolve.privacy.disclosure import Disclosure, check_method
from fedsolve.privacy.joint_seed import SEED_CHANNEL, SeedBook, SeedSite, about_circle
from fedsolve.privacy.ledger import Ledger, Opening
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import CHANNEL, Question, Setup
from fedsolve.privacy.policy import Budget, PolicyGuard, SitePolicy
from fedsolve.privacy.primitives import Sign, Verify
from fedsolve.privacy.ring import Layout, OutOfRange, encode
from fedsolve.privacy.shamir import Random
from fedsolve.privacy.verifying import CheckedTraining, QuestionCheck, Shown, SignedQuestions, agreed_message

CENSUS = "census"
"""The kind of request that counts the rows of a cohort in their cells, once in every run."""


@dataclass(frozen=True)
class Sent:
    """Something that leaves a client, described for its people: kind, words, bytes and request."""

    what: str
    text: str
    bytes_up: int
    request: Request | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


class SecureClient:
    """Answers a participant's letters from now on: its term leaves it masked, and it opens what rules allow.

    colluders: how many other clients may side with the server; the threshold must allow for them.
    changing:  whether it opens sums that lack clients who were asked, and lets a run's cohort change.
    policy:    what it answers at all; colluders, changing and limits are the policy's then.
    limits:    what the disclosure rules ask for.
    verified:  whether questions must have been checked by more than half of the clients; the policy's then.
    tell:      shows the people at this client what it sends.
    """

    def __init__(
        self,
        participant: Participant,
        sign: Sign,
        verify: Verify,
        *,
        colluders: int = 0,
        changing: bool = False,
        verified: bool = False,
        policy: SitePolicy | None = None,
        limits: Limits | None = None,
        ledger: Ledger | None = None,
        tell: Callable[[Sent], None] | None = None,
        random: Random = secrets.token_bytes,
    ) -> None:
        self.participant = participant
        self.ledger = Ledger() if ledger is None else ledger
        self.policy = policy
        rules = policy or SitePolicy(colluders=colluders, changing=changing, verified=verified)
        limits = (limits or Limits()) if policy is None else policy.limits
        folder, key, self.rules = self.ledger.folder, self.ledger.row_key, rules
        self.changing, self._colluders = rules.changing, rules.colluders
        self.disclosure = Disclosure(limits, key, folder, self.changing, withdrawn=self.ledger.withdrawn)
        self._sign, self._verify, self._random = sign, verify, random
        self._signatures = SignedQuestions(verify, self._colluders, rules.verified, rules.signatures)
        self._check = QuestionCheck(folder) if rules.verified else None
        if folder is not None:
            _ = self.seeds, self.budget  # what is on the disk is read before anything is answered
        if policy is not None:
            self._guard = PolicyGuard(policy, self.budget)
            participant.guard = self._permit
        self._tell = tell or (lambda sent: None)
        self._settings: Any = {"colluders": self._colluders, "drawn": self._drawn, "random": random}
        kept = self.ledger.secrets
        self._client = None if kept is None else Client.load(kept, sign, verify, **self._settings)
        participant.channels |= {CHANNEL: self.answer, SEED_CHANNEL: self._draw}

    @cached_property
    def seeds(self) -> SeedSite:
        """This site's part in drawing seeds."""
        book = SeedBook(self.ledger.folder)
        return SeedSite(self.participant.name, self._sign, self._verify, book, self._random, self._colluders)

    @cached_property
    def budget(self) -> Budget:
        """What answers with noise have cost this site's rows."""
        folder, key, rules = self.ledger.folder, self.ledger.row_key, self.rules
        most = self.disclosure.limits.epsilon
        return Budget(folder, key, rules.epsilon_total, rules.delta_total, most)

    def answer(self, letter: bytes) -> bytes:
        """The reply to a letter; those of a setup are answered here."""
        arrays, note = notes.read_letter(letter)
        message = note.get("message")
        if message == "begin":
            setup = Setup.from_note(note.get("setup"))
            # Before any key is made: who lost its ledger sits the run out.
            self.ledger.learn(setup.run, openings_of(note, setup.run), self.participant.name)
            if self._client is None or self._client.setup != setup:
                self._client = Client(
                    setup, self.participant.name, self._sign, self._verify, **self._settings
                )
            keys = self._client.advertise()
            self.ledger.keep(self._client.save)
            self._tell(Sent("keys", f"public keys for {setup.slots} sums of run {setup.run[:8]}", len(keys)))
            return notes.pack("begun", setup, {"accounts": self.disclosure.accounts()}, {"keys": keys})
        client = self._client
        if client is None or note.get("setup") != vars(client.setup):
            raise TermError(
                f"'{self.participant.name}' is not part of the setup that this letter belongs to; it sits "
                "the run out."
            )
        if message == "members":
            shares = client.share(letter)
            self.ledger.keep(client.save)
            said = "shares of its secrets, sealed for each of the others"
            checked = "this site answers questions that nobody has checked (verified = false)"
            if self.rules.verified:
                checked = self._signatures.said(client.members)
            self._tell(Sent("shares", f"{said}; {checked}", len(shares)))
            return shares
        known = {"ask": self._mask, "open": self._open, CENSUS: self._admit, "check": self._check_question}
        if message not in known:
            raise TermError(f"unknown letter {ascii(message)[:40]}. Install the same fedsolve on both sides.")
        return known[message](client, arrays, note)

    def _drawn(self, setup: Setup, members: Sequence[str]) -> bool:
        """Whether these members drew the circle of a setup together; nobody may leave it."""
        return not self.changing and self.seeds.book.drew(setup.circle, about_circle(setup), members)

    def _draw(self, letter: bytes) -> bytes:
        reply = self.seeds.answer(letter)
        self._tell(Sent("seed", "its part in drawing the seed of a run", len(reply)))
        return reply

    # -- an answer ---------------------------------------------------------------------------------

    def _mask(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        if "sealed" in arrays and len(client.partners) == 1:
            client.receive(notes.octets(arrays, "sealed").tobytes())
        if "census" in arrays:
            told = notes.read_letter(notes.octets(arrays, "census").tobytes(), CENSUS, client.setup)
            if told[1].get("history") != self.disclosure.account.history:  # else it has been seen
                self._admit(client, *told)
        cohort, layout = notes.listed(note, "cohort"), Layout.from_note(note.get("layout"))
        request = decode_request(notes.octets(arrays, "request").tobytes())
        slot: Any = note.get("slot")
        digest, run = request_digest(request), client.setup.run
        context = notes.context_of(digest, layout, self._census(client, request.kind, cohort))
        place = client.setup.place(slot)
        question = Question(client.setup, slot, tuple(cohort), layout.wide, layout.narrow, context).digest
        about = {"slot": place, "cohort": cohort, "layout": layout.note()}
        said = f"the masked answer to {request.kind}, step {request.step}"
        stored = self.ledger.stored(place, question)
        if stored is not None:
            self._tell(Sent("masked", f"{said}, once more", len(stored), request, about))
            return stored
        data, disclosure, array = self.participant.data, self.disclosure, None
        # Noise hides rows by itself. A census never has any, whatever methods are imported.
        noisy = request.kind != CENSUS and kind_of(request.kind).releases is not None
        term: Term | Needs
        if request.kind == CENSUS:
            stage = CensusStage.from_note(request.note, run)
            self._check_census(stage, layout, cohort)  # before anything is counted or sent
            term = disclosure.counts(data, stage)
        else:
            if self.policy is not None:
                self._check_limits(self.policy, run, layout)
            if self.rules.verified:
                signed = (client.members, cohort, note, run, layout.digest(), self.changing)
                self._signatures.check(digest, *signed)
            if noisy:
                term = self._noisy_term(request, place, question, len(cohort))
            else:
                rows = disclosure.rows(data)
                term = self.participant.answer(request, rows=rows, permit=disclosure.permit)
        if isinstance(term, Needs):
            self._tell(Sent("needs", f"that it lacks the model from block {term.have} on", 0, request))
            return notes.pack("needs", client.setup, {"have": term.have})
        term = term.on_host()
        said += f", for a sum over {len(cohort)}{f'; {self.budget.said()}' if noisy else ''}"
        if layout.narrow:
            array = disclosure.rounded_otherwise(term, layout)
        try:
            names = {field.name for field in layout.fields}
            whole = {*term.arrays} == names and {*term.counts} == {*layout.counts}
            vector = encode(term if whole else completed(term, layout), layout, len(cohort))
            if array is None and request.kind != CENSUS and not noisy:
                chain = self.participant.memory.chain
                said += f"; {disclosure.disclosed(request, chain, term, layout)}"
        except OutOfRange as problem:
            array = problem.array
            disclosure.too_large(term.arrays[array])
        if array is not None:
            self._tell(Sent("refused", f"that '{array}' is too large for one limb", 0, request, about))
            return notes.pack("refused", client.setup, {"array": array})
        masked = client.mask(slot, vector, cohort, context)
        self.ledger.use(place, digest, question, masked, client.save)
        self._tell(Sent("masked", said, len(masked), request, about))
        return masked

    def _noisy_term(self, request: Request, place: str, question: str, sites: int) -> Term | Needs:
        """This client's answer with its share of the noise: drawn once for every slot, paid for before, by
        its question: of a slot another may have been paid for that was not answered.

        Noise hides rows by itself: all of them take part, and nobody counts them first.
        """

        def pay(asked: Request, chain: Chain, rows: ClientData) -> None:
            check_method(chain)
            self.budget.check_run(chain)
            self.budget.pay(self.participant.data, question, _release(asked, chain).mu)

        term = self.participant.answer(request, permit=pay)
        if isinstance(term, Needs):
            return term
        release = _release(request, self.participant.memory.chain)
        self.ledger.need_noise(place, release.shares(sites))
        return release.noised(term.on_host(), sites, self._random)

    def _check_limits(self, policy: SitePolicy, run: str, layout: Layout) -> None:
        """Refuse a question beyond this run's limits, before anything is computed."""
        answers, sent = self.ledger.answered(run)
        size = 8 * (2 * layout.wide + layout.narrow)
        policy.check_statistics(part.name for part in layout.fields)
        if answers >= policy.exchanges:
            raise TermError(
                f"this run has had {answers} answers; this site's policy allows no more (exchanges)."
            )
        if sent + size > policy.bytes_up:
            raise TermError(
                f"with this answer of {size / 1e6:.1f} MB the run would have {(sent + size) / 1e6:.1f}; this "
                f"site's policy allows {policy.bytes_up / 1e6:.1f} (bytes_up)."
            )

    def _permit(self, request: Request, chain: Chain, data: ClientData) -> None:
        """Hold a request to the policy, before a step of the method sees it."""
        if request.position and self._client is not None:
            self.ledger.pin(self._client.setup.run, chain.digests[1])
            self._check_seed(self._client, chain.opening)
        self._guard.check(request, chain, data)

    def _check_seed(self, client: Client, opening: Mapping[str, Any]) -> None:
        """Refuse a seed that not all members of the run drew; others may have where changes are allowed."""
        if self._guard.policy.joint_seed:
            self.seeds.book.check(opening, None if self.changing else client.members)

    # -- the census --------------------------------------------------------------------------------

    def _check_census(self, stage: CensusStage, layout: Layout, cohort: Sequence[str]) -> None:
        """Refuse to count rows for a run that this site would refuse afterwards."""
        data, labels = self.participant.data, self.participant.data.own_labels
        if layout != stage.layout(data.width, 1 if labels.ndim == 1 else int(labels.shape[1])):
            raise TermError("the census is asked for in another layout than its own.")
        if self.rules.epsilon_total > 0:
            raise TermError(
                f"this site's policy has a budget (epsilon_total = {self.rules.epsilon_total:g}); it answers "
                "private runs only, which count no rows."
            )
        if stage.name == "cells" and self.disclosure.account.size:
            self.disclosure.check_known(data, cohort, stage.classes is not None)

    def _census(self, client: Client, kind: str, cohort: Sequence[str] | None) -> str:
        """The digest of the census that a question rests on; refused where there is none."""
        if kind == CENSUS or kind_of(kind).releases is not None:
            return ""
        account = self.disclosure.account
        if self.disclosure.run != client.setup.run or not account.finished:
            raise TermError(f"'{self.participant.name}' has seen no census of the rows in this run.")
        if cohort is not None and tuple(cohort) != account.cohort and not self.changing:
            raise TermError(
                f"a sum over {len(cohort)} sites is asked for, and the rows of {len(account.cohort)} were "
                "counted. Begin a new run."
            )
        return account.history

    def _admit(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        """Take rows in, as an opened stage of the census says."""
        request = decode_request(notes.octets(arrays, "request").tobytes())
        digest, stage = request_digest(request), CensusStage.from_note(request.note, client.setup.run)
        if signed := note.get("signatures"):  # others have seen the evidence
            asked, cohort = self.ledger.request_of(notes.text(note, "place")), notes.listed(note, "cohort")
            counts = {name: array for name, array in arrays.items() if name != "request"}
            total = Term(counts, {str(name): int(count) for name, count in note["counts"].items()})
        else:
            evidence, total = client.shown(arrays, note.get("evidence"), "")
            asked, cohort = evidence.request, list(evidence.survivors)
        if request.kind != CENSUS or digest != asked:
            raise TermError("the total that is shown is not a census.")
        with explained("the census that is shown is damaged", error=TermError):
            history, _ = stage.shown(total)
        agreement = notes.purpose("census", client.setup.run, digest, history, cohort)
        if signed:
            self._signatures.check_signed(agreement, signed, client.members, client.setup.run)
        said = self.disclosure.admit(self.participant.data, stage, total, cohort)
        self._tell(Sent("admitted", f"that it has seen the census{said and f'; {said}'}", 0))
        return notes.pack("admitted", client.setup, {"signature": self._sign(agreement).hex()})

    # -- totals ------------------------------------------------------------------------------------

    def _open(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        survivors, dropped = notes.listed(note, "survivors"), notes.listed(note, "dropped")
        slot: Any = note.get("slot")
        place, run = client.setup.place(slot), client.setup.run
        opening = Opening(run, self.ledger.request_of(place), tuple(survivors))
        known = openings_of(note, run)
        if opening not in known:
            raise TermError("a total is to be opened that is not among those of its run.")
        if dropped and not self.changing:
            raise CohortError(
                f"{dropped[:5]} did not answer, and this client only opens sums over all who were asked "
                "(changing=True allows others)."
            )
        honest = len(survivors) - max(self._colluders, self.disclosure.limits.colluders)
        self.ledger.learn(run, known, self.participant.name, opening, place, honest)
        self.disclosure.settle(run)
        witnessed = None
        if "sum" in note:
            sent = self.ledger.stored(place)
            assert sent is not None
            witnessed = notes.read_letter(sent)[0]["limbs"], notes.text(note, "sum")
        reply = client.open(slot, survivors, dropped, witnessed)
        self.ledger.open(opening, client.save)
        about = {"slot": place, "cohort": survivors, "dropped": dropped}
        said = f"its help to open the sum over {len(survivors)}"
        self._tell(Sent("opened", said, len(reply), None, about))
        return reply

    def _check_question(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        """Agree to a question, if it follows from the totals that were opened."""
        cohort = tuple(notes.listed(note, "cohort"))
        notes.check_names(client.members, cohort, "the question to be checked")
        if not self._signatures.enough(cohort):
            raise TermError(
                f"{len(cohort)} sites are too few for one of them to see totals and check questions; or this "
                "site's policy is not to."
            )
        request, model = (
            decode_request(notes.octets(arrays, part).tobytes()) for part in ("request", "model")
        )
        asked = dataclasses.replace(request, cohort=cohort)
        training, digest = CheckedTraining.from_note(note), request_digest(request)
        for block in model.blocks:
            if self.policy is not None and "opening" in block.note:
                opening = block.note["opening"]
                self.policy.check_opening(opening)
                # Sizes of what is started here; which methods are allowed, the opening has said.
                started = {name: training.recipe[name] for name in ("method", "parameters")}
                dataclasses.replace(self.policy, methods=None).check_opening({**opening, **started})
                self._check_seed(client, opening)
        shown = self._shown(client, arrays, note, request.kind) if "evidence" in note else None
        assert self._check is not None  # as signatures are checked here, too
        absorbs = self._check.agree(training, asked, digest, model, shown)
        layouts = notes.listed(note, "layouts")
        message = agreed_message(training.name, digest, sorted(cohort), notes.text(note, "run"), layouts)
        signature = self._sign(message)
        said = f"its agreement to {request.kind}, step {request.step}, which follows from the totals opened"
        self._tell(Sent("agreed", said, len(signature), request))
        return notes.pack("agreed", client.setup, {"signature": signature.hex(), "absorbs": absorbs})

    def _shown(
        self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any], kind: str
    ) -> Shown:
        if not isinstance(about := note.get("evidence"), dict):
            raise TermError("the evidence of a total is damaged.")

        def total() -> Total:
            evidence, term = client.shown(arrays, about, self._census(client, kind, None))
            if not self._signatures.enough(evidence.survivors):
                raise TermError(
                    f"a total over {len(evidence.survivors)} sites is too small to be shown to one."
                )
            return Total(term, evidence.survivors, noised=len(evidence.survivors) + len(evidence.dropped))

        return Shown(notes.text(about, "place"), notes.text(about, "request"), total)


def _release(request: Request, chain: Chain) -> NoisyAnswer:
    """How an answer to a request gets its noise."""
    release = release_of(request, chain, kind_of(request.kind).releases)
    assert release is not None
    return release


def opened_note(opened: Sequence[Opening]) -> dict[str, Any]:
    """The totals of a run in the order in which they were opened, as part of a letter."""
    cohorts = sorted({opening.cohort for opening in opened})
    told = [[opening.request, cohorts.index(opening.cohort)] for opening in opened]
    return {"cohorts": [list(cohort) for cohort in cohorts], "opened": told}


def openings_of(note: Mapping[str, Any], run: str) -> list[Opening]:
    """The totals that a letter tells of; anything else is refused."""
    with explained("the list of totals in this letter is damaged", error=TermError):
        cohorts = [tuple(notes.listed({"cohort": each}, "cohort")) for each in note["cohorts"]]
        found = [Opening(run, str(request), cohorts[place]) for request, place in note["opened"]]
        if len(set(found)) != len(found):
            raise ValueError("an entry twice")
    return found


def request_note(request: Request) -> dict[str, Any]:
    """What a person needs to judge a question: its kind and note, and a summary of arrays and blocks."""

    def described(arrays: Mapping[str, Array]) -> dict[str, Any]:
        return {
            name: {
                "shape": list(array.shape),
                "norm": float(np.linalg.norm(np.asarray(array, dtype=np.float64).ravel())),
                "sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
            }
            for name, array in arrays.items()
        }

    asked = {name: getattr(request, name) for name in ("kind", "step", "position", "digest")}
    blocks = [{"note": dict(block.note), "arrays": described(block.arrays)} for block in request.blocks]
    return {**asked, "note": dict(request.note), "arrays": described(request.arrays), "blocks": blocks}


def completed(term: Term, layout: Layout) -> Term:
    """The term, with zeros for arrays it lacks: an answer may not show who has nothing to add."""
    strangers = {*term.arrays} - {field.name for field in layout.fields} | {*term.counts} - {*layout.counts}
    if strangers:
        raise TermError(f"the answer has {sorted(strangers)}, which the layout of this sum has not.")
    lacking = [field for field in layout.fields if field.name not in term.arrays]
    return Term(
        {**term.arrays, **{field.name: np.zeros(field.shape) for field in lacking}},
        {**dict.fromkeys(layout.counts, 0), **term.counts},
        term.symmetric | {field.name for field in lacking if field.symmetric},
        term.factors,
    )
