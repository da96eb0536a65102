"""A site's own copy of a run, by which it checks what a server asks: every block, request and model must
follow from the totals that were opened.

The site builds the method from its recipe, gives it the opened totals as they are shown (`witness`), and
compares what the server sends with what the run solved, by meaning (`meaning.differs`). The server's blocks
are then taken for its own, so that rounding does not add up. It agrees to one question after each total, and
to any number about the model of that moment.

A site answers what enough sites have signed, each after it checked the question itself: more than half of
the sites, and of colluders among them. Then at least one of them is honest, and no two questions that differ
can both be signed, since an honest site agrees to one. Of more than 64 sites, more than half of 64 whom the
name of the training picks (`notes.committee`).

The state is written down before anybody hears of it, beside the ledger: a site that is started anew goes on.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.errors import DataError, TermError, explained
from fedsolve.federation.engine import Spec
from fedsolve.federation.meaning import differs, notes_differ, settling
from fedsolve.federation.messages import Block, Request, Total
from fedsolve.federation.method import Run
from fedsolve.federation.recipe import Recipe, StagedRun
from fedsolve.labels import labels_from_note
from fedsolve.privacy import notes
from fedsolve.privacy.primitives import Verify, signed_by
from fedsolve.privacy.shelf import Shelf
from fedsolve.registry import check_allowed
from fedsolve.scoring.evaluation import about

_MEMBER = "member"
_ALONE = threading.Lock()  # warnings are muted for the whole process, and several sites may live in it

_ABOUT_MODELS = frozenset({"evaluate", "tally"})
"""Questions about a model that a site agrees to at any moment: of others the server chooses more."""

_MAY_BE_MORE = frozenset({"part", "schema"})
"""Entries of such a question that say nothing of what the model is."""


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
    """A total that was shown: in which slot, of which request (its digest), and the total when it is
    needed."""

    place: str
    request: str
    total: Callable[[], Total]


class QuestionCheck:
    """What this site knows of the training under way.

    absorbed: the slot of the last total that entered the run. agreed: digest of the question whose total is
    next.
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
        absorbs = False
        with _ALONE, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the server says it, too, and to whom it concerns
            try:
                absorbs = self._agree(training, asked, digest, model, shown)
            finally:
                if not absorbs:
                    self._run = None  # what was tried leaves no trace; it is read back when it is needed
        return absorbs

    def _agree(
        self, training: CheckedTraining, asked: Request, digest: str, model: Request, shown: Shown | None
    ) -> bool:
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
                        "a total is shown that does not answer the question which this site agreed to last."
                    )
                run.request(asked.cohort)
                run.absorb(shown.total())
            kept = run.to_bytes() if new or self._kept is None else self._kept
            expected = run.request(asked.cohort)
        if expected is None or (expected.kind, expected.position > 0) != (asked.kind, asked.position > 0):
            self._about_the_model(run, asked)
            return False
        blocks.check_all()
        _compare(run, expected, asked)
        if not new and self.agreed:
            raise TermError(
                "this site has agreed to another question, whose total it has not been shown. A run that was "
                "resumed goes on with the question under way."
            )
        place = shown.place if new and shown is not None else self.absorbed
        self._keep(kept, place, digest)
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
        if self._run is None:
            assert self._training is not None
            key = self._training.recipe.get("method")
            if registry.is_foreign(key):
                check_allowed("method", key)
            recipe = Recipe.from_note(self._training.recipe)
            opening = self._opening
            with explained("the opening of this run is damaged", error=TermError):
                classes = labels_from_note(opening["classes"])
                sizes = int(opening["features"]), classes, int(opening["outputs"])
                spec = Spec(*sizes, self._training.prefers, labels=tuple(opening.get("labels", ())))
            self._run = recipe.start(spec)
            if self._kept is not None:
                self._run.restore(self._kept, "of a site that checks")
        return self._run

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
        self._shelf.keep("checked", note, {"run": notes.as_array(run)})
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
        self._missing: str | None = None

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
        self._missing = str(dict(mine.note))
        return mine

    def check_all(self) -> None:
        """Refuse a model that lacks a block which the run solved."""
        if self._missing is not None:
            raise TermError(
                f"the model lacks the block {self._missing}, which follows from the totals that were opened, "
                "or has it with another note."
            )


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
        """For the people at a site: whether the questions of a run are checked."""
        if not self.verified:
            return "this site answers questions that nobody has checked (verified = false)"
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
        if not self.verified:
            return
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
