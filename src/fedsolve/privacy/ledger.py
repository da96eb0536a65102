"""What a client remembers of secure sums, in memory or in a folder of its own.

A client that helps to open totals keeps account of all that were opened, whoever asked and in whatever run:

- one question per slot: a repeat gets the stored bytes, anything else a refusal;
- one cohort per request: a straggler's term is not opened beside the total without it;
- everybody is in a total who was asked, unless the client allows changes;
- one list of a run's totals, which only grows, the same for all who open;
- clients that were always in or out together form groups of at least 3, so that no combination of totals
  is about fewer.

Which rows totals were about, `disclosure` keeps.

Whatever is entered is on the disk before the client sends anything that follows from it. Every line of
ledger.jsonl ends in a digest of itself and of all before it: one that was changed, or is missing, shows. Two
processes do not share a ledger: neither would know what the other has opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets as random_source
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve.container import Shelf, canonical_json, undamaged
from fedsolve.errors import CohortError, ModelFileError, TermError
from fedsolve.privacy.notes import LEAST_COHORT

_MARK = b"\t"
_DIGITS = 32


@dataclass(frozen=True)
class Opening:
    """A total that was opened: in which run, of which request (its digest), over whom."""

    run: str
    request: str
    cohort: tuple[str, ...]


class Ledger:
    """A client's account: slots used, totals opened, rows that were in them.

    Of a slot it knows request, question and bytes ("used") and the shares of noise; of a run its opening
    ("pinned"); of a site that it has left, and accepts that its sum is the difference of two totals
    ("withdrawn"), or asks for noise that hides it ("hidden").

    row_key: a secret of this ledger with which rows are hashed: a file of digests shows nobody a row.
    secrets: what `keep` wrote last; None without a folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.openings: list[Opening] = []
        self._facts: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        self._used, self.withdrawn = self._facts["used"], self._facts["withdrawn"].keys()
        self._masked: tuple[str, bytes] | None = None
        self._digest, self._size = "", 0
        self.row_key = b"in memory"
        self.secrets: bytes | None = None
        self.folder = folder
        if folder is not None:
            self._shelf = Shelf(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()

    # -- slots -------------------------------------------------------------------------------------

    def stored(self, slot: str, question: str | None = None) -> bytes | None:
        """The masked term sent in this slot, while it is the newest; None where it is free. Refused for
        another question, where one is named."""
        if slot not in self._used:
            return None
        if question not in (None, self._used[slot][1]):
            raise TermError(
                f"slot {slot} has served another question; its masks would meet a second term and show the "
                "difference. Ask with a new slot."
            )
        if self._masked is None or self._masked[0] != slot:
            raise TermError(f"slot {slot} has been used and its answer is not kept. Ask with a new slot.")
        return self._masked[1]

    def use(self, slot: str, request: str, question: str, masked: bytes, save: Callable[[], bytes]) -> None:
        """Enter a masked term before it is sent; a slot that was entered is never used again."""
        if self.folder is not None:
            # Stopped after the first file, nothing has happened; after the second, `_load` does the rest.
            about = [slot, request, question, hashlib.sha256(secrets := save()).hexdigest()]
            self._shelf.write("masked", canonical_json(about).encode() + b"\n" + masked)
            self.keep(lambda: secrets)
        if slot not in self._used:
            self._enter("used", slot, request, question, len(masked))
        self._masked = (slot, masked)

    def request_of(self, slot: str) -> str:
        """The digest of the request that a slot served."""
        if slot not in self._used:
            raise TermError(f"slot {slot} has not been used by this client.")
        return str(self._used[slot][0])

    def answered(self, run: str) -> tuple[int, int]:
        """How many answers this client has given in a run, and their bytes."""
        sizes = [size for slot, (_, _, size) in self._used.items() if slot.startswith(f"{run}/")]
        return len(sizes), sum(sizes)

    def pin(self, run: str, opening: str) -> None:
        """Enter the opening of a run at first contact; another one is refused."""
        if self._know("pinned", run, opening) != [opening]:
            raise TermError(
                "the opening of this run (method, parameters, classes) is not the one that it began with."
            )

    def withdraw(self, site: str, cohort: Collection[str], noise: bool = False) -> None:
        """Enter that a site has left this cohort, which signed that it did: totals without it are opened.

        noise: the site asks for noise: only totals of private runs are opened without it.
        """
        gone = self.withdrawn - {site}
        if all({*cohort} != {*each.cohort} - gone for each in self.openings):
            raise CohortError(
                f"'{site}' leaves {', '.join(sorted(cohort))}, and this ledger knows of no total over them. "
                "Ask it for a withdrawal from the cohort that was trained with, and name this site's ledger."
            )
        self._know("hidden" if noise else "withdrawn", site)

    def need_noise(self, slot: str, shares: int) -> None:
        """Enter how many honest sites must have added noise to the sum of a slot."""
        self._know("noise", slot, shares)

    # -- openings ----------------------------------------------------------------------------------

    def learn(
        self,
        run: str,
        told: Sequence[Opening],
        name: str,
        new: Opening | None = None,
        slot: str = "",
        honest: int = 0,
    ) -> None:
        """Enter a run's totals as this client is told them; refused where a rule forbids one of them.

        new: the one of them that it is asked to open, which `open` enters. slot: of that one.
        honest: how many of its sites add their share of the noise for certain.

        A total that is said to hold this client's term while it knows of none is either invented, or this
        client has lost its ledger: then it sits the run out.
        """
        seen = [opening for opening in self.openings if opening.run == run]
        one_chain(seen, told)
        for other in (*told[len(seen) :], *([] if new is None else [new])):
            unknown = all(other.request != used[0] for used in self._used.values())
            if other != new and name in other.cohort and unknown:
                raise CohortError(
                    f"a total of this run is said to hold the term of '{name}', whose ledger knows nothing "
                    "of it. A client that lost its ledger sits the run out."
                )
            noise = self._facts["noise"].keys() & self._used.keys()
            noisy = any(self._used[slot][0] == other.request for slot in noise)
            known = {name for each in self.openings for name in each.cohort}
            hidden = self._facts["hidden"].keys() & (known - {*other.cohort})
            if hidden and not noisy:
                raise CohortError(
                    f"{sorted(hidden)} left and asked for noise: without them this site sums private runs "
                    "only. Train with noise (--epsilon)."
                )
            left = {*self.withdrawn, *hidden}
            gone = left if left.isdisjoint(other.cohort) else ()
            before = [
                Opening(each.run, each.request, tuple(name for name in each.cohort if name not in gone))
                for each in self.openings
            ]
            one_cohort_per_request(before, other)
            groups_of_three(before, other)
            if other == new:
                break
            self._enter("opened", other.run, other.request, list(other.cohort))
        if honest < (shares := self._facts["noise"].get(slot, [0])[0]):
            raise CohortError(
                f"{honest} honest sites are in this sum, and its noise is enough from {shares} on (honest). "
                "Ask in a new slot, with a smaller share of honest sites, or with more sites."
            )

    def open(self, new: Opening, save: Callable[[], bytes]) -> None:
        """Enter an opening before it is sent."""
        if new not in self.openings:
            self._enter("opened", new.run, new.request, list(new.cohort))
        self.keep(save)

    # -- the folder --------------------------------------------------------------------------------

    def keep(self, save: Callable[[], bytes]) -> None:
        """Keep what `save` gives, which the client needs to go on after a restart."""
        if self.folder is not None:
            self.secrets = save()
            self._shelf.write("client", self.secrets)

    def _know(self, kind: str, key: str, *values: Any) -> list[Any]:
        """What is known of a key; these values are entered if nothing is."""
        if key not in self._facts[kind]:
            self._enter(kind, key, *values)
        return self._facts[kind][key]

    def _enter(self, kind: str, key: str, *values: Any, written: bool = False) -> None:
        """Write an entry down, where it is not, and know it from then on."""
        if self.folder is not None and not written:
            line = canonical_json({kind: [key, *values]}).encode()
            digest = _next(self._digest, line)
            path = self.folder / "ledger.jsonl"
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if file.tell() != self._size:
                    raise ModelFileError(
                        f"{path} has lines that this process neither wrote nor read: another client uses "
                        "this folder (--state), or the disk was full. End all but one, and start it again."
                    )
                file.write(entry := line + _MARK + digest.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._digest, self._size = digest, self._size + len(entry)
        if kind == "opened":
            self.openings.append(Opening(key, values[0], tuple(values[1])))
        else:
            self._facts[kind][key] = list(values)

    def _load(self) -> None:
        assert self.folder is not None
        self.secrets, key = self._shelf.read("client"), self._shelf.read("row-key")
        if key is None:
            self._shelf.write("row-key", key := random_source.token_bytes(32))
        self.row_key, path = key, self.folder / "ledger.jsonl"
        remedy = "Without it this client cannot know what it has opened; it must sit out."
        with undamaged(f"the ledger {path}", remedy):
            if (data := self._shelf.read("ledger.jsonl")) is not None:
                whole, _, torn = data.rpartition(b"\n")
                if len(torn.partition(_MARK)[2]) > _DIGITS:
                    raise ValueError("its last line ends in something else")
                lines = whole.split(b"\n") if whole else []
                if len(torn.partition(_MARK)[2]) == _DIGITS:
                    lines.append(torn)
                self._size = sum(len(line) + 1 for line in lines)
                if torn:  # the machine stopped while it wrote this line, and nothing that follows was sent
                    self._shelf.write("ledger.jsonl", b"".join(line + b"\n" for line in lines))
                for number, line in enumerate(lines, 1):
                    entry, _, digest = line.partition(_MARK)
                    self._digest = _next(self._digest, entry)
                    if digest != self._digest.encode():
                        raise ValueError(f"line {number} was changed, or lines before it are missing")
                    ((kind, (key, *values)),) = json.loads(entry).items()
                    self._enter(kind, key, *values, written=True)
            if (data := self._shelf.read("masked")) is not None:
                head, _, masked = data.partition(b"\n")
                slot, request, question, secrets = json.loads(head)
                if slot not in self._used:  # stopped while it was entered, and not sent
                    if hashlib.sha256(self.secrets or b"").hexdigest() != secrets:
                        return
                    self._know("used", slot, request, question, len(masked))
                self._masked = (slot, masked)


def _next(digest: str, line: bytes) -> str:
    return hashlib.sha256(digest.encode() + line).hexdigest()[:_DIGITS]


# A total shows nothing but the total; two show their difference. So there are rules about cohorts.


def one_cohort_per_request(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a second cohort for a request: the two totals would differ by a few sites' terms."""
    for before in opened:
        if before.request == new.request and before.cohort != new.cohort:
            raise CohortError(
                f"this request has been opened for {len(before.cohort)} clients; opening it with or without "
                f"{sorted({*before.cohort} ^ {*new.cohort})[:5]} too would show the difference."
            )


def groups_of_three(opened: Sequence[Opening], new: Opening) -> None:
    """Refuse a cohort that, with those opened before, sets one or two clients apart."""
    members: dict[str, int] = {}  # by name, a bit for each cohort that it is in
    for place, cohort in enumerate({opening.cohort for opening in (*opened, new)}):
        for name in cohort:
            members[name] = members.get(name, 0) | 1 << place
    sizes = Counter(members.values())
    apart = sorted(name for name, kind in members.items() if sizes[kind] < LEAST_COHORT)
    if apart:
        raise CohortError(
            f"with the totals opened before, this one would set {apart[:5]} apart from all others: clients "
            f"that are always in or out together must be at least {LEAST_COHORT}. They join or leave as "
            f"{LEAST_COHORT}, or not at all."
        )


def one_chain(seen: Sequence[Opening], told: Sequence[Opening]) -> None:
    """Refuse a list of a run's totals that does not continue the one seen last.

    More than half of the members open each total, so two lists that part cannot both be gone on with.
    """
    if tuple(told[: len(seen)]) != tuple(seen):
        raise CohortError(
            "the list of totals opened in this run is not the one that this client was shown before. "
            "Somebody was told otherwise; this client opens nothing more in this run."
        )
