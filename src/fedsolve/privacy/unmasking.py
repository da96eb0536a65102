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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import CohortError, TermError, explained
from fedsolve.privacy import notes, primitives
from fedsolve.privacy.graph import around
from fedsolve.privacy.notes import Question, Setup, SlotKeys
from fedsolve.privacy.primitives import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from fedsolve.privacy.ring import Layout, RingVector
from fedsolve.privacy.shamir import SHARE_BYTES, joined

PRIME = (1 << 127) - 1

_ROWS = 1 << 15  # words handled at a time: sums of so many products of 16 bits each are exact in float64
_DIGITS = 8  # of 16 bits, of a drawn number


class WordSum(RingVector):
    """Masked terms added as whole numbers: sums of words modulo 2^64, and how often each wrapped around."""

    def __init__(self, limbs: Array, wide: int, carries: Array | None = None) -> None:
        super().__init__(limbs, wide)
        self.carries = np.zeros(len(limbs), dtype=np.uint16) if carries is None else carries
        if self.carries.shape != limbs.shape or self.carries.dtype != np.uint16:
            raise TermError("the carries of a sum of masked terms are missing or damaged.")

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

    def digest(self, opening: str) -> str:
        """SHA-256 over the sum and the digest of its opening (`opening_digest`)."""
        state = hashlib.sha256(notes.purpose("sum of masked terms", opening, self.wide))
        state.update(np.ascontiguousarray(self.limbs).data)
        state.update(np.ascontiguousarray(self.carries).data)
        return state.hexdigest()


