"""The server's side of a secure sum: keys and shares passed on, masked terms added, masks removed.

The server holds nothing secret. It learns the total over those whose masked terms it summed, once a
threshold of members helped, and nothing if fewer did; see `masking` for the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from fedsolve.arrays import Array
from fedsolve.errors import CohortError, TermError
from fedsolve.privacy import notes
from fedsolve.privacy.graph import around
from fedsolve.privacy.notes import Question, Setup, SlotKeys
from fedsolve.privacy.primitives import NONCE_BYTES, TAG_BYTES
from fedsolve.privacy.ring import Layout, RingVector
from fedsolve.privacy.shamir import SHARE_BYTES, joined
from fedsolve.privacy.witness import Evidence, WordSum

Stored = tuple[WordSum, Collection[str]]
"""A sum of masked terms, and whose terms they are."""


class Server:
    """Collects and passes on the notes of a setup, then gives one `MaskedSum` per slot.

    Each `add_` takes who sent a note, as the engine knows it; a note under another name is refused. A server
    that starts again is given the notes of the setup again.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.keys: dict[str, SlotKeys] = {}
        self._sealed: dict[str, dict[str, bytes]] = {}
        self.around: dict[str, tuple[str, ...]] = {}
        self._relayed: dict[tuple[str, ...], bytes] = {}
        self._sealed_passed_on = False
        self._used: set[int] = set()

    @property
    def members(self) -> tuple[str, ...]:
        """Who advertised keys."""
        return tuple(sorted(self.keys))

    @property
    def sharers(self) -> tuple[str, ...]:
        """Who shared its secrets too, and so can take part in sums."""
        return tuple(sorted(self._sealed))

    def add_keys(self, sender: str, note: bytes) -> None:
        """Take what `Client.advertise` gave."""
        if self.around:
            raise CohortError(f"'{sender}' comes too late: the members' keys have been passed on.")
        _sent_by(sender, note, "keys", self.setup)
        self.keys[sender] = SlotKeys.from_bytes(note, self.setup)

    def keys_for(self, name: str) -> bytes:
        """The keys of a member's neighbours, for its `Client.share`; nobody can join after the first."""
        if not self.around:
            self._check_enough(self.members, "advertised keys")
            self.around = around(self.members, self.setup.degree, self.setup.circle)
        near = self.around[name]
        if near not in self._relayed:
            letters = {other: self.keys[other].letter for other in near}
            self._relayed = {near: notes.relay("members", self.setup, letters, self.members)}
        return self._relayed[near]

    def add_shares(self, sender: str, note: bytes) -> None:
        """Take what `Client.share` gave."""
        if self._sealed_passed_on:
            raise CohortError(f"'{sender}' comes too late: the members' shares have been passed on.")
        arrays, fields = _sent_by(sender, note, "shares", self.setup)
        if notes.listed(fields, "names") != [name for name in self.around.get(sender, ()) if name != sender]:
            raise TermError(f"'{sender}' shared its secrets with other members than those of this setup.")
        names = fields["names"]
        size = NONCE_BYTES + self.setup.slots * 2 * SHARE_BYTES + TAG_BYTES
        self._sealed[sender] = {name: notes.raw(arrays, str(n), size) for n, name in enumerate(names)}

    def shares_for(self, name: str) -> bytes:
        """What the others sealed for a member, for its `Client.receive`; nobody can share after that."""
        self._check_enough(self.sharers, "shared their secrets")
        self._sealed_passed_on = True
        parts = {n: self._sealed[n][name] for n in self.around[name] if n != name and n in self._sealed}
        return notes.relay("sealed", self.setup, parts)

    def sum(
        self,
        slot: int,
        cohort: Collection[str],
        wide: int,
        narrow: int,
        context: bytes = b"",
        stored: Stored | None = None,
    ) -> MaskedSum:
        """A sum to be asked for in a slot that is free; arguments as the clients get them."""
        question = Question(self.setup, slot, tuple(sorted(cohort)), wide, narrow, context)
        notes.check_names(self.sharers, question.cohort, "the cohort of this sum")
        if slot in self._used:
            raise TermError(f"slot {slot} has been used; ask with a new one.")
        self._used.add(slot)
        return MaskedSum(question, self, stored)

    def _check_enough(self, names: Collection[str], did: str) -> None:
        least = self.setup.least_cohort
        if len(names) < least:
            raise CohortError(f"{len(names)} clients {did} ({sorted(names)}); secure sums take {least}.")


