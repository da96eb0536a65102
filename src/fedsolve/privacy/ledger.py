"""What a client remembers of secure sums, in memory or in a folder of its own.

A client that helps to open totals keeps account of all that were opened, whoever asked and in whatever run:

- one question per slot: a repeat gets the stored bytes, anything else a refusal;
- an array is refused as too large for one limb once per request; then everything travels in two;
- one cohort per request: a straggler's term is not opened beside the total without it;
- one cohort per run, with everybody in it who was asked, unless the client allows changes;
- one list of a run's totals, which only grows, the same for all who open;
- clients that were always in or out together form groups of at least 3, so that no combination of totals
  is about fewer;
- rows that changed since an earlier total changed by many.

Whatever is entered is on the disk before the client sends anything that follows from it. Every line of
ledger.jsonl ends in a digest of itself and of all before it: one that was changed, or is missing, shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets as random_source
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array, canonical_json, read, write_atomically
from fedsolve.errors import CohortError, ModelFileError, TermError
from fedsolve.privacy import rules
from fedsolve.privacy.rules import Opening

__all__ = ["Ledger", "Opening"]

_MARK = b"\t"
_DIGITS = 32


class Ledger:
    """A client's account: slots used, totals opened, rows that were in them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.openings: list[Opening] = []
        self._refused: dict[str, tuple[str, str]] = {}
        self._used: dict[str, tuple[str, str]] = {}
        self._sizes: dict[str, int] = {}
        self._pinned: dict[str, str] = {}
        self._splits: dict[str, float] = {}
        self._masked: tuple[str, bytes] | None = None
        self._runs: dict[str, str] = {}
        self._rows: dict[str, Array] = {}
        self._digest = ""
        self._folder = folder
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()

    @property
    def folder(self) -> Path | None:
        return self._folder

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
        # Stopped after the first file, nothing has happened; after the second, `_load` does the rest.
        about = [slot, request, question, hashlib.sha256(secrets).hexdigest()]
        self._write("masked", canonical_json(about).encode() + b"\n" + masked)
        self._write("secrets", secrets)
        self._append({"used": [slot, request, question, len(masked)]})
        self._used[slot], self._sizes[slot] = (request, question), len(masked)
        self._masked = (slot, masked)

    def sent(self, slot: str) -> bytes:
        """The masked term that was sent in this slot, while it is the newest."""
        if self._masked is None or self._masked[0] != slot:
            raise TermError(f"the answer in slot {slot} is not kept. Ask with a new slot.")
        return self._masked[1]

    def question_of(self, slot: str) -> str:
        """What names the question that a slot served: the request, its layout and its cohort."""
        self.request_of(slot)
        return self._used[slot][1]

    def answered(self, run: str) -> tuple[int, int]:
        """How many answers this client has given in a run, and their bytes."""
        sizes = [size for slot, size in self._sizes.items() if slot.startswith(f"{run}/")]
        return len(sizes), sum(sizes)

    def pin(self, run: str, opening: str) -> None:
        """Enter the opening of a run at first contact; another one is refused."""
        if run not in self._pinned:
            self._append({"pinned": [run, opening]})
            self._pinned[run] = opening
        elif self._pinned[run] != opening:
            raise TermError(
                "the opening of this run (method, parameters, classes) is not the one that it began with."
            )

    def refuse(self, request: str, question: str, array: str) -> None:
        """Enter that a request was refused as too large for one limb, because of this array."""
        self._append({"refused": [request, question, array]})
        self._refused[request] = (question, array)

    def refused(self, request: str, question: str, narrow: bool) -> str | None:
        """The array for which this question was refused; another about the size of the answer is too.

        Many such questions would find the size out.
        """
        known = self._refused.get(request) if narrow else None
        if known is None:
            return None
        if known[0] != question:
            raise TermError(
                "this client has refused this request in one limb; it answers it in two limbs only."
            )
        return known[1]

    def request_of(self, slot: str) -> str:
        """The digest of the request that a slot served."""
        if slot not in self._used:
            raise TermError(f"slot {slot} has not been used by this client.")
        return self._used[slot][0]

    def split(self, run: str, key: str, share: float) -> None:
        """Enter that a run asks about a part of its rows; of one key a second share is refused.

        Parts of one key lie within each other: totals of two of them would show the few rows between.
        """
        name = f"{self._runs.get(run, run)}/{key}"
        if name not in self._splits:
            self._append({"split": [name, share]})
            self._splits[name] = share
        elif self._splits[name] != share:
            raise TermError(
                f"these rows have been divided with the key {key} and a share of {self._splits[name]:g} held "
                f"out; {share:g} too would show the rows between. Choose another key."
            )

    # -- rows --------------------------------------------------------------------------------------

    def begin(self, run: str, rows: Array, fewest: int, most_runs: int | None = None) -> None:
        """Enter that a run begins with these rows (digests, sorted); refused where too few have changed."""
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        if self._runs.get(run, digest) != digest:
            raise TermError("the rows have changed in the middle of this run. Put them back, or start anew.")
        if run in self._runs:
            return
        for before in self._rows.values():
            rules.enough_rows_changed(before, rows, fewest)
        runs = sum(known == digest for known in self._runs.values())
        if most_runs is not None and runs >= most_runs:
            raise CohortError(
                f"{runs} runs have used these rows, and this site's policy allows {most_runs} "
                "(runs_per_rows). Raise it there, or wait for new rows."
            )
        if digest not in self._rows:
            self._write(f"rows-{digest[:16]}.u64", rows.tobytes())
            self._rows[digest] = rows
        self._append({"run": [run, digest]})
        self._runs[run] = digest

    def row_key(self) -> bytes:
        """A secret of this ledger with which rows are hashed: a file of digests shows nobody a row."""
        path = None if self._folder is None else self._folder / "row-key"
        if path is None:
            return b"in memory"
        if not path.exists():
            self._write("row-key", random_source.token_bytes(32))
        return read(path)

    # -- openings ----------------------------------------------------------------------------------

    def learn(
        self, run: str, told: Sequence[Opening], name: str, changing: bool, new: Opening | None = None
    ) -> None:
        """Enter a run's totals as this client is told them; refused where a rule forbids one of them.

        new: the one of them that it is asked to open, and enters by itself.

        A total that is said to hold this client's term while it knows of none is either invented, or this
        client has lost its ledger: then it sits the run out.
        """
        seen = [opening for opening in self.openings if opening.run == run]
        rules.one_chain(seen, told)
        for other in told[len(seen) :]:
            if other == new:
                return
            if name in other.cohort and all(other.request != request for request, _ in self._used.values()):
                raise CohortError(
                    f"a total of this run is said to hold the term of '{name}', whose ledger knows nothing "
                    "of it. A client that lost its ledger sits the run out."
                )
            self._check(other, changing)
            self._enter(other)

    def check(self, new: Opening, dropped: Sequence[str], changing: bool) -> None:
        """Refuse to open a total, by name, where a rule forbids it."""
        if dropped and not changing:
            raise CohortError(
                f"{list(dropped)[:5]} did not answer, and this client only opens sums over all who were "
                "asked (changing=True allows others)."
            )
        self._check(new, changing)

    def _check(self, new: Opening, changing: bool) -> None:
        if not changing:
            rules.one_cohort_per_run(self.openings, new)
        rules.one_cohort_per_request(self.openings, new)
        rules.groups_of_three(self.openings, new)

    def open(self, new: Opening, secrets: bytes) -> None:
        """Enter an opening before it is sent."""
        if new not in self.openings:
            self._enter(new)
        self._write("secrets", secrets)

    def _enter(self, new: Opening) -> None:
        self._append({"opened": [new.run, new.request, list(new.cohort)]})
        self.openings.append(new)

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
            line = canonical_json(entry).encode()
            digest = _next(self._digest, line)
            with open(self._folder / "ledger.jsonl", "ab", opener=_for_owner) as file:
                file.write(line + _MARK + digest.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._digest = digest

    def _load(self) -> None:
        assert self._folder is not None
        path = self._folder / "ledger.jsonl"
        try:
            if path.exists():
                whole, _, torn = read(path).rpartition(b"\n")
                if len(torn.partition(_MARK)[2]) > _DIGITS:
                    raise ValueError("its last line ends in something else")
                lines = whole.split(b"\n") if whole else []
                if len(torn.partition(_MARK)[2]) == _DIGITS:
                    lines.append(torn)
                if (
                    torn
                ):  # the machine stopped while it wrote this line: nothing that follows from it was sent
                    write_atomically(path, b"".join(line + b"\n" for line in lines), private=True)
                for number, line in enumerate(lines, 1):
                    self._take(json.loads(self._unmarked(line, number)))
            self._load_masked(self._folder / "masked")
        except (KeyError, TypeError, ValueError) as problem:
            raise ModelFileError(
                f"the ledger {path} is damaged ({type(problem).__name__}: {problem}). Without it this "
                "client cannot know what it has opened; it must sit out."
            ) from problem

    def _unmarked(self, line: bytes, number: int) -> bytes:
        """A line without its digest, which must be that of all lines so far."""
        entry, _, digest = line.partition(_MARK)
        if not digest and not self._digest:  # written before lines had digests
            return entry
        expected = _next(self._digest, entry)
        if digest != expected.encode():
            raise ValueError(f"line {number} was changed, or lines before it are missing")
        self._digest = expected
        return entry

    def _load_masked(self, path: Path) -> None:
        if not path.exists():
            return
        head, _, masked = read(path).partition(b"\n")
        slot, request, question, secrets = json.loads(head)
        if slot not in self._used:  # stopped while it was entered, and not sent
            if hashlib.sha256(self.secrets or b"").hexdigest() != secrets:
                return
            self._append({"used": [slot, request, question, len(masked)]})
            self._used[slot], self._sizes[slot] = (request, question), len(masked)
        self._masked = (slot, masked)

    def _take(self, entry: dict[str, Any]) -> None:
        if "used" in entry:
            slot, request, question, size = entry["used"]
            self._used[slot], self._sizes[slot] = (request, question), size
        elif "split" in entry:
            name, share = entry["split"]
            self._splits[name] = share
        elif "pinned" in entry:
            run, opening = entry["pinned"]
            self._pinned[run] = opening
        elif "refused" in entry:
            request, question, array = entry["refused"]
            self._refused[request] = (question, array)
        elif "run" in entry:
            run, digest = entry["run"]
            self._runs[run] = digest
            if digest not in self._rows:
                assert self._folder is not None
                stored = read(self._folder / f"rows-{digest[:16]}.u64")
                self._rows[digest] = np.frombuffer(stored, dtype=np.uint64)
        else:
            run, request, cohort = entry["opened"]
            self.openings.append(Opening(run, request, tuple(cohort)))


def _next(digest: str, line: bytes) -> str:
    return hashlib.sha256(digest.encode() + line).hexdigest()[:_DIGITS]


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
