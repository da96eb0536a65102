"""What the two sides of a secure sum tell each other, as bytes that any engine can carry."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json, from_bytes, to_bytes
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.privacy.primitives import KEY_BYTES
from fedsolve.privacy.ring import Layout

TAG = "fedsolve secure sum 1"
"""Opens everything that is signed, derived or committed to here; another protocol has another tag."""

CHANNEL = "secure sums"
"""The channel of an engine on which letters travel."""

MOST_SLOTS = 4096

LEAST_COHORT = 3
"""With two, each would learn the other's term from the sum."""


@dataclass(frozen=True)
class Setup:
    """One round of key making: its run, its number in that run, how many sums it is for, and the threshold.

    slots: sums that the keys last for. threshold: how many members must help to open a sum; of each one's
    neighbours, where `degree` says how many those are and the joint seed `circle` who (`graph`).
    """

    run: str
    epoch: int
    slots: int
    threshold: int
    degree: int = 0
    circle: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epoch", 0), ("slots", 1), ("threshold", 1), ("degree", 0), ("circle", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise DataError(f"{name} must be a whole number, at least {least}; got {value!r}.")

    @property
    def least_cohort(self) -> int:
        """How many clients a sum must have."""
        return max(LEAST_COHORT, self.threshold)

    def place(self, slot: Any) -> str:
        """The name of a slot among those of all setups."""
        if type(slot) is not int:
            raise TermError(f"'slot' of this letter must be a whole number; got {ascii(slot)[:40]}.")
        return f"{self.run}/{self.epoch}/{slot}"

    @classmethod
    def from_note(cls, note: Any) -> Setup:
        """The setup that a letter or a file is about; anything else is refused."""
        try:
            setup = cls(**note)
        except (TypeError, DataError) as problem:
            raise TermError(f"the setup of this letter is damaged ({problem}).") from problem
        if not isinstance(setup.run, str) or setup.slots > MOST_SLOTS:
            raise TermError(f"a setup has a name and at most {MOST_SLOTS} slots; got {setup.slots}.")
        return setup


def least_threshold(members: int, colluders: int = 0) -> int:
    """The smallest t > (members + colluders) / 2: two disjoint sets of honest members cannot both open a sum,
    although colluders may take both sides."""
    return (members + colluders) // 2 + 1


def least_verified(colluders: int = 0) -> int:
    """The fewest sites of a run whose questions are checked. Whoever checks sees totals and can take its own
    term off; of three sites it learns the sum of the other two.
    """
    return LEAST_COHORT + colluders


COMMITTEE = 64
"""Sites that draw a seed, or may check a question, for all others; everybody where there are no more."""


def committee(names: Collection[str], about: str, colluders: int = 0, wanted: int = 0) -> list[str]:
    """Who of these may act for all, in an order that follows from what it is about: a committee; or all of
    them, where so many signatures are `wanted`."""
    return shuffled(names, "committee", about)[: None if wanted else committee_size(colluders)]


def committee_size(colluders: int) -> int:
    """How many sites a committee has, where there are so many."""
    return max(COMMITTEE, 4 * colluders)


def shuffled(names: Collection[str], *about: Any) -> list[str]:
    """The names in the order of SHA-256 of `purpose(*about, name)`: nobody chooses it."""
    head = hashlib.sha256(purpose(*about).removesuffix(b"]"))  # the same for a thousand names, spelt once

    def rank(name: str) -> bytes:
        state = head.copy()
        state.update(f",{encode_basestring_ascii(name)}]".encode())
        return state.digest()

    return sorted(names, key=rank)


def signatures_needed(sites: int, colluders: int, wanted: int = 0) -> int:
    """How many of a committee must agree: then one of them is honest, and no two agreements differ."""
    return wanted or least_threshold(min(sites, committee_size(colluders)), colluders)


def purpose(*parts: Any) -> bytes:
    """What a key is derived for, or what a signature is about, in one unambiguous spelling."""
    return canonical_json([TAG, *parts]).encode()


def commitment(setup: Setup, name: str, slot: int, seed: bytes) -> bytes:
    """Binds a client to a self-mask seed without showing it, so that a wrong share cannot go unnoticed."""
    return hashlib.sha256(purpose("seed", vars(setup), name, slot) + seed).digest()


@dataclass(frozen=True)
class SlotKeys:
    """A client's public keys: one for sealed shares, and for every slot a mask key and a commitment.

    masks, commitments: uint8 (slots, 32). letter: the bytes that they come in. signed: what the client signs:
    the domain tag, run, epoch, slots, threshold, name and all keys.
    """

    name: str
    channel: bytes
    masks: Array
    commitments: Array
    signature: bytes
    letter: bytes
    signed: bytes

    @classmethod
    def from_bytes(cls, letter: bytes, setup: Setup, sender: str | None = None) -> SlotKeys:
        """The keys in a letter; refused when they are of another run, epoch, number, threshold or sender."""
        arrays, note = read_letter(letter, "keys", setup, sender)
        channel, signature = octets(arrays, "channel", (KEY_BYTES,)), octets(arrays, "signature")
        masks, bound = (octets(arrays, part, (setup.slots, KEY_BYTES)) for part in ("masks", "commitments"))
        name, digest = text(note, "name"), hashlib.sha256(masks.tobytes() + bound.tobytes()).hexdigest()
        signed = purpose("keys", vars(setup), name, channel.tobytes().hex(), digest)
        return cls(name, channel.tobytes(), masks, bound, signature.tobytes(), letter, signed)


