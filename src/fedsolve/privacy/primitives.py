"""The few functions of the library `cryptography` that secure sums use: keys, seals, masks and signatures.

Key messages are signed with P-256 keys: a site's own, checked against the roster that a site keeps.

A mask is as long as a ring vector. Bytes of its stream go to the numbers of two limbs first, `CHUNK` of them
at a time, the lower limbs of a chunk before its upper ones, then to the numbers of one limb. That order,
chunk size included, is part of the protocol: both ends must draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedsolve.errors import DataError, TermError
from fedsolve.privacy import MISSING_LIBRARY
from fedsolve.privacy.ring import CHUNK, RingVector

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as problem:
    raise DataError(MISSING_LIBRARY) from problem

KEY_BYTES = 32
"""Of an X25519 key, private or public, of an AES-256 key and of a self-mask seed."""

NONCE_BYTES, TAG_BYTES = 12, 16
"""Of AES-256-GCM: what stands before and after the encrypted text."""


def public_key(private: bytes) -> bytes:
    """The X25519 public key of 32 private bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


_private_key = lru_cache(maxsize=8)(X25519PrivateKey.from_private_bytes)
"""One key meets those of all neighbours in turn."""


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The AES-256 key that two X25519 key pairs have in common for one purpose (HKDF-SHA256)."""
    try:
        shared = _private_key(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as problem:  # a point of small order would give a key that everybody knows
        raise TermError("a public key is not a usable X25519 key; its owner must make new ones.") from problem
    return derive(shared, purpose)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """The AES-256 key that follows from a secret for one purpose (HKDF-SHA256)."""
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(secret)


def key_stream(key: bytes) -> Any:
    """A generator of AES-256-CTR bytes: `update_into(zeros, buffer)` gives the next ones.

    The counter starts at 0, so a key may serve one stream only.
    """
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


def seal(key: bytes, text: bytes, context: bytes, nonce: bytes) -> bytes:
    """The text encrypted and authenticated together with its context (AES-256-GCM), nonce first."""
    return nonce + AESGCM(key).encrypt(nonce, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """The text of `seal`; refused when it was changed or belongs elsewhere."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as problem:
        raise TermError("an encrypted share was damaged, or was sealed for somebody else.") from problem


_ZEROS = memoryview(bytes(16 * CHUNK))


def add_masks(vector: RingVector, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add to a vector, in place, the mask of each key with its sign (1 or -1).

    All masks are applied to one chunk before the next, so that a chunk is read from memory once however
    many there are.
    """
    streams = [(key_stream(key), np.add if sign > 0 else np.subtract) for key, sign in masks]
    room = bytearray(16 * CHUNK + 16)  # the library asks for room of one block more than it writes
    drawn = np.frombuffer(room, dtype="<u8", count=2 * CHUNK)
    flags = np.empty(CHUNK, dtype=bool)
    for start in range(0, vector.wide, CHUNK):
        low, high = vector.low[start : start + CHUNK], vector.high[start : start + CHUNK]
        lower, upper, carry = drawn[: len(low)], drawn[len(low) : 2 * len(low)], flags[: len(low)]
        for stream, combine in streams:
            stream.update_into(_ZEROS[: 16 * len(low)], room)
            if combine is np.subtract:
                np.less(low, lower, out=carry)
            combine(low, lower, out=low)
            if combine is np.add:
                np.less(low, lower, out=carry)  # a sum smaller than an addend has wrapped around
            combine(high, upper, out=high)
            combine(high, carry, out=high)
    single = vector.single
    for start in range(0, len(single), 2 * CHUNK):
        part = single[start : start + 2 * CHUNK]
        for stream, combine in streams:
            stream.update_into(_ZEROS[: 8 * len(part)], room)
            combine(part, drawn[: len(part)], out=part)


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
