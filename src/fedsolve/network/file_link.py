"""A network of files: requests that the server leaves, answers that people bring.

What the engine would send is written to a file for all sites it is for (secure sums have letters that differ
from site to site: a file for each); when it would wait, it stops, and says for which answers. Started again
with them, it comes to the same question, finds the answers, and goes on. A message is known by its digest, so
that the same question asked again is the same file.

A file is a sealed container with the note and the payload that would travel over a network, and a signature
by the sender's P-256 key (ECDSA, SHA-256). A request carries the server's certificate, which a site checks
against the authority's; an answer names a site, whose key the server has.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve import container, version
from fedsolve.arrays import Array
from fedsolve.errors import ModelFileError, TermError
from fedsolve.network.certificates import Validity, load_certificate, load_key
from fedsolve.network.ciphers import ec, exceptions, hashes, serialization, x509
from fedsolve.network.keyfolder import Keys
from fedsolve.network.link import Link, Node, Reply
from fedsolve.network.parcels import Note

_TOLD = "told"
_SLACK = 1 << 20
"""Bytes of an answer besides its numbers."""
_SHORT = 8
"""Signs of a message's digest in the name of its file."""

_KINDS = {"request": "a request (.fsq)", "answer": "a site's answer (.fst)"}
_REMEDY = "Carry it here again."
_TAG = b"fedsolve envelope 1|"
"""Stands before what is signed, so that a signature means nothing elsewhere."""


