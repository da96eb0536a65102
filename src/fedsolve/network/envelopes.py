"""Messages of a run as signed files: a server's request, a site's answer.

A file is a sealed container with the bytes of a message, `body`, and a `signature` of them by the sender's
P-384 key (ECDSA, SHA-384). The body is a container too: the note and the payload of a message as they would
travel over a network, the sender, the run, and the message that it is or answers. A request carries the
server's certificate, which a site checks against the authority's; an answer names a site, whose key the
server has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve import container, formats
from fedsolve.container import Array
from fedsolve.errors import ModelFileError, TermError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

Kind = Literal["request", "answer"]
_REMEDY = "Carry it here again."


@dataclass(frozen=True)
class Envelope:
    """A message of a run on its way.

    sender:  the site that answers; "server" for a request. to: the sites that a request is for.
    message: the digest by which a request is known; an answer names that of its request.
    note, payload: what is said. certificate: the server's, in PEM form.
    """

    kind: Kind
    run: str
    message: str
    sender: str
    note: dict[str, Any]
    payload: Array
    to: tuple[str, ...] = ()
    number: int = 0
    certificate: str = ""

    def seal(self, sign: Callable[[bytes], bytes]) -> bytes:
        """The bytes of the file."""
        about = {name: value for name, value in vars(self).items() if name != "payload"}
        body = container.to_bytes({"payload": self.payload}, {"envelope": formats.ENVELOPE.version, **about})
        arrays = {"body": np.frombuffer(body, np.uint8), "signature": np.frombuffer(sign(body), np.uint8)}
        return container.to_bytes(
            arrays, {"envelope": formats.ENVELOPE.version, "kind": self.kind}, sealed=True
        )


def open_envelope(
    data: bytes, what: str, kind: Kind, verify: Callable[[Envelope, bytes, bytes], bool]
) -> Envelope:
    """The message in a file, which its sender signed; what is damaged, altered or of another kind is refused.

    verify: whether the signature of these bytes is that of the one who sent the envelope.
    """
    arrays, about = container.from_bytes(data, what=what, error=ModelFileError, remedy=_REMEDY)
    if about.get("envelope") != formats.ENVELOPE.version:
        raise ModelFileError(
            f"{what} is not a message of version {formats.ENVELOPE.version}. "
            "It is something else, or of another fedsolve."
        )
    if about.get("kind") != kind:
        raise ModelFileError(
            f"{what} holds a message of kind {about.get('kind')!r}; {_ARTICLE[kind]} is needed."
        )
    try:
        body, signature = arrays["body"].tobytes(), arrays["signature"].tobytes()
        inner, note = container.from_bytes(body, what=what, error=ModelFileError, remedy=_REMEDY)
        if note.pop("envelope") != formats.ENVELOPE.version or note["kind"] != kind:
            raise ModelFileError(f"{what} says otherwise outside than inside. {_REMEDY}")
        envelope = Envelope(payload=inner["payload"], **{**note, "to": tuple(note["to"])})
    except (KeyError, TypeError) as problem:
        raise ModelFileError(f"{what} is incomplete ({problem}). {_REMEDY}") from problem
    if not verify(envelope, body, signature):
        raise TermError(
            f"{what} is not signed by the one it says it is from ('{envelope.sender}'). It was altered on "
            "its way, or another key was used. Ask the sender, by telephone."
        )
    return envelope


_ARTICLE = {"request": "a request (.fsq)", "answer": "a site's answer (.fst)"}


def signing(key: ec.EllipticCurvePrivateKey) -> Callable[[bytes], bytes]:
    """Signs with this key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return lambda body: key.sign(_tagged(body), ec.ECDSA(hashes.SHA384()))


def is_signed(key: ec.EllipticCurvePublicKey, body: bytes, signature: bytes) -> bool:
    """Whether the holder of this key signed these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(signature, _tagged(body), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def _tagged(body: bytes) -> bytes:
    """What is signed: never bytes that mean something elsewhere."""
    return b"fedsolve envelope 1|" + body
