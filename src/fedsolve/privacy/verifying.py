"""A site's own copy of a run, by which it checks what a server asks: every block, request and model must
follow from the totals that were opened.

The site builds the method from its recipe, gives it the opened totals as they are shown (`Evidence`), and
compares what the server sends with what the run solved, by meaning (`meaning.differs`). The server's blocks
are then taken for its own, so that rounding does not add up. It agrees to one question after each total, and
to any number about the model of that moment.

A site answers what enough sites have signed, each after it checked the question itself: more than half of
the sites, and of colluders among them. Then at least one of them is honest, and no two questions that differ
can both be signed, since an honest site agrees to one. Of more than 64 sites, more than half of 64 whom the
name of the training picks (`notes.committee`).

The state is written down before anybody hears of it, beside the ledger: a site that is started anew goes on.

The server makes one trip before each question to the sites that check: with the question, the blocks of the
model that are new, and what shows the total before it. A training keeps these sites, since each has a copy of
the run.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.container import Shelf
from fedsolve.errors import CohortError, DataError, TermError, explained
from fedsolve.federation.encoding import encode_request
from fedsolve.federation.engine import Spec
from fedsolve.federation.meaning import differs, notes_differ, settling
from fedsolve.federation.messages import Block, Chain, Request, Total
from fedsolve.federation.method import Run
from fedsolve.federation.recipe import Recipe, StagedRun
from fedsolve.labels import labels_from_note
from fedsolve.privacy import notes
from fedsolve.privacy.notes import Setup
from fedsolve.privacy.primitives import Verify, signed_by
from fedsolve.privacy.ring import Layout
from fedsolve.privacy.unmasking import Evidence
from fedsolve.registry import check_allowed
from fedsolve.scoring.evaluation import about

if TYPE_CHECKING:
    from fedsolve.privacy.secure import SecureFederation

_LARGEST = 1 << 16  # bytes of a reply
_MEMBER = "member"
_ALONE = threading.Lock()  # warnings are muted for the whole process, and several sites may live in it

# Questions about a model that a site agrees to at any moment: of others the server chooses more. And entries
# of such a question that say nothing of what the model is.
_ABOUT_MODELS, _MAY_BE_MORE = frozenset({"evaluate", "tally"}), frozenset({"part", "schema"})


@dataclass(frozen=True)
class CheckedTraining:
    """What is trained: a name of its own, the recipe of its method, and what the server prefers to save."""

    name: str
    recipe: Mapping[str, Any]
    prefers: Literal["bytes", "exchanges"]

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> CheckedTraining:
        """The training that a letter is about."""
        told = note.get("training")
        if not isinstance(told, dict) or not isinstance(told.get("recipe"), dict):
            raise TermError("the letter does not say which training its question belongs to.")
        if told.get("prefers") not in ("bytes", "exchanges"):
            raise TermError(f"a server prefers bytes or exchanges, not {ascii(told.get('prefers'))[:40]}.")
        return cls(notes.text(told, "name"), told["recipe"], told["prefers"])


@dataclass(frozen=True)
class Shown:
    """A total that was shown: in which slot, of which request (its digest), and the total when needed."""

    place: str
    request: str
    total: Callable[[], Total]


class QuestionCheck:
    """What this site knows of the training under way.

    absorbed: slot of the last total that entered the run. agreed: digest of the question whose total is next.
    """

    def __init__(self, folder: Path | None = None) -> None:
        remedy = "Without it this site cannot check this run; remove it and begin another."
        self._shelf = Shelf(folder, remedy)
        self._training: CheckedTraining | None = None
        self._opening: dict[str, Any] = {}
        self._kept: bytes | None = None
        self._run: StagedRun[Any] | None = None
        self.absorbed = ""
        self.agreed = ""
        self._shelf.kept("checked", self._load)

    def agree(
        self, training: CheckedTraining, asked: Request, digest: str, model: Request, shown: Shown | None
    ) -> bool:
        """Whether the total of this question enters the run; refused, by name, where it does not follow from
        the totals that were opened.

        digest: of the question. model: carries the blocks of the model so far that are new. shown: the newest
        total that entered the server's run.
        """
        with _ALONE, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the server says it, too, and to whom it concerns
            if self._training != training:
                self._begin(training, model)
            if self.agreed == digest:
                return True
            run, new = self._under_way(), shown is not None and shown.place != self.absorbed
            blocks = _Blocks(model.blocks)
            with settling(blocks.settle):
                if new:
                    assert shown is not None
                    if not self.agreed or shown.request != self.agreed:
                        raise TermError(
                            "a total is shown that does not answer the question which this site agreed to "
                            "last."
                        )
                    run.request(asked.cohort)
                    run.absorb(shown.total())
                kept = run.to_bytes() if new or self._kept is None else self._kept
                expected = run.request(asked.cohort)
            if expected is None or (expected.kind, expected.position > 0) != (asked.kind, asked.position > 0):
                self._about_the_model(run, asked)
                return False
            if blocks.missing is not None:
                raise TermError(
                    f"the model lacks the block {blocks.missing}, which follows from the totals that were "
                    "opened, or has it with another note."
                )
            _compare(run, expected, asked)
            if not new and self.agreed:
                raise TermError(
                    "this site has agreed to another question, whose total it has not been shown. A run that "
                    "was resumed goes on with the question under way."
                )
            place = shown.place if new and shown is not None else self.absorbed
            self._keep(kept, place, digest)
            self._run = run
            return True

    # -- the run -----------------------------------------------------------------------------------

    def _begin(self, training: CheckedTraining, model: Request) -> None:
        """Another training: from its opening on."""
        opening = model.blocks[0].note.get("opening") if model.first == 0 and model.blocks else None
        if not isinstance(opening, dict):
            raise TermError(
                "this site was not there when this training began, or has lost what it knew of it; it cannot "
                "check its questions."
            )
        self._training, self._opening = training, opening
        self._kept, self._run, self.absorbed, self.agreed = None, None, "", ""

    def _under_way(self) -> StagedRun[Any]:
        """The run so far, which is this check's own until it holds: what is tried leaves no trace."""
        run, self._run = self._run, None
        if run is None:
            assert self._training is not None
            key = self._training.recipe.get("method")
            if registry.is_foreign(key):
                check_allowed("method", key)
            recipe, opening = Recipe.from_note(self._training.recipe), self._opening
            with explained("the opening of this run is damaged", error=TermError):
                classes = labels_from_note(opening["classes"])
                sizes = int(opening["features"]), classes, int(opening["outputs"])
                spec = Spec(*sizes, self._training.prefers, labels=tuple(opening.get("labels", ())))
            run = recipe.start(spec)
            if self._kept is not None:
                run.restore(self._kept, "of a site that checks")
        return run

    @staticmethod
    def _about_the_model(run: StagedRun[Any], asked: Request) -> None:
        """Refuse a question about another model than the one that the opened totals give."""
        if asked.position or asked.kind not in _ABOUT_MODELS:
            raise TermError(
                f"the request '{asked.kind}', step {asked.step}, is not the one that follows from the totals "
                "that were opened."
            )
        try:
            model = run.model()
            mine = about(asked.kind, model, asked.cohort)
        except (AssertionError, AttributeError, IndexError, DataError) as problem:
            raise TermError(
                f"a question about a model ('{asked.kind}') comes before the opened totals make one."
            ) from problem
        known = {name: value for name, value in asked.note.items() if name in mine.note}
        more = asked.note.keys() - mine.note.keys() - _MAY_BE_MORE
        if more:
            raise TermError(f"the model of '{asked.kind}' has {sorted(more)}, which this run's has not.")
        unlike = {"schema"} if model.preparing is None else set()
        why = notes_differ(mine.note, known, unlike) or differs(run.run, mine.arrays, asked.arrays)
        if why is not None:
            raise TermError(
                f"the model of '{asked.kind}' is not the one that follows from the totals that were opened: "
                f"{why}."
            )

    # -- keeping it --------------------------------------------------------------------------------

    def _keep(self, run: bytes, absorbed: str, agreed: str) -> None:
        assert self._training is not None
        note: dict[str, Any] = {"training": dataclasses.asdict(self._training), "opening": self._opening}
        note |= {"absorbed": absorbed, "agreed": agreed}
        self._shelf.keep("checked", note, {"run": np.frombuffer(run, np.uint8)})
        self._kept, self.absorbed, self.agreed = run, absorbed, agreed

    def _load(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        self._training, self._opening = CheckedTraining(**note["training"]), note["opening"]
        self.absorbed, self.agreed = note["absorbed"], note["agreed"]
        self._kept = arrays["run"].tobytes()


class _Blocks:
    """The server's new blocks, each of which must be one that the run solves."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        # One of a run among others is wrapped: whose block it is, and the block as that run has it.
        self._left = [
            (block.note.get(_MEMBER), Block(block.note.get("block", {}), block.arrays))
            if _MEMBER in block.note
            else (None, block)
            for block in blocks
        ]
        self.missing: str | None = None  # one that the run solved and the model lacks

    def settle(self, run: Run[Any], mine: Block) -> Block:
        """The server's block in place of one that the run solved, where they mean the same.

        Where there is none yet, as in a question about a model at the end of a run, its own counts.
        """
        for number, (member, theirs) in enumerate(self._left):
            if member not in (None, run.member) or notes_differ(mine.note, theirs.note) is not None:
                continue
            why = differs(run, mine.arrays, theirs.arrays)
            if why is not None:
                raise TermError(
                    f"the block {dict(mine.note)} of the model is not the one that follows from the totals "
                    f"that were opened: {why}."
                )
            del self._left[number]
            return theirs
        self.missing = str(dict(mine.note))
        return mine


def _compare(run: StagedRun[Any], mine: Request, asked: Request) -> None:
    """Refuse a request that is not the one of the run."""
    why = None if mine.digest == asked.digest else "the model so far has other blocks, or another opening"
    for name in ("exchange", "step", "position"):
        if getattr(mine, name) != getattr(asked, name):
            why = f"its {name} is {getattr(asked, name)}, not {getattr(mine, name)}"
    why = why or notes_differ(dict(mine.note), dict(asked.note))
    why = why or differs(run.run, mine.arrays, asked.arrays)
    if why is not None:
        raise TermError(
            f"the request '{asked.kind}', step {asked.step}, is not the one that follows from the totals "
            f"that were opened: {why}."
        )


def agreed_message(
    training: str, request: str, cohort: Sequence[str], run: str, layouts: Sequence[str]
) -> bytes:
    """What a site signs: that the question with this digest follows from the totals of a training; whom it is
    for, in which run, and in which layouts it may be answered (digests of one and of its widened form)."""
    return notes.purpose("agreed question", training, request, list(cohort), run, list(layouts))


@dataclass(frozen=True)
class SignedQuestions:
    """Refuses questions that too few sites have signed.

    colluders: sites that might side with the server. verified: whether signatures are asked for at all; runs
    of too few sites to check are refused then. wanted: how many; 0: more than half of the sites.
    """

    verify: Verify
    colluders: int
    verified: bool
    wanted: int

    def enough(self, names: Collection[str]) -> bool:
        """Whether so many can check: at least three sites must stay hidden from whoever does."""
        return self.verified and len(names) >= notes.least_verified(self.colluders)

    def said(self, members: Collection[str]) -> str:
        """For the people at a site: how many check the questions of a run."""
        needed = notes.signatures_needed(len(members), self.colluders, self.wanted)
        return f"it answers questions that {needed} of {len(members)} sites have checked"

    def check(
        self,
        request: str,
        members: Collection[str],
        cohort: Sequence[str],
        note: Mapping[str, Any],
        run: str,
        layout: str,
        changing: bool,
    ) -> None:
        """Refuse a question that too few members of the run have signed, naming wrong signatures."""
        if not self.enough(cohort):
            raise TermError(
                f"a sum over {len(cohort)} of {len(members)} sites cannot be checked, which takes "
                f"{notes.least_verified(self.colluders)}; this site answers no others (its policy: verified)."
            )
        if not isinstance(told := note.get("agreed"), dict):
            raise TermError(
                "nobody has checked that this question follows from the totals that were opened; this site "
                "answers no others (its policy: verified)."
            )
        everybody, layouts = notes.listed(told, "cohort"), notes.listed(told, "layouts")
        if cohort != everybody and not (changing and set(cohort) <= set(everybody)):
            raise TermError("the sites agreed to this question for another cohort.")
        if layout not in layouts:
            raise TermError("the sites agreed to this question in another layout.")
        training = notes.text(told, "training")
        message = agreed_message(training, request, everybody, run, layouts)
        self.check_signed(message, told.get("signatures"), members, training, self.wanted)

    def check_signed(
        self, message: bytes, signed: Any, members: Collection[str], about: str, wanted: int = 0
    ) -> None:
        """Refuse what too few of the members who check for all have signed, naming wrong signatures."""
        signatures = signed if isinstance(signed, dict) else {}
        may_check = set(notes.committee(members, about, self.colluders, wanted))
        for name, signature in signatures.items():
            if name not in may_check or not signed_by(self.verify, name, message, signature):
                raise TermError(
                    f"the agreement of '{name[:60]}' to this question is not signed by that site, or "
                    "belongs to another question."
                )
        needed = notes.signatures_needed(len(members), self.colluders, wanted)
        if len(signatures) < needed:
            raise TermError(
                f"{len(signatures)} of {len(members)} sites have checked this question; this site's policy "
                f"asks for {needed} (signatures)."
            )


# -- the server's side ---------------------------------------------------------------------------


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
        self._training = SignedTraining()
        self._evidence: Evidence | None = None
        if resumed and self._store is not None and (kept := self._store.note("training")) is not None:
            self._training = SignedTraining(**kept)
            self._evidence = self._store.evidence(self._training.name)
        self._taken = False
        self._chain: Chain | None = None
        self.absorbs = bool(self._training.signers)

    def before(self, digest: str) -> Evidence | None:
        """What shows the total that precedes the question with this digest; None where nothing does."""
        same = self._evidence is not None and self._evidence.request == digest
        return None if same else self._evidence

    def show(self, evidence: Evidence) -> None:
        """Keep what shows the newest total, if that enters the run."""
        if self.absorbs:
            if self._store is not None:
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
        if self._store is not None and not training.signers:
            self._store.keep("training.json", vars(training))
        needed = notes.signatures_needed(len(clients), secure.colluders, wanted)
        able = notes.committee(clients, training.name, secure.colluders, wanted)
        told = self._letter(request, digest, setup, about)
        found: dict[str, str] = {}
        reasons: dict[str, str] = {}
        absorbs = False

        def take(name: str, reply: bytes) -> None:
            nonlocal absorbs
            note = notes.read_letter(reply, "agreed", setup)[1]
            found[name], absorbs = notes.text(note, "signature"), bool(note.get("absorbs"))

        first = able if secure.changing else able[:needed]
        asked = [name for name in training.signers if name in clients] or first
        while asked and len(found) < needed:
            reasons |= secure.gathered(dict.fromkeys(asked, told), _LARGEST, take)
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
            if self._store is not None:
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
        asked = encode_request(dataclasses.replace(request, blocks=()))
        parts: dict[str, Any] = {"request": asked, "model": encode_request(model)}
        training = CheckedTraining(self._training.name, self._recipe, self._secure.prefers)
        note: dict[str, Any] = {**about, "training": vars(training)}
        if (evidence := self.before(digest)) is not None:
            note["evidence"] = {"place": evidence.setup.place(evidence.slot), "request": evidence.request}
            if not self._taken:
                arrays, shows = evidence.parts()
                parts |= arrays
                note["evidence"] |= shows
        return notes.pack("check", setup, note, parts)