class MaskedSum:
    """One sum under way: masked terms are added, then the total is opened with the members' shares.

    masked: the sum so far, meaningless until it is opened. Store it and `survivors` before asking anybody to
        open: a server that asked for another cohort after a restart would be refused.
    stored: both, to go on from.
    """

    def __init__(self, question: Question, server: Server, stored: Stored | None) -> None:
        self.question, self._digest = question, question.digest()
        self._around, self._keys = server.around, server.keys
        self.masked, survivors = stored or (WordSum.zeros(question.wide, question.narrow), ())
        self._survivors, self._closed = set(survivors), stored is not None
        self._openings: dict[str, dict[str, bytes]] = {}

    @property
    def survivors(self) -> tuple[str, ...]:
        """Whose terms are in the sum."""
        return tuple(sorted(self._survivors))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Who was asked and has not answered."""
        return tuple(sorted(set(self.question.cohort) - self._survivors))

    def add(self, sender: str, note: bytes) -> None:
        """Take what `Client.mask` gave; nothing of it is kept but the sum."""
        arrays, fields = _sent_by(sender, note, "masked", self.question.setup)
        if self._closed or sender in self._survivors or sender not in self.question.cohort:
            raise CohortError(
                f"the term of '{sender}' is not part of this sum: late, a repeat, or not asked for."
            )
        if fields.get("slot") != self.question.slot or fields.get("question") != self._digest:
            raise TermError(
                f"'{sender}' answered another question than the one of slot {self.question.slot}."
            )
        limbs = arrays.get("limbs")
        if limbs is None or fields.get("wide") != self.question.wide:
            raise TermError(f"the masked term of '{sender}' is incomplete.")
        self.masked.add(RingVector(limbs, self.question.wide))
        self._survivors.add(sender)

    def close(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who is in the sum and who dropped out, for `Client.open` of those in it; no term is added after."""
        least = self.question.setup.least_cohort
        if len(self._survivors) < least:
            raise CohortError(
                f"{len(self._survivors)} of {len(self.question.cohort)} clients answered; {least} must "
                f"before a sum is opened. Missing: {list(self.dropped)}."
            )
        self._closed = True
        return self.survivors, self.dropped

    def add_opening(self, sender: str, note: bytes) -> None:
        """Take what `Client.open` gave."""
        arrays, fields = _sent_by(sender, note, "opened", self.question.setup)
        if not self._closed or sender not in self._survivors or fields.get("slot") != self.question.slot:
            raise TermError(f"'{sender}' was not asked to open slot {self.question.slot}.")
        if fields.get("opening") != self.opening:
            raise TermError(f"'{sender}' opened slot {self.question.slot} for other clients than asked.")
        near = set(self._around[sender])
        found: dict[str, bytes] = {}
        for name, of in (("keys", self.dropped), ("seeds", self.survivors)):
            held = sorted(near.intersection(of))
            rows = notes.octets(arrays, name, (len(held), SHARE_BYTES))
            found |= {other: row.tobytes() for other, row in zip(held, rows, strict=True)}
        self._openings[sender] = found

    @property
    def can_open(self) -> bool:
        """Whether enough members helped."""
        return all(map(self._helpers, self.question.cohort))

    @cached_property
    def opening(self) -> str:
        """What names the one opening of this sum, once it is closed."""
        return notes.opening_digest(self._digest, self.survivors)

    def secrets(self) -> dict[str, bytes]:
        """The seeds of the survivors' own masks and the keys of those who dropped out, by name."""
        if not self._closed or not self.can_open:
            raise CohortError(
                f"{len(self._openings)} members helped to open slot {self.question.slot}; "
                f"{self.question.setup.threshold} of the holders of every member's shares must."
            )
        found = {}
        for name in self.question.cohort:
            holders = self._around[name]
            found[name] = joined({n: self._openings[holders[n - 1]][name] for n in self._helpers(name)})
        return found

    def evidence(self, request: str, layout: Layout, signed: Mapping[str, tuple[str, str]]) -> Evidence:
        """What shows the total to others. request: its digest. signed: fingerprints of the terms."""
        about = (self.question.setup, self.question.slot, request, layout, self.survivors, self.dropped)
        return Evidence(*about, self.masked, self.secrets(), signed)

    def total(self) -> RingVector:
        """The sum of the survivors' terms, without masks."""
        return self.evidence("", Layout(()), {}).unmasked(self._digest, self._keys)

    def _helpers(self, name: str) -> tuple[int, ...]:
        """The first holders of a member's shares who helped, by number, as many as must; else nobody."""
        threshold = self.question.setup.threshold
        numbers = (n for n, holder in enumerate(self._around[name], 1) if holder in self._openings)
        found = tuple(itertools.islice(numbers, threshold))
        return found if len(found) == threshold else ()


def _sent_by(sender: str, note: bytes, message: str, setup: Setup) -> tuple[dict[str, Array], dict[str, Any]]:
    """What is in a note of this sender; one under another name is refused."""
    arrays, fields = notes.unpack(note, message, setup)
    if (name := notes.text(fields, "name")) != sender:
        raise TermError(f"'{sender}' sent a note under the name '{name}'.")
    return arrays, fields
