"""A seed that nobody chose: sites commit to a number, then show it; the seed is a hash of all of them.

    commit   what is drawn for, and by which sites     -> SHA-256 of a secret number, signed
    reveal   all commitments                           -> the number, signed
    seed     all numbers, told to every site           -> the seed, as this site finds it

Of more than 64 sites, 64 draw for all (`notes.committee`), or four times as many as may collude: one that is
honest among them is enough.

A site shows its number once, when it knows that everybody is bound. There is one drawing for each method and
cohort, whatever its parameters are: a ridge changed in the ninth digit has the same seed, and so has whoever
asks again. A drawing that was broken off goes on with the same numbers. Nobody can choose among seeds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve.container import Shelf, from_bytes, to_bytes
from fedsolve.errors import CohortError, TermError, explained
from fedsolve.federation.cohort import plain
from fedsolve.federation.engine import CarriesLetters
from fedsolve.privacy.notes import LEAST_COHORT, Setup, committee, listed, purpose, text
from fedsolve.privacy.primitives import Sign, Verify, signed_by
from fedsolve.privacy.shamir import Random

SEED_CHANNEL = "joint seed"
"""The channel of an engine on which these letters travel."""

MOST_VOID = 20
"""Drawings that were begun and never agreed on."""

_LARGEST = 1 << 16  # bytes of a reply: a number and a signature
_NUMBER_BYTES = 32
_SEED_BITS = 48


def about_circle(setup: Setup) -> str:
    """A digest of what the circle of a setup is drawn for."""
    return hashlib.sha256(purpose("circle", setup.run, setup.epoch)).hexdigest()


def about_opening(opening: Mapping[str, Any]) -> str:
    """A digest of what a seed is drawn for: the method, and nothing that a server chooses besides."""
    asked = opening.get("chosen_by", opening)  # a seed is drawn once, before a method is chosen
    return hashlib.sha256(purpose("method", asked["method"])).hexdigest()


def drawing_of(about: str, names: Iterable[str]) -> str:
    """The name of the one drawing of a seed about this with these sites."""
    return hashlib.sha256(purpose("drawing of a seed", about, sorted(names))).hexdigest()[:32]


def bound_by(number: str) -> str:
    """What binds a site to a number without showing it."""
    return hashlib.sha256(purpose("seed number") + bytes.fromhex(number)).hexdigest()


class SeedBook:
    """A site's account of seeds, in memory or in a folder; on the disk before anything is sent."""

    def __init__(self, folder: Path | None = None) -> None:
        self._shelf = Shelf(folder)
        self._entries: dict[str, dict[str, Any]] = self._shelf.kept("seeds.json", lambda _, note: note) or {}

    def entry(self, run: str) -> dict[str, Any] | None:
        """What is known of a drawing; None before its commitment."""
        return self._entries.get(run)

    def enter(self, run: str, entry: Mapping[str, Any]) -> None:
        """Write down what is known of a drawing; refused where too many were begun and have no seed."""
        void = sum("seed" not in begun for begun in self._entries.values())
        if run not in self._entries and void >= MOST_VOID:
            raise CohortError(
                f"{MOST_VOID} drawings were begun with this site and have no seed; somebody may be choosing. "
                "It takes no part until its people have asked why, and removed seeds.json."
            )
        if entry != self._entries.get(run):
            entries = {**self._entries, run: dict(entry)}
            self._shelf.keep("seeds.json", entries)
            self._entries = entries

    def drew(self, seed: int, about: str, names: Iterable[str] | None = None) -> bool:
        """Whether this seed was drawn for this; names: by these very sites."""
        run = None if names is None else drawing_of(about, names)
        return any(
            entry.get("seed") == seed and entry["about"] == about and run in (None, name)
            for name, entry in self._entries.items()
        )

    def check(self, opening: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
        """Refuse an opening whose seed this site did not draw together with the others, for this method; with
        these very sites where they are named: among seeds of other cohorts whoever asks could choose."""
        seed = opening["parameters"].get("seed")
        if seed is not None and not self.drew(seed, about_opening(opening), names):
            raise TermError(
                f"the seed {ascii(seed)[:20]} of this run was not drawn by all sites together for this "
                "method; this site answers no other."
            )


@dataclass
class SeedSite:
    """A site's side: letters in, letters out. random: anything but the default is for tests."""

    name: str
    sign: Sign
    verify: Verify
    book: SeedBook
    random: Random = secrets.token_bytes
    colluders: int = 0

    def answer(self, letter: bytes) -> bytes:
        """The reply to a letter."""
        note = _read(letter)
        what, run, about = (text(note, part) for part in ("ask", "run", "about"))
        names = listed(note, "names")
        if self.name not in names or len(names) < LEAST_COHORT:
            raise TermError(f"'{self.name}' is not among at least {LEAST_COHORT} sites that draw a seed.")
        if run != drawing_of(about, names):
            raise TermError(
                "a second seed is drawn for the same method and sites: whoever asks could choose."
            )
        drawing, entry = committee(names, about, self.colluders), self.book.entry(run) or {"about": about}
        if what == "seed":
            return self._seed(run, entry, note, drawing)
        if what not in ("commit", "reveal"):
            raise TermError(f"unknown letter {ascii(what)[:40]} about a seed.")
        if what == "commit" and self.name in drawing and "number" not in entry:
            entry = {**entry, "number": self.random(_NUMBER_BYTES).hex()}
            self.book.enter(run, entry)  # on the disk before it is sent
        if "number" not in entry:
            raise TermError(f"'{self.name}' has committed to nothing in this drawing of a seed.")
        if what == "reveal":
            self._check_bound(run, entry, note, drawing)
        value = bound_by(entry["number"]) if what == "commit" else entry["number"]
        signature = self.sign(purpose(f"seed {what}", run, about, self.name, value))
        return to_bytes({}, {"value": value, "signature": signature.hex()})

    def _check_bound(
        self, run: str, entry: dict[str, Any], note: dict[str, Any], drawing: Collection[str]
    ) -> None:
        """Refuse to show this site's number to others than those who are bound to theirs."""
        bound = self._believed("commit", run, entry["about"], note, "commitments")
        if entry.get("commitments", bound) != bound:
            raise TermError("this site has shown its number to other commitments; it is bound to those.")
        if set(bound) != set(drawing) or bound.get(self.name) != bound_by(entry["number"]):
            raise TermError(f"the sites that draw are not those that committed, '{self.name}' among them.")
        self.book.enter(run, {**entry, "commitments": bound})

    def _seed(self, run: str, entry: dict[str, Any], note: dict[str, Any], drawing: Collection[str]) -> bytes:
        """The seed of all numbers; who does not draw believes what those who do have signed."""
        shown = self._believed("reveal", run, entry["about"], note, "numbers")
        bound = entry.get("commitments", {}) if self.name in drawing else dict.fromkeys(drawing)
        check_all_shown(bound, shown)
        wrong = [name for name, number in shown.items() if bound[name] not in (None, bound_by(number))]
        if wrong:
            raise TermError(f"{sorted(wrong)[:5]} showed another number than it had committed to.")
        numbers = purpose("seed of all", run, entry["about"], sorted(shown.items()))
        seed = int.from_bytes(hashlib.sha256(numbers).digest(), "little") % (1 << _SEED_BITS)
        if entry.get("seed", seed) != seed:
            raise TermError("a second seed is drawn for the same method and sites.")
        self.book.enter(run, {**entry, "seed": seed})
        return to_bytes({}, {"value": str(seed), "signature": ""})

    def _believed(self, what: str, run: str, about: str, note: dict[str, Any], part: str) -> dict[str, str]:
        """What each site is said to commit to or to reveal, if it has signed it."""
        with explained(f"'{part}' of this letter is damaged", error=TermError):
            told = {str(site): (bytes.fromhex(value).hex(), by) for site, (value, by) in note[part].items()}
        for name, (value, signature) in told.items():
            message = purpose(f"seed {what}", run, about, name, value)
            if not signed_by(self.verify, name, message, signature):
                raise TermError(
                    f"what '{name}' is said to {what} is not signed by '{name}' as this site knows it."
                )
        return {name: value for name, (value, _) in told.items()}


def check_all_shown(bound: Mapping[str, str | None], shown: Mapping[str, str]) -> None:
    """Refuse numbers of some who committed only: whoever left one out may have seen the seed with it."""
    if not bound or set(bound) != set(shown):
        missing = sorted(set(bound) ^ set(shown))
        raise TermError(
            f"the numbers of {missing[:5]} are missing or too many: a seed takes all who committed."
        )


def draw_seed(engine: CarriesLetters, names: Collection[str], about: str, colluders: int = 0) -> int:
    """The server's side: the seed that these sites draw; an error, by name, where one does not help."""
    run, everybody = drawing_of(about, names), sorted(names)
    drawing = sorted(committee(names, about, colluders))

    def ask(what: str, asked: Collection[str], **more: Any) -> dict[str, list[str]]:
        letter = to_bytes({}, {"ask": what, "run": run, "about": about, "names": everybody, **more})
        found = {}
        for name, reply in engine.carry(SEED_CHANNEL, dict.fromkeys(asked, letter), _LARGEST):
            if isinstance(reply, Exception):
                raise CohortError(
                    f"'{name}' does not help to draw the seed of this run: {plain(reply).rstrip('.')}. "
                    "Resume when it does; the drawing goes on."
                ) from reply
            note = _read(reply)
            found[name] = [str(note.get("value")), str(note.get("signature"))]
        return found

    commitments = ask("commit", drawing)
    numbers = ask("reveal", drawing, commitments=commitments)
    seeds = {value for value, _ in ask("seed", everybody, numbers=numbers).values()}
    if len(seeds) != 1:
        raise CohortError(
            f"the sites find {len(seeds)} different seeds. Install the same fedsolve everywhere."
        )
    return int(seeds.pop())


def _read(letter: bytes) -> dict[str, Any]:
    return from_bytes(letter, what="this letter about a seed", error=TermError)[1]
