"""What a client remembers of secure sums, and the rules that follow from it.

A total shows nothing but the total; two totals show their difference. So a client that helps to open totals
keeps account of all it ever opened, whoever asked and in whatever run:

- one question per slot: a repeat gets the stored bytes, anything else a refusal;
- an array is refused as too large for one limb once per request; then everything travels in two;
- one cohort per request: a straggler's term is not opened beside the total without it;
- one cohort per run, with everybody in it who was asked, unless the client allows changes;
- clients that were always in or out together form groups of at least 3, so that no combination of totals
  is about fewer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve.container import canonical_json, read, write_atomically
from fedsolve.errors import CohortError, ModelFileError, TermError
from fedsolve.privacy.notes import LEAST_COHORT


@dataclass(frozen=True)
class Opening:
    """A total that a client helped to open: in which run, of which request (its digest), over whom."""

    run: str
    request: str
    cohort: tuple[str, ...]


def one_cohort_per_request(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a second cohort for a request: the difference of the two totals is about few."""
    for before in opened:
        if before.request == new.request and before.cohort != new.cohort:
            raise CohortError(
                f"this request has been opened for {len(before.cohort)} clients; opening it for "
                f"{_difference(before.cohort, new.cohort)} too would show the difference."
            )


def one_cohort_per_run(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a cohort that changed within a run."""
    for before in opened:
        if before.run == new.run and before.cohort != new.cohort:
            raise CohortError(
                f"the cohort of this run has changed: {_difference(before.cohort, new.cohort)}. Totals "
                "before and after would show the difference. Start a new run, or let clients allow changes "
                "(changing=True)."
            )


def groups_of_three(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a cohort that, with those opened before, sets one or two clients apart."""
    cohorts = {opening.cohort for opening in (*opened, new)}
    members = {name: frozenset(c for c in cohorts if name in c) for cohort in cohorts for name in cohort}
    sizes = Counter(members.values())
    apart = sorted(name for name, kind in members.items() if sizes[kind] < LEAST_COHORT)
    if apart:
        raise CohortError(
            f"with the totals opened before, this one would set {apart[:5]} apart from all others: clients "
            f"that are always in or out together must be at least {LEAST_COHORT}. They join or leave as "
            f"{LEAST_COHORT}, or not at all."
        )


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    more, fewer = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    return " and ".join(
        f"{word} {names[:5]}" for word, names in (("with", more), ("without", fewer)) if names
    )


class Ledger:
    """A client's account of slots used and totals opened, in memory or in a folder of its own.

    Whatever is entered is on the disk before the client sends anything that follows from it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.openings: list[Opening] = []
        self._refused: set[str] = set()
        self._used: dict[str, tuple[str, str]] = {}
        self._masked: tuple[str, bytes] | None = None
        self._folder = folder
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()

    # -- slots -------------------------------------------------------------------------------------

    def stored(self, slot: str, question: str) -> bytes | None:
        """The bytes sent for this slot before, None where it is free; refused for another question."""
        if slot not in self._used:
            return None
        if self._used[slot][1] != question:
            raise TermError(
                f"slot {slot} has served another question; its masks would meet a second term and show the "
                "difference. Ask with a new slot."
            )
        if self._masked is None or self._masked[0] != slot:
            raise TermError(f"slot {slot} has been used and its answer is not kept. Ask with a new slot.")
        return self._masked[1]

    def use(self, slot: str, request: str, question: str, masked: bytes, secrets: bytes) -> None:
        """Enter a masked term before it is sent; a slot that was entered is never used again."""
        self._append({"used": [slot, request, question]})
        self._used[slot] = (request, question)
        self._masked = (slot, masked)
        self._write("masked", canonical_json(slot).encode() + b"\n" + masked)
        self._write("secrets", secrets)

    def refuse(self, request: str) -> None:
        """Enter that a request was refused as too large for one limb."""
        self._append({"refused": request})
        self._refused.add(request)

    def check_limbs(self, request: str, narrow: bool) -> None:
        """Refuse a second question about the size of an answer: many would find the size out."""
        if narrow and request in self._refused:
            raise TermError(
                "this client has refused this request in one limb; it answers it in two limbs only."
            )

    def request_of(self, slot: str) -> str:
        """The digest of the request that a slot served."""
        if slot not in self._used:
            raise TermError(f"slot {slot} has not been used by this client.")
        return self._used[slot][0]

    # -- openings ----------------------------------------------------------------------------------

    def check(self, new: Opening, dropped: Sequence[str], changing: bool) -> None:
        """Refuse to open a total, by name, where a rule forbids it."""
        if dropped and not changing:
            raise CohortError(
                f"{list(dropped)[:5]} did not answer, and this client only opens sums over all who were "
                "asked (changing=True allows others)."
            )
        if not changing:
            one_cohort_per_run(self.openings, new)
        one_cohort_per_request(self.openings, new)
        groups_of_three(self.openings, new)

    def open(self, new: Opening, secrets: bytes) -> None:
        """Enter an opening before it is sent."""
        if new not in self.openings:
            self._append({"opened": [new.run, new.request, list(new.cohort)]})
            self.openings.append(new)
        self._write("secrets", secrets)

    # -- the folder --------------------------------------------------------------------------------

    def keep(self, secrets: bytes) -> None:
        """Keep what the client needs to go on after a restart."""
        self._write("secrets", secrets)

    @property
    def secrets(self) -> bytes | None:
        """What was kept last, in a folder."""
        path = None if self._folder is None else self._folder / "secrets"
        return read(path) if path is not None and path.exists() else None

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            write_atomically(self._folder / name, data, private=True)

    def _append(self, entry: dict[str, Any]) -> None:
        if self._folder is not None:
            with open(self._folder / "ledger.jsonl", "ab") as file:
                file.write(canonical_json(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _load(self) -> None:
        assert self._folder is not None
        path, masked = self._folder / "ledger.jsonl", self._folder / "masked"
        if path.exists():
            whole, _, torn = read(path).rpartition(b"\n")
            if torn:  # the machine stopped while it wrote this line, so nothing that follows from it was sent
                write_atomically(path, whole + b"\n" if whole else b"", private=True)
            try:
                for line in whole.splitlines():
                    self._take(json.loads(line))
            except (KeyError, TypeError, ValueError) as problem:
                raise ModelFileError(
                    f"the ledger {path} is damaged ({type(problem).__name__}: {problem}). Without it this "
                    "client cannot know what it has opened; it must sit out."
                ) from problem
        if masked.exists():
            slot, _, stored = read(masked).partition(b"\n")
            self._masked = (json.loads(slot), stored)

    def _take(self, entry: dict[str, Any]) -> None:
        if "used" in entry:
            slot, request, question = entry["used"]
            self._used[slot] = (request, question)
        elif "refused" in entry:
            self._refused.add(entry["refused"])
        else:
            run, request, cohort = entry["opened"]
            self.openings.append(Opening(run, request, tuple(cohort)))
