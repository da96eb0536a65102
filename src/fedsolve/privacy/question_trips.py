"""The server's side of checked questions: what sites are shown before a question, and their signatures.

One trip before each question to the sites that check: the question itself, the blocks of the model that are
new, and what shows the total before it. A training keeps the sites that check, since each has a copy of the
run.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedsolve.errors import CohortError, DataError
from fedsolve.federation.cohort import plain
from fedsolve.federation.encoding import encode_request
from fedsolve.federation.messages import Chain, Request
from fedsolve.privacy import notes
from fedsolve.privacy.notes import Setup
from fedsolve.privacy.ring import Layout
from fedsolve.privacy.secure_client import CHANNEL
from fedsolve.privacy.witness import Evidence

if TYPE_CHECKING:
    from fedsolve.privacy.secure import SecureFederation

_LARGEST = 1 << 16
"""Bytes of a reply."""


def gather(
    replies: Iterable[tuple[str, bytes | Exception]],
    take: Callable[[str, bytes], None],
    failed: Callable[[str, Exception], None] = lambda name, problem: None,
) -> dict[str, str]:
    """Take all replies that can be taken; of the others, by name, why not."""
    reasons = {}
    for name, reply in replies:
        try:
            if isinstance(reply, Exception):
                raise reply
            take(name, reply)
        except Exception as problem:
            reasons[name] = plain(problem)
            failed(name, problem)
    return reasons


def said_of(reasons: Mapping[str, str]) -> str:
    """The first two reasons, by name."""
    return "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*reasons.items()][:2])


@dataclass
class SignedTraining:
    """What is written down of a training, whose name sites know it by.

    signers: the sites that check it. found: the latest question agreed to (its digest), and its signatures.
    position, opening: of the blocks that these sites know, and of the run that these belong to.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(16))
    signers: list[str] = field(default_factory=list)
    found: tuple[str, dict[str, Any]] | list[Any] = ("", {})
    position: int = 0
    opening: str = ""


class QuestionTrips:
    """Gathers signatures for the questions of one training of a secure federation at a time.

    recipe: of the method, as `recipes` has it; None: taken from the opening. resumed: go on with the training
    that the store knows, where it knows one.
    """

    def __init__(self, secure: SecureFederation, recipe: Mapping[str, Any] | None, resumed: bool) -> None:
        self._secure, self._store, self._recipe = secure, secure.store, recipe
        kept = self._store.note("training") if resumed else None
        self._training = SignedTraining() if kept is None else SignedTraining(**kept)
        self._evidence = None if kept is None else self._store.evidence(self._training.name)
        self._taken = False
        self._chain: Chain | None = None
        self.absorbs = bool(self._training.signers)

    def before(self, digest: str) -> Setup | None:
        """The setup of the total that precedes the question with this digest; None where nothing does."""
        if self._evidence is None or self._evidence.request == digest:
            return None
        return self._evidence.setup

    def show(self, evidence: Evidence) -> None:
        """Keep what shows the newest total, if that enters the run."""
        if self.absorbs:
            arrays, note = evidence.parts()
            note = {"training": self._training.name, "evidence": note}
            self._store.keep("evidence.safetensors", note, arrays)
            self._evidence, self._taken = evidence, False

    def agreed(
        self, request: Request, digest: str, chain: Chain, setup: Setup, run: str, layout: Layout
    ) -> dict[str, Any]:
        """The signatures that go with a question; an error, by name, where too few sites agree to it."""
        training, secure = self._training, self._secure
        clients, wanted = secure.clients, secure.signatures or 0
        if request.position:
            self._chain = chain
        if training.found[0] == digest and training.found[1]["run"] == run:  # before the server was stopped
            return dict(training.found[1])
        layouts = sorted({layout.digest(), layout.widened().digest()})
        about = {"cohort": sorted(clients), "layouts": layouts, "run": run}
        if not training.signers:
            self._store.keep("training.json", vars(training))
        needed = notes.signatures_needed(len(clients), secure.colluders, wanted)
        able = notes.committee(clients, training.name, secure.colluders, wanted)
        told = self._letter(request, digest, setup, about)
        found: dict[str, str] = {}
        reasons: dict[str, str] = {}
        absorbs = False

        def take(name: str, reply: bytes) -> None:
            nonlocal absorbs
            note = notes.unpack(reply, "agreed", setup)[1]
            found[name], absorbs = notes.text(note, "signature"), bool(note.get("absorbs"))

        first = able if secure.changing else able[:needed]
        asked = [name for name in training.signers if name in clients] or first
        while asked and len(found) < needed:
            reasons |= gather(secure.engine.carry(CHANNEL, dict.fromkeys(asked, told), _LARGEST), take)
            # Others may stand in for sites that do not check, as long as nothing has been checked yet.
            rest = [name for name in able if name not in found and name not in reasons]
            asked = rest[: needed - len(found)] if not training.signers else []
        if len(found) < needed:
            agree = f"{len(found)} of {len(clients)} sites agree to this question, {needed} must."
            raise CohortError(f"{agree} {said_of(reasons)}.")
        self.absorbs = absorbs
        agreed = {**about, "training": training.name, "signatures": found}
        if absorbs:
            self._taken = True
            training.signers = training.signers or sorted(found)
            if request.position:
                training.position, training.opening = request.position, chain.digests[1]
            training.found = (digest, agreed)
            self._store.keep("training.json", vars(training))
        return agreed

    def _letter(self, request: Request, digest: str, setup: Setup, about: Mapping[str, Any]) -> bytes:
        chain = Chain() if self._chain is None else self._chain
        if self._recipe is None:
            if not len(chain):
                raise DataError(
                    "no training has begun whose model sites could know; they check questions about models "
                    "that their own totals made. Evaluate after training, or unchecked (verify=False)."
                )
            self._recipe = {name: chain.opening[name] for name in ("method", "parameters")}
        known = chain.digests[1:2] == [self._training.opening]
        first = min(self._training.position, len(chain)) if known else 0
        blocks = tuple(chain.blocks[first:])
        model = Request("model", 0, 0, (), position=len(chain), digest=chain.digest, blocks=blocks)
        parts: dict[str, Any] = {
            "request": encode_request(dataclasses.replace(request, blocks=())),
            "model": encode_request(model),
        }
        note: dict[str, Any] = {
            **about,
            "training": {
                "name": self._training.name,
                "recipe": self._recipe,
                "prefers": self._secure.prefers,
            },
        }
        evidence = None if self.before(digest) is None else self._evidence
        if evidence is not None:
            note["evidence"] = {"place": evidence.place, "request": evidence.request}
            if not self._taken:
                arrays, about = evidence.parts()
                parts |= arrays
                note["evidence"] |= about
        return notes.pack("check", setup, note, parts)