@dataclass(frozen=True)
class Question:
    """One sum that is asked for: the slot, whom it may hold, how long it is, and what it is about.

    context: whatever all must agree on besides, such as the digest of the request and its layout. Masks
        follow from it: clients that were asked different things send masks that do not cancel.
    digest: SHA-256 over everything in it.
    """

    setup: Setup
    slot: int
    cohort: tuple[str, ...]
    wide: int
    narrow: int
    context: bytes = b""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.slot < self.setup.slots:
            raise TermError(
                f"slot {self.slot} does not exist: this setup has {self.setup.slots}, counted from 0."
            )
        if list(self.cohort) != sorted(set(self.cohort)):
            raise TermError("a cohort must be sorted names, each of them once.")
        if len(self.cohort) < self.setup.least_cohort:
            raise CohortError(
                f"a sum over {len(self.cohort)} clients is not opened; it takes {self.setup.least_cohort}."
            )
        about = (self.slot, list(self.cohort), self.wide, self.narrow, self.context.hex())
        digest = hashlib.sha256(purpose("question", vars(self.setup), *about)).hexdigest()
        object.__setattr__(self, "digest", digest)


def context_of(request: str, layout: Layout, census: str) -> bytes:
    """What all clients of a sum must agree on, or their masks do not cancel; census: the history of rows."""
    return purpose("sum", request, layout.note(), census)


def opening_digest(question: str, survivors: Sequence[str]) -> str:
    """Names the one opening that a member gives: of which question, over which clients."""
    return hashlib.sha256(purpose("open", question, list(survivors))).hexdigest()


def relay(
    message: str, setup: Setup, parts: Mapping[str, bytes], members: Sequence[str] | None = None
) -> bytes:
    """Bytes of several senders in one note, by name. members: all members; the senders when None."""
    names = sorted(parts)
    note = {"names": names, "members": names if members is None else sorted(members)}
    return pack(message, setup, note, {str(place): parts[name] for place, name in enumerate(names)})


def relayed(data: bytes, message: str, setup: Setup) -> tuple[dict[str, bytes], list[str]]:
    """The parts that `relay` put together, by sender, and the names of all members."""
    arrays, note = read_letter(data, message, setup)
    parts = {name: octets(arrays, str(n)).tobytes() for n, name in enumerate(listed(note, "names"))}
    return parts, listed(note, "members")


def pack(
    message: str, setup: Setup, note: Mapping[str, Any], parts: Mapping[str, Array | bytes] | None = None
) -> bytes:
    """A message with its setup, note and parts: arrays, or bytes."""
    arrays = {
        name: np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        for name, part in (parts or {}).items()
    }
    return to_bytes(arrays, {"protocol": TAG, "message": message, "setup": vars(setup), **note})


def read_letter(
    data: bytes, message: str = "", setup: Setup | None = None, sender: str | None = None
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and note of `pack`; refused when it is another message, of another setup, or under another name
    than these."""
    what = f"this message ({message})" if message else "this letter"
    arrays, note = from_bytes(data, what=what, error=TermError)
    if note.get("protocol") != TAG:
        raise TermError(f"{what} is of {ascii(note.get('protocol'))[:40]}, not of '{TAG}'.")
    if setup is not None and (note.get("message") != message or note.get("setup") != vars(setup)):
        raise TermError(
            f"expected '{message}' of {vars(setup)}, received {ascii(note.get('message'))[:40]} of another "
            f"setup: {ascii(note.get('setup'))[:120]}."
        )
    if sender is not None and (name := text(note, "name")) != sender:
        raise TermError(f"'{sender}' sent a note under the name '{name}'.")
    return arrays, note


def octets(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...] | None = None) -> Array:
    """An array of bytes by name; refused when it is missing or not of this shape."""
    array = arrays.get(name, np.zeros(()))
    fits = array.ndim == 1 if shape is None else array.shape == shape
    if array.dtype != np.uint8 or not fits:
        raise TermError(f"'{name}' of this message is missing or not of the right size.")
    return array


def text(note: Mapping[str, Any], name: str) -> str:
    value = note.get(name)
    if not isinstance(value, str):
        raise TermError(f"'{name}' of this message must be text; got {ascii(value)[:40]}.")
    return value


def listed(note: Mapping[str, Any], name: str) -> list[str]:
    """Sorted names, each of them once."""
    value: Any = note.get(name)
    names = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if names and value == sorted(set(value)):
        return list(value)
    raise TermError(f"'{name}' of this message must be sorted names, each once; got {ascii(value)[:40]}.")


def check_names(expected: Sequence[str], found: Sequence[str], what: str) -> None:
    """Refuse names that are not among those expected."""
    strangers = sorted(set(found) - set(expected))
    if strangers:
        raise TermError(f"{what} names {strangers}, who are not members of this setup.")
