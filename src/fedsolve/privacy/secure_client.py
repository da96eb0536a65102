"""The client's side of a secure federation: letters in, letters out, as bytes that any engine can carry.

    begin    a setup, and what was opened in its run -> its public keys
    members  all members' keys          -> shares of its secrets, sealed for each of them
    ask      a request, whom it is for, and where each array stands -> the masked term
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

from fedsolve import registry
from fedsolve.container import Array, from_bytes
from fedsolve.errors import DataError, TermError
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.messages import Chain, Needs, Request, Term, Total
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.parts import part_of
from fedsolve.federation.recipes import innermost
from fedsolve.privacy.joint_seed import SEED_CHANNEL, SeedBook, SeedSite
from fedsolve.privacy.ledger import Ledger, Opening
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import TAG, Setup, as_array, check_names, listed, octets, pack, purpose, text
from fedsolve.privacy.policy import PolicyGuard, SitePolicy
from fedsolve.privacy.ring import OutOfRange, decode, encode
from fedsolve.privacy.ring_layout import Layout
from fedsolve.privacy.row_digests import row_digests
from fedsolve.privacy.shamir import Random
from fedsolve.privacy.signatures import Sign, Verify
from fedsolve.privacy.signed_questions import SignedQuestions, agreed_message, training_of
from fedsolve.privacy.verifying import QuestionCheck, Shown
from fedsolve.privacy.witness import Evidence, fingerprinted, slot_name

CHANNEL = "secure sums"
"""The channel of an engine on which these letters travel."""

_MOST_SLOTS = 4096

FEWEST_ROWS = 10
"""Rows by which a client's rows may differ from those of an earlier total, at least, if they differ."""


@dataclass(frozen=True)
class Sent:
    """Something that leaves a client, for the people there: which reply, in words, its bytes, the request."""

    what: str
    text: str
    bytes_up: int
    request: Request | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


