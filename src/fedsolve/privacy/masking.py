"""The client's side of a secure sum: keys, shares of them, masked terms, and help to open a total.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), against
a semi-honest server, on the complete graph or, with many clients, on a sparse one (`graph`). A client u
sends its term x in the ring as

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)

where b_u is its own seed and s_uv what its key and its neighbour v's agree on (X25519). In the sum over all
clients the s_uv cancel. To remove the rest the members give shares (Shamir) of b_u for those who answered,
and of the key behind s_uv for those who did not; never both of one client, which would show its term. On a
sparse graph a sum is over all members or not opened: no key is ever shown.

Keys are made once for many sums: each slot has a key pair and a seed of its own, each shared by itself, so
that a key opened for one sum opens nothing else. Calls, in this order:

    advertise() -> keys to everybody;  share(all keys) -> sealed shares;  receive(shares sealed for us)
    then for every sum:  mask(slot, ...) -> masked term;  open(slot, ...) -> shares that open the total

Nothing here sends or stores anything. An engine stores what `save` and `mask` give before it sends the
masked term: a slot serves one term, and a repeat can only send the stored bytes again.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import from_bytes, from_parts, to_bytes, to_parts, undamaged
from fedsolve.errors import CohortError, ModelFileError, TermError
from fedsolve.federation.messages import Term
from fedsolve.privacy import notes, primitives
from fedsolve.privacy.graph import around, check_graph
from fedsolve.privacy.notes import Question, Setup, SlotKeys
from fedsolve.privacy.primitives import KEY_BYTES, NONCE_BYTES, Sign, Verify, add_masks
from fedsolve.privacy.ring import RingVector, decode
from fedsolve.privacy.shamir import SHARE_BYTES, Random, split
from fedsolve.privacy.unmasking import PRIME, Evidence, fingerprint, pair_masks, unmasked

OF_KEY, OF_SEED = 0, 1
"""The two shares that a member holds of each slot of another."""


@dataclass(eq=False)
class Client:
    """One member of a setup. Its secrets never leave it but as shares sealed for the others.

    sign, verify: how key messages are signed, and whose signatures are believed; see `primitives`.
    colluders: how many members might side with the server; the threshold must allow for them.
    drawn:     whether these members drew the circle of a setup together; asked for a sparse graph.
    random: where secrets come from; anything but the default is for tests.
    """

    setup: Setup
    name: str
    sign: Sign
    verify: Verify
    _: KW_ONLY
    colluders: int = 0
    drawn: Callable[[Setup, Sequence[str]], bool] = lambda setup, members: False
    random: Random = secrets.token_bytes

    def __post_init__(self) -> None:
        self._channel = self.random(KEY_BYTES)
        # (slots, 2, 32): the private mask key and the self-mask seed of each slot.
        drawn = b"".join(self.random(2 * KEY_BYTES) for _ in range(self.setup.slots))
        self._secrets: Array = np.frombuffer(drawn, np.uint8).reshape(-1, 2, KEY_BYTES).copy()
        self._near: dict[str, SlotKeys] = {}  # itself and its neighbours
        self.members: tuple[str, ...] = ()  # all of the setup, once they are known
        self.partners: tuple[str, ...] = ()  # who have shared their secrets with this client, and itself
        self._own_keys = b""
        self._shared: tuple[str, bytes] | None = None
        self._shares: dict[str, Array] = {}
        self._cohorts: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._opened: dict[int, tuple[str, bytes]] = {}

    # -- once per setup ----------------------------------------------------------------------------

    def advertise(self) -> bytes:
        """This client's public keys, signed, for all members."""
        if not self._own_keys:
            masks, bound = bytearray(), bytearray()
            for slot, (key, seed) in enumerate(self._secrets):
                masks += primitives.public_key(key.tobytes())
                bound += notes.commitment(self.setup, self.name, slot, seed.tobytes())
            channel, digest = primitives.public_key(self._channel), hashlib.sha256(masks + bound).hexdigest()
            about = notes.purpose("keys", vars(self.setup), self.name, channel.hex(), digest)
            parts = {"channel": channel, "signature": self.sign(about)}
            public = {"masks": np.frombuffer(masks, np.uint8), "commitments": np.frombuffer(bound, np.uint8)}
            arrays = {name: array.reshape(-1, KEY_BYTES) for name, array in public.items()}
            self._own_keys = notes.pack("keys", self.setup, {"name": self.name}, {**parts, **arrays})
        return self._own_keys

    def share(self, keys: bytes) -> bytes:
        """Shares of every slot's key and seed, sealed for each neighbour, whose keys `keys` are.

        Refused when a signature is missing or wrong, or the threshold is too low for so many members. Until
        the others' shares have come, the same keys have the same answer.
        """
        asked = hashlib.sha256(keys).hexdigest()
        if self._shared is not None and self._shared[0] == asked:
            return self._shared[1]
        if self._near:
            raise TermError(f"'{self.name}' has shared its secrets in this setup; they are shared once.")
        members, everybody = self._checked_members(keys)
        names, threshold = sorted(members), self.setup.threshold
        # (holders, slots, 2, 33)
        shares = np.empty((len(names), self.setup.slots, 2, SHARE_BYTES), dtype=np.uint8)
        for slot, pair in enumerate(self._secrets):
            for which in (OF_KEY, OF_SEED):
                parts = split(pair[which].tobytes(), threshold, len(names), self.random)
                shares[:, slot, which] = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, SHARE_BYTES)
        self._near, self.members, self.partners = members, tuple(everybody), (self.name,)
        own = names.index(self.name)
        self._shares[self.name] = shares[own].copy()
        others = {name: holder for holder, name in enumerate(names) if holder != own}
        arrays = {
            str(place): primitives.seal(key, shares[others[name]].tobytes(), about, self.random(NONCE_BYTES))
            for place, (name, key, about) in enumerate(self._channel_keys(others, sends=True))
        }
        note = {"name": self.name, "names": list(others)}
        self._shared = (asked, notes.pack("shares", self.setup, note, arrays))
        return self._shared[1]

    def _checked_members(self, letter: bytes) -> tuple[dict[str, SlotKeys], list[str]]:
        """The keys of this client and its neighbours, and all members' names; refused where a signature is
        wrong, others than its neighbours are among them, or the graph or threshold is not safe."""
        setup, members = self.setup, {}
        letters, everybody = notes.relayed(letter, "members", setup)
        for name, part in letters.items():
            keys = members[name] = SlotKeys.from_bytes(part, setup)
            if keys.name != name or not self.verify(name, keys.signed, keys.signature):
                raise TermError(
                    f"the keys sent under the name '{name}' are not signed by '{name}' as this site knows "
                    "it. Compare fingerprints with that site before going on."
                )
        if not self._own_keys or letters.get(self.name) != self._own_keys:
            raise TermError(f"'{self.name}' does not find its own keys among those of the members.")
        many, near = len(everybody), everybody
        if setup.degree:
            near = list(around(everybody, setup.degree, setup.circle).get(self.name, ()))
        if near != list(letters):
            raise TermError(f"'{self.name}' was not shown the keys of its {setup.degree} neighbours.")
        if setup.degree:
            check_graph(many, setup.degree, setup.threshold, self.colluders)
            if not self.drawn(setup, everybody):
                raise TermError(
                    "the order of the circle on which sites have neighbours was not drawn by these sites."
                )
        elif not notes.least_threshold(many, self.colluders) <= setup.threshold <= many:
            raise CohortError(
                f"a threshold of {setup.threshold} among {many} members is refused: it must exceed half "
                f"of the members and {self.colluders} colluders."
            )
        return members, everybody

    def receive(self, sealed: bytes) -> None:
        """Take the shares that the others sealed for this client. Who sent none cannot take part in sums."""
        self._need(bool(self._near) and len(self.partners) == 1, "shares come once, after one's own")
        parts, _ = notes.relayed(sealed, "sealed", self.setup)
        notes.check_names(sorted(set(self._near) - {self.name}), list(parts), "a note with sealed shares")
        least = len(self._near) if self.setup.degree else self.setup.least_cohort
        if len(parts) + 1 < least:
            raise CohortError(
                f"{len(parts) + 1} of {len(self._near)} members shared their secrets; at least "
                f"{least} must. Start the setup again."
            )
        found = {}
        shape = (self.setup.slots, 2, SHARE_BYTES)
        for name, key, about in self._channel_keys(parts, sends=False):
            text = np.frombuffer(primitives.unseal(key, parts[name], about), np.uint8)
            if len(text) != math.prod(shape):
                raise TermError(f"the shares of '{name}' are {len(text)} bytes, not {math.prod(shape)}.")
            found[name] = text.reshape(shape).copy()
        self._shares |= found
        self.partners = tuple(sorted(self._shares))
        self._shared = None

    def _channel_keys(self, others: Iterable[str], sends: bool) -> Iterator[tuple[str, bytes, bytes]]:
        """By name, the key for shares that this client sends to others, or gets, and what it is for."""
        # All members' keys enter, so that two who were shown different keys cannot read each other.
        state = hashlib.sha256(notes.purpose("members", list(self.members)))
        for name in () if self.setup.degree else sorted(self._near):
            state.update(hashlib.sha256(self._near[name].signed).digest())
        view = state.hexdigest()
        for name in others:
            ends = (self.name, name) if sends else (name, self.name)
            about = notes.purpose("sealed", vars(self.setup), view, *ends)
            yield name, primitives.agree(self._channel, self._near[name].channel, about), about

    # -- once per sum ------------------------------------------------------------------------------

    def mask(self, slot: int, vector: RingVector, cohort: Collection[str], context: bytes = b"") -> bytes:
        """The term with its masks, for a sum over at most this cohort. A slot serves once, then is refused.

        context: what else all must agree on; see `Question`.
        """
        names = tuple(sorted(cohort))
        self._need(len(self.partners) > 1, "shares must have been received first")
        if self.setup.degree:
            self._need(names == self.members, "with neighbours only, a sum is over all members")
        else:
            notes.check_names(self.partners, names, "the cohort of this sum")
        self._need(self.name in names, "the cohort of a sum holds who answers")
        digest = Question(self.setup, slot, names, vector.wide, len(vector.single), context).digest
        if slot in self._cohorts:
            raise TermError(
                f"slot {slot} has been used: its masks would meet a second term and show the difference. "
                "Send the stored answer again, or ask with a new slot."
            )
        key, seed = (part.tobytes() for part in self._secrets[slot])
        self._cohorts[slot] = (digest, names)
        self._secrets[slot] = 0  # the others hold what can open this sum; nobody can mask with it again
        others = {n: keys.masks[slot] for n, keys in self._near.items() if n != self.name and n in names}
        own = primitives.derive(seed, notes.purpose("self", digest, self.name))
        masked = RingVector(vector.limbs.copy(), vector.wide)
        add_masks(masked, [(own, 1), *pair_masks(digest, self.name, key, others)])
        note = {"name": self.name, "slot": slot, "question": digest, "wide": masked.wide}
        return notes.pack("masked", self.setup, note, {"limbs": masked.limbs})

    def open(
        self,
        slot: int,
        survivors: Sequence[str],
        dropped: Sequence[str],
        witnessed: tuple[Array, str] | None = None,
    ) -> bytes:
        """Shares that open the total of a sum over `survivors`, once; the same question has the same answer.

        Of a survivor the seed's share, of a dropped client the key's share. Together they must be the
        cohort that this client masked its term for.

        witnessed: the masked term that it sent, and the digest of the sum: then the fingerprint of that term,
        signed together with what it is about, goes around the shares.
        """
        there, gone = sorted(survivors), sorted(dropped)
        self._need(slot in self._cohorts, f"slot {slot} has not been used by this client")
        digest, asked = self._cohorts[slot]
        if sorted([*there, *gone]) != list(asked):
            raise TermError(
                f"slot {slot} was used for a sum over {list(asked)}; over {sorted([*there, *gone])} is "
                "another one."
            )
        self._need(self.name in there, "who is asked to open a sum is in it")
        self._need(not gone or not self.setup.degree, "with neighbours only, a sum is over all members")
        if len(there) < self.setup.least_cohort:
            raise CohortError(
                f"a sum over {len(there)} clients is not opened; it takes {self.setup.least_cohort}."
            )
        opening = notes.opening_digest(digest, there)
        if slot not in self._opened:
            note = {"name": self.name, "slot": slot, "opening": opening}
            arrays = {}
            for part, names, which in (("seeds", there, OF_SEED), ("keys", gone, OF_KEY)):
                rows = [self._shares[name][slot, which] for name in names if name in self._shares]
                arrays[part] = np.array(rows, dtype=np.uint8).reshape(-1, SHARE_BYTES)
            self._opened[slot] = (opening, notes.pack("opened", self.setup, note, arrays))
            for shares in self._shares.values():
                shares[slot] = 0
        elif self._opened[slot][0] != opening:
            raise TermError(
                f"slot {slot} has been opened for another set of clients; opening it for {there} too would "
                "show the difference between the two totals."
            )
        reply = self._opened[slot][1]
        if witnessed is None:
            return reply
        value, bound = f"{fingerprint(*witnessed):032x}", self._near[self.name].commitments[slot].tobytes()
        about = (opening, witnessed[1], self.name, value, bound.hex())
        signature = self.sign(notes.purpose("fingerprint of a term", *about))
        told = {"value": value, "signature": signature.hex()}
        return notes.pack("witnessed", self.setup, told, {"opened": reply})

    def shown(self, arrays: Mapping[str, Array], about: Any, census: str) -> tuple[Evidence, Term]:
        """The evidence for a total of a question that this client answered, and the total; refused, by name,
        where it is not the sum of the terms that its senders signed."""
        evidence = Evidence.from_parts(arrays, about)
        place, request = notes.text(about, "place"), notes.text(about, "request")
        slot, survivors, layout, masked = evidence.slot, evidence.survivors, evidence.layout, evidence.masked
        everybody = tuple(sorted([*survivors, *evidence.dropped]))
        context = notes.context_of(request, layout, census)
        asked = Question(self.setup, slot, everybody, layout.wide, layout.narrow, context)
        named = evidence.setup == self.setup and self.setup.place(slot) == place
        self._need(not named or slot in self._cohorts, f"slot {slot} has not been used by this client")
        if not named or self._cohorts[slot][0] != asked.digest:
            raise TermError(f"the total shown for slot {place} is not of a question that this site answered.")
        opening, added = notes.opening_digest(asked.digest, survivors), 0
        digest = masked.digest(opening)
        for name in survivors:
            value, signature = evidence.signed.get(name, ("0", ""))
            bound = notes.commitment(self.setup, name, slot, evidence.secrets[name])
            message = notes.purpose("fingerprint of a term", opening, digest, name, value, bound.hex())
            if not primitives.signed_by(self.verify, name, message, signature):
                raise TermError(
                    f"the total shown for slot {place} is not one that '{name}' helped to open: its "
                    "signature is missing or belongs to another sum, or to another seed."
                )
            added += int(value, 16)
        words, carries = (fingerprint(each, digest) for each in (masked.limbs, masked.carries))
        if (added - words - (carries << 64)) % PRIME:
            raise TermError(
                f"the total shown for slot {place} was not opened: it is not the sum of the terms that the "
                "sites sent."
            )
        total = unmasked(asked, masked, survivors, evidence.dropped, evidence.secrets, self._near)
        return evidence, decode(total, layout)

    def _need(self, holds: bool, what: str) -> None:
        if not holds:
            raise TermError(f"'{self.name}' is asked out of turn: {what}.")

    # -- keeping it --------------------------------------------------------------------------------

    def save(self) -> bytes:
        """Everything this client knows, secrets included: for its own disk, readable by its owner alone."""
        values = {
            "name": self.name,
            "channel": np.frombuffer(self._channel, np.uint8),
            "secrets": self._secrets,
            "own": np.frombuffer(self._own_keys, np.uint8),
            "everybody": self.members,
            "members": [np.frombuffer(keys.letter, np.uint8) for keys in self._near.values()],
            "shared": self._shared and (self._shared[0], np.frombuffer(self._shared[1], np.uint8)),
            "shares": self._shares,
            "cohorts": [(slot, *asked) for slot, asked in self._cohorts.items()],
            "opened": [
                (slot, digest, np.frombuffer(reply, np.uint8))
                for slot, (digest, reply) in self._opened.items()
            ],
        }
        arrays, note = to_parts(values, "a client")
        return to_bytes(arrays, {"secure_client": note, "setup": vars(self.setup)}, sealed=True)

    @classmethod
    def load(cls, data: bytes, sign: Sign, verify: Verify, **settings: Any) -> Client:
        """The client that `save` described, with the settings it was made with."""
        arrays, note = from_bytes(data, what="this client's secrets", error=ModelFileError)
        with undamaged("the file of this client's secrets", "It must sit this run out."):
            kept = from_parts(arrays, note["secure_client"])
            client = cls(Setup.from_note(note["setup"]), kept["name"], sign, verify, **settings)
            client.members, client._channel = kept["everybody"], kept["channel"].tobytes()
            client._secrets = notes.octets(kept, "secrets", client._secrets.shape).copy()
            client._own_keys = kept["own"].tobytes()
            letters = (SlotKeys.from_bytes(letter.tobytes(), client.setup) for letter in kept["members"])
            client._near = {keys.name: keys for keys in letters}
            client._shares = {name: shares.copy() for name, shares in kept["shares"].items()}
            client.partners = tuple(sorted(client._shares))
            if kept["shared"] is not None:
                client._shared = (kept["shared"][0], kept["shared"][1].tobytes())
            client._cohorts = {slot: (digest, names) for slot, digest, names in kept["cohorts"]}
            client._opened = {slot: (digest, reply.tobytes()) for slot, digest, reply in kept["opened"]}
        return client
