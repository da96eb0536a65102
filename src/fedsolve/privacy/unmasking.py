"""The server's side of a secure sum, and what shows its total to sites.

The server passes keys and shares on, adds masked terms and removes the masks. It holds nothing secret. It
learns the total over those whose masked terms it summed, once a threshold of members helped, and nothing if
fewer did; see `masking` for the protocol.

Evidence shows that a total is the sum of the terms that were sent, without those terms. Masked terms are
added as whole numbers, word by word, with their carries, so that nothing wraps around. When the sum Y is
fixed, a number r below 2^128 is drawn for every word from the digest of Y, and each client signs

    <r, y_u> mod 2^127 - 1

of the masked term y_u that it sent. These fingerprints add up to that of Y only if Y is the sum of the y_u: r
follows from Y, so whoever tries another sum has one chance in 2^127 each time. What opens the sum, seeds and
keys, was committed to in signed keys. A site that has all of this knows the total, whoever brought it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import CohortError, TermError, explained
from fedsolve.privacy import notes, primitives
from fedsolve.privacy.graph import around
from fedsolve.privacy.notes import Question, Setup, SlotKeys
from fedsolve.privacy.primitives import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Verify
from fedsolve.privacy.ring import Layout, RingVector
from fedsolve.privacy.shamir import SHARE_BYTES, joined

PRIME = (1 << 127) - 1

_ROWS = 1 << 15  # words handled at a time: sums of so many products of 16 bits each are exact in float64
_DIGITS = 8  # of 16 bits, of a drawn number


class WordSum(RingVector):
    """Masked terms added as whole numbers: sums of words modulo 2^64, and how often each wrapped around."""

    def __init__(self, limbs: Array, carries: Array, wide: int) -> None:
        if carries.shape != limbs.shape or carries.dtype != np.uint16:
            raise TermError("the carries of a sum of masked terms are missing or damaged.")
        super().__init__(limbs, wide)
        self.carries = carries

    @classmethod
    def zeros(cls, wide: int, narrow: int) -> WordSum:
        """The sum of no terms."""
        size = 2 * wide + narrow
        return cls(np.zeros(size, dtype="<u8"), np.zeros(size, dtype=np.uint16), wide)

    def add(self, other: RingVector) -> None:
        """Add a masked term in place."""
        if self.wide != other.wide or len(self.limbs) != len(other.limbs):
            raise TermError(
                f"ring vectors do not fit together: {other.wide} wide numbers in {len(other.limbs)} limbs, "
                f"expected {self.wide} in {len(self.limbs)}. All participants must answer the same request."
            )
        for start in range(0, len(self.limbs), _ROWS):
            part = slice(start, start + _ROWS)
            np.add(self.limbs[part], other.limbs[part], out=self.limbs[part])
            self.carries[part] += self.limbs[part] < other.limbs[part]

    def in_ring(self) -> RingVector:
        """The sum in the ring: carries of lower limbs are added to the upper ones."""
        vector = self.copy()
        np.add(vector.high, self.carries[: self.wide], out=vector.high)
        return vector

    def digest(self, opening: str) -> str:
        """SHA-256 over the sum and the digest of its opening (`opening_digest`)."""
        state = hashlib.sha256(notes.purpose("sum of masked terms", opening, self.wide))
        state.update(np.ascontiguousarray(self.limbs).data)
        state.update(np.ascontiguousarray(self.carries).data)
        return state.hexdigest()

    def fingerprint(self, key: bytes) -> int:
        return (fingerprint(self.limbs, key) + (fingerprint(self.carries, key) << 64)) % PRIME


def fingerprint(words: Array, key: bytes) -> int:
    """<r, words> modulo 2^127 - 1, with r of 128 bits each drawn from a key."""
    stream = primitives.key_stream(key)
    room = bytearray(16 * _ROWS + 16)  # the library asks for room of one block more than it writes
    zeros = memoryview(bytes(16 * _ROWS))
    halves = words.dtype.itemsize // 2
    total = 0
    for start in range(0, len(words), _ROWS):
        part = np.ascontiguousarray(words[start : start + _ROWS])
        stream.update_into(zeros[: 16 * len(part)], room)
        drawn = np.frombuffer(room, dtype="<u2", count=_DIGITS * len(part)).reshape(-1, _DIGITS)
        digits = part.view("<u2").reshape(-1, halves).astype(np.float64)
        sums = drawn.astype(np.float64).T @ digits
        total += sum(int(sums[d, h]) << (16 * (d + h)) for d in range(_DIGITS) for h in range(halves))
    return total % PRIME


def drawn_key(digest: str) -> bytes:
    """The key from which the numbers of fingerprints are drawn, once the sum has this digest."""
    return primitives.derive(bytes.fromhex(digest), notes.purpose("numbers of fingerprints"))


def fingerprint_message(opening: str, digest: str, name: str, value: str, bound: bytes) -> bytes:
    """What a client signs of the term that it sent: for which opening, of which sum, its fingerprint, and
    what binds it to the seed of its own mask."""
    return notes.purpose("fingerprint of a term", opening, digest, name, value, bound.hex())


@dataclass(frozen=True)
class Evidence:
    """Everything that proves what the total of a slot is.

    request: digest of the request that it answers. survivors, dropped: whose terms are in it, and who was
    asked besides. secrets: by name, a survivor's seed of its own mask, the key of who dropped out. signed: of
    every survivor the fingerprint of its term and its signature, in hexadecimal.
    """

    setup: Setup
    slot: int
    request: str
    layout: Layout
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    masked: WordSum
    secrets: Mapping[str, bytes]
    signed: Mapping[str, tuple[str, str]]

    @property
    def place(self) -> str:
        """The name of its slot among those of all setups."""
        return self.setup.place(self.slot)

    def total(self, question: str, known: Mapping[str, SlotKeys], verify: Verify) -> RingVector:
        """The total; refused, by name, where it is not the sum of the terms that its senders signed.

        question: digest of the question that this site answered in the slot. known: members' keys.
        """
        opening = notes.opening_digest(question, self.survivors)
        digest = self.masked.digest(opening)
        added = 0
        for name in self.survivors:
            value, signature = self.signed.get(name, ("0", ""))
            bound = notes.commitment(self.setup, name, self.slot, self.secrets[name])
            message = fingerprint_message(opening, digest, name, value, bound)
            if not primitives.signed_by(verify, name, message, signature):
                raise TermError(
                    f"the total shown for slot {self.place} is not one that '{name}' helped to open: its "
                    "signature is missing or belongs to another sum, or to another seed."
                )
            added += int(value, 16)
        if added % PRIME != self.masked.fingerprint(drawn_key(digest)):
            raise TermError(
                f"the total shown for slot {self.place} was not opened: it is not the sum of the terms that "
                "the sites sent."
            )
        return self.unmasked(question, known)

    def unmasked(self, question: str, known: Mapping[str, SlotKeys]) -> RingVector:
        """The sum without the masks that are left in it; a wrong seed or key is refused.

        known: the members' keys; of others, who signed what they committed to, evidence is checked first. Of
        those who dropped out, the masks would have cancelled the rest.
        """
        masks = []
        for name in self.survivors:
            bound = notes.commitment(self.setup, name, self.slot, self.secrets[name])
            if name in known and bound != known[name].commitments[self.slot].tobytes():
                raise TermError(f"the shares of the seed of '{name}' do not give the seed it committed to.")
            masks.append((own_mask(question, name, self.secrets[name]), -1))
        for gone in self.dropped:
            if primitives.public_key(self.secrets[gone]) != known[gone].masks[self.slot].tobytes():
                raise TermError(f"the shares of the key of '{gone}' do not give the key it advertised.")
            others = {name: known[name].masks[self.slot] for name in self.survivors}
            masks += pair_masks(question, gone, self.secrets[gone], others)
        total = self.masked.in_ring()
        primitives.add_masks(total, masks)
        return total

    def parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and a note, for letters and files."""
        secrets = b"".join(self.secrets[name] for name in (*self.survivors, *self.dropped))
        small = self.masked.carries.max(initial=0) < 256
        carries = self.masked.carries.astype(np.uint8) if small else self.masked.carries
        arrays = {"words": self.masked.limbs, "carries": carries, "secrets": notes.as_array(secrets)}
        note = {"setup": self.setup.note(), "layout": self.layout.note(), "slot": self.slot}
        note |= {"request": self.request, "survivors": self.survivors, "dropped": self.dropped}
        return arrays, {**note, "signed": {name: list(pair) for name, pair in self.signed.items()}}

    @classmethod
    def from_parts(cls, arrays: Mapping[str, Array], note: Mapping[str, Any]) -> Evidence:
        """What `parts` described; anything else is refused."""
        with explained("the evidence of a total is damaged", error=TermError):
            layout = Layout.from_note(note["layout"])
            survivors, dropped = notes.listed(note, "survivors"), notes.listed(note, "dropped")
            names = [*survivors, *dropped]
            rows = notes.octets(arrays, "secrets", (len(names) * KEY_BYTES,)).reshape(-1, KEY_BYTES)
            masked = WordSum(arrays["words"], arrays["carries"].astype(np.uint16), layout.wide)
            if len(masked.limbs) != 2 * layout.wide + layout.narrow:
                raise ValueError("a sum of another length")
            signed = {str(name): (str(value), str(by)) for name, (value, by) in note["signed"].items()}
            for value, _ in signed.values():
                int(value, 16)
            about = (Setup.from_note(note["setup"]), int(note["slot"]), str(note["request"]), layout)
            secrets = {name: row.tobytes() for name, row in zip(names, rows, strict=True)}
            return cls(*about, tuple(survivors), tuple(dropped), masked, secrets, signed)