@dataclass(frozen=True)
class Envelope:
    """A message of a run as a file: what is said is `note` and `payload`.

    sender:  the site that answers; "server" for a request. to: the sites that a request is for.
    message: the digest by which a request is known; an answer names that of its request.
    """

    kind: Literal["request", "answer"]
    run: str
    message: str
    sender: str
    note: dict[str, Any]
    payload: Array
    to: tuple[str, ...] = ()
    number: int = 0
    certificate: str = ""

    def _parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        note = vars(self) | {"envelope": version.ENVELOPE}
        return {"payload": note.pop("payload")}, note

    def seal(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        """The bytes of the file, signed with this key."""
        arrays, about = self._parts()
        signature = key.sign(_TAG + container.to_bytes(arrays, about), ec.ECDSA(hashes.SHA256()))
        return container.to_bytes(arrays, {**about, "signature": signature.hex()}, sealed=True)

    def signed_by(self, key: Any, signature: str) -> bool:
        try:
            text = _TAG + container.to_bytes(*self._parts())
            key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
        except (exceptions.InvalidSignature, ValueError):
            return False
        return True


def open_envelope(path: Path, kind: str, verify: Callable[[Envelope, str], bool]) -> Envelope:
    """The message in a file; one that is damaged, altered, of another kind or not signed is refused."""
    data = container.read(path)
    arrays, note = container.from_bytes(data, what=str(path), error=ModelFileError, remedy=_REMEDY)
    if note.pop("envelope", None) != version.ENVELOPE:
        raise ModelFileError(f"{path} is no message of version {version.ENVELOPE}, or of another fedsolve.")
    if note.get("kind") != kind:
        raise ModelFileError(f"{path} is of kind {note.get('kind')!r}; {_KINDS[kind]} is needed.")
    try:
        signature = str(note.pop("signature"))
        envelope = Envelope(payload=arrays["payload"], **{**note, "to": tuple(note["to"])})
    except (KeyError, TypeError) as problem:
        raise ModelFileError(f"{path} is incomplete ({problem}). {_REMEDY}") from problem
    if not verify(envelope, signature):
        raise TermError(
            f"{path} is not signed by the one it says it is from ('{envelope.sender}'). It was altered on "
            "its way, or another key was used. Ask the sender, by telephone."
        )
    return envelope


class Awaited(Exception):
    """The answers that a run waits for, by the file in which a question stands: who has not answered it."""

    def __init__(self, requests: Mapping[Path, tuple[str, ...]]) -> None:
        super().__init__("; ".join(f"{path}: {', '.join(sites)}" for path, sites in requests.items()))
        self.requests = dict(requests)

    @property
    def sites(self) -> tuple[str, ...]:
        """All who have not answered."""
        return tuple(sorted({name for sites in self.requests.values() for name in sites}))


class FileLink(Link):
    """The server's end: a folder with the run's mark, its requests and the answers that were brought.

    A run is for the sites that are registered when it begins, and as it begins, secure or not, it goes on.
    """

    def __init__(self, folder: Path, keys: Keys, secure: bool = False) -> None:
        self.folder = folder
        self._sites = keys.registered.sites()
        self._keys = {name: serialization.load_pem_public_key(site.pem) for name, site in self._sites.items()}
        self._key = load_key(keys.server_key)
        load_certificate(keys.server_certificate)  # says what is wrong with it
        self._certificate = container.read(keys.server_certificate).decode("ascii")
        self._sent: dict[str, int] = {}
        mark = self._mark(secure)
        self.run, self._members = str(mark["run"]), frozenset(mark["sites"])
        asked = [int(path.name.split("-")[1]) for path in self.folder.glob("request-*-*.fsq")]
        self._round = 1 + max(asked, default=0)

    def _mark(self, secure: bool) -> dict[str, Any]:
        path = self.folder / "run.json"
        if not path.exists():
            mark = {"run": secrets.token_hex(8), "sites": sorted(self._sites), "secure": secure}
            container.write_atomically(path, container.sealed_json(mark))
        remedy = "Put a copy of it back, or start afresh with another state folder."
        data = container.read(path)
        note = container.from_sealed_json(data, what=str(path), error=ModelFileError, remedy=remedy)
        if note.get("secure") != secure:
            how, remedy = ("in the open", "Give") if secure else ("in secure sums", "Leave out")
            begun = f"{self.folder} holds a run that was begun {how}."
            raise ModelFileError(f"{begun} {remedy} --plain, or choose another state folder.")
        return note

    def registered(self) -> frozenset[str] | None:
        return frozenset(self._sites)

    def nodes(self) -> dict[int, Node]:
        there = sorted(self._members & self._sites.keys())
        return {number: Node(number, name=name) for number, name in enumerate(there, 1)}

    def send(self, nodes: Sequence[int], note: Note, payload: bytes, largest: int = 0) -> list[str]:
        if note["ask"] == "tell":  # people carry files; they are told by the command itself
            return [_TOLD] * len(nodes)
        there = self.nodes()
        names = [str(there[number].name) for number in nodes]
        message = _digest(note, payload)
        path, known = self._request(message)
        asked = there if note["ask"] == "describe" else nodes
        to = tuple(sorted({*(str(there[number].name) for number in asked), *(known.to if known else ())}))
        if known is None or known.to != to:
            number = self._round if known is None else known.number
            data = np.frombuffer(payload, np.uint8)
            about = message, "server", dict(note), data, to, number, self._certificate
            envelope = Envelope("request", self.run, *about)
            for_whom = f"{to[0]}-" if len(to) == 1 else ""
            path = self.folder / f"request-{number}-{for_whom}{message[:_SHORT]}.fsq"
            container.write_atomically(path, envelope.seal(self._key))
        sent = [f"{message}/{name}" for name in names]
        self._sent.update(dict.fromkeys(sent, largest))
        return sent

    def receive(self, message: str) -> Reply | None:
        if message == _TOLD:
            return Reply({})
        digest, name = message.split("/")
        path = self._answer(digest, name)
        if not path.exists():
            raise Awaited(self._unanswered())
        size, most = path.stat().st_size, self._sent[message] + _SLACK
        if size > most:  # not read: it may be more than the memory holds
            return Reply({}, failure=f"{size:,} bytes; at most {most:,} are taken", damaged=True)
        answer = self._open(path)
        return Reply(answer.note, answer.payload)

    def _unanswered(self) -> dict[Path, tuple[str, ...]]:
        """The files whose questions are open, and who has not answered them."""
        waiting: dict[Path, tuple[str, ...]] = {}
        for message in self._sent:
            digest, name = message.split("/")
            if not self._answer(digest, name).exists():
                path = self._request(digest)[0]
                waiting[path] = (*waiting.get(path, ()), name)
        return waiting

    def take(self, path: Path, started: bool) -> str | None:
        """Keep a site's answer; a sentence where there was nothing to keep. Whatever is wrong is refused.

        started: whether the run has begun; until then a site may describe itself anew.
        """
        answer = self._open(path)
        if answer.run != self.run:
            raise TermError(f"{path} belongs to another run ({answer.run}); this one is {self.run}.")
        request, asked = self._request(answer.message)
        if asked is None:
            raise TermError(
                f"{path} answers a question that this run has not asked. It was made for another state "
                "folder, or for an older copy of this one."
            )
        if answer.sender not in asked.to:
            raise TermError(f"{path} is from '{answer.sender}', who was not asked {request.name}.")
        kept = self._answer(answer.message, answer.sender)
        if kept.exists():
            before = self._open(kept)
            if (before.note, before.payload.tobytes()) == (answer.note, answer.payload.tobytes()):
                return f"'{answer.sender}' has answered {request.name} already, with the same"
            if started or asked.note["ask"] != "describe":
                raise TermError(
                    f"{path}: '{answer.sender}' has answered {request.name} before, and otherwise. The first "
                    "answer counts; find out why there are two."
                )
        container.write_atomically(kept, container.read(path), private=True)
        return None

    def _open(self, path: Path) -> Envelope:
        def verify(envelope: Envelope, signature: str) -> bool:
            if envelope.sender not in self._keys:
                raise TermError(
                    f"{path} says it is from '{envelope.sender}', who is not registered. "
                    "Register it by its public key: fedsolve keys register NAME.pub"
                )
            return envelope.signed_by(self._keys[envelope.sender], signature)

        return open_envelope(path, "answer", verify)

    def _request(self, message: str) -> tuple[Path, Envelope | None]:
        """The file in which a message was asked, if it was."""
        for path in self.folder.glob(f"request-*-{message[:_SHORT]}.fsq"):
            envelope = open_envelope(path, "request", lambda *_: True)
            if envelope.message == message:
                return path, envelope
        return self.folder, None

    def _answer(self, message: str, name: str) -> Path:
        return self.folder / "answers" / f"{message[:32]}-{name}.fst"


def _digest(note: Note, payload: bytes) -> str:
    """Under what a message is known. What sites have is asked once, whatever the run has learnt since."""
    named = note
    if note["ask"] == "describe":
        named = {name: note[name] for name in ("ask", "run", "schema", "secure")}
    return hashlib.sha256(container.canonical_json(named).encode() + b"|" + payload).hexdigest()


def open_request(path: Path, authority: Path) -> Envelope:
    """A request in a file, which the server signed that this authority vouches for."""
    trusted = load_certificate(authority)

    def verify(envelope: Envelope, signature: str) -> bool:
        try:
            certificate: x509.Certificate = x509.load_pem_x509_certificate(envelope.certificate.encode())
            certificate.verify_directly_issued_by(trusted)
        except (ValueError, TypeError, exceptions.InvalidSignature):
            return False
        renew = "The server's certificate is too old: fedsolve keys renew, there."
        Validity.of(certificate, "the server's certificate", renew).check(path)
        return envelope.signed_by(certificate.public_key(), signature)

    return open_envelope(path, "request", verify)