def fingerprint(words: Array, digest: str) -> int:
    """<r, words> modulo 2^127 - 1, with r of 128 bits each, which follow from the digest of a sum."""
    key = primitives.derive(bytes.fromhex(digest), notes.purpose("numbers of fingerprints"))
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

    def parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Arrays and a note, for letters and files."""
        secrets = b"".join(self.secrets[name] for name in (*self.survivors, *self.dropped))
        small = self.masked.carries.max(initial=0) < 256
        carries = self.masked.carries.astype(np.uint8) if small else self.masked.carries
        arrays = {"words": self.masked.limbs, "carries": carries, "secrets": np.frombuffer(secrets, np.uint8)}
        note = {"setup": vars(self.setup), "layout": self.layout.note(), "slot": self.slot}
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
            masked = WordSum(arrays["words"], layout.wide, arrays["carries"].astype(np.uint16))
            if len(masked.limbs) != 2 * layout.wide + layout.narrow:
                raise ValueError("a sum of another length")
            signed = {str(name): (str(value), str(by)) for name, (value, by) in note["signed"].items()}
            for value, _ in signed.values():
                int(value, 16)
            about = (Setup.from_note(note["setup"]), int(note["slot"]), str(note["request"]), layout)
            secrets = {name: row.tobytes() for name, row in zip(names, rows, strict=True)}
            return cls(*about, tuple(survivors), tuple(dropped), masked, secrets, signed)


def pair_masks(question: str, name: str, key: bytes, others: Mapping[str, Array]) -> list[tuple[bytes, int]]:
    """The keys of the masks that a client has in common with others, and the signs with which it adds them.

    key: its private one. others: their public ones, with which both sides find the same.
    """
    masks = []
    for other, public in others.items():
        about = notes.purpose("pair", question, *sorted((name, other)))
        masks.append((primitives.agree(key, public.tobytes(), about), 1 if name < other else -1))
    return masks


def unmasked(
    question: Question,
    masked: WordSum,
    survivors: Sequence[str],
    dropped: Sequence[str],
    secrets: Mapping[str, bytes],
    known: Mapping[str, SlotKeys],
) -> RingVector:
    """A sum of masked terms without the masks that are left in it; a wrong seed or key is refused.

    secrets: by name, as in `Evidence`. known: the members' keys; of others, who signed what they committed
    to, evidence is checked first. Of those who dropped out, the masks would have cancelled the rest.
    """
    setup, slot, masks = question.setup, question.slot, []
    for name in survivors:
        bound = notes.commitment(setup, name, slot, secrets[name])
        if name in known and bound != known[name].commitments[slot].tobytes():
            raise TermError(f"the shares of the seed of '{name}' do not give the seed it committed to.")
        masks.append((primitives.derive(secrets[name], notes.purpose("self", question.digest, name)), -1))
    for gone in dropped:
        if primitives.public_key(secrets[gone]) != known[gone].masks[slot].tobytes():
            raise TermError(f"the shares of the key of '{gone}' do not give the key it advertised.")
        others = {name: known[name].masks[slot] for name in survivors}
        masks += pair_masks(question.digest, gone, secrets[gone], others)
    total = RingVector(masked.limbs.copy(), masked.wide)
    np.add(total.high, masked.carries[: masked.wide], out=total.high)  # what lower limbs carry to upper ones
    primitives.add_masks(total, masks)
    return total


@dataclass(eq=False)
class Server:
    """Collects and passes on the notes of a setup, then gives one `MaskedSum` per slot.

    Each `add_` takes who sent a note, as the engine knows it; a note under another name is refused. A server
    that starts again is given the notes of the setup again.

    members: who advertised keys. sharers: who shared its secrets too, and so can take part in sums.
    shares: their letters.
    """

    setup: Setup
    keys: dict[str, SlotKeys] = field(default_factory=dict, init=False)
    members: tuple[str, ...] = field(default=(), init=False)
    around: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    shares: dict[str, bytes] = field(default_factory=dict, init=False)
    sharers: tuple[str, ...] = field(default=(), init=False)
    _sealed: dict[str, dict[str, bytes]] = field(default_factory=dict, init=False)
    _relayed: dict[tuple[str, ...], bytes] = field(default_factory=dict, init=False)
    _sealed_passed_on: bool = field(default=False, init=False)
    _used: set[int] = field(default_factory=set, init=False)

    def add_keys(self, sender: str, note: bytes) -> None:
        """Take what `Client.advertise` gave."""
        if self.around:
            raise CohortError(f"'{sender}' comes too late: the members' keys have been passed on.")
        self.keys[sender] = SlotKeys.from_bytes(note, self.setup, sender)
        self.members = tuple(sorted(self.keys))

    def keys_for(self, name: str) -> bytes:
        """The keys of a member's neighbours, for its `Client.share`; nobody can join after the first."""
        if not self.around:
            if len(self.members) < (least := self.setup.least_cohort):
                told = f"{len(self.members)} clients advertised keys ({list(self.members)})"
                raise CohortError(f"{told}; secure sums take {least}.")
            self.around = dict.fromkeys(self.members, self.members)
            if self.setup.degree:
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
        arrays, fields = notes.read_letter(note, "shares", self.setup, sender)
        names = notes.listed(fields, "names")
        if names != [name for name in self.around.get(sender, ()) if name != sender]:
            raise TermError(f"'{sender}' shared its secrets with other members than those of this setup.")
        size = (NONCE_BYTES + self.setup.slots * 2 * SHARE_BYTES + TAG_BYTES,)
        sealed = {name: notes.octets(arrays, str(n), size).tobytes() for n, name in enumerate(names)}
        self._sealed[sender], self.shares[sender] = sealed, note
        self.sharers = tuple(sorted(self._sealed))

    def shares_for(self, name: str) -> bytes:
        """What the others sealed for a member, for its `Client.receive`; nobody can share after that."""
        if len(self.sharers) < (least := self.setup.least_cohort):
            told = f"{len(self.sharers)} clients shared their secrets ({list(self.sharers)})"
            raise CohortError(f"{told}; secure sums take {least}.")
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
        stored: tuple[WordSum, Collection[str]] | None = None,
    ) -> MaskedSum:
        """A sum to be asked for in a slot that is free; arguments as the clients get them.

        stored: a sum of masked terms and whose they are, to go on from.
        """
        notes.check_names(self.sharers, list(cohort), "the cohort of this sum")
        question = Question(self.setup, slot, tuple(sorted(cohort)), wide, narrow, context)
        if slot in self._used:
            raise TermError(f"slot {slot} has been used; ask with a new one.")
        self._used.add(slot)
        if stored is None:
            return MaskedSum(question, self, WordSum(np.zeros(2 * wide + narrow, dtype="<u8"), wide))
        pending = MaskedSum(question, self, stored[0], set(stored[1]))
        pending.close()
        return pending


