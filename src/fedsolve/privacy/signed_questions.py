"""Which questions a site answers: those that enough sites have signed, each after it checked them itself.

More than half of the sites, and of colluders among them, must have: then at least one of them is honest, and
no two questions that differ can both be signed, since an honest site agrees to one. Of more than 64 sites,
more than half of 64 whom the name of the training picks (`notes.committee`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsolve.errors import TermError
from fedsolve.privacy.notes import committee, least_verified, listed, purpose, signatures_needed, text
from fedsolve.privacy.primitives import Verify, signed_by
from fedsolve.privacy.verifying import CheckedTraining


def agreed_message(
    training: str, request: str, cohort: Sequence[str], run: str, layouts: Sequence[str]
) -> bytes:
    """What a site signs: that the question with this digest follows from the totals of a training; whom it is
    for, in which run, and in which layouts it may be answered (digests of one and of its widened form)."""
    return purpose("agreed question", training, request, list(cohort), run, list(layouts))


def training_of(note: Mapping[str, Any]) -> CheckedTraining:
    """The training that a letter is about."""
    told = note.get("training")
    if not isinstance(told, dict) or not isinstance(told.get("recipe"), dict):
        raise TermError("the letter does not say which training its question belongs to.")
    if told.get("prefers") not in ("bytes", "exchanges"):
        raise TermError(f"a server prefers bytes or exchanges, not {ascii(told.get('prefers'))[:40]}.")
    return CheckedTraining(text(told, "name"), told["recipe"], told["prefers"])


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
        return self.verified and len(names) >= least_verified(self.colluders)

    def needed(self, members: Collection[str]) -> int:
        """How many sites must have signed."""
        return self.wanted or signatures_needed(len(members), self.colluders)

    def said(self, members: Collection[str]) -> str:
        """For the people at a site: whether the questions of a run are checked."""
        if not self.verified:
            return "this site answers questions that nobody has checked (verified = false)"
        return f"it answers questions that {self.needed(members)} of {len(members)} sites have checked"

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
                f"{least_verified(self.colluders)}; this site answers no others (its policy: verified)."
            )
        if not isinstance(told := note.get("agreed"), dict):
            raise TermError(
                "nobody has checked that this question follows from the totals that were opened; this site "
                "answers no others (its policy: verified)."
            )
        everybody, layouts = listed(told, "cohort"), listed(told, "layouts")
        if cohort != everybody and not (changing and set(cohort) <= set(everybody)):
            raise TermError("the sites agreed to this question for another cohort.")
        if layout not in layouts:
            raise TermError("the sites agreed to this question in another layout.")
        training = text(told, "training")
        message = agreed_message(training, request, everybody, run, layouts)
        self.check_signed(message, told.get("signatures"), members, training, self.wanted)

    def check_signed(
        self, message: bytes, signed: Any, members: Collection[str], about: str, wanted: int = 0
    ) -> None:
        """Refuse what too few of the members who check for all have signed, naming wrong signatures."""
        signatures = signed if isinstance(signed, dict) else {}
        may_check = set(members if wanted else committee(members, about, self.colluders))
        for name, signature in signatures.items():
            if name not in may_check or not signed_by(self.verify, name, message, signature):
                raise TermError(
                    f"the agreement of '{name[:60]}' to this question is not signed by that site, or "
                    "belongs to another question."
                )
        needed = wanted or signatures_needed(len(members), self.colluders)
        if len(signatures) < needed:
            raise TermError(
                f"{len(signatures)} of {len(members)} sites have checked this question; this site's policy "
                f"asks for {needed} (signatures)."
            )
