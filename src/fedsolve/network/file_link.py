"""A network of files: requests that the server leaves, answers that people bring.

What the engine would send is written to a file for all sites it is for; when it would wait, it stops, and
says for which answers. Started again with them, it comes to the same question, finds the answers, and goes
on. A message is known by its digest, so that the same question asked again is the same file.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsolve import container
from fedsolve.errors import ModelFileError, TermError
from fedsolve.network.certificates import load_certificate, load_key, verify_dates
from fedsolve.network.envelopes import Envelope, is_signed, open_envelope, signing
from fedsolve.network.keyfolder import Keys
from fedsolve.network.link import GoOn, Node, Reply
from fedsolve.network.security import registered
from fedsolve.network.wire import LARGEST, Note

_TOLD = "told"
_SHORT = 8
"""Signs of a message's digest in the name of its file."""


class Awaited(Exception):
    """The answers that a run waits for: in which file the question stands, and who has not answered it."""

    def __init__(self, request: Path, sites: Sequence[str]) -> None:
        super().__init__(f"{request}: {', '.join(sites)}")
        self.request = request
        self.sites = tuple(sites)


class FileLink:
    """The server's end: a folder with the run's mark, its requests and the answers that were brought."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        from cryptography.hazmat.primitives import serialization

        self.folder = folder
        self._sites = registered(keys)
        self._keys = {name: serialization.load_pem_public_key(site.pem) for name, site in self._sites.items()}
        self._sign = signing(load_key(keys.server_key))
        load_certificate(keys.server_certificate)  # says what is wrong with it
        self._certificate = container.read(keys.server_certificate).decode("ascii")
        self._largest = LARGEST
        self.run = self._mark()

    def _mark(self) -> str:
        path = self.folder / "run.json"
        if not path.exists():
            container.write_atomically(path, container.sealed_json({"run": secrets.token_hex(8)}))
        remedy = "Put a copy of it back, or start afresh with another state folder."
        note = container.from_sealed_json(
            container.read(path), what=str(path), error=ModelFileError, remedy=remedy
        )
        return str(note["run"])

    # -- what the engine needs -------------------------------------------------------------------

    def registered(self) -> frozenset[str] | None:
        return frozenset(self._sites)

    def nodes(self) -> dict[int, Node]:
        return {number: Node(number, name=name) for number, name in enumerate(sorted(self._sites), 1)}

    def expect(self, largest: int) -> None:
        self._largest = largest

    def send(self, nodes: Sequence[int], note: Note, payload: bytes) -> list[str]:
        if note["ask"] == "tell":  # people carry files; they are told by the command itself
            return [_TOLD] * len(nodes)
        there = self.nodes()
        names = [str(there[number].name) for number in nodes]
        message = _digest(note, payload)
        path, known = self._request(message)
        to = tuple(sorted({*names, *(() if known is None else known.to)}))
        if known is None or known.to != to:
            number = len(list(self.folder.glob("request-*.fsq"))) + 1 if known is None else known.number
            data = np.frombuffer(payload, np.uint8)
            envelope = Envelope(
                "request", self.run, message, "server", dict(note), data, to, number, self._certificate
            )
            path = self.folder / f"request-{number}-{message[:_SHORT]}.fsq"
            container.write_atomically(path, envelope.seal(self._sign))
        return [f"{message}/{name}" for name in names]

    def receive(self, message: str, go_on: GoOn) -> Reply | None:
        if message == _TOLD:
            return Reply({})
        digest, name = message.split("/")
        path = self._answer(digest, name)
        if not path.exists():
            request, asked = self._request(digest)
            assert asked is not None
            raise Awaited(request, [site for site in asked.to if not self._answer(digest, site).exists()])
        answer = self._open(path)
        if answer.payload.nbytes > self._largest:
            return Reply(
                {},
                failure=f"{answer.payload.nbytes:,} bytes; at most {self._largest:,} are taken",
                damaged=True,
            )
        return Reply(answer.note, answer.payload)

    # -- what people bring -----------------------------------------------------------------------

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
        data = container.read(path)
        if kept.exists():
            before = self._open(kept)
            if _said(before) == _said(answer):
                return f"'{answer.sender}' has answered {request.name} already, with the same"
            if started or asked.note["ask"] != "describe":
                raise TermError(
                    f"{path}: '{answer.sender}' has answered {request.name} before, and otherwise. The first "
                    "answer counts; find out why there are two."
                )
        container.write_atomically(kept, data, private=True)
        return None

    def _open(self, path: Path) -> Envelope:
        def verify(envelope: Envelope, body: bytes, signature: bytes) -> bool:
            if envelope.sender not in self._keys:
                raise TermError(
                    f"{path} says it is from '{envelope.sender}', who is not registered. "
                    "Register it by its public key: fedsolve keys register NAME.pub"
                )
            return is_signed(self._keys[envelope.sender], body, signature)  # type: ignore[arg-type]

        return open_envelope(container.read(path), str(path), "answer", verify)

    def _request(self, message: str) -> tuple[Path, Envelope | None]:
        """The file in which a message was asked, if it was."""
        for path in self.folder.glob(f"request-*-{message[:_SHORT]}.fsq"):
            envelope = open_envelope(container.read(path), str(path), "request", lambda *_: True)
            if envelope.message == message:
                return path, envelope
        return self.folder, None

    def _answer(self, message: str, name: str) -> Path:
        return self.folder / "answers" / f"{message[:32]}-{name}.fst"


def _digest(note: Note, payload: bytes) -> str:
    """Under what a message is known. What sites have is asked once, whatever the run has learnt since."""
    named = {name: note[name] for name in ("ask", "run", "schema")} if note["ask"] == "describe" else note
    return hashlib.sha256(container.canonical_json(named).encode() + b"|" + payload).hexdigest()


def _said(answer: Envelope) -> tuple[str, bytes]:
    return container.canonical_json(answer.note), answer.payload.tobytes()


def open_request(path: Path, authority: Path) -> Envelope:
    """A request in a file, which the server signed that this authority vouches for."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    trusted = load_certificate(authority)

    def verify(envelope: Envelope, body: bytes, signature: bytes) -> bool:
        try:
            certificate: x509.Certificate = x509.load_pem_x509_certificate(envelope.certificate.encode())
            certificate.verify_directly_issued_by(trusted)
        except (ValueError, TypeError, InvalidSignature):
            return False
        verify_dates(path, certificate, "The server's certificate is too old: fedsolve keys renew, there.")
        return is_signed(certificate.public_key(), body, signature)  # type: ignore[arg-type]

    return open_envelope(container.read(path), str(path), "request", verify)