def own_mask(question: str, name: str, seed: bytes) -> bytes:
    """The key of a client's own mask, which it adds."""
    return primitives.derive(seed, notes.purpose("self", question, name))


def pair_masks(question: str, name: str, key: bytes, others: Mapping[str, Array]) -> list[tuple[bytes, int]]:
    """The keys of the masks that a client has in common with others, and the signs with which it adds them.

    key: its private one. others: their public ones, with which both sides find the same.
    """
    masks = []
    for other, public in others.items():
        about = notes.purpose("pair", question, *sorted((name, other)))
        masks.append((primitives.agree(key, public.tobytes(), about), 1 if name < other else -1))
    return masks


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
        """The digest of this sum's one opening, once it is closed."""
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
        """The numbers of the first holders of a member's shares who helped; none if too few did."""
        threshold = self.question.setup.threshold
        numbers = (n for n, holder in enumerate(self._around[name], 1) if holder in self._openings)
        found = tuple(itertools.islice(numbers, threshold))
        return found if len(found) == threshold else ()


def _sent_by(sender: str, note: bytes, message: str, setup: Setup) -> tuple[dict[str, Array], dict[str, Any]]:
    """The contents of a note; one under another name than the sender's is refused."""
    arrays, fields = notes.unpack(note, message, setup)
    if (name := notes.text(fields, "name")) != sender:
        raise TermError(f"'{sender}' sent a note under the name '{name}'.")
    return arrays, fields
