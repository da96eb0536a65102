"""Signatures of key messages with P-256 keys: a site's own, checked against the roster that a site keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsolve.errors import DataError
from fedsolve.privacy import MISSING_LIBRARY

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError as problem:
    raise DataError(MISSING_LIBRARY) from problem

Sign = Callable[[bytes], bytes]
"""Gives the signature of a message."""

Verify = Callable[[str, bytes, bytes], bool]
"""Tells, of a name, a message and a signature, whether the bearer of that name signed the message."""


def signer(key: ec.EllipticCurvePrivateKey) -> Sign:
    """Signs messages with a P-256 key (ECDSA, SHA-256)."""
    _check_curve(key.curve, "the key that signs")
    return lambda message: key.sign(message, ec.ECDSA(hashes.SHA256()))


Roster = Mapping[str, ec.EllipticCurvePublicKey]


def verifier(roster: Roster | Callable[[], Roster]) -> Verify:
    """Tells whether a message is signed by the one whom the roster calls so; who is not in it never is.

    roster: or what gives it at any moment.
    """
    latest: Callable[[], Roster] = roster if callable(roster) else lambda: roster
    for name, key in latest().items():
        _check_curve(key.curve, f"the key of '{name}'")

    def verify(name: str, message: bytes, signature: bytes) -> bool:
        key = latest().get(name)
        if key is None:
            return False
        try:
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    return verify


def _check_curve(curve: ec.EllipticCurve, whose: str) -> None:
    if not isinstance(curve, ec.SECP256R1):
        raise DataError(f"{whose} must be a P-256 key; it is on {curve.name}.")


def signed_by(verify: Verify, name: str, message: bytes, signature: Any) -> bool:
    """Whether this is somebody's signature, in hexadecimal; a damaged one is nobody's."""
    try:
        return verify(name, message, bytes.fromhex(signature))
    except (TypeError, ValueError):
        return False