class SecureClient:
    """Answers a participant's letters; its term leaves it masked, and it opens what the rules allow.

    colluders: how many other clients may side with the server; the threshold must allow for them.
    changing:  whether it opens sums that lack clients who were asked, and lets a run's cohort change.
    policy:    what it answers at all; colluders and changing are the policy's then. Without one, the only
               limit is on rows that changed since an earlier run.
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
        ledger: Ledger | None = None,
        tell: Callable[[Sent], None] | None = None,
        random: Random = secrets.token_bytes,
    ) -> None:
        self.participant = participant
        self.ledger = Ledger() if ledger is None else ledger
        self.policy = policy
        self.changing = changing if policy is None else policy.changing
        self._colluders = colluders if policy is None else policy.colluders
        self._sign, self._verify, self._random = sign, verify, random
        self._signatures = SignedQuestions(
            verify,
            self._colluders,
            verified if policy is None else policy.verified,
            0 if policy is None else policy.signatures,
        )
        self._check = QuestionCheck(self.ledger.folder)
        self.seeds = SeedSite(participant.name, sign, verify, SeedBook(self.ledger.folder), random)
        if policy is not None:
            self._guard = PolicyGuard(policy)
            participant.obey(self._permit)
        self._tell = tell or (lambda sent: None)
        kept = self.ledger.secrets
        self._client = (
            None
            if kept is None
            else Client.load(kept, sign, verify, colluders=self._colluders, random=random)
        )

    def attend(self) -> None:
        """Let the participant's letters about secure sums be answered here."""
        self.participant.attend(CHANNEL, self.answer)
        self.participant.attend(SEED_CHANNEL, self._draw)

    def answer(self, letter: bytes) -> bytes:
        """The reply to a letter."""
        arrays, note = read_letter(letter)
        message = note.get("message")
        if message == "begin":
            return self._begin(setup_of(note), note)
        if self._client is None or note.get("setup") != self._client.setup.note():
            raise TermError(
                f"'{self.participant.name}' is not part of the setup that this letter belongs to; it sits "
                "the run out."
            )
        if message == "members":
            return self._share(self._client, letter)
        if message == "ask":
            return self._mask(self._client, arrays, note)
        if message == "open":
            return self._open(self._client, note)
        if message == "check":
            return self._check_question(self._client, arrays, note)
        raise TermError(f"unknown letter {ascii(message)[:40]}. Install the same fedsolve on both sides.")

    def _draw(self, letter: bytes) -> bytes:
        reply = self.seeds.answer(letter)
        self._tell(Sent("seed", "its part in drawing the seed of a run", len(reply)))
        return reply

    def _begin(self, setup: Setup, note: Mapping[str, Any]) -> bytes:
        # Before any key is made: who lost its ledger, or whose rows changed by few, sits the run out.
        told = openings_of(note, setup.run)
        self.ledger.learn(setup.run, told, self.participant.name, self.changing)
        if self.policy is None:
            self.ledger.begin(setup.run, self._rows, FEWEST_ROWS)
        else:
            self.policy.check_rows(self.participant.data)
            self.ledger.begin(setup.run, self._rows, self.policy.fewest_rows, self.policy.runs_per_rows)
        if self._client is None or self._client.setup != setup:
            self._client = Client(
                setup,
                self.participant.name,
                self._sign,
                self._verify,
                colluders=self._colluders,
                random=self._random,
            )
        keys = self._client.advertise()
        self.ledger.keep(self._client.save())
        self._tell(Sent("keys", f"public keys for {setup.slots} sums of run {setup.run[:8]}", len(keys)))
        return keys

    def _share(self, client: Client, letter: bytes) -> bytes:
        shares = client.share(letter)
        self.ledger.keep(client.save())
        said = (
            f"shares of its secrets, sealed for each of the others; {self._signatures.said(client.members)}"
        )
        self._tell(Sent("shares", said, len(shares)))
        return shares

    def _mask(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        if "sealed" in arrays and len(client.partners) == 1:
            client.receive(octets(arrays, "sealed").tobytes())
        cohort, layout = listed(note, "cohort"), Layout.from_note(note.get("layout"))
        request = decode_request(octets(arrays, "request").tobytes())
        digest = request_digest(request)
        context = context_of(digest, layout)
        slot, question = _slot(note), hashlib.sha256(context + purpose(cohort)).hexdigest()
        place = slot_name(client.setup, slot)
        about = {"slot": place, "cohort": cohort, "layout": layout.note(), "asked": request_note(request)}
        stored = self.ledger.stored(place, question)
        if stored is not None:
            said = f"the masked answer to {request.kind}, step {request.step}, once more"
            self._tell(Sent("masked", said, len(stored), request, about))
            return stored
        if self.policy is not None:
            self._check_limits(self.policy, client.setup.run, layout)
        self._signatures.check(digest, client.members, cohort, note)
        array = self.ledger.refused(digest, question, layout.narrow > 0)
        if array is None:
            term = self.participant.answer(request)
            if isinstance(term, Needs):
                self._tell(Sent("needs", f"that it lacks the model from block {term.have} on", 0, request))
                return pack("needs", client.setup, {"have": term.have}, {})
            if request.position:
                check_method(self.participant.chain)
            try:
                vector = encode(completed(term, layout), layout, len(cohort))
            except OutOfRange as problem:
                array = problem.array
                self.ledger.refuse(digest, question, array)
        if array is not None:
            self._tell(Sent("refused", f"that '{array}' is too large for one limb", 0, request, about))
            return pack("refused", client.setup, {"array": array}, {})
        masked = client.mask(slot, vector, cohort, context)
        self.ledger.use(place, digest, question, masked, client.save())
        said = f"the masked answer to {request.kind}, step {request.step}, for a sum over {len(cohort)}"
        self._tell(Sent("masked", said, len(masked), request, about))
        return masked

    def _check_limits(self, policy: SitePolicy, run: str, layout: Layout) -> None:
        """Refuse what this run may not ask for any more, before anything is computed."""
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
            if self._guard.policy.joint_seed:
                self.seeds.book.check(chain.blocks[0].note["opening"])
        self._guard.check(request, chain, data)
        part = part_of(request, chain)
        if part is not None and self._client is not None:
            self.ledger.split(self._client.setup.run, repr(part.key), part.share)

    def _open(self, client: Client, note: Mapping[str, Any]) -> bytes:
        slot, survivors, dropped = _slot(note), listed(note, "survivors"), listed(note, "dropped")
        request = self.ledger.request_of(slot_name(client.setup, slot))
        opening = Opening(client.setup.run, request, tuple(survivors))
        told = openings_of(note, client.setup.run)
        if opening not in told:
            raise TermError("a total is to be opened that is not among those of its run.")
        self.ledger.learn(client.setup.run, told, self.participant.name, self.changing, opening)
        self.ledger.check(opening, dropped, self.changing)
        reply = client.open(slot, survivors, dropped)
        self.ledger.open(opening, client.save())
        if "sum" in note:
            reply = self._witnessed(client, slot, survivors, text(note, "sum"), reply)
        said = f"its help to open the sum over {len(survivors)}"
        about = {"slot": slot_name(client.setup, slot), "cohort": survivors, "dropped": dropped}
        self._tell(Sent("opened", said, len(reply), None, about))
        return reply

    def _witnessed(
        self, client: Client, slot: int, survivors: Sequence[str], digest: str, reply: bytes
    ) -> bytes:
        """The help to open a sum, with a signed fingerprint of the term that this client sent for it."""
        masked = read_letter(self.ledger.sent(slot_name(client.setup, slot)))[0]["limbs"]
        opening = client.opening_of(slot, survivors)
        value, message = fingerprinted(masked, opening, digest, client.name)
        told = {"value": value, "signature": self._sign(message).hex()}
        return pack("witnessed", client.setup, told, {"opened": as_array(reply)})

    def _check_question(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
        """Agree to a question, if it follows from the totals that were opened."""
        cohort = tuple(listed(note, "cohort"))
        check_names(client.members, cohort, "the question to be checked")
        if not self._signatures.enough(cohort):
            raise TermError(
                f"{len(cohort)} sites are too few for one of them to see totals and check questions; or this "
                "site's policy is not to."
            )
        request, model = (decode_request(octets(arrays, part).tobytes()) for part in ("request", "model"))
        asked = dataclasses.replace(request, cohort=cohort)
        training, digest = training_of(note), request_digest(request)
        for block in model.blocks:
            if self.policy is not None and "opening" in block.note:
                opening = block.note["opening"]
                self.policy.check_opening(opening)
                # Sizes of what is started here; which methods are allowed, the opening has said.
                sizes = dataclasses.replace(self.policy, methods=None)
                sizes.check_opening({**opening, **innermost(training.recipe)})
                if self.policy.joint_seed:
                    self.seeds.book.check(opening)
        shown = self._shown(client, arrays, note) if "evidence" in note else None
        absorbs = self._check.agree(training, asked, digest, model, shown)
        signature = self._sign(agreed_message(training.name, digest))
        said = f"its agreement to {request.kind}, step {request.step}, which follows from the totals opened"
        self._tell(Sent("agreed", said, len(signature), request))
        return pack("agreed", client.setup, {"signature": signature.hex(), "absorbs": absorbs}, {})

    def _shown(self, client: Client, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> Shown:
        if not isinstance(note["evidence"], dict):
            raise TermError("the evidence of a total is damaged.")
        place, request = text(note["evidence"], "place"), text(note["evidence"], "request")

        def total() -> Total:
            evidence = Evidence.from_parts(arrays, note["evidence"])
            everybody = sorted([*evidence.survivors, *evidence.dropped])
            context = context_of(request, evidence.layout)
            question = hashlib.sha256(context + purpose(everybody)).hexdigest()
            known = self.ledger.question_of(place) if evidence.place == place else ""
            if evidence.setup != client.setup or question != known:
                raise TermError(
                    f"the total shown for slot {place} is not of a question that this site answered."
                )
            if not self._signatures.enough(evidence.survivors):
                raise TermError(
                    f"a total over {len(evidence.survivors)} sites is too small to be shown to one."
                )
            return Total(decode(client.total(evidence), evidence.layout), evidence.survivors)

        return Shown(place, request, total)

    @cached_property
    def _rows(self) -> Array:
        return row_digests(self.participant.data, self.ledger.row_key())


def read_letter(letter: bytes) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and note of a letter of this protocol."""
    arrays, note = from_bytes(letter, what="this letter", error=TermError)
    if note.get("protocol") != TAG:
        raise TermError(f"this letter is of {ascii(note.get('protocol'))[:40]}, not of '{TAG}'.")
    return arrays, note


def setup_of(note: Mapping[str, Any]) -> Setup:
    """The setup that a letter belongs to; anything that is none is refused."""
    try:
        setup = Setup(**note["setup"])
    except (KeyError, TypeError, DataError) as problem:
        raise TermError(f"the setup of this letter is damaged ({problem}).") from problem
    if not isinstance(setup.run, str) or setup.slots > _MOST_SLOTS:
        raise TermError(f"a setup has a name and at most {_MOST_SLOTS} slots; got {setup.slots}.")
    return setup


def opened_note(opened: Sequence[Opening]) -> dict[str, Any]:
    """The totals of a run in the order in which they were opened, as part of a letter."""
    cohorts = sorted({opening.cohort for opening in opened})
    return {
        "cohorts": [list(cohort) for cohort in cohorts],
        "opened": [[opening.request, cohorts.index(opening.cohort)] for opening in opened],
    }


def openings_of(note: Mapping[str, Any], run: str) -> list[Opening]:
    """The totals that a letter tells of; anything else is refused."""
    try:
        cohorts = [tuple(listed({"cohort": each}, "cohort")) for each in note["cohorts"]]
        found = [Opening(run, text({"r": request}, "r"), cohorts[place]) for request, place in note["opened"]]
        if len(set(found)) != len(found):
            raise ValueError("an entry twice")
    except (KeyError, IndexError, TypeError, ValueError) as problem:
        raise TermError(f"the list of totals in this letter is damaged ({problem}).") from problem
    return found


def request_note(request: Request) -> dict[str, Any]:
    """What a person needs to judge a question: what it asks, and what its arrays and blocks are."""

    def described(arrays: Mapping[str, Array]) -> dict[str, Any]:
        return {
            name: {
                "shape": list(array.shape),
                "norm": float(np.linalg.norm(np.asarray(array, dtype=np.float64).ravel())),
                "sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
            }
            for name, array in arrays.items()
        }

    return {
        "kind": request.kind,
        "step": request.step,
        "note": dict(request.note),
        "position": request.position,
        "digest": request.digest,
        "arrays": described(request.arrays),
        "blocks": [{"note": dict(block.note), "arrays": described(block.arrays)} for block in request.blocks],
    }


def _slot(note: Mapping[str, Any]) -> int:
    slot = note.get("slot")
    if type(slot) is not int:
        raise TermError(f"'slot' of this letter must be a whole number; got {ascii(slot)[:40]}.")
    return slot


def request_digest(request: Request) -> str:
    """SHA-256 over what is asked, without blocks: they vary in repeats, and the chain's digest is in it."""
    return hashlib.sha256(encode_request(dataclasses.replace(request, blocks=()))).hexdigest()


def context_of(request: str, layout: Layout) -> bytes:
    """What all clients of a sum must agree on, or their masks do not cancel; request: its digest."""
    return purpose("sum", request, layout.note())


def check_method(chain: Chain) -> type:
    """The class of a run's method; refused, by name, where it needs each client's answer by itself."""
    key = chain.blocks[0].note["opening"]["method"]
    kind = registry.method_class(key)
    if getattr(kind, "gathers", False):
        raise DataError(
            f"method '{key}' gathers: its server needs every client's answer by itself, which secure sums "
            "hide. Choose a method that needs sums only ('fedsolve methods'), or train in the open."
        )
    return kind


def completed(term: Term, layout: Layout) -> Term:
    """The term with zeros for what it lacks of the layout: an answer may not show who has nothing to add."""
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


def letter(message: str, setup: Setup, note: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """A letter with parts that are bytes themselves."""
    return pack(message, setup, note, {name: as_array(part) for name, part in parts.items()})
