"""What a site and the gate agree on before a site may call: who both are, and a key for all further calls.

    GET  greeting   -> {"wire": VERSION, "challenge": ...}
    POST hello      {"wire", "key", "server", "challenge", "process", "share", "signature"}
                    -> {"session", "share", "wait"}
    GET  about      -> {"site": NAME, ...}, for one who signs the challenge and asks whether he is known
    POST pull, answer/ID, leave                            each with the headers of `Call`

The hello is signed with the site's P-384 key, once for a connection: over the server's identity (the SHA-256
of the certificate that the site sees), the gate's challenge, this process and a one-time X25519 share. Gate
and site make the key of the session of both shares, so that a hello that somebody else sends again is of no
use to him. Every call after it carries an HMAC-SHA-256 over its method, path, the SHA-256 of its body, the
server's identity, the session and a counter: made for one call on one server, once.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsolve import formats

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PREFIX = "/v1/fedsolve/"
ABOUT = f"{PREFIX}about"
GREETING = f"{PREFIX}greeting"
HELLO = f"{PREFIX}hello"
PULL = f"{PREFIX}pull"
ANSWER = f"{PREFIX}answer/"
LEAVE = f"{PREFIX}leave"

SESSION, COUNTER, SERVER = "fedsolve-session", "fedsolve-counter", "fedsolve-server"
BODY, MAC, MESSAGE, DROPPED = "fedsolve-body", "fedsolve-mac", "fedsolve-message", "fedsolve-dropped"
"""Names of headers. MESSAGE and DROPPED are the gate's: which message it hands over, and which of those that
the site has nobody waits for any more."""

KEY, CHALLENGE, SIGNATURE = "fedsolve-key", "fedsolve-challenge", "fedsolve-signature"
"""Names of the headers with which a site asks whether it is known."""

INSECURE = "insecure"
"""The identity of a server without a certificate."""

NOTHING = hashlib.sha256(b"").hexdigest()

# What the node does about a refusal depends on its reason.
UNKNOWN_SESSION, REPLACED, UNREGISTERED, OTHER_WIRE = (
    "unknown session",
    "replaced",
    "unregistered",
    "other wire",
)
UNWANTED = "unwanted"


def identity(certificate: bytes | None) -> str:
    """By what a server is known: the SHA-256 of its certificate (DER), where it has one."""
    return INSECURE if certificate is None else hashlib.sha256(certificate).hexdigest()


def hello_text(server: str, challenge: str, process: str, share: bytes) -> bytes:
    """What a site signs when it says hello."""
    return _text("hello", server, challenge, process, share.hex())


def about_text(challenge: str) -> bytes:
    """What a site signs that only asks whether it is known."""
    return _text("about", challenge)


def sign_text(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """A site's signature of one of these texts."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return key.sign(text, ec.ECDSA(hashes.SHA384()))


def signed_text(pem: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the holder of this public key signed this text."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_pem_public_key(pem)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(signature, text, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def new_share() -> tuple[X25519PrivateKey, bytes]:
    """One side's part of a session's key: what it keeps, and what it sends."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    kept = X25519PrivateKey.generate()
    return kept, kept.public_key().public_bytes_raw()


def session_key(kept: X25519PrivateKey, other: bytes, session: str, hello: bytes) -> bytes:
    """The key that both ends of a session have; ValueError where the other share is none."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = kept.exchange(X25519PublicKey.from_public_bytes(other))
    info = _text("session", session, hashlib.sha256(hello).hexdigest())
    return HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(secret)


@dataclass(frozen=True)
class Call:
    """A call on a session. body: the SHA-256 of what is sent with it."""

    method: str
    path: str
    body: str
    server: str
    session: str
    counter: int

    def mac(self, key: bytes) -> str:
        """The proof that this call is made by who has the session's key."""
        text = _text("call", self.method, self.path, self.body, self.server, self.session, str(self.counter))
        return hmac.new(key, text, hashlib.sha256).hexdigest()

    def headers(self, key: bytes) -> dict[str, str]:
        return {
            SESSION: self.session,
            COUNTER: str(self.counter),
            SERVER: self.server,
            BODY: self.body,
            MAC: self.mac(key),
        }


def _text(*parts: str) -> bytes:
    # None of the parts has an end of line in it: hex digits, paths and words.
    return "\n".join((f"fedsolve wire {formats.WIRE.version}", *parts)).encode()