@dataclass(eq=False)
class MaskedSum:
    """One sum under way: masked terms are added, then the total is opened with the members' shares.

    masked: the sum so far, meaningless until it is opened. Store it and `survivors` before asking anybody to
        open: a server that asked for another cohort after a restart would be refused.
    survivors, dropped: whose terms are in it, and who was asked besides, once it is closed.
    opening: the digest of its one opening, then. secrets: as in `Evidence`, once it is opened.
    witnessed: whether senders sign what they sent, as they help to open it. signed: what they signed.
    """

    question: Question
    server: Server
    masked: WordSum
    _answered: set[str] = field(default_factory=set)
    witnessed: bool = field(default=False, init=False)
    survivors: tuple[str, ...] = field(default=(), init=False)
    dropped: tuple[str, ...] = field(default=(), init=False)
    opening: str = field(default="", init=False)
    secrets: dict[str, bytes] = field(default_factory=dict, init=False)
    signed: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)
    _openings: dict[str, dict[str, bytes]] = field(default_factory=dict, init=False)

    def add(self, sender: str, note: bytes) -> None:
        """Take what `Client.mask` gave; nothing of it is kept but the sum."""
        question = self.question
        arrays, fields = notes.read_letter(note, "masked", question.setup, sender)
        if self.opening or sender in self._answered or sender not in question.cohort:
            raise CohortError(
                f"the term of '{sender}' is not part of this sum: late, a repeat, or not asked for."
            )
        if fields.get("slot") != question.slot or fields.get("question") != question.digest:
            raise TermError(f"'{sender}' answered another question than the one of slot {question.slot}.")
        limbs = arrays.get("limbs")
        if limbs is None or fields.get("wide") != question.wide:
            raise TermError(f"the masked term of '{sender}' is incomplete.")
        self.masked.add(RingVector(limbs, question.wide))
        self._answered.add(sender)

    def close(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Who is in the sum and who dropped out, for `Client.open` of those in it; no term is added after."""
        cohort, least = self.question.cohort, self.question.setup.least_cohort
        self.survivors = there = tuple(name for name in cohort if name in self._answered)
        self.dropped = tuple(name for name in cohort if name not in self._answered)
        if len(there) < least:
            raise CohortError(
                f"{len(there)} of {len(cohort)} clients answered; {least} must before a sum is opened. "
                f"Missing: {list(self.dropped)}."
            )
        self.opening = notes.opening_digest(self.question.digest, there)
        return there, self.dropped

    def add_opening(self, sender: str, note: bytes) -> None:
        """Take what `Client.open` gave, within what the client signed of its term where that was wanted."""
        setup, slot = self.question.setup, self.question.slot
        if self.witnessed:
            parts, told = notes.read_letter(note, "witnessed", setup)
            signed = notes.text(told, "value"), notes.text(told, "signature")
            note = notes.octets(parts, "opened").tobytes()
        arrays, fields = notes.read_letter(note, "opened", setup, sender)
        if not self.opening or sender not in self.survivors or fields.get("slot") != slot:
            raise TermError(f"'{sender}' was not asked to open slot {slot}.")
        if fields.get("opening") != self.opening:
            raise TermError(f"'{sender}' opened slot {slot} for other clients than asked.")
        near, found = set(self.server.around[sender]), dict[str, bytes]()
        for name, of in (("keys", self.dropped), ("seeds", self.survivors)):
            held = sorted(near.intersection(of))
            rows = notes.octets(arrays, name, (len(held), SHARE_BYTES))
            found |= {other: row.tobytes() for other, row in zip(held, rows, strict=True)}
        self._openings[sender] = found
        if self.witnessed:
            self.signed[sender] = signed

    def total(self) -> RingVector:
        """The sum of the survivors' terms, without masks; refused until enough members have helped."""
        threshold = self.question.setup.threshold
        for name in self.question.cohort:
            # By their numbers, the holders of its shares who helped; the first of them are enough.
            holders = ((n, self._openings.get(one)) for n, one in enumerate(self.server.around[name], 1))
            shares = dict(islice(((n, held[name]) for n, held in holders if held), threshold))
            if len(shares) < threshold:
                raise CohortError(
                    f"{len(self._openings)} members helped to open slot {self.question.slot}; {threshold} of "
                    "the holders of every member's shares must."
                )
            self.secrets[name] = joined(shares)
        keys = self.server.keys
        return unmasked(self.question, self.masked, self.survivors, self.dropped, self.secrets, keys)
